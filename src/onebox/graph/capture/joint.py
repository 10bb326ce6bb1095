"""The joint graph: forward and backward of a model as one functional ATen graph with named ends.

This file, and for single layers :mod:`onebox.graph.capture.repeated.layer_trace`, touch AOTAutograd's export, an
internal of PyTorch: ``aot_export_joint_with_descriptors``. Its
descriptors identify each input and output of the graph; here they become :class:`Port`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.func import functional_call
from torch.fx import traceback as fx_traceback

from onebox.errors import CaptureError
from onebox.graph.capture.locate import node_refusal
from onebox.graph.capture.operator_support import BATCH_NORMS, restate, state_gpu_outputs
from onebox.graph.capture.repeated.layers import RepeatedLayers
from onebox.graph.capture.symbolic_sizes import Symbols, Varying, fake_inputs, with_numbers


class Port(NamedTuple):
    """Identity of an input or an output of a graph or program.

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
        inputs: For each placeholder, in order, its port; ``None`` for an unread one.
        outputs: For each output node, in order, its port; missing or unwanted outputs are left out.
        constants: Constant tensors of the graph, by the name of their port.
        symbols: Symbols of varying sizes; ``None`` where all are numbers.
    """

    graph: fx.Graph
    inputs: tuple[tuple[fx.Node, Port], ...]
    outputs: tuple[tuple[fx.Node, Port], ...]
    constants: dict[str, Tensor]
    symbols: Symbols | None = None

    def sized(self, leaves: Sequence[Tensor]) -> Joint | None:
        """Return the graph for inputs and targets of some sizes; ``None`` where it is not valid for them.

        Args:
            leaves: Their tensors, flattened.
        """
        values = None if self.symbols is None else self.symbols.values(leaves)
        if self.symbols is None or values is None:
            return None
        graph, known = with_numbers(self.graph, self.symbols, values)
        return Joint(
            graph=graph,
            inputs=tuple((known[node], port) for node, port in self.inputs),
            outputs=tuple((known[node], port) for node, port in self.outputs),
            constants=self.constants,
        )

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


def trace(
    module: nn.Module,
    example: tuple[Tensor, ...],
    state: Mapping[str, str],
    known: Mapping[int, str],
    *,
    backward: bool,
    varying: Varying,
    device_type: str = "cpu",
    repeated: RepeatedLayers | None = None,
) -> Joint:
    """Trace a module through AOTAutograd: the user's own forward, custom gradients and hooks run under the tracer.

    Args:
        module: Maps (inputs, targets) to a tuple of scalars, of which the first is the loss. Each of its parameters and
            buffers is one tensor.
        example: The tensors of inputs and targets; only shapes and types count.
        state: Names in the state of the module's parameters and buffers. The graph may write to no other tensors.
        known: Names in the state of tensors, by their identity: the graph may hold some of them otherwise than by the
            module, in a hook for example.
        backward: Whether to trace gradients too.
        varying: Sizes of inputs and targets for which there are to be symbols.
        device_type: The type of device on which the graph is to run.
        repeated: The module's layers of which equal ones are traced once.

    Raises:
        CaptureError: No parameter gets a gradient, or forward writes to a tensor that is not a buffer.
        Exception: Whatever the user's code, or AOTAutograd, raises.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(fx_traceback.preserve_node_meta())
        if not backward:
            stack.enter_context(torch.no_grad())
        given, symbols = fake_inputs(example, varying)
        if repeated is not None:
            stack.enter_context(repeated.found(*_without_values(module, given)))
        joint = aot_export_joint_with_descriptors(stack, module, given)
        graph = joint.graph_module.graph
        if repeated is not None:
            repeated.put(graph)
        _state_checks(graph)
        _forget_statistics(graph)
        widen_statistics(graph)
        if device_type != "cpu":
            state_gpu_outputs(graph)
        outputs = with_assertions(graph, list(_outputs(graph, state)))
        constants: dict[str, Tensor] = {}
        inputs = [
            (node, _input_port(node.meta["desc"], module, state, constants))
            for node in graph.nodes
            if node.op == "placeholder"
        ]
        for node in graph.nodes:
            if node.op == "get_attr":
                inputs.append((node, _attribute_port(joint.graph_module, node.target, known, constants)))
    if backward and not any(port.kind == "gradient" for _, port in outputs):
        raise CaptureError("no parameter gets a gradient from the loss: check requires_grad and .detach() calls")
    return Joint(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs), constants=constants, symbols=symbols)


def _without_values(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Callable[[], Any], list[Tensor]]:
    """Return a function that runs forward on tensors without values, and these."""
    mode = given[0].fake_mode  # type: ignore[attr-defined]
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    made = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in own.items()}

    def run() -> None:
        with mode:
            functional_call(module, made, given)

    return run, [*made.values(), *given]


def _attribute_port(module: nn.Module, target: str, known: Mapping[int, str], constants: dict[str, Tensor]) -> Port:
    """Return the port of a tensor that the tracer made an attribute of the graph."""
    tensor = _attribute(module, target)
    name = known.get(id(tensor))
    if name is not None:
        return Port("parameter" if isinstance(tensor, nn.Parameter) else "buffer", name)
    constants[target] = tensor
    return Port("constant", target)


def _forget_statistics(graph: fx.Graph) -> None:
    """Remove the unread running statistics from the arguments of training-mode batch norm's gradient.

    Its arguments are (gradient, x, weight, running mean, running variance, mean, 1 / deviation, training, eps, mask).
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def widen_statistics(graph: fx.Graph) -> None:
    """Correct the types of statistics where the tracer's differ from the kernels'.

    Those of batch norm with inputs in bfloat16 are float32 on CPUs and GPUs if its weights or its running statistics
    are; new running statistics are of the type of the old ones, of which they are changed copies.
    The logarithm of attention's sums on CPUs is float64 where the queries are; torch 2.11 says float32.
    """
    for target, count in BATCH_NORMS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            beside = [value.meta["val"].dtype for value in node.args[1 : 1 + count] if isinstance(value, fx.Node)]
            if beside:
                restate(node, {place: node.meta["val"][place].to(beside[0]) for place in (1, 2)})
    for node in graph.find_nodes(op="call_function", target=_BATCH_NORM):
        running = {place: node.args[place] for place in (3, 4) if isinstance(node.args[place], fx.Node)}
        restate(node, {place: node.meta["val"][place].to(old.meta["val"].dtype) for place, old in running.items()})
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        if node.args[0].meta["val"].dtype is torch.float64:
            restate(node, {1: node.meta["val"][1].to(torch.float64)})


def _input_port(desc: Any, module: nn.Module, state: Mapping[str, str], constants: dict[str, Tensor]) -> Port:
    if isinstance(desc, ParamAOTInput | BufferAOTInput):
        name = state.get(desc.target)
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


def _outputs(graph: fx.Graph, state: Mapping[str, str]) -> list[tuple[fx.Node, Port]]:
    output = next(node for node in graph.nodes if node.op == "output")
    found: list[tuple[fx.Node, Port]] = []
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if not isinstance(node, fx.Node):
            continue
        if isinstance(desc, PlainAOTOutput):
            found.append((node, Port("result", desc.idx)))
        elif isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput):
            found.append((node, Port("gradient", state[desc.grad_of.target])))
        elif isinstance(desc, InputMutationAOTOutput):
            found.append((node, Port("update", _written_buffer(node, desc.mutated_input, state))))
    return found


def _state_checks(graph: fx.Graph) -> None:
    """Replace checks of results of linear algebra, which the tracer orders by tokens, by assertions."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        token, check, *given = node.args
        if check is not torch.ops.aten._linalg_check_errors.default:
            raise node_refusal(node, f"{check} has an effect besides its result", "Leave it out")
        for made in list(node.users):  # the next token, as a check has no result
            made.replace_all_uses_with(token)
            graph.erase_node(made)
        failed = "a matrix is singular, or not positive-definite: the computation could not be completed"
        with graph.inserting_before(node):
            right = _added(graph, node, torch.ops.aten.eq.Scalar, given[0], 0)
            right = _added(graph, node, torch.ops.aten.all.default, right)
            graph.call_function(torch.ops.aten._assert_async.msg, (right, f"{given[1]}: {failed}")).meta = dict(
                node.meta
            )
        graph.erase_node(node)
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], ForwardTokenAOTInput | BackwardTokenAOTInput):
            node.replace_all_uses_with(None)
            graph.erase_node(node)


def _added(graph: fx.Graph, like: fx.Node, target: Any, source: fx.Node, *rest: Any) -> fx.Node:
    """Add an operator where another one is."""
    made = graph.call_function(target, (source, *rest))
    made.meta = {**like.meta, "val": target(source.meta["val"], *rest)}
    return made


_ASSERTIONS = {
    torch.ops.aten._assert_async.default: "Expected Tensor with single nonzero value, but got zero",
    torch.ops.aten._assert_async.msg: "",
}
"""Operators that check a value and return nothing, with the messages of those that are given none."""

fx.node.has_side_effect(torch.ops.aten._assert_async.default)  # the tracer leaves it out otherwise, unlike the other


def with_assertions(graph: fx.Graph, outputs: Sequence[tuple[fx.Node, Port]]) -> list[tuple[fx.Node, Port]]:
    """Let outputs depend on the checks of a graph, which would be left out as values that nobody reads.

    What forward checks, the loss depends on; what backward checks, a gradient.

    Args:
        graph: Changed in place.
        outputs: Its outputs with their ports.

    Returns:
        The outputs that the graph has then.
    """
    found = list(outputs)
    for node in [node for node in graph.nodes if node.target in _ASSERTIONS]:
        kind = "gradient" if node.meta.get("partitioner_tag") == "is_backward" else "result"
        place = next((place for place, (_, port) in enumerate(found) if port.kind == kind), None)
        if place is not None:
            output, port = found[place]
            order = {each: number for number, each in enumerate(graph.nodes)}
            given: list[Any] = [*node.args, *node.kwargs.values()]
            with graph.inserting_after(max(output, node, key=order.__getitem__)):
                checked = graph.call_function(
                    torch.ops.aten._functional_assert_async.msg,
                    (given[0], *(given[1:] or [_ASSERTIONS[node.target]]), output),
                )
            checked.meta = {key: value for key, value in output.meta.items() if key != "desc"}
            found[place] = (checked, port)
        graph.erase_node(node)
    return found


def _written_buffer(node: fx.Node, target: Any, state: Mapping[str, str]) -> str:
    """Return the name of the buffer that forward writes to; only buffers may be written to."""
    if isinstance(target, BufferAOTInput):
        if target.target in state:
            return state[target.target]
        reason = "forward writes to a tensor that is an attribute of a module, and no buffer"
        raise node_refusal(node, reason, "Make it one: self.register_buffer(...)")
    what = "a parameter" if isinstance(target, ParamAOTInput) else "its inputs"
    raise node_refusal(node, f"forward writes to {what}", "Write to a copy instead: x = x.clone()")
