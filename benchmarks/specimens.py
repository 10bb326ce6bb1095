"""A specimen of every type of message, made from the types themselves: a type that is new is among them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec.inspect as kinds

VARIANTS = 3
"""How many specimens of a type: in each another member of a union, and another value of an enumeration, is chosen."""

_DEEPEST = 8


def specimens(union: Any, *, but: frozenset[type] = frozenset()) -> Iterator[Any]:
    """Yield messages of all types in a union.

    Args:
        union: The types, or one.
        but: Those that are left out.
    """
    found = kinds.type_info(union)
    for each in found.types if isinstance(found, kinds.UnionType) else (found,):
        assert isinstance(each, kinds.StructType)
        if each.cls not in but:
            for variant in range(VARIANTS):
                yield _make(each, variant, 0)


def _make(kind: kinds.Type, variant: int, depth: int) -> Any:
    """Return a value of a type."""
    match kind:
        case kinds.StructType():
            return kind.cls(**{field.name: _make(field.type, variant, depth + 1) for field in kind.fields})
        case kinds.UnionType():
            simple = [each for each in kind.types if not isinstance(each, kinds.StructType)]
            among = simple if depth > _DEEPEST and simple else list(kind.types)
            return _make(among[variant % len(among)], variant, depth + 1)
        case kinds.LiteralType():
            return kind.values[variant % len(kind.values)]
        case kinds.TupleType():
            return tuple(_make(each, variant, depth + 1) for each in kind.item_types)
        case kinds.VarTupleType() | kinds.ListType():
            items = () if depth > _DEEPEST else (_make(kind.item_type, variant, depth + 1),) * (1 + variant % 2)
            return list(items) if isinstance(kind, kinds.ListType) else items
        case kinds.DictType():
            return {_make(kind.key_type, variant, depth + 1): _make(kind.value_type, variant, depth + 1)}
    plain: dict[type, Any] = {
        kinds.IntType: 1 + variant,
        kinds.FloatType: 1.0,
        kinds.StrType: ("float32", "aten.add.Tensor", "127.0.0.1")[variant],
        kinds.BytesType: b"x",
        kinds.BoolType: bool(variant % 2),
        kinds.NoneType: None,
        kinds.AnyType: 1,
    }
    return plain[type(kind)]
