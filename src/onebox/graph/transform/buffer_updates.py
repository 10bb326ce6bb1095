"""Changes of buffers (running statistics, counters) in the training graph, so that replicas share the work exactly.

Micro-batches update a buffer one after the other. Replicas that each run some of the micro-batches still end with the
buffer of a single process when the update is affine in the buffer itself, ``new = decay * old + data``, with a constant
decay: K updates give ``decay**K * old`` plus the data of each, decayed once for each later update.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from onebox.graph.capture.joint import Joint
from onebox.graph.lower.lowering import arguments_of, draws, resolve

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class BufferUpdate:
    """The change of one buffer with a micro-batch.

    Args:
        name: The buffer.
        kind: ``constant``: from its old value alone; ``affine``: ``decay * old`` plus a term that depends on the data;
            ``general``: anything else, or the loss reads the buffer.
        decay: With ``affine``, the factor.
    """

    name: str
    kind: Literal["constant", "affine", "general"]
    decay: float = 0.0


def buffer_updates(joint: Joint) -> dict[str, BufferUpdate]:
    """Classify the update of every buffer that a graph changes."""
    sources = {str(port.name): node for node, port in joint.inputs if port.kind == "buffer"}
    changed = {str(port.name): node for node, port in joint.outputs if port.kind == "update"}
    reads = _buffers_read(joint.graph, frozenset(sources.values()))
    readers = Counter(source for node, _ in joint.outputs for source in reads[resolve(node)])
    found: dict[str, BufferUpdate] = {}
    for name, result in changed.items():
        old = sources.get(name)
        if old is None:
            found[name] = BufferUpdate(name=name, kind="affine", decay=0.0)
            continue
        private = readers[old] == (old in reads[resolve(result)])
        decay = _decay(resolve(result), old, reads)
        if private and _depends_only_on(result, old):
            found[name] = BufferUpdate(name=name, kind="constant")
        elif private and decay is not None and (decay == 1.0 or _averages(result.meta["val"].dtype)):
            found[name] = BufferUpdate(name=name, kind="affine", decay=decay)
        else:
            found[name] = BufferUpdate(name=name, kind="general")
    return found


def _averages(dtype: torch.dtype) -> bool:
    """Return whether a type can hold means."""
    return dtype.is_floating_point or dtype.is_complex


BufferReads = Mapping[fx.Node, frozenset[fx.Node]]
"""For each node of a graph, the buffers that its value depends on."""


def _buffers_read(graph: fx.Graph, buffers: frozenset[fx.Node]) -> BufferReads:
    """Return the buffers that each value depends on, with the exact reads of training-mode batch norm."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        own = frozenset({node}) & buffers
        if node.op != "output":
            found[node] = own.union(*(found[argument] for argument in _arguments_read(node)))
    return found


def _arguments_read(node: fx.Node) -> list[fx.Node]:
    """Return the resolved nodes that a value depends on."""
    if node.target is operator.getitem and _is_batch_norm(resolve(node.args[0])):  # type: ignore[arg-type]
        return _batch_norm_reads(resolve(node.args[0]), node.args[1])  # type: ignore[arg-type]
    return arguments_of(node)


def _depends_only_on(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a value depends on one graph input and on nothing else, random numbers included."""
    seen: set[fx.Node] = set()
    stack = [resolve(node)]
    while stack:
        node = stack.pop()
        if node in seen or node is source:
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr") or draws(node):
            return False
        stack.extend(arguments_of(node))
    return True


def _is_batch_norm(node: fx.Node) -> bool:
    """Return whether a node is batch norm with batch statistics: (x, weight, bias, mean, var, True, momentum, eps)."""
    return node.target is _aten._native_batch_norm_legit_functional.default and node.args[5] is True


def _batch_norm_reads(node: fx.Node, output: int) -> list[fx.Node]:
    """Return the inputs of one output of training-mode batch norm: only 3 and 4 read the running statistics."""
    skipped = {3: {4}, 4: {3}}.get(output, {3, 4})
    wanted = [argument for position, argument in enumerate(node.args) if position not in skipped]
    return [resolve(argument) for argument in wanted if isinstance(argument, fx.Node)]


def _decay(node: fx.Node, source: fx.Node, reads: BufferReads) -> float | None:
    """Return the constant factor of a buffer in a value that is affine in it, or ``None``."""
    if node is source:
        return 1.0
    if source not in reads[node]:
        return 0.0
    if node.target is operator.getitem:
        norm = resolve(node.args[0])  # type: ignore[arg-type]
        if _is_batch_norm(norm) and node.args[1] in (3, 4):
            momentum = norm.args[6]
            old = _decay(resolve(norm.args[node.args[1]]), source, reads)  # type: ignore[arg-type, index]
            return None if old is None or not isinstance(momentum, float | int) else (1.0 - momentum) * old
        return None
    found = _linear(node)
    if found is None:
        return None
    parts = [(_decay(resolve(value), source, reads), factor) for value, factor in found]
    return None if any(decay is None for decay, _ in parts) else sum(decay * f for decay, f in parts if decay)


def _linear(node: fx.Node) -> list[tuple[fx.Node, float]] | None:
    """Return the values that a node adds up and their constant factors, or ``None`` for another operation."""
    first, second = (*node.args, None, None)[:2]
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor) and set(node.kwargs) <= {"alpha"}:
        sign = 1.0 if node.target is _aten.add.Tensor else -1.0
        factor = sign * float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        terms = [(first, 1.0), (second, factor)]
        return [(value, factor) for value, factor in terms if isinstance(value, fx.Node)]
    if node.target is _aten.lerp.Scalar and isinstance(node.args[2], float | int):
        return [(first, 1.0 - node.args[2]), (second, float(node.args[2]))]  # type: ignore[list-item]
    if not isinstance(first, fx.Node) or not isinstance(second, float | int) or node.kwargs:
        return None
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        return [(first, float(second))]
    if node.target in (_aten.div.Tensor, _aten.div.Scalar):
        return [(first, 1.0 / second)]
    return None
