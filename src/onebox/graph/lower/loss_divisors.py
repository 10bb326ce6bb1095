"""Divisors of a graph's loss that depend on the batch and not on trained parameters.

A mean over samples divides by their number, which is a constant of the graph. A mean over tokens that are not ignored,
or with class weights, divides by a function of the targets. That part of the graph is small, and can be computed for
each slice of a batch without the rest: so the weight of each slice is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from onebox.graph.capture.joint import Joint, Port
from onebox.graph.lower.lowering import draws

_aten = torch.ops.aten
_NLL = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
_DIV = (_aten.div.Tensor, _aten.div.Tensor_mode, _aten.reciprocal.default)
_MEAN = 1
"""The ``reduction`` argument of ``nll_loss`` for a mean; 0 is none, and 2 a sum."""


@dataclass(frozen=True, kw_only=True)
class Divisor:
    """A divisor of the loss.

    Args:
        kind: ``classes``: the weights of the targets' classes; ``targets``: the number of targets that are not ignored;
            ``other``: a function of the batch in the user's code.
        where: The operator, as text.
        ignored: With ``classes`` and ``targets``, the ignored target.
    """

    kind: Literal["classes", "targets", "other"]
    where: str
    ignored: int
    nodes: tuple[fx.Node, ...]
    sources: Mapping[fx.Node, Port]
    ends: tuple[fx.Node, ...]

    @property
    def state(self) -> frozenset[str]:
        """The buffers that it reads."""
        return frozenset(str(port.name) for port in self.sources.values() if port.kind == "buffer")

    def of(self, tensor_of: Callable[[Port], Tensor]) -> float:
        """Return its value.

        Args:
            tensor_of: Returns a tensor of the batch, a buffer, or a constant of the graph; all on the CPU.
        """
        known: dict[fx.Node, Any] = {node: tensor_of(port) for node, port in self.sources.items()}
        with torch.no_grad():
            for node in self.nodes:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            first, *more = (known[node] for node in self.ends)
            if self.kind == "other":
                return float(first)
            valid = first != self.ignored
            if not more:
                return float(valid.sum())
            return float(more[0][first[valid]].sum())


def loss_divisors(joint: Joint) -> tuple[Divisor, ...]:
    """Return the divisors of a graph's loss."""
    ports = dict(joint.inputs)
    (loss,) = (node for node, port in joint.outputs if port == Port("result", 0))
    changed = {port.name for _, port in joint.outputs if port.kind == "update"}
    found = []
    for node in _ancestors([loss]):
        ends, kind, ignored = _divides_by(node)
        if not ends:
            continue
        behind = _ancestors(ends)
        sources = {each: ports[each] for each in behind if each in ports}
        kinds = {port.kind for port in sources.values()}
        own = any(port.kind == "buffer" and port.name in changed for port in sources.values())
        if "leaf" not in kinds or not kinds <= {"leaf", "buffer", "constant"} or own or any(map(draws, behind)):
            continue
        order = {each: place for place, each in enumerate(joint.graph.nodes)}
        nodes = sorted((each for each in behind if each not in ports), key=order.__getitem__)
        found.append(
            Divisor(kind=kind, where=str(node.target), ignored=ignored, nodes=tuple(nodes), sources=sources, ends=ends)
        )
    return tuple(found)


def normalises_by_batch(node: fx.Node) -> bool:
    """Return whether a node is batch norm by the statistics of its input: (x, weight, bias, [mean, variance,] True)."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if "batch_norm" not in name or name.endswith("backward"):
        return False
    argument = next((value for value in node.args[3:] if isinstance(value, bool)), False)
    x = node.args[0]
    return argument and isinstance(x, fx.Node) and x.meta["val"].shape[0] > 1  # 1 for instance norm


def _divides_by(node: fx.Node) -> tuple[tuple[fx.Node, ...], Literal["classes", "targets", "other"], int]:
    """Return the divisor of a node: the nodes that compute it, and its kind; no nodes where there is none."""
    if node.target in _NLL and node.args[3] == _MEAN:
        _, target, weight, _, ignored = node.args
        assert isinstance(target, fx.Node)
        assert isinstance(ignored, int)
        if isinstance(weight, fx.Node):
            return (target, weight), "classes", ignored
        return (target,), "targets", ignored
    divisor = node.args[-1] if node.target in _DIV and node.args else None
    if isinstance(divisor, fx.Node) and divisor.meta["val"].dim() == 0:
        return (divisor,), "other", 0
    return (), "other", 0


def _ancestors(nodes: list[fx.Node] | tuple[fx.Node, ...]) -> dict[fx.Node, None]:
    """Return nodes and all their dependencies."""
    seen: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    return seen
