"""The programs of a captured model: forward and backward for training, forward alone for evaluation."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import Tensor, fx

from onebox.graph.capture import Captured
from onebox.graph.extract import own_outputs
from onebox.graph.joint import Joint, Port, joint_graph
from onebox.graph.lower import arguments_of, canonical, is_view, lower, random_positions
from onebox.graph.updates import Update, buffer_updates
from onebox.wire import Program


@dataclass(frozen=True, kw_only=True)
class NamedProgram:
    """A program whose inputs and outputs have names.

    Args:
        program: The tape.
        inputs: One port for each input.
        outputs: One port for each output.
    """

    program: Program
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, kw_only=True)
class ModelPrograms:
    """What a captured model computes.

    Args:
        forward: From parameters, buffers and leaves to results, buffer updates and saved values.
        backward: From saved values and the loss's weight to gradients; ``None`` for evaluation.
        updates: How each buffer changes with a micro-batch.
        constants: Tensors that the graph holds itself, by name.
    """

    forward: NamedProgram
    backward: NamedProgram | None
    updates: dict[str, Update]
    constants: dict[str, Tensor]


def model_programs(captured: Captured, *, backward: bool, trained: frozenset[str] | None = None) -> ModelPrograms:
    """Derive the programs of a captured model.

    Args:
        captured: The model.
        backward: Whether gradients are wanted; without them nothing is updated either.
        trained: Parameters whose gradients are wanted; all that have one when ``None``.

    Raises:
        CaptureError: The graph holds something that no worker can run.
    """
    joint = joint_graph(captured, backward=backward)
    gradients = [
        (node, port)
        for node, port in joint.outputs
        if port.kind == "gradient" and (trained is None or port.name in trained)
    ]
    kinds = ("result", "update") if backward else ("result",)
    kept = [(node, port) for node, port in joint.outputs if port.kind in kinds]
    ports = _input_ports(joint)
    positions = random_positions(joint.graph)
    ahead = _with_picks(_ancestors([node for node, _ in kept], stop=set()))
    changed = {port.name for _, port in kept if port.kind == "update"}
    lasting = {node for node, port in ports.items() if port.kind != "buffer" or port.name not in changed}
    saved, behind = _split(joint, ahead, [node for node, _ in gradients], lasting)
    results = [(canonical(node), port) for node, port in kept]
    results += [(node, Port("saved", number)) for number, node in enumerate(saved)]
    forward = _named(joint, ahead, {}, ports, results, positions)
    ports_behind = {node: Port("saved", number) for number, node in enumerate(saved)}
    made = [(canonical(node), port) for node, port in gradients]
    backward_program = _named(joint, behind, ports_behind, ports, made, positions) if backward else None
    used = {port for part in (forward, backward_program) if part for port in part.inputs}
    return ModelPrograms(
        forward=forward,
        backward=backward_program,
        updates=buffer_updates(joint) if backward else {},
        constants={n: t for n, t in joint.constants.items() if Port("constant", n) in used},
    )


def _input_ports(joint: Joint) -> dict[fx.Node, Port]:
    """Return the port of each input node; two nodes of one tied parameter have equal ports."""
    return dict(joint.inputs)


def _ancestors(nodes: list[fx.Node], *, stop: set[fx.Node]) -> set[fx.Node]:
    """Return resolved nodes and all that they depend on, not looking behind ``stop``."""
    seen: set[fx.Node] = set()
    stack = [canonical(node) for node in nodes]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                stack.extend(canonical(argument) for argument in arguments_of(node))
    return seen


def _with_picks(nodes: set[fx.Node]) -> set[fx.Node]:
    """Add to operators with several outputs the ``getitem`` nodes that name those outputs."""
    return nodes | {canonical(user) for node in nodes for user in node.users if user.target is operator.getitem}


def _split(
    joint: Joint, ahead: set[fx.Node], gradients: list[fx.Node], lasting: set[fx.Node]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the values that backward takes from forward, and the nodes that backward computes.

    Inputs that are still there are read again, but for buffers that forward has changed meanwhile. A view of a value is
    made again in backward rather than saved: it costs a microsecond and holds the same memory.
    """
    behind = _ancestors(gradients, stop=ahead) - ahead
    saved: set[fx.Node] = set()
    views: set[fx.Node] = set()
    stack = [canonical(a) for node in behind for a in arguments_of(node)]
    stack += [canonical(node) for node in gradients]
    while stack:
        node = stack.pop()
        if node in behind or node in lasting or node in saved or node in views:
            continue
        if is_view(node):
            views.add(node)
            stack.extend(canonical(argument) for argument in arguments_of(node))
        else:
            saved.add(node)
    order = {node: number for number, node in enumerate(joint.graph.nodes)}
    return sorted(saved, key=order.__getitem__), behind | views


def _named(
    joint: Joint,
    nodes: set[fx.Node],
    given: dict[fx.Node, Port],
    ports: dict[fx.Node, Port],
    outputs: list[tuple[fx.Node, Port]],
    positions: dict[fx.Node, int],
) -> NamedProgram:
    """Lower a set of nodes, with the inputs that they and the outputs need."""
    body = [node for node in joint.graph.nodes if node in nodes and node not in ports and node not in given]
    needed = {canonical(argument) for node in body for argument in arguments_of(node)}
    needed |= {node for node, _ in outputs}
    inputs = [(node, port) for node, port in {**ports, **given}.items() if node in needed]
    program = lower(body, [node for node, _ in inputs], [node for node, _ in outputs], positions)
    return NamedProgram(
        program=own_outputs(program),
        inputs=tuple(port for _, port in inputs),
        outputs=tuple(port for _, port in outputs),
    )
