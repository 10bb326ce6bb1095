"""Any message of the protocol: strategies made from the types themselves, so that a new type is covered at once."""

from __future__ import annotations

import functools
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import Meta, Struct

from onebox.wire import program
from onebox.wire.protocol import eager, requests, responses, snapshots

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec="utf-8"), max_size=8),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}


@functools.cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of an annotated type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Annotated:
        of, bounds = arguments
        assert of is int and bounds == Meta(ge=0), kind
        return st.integers(0, 2**63 - 1)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(st.deferred(lambda: values_of(arguments[0])), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, Struct):
        hints = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})
    raise TypeError(f"no strategy for {kind!r}")


INSTRUCTIONS: list[Any] = list(get_args(requests.Instruction))
SAYINGS: list[Any] = list(get_args(responses.WorkerMessage))

STRUCTS: list[type[Struct]] = [
    kind
    for module in (eager, requests, program, responses, snapshots)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Struct) and kind.__module__ == module.__name__
]
