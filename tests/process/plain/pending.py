"""Cases that do not yet do what is expected of them, by topic; an entry goes when its topic is done.

A case is named ``name`` where the trainer is meant, and ``name@vgpu`` for the virtual device.
"""

from __future__ import annotations

<<<<<<< HEAD
PENDING: dict[str, tuple[str, ...]] = {}
=======
PENDING: dict[str, tuple[str, ...]] = {
    "errors that do not help": (
        "inputs_of_another_width",
        "lstm_with_samples_second_and_as_many_steps",
        "float32_for_a_float64_model",
        "scripted_model",
        "targets_of_int32",
        "targets_of_int32@vgpu",
    ),
    "reduction of the loss": (
        "class_weights",
        "class_weights_said",
        "class_weights_said@vgpu",
        "class_weights_said_with_micro_batches",
        "class_weights_said_with_micro_batches@vgpu",
        "contrastive_over_the_batch",
        "ignored_targets",
        "ignored_targets_said",
        "ignored_targets_said@vgpu",
        "mean_said",
        "sum_over_samples",
        "sum_over_samples_said",
        "sum_over_samples_said_with_micro_batches",
        "sync_batch_norm",
    ),
    "values that changed since the capture": ("eval_mode_between_steps",),
    "buffers": ("buffer_written_by_an_evaluation",),
    "weights changed by hand": (
        "adversaries_with_pull",
        "adversaries_without_pull",
        "buffer_changed_after_pull",
        "parameter_replaced",
        "state_dict_loaded_after_pull",
        "weights_changed_after_pull",
        "weights_changed_through_data",
        "weights_changed_without_pull",
        "weights_clamped_after_each_step",
    ),
    "state of the optimizer": (
        "state_of_the_optimizer_after_pull",
        "state_of_the_optimizer_loaded_between_steps",
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
>>>>>>> main
"""From a topic to its cases."""


def pending(name: str, way: str) -> str | None:
    """Return the topic for which a case waits; ``None`` for one that is as expected."""
    key = name if way == "trainer" else f"{name}@{way}"
    return next((topic for topic, names in PENDING.items() if key in names), None)


FUZZ_PENDING: tuple[str, ...] = ()
"""Topics that the grammar of random models leaves out until they are done."""
