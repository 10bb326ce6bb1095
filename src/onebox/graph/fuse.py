"""Fusing: activations that a model writes out become the one operator that computes them.

Written out, GELU takes eight passes over memory, which keep four tensors for backward; as one operator it takes one
pass and keeps its input. Which function a chain of pointwise operators computes is found by computing it: whatever the
order in which it is written, it is GELU if it has GELU's values. Results differ by rounding, so it is done on request.

This is done with the graph of forward, before its gradients are derived. Everything else is ATen's to compute, operator
by operator: workers do not compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional

_aten = torch.ops.aten

_POINTWISE = frozenset(
    {
        _aten.add.Scalar,
        _aten.add.Tensor,
        _aten.div.Scalar,
        _aten.div.Tensor,
        _aten.erf.default,
        _aten.exp.default,
        _aten.mul.Scalar,
        _aten.mul.Tensor,
        _aten.neg.default,
        _aten.pow.Tensor_Scalar,
        _aten.reciprocal.default,
        _aten.rsub.Scalar,
        _aten.sigmoid.default,
        _aten.sub.Tensor,
        _aten.tanh.default,
    }
)
"""Operators that activations are written with."""

_LAST = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar})
"""Those with which they end."""

_MOST = 14
"""So many operators one is written with, at most."""

_GRID = torch.linspace(-8, 8, 129, dtype=torch.float64)
_AGREE = 1e-10
"""By how much values may differ: constants are written with ten digits, as a rule."""

_KNOWN: tuple[tuple[Any, Mapping[str, Any], Tensor], ...] = (
    (_aten.gelu.default, {"approximate": "tanh"}, functional.gelu(_GRID, approximate="tanh")),
    (_aten.gelu.default, {}, functional.gelu(_GRID)),
    (_aten.silu.default, {}, functional.silu(_GRID)),
)
"""Operators, with their values."""


def fuse(module: fx.GraphModule) -> int:
    """Let operators compute the activations of a graph that are written out; return how many there were.

    Args:
        module: The graph of an exported model, changed in place.
    """
    fused = 0
    for node in reversed(list(module.graph.nodes)):
        found = _activation(node)
        if found is None:
            continue
        source, target, options = found
        with module.graph.inserting_before(node):
            made = module.graph.call_function(target, (source,), dict(options))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        _erase(module.graph, node)
        fused += 1
    if fused:
        module.recompile()
    return fused


def _activation(node: fx.Node) -> tuple[fx.Node, Any, Mapping[str, Any]] | None:
    """Return of what a node is an activation, and of which kind."""
    if node.target not in _LAST or not node.users:
        return None
    for source in _sources(node):
        chain = _between(source, node)
        if chain is None or not _alike(source, node):
            continue
        values = _computed(source, chain)
        for target, options, expected in _KNOWN:
            if values.shape == expected.shape and bool(((values - expected).abs() <= _AGREE * (1 + _GRID.abs())).all()):
                return source, target, options
    return None


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a node may be an activation of: all that it depends on by pointwise operators, the nearest first."""
    seen: dict[fx.Node, None] = {node: None}
    for one in (queue := [node]):
        if one is not node:
            yield one
        if one.target in _POINTWISE and len(seen) <= _MOST:
            queue += [source for source in one.all_input_nodes if source not in seen]
            seen |= dict.fromkeys(one.all_input_nodes)


def _between(source: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """Return the pointwise operators from one node to another, in order; nothing where others have a part in it."""
    found: dict[fx.Node, None] = {}

    def visit(one: fx.Node) -> bool:
        if one is source or one in found:
            return True
        if one.target not in _POINTWISE or len(found) > _MOST or not all(map(visit, one.all_input_nodes)):
            return False
        found[one] = None
        return True

    return list(found) if visit(node) and found else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or not left.is_floating_point():
        return False
    return left.dtype == right.dtype and left.shape == right.shape


def _computed(source: fx.Node, chain: list[fx.Node]) -> Tensor:
    """Return the values of a chain of operators."""
    values: dict[fx.Node, Any] = {source: _GRID}
    for node in chain:
        operator: Any = node.target
        given: Any = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = operator(*given[0], **given[1])
    made: Tensor = values[chain[-1]]
    return made


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Take a node out that nobody reads, and what only it has read."""
    if not node.users and node.target in _POINTWISE:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _erase(graph, source)
