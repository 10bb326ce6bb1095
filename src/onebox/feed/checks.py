"""Argument checks shared by the feed's classes."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes as a tuple.

    Raises:
        UsageError: There is no name, a name occurs twice, or one string is given in place of several.
    """
    if isinstance(classes, str) or not classes:
        raise UsageError(f"classes are {classes!r}; they have to be a sequence of names, one at least.")
    twice = (
        sorted({name for name in classes if list(classes).count(name) > 1}) if len(set(classes)) < len(classes) else []
    )
    if twice:
        raise UsageError(f"classes has {twice[0]!r} more than once; each is named once.")
    return tuple(classes)
