"""Numbers in a graph that decide whether micro-batches make up a batch: divisors, and functions of the loss.

A mean over samples divides by their number, which is a constant of the graph. A mean over tokens that are not ignored,
or with class weights, divides by a function of the targets. That part of the graph is small, and can be computed for
each slice of a batch without the rest: so the weight of each slice is known before a step. A mean over samples that
outputs choose, such as those above a threshold, divides by a number that only the step itself makes; and an absolute
value of the loss is a mean as long as all micro-batches are on the same side. These are results of the graph besides
the loss, and are compared after each step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

_FLOORS = frozenset(
    {
        _aten.clamp.default,
        _aten.clamp.Tensor,
        _aten.clamp_min.default,
        _aten.clamp_min.Tensor,
        _aten.maximum.default,
        _aten.where.self,
        _aten.where.ScalarOther,
        _aten.add.Tensor,
        _aten.add.Scalar,
        _aten._to_copy.default,
    }
)
"""Operators that keep a divisor from being 0."""

_LINEAR = frozenset(
    {
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.add.Tensor,
        _aten.add.Scalar,
        _aten.sub.Tensor,
        _aten.rsub.Scalar,
        _aten.neg.default,
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.div.Tensor,
        _aten.div.Scalar,
        _aten.view.default,
        _aten.reshape.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.unsqueeze.default,
        _aten.expand.default,
        _aten.clone.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten._to_copy.default,
        _aten.where.self,
    }
)
"""Operators through which a result is a sum of what they are given, or of multiples of that."""

_FUNCTIONS = frozenset(
    {
        _aten.abs.default,
        _aten.relu.default,
        _aten.clamp.default,
        _aten.clamp_min.default,
        _aten.clamp_max.default,
        _aten.sqrt.default,
        _aten.exp.default,
        _aten.log.default,
        _aten.log1p.default,
        _aten.pow.Tensor_Scalar,
        _aten.softplus.default,
        _aten.sigmoid.default,
        _aten.tanh.default,
    }
)
"""Functions of one number, and of constants."""


@dataclass(frozen=True, kw_only=True)
class Divisor:
    """A divisor of a result that depends on the batch alone.

    Args:
        kind: ``classes``: the weights of the targets' classes; ``targets``: the number of targets that are not ignored;
            ``other``: a function of the batch in the user's code.
        where: The operator, as text.
        ignored: With ``classes`` and ``targets``, the ignored target.
        result: Number of the result; 0 is the loss.
    """

    kind: Literal["classes", "targets", "other"]
    where: str
    ignored: int
    nodes: tuple[fx.Node, ...]
    sources: Mapping[fx.Node, Port]
    ends: tuple[fx.Node, ...]
    result: int = 0

    @property
    def state(self) -> frozenset[str]:
        """The buffers that it reads."""
        return frozenset(str(port.name) for port in self.sources.values() if port.kind == "buffer")

    def of(self, tensor_of: Callable[[Port], Tensor]) -> tuple[float, float]:
        """Return its value, and that without what keeps it from being 0.

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
                return float(first), float(known[_counted(self.ends[0])])
            valid = first != self.ignored
            count = float(more[0][first[valid]].sum()) if more else float(torch.count_nonzero(valid))
            return count, count


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that a result depends on in another way than as a sum over samples, known when it is computed.

    Args:
        result: Number of the result that depends on it; 0 is the loss.
        where: The operator, as text.
        line: The user's line, as text; empty where it is not known.
        value: Number of the result that it is.
        counted: For a divisor, the number of the result that is it without what keeps it from being 0.
        function: For what is no divisor, the function of it that the result is made of.
        dtype: Its type.
    """

    result: int
    where: str
    line: str
    value: int
    counted: int = -1
    function: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.float64

    def of_mean(self, mean: float) -> float:
        """Return the value of the function for a mean of the micro-batches' numbers."""
        assert self.function is not None
        return float(self.function(torch.tensor(mean, dtype=torch.float64)))


def loss_divisors(joint: Joint) -> tuple[Divisor, ...]:
    """Return the divisors of a graph's results that depend on the batch and not on parameters."""
    ports, found = dict(joint.inputs), list[Divisor]()
    order = {each: place for place, each in enumerate(joint.graph.nodes)}
    for result, port in joint.outputs:
        if port.kind != "result":
            continue
        for node in _ancestors([result]):
            ends, kind, ignored = _divides_by(node)
            if ends and _of_batch_alone(ends, joint, ports):
                behind = _ancestors(ends)
                sources = {each: ports[each] for each in behind if each in ports}
                nodes = sorted((each for each in behind if each not in ports), key=order.__getitem__)
                found.append(
                    Divisor(
                        kind=kind,
                        where=str(node.target),
                        ignored=ignored,
                        nodes=tuple(nodes),
                        sources=sources,
                        ends=ends,
                        result=int(port.name),
                    )
                )
    return tuple(found)


def with_measures(joint: Joint, line_of: Callable[[fx.Node], str]) -> tuple[Joint, tuple[Measure, ...]]:
    """Return a graph with further results: what decides only while it runs whether micro-batches make up a batch.

    Args:
        joint: The graph; its nodes may be added to.
        line_of: Returns the user's line that made a node, as text.
    """
    ports, found = dict(joint.inputs), list[Measure]()
    outputs = list(joint.outputs)
    results = [(node, int(port.name)) for node, port in outputs if port.kind == "result"]
    numbers: dict[fx.Node, int] = {}
    free = 1 + max((number for _, number in results), default=0)

    def told(node: fx.Node) -> int:
        if node not in numbers:
            numbers[node] = free + len(numbers)
            outputs.append((node, Port("result", numbers[node])))
        return numbers[node]

    for result, number in results:
        for node in _summed(result):
            divisor = _own_divisor(node)
            if divisor is not None and "leaf" in _kinds(divisor, ports):
                ends, _, _ = _divides_by(node)
                if not ends or not _of_batch_alone(ends, joint, ports):
                    about = {"where": str(node.target), "line": line_of(node), "dtype": divisor.meta["val"].dtype}
                    counted = told(_counted(divisor))
                    found.append(Measure(result=number, value=told(divisor), counted=counted, **about))
            elif node.target in _FUNCTIONS and "leaf" in _kinds(node, ports):
                x = node.args[0]
                assert isinstance(x, fx.Node)
                about = {"where": str(node.target), "line": line_of(node), "dtype": x.meta["val"].dtype}
                found.append(Measure(result=number, value=told(x), function=_function_of(node), **about))
    if not found:
        return joint, ()
    return replace(joint, outputs=tuple(outputs)), tuple(found)


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
    if isinstance(divisor, fx.Node) and _is_number(divisor):
        return (divisor,), "other", 0
    return (), "other", 0


def _own_divisor(node: fx.Node) -> fx.Node | None:
    """Return the number that a node divides by, as a node of the graph."""
    if node.target in _NLL and node.args[3] == _MEAN:
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == 1:
                return user
        with node.graph.inserting_after(node):
            made = node.graph.call_function(operator.getitem, (node, 1))
        made.meta = {**node.meta, "val": node.meta["val"][1]}
        return made
    ends, _, _ = _divides_by(node)
    return ends[0] if ends else None


def _counted(divisor: fx.Node) -> fx.Node:
    """Return a divisor without what keeps it from being 0, such as a least value, or a small number that is added."""
    node = divisor
    while node.target in _FLOORS:
        varying = [each for each in node.all_input_nodes if each.op == "call_function" and _has_inputs(each)]
        if node.target is _aten.where.self:
            varying = [each for each in varying if each in node.args[1:]]
        if len(varying) != 1 or not _is_number(varying[0]):
            break
        node = varying[0]
    return node


def _has_inputs(node: fx.Node) -> bool:
    return any(each.op == "placeholder" for each in _ancestors([node]))


def _of_batch_alone(ends: Sequence[fx.Node], joint: Joint, ports: Mapping[fx.Node, Port]) -> bool:
    """Return whether nodes depend on the batch, and beside it only on what is the same throughout a step."""
    behind = _ancestors(ends)
    kinds = {ports[each].kind for each in behind if each in ports}
    changed = {port.name for _, port in joint.outputs if port.kind == "update"}
    own = any(ports[each].kind == "buffer" and ports[each].name in changed for each in behind if each in ports)
    return "leaf" in kinds and kinds <= {"leaf", "buffer", "constant"} and not own and not any(map(draws, behind))


def _kinds(node: fx.Node, ports: Mapping[fx.Node, Port]) -> Collection[str]:
    return {ports[each].kind for each in _ancestors([node]) if each in ports}


def _summed(result: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of which a result is a sum, or of functions of which, from the result on."""
    seen: set[fx.Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target is operator.getitem:
            stack += node.all_input_nodes
            continue
        function = node.target in _FUNCTIONS and _is_number(node) and len(node.all_input_nodes) == 1
        if node.target in _LINEAR or node.target in _NLL or node.target in _DIV or function:
            yield node
        if node.target in _LINEAR or function:
            end = 1 if node.target in _DIV else len(node.args)  # neither a divisor nor a condition
            operands = node.args[node.target is _aten.where.self : end]
            stack += [each for each in operands if isinstance(each, fx.Node)]


def _function_of(node: fx.Node) -> Callable[[Tensor], Tensor]:
    target, more, kwargs = node.target, node.args[1:], dict(node.kwargs)
    return lambda x: target(x, *more, **kwargs)  # type: ignore[operator]


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.dim()


def _ancestors(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return nodes and all their dependencies."""
    seen: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    return seen
