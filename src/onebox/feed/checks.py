"""Argument checks shared by the feed's classes."""

from __future__ import annotations

from onebox.errors import UsageError


def require_int(name: str, value: object, *, least: int | None = None) -> None:
    """Raise unless ``value`` is an integer (a bool is not) of at least ``least``.

    Args:
        name: Name of the value, for the message.
        value: The value.
        least: Smallest allowed value; None for no limit.

    Raises:
        UsageError: It is not.
    """
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and (least is None or value >= least):  # type: ignore[operator]
        return
    allowed = "an integer" if least is None else f"an integer of at least {least}"
    raise UsageError(f"{name} is {value!r}; it has to be {allowed}.")
