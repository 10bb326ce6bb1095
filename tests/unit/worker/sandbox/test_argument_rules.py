"""Rules of arguments: each listed operator has a row or is of a kind that needs none, and rows say what they mean."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from importlib import resources
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import overload
from onebox.worker.sandbox.allow_list import EAGER, KINDS, PROGRAMS, kinds, pinned_names
from onebox.worker.sandbox.argument_checks import check_arguments, guarded
from onebox.worker.sandbox.argument_rules import ROWS, base_name, kind_of, rules_of
from onebox.worker.sandbox.rule_functions import FUNCTIONS
from onebox.worker.sandbox.rule_language import OTHER_NAMES, Clause, Row


def _listed() -> list[OpOverload]:
    found = []
    for name in sorted(pinned_names(EAGER) | pinned_names(PROGRAMS)):
        with contextlib.suppress(WireError):  # of another torch
            found.append(overload(name))
    return found


LISTED = _listed()

PLACES = frozenset({"index", "indices", "sorter", "offsets", "pivots", "LU_pivots"})
"""Names of arguments whose elements are places."""


def refused(text: str, functions: dict[str, Clause] | None = None, **arguments: Any) -> str | None:
    """Return the error of a row, ``None`` if the arguments keep it."""
    row = Row(text, functions or {})
    try:
        for rule in (*row.shapes, *row.elements):
            rule(arguments)
    except WireError as error:
        return str(error)
    return None


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# ---- every operator of the lists


def test_each_listed_operator_has_a_row_or_is_of_a_kind_that_needs_none() -> None:
    for operator in LISTED:
        assert (rules_of(operator) is None) == (kind_of(operator) is not None), operator


def test_all_rows_and_kinds_are_of_listed_operators() -> None:
    listed = {part for name in pinned_names(EAGER) for part in (name.split(".")[1], name.partition(".")[2])}
    rows = [name for names in ROWS for name in names.split()]
    assert set(rows) | set(kinds()) <= listed, (set(rows) | set(kinds())) - listed
    assert len(rows) == len(set(rows))
    assert not set(rows) & set(kinds())


def test_each_row_names_arguments_of_its_operators() -> None:
    known: dict[str, set[str]] = defaultdict(set)
    for operator in LISTED:
        for name in (base_name(operator), f"{base_name(operator)}.{operator._overloadname}"):
            known[name] |= {argument.name for argument in operator._schema.arguments}
    for names, text in ROWS.items():
        row = Row(text, FUNCTIONS)
        assert row.shapes or row.elements
        for name in known.keys() & set(names.split()):
            assert row.names - known[name] <= OTHER_NAMES, name


def test_each_function_is_of_a_row() -> None:
    assert {name for name in FUNCTIONS if any(f"@{name}" in row.split("; ") for row in ROWS.values())} == set(FUNCTIONS)


@pytest.mark.feature("Security: Run only operators of a list")
def test_an_operator_without_row_and_kind_is_refused() -> None:
    """As one would be that a list gets and nobody has read."""
    unread = overload("aten._cummax_helper.default")
    for check in (lambda: guarded(unread, unread), lambda: check_arguments(unread, (), {})):
        with pytest.raises(WireError, match=r"aten._cummax_helper.default has no rules of arguments .*allowed: .*row"):
            check()


def test_overloads_of_one_name_may_differ() -> None:
    assert rules_of(overload("aten.div.Tensor")) is None
    assert rules_of(overload("aten.div.Tensor_mode")) is not None
    with pytest.raises(WireError, match="is of no kind that needs none"):
        rules_of(overload("aten.div.int"))  # of TorchScript


def test_each_kind_says_why_no_argument_leads_out_of_memory() -> None:
    paragraphs = resources.files("onebox.worker.sandbox").joinpath(KINDS).read_text().split("\n\n")
    kinds_of_file = []
    for paragraph in paragraphs[1:]:
        lines = paragraph.splitlines()
        why = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
        kinds_of_file.append(lines[len(why)])
        assert " ".join(why).endswith("."), paragraph
        assert all(line.startswith("  ") for line in lines[len(why) + 1 :]), paragraph
    assert set(kinds_of_file) == set(kinds().values())


# ---- kinds, by what schemas tell


def test_kinds_are_what_schemas_tell() -> None:
    for operator in LISTED:
        kind, packet = kind_of(operator), operator._overloadpacket
        if kind is None:
            continue
        counts = any(torch.Tag.dynamic_output_shape in getattr(packet, one).tags for one in packet.overloads())
        read = {one.name for one in operator._schema.arguments if "Tensor" in str(one.type) and not one.is_out}
        each = torch.Tag.pointwise in operator.tags
        assert not counts or kind == "counted", operator
        assert not read & PLACES or kind in ("indexed", "counted"), operator
        assert not each or kind in ("pointwise", "random", "reduction", "query", "copy", "matrix"), operator
        assert base_name(operator).startswith(("_foreach", "_amp")) == (kind == "foreach"), operator
        assert kind != "factory" or read <= FORMS, operator


FORMS = frozenset({"self", "start", "end"})
"""Tensors that say the form of a new one, or where a row of numbers begins and ends."""


# ---- the language


@pytest.mark.parametrize(
    ("row", "arguments", "error"),
    [
        ("y ~ x", {"x": x(2, 3), "y": x(2, 3)}, None),
        ("y ~ x", {"x": x(2, 3), "y": x(3)}, "y is [3]; allowed: [2, 3]"),
        ("y z ~ [x[1], 2 * n]", {"x": x(2, 3), "y": x(3, 4), "z": x(3, 4), "n": 2}, None),
        ("y z ~ [x[1], 2 * n]", {"x": x(2, 3), "y": x(3, 4), "z": x(3), "n": 2}, "z is [3]; allowed: [3, 4]"),
        ("y <~ x", {"x": x(5, 2, 3), "y": x(1, 3)}, None),
        ("y <~ x", {"x": x(2, 3), "y": x(2, 2)}, "y is [2, 2]; allowed: [2, 3], or 1 in place of a size"),
        ("y <~ x", {"x": x(3), "y": x(1, 3)}, "y is [1, 3]; allowed: [3], or 1 in place of a size"),
        ("y?: int64, 1d", {"y": None}, None),
        ("y?: int64, 1d", {}, None),
        ("y?: int64, 1d", {"y": x(3)}, "y is torch.float32 [3]; allowed: int64"),
        ("y: int64|int32, 1d", {"y": x(3, 1, dtype=torch.int32)}, "y is torch.int32 [3, 1]; allowed: 1 dimension"),
        (
            "y: contiguous", {"y": x(2, 3).t()},
            "y is torch.float32 [3, 2] with strides [1, 3]; allowed: a contiguous tensor",
        ),
        ("y: dense", {"y": x(2, 3).t()}, None),
        (
            "y: dense", {"y": x(2, 1).expand(2, 3)},
            "y is torch.float32 [2, 3] with strides [1, 0]; allowed: a dense tensor",
        ),
        ("y: floating", {"y": x(2, dtype=torch.int8)}, "y is torch.int8 [2]; allowed: floating-point numbers"),
        ("i in 0 .. n", {"i": torch.tensor([0, 4]), "n": 5}, None),
        ("i in 0 .. n", {"i": torch.tensor([0, 5]), "n": 5}, "i has elements from 0 to 5; allowed: 0 to 4"),
        ("i: int64, in 0 .. n or -1", {"i": torch.tensor([-1, 4]), "n": 5}, None),
        (
            "i in 0 .. n or -1", {"i": torch.tensor([-2, 4]), "n": 5},
            "i has elements from -2 to 4; allowed: 0 to 4, or -1",
        ),
        (
            "i in 0 .. 1", {"i": torch.tensor([0.0, torch.nan])},
            "i has elements from nan to nan; allowed: 0 to 1, 1 excluded",
        ),
        ("i: not nan", {"i": torch.tensor([0.0, torch.nan])}, "an element of i is no number; allowed: numbers"),
        ("n > 0", {"n": 0}, "n is 0; allowed: n > 0"),
        ("0 <= n < x[-1]", {"n": 3, "x": x(2, 3)}, "n is 3, x is torch.float32 [2, 3]; allowed: 0 <= n < x[-1]"),
        ("0 <= n < 4", {"n": [0, 3]}, None),
        ("0 <= n < 4", {"n": [0, 4]}, "n is [0, 4]; allowed: 0 <= n < 4"),
        ("n > 0 if m == 1", {"n": 0, "m": 0}, None),
        ("n > 0 if m == 1", {"n": 0, "m": 1}, "n is 0; allowed: n > 0"),
        (
            "x[:-d] == y[:-d]", {"x": x(1, 2, 3), "y": x(2, 2, 3), "d": 2},
            "x is torch.float32 [1, 2, 3], y is torch.float32 [2, 2, 3]; allowed: x[:-2] == y[:-2]",
        ),
        ("x[:1] + [n] == [2, 5]", {"x": x(2, 3), "n": 5}, None),
        ("len(x) == len(l) == 2 and prod(x) == prod(l)", {"x": x(2, 3), "l": [1, 6]}, None),
        ("given(y) or n in (1, 2) and not n == 1", {"n": 2}, None),
        ("abs(from) <= 2**62", {"from": -(1 << 63)}, f"from is {-(1 << 63)}; allowed: abs(from) <= 2**62"),
        (
            "type(x) == type(y)", {"x": x(1), "y": x(1, dtype=torch.float64)},
            "x is torch.float32 [1], y is torch.float64 [1]; allowed: type(x) == type(y)",
        ),
        ("t != bfloat16", {"t": torch.bfloat16}, "t is torch.bfloat16; allowed: t != bfloat16"),
        (
            "y ~ broadcast(x[:-1], [4])", {"x": x(3, 2), "y": x(3)},
            "sizes are [3] and [4]; allowed: some that broadcast",
        ),
    ],
)  # fmt: skip
def test_what_a_row_says(row: str, arguments: dict[str, Any], error: str | None) -> None:
    assert refused(row, **arguments) == error


def test_a_row_may_name_functions() -> None:
    def even(a: Any) -> None:
        if a["n"] % 2:
            raise WireError("n is odd")

    functions = {"even": Clause(even, elements=True, apart=False)}
    assert refused("n > 0; @even", functions, n=3) == "n is odd"
    assert refused("n > 0; @even if n > 4", functions, n=3) is None
    row = Row("n > 0; @even", functions)
    assert (len(row.shapes), len(row.elements), row.apart) == (1, 1, False)


@pytest.mark.parametrize(
    "row",
    [
        "y: int65", "y: 1d contiguous", "@nothing", "y ~ ", "n >", "open(n) > 0", "n.real > 0", "(lambda: n)()",
        "x[::2] == 1", "n is None", "[i for i in n] == n", "f'{n}' == n", "len(x, y=1) > 0", "n := 2",
        "i in 0 ..",
    ],
)  # fmt: skip
def test_what_is_not_in_the_language_is_no_row(row: str) -> None:
    with pytest.raises(ValueError, match=r"is no |is not in the language"):
        Row(row, {})
