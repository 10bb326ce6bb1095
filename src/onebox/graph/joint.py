"""The joint graph: forward and backward of an exported model as one functional ATen graph with named ends.

This file alone touches AOTAutograd's export, an internal of PyTorch: ``aot_export_joint_with_descriptors``. Its
descriptors say what each input and output of the graph is; here they become :class:`Port`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from onebox.errors import CaptureError
from onebox.graph.capture import Captured, quiet
from onebox.graph.fuse import fuse
from onebox.graph.locate import explain, node_refusal
from onebox.graph.portable import portable_operators


class Port(NamedTuple):
    """What an input or an output of a graph or program is.

    Args:
        kind: ``parameter``, ``buffer``, ``constant``, ``leaf`` (a tensor of the inputs or targets), ``weight`` (the
            gradient of the loss: the micro-batch's share of the batch), ``result`` (0 is the loss), ``update`` (new
            value of a buffer), ``gradient`` (of a parameter), ``rounded`` (a parameter in bfloat16), ``value`` (from
            one phase to another) or ``chunk`` (some rows of a value).
        name: Qualified name, or index.
    """

    kind: Literal[
        "parameter", "buffer", "constant", "leaf", "weight", "result", "update", "gradient", "rounded", "value", "chunk"
    ]
    name: str | int


_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A functional ATen graph.

    Args:
        graph: Its nodes.
        inputs: For each placeholder, in order, its port; ``None`` for one that nobody reads.
        outputs: For each output node, in order, its port; outputs that are missing or unwanted are left out.
        constants: Tensors that the graph holds itself, by the name of their port.
    """

    graph: fx.Graph
    inputs: tuple[tuple[fx.Node, Port], ...]
    outputs: tuple[tuple[fx.Node, Port], ...]
    constants: dict[str, Tensor]

    def copied(self) -> Joint:
        """Return a copy whose graph may be changed."""
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            known[node] = graph.node_copy(node, known.__getitem__)
        return Joint(
            graph=graph,
            inputs=tuple((known[node], port) for node, port in self.inputs),
            outputs=tuple((known[node], port) for node, port in self.outputs),
            constants=self.constants,
        )


def joint_graph(captured: Captured, *, backward: bool) -> Joint:
    """Trace an exported model through AOTAutograd.

    Args:
        captured: The model.
        backward: Whether to trace gradients too.

    Raises:
        CaptureError: AOTAutograd refuses, or no parameter needs a gradient.
    """
    module = captured.exported.module()
    _make_buffers(module)
    if captured.fuse:
        fuse(module)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(portable_operators(captured.device_type))
        if not backward:
            stack.enter_context(torch.no_grad())
        try:
            joint = aot_export_joint_with_descriptors(stack, module, captured.example)
        except Exception as error:
            raise explain(error, "The model", "while its gradients were traced") from error
        graph = joint.graph_module.graph
        _forget_statistics(graph)
        widen_statistics(graph)
        outputs = list(_outputs(graph, captured))
        constants: dict[str, Tensor] = {}
        inputs = [
            (node, _input_port(node.meta["desc"], captured, module, constants))
            for node in graph.nodes
            if node.op == "placeholder"
        ]
        for node in graph.nodes:
            if node.op == "get_attr":
                constants[node.target] = getattr(joint.graph_module, node.target)
                inputs.append((node, Port("constant", node.target)))
    if backward and not any(port.kind == "gradient" for _, port in outputs):
        raise CaptureError("no parameter gets a gradient from the loss: check requires_grad and .detach() calls")
    return Joint(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs), constants=constants)


def _make_buffers(module: nn.Module) -> None:
    """Let tensors that are plain attributes be buffers: AOTAutograd traces no others."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                delattr(part, name)
                part.register_buffer(name, value)


def _forget_statistics(graph: fx.Graph) -> None:
    """Let the gradient of training-mode batch norm no longer name the running statistics, which it does not read.

    Its arguments are (gradient, x, weight, running mean, running variance, mean, 1 / deviation, training, eps, mask).
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def widen_statistics(graph: fx.Graph) -> None:
    """Correct the types of statistics that the tracer takes for others than the kernels make.

    Those of batch norm with inputs in bfloat16 and weights in float32 are float32, as the weight is, on CPUs and GPUs.
    The logarithm of attention's sums on CPUs is float64 where the queries are; torch 2.11 says float32.
    """
    for node in graph.find_nodes(op="call_function", target=_BATCH_NORM):
        weight = node.args[1]
        if isinstance(weight, fx.Node):
            _make_type(node, (1, 2), weight.meta["val"].dtype)
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        if node.args[0].meta["val"].dtype is torch.float64:
            _make_type(node, (1,), torch.float64)


def _make_type(node: fx.Node, places: tuple[int, ...], dtype: torch.dtype) -> None:
    """Let outputs of a node be of a type, and the nodes that name them."""
    values: dict[Any, Any] = dict(enumerate(node.meta["val"]))
    for place in places:
        values[place] = values[place].to(dtype)
    node.meta["val"] = tuple(values.values())
    for user in node.users:
        user.meta["val"] = values[user.args[1]]


def _input_port(desc: Any, captured: Captured, module: fx.GraphModule, constants: dict[str, Tensor]) -> Port:
    if isinstance(desc, ParamAOTInput | BufferAOTInput):
        name = captured.aliases.get(desc.target)
        if name is None:
            constants[desc.target] = _attribute(module, desc.target)
            return Port("constant", desc.target)
        return Port("parameter" if isinstance(desc, ParamAOTInput) else "buffer", name)
    if isinstance(desc, PlainAOTInput):
        return Port("leaf", desc.idx)
    if isinstance(desc, TangentAOTInput) and desc.output == PlainAOTOutput(0):
        return Port("weight", 0)
    raise CaptureError(f"the graph has an input of a kind that is not supported: {desc!r}")


def _attribute(module: Any, target: str) -> Tensor:
    for part in target.split("."):
        module = getattr(module, part)
    tensor: Tensor = module
    return tensor


def _outputs(graph: fx.Graph, captured: Captured) -> list[tuple[fx.Node, Port]]:
    output = next(node for node in graph.nodes if node.op == "output")
    found: list[tuple[fx.Node, Port]] = []
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if not isinstance(node, fx.Node):
            continue
        if isinstance(desc, PlainAOTOutput):
            found.append((node, Port("result", desc.idx)))
        elif isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput):
            name = captured.aliases.get(desc.grad_of.target)
            if name is not None:
                found.append((node, Port("gradient", name)))
        elif isinstance(desc, InputMutationAOTOutput):
            found.append((node, Port("update", _written_buffer(node, desc.mutated_input, captured))))
    names = [port for _, port in found]
    if len(set(names)) != len(names):
        raise CaptureError("a tied parameter has two gradients in one graph; please report this model")
    return found


def _written_buffer(node: fx.Node, target: Any, captured: Captured) -> str:
    """Return the name of the buffer that forward writes to; only buffers may be written to."""
    if isinstance(target, BufferAOTInput):
        return captured.aliases[target.target]
    what = "a parameter" if isinstance(target, ParamAOTInput) else "its inputs"
    raise node_refusal(node, f"forward writes to {what}", "Write to a copy instead: x = x.clone()")
