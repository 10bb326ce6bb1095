"""Cases that do not yet do what is expected of them, by topic; an entry goes when its topic is done.

A case is named ``name`` where the trainer is meant, and ``name@vgpu`` for the virtual device.
"""

from __future__ import annotations

PENDING: dict[str, tuple[str, ...]] = {}
"""From a topic to its cases."""


def pending(name: str, way: str) -> str | None:
    """Return the topic for which a case waits; ``None`` for one that is as expected."""
    key = name if way == "trainer" else f"{name}@{way}"
    return next((topic for topic, names in PENDING.items() if key in names), None)


FUZZ_PENDING: tuple[str, ...] = ()
"""Topics that the grammar of random models leaves out until they are done."""
