"""Mixed precision: a graph whose products are in bfloat16 in some of its stages, and everything else in float32.

In such a stage matrix products and convolutions, forward and backward, read and make bfloat16, summing in float32 as
the libraries do; their outputs are widened for all other readers. A value is rounded once in a stage, however many
products read it or views of it. A parameter in bfloat16 is an input of its own, made of the parameter once a step.
Batch norms of products' outputs read and make bfloat16, too: they compute in float32, with weights and statistics of
float32. Operators that only choose among elements (relu, max pooling, concatenation and their gradients) commute with
widening: they are computed in bfloat16 where all their inputs have been widened, to the same bits.

Widening is exact, so phases recompute widened values, as they do views: the bfloat16 value is kept or sent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from onebox.errors import UsageError
from onebox.graph.capture.joint import Joint, Port
from onebox.graph.lower.lowering import canonical, is_view
from onebox.graph.lower.segments import Segments, picks, root_of

_aten = torch.ops.aten
_WIDE, _NARROW = torch.float32, torch.bfloat16

PRODUCTS = frozenset(
    {
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.bmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten.mm.default,
    }
)
"""Operators that read bfloat16 in stages of that precision."""


_NORMS: Mapping[Any, tuple[int, ...]] = {
    _aten._native_batch_norm_legit_functional.default: (0,),
    _aten._native_batch_norm_legit_no_training.default: (0,),
    _aten.native_batch_norm_backward.default: (1, 0),
}
"""Batch norms, with the indices of the arguments that are rounded where the first of them has been widened."""


def _backward_of_apart(node: fx.Node) -> bool:
    """Return whether the windows of a max pooling do not overlap, so that its gradient needs no sums."""
    kernel, stride, dilation = (list(node.args[place]) for place in (2, 3, 5))  # type: ignore[arg-type]
    return (not stride or kernel == stride) and set(dilation) <= {1}


_CHOOSING: Mapping[Any, Callable[[fx.Node], bool]] = {
    _aten.cat.default: lambda _: True,
    _aten.clone.default: lambda _: True,
    _aten.constant_pad_nd.default: lambda node: not any(node.args[2:]),
    _aten.max_pool2d_with_indices.default: lambda _: True,
    _aten.max_pool2d_with_indices_backward.default: _backward_of_apart,
    _aten.relu.default: lambda _: True,
    _aten.threshold_backward.default: lambda node: node.args[2] in (0, 0.0),
}
"""Operators each of whose elements is one of their inputs', or 0, with the condition for that."""


def to_mixed_precision(
    joint: Joint, segments: Segments, place: Sequence[int], stages: Collection[int]
) -> tuple[Joint, Segments]:
    """Return a copy of a graph whose products are in bfloat16 in some stages, and the segments of its nodes.

    Args:
        joint: The graph.
        segments: The segments of its nodes.
        place: The stage of each segment.
        stages: The stages in question.

    Raises:
        UsageError: A product of such a stage is of float64.
    """
    return _Narrowing(joint, segments, place, frozenset(stages)).run()


class _Narrowing:
    """A copy of a graph under construction."""

    def __init__(self, joint: Joint, segments: Segments, place: Sequence[int], stages: frozenset[int]) -> None:
        self._joint = joint
        self._segments = segments
        self._place = place
        self._stages = stages
        self._ports = dict(joint.inputs)
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._of: dict[fx.Node, int] = {}
        self._inputs: dict[fx.Node, Port] = {}
        self._rounded: dict[tuple[fx.Node, int], fx.Node] = {}
        self._widened: dict[fx.Node, fx.Node] = {}

    def run(self) -> tuple[Joint, Segments]:
        """Return the copy of the graph, and the segments of its nodes."""
        for node in self._joint.graph.nodes:
            self._new[node] = self._copied(node)
        names = [port for _, port in self._joint.inputs]
        inputs = [(self._new[node], port) for node, port in self._joint.inputs]
        inputs += [(node, port) for node, port in self._inputs.items() if port not in names]
        joint = replace(
            self._joint,
            graph=self._graph,
            inputs=tuple(inputs),
            outputs=tuple((self._new[node], port) for node, port in self._joint.outputs),
        )
        return joint, Segments(names=self._segments.names, of=self._of)

    def _copied(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function":
            copy = self._graph.node_copy(node, self._new.__getitem__)
            if node in self._ports:
                self._inputs[copy] = self._ports[node]
            return copy
        source = self._new[node.all_input_nodes[0]] if picks(node) else None
        if source is not None and source.meta["val"][node.args[1]].dtype is not node.meta["val"].dtype:
            return self._widen(self._emit(operator.getitem, (source, node.args[1]), {}, node), node)
        if self._is_product(node) or self._chooses(node):
            made = self._emit(node.target, *self._in_bfloat16(node), node)
            return self._widen(made, node) if isinstance(made.meta["val"], Tensor) else made
        if self._normalises(node):
            return self._normalised(node)
        copy = self._graph.node_copy(node, lambda source: self._given(source, node))
        self._of[copy] = self._segments.of[node]
        return copy

    def _given(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the float32 argument of a node.

        The gradient of relu depends on signs alone, so it reads bfloat16 where products have that value anyway.
        Positive values stay positive by rounding, unless they are at most 2^-134.
        """
        wide = self._new[source]
        if reader.target is _aten.threshold_backward.default and self._is_narrow(reader):
            rounded = self._rounded.get((canonical(wide), self._place[self._segments.of[reader]]))
            if rounded is not None and source is reader.args[1] and reader.args[2] == 0:
                return self._widen(rounded, reader)
        return wide

    # ---- nodes in bfloat16

    def _is_narrow(self, node: fx.Node) -> bool:
        return self._place[self._segments.of[node]] in self._stages

    def _is_product(self, node: fx.Node) -> bool:
        if node.target not in PRODUCTS or not self._is_narrow(node):
            return False
        types = {source.meta["val"].dtype for source in _floating(node)}
        if torch.float64 in types:
            raise UsageError(
                f"precision='bf16' of the stage with segment {self._segments.names[self._segments.of[node]]!r}, whose "
                "products are of float64: bf16 is for models of float32; leave it out, or call model.float() first"
            )
        return types == {_WIDE}

    def _chooses(self, node: fx.Node) -> bool:
        """Return whether a node only chooses among elements that have been widened."""
        fits = _CHOOSING.get(node.target)
        if fits is None or not self._is_narrow(node) or not fits(node):
            return False
        sources = [self._new[source] for source in _floating(node)]
        return bool(sources) and all(root_of(source) in self._widened for source in sources)

    def _normalises(self, node: fx.Node) -> bool:
        """Return whether a node is a batch norm of a widened value, or the gradient of one."""
        if node.target not in _NORMS or not self._is_narrow(node):
            return False
        source: Any = node.args[_NORMS[node.target][0]]
        return root_of(self._new[source]) in self._widened

    def _normalised(self, node: fx.Node) -> fx.Node:
        """Return a batch norm that reads bfloat16, and whose first output is bfloat16."""
        stage = self._place[self._segments.of[node]]
        args: list[Any] = list(map_arg(node.args, self._new.__getitem__))
        for place in _NORMS[node.target]:
            args[place] = self._round(args[place], stage, node)
        made = self._emit(node.target, tuple(args), node.kwargs, node)
        first, *rest = node.meta["val"]  # these are float32, where the tracer says bfloat16
        made.meta["val"] = (None if first is None else made.meta["val"][0], *rest)
        return made

    def _in_bfloat16(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node, rounded."""
        stage = self._place[self._segments.of[node]]

        def given(source: fx.Node) -> fx.Node:
            new = self._new[source]
            return self._round(new, stage, node) if source.meta["val"].is_floating_point() else new

        return map_arg(node.args, given), map_arg(node.kwargs, given)

    def _round(self, wide: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        """Return a value in bfloat16, rounded at the base that all its views share."""
        wide = canonical(wide)
        if wide in self._widened:
            return self._widened[wide]
        if (wide, stage) not in self._rounded:
            self._rounded[wide, stage] = self._rounded_anew(wide, stage, reader)
        return self._rounded[wide, stage]

    def _rounded_anew(self, wide: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        if self._is_round(wide):
            return self._parameter(wide)
        if is_view(wide) and not wide.args[0].meta["val"].is_complex():  # type: ignore[union-attr]
            source = canonical(wide.args[0])  # type: ignore[arg-type]
            whole = source.meta["val"].numel() <= wide.meta["val"].numel()
            if whole or self._is_round(root_of(source)):
                inner = self._round(source, stage, reader)
                return self._emit(wide.target, (inner, *wide.args[1:]), wide.kwargs, reader)
        return self._emit(_aten._to_copy.default, (wide,), {"dtype": _NARROW}, reader)

    def _is_round(self, wide: fx.Node) -> bool:
        """Return whether a value exists in bfloat16 anyway."""
        port = self._inputs.get(wide)
        return wide in self._widened or (port is not None and port.kind == "parameter")

    def _parameter(self, wide: fx.Node) -> fx.Node:
        """Return the input for a parameter in bfloat16; all stages share it."""
        own = Port("rounded", self._inputs[wide].name)
        for node, known in self._inputs.items():
            if known == own:
                return node
        node = self._graph.placeholder(f"{wide.name}_rounded")
        node.meta["val"] = wide.meta["val"].to(_NARROW)
        self._inputs[node] = own
        return node

    def _widen(self, narrow: fx.Node, node: fx.Node) -> fx.Node:
        """Return a value made in bfloat16 in the type of the original node."""
        wide = self._emit(_aten._to_copy.default, (narrow,), {"dtype": node.meta["val"].dtype}, node)
        self._widened[wide] = narrow
        return wide

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: fx.Node) -> fx.Node:
        """Add a node, in the segment and with the origin of another one."""
        made = self._graph.call_function(target, args, dict(kwargs))
        made.meta = {key: value for key, value in like.meta.items() if key not in _OWN}
        given: Any = map_arg((made.args, made.kwargs), lambda source: source.meta["val"])
        fakes: list[Any] = [value for value in pytree.tree_leaves(given) if isinstance(value, FakeTensor)]
        with fakes[0].fake_mode:
            made.meta["val"] = target(*given[0], **given[1])
        self._of[made] = self._segments.of[like]
        return made


_OWN = frozenset({"val", "tensor_meta", "is_gradient_acc"})
"""Metadata that belongs to one node alone."""


def _floating(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of floating point that a node reads."""
    return [source for source in node.all_input_nodes if source.meta["val"].is_floating_point()]
