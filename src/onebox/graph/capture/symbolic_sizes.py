"""Sizes that vary from batch to batch: one trace with symbols for them serves all of their values.

A trace with symbols records its assumptions about them, for example that a length is even or more than 8. For sizes
that fulfil these, the graph with numbers in place of the symbols is the graph of a trace with those sizes.

This file alone touches PyTorch's symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

Varying = Mapping[int, frozenset[int]]
"""For tensors of the inputs and targets, by their number, the dimensions whose sizes vary."""

_SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """The symbols of sizes in a trace.

    Args:
        env: The assumptions about them.
        sizes: The symbol of each, by tensor and dimension.
    """

    env: ShapeEnv
    sizes: Mapping[tuple[int, int], Any]

    def values(self, leaves: Sequence[Tensor]) -> dict[Any, int] | None:
        """Return the numbers of the symbols; ``None`` where the trace is not valid for these sizes.

        Args:
            leaves: The tensors of the inputs and targets.
        """
        found: dict[Any, int] = {}
        given: dict[Any, int] = {}
        for (leaf, dim), symbol in self.sizes.items():
            size = leaves[leaf].shape[dim]
            given[symbol.node._expr] = size  # guards also name symbols that have been replaced by numbers since
            expression = self.env.replace(symbol.node.expr)
            if expression.is_number:
                if int(expression) != size:
                    return None
            elif found.setdefault(expression, size) != size:
                return None
        for symbol, size in found.items():
            within = self.env.var_to_range.get(symbol)
            if within is None or not within.lower <= size <= within.upper:
                return None
        return found if all(guard.expr.xreplace(given | found) == True for guard in self.env.guards) else None  # noqa: E712

    @property
    def constant(self) -> bool:
        """Return whether the trace is valid for one value of each size only."""
        return all(self.env.replace(symbol.node.expr).is_number for symbol in self.sizes.values())


def fake_inputs(example: Any, varying: Varying) -> tuple[Any, Symbols | None]:
    """Return inputs and targets without values for a trace, and the symbols of varying sizes.

    Args:
        example: Inputs and targets, nested tuples and dicts of tensors.
        varying: The sizes that vary; empty for a trace without symbols.
    """
    if not varying:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return pytree.tree_map_only(Tensor, mode.from_tensor, example), None
    env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    leaves, structure = pytree.tree_flatten(example)
    made: list[Any] = []
    sizes: dict[tuple[int, int], Any] = {}
    for number, leaf in enumerate(leaves):
        dims = varying.get(number, frozenset())
        if not isinstance(leaf, Tensor):
            made.append(leaf)
            continue
        kinds = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(leaf.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        made.append(mode.from_tensor(leaf, symbolic_context=context, source=ConstantSource(f"leaf_{number}")))
        sizes |= {(number, dim): made[-1].shape[dim] for dim in dims if isinstance(made[-1].shape[dim], torch.SymInt)}
    return pytree.tree_unflatten(made, structure), Symbols(env=env, sizes=sizes)


def with_numbers(
    graph: fx.Graph, symbols: Symbols, values: Mapping[Any, int]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph with numbers in place of symbols, and the replacements of its nodes.

    Args:
        graph: The graph.
        symbols: Its symbols.
        values: Their numbers, from :meth:`Symbols.values`.
    """
    numbers: dict[Any, Any] = {}

    def number(value: Any) -> Any:
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = value.node.expr
        if expression not in numbers:
            found = symbols.env.replace(expression).xreplace(values)
            numbers[expression] = float(found) if isinstance(value, torch.SymFloat) else int(found)
        return numbers[expression]

    mode = FakeTensorMode()
    tensors: dict[Any, Tensor] = {}

    def concrete(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return number(value)
        shape, stride = (tuple(map(number, each)) for each in (value.shape, value.stride()))
        key = shape, stride, value.dtype, value.device
        if key not in tensors:  # a hundred times faster than within the mode
            elements = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
            tensors[key] = FakeTensor(mode, elements, value.device)
        return tensors[key]

    def concrete_all(value: Any) -> Any:
        if isinstance(value, FakeTensor | _SYMBOLIC):
            return concrete(value)
        return pytree.tree_map(concrete, value)

    made = fx.Graph()
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            known[node] = number(value)
            continue
        known[node] = _copied(made, node, known)
        if value is not None:
            known[node].meta["val"] = concrete_all(value)
    return made, known


def _copied(graph: fx.Graph, node: fx.Node, known: Mapping[fx.Node, Any]) -> fx.Node:
    """Copy a node, with numbers for the nodes that have become numbers."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: known[each])
    made = graph.create_node(node.op, node.target, args, kwargs, node.name)
    made.meta = dict(node.meta)
    return made
