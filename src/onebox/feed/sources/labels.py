"""Names of classes, and the labels that number them."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.errors import UsageError


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
