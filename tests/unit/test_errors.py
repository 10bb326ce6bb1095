"""The exception tree: as drawn, with fields, and with the bases that a caller may expect."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from onebox import errors
from onebox.errors import (
    CaptureError,
    CheckpointError,
    DataError,
    OneboxError,
    OperatorError,
    PlanError,
    UsageError,
    WorkerDied,
    WorkerError,
)

KINDS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}


def drawn() -> dict[str, str]:
    """Return the parent of each class in the picture at the top of the file."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}((?:[│ ]   )*)(?:[├└]── )?(\w+)", line)
        if match and match[2] in KINDS:
            depth = len(match[1]) // 4 + ("── " in line)
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_tree_is_as_it_is_drawn() -> None:
    assert drawn() == {name: kind.__bases__[0].__name__ for name, kind in KINDS.items()}


@pytest.mark.feature("Errors: Tell errors apart by class and exit status")
def test_everything_is_an_onebox_error() -> None:
    assert all(issubclass(kind, OneboxError) for kind in KINDS.values())
    assert all(inspect.getdoc(kind) for kind in KINDS.values())


def test_a_wrong_argument_is_a_value_error_too() -> None:
    assert issubclass(UsageError, ValueError)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (PlanError, {"stage": 2, "device": 1, "missing_bytes": 4096}),
        (CaptureError, {"where": "model.py:3"}),
        (DataError, {"path": "a.gz", "sample": 7}),
        (CheckpointError, {"path": "folder"}),
        (WorkerError, {"worker": 1, "host": "box", "device": "cpu"}),
        (
            OperatorError,
            {"operator": "aten.mm.default", "shapes": "float32[2]", "worker": 1, "host": "b", "device": "c"},
        ),
        (WorkerDied, {"exit_status": -9, "last_words": "help", "worker": 1, "host": "b", "device": "c"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fields_are_kept_and_the_message_is_the_message(kind: Any, fields: dict[str, Any]) -> None:
    error = kind("what happened", **fields)
    assert str(error) == "what happened"
    assert {name: getattr(error, name) for name in fields} == fields
    bare = kind("what happened")
    assert all(getattr(bare, name) in (None, "") for name in fields)
