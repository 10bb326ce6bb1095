"""Layouts: what a program does where a trace relies on the strides of a value.

The strides of a trace are those that the shape functions of PyTorch say. Kernels may choose others, and so may what
this project leaves out or sends: a copy that is not made, a value that has travelled. Results do not depend on them,
but for operators that read strides:

- a view that joins dimensions exists for some strides only. Where the strides of its source are not certain, its source
  is made contiguous first; so are the sources of other operators that refuse some strides, and of random operators,
  which draw in the order of memory;
- ``as_strided`` reads memory at given distances: it gets a tensor that lies as the trace says.

Such a copy is an operator of its own, so that its memory is accounted for; a worker makes none of what is contiguous
already, so that the account is an upper bound. What a worker finds to be otherwise nevertheless, on a GPU for example,
it copies; see :class:`onebox.worker.programs.interpreter.CompiledProgram`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from onebox.graph.capture.joint import Joint
from onebox.graph.capture.locate import node_refusal
from onebox.graph.lower.lowering import canonical, draws, is_view
from onebox.wire import ATTENTION, ATTENTION_BACKWARD

_aten = torch.ops.aten

UNTRACED = frozenset({
    _aten._log_softmax_backward_data.default, _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats, _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit_no_training.default, _aten.batch_norm_backward.default,
    _aten.channel_shuffle.default, _aten.copysign.Tensor, _aten.div.Tensor_mode, _aten.elu_backward.default,
    _aten.floor_divide.default, _aten.hardsigmoid_backward.default, _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default, _aten.huber_loss_backward.default, _aten.log_sigmoid_backward.default,
    _aten.log_sigmoid_forward.default, _aten.logit_backward.default, _aten.max_unpool2d.default,
    _aten.mse_loss_backward.default, _aten.native_batch_norm_backward.default, _aten.native_dropout_backward.default,
    _aten.native_group_norm_backward.default, _aten.native_layer_norm_backward.default,
    _aten.nll_loss2d_forward.default, _aten.normal.Tensor_Tensor, _aten.pow.Scalar,
    _aten.reflection_pad3d.default, _aten.reflection_pad3d_backward.default,
    _aten.replication_pad2d_backward.default, _aten.replication_pad3d.default,
    _aten.replication_pad3d_backward.default, _aten.rrelu_with_noise_backward.default,
    _aten.rrelu_with_noise_functional.default, _aten.smooth_l1_loss_backward.default, _aten.softplus_backward.default,
    _aten.special_xlog1py.default, _aten.xlogy.Tensor,
})  # fmt: skip
"""Operators of whose results a trace has other strides than CPU kernels return, unless all tensors are contiguous;
found by running PyTorch's operator database (``tests/unit/graph/lower/test_layouts.py``)."""

_ATTENTION = frozenset({
    ATTENTION, ATTENTION_BACKWARD, _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
})  # fmt: skip

FIXED = _ATTENTION | frozenset({
    _aten._log_softmax.default, _aten._softmax.default, _aten.addmm.default, _aten.baddbmm.default, _aten.bmm.default,
    _aten.embedding.default, _aten.mm.default, _aten.native_layer_norm.default,
})  # fmt: skip
"""Operators of whose results the strides do not depend on those of their arguments."""

_PARTICULAR = _ATTENTION | frozenset({
    _aten._pdist_backward.default, _aten._pdist_forward.default, _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default, _aten.view_as_complex.default,
})  # fmt: skip
"""Operators that refuse some strides, besides views."""

_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})


# ---- values whose strides are not certain


def read_in_order(joint: Joint) -> Mapping[fx.Node, Collection[fx.Node]]:
    """Return for nodes the arguments that a program has to make contiguous for them.

    Args:
        joint: The graph.
    """
    found, uncertain = {}, _uncertain(joint)
    for node in joint.graph.nodes if uncertain else ():
        if node.op == "call_function" and canonical(node) is node:
            strict = frozenset(source for source in strict_sources(node) if source in uncertain)
            if strict:
                found[node] = strict
    return found


def _uncertain(joint: Joint) -> set[fx.Node]:
    """Return the nodes whose values may have other strides in a program than in the trace."""
    updated = {port.name for node, port in joint.outputs if port.kind == "update" and not _contiguous(node)}
    found = {node for node, port in joint.inputs if port.kind == "buffer" and port.name in updated}
    for node in joint.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if not _contiguous(node):
                found.add(node)
        elif node.op == "call_function" and _is_uncertain(node, found):
            found.add(node)
    return found


def _is_uncertain(node: fx.Node, found: Collection[fx.Node]) -> bool:
    if node.target is operator.getitem:
        return node.args[0] in found
    kept = canonical(node)
    if kept is not node:  # a copy that no program makes
        return kept in found or not _alike(kept, node)
    if node.target in FIXED or node.kwargs.get("memory_format") is torch.contiguous_format or _is_row(node):
        return False
    sources = node.all_input_nodes
    if any(source in found for source in sources):
        return not (strict_sources(node) and _contiguous(node))
    return node.target in UNTRACED and not all(map(_contiguous, sources))


def strict_sources(node: fx.Node) -> Sequence[fx.Node]:
    """Return the tensors of an operator that has another result, or none, for some of their strides."""
    if node.target in _VIEWS:
        old, new = (tuple(map(int, each.meta["val"].shape)) for each in (node.args[0], node))  # type: ignore[union-attr]
        return () if splits_only(old, new) else node.all_input_nodes
    if node.target is _aten.view.dtype:
        source = node.args[0]
        same = source.meta["val"].itemsize == node.meta["val"].itemsize  # type: ignore[union-attr]
        return () if same else node.all_input_nodes
    return node.all_input_nodes if node.target in _PARTICULAR or draws(node) else ()


def splits_only(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether each dimension of a shape is a number of dimensions of another, in order.

    >>> splits_only((6, 4), (2, 3, 1, 4)), splits_only((6, 4), (24,))
    (True, False)
    """
    if prod(old) == 0:
        return True
    parts = iter(size for size in new if size != 1)
    for size in (size for size in old if size != 1):
        joined = 1
        while joined < size:
            joined *= next(parts)
        if joined != size:
            return False
    return True


def _is_row(node: fx.Node) -> bool:
    """Return whether a value of its own memory has one dimension, besides those of size 1."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and sum(size != 1 for size in value.shape) <= 1 and not is_view(node)


def _contiguous(node: fx.Node) -> bool:
    values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else (node.meta["val"],)
    return all(value.is_contiguous() for value in values if isinstance(value, Tensor))


def _alike(left: fx.Node, right: fx.Node) -> bool:
    """Return whether the tensors of two nodes have the same strides, but where they do not matter."""
    a, b = left.meta["val"], right.meta["val"]
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(x == y for size, x, y in pairs if size != 1)


# ---- operators that read memory at given distances


def state_strides(joint: Joint) -> Joint:
    """Return a graph whose operators that read memory at given distances read tensors that lie as they expect.

    Args:
        joint: The graph; its nodes are changed in place.

    Raises:
        CaptureError: One reads memory outside of the tensor that a program has for it.
    """
    instead: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        rewrite = _BY_STRIDES.get(node.target)
        if rewrite is not None:
            with joint.graph.inserting_before(node):
                made = instead[node] = rewrite(_Writer(joint.graph, node))
            node.replace_all_uses_with(made)
            joint.graph.erase_node(node)
    return replace(joint, outputs=tuple((instead.get(node, node), port) for node, port in joint.outputs))


class _Writer:
    """A rewrite of a node.

    Args:
        graph: Its graph, which inserts before it.
        node: The node.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.node = node
        self._graph = graph

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator for the node."""
        made = self._graph.call_function(target, args, kwargs)
        given = map_arg((args, kwargs), lambda one: one.meta["val"])
        made.meta = {**self.node.meta, "val": target(*given[0], **given[1])}
        return made

    def given(self, name: str) -> Any:
        """Return an argument."""
        node = self.node
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        place = names.index(name)
        return node.args[place] if place < len(node.args) else node.kwargs.get(name)

    def flat(self, source: fx.Node) -> tuple[fx.Node, Sequence[int]]:
        """Return a tensor's elements in the order of memory, and the order of its dimensions there."""
        value = source.meta["val"]
        order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
        if not value.permute(order).is_contiguous():
            raise self.refusal("reads memory of a tensor whose elements do not lie side by side")
        if order != sorted(order):
            source = self.add(_aten.permute.default, source, order)
        packed = self.add(_aten.clone.default, source, memory_format=torch.contiguous_format)
        return self.add(_aten.view.default, packed, [-1]), order

    def start(self, source: fx.Node) -> int:
        """Return where the strides begin, in elements from the beginning of a tensor."""
        offset, of = self.given("storage_offset"), self.given("self").meta["val"]
        start = int(of.storage_offset() if offset is None else offset) - int(source.meta["val"].storage_offset())
        steps = zip(self.given("size"), self.given("stride"), strict=True)
        last = start + sum((int(size) - 1) * int(step) for size, step in steps)
        if start < 0 or last >= max(1, source.meta["val"].numel()):
            raise self.refusal("reads memory outside of its tensor")
        return start

    def refusal(self, reason: str) -> Exception:
        """Return the error for a node that no program can run."""
        advice = "Use indexing, unfold or reshape instead of as_strided"
        return node_refusal(self.node, f"{self.node.target} {reason}", advice)


def _as_strided(writer: _Writer) -> fx.Node:
    source = writer.given("self")
    while is_view(source) or _is_part(source):
        source = source.all_input_nodes[0]
    start = writer.start(source)
    flat, _ = writer.flat(source)
    if start:
        flat = writer.add(_aten.slice.Tensor, flat, 0, start)
    target = writer.node.target
    return writer.add(target, flat, writer.given("size"), writer.given("stride"))  # from the first element on


def _is_part(node: fx.Node) -> bool:
    """Return whether a value is one of several views of a tensor."""
    return node.target is operator.getitem and all(one.alias_info for one in node.args[0].target._schema.returns)  # type: ignore[union-attr]


def _as_strided_scatter(writer: _Writer) -> fx.Node:
    source, into = writer.given("self"), writer.given("src")
    start = writer.start(source)
    flat, order = writer.flat(source)
    value = source.meta["val"]
    places = writer.add(_aten.arange.default, value.numel(), dtype=torch.int64, device=value.device)
    places = writer.add(_aten.as_strided.default, places, writer.given("size"), writer.given("stride"), start)
    made = writer.add(_aten.put.default, flat, places, into)
    made = writer.add(_aten.view.default, made, [value.shape[dim] for dim in order])
    return writer.add(_aten.permute.default, made, sorted(range(len(order)), key=order.__getitem__))


_BY_STRIDES: Mapping[Any, Callable[[_Writer], fx.Node]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_copy.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}
