"""Divisors: what the loss of a graph divides by that depends on the batch and on nothing that is trained.

A mean over samples divides by their number, which is a constant of the graph. A mean over tokens that are not ignored,
or with class weights, divides by something that is made of the targets. That part of the graph is small, and can be
computed for each slice of a batch without the rest: then it is known whether the slices weigh as much as their samples.
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
"""The reduction of ``nll_loss`` that is a mean; 0 is none, and 2 a sum."""


@dataclass(frozen=True, kw_only=True)
class Divisor:
    """Something that the loss divides by.

    Args:
        kind: ``classes``: the weights of the targets' classes; ``targets``: how many are not ignored; ``other``: what
            the user's own code makes of the batch.
        where: For a person: the operator.
        ignored: With ``classes`` and ``targets``, the target that is ignored.
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
    """Return what the loss of a graph divides by."""
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
    """Tell whether a node is batch norm by the statistics of its input: (x, weight, bias, [mean, variance,] True)."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if "batch_norm" not in name or name.endswith("backward"):
        return False
    argument = next((value for value in node.args[3:] if isinstance(value, bool)), False)
    x = node.args[0]
    return argument and isinstance(x, fx.Node) and x.meta["val"].shape[0] > 1  # instance norm has 1 there


def _divides_by(node: fx.Node) -> tuple[tuple[fx.Node, ...], Literal["classes", "targets", "other"], int]:
    """Return what a node divides by: the nodes that say it, and what they are; none where it does not divide."""
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
    """Return nodes and all that they depend on."""
    seen: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    return seen
