"""Sections: a functional ATen graph, cut into programs for workers and operators that run one by one.

Most graphs are one section. A graph on two devices has a section for each, with the copies between them as single
operators; an operator that programs do not support also separates sections. Pure: a graph in, a list of steps out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from onebox.errors import WireError
from onebox.graph.lower.lowering import arguments_of, canonical, fold_numbers, is_view, lower, runs_as
from onebox.wire import DTYPES, PROGRAM_TYPES, Program
from onebox.worker.sandbox.allow_list import allowed

aten = torch.ops.aten

_SAME_STORAGE = {aten.detach.default, aten.alias.default}

_BY_STRIDES = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
"""Operators that read memory by strides, which inside a program are the worker's own: the client issues them."""

_ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg}
"""Operators that are needed although they return nothing."""

_TYPES = {DTYPES[name] for name in PROGRAM_TYPES}
"""The element types of programs; operators on others are issued by the client."""

_EITHER_WAY = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""Operators that require certain strides, and equivalents that accept any."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Consecutive operators on one device.

    Args:
        device: The device.
        program: Its program for the worker.
        inputs: The nodes whose values it reads.
        outputs: The nodes whose values it computes and others read.
    """

    device: torch.device
    program: Program
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, kw_only=True)
class Single:
    """One operator that the client issues itself, as a script would.

    Args:
        node: The operator; ``getitem`` of its results are steps of their own.
    """

    node: fx.Node


@dataclass
class _Open:
    """A section under construction."""

    device: torch.device
    nodes: list[fx.Node] = field(default_factory=list)


def sections(graph: fx.Graph) -> list[Section | Single]:
    """Cut a graph into steps, in their order of execution.

    Args:
        graph: A functional ATen graph, each node with its value's description under ``val``.
    """
    fold_numbers(graph)
    results = output_nodes(graph)
    live = _live(graph, results)
    steps: list[_Open | Single] = []
    current: dict[torch.device, _Open] = {}
    made_in: dict[fx.Node, _Open] = {}
    for node in graph.nodes:
        if node not in live or node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and arguments_of(node)[0] in made_in:
            made_in[node] = made_in[arguments_of(node)[0]]
            continue
        device = _place(node)
        section = current.get(device) if device is not None else None
        for source in arguments_of(node):  # values from elsewhere must exist before
            maker = made_in.get(canonical(source))
            if maker is not None and maker is not section and current.get(maker.device) is maker:
                del current[maker.device]
                steps.append(maker)
        if device is None:
            steps.append(Single(node=node))
        else:
            section = current.setdefault(device, _Open(device))
            section.nodes.append(node)
            made_in[node] = section
    steps += current.values()
    return _closed(steps, results)


def output_nodes(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the outputs of a graph: nodes, and constants such as ``None``."""
    return tuple(next(node for node in reversed(graph.nodes) if node.op == "output").args[0])


def storage_of(node: fx.Node) -> fx.Node:
    """Return the node that allocates the worker's memory of a node's value."""
    node = canonical(node)
    while node.op == "call_function" and is_view(node):
        node = canonical(arguments_of(node)[0])
    return node


def storage_in_graph(node: fx.Node) -> fx.Node:
    """Return the node that allocates the memory of a node's value by the graph itself, in which a clone allocates."""
    while node.op == "call_function" and (node.target in _SAME_STORAGE or is_view(node)):
        node = node.all_input_nodes[0]
    return node


def copies_needed(results: Sequence[Any]) -> set[fx.Node]:
    """Return the results to copy, because a worker returns existing memory where the graph promises new memory.

    A program omits clones, since it never writes in place; but an output of the graph may be written to.
    """
    sharing: dict[fx.Node, set[fx.Node]] = {}
    nodes = [node for node in results if isinstance(node, fx.Node)]
    for node in nodes:
        sharing.setdefault(storage_of(node), set()).add(storage_in_graph(node))
    found = set()
    for node in nodes:
        root, maker = storage_in_graph(node), storage_of(node)
        cloned = canonical(root) is not root and root.target is not operator.getitem
        if cloned and (maker.op != "call_function" or len(sharing[maker]) > 1):
            found.add(node)
    return found


# ---- placement of nodes


def _place(node: fx.Node) -> torch.device | None:
    """Return the virtual device on which a program may run a node; ``None`` where the client must issue it."""
    device = _device_of(node.meta.get("val"))
    if device is None or device.type != "vgpu" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in _BY_STRIDES:
        return None
    try:
        allowed(str(runs_as(node.target)))
    except WireError:
        return None
    if not all(map(_travels, (*node.args, *node.kwargs.values()))):
        return None
    if not all(map(_is_of_programs, _values(node))):
        return None
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if not (isinstance(value, Tensor) and _is_of_programs(value) and _is_at_hand(value, device, node)):
            return None
    return device


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_of_programs(value: Any) -> bool:
    """Return whether a value is a tensor of a type that programs support; of several results one may be missing."""
    return value is None or (isinstance(value, Tensor) and value.dtype in _TYPES)


def _is_at_hand(value: Tensor, device: torch.device, reader: fx.Node) -> bool:
    """Return whether a node may read a value on a device: a tensor there, or a single number of the host."""
    if value.device == device:
        return True
    return value.device.type == "cpu" and not value.dim() and reader.target is not aten._to_copy.default


def _device_of(value: Any) -> torch.device | None:
    items = value if isinstance(value, list | tuple) else [value]
    devices = {item.device for item in items if isinstance(item, Tensor)}
    return devices.pop() if len(devices) == 1 else None


def _travels(value: Any) -> bool:
    """Return whether an argument can be part of a program."""
    if isinstance(value, list | tuple):
        return all(item is None or isinstance(item, fx.Node | bool | int | float) for item in value)
    kinds = fx.Node | bool | int | float | str | torch.dtype | torch.device | torch.memory_format
    return value is None or value is torch.strided or isinstance(value, kinds)


# ---- inputs and outputs of sections


def _live(graph: fx.Graph, results: Sequence[Any]) -> set[fx.Node]:
    """Return the nodes that are needed, with views resolved, and those that select from several results."""
    live: set[fx.Node] = set()
    stack = [canonical(node) for node in results if isinstance(node, fx.Node)]
    stack += [node for node in graph.nodes if node.target in _ASSERTIONS]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += [canonical(source) for source in arguments_of(node)]
    return live


def _closed(steps: Iterable[_Open | Single], results: Sequence[Any]) -> list[Section | Single]:
    """Turn sections under construction into programs."""
    listed = list(steps)
    wanted = {canonical(node) for node in results if isinstance(node, fx.Node)}
    closed: list[Section | Single] = []
    for step in reversed(listed):
        if isinstance(step, Single):
            wanted |= {canonical(source) for source in arguments_of(step.node)}
            closed.append(step)
            continue
        made = {canonical(user) for node in step.nodes for user in (node, *_picks(node))}
        read = list(dict.fromkeys(canonical(source) for node in step.nodes for source in arguments_of(node)))
        inputs = tuple(node for node in read if node not in made)
        outputs = tuple(node for node in made if node in wanted)
        program = _lowered(step.nodes, inputs, outputs)
        closed.append(Section(device=step.device, program=program, inputs=inputs, outputs=outputs))
        wanted |= set(inputs)
    return closed[::-1]


def _lowered(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Program:
    """Lower nodes to a program that draws the device's next random numbers and lays out values as the device does."""
    program = lower(nodes, inputs, outputs, {})
    operators = tuple(replace(each, name=_EITHER_WAY.get(each.name, each.name)) for each in program.operators)
    return replace(program, operators=operators)


def _picks(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]
