"""The allow-lists: the only operators that a worker runs.

They are pinned beside this file, in ``operators.txt`` (for programs, which are functional) and ``operators_eager.txt``
(for kernels, which may write to their arguments, too). ``tests/kit/operator_rules.py`` makes them from the schemas of
PyTorch by rules, and a test compares, so that a new PyTorch cannot extend the lists without a review of the difference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources

from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import overload

PROGRAMS = "operators.txt"
"""The list of operators of programs."""

EAGER = "operators_eager.txt"
"""The list of operators of kernels; it includes all operators of programs."""


KINDS = "operator_kinds.txt"
"""The kinds of operators of both lists that need no rules of arguments; all others have some
(:mod:`.argument_rules`)."""


def _lines(file: str) -> list[str]:
    text = resources.files("onebox.worker.sandbox").joinpath(file).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@functools.cache
def pinned_names(file: str = PROGRAMS) -> frozenset[str]:
    """Return a pinned allow-list."""
    return frozenset(_lines(file))


@functools.cache
def kinds() -> Mapping[str, str]:
    """Return the kind of each operator of which no argument leads a kernel out of memory, by its name."""
    found: dict[str, str] = {}
    kind = ""
    for line in _lines(KINDS):
        if line.startswith(" "):
            found |= dict.fromkeys(line.split(), kind)
        else:
            kind = line
    return found


def allowed(name: str, file: str = PROGRAMS) -> OpOverload:
    """Return an operator of an allow-list.

    Raises:
        WireError: It is not on the list, or this torch does not have it.
    """
    if name not in pinned_names(file):
        raise WireError(f"operator {name!r} is not on the allow-list of this worker")
    return overload(name)
