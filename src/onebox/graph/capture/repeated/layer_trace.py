"""The trace of one call of a layer, and its copies in the graph of the model."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from onebox.graph.capture.repeated.layer_operator import BACKWARD, FORWARD, Unrepeatable
from onebox.graph.capture.traced_calls import fails_in_backward

LayerNames = Mapping[str, str]
"""Paths of modules of one call for those of another."""


class _Called(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        made = self._function(*given)
        if fails_in_backward(made):
            raise Unrepeatable("a result whose backward fails")
        return made


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """The graph of one call of a layer.

    Args:
        inputs: Its placeholders for tensors of the call, with their numbers.
        tangents: Its placeholders for gradients of results that have one, in order.
        forward: Nodes of forward, in order.
        backward: Nodes of backward, in order.
        results: The node of each result.
        gradients: The node of the gradient of each tensor that requires one, in order.
    """

    inputs: Sequence[tuple[fx.Node, int]]
    tangents: Sequence[fx.Node]
    forward: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    results: Sequence[fx.Node]
    gradients: Sequence[fx.Node]

    @property
    def gradient_specs(self) -> list[Tensor]:
        """The gradients as tensors without values."""
        return [node.meta["val"] for node in self.gradients]


def trace_layer(function: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor]) -> LayerTrace:
    """Trace a call of a layer.

    Args:
        function: Maps the tensors of the call to its results.
        given: Leaves without values.

    Raises:
        Unrepeatable: The call writes to its tensors, or a tensor that requires a gradient gets none.
    """
    with contextlib.ExitStack() as stack:
        graph = aot_export_joint_with_descriptors(stack, _Called(function), tuple(given)).graph_module.graph
    inputs, tangents = [], []
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            desc = node.meta["desc"]
            if isinstance(desc, PlainAOTInput):
                inputs.append((node, desc.idx))
            elif isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
                tangents.append((desc.output.idx, node))
                behind.add(node)
            else:
                raise Unrepeatable(f"an input of another kind: {desc}")
        elif node.op == "call_function":
            back = node.meta.get("partitioner_tag") == "is_backward" or not behind.isdisjoint(node.all_input_nodes)
            (backward if back else forward).append(node)
            if back:
                behind.add(node)
        elif node.op != "output":
            raise Unrepeatable(f"a constant: {node.target}")
    results, gradients = _ends(graph)
    wanted = [number for number, tensor in enumerate(given) if tensor.requires_grad and torch.is_grad_enabled()]
    if sorted(gradients) != wanted:
        raise Unrepeatable("a tensor without a gradient")
    return LayerTrace(
        inputs=inputs,
        tangents=[node for _, node in sorted(tangents, key=operator.itemgetter(0))],
        forward=forward,
        backward=backward,
        results=[results[number] for number in range(len(results))],
        gradients=[gradients[number] for number in wanted],
    )


def _ends(graph: fx.Graph) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """Return the nodes of results and of gradients, by the numbers of results and of given tensors."""
    output = next(node for node in graph.nodes if node.op == "output")
    results: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(desc, PlainAOTOutput):
            results[desc.idx] = node
        elif node is None:
            continue  # the gradient of a tensor that requires none
        elif isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
            gradients[desc.grad_of.idx] = node
        else:
            raise Unrepeatable(f"an output of another kind: {desc}")
    if sorted(results) != list(range(len(results))) or not all(isinstance(n, fx.Node) for n in results.values()):
        raise Unrepeatable("a result that is no node of its own")
    return results, gradients


@dataclass(kw_only=True)
class LayerCopy:
    """A copy of the trace of a layer, for one call.

    Args:
        trace: The trace.
        names: The modules of the call for those of the traced one.
        number: The number of the call.
    """

    trace: LayerTrace
    names: LayerNames
    number: int
    _known: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def put_forward(self, site: fx.Node) -> None:
        """Replace the operator of the call by its nodes."""
        given: Any = site.args[0]
        self._known |= {node: given[number] for node, number in self.trace.inputs}
        self._put(site, self.trace.forward, self.trace.results)

    def put_backward(self, site: fx.Node) -> None:
        """Replace the operator of the call's gradient by its nodes."""
        given: Any = site.args[0]
        self._known |= zip(self.trace.tangents, given, strict=True)
        self._put(site, self.trace.backward, self.trace.gradients)

    def _put(self, site: fx.Node, nodes: Sequence[fx.Node], ends: Sequence[fx.Node]) -> None:
        graph = site.graph
        with graph.inserting_before(site):
            for node in nodes:
                made = self._known[node] = graph.node_copy(node, self._known.__getitem__)
                if "seq_nr" in made.meta:  # equal for an operator and its gradient, of this call alone
                    made.meta["seq_nr"] = self.number, made.meta["seq_nr"]
                for key in ("nn_module_stack", "fwd_nn_module_stack"):
                    if made.meta.get(key):
                        made.meta[key] = self._renamed(made.meta[key])
        for user in list(site.users):
            user.replace_all_uses_with(self._known[ends[user.args[1]]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(site)

    def _renamed(self, stack: Mapping[str, Any]) -> dict[str, Any]:
        named = {self.names.get(path, path): value for path, value in stack.items()}
        return {path: (path, *value[1:]) for path, value in named.items()}


def _require_order(site: fx.Node, trace: LayerTrace) -> None:
    """Require that no sum within a layer is added to one from outside of it: ``x + (a + b)`` is not ``(x + a) + b``."""
    own = set(trace.backward)
    for made in site.users:
        gradient = trace.gradients[made.args[1]]  # type: ignore[index]
        if gradient in own and gradient.target is torch.ops.aten.add.Tensor:
            for user in made.users:
                if user.target is torch.ops.aten.add.Tensor and user.args[1] is made:
                    raise Unrepeatable("a gradient is summed within the layer and outside of it")


def put_copies(graph: fx.Graph, copies: Mapping[int, LayerCopy]) -> None:
    """Replace the operators of calls of layers in a graph by the nodes of these layers.

    Args:
        graph: Changed in place.
        copies: The copy for each call, by its number.

    Raises:
        Unrepeatable: A sum of gradients would be another; the graph is then as it was.
    """
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        _require_order(node, copies[node.args[1]].trace)
    for node in list(graph.nodes):
        if node.target is FORWARD:
            copies[node.args[1]].put_forward(node)
        elif node.target is BACKWARD:
            copies[node.args[1]].put_backward(node)
    graph.eliminate_dead_code()
