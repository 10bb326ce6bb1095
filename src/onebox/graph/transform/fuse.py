"""Fusion: activations that a model writes out become single operators.

Written out, GELU takes eight passes over memory, which keep four tensors for backward; as one operator it takes one
pass and keeps its input. The function of a chain of pointwise operators is identified by its values: in whatever order
it is written, it is GELU if it has GELU's values. Results differ by rounding, so it is done on request.

The gradient of a chain, which autograd has written out as well, becomes the gradient of the operator: it is the same
function if it has the same values. Everything else runs operator by operator: workers do not compile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional

from onebox.graph.capture.joint import Joint

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

_POINTWISE_GRADIENT = _POINTWISE | {_aten.tanh_backward.default, _aten.sigmoid_backward.default, _aten.detach.default}
"""Operators that their gradients are written with."""

_LAST = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar})
"""Last operators of such chains."""

_MOST = 14
"""Maximum number of operators in a chain."""

_GRID = torch.linspace(-8, 8, 129, dtype=torch.float64)
_FACTOR = torch.linspace(0.5, 2, 129, dtype=torch.float64)
"""The gradients at some values."""

_AGREE = 1e-10
"""Tolerance of values: constants are usually written with ten digits."""

_KNOWN: tuple[tuple[Any, Mapping[str, Any], Tensor], ...] = (
    (_aten.gelu.default, {"approximate": "tanh"}, functional.gelu(_GRID, approximate="tanh")),
    (_aten.gelu.default, {}, functional.gelu(_GRID)),
    (_aten.silu.default, {}, functional.silu(_GRID)),
)
"""Activations, with their values."""

_BACKWARD = {_aten.gelu.default: _aten.gelu_backward.default, _aten.silu.default: _aten.silu_backward.default}
"""Their gradients, functions of (gradient, source)."""


def fused(joint: Joint) -> Joint:
    """Return a graph in which written-out activations, and their gradients, are single operators.

    Args:
        joint: The graph, with or without gradients; it is not changed.
    """
    made = joint.copied()
    for node in reversed(list(made.graph.nodes)):
        found = None if is_backward(node) else _activation(node)
        if found is not None:
            _replace(made.graph, node, found)
    return made


def is_backward(node: fx.Node) -> bool:
    """Return whether a node computes gradients."""
    return bool(node.meta.get("autograd_backward"))


def _replace(graph: fx.Graph, node: fx.Node, found: _Found) -> None:
    """Replace an activation by its operator, if its gradient can be the operator's, too."""
    gradient = _gradient(node, found)
    if gradient is None and any(map(is_backward, _readers(found.chain))):
        return
    with graph.inserting_before(node):
        made = graph.call_function(found.target, (found.source,), dict(found.options))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    if gradient is not None:
        _replace_gradient(graph, found, gradient)
    _erase(graph, [*found.chain, *(gradient.nodes if gradient else ())])


def _replace_gradient(graph: fx.Graph, found: _Found, gradient: _Gradient) -> None:
    """Replace a chain's part of the gradient of its source by the operator's gradient."""
    first, *others = gradient.parts
    with graph.inserting_before(first):
        made = graph.call_function(_BACKWARD[found.target], (gradient.given, found.source), dict(found.options))
    made.meta = dict(first.meta)
    first.replace_all_uses_with(made)
    for part in others:
        for user in list(part.users):
            if user not in gradient.nodes:
                rest = next(each for each in user.all_input_nodes if each is not part)
                user.replace_all_uses_with(rest)
                graph.erase_node(user)


def _readers(chain: Collection[fx.Node]) -> set[fx.Node]:
    """Return the readers of values within a chain, except of its last one."""
    *within, _ = chain
    return {user for node in within for user in node.users if user not in set(chain)}


class _Found(NamedTuple):
    """An activation.

    Args:
        source: Its input.
        target: The operator that computes it.
        options: Its options.
        chain: The nodes that it is written with, in order.
    """

    source: fx.Node
    target: Any
    options: Mapping[str, Any]
    chain: Sequence[fx.Node]


class _Gradient(NamedTuple):
    """The gradient of a chain as autograd wrote it out.

    Args:
        given: The gradient of its end.
        nodes: The nodes computed for it alone, in order.
        parts: Those of them whose sum is the chain's part of the gradient of its source.
    """

    given: fx.Node
    nodes: Sequence[fx.Node]
    parts: Sequence[fx.Node]


def _gradient(node: fx.Node, found: _Found) -> _Gradient | None:
    """Return the gradient of a chain; ``None`` where other nodes contribute to it."""
    numbers = {one.meta.get("seq_nr") for one in found.chain}
    kept = [user for one in found.chain for user in one.users if user.target is _aten.detach.default]
    own = {found.source, *found.chain, *kept}
    behind = [one for one in _after(node) if is_backward(one)]
    first = [one for one in behind if one.meta.get("seq_nr") == node.meta.get("seq_nr")]
    given = {source for one in first for source in one.all_input_nodes} - own - set(first)
    if len(given) != 1:
        return None
    (start,) = given
    nodes: dict[fx.Node, None] = {}
    for one in behind:
        follows = one.meta.get("seq_nr") in numbers or (_accumulates(one) and one.all_input_nodes[0] in nodes)
        if follows and all(each is start or each in own or each in nodes for each in one.all_input_nodes):
            nodes[one] = None
    parts = [one for one in nodes if any(user not in nodes for user in one.users)]
    others = [user for part in parts[1:] for user in part.users if user not in nodes]
    if not parts or not all(_alike(found.source, part) for part in parts) or not all(map(_accumulates, others)):
        return None
    if any(one.target not in _POINTWISE_GRADIENT for one in nodes):
        return None
    computed = _values({found.source: _GRID, start: _FACTOR}, [*found.chain, *kept, *nodes])
    x = _GRID.clone().requires_grad_()
    (expected,) = torch.autograd.grad(found.target(x, **found.options), x, _FACTOR)
    total = torch.stack([computed[part] for part in parts]).sum(0)
    agree = bool(((total - expected).abs() <= _AGREE * (1 + _GRID.abs())).all())
    return _Gradient(start, [*kept, *nodes], parts) if agree else None


def _accumulates(node: fx.Node) -> bool:
    """Return whether a node adds two gradients of one value."""
    return node.target is _aten.add.Tensor and len(node.all_input_nodes) == len(node.args) == 2 and not node.kwargs


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes after a node, in the order of the graph."""
    while node.next.op != "root":
        node = node.next
        yield node


def _activation(node: fx.Node) -> _Found | None:
    """Return the activation that a node computes, or ``None``."""
    if node.target not in _LAST or not node.users:
        return None
    for source in _sources(node):
        chain = _between(source, node)
        if chain is None or not _alike(source, node):
            continue
        values = _values({source: _GRID}, chain)[node]
        for target, options, expected in _KNOWN:
            if values.shape == expected.shape and bool(((values - expected).abs() <= _AGREE * (1 + _GRID.abs())).all()):
                return _Found(source, target, options, chain)
    return None


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the possible inputs of a node as an activation: its pointwise dependencies, the nearest first."""
    seen: dict[fx.Node, None] = {node: None}
    for one in (queue := [node]):
        if one is not node:
            yield one
        if one.target in _POINTWISE and len(seen) <= _MOST:
            queue += [source for source in one.all_input_nodes if source not in seen]
            seen |= dict.fromkeys(one.all_input_nodes)


def _between(source: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """Return the pointwise operators from one node to another, in order; ``None`` where other nodes contribute."""
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


def _values(given: Mapping[fx.Node, Tensor], chain: Iterable[fx.Node]) -> dict[fx.Node, Tensor]:
    """Return the values of operators, computed one after the other."""
    values: dict[fx.Node, Any] = dict(given)
    for node in chain:
        operator: Any = node.target
        arguments: Any = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = operator(*arguments[0], **arguments[1])
    return values


def _erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase those of some nodes that have no readers left.

    Args:
        graph: The graph.
        nodes: The nodes, in order.
    """
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
