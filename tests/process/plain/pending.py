"""Cases that do not yet do what is expected of them, by topic; an entry goes when its topic is done.

A case is named ``name`` where the trainer is meant, and ``name@vgpu`` for the virtual device.
"""

from __future__ import annotations

PENDING: dict[str, tuple[str, ...]] = {
    "errors that do not help": (
        "lstm_with_samples_second_and_as_many_steps",
        "scripted_model",
        "targets_of_int32@vgpu",
    ),
    "state of Python": (
        "counter_as_an_attribute",
        "numpy_generator",
    ),
    "values that changed since the capture": ("eval_mode_between_steps",),
    "buffers": ("buffer_written_by_an_evaluation",),
    "weights changed by hand": (
        "adversaries_with_pull",
        "adversaries_without_pull",
        "parameter_replaced",
    ),
    "inputs and losses of steps": (
        "loss_as_a_number",
        "loss_written_as_json",
    ),
    "virtual devices": (
        "hook_on_a_parameter_before_the_model_moves@vgpu",
        "scripted_model@vgpu",
        "sparse_embedding_bag@vgpu",
        "weight_norm_by_a_hook@vgpu",
    ),
}
"""From a topic to its cases."""


def pending(name: str, way: str) -> str | None:
    """Return the topic for which a case waits; ``None`` for one that is as expected."""
    key = name if way == "trainer" else f"{name}@{way}"
    return next((topic for topic, names in PENDING.items() if key in names), None)


FUZZ_PENDING: tuple[str, ...] = ("hand", "mode", "no mean", "parameter hook", "sum")
"""Topics that the grammar of random models leaves out until they are done."""
