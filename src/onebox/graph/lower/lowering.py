"""Lowering: nodes of a functional ATen graph become a :class:`Program`."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from onebox.graph.capture.locate import node_refusal
from onebox.wire import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Complex,
    DType,
    LayoutArgument,
    Many,
    MemoryFormat,
    Operator,
    OwnDevice,
    Program,
    SlotArgument,
    TensorSpec,
    Value,
    is_known,
    is_random,
    program_dtype_name,
    shares_memory,
    with_deaths,
)

_aten = torch.ops.aten

_SAME_VALUE = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default}
"""Operators that return their argument: on a functional tape there are no writes to it."""

_DROPOUT: Mapping[Any, int] = {ATTENTION: 3, ATTENTION_BACKWARD: 6}
"""Operators that draw random numbers only for dropout, and the index of that argument."""

_INSTEAD = {
    _aten.index.Tensor: _aten._unsafe_index.Tensor,
    _aten._conj.default: _aten.conj_physical.default,
    _aten._neg_view.default: _aten.neg.default,
}
"""Operators that programs do not have, with their equivalents: those whose result may have a data-dependent shape
become operators that refuse that, and lazy ones that only mark what is to be done to elements (tensors are sent as they
lie in memory) become operators that do it."""


def runs_as(target: Any) -> Any:
    """Return the operator that a program runs for an operator of a graph."""
    return _INSTEAD.get(target, target)


def is_view(node: fx.Node) -> bool:
    """Return whether a node's one output shares the memory of its argument."""
    target = runs_as(node.target)
    return isinstance(target, torch._ops.OpOverload) and shares_memory(target)


def widens(node: fx.Node) -> bool:
    """Return whether a node is its argument in a wider type, which is exact and made from half the bytes."""
    if node.target is not _aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    (source,) = node.all_input_nodes
    return source.meta["val"].dtype is torch.bfloat16 and node.meta["val"].dtype is torch.float32


def draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    if node.target in _DROPOUT:
        return bool(node.args[_DROPOUT[node.target]])
    return isinstance(node.target, torch._ops.OpOverload) and is_random(node.target)


def varies(node: fx.Node) -> bool:
    """Return whether the result of a node depends on random numbers; that of attention without dropout does not, though
    it has a number among those that draw."""
    if not draws(node):
        return False
    places = {argument.name: place for place, argument in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
    place = places.get("dropout_p")
    if place is None:
        return True
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0))


def random_positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number the random operators of a whole graph, in its order.

    The gradient of attention has the number of its forward, whose dropout it draws again.
    """
    found: dict[fx.Node, int] = {}
    for node in filter(draws, graph.nodes):
        forward = canonical(node.args[4]).args[0] if node.target is ATTENTION_BACKWARD else None
        found[node] = found.get(forward, len(found))  # type: ignore[arg-type]
    return found


def resolve(node: fx.Node) -> fx.Node:
    """Follow a node to the one whose value it returns unchanged."""
    while node.op == "call_function":
        arguments = node.args
        first = arguments[0] if arguments else None
        if not isinstance(first, fx.Node):
            return node
        if node.target in _SAME_VALUE or (node.target is _aten.clone.default and not node.kwargs and not _packs(node)):
            node = first
        elif node.target is _aten.copy.default and _alike(node, arguments[1]):
            node = arguments[1]  # type: ignore[assignment]
        elif node.target is _aten.t.default and resolve(first).target is _aten.t.default:
            inner = resolve(first).args[0]
            assert isinstance(inner, fx.Node)
            node = inner
        else:
            return node
    return node


def fold_numbers(graph: fx.Graph) -> None:
    """Fold nodes computed from Python numbers alone, such as the conjugate of a constant.

    Tracing writes a number for a tensor that stands for one; a worker's operators take tensors for such arguments.

    Args:
        graph: Changed in place.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.all_input_nodes or not _takes_numbers(node):
            continue
        args = [torch.tensor(value) if isinstance(value, complex | float | int) else value for value in node.args]
        number = node.target(*args, **node.kwargs).item()

        def known(read: fx.Node, made: fx.Node = node, value: Any = number) -> Any:
            return value if read is made else read

        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg(user.args, known), fx.node.map_arg(user.kwargs, known)
        graph.erase_node(node)


def _takes_numbers(node: fx.Node) -> bool:
    """Return whether an operator of one small tensor has a number for it."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or draws(node):
        return False
    given = isinstance(node.args[0], complex | float | int) and not node.meta["val"].dim()
    return given and "Tensor" in str(node.target._schema.arguments[0].type)


def _packs(node: fx.Node) -> bool:
    """Return whether a copy makes pairs of real numbers adjacent, as complex numbers have to be."""
    return any(user.target is _aten.view_as_complex.default for user in node.users)


def _alike(node: fx.Node, other: Any) -> bool:
    """Return whether two nodes have values of one type and shape."""
    if not isinstance(other, fx.Node):
        return False
    left, right = node.meta["val"], other.meta["val"]
    return bool(left.dtype == right.dtype and left.shape == right.shape)


def arguments_of(node: fx.Node) -> list[fx.Node]:
    """Return the resolved nodes that a node reads, with ``getitem`` followed to its source."""
    return [resolve(argument) for argument in node.all_input_nodes]


def lower(
    nodes: Iterable[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    positions: Mapping[fx.Node, int],
    in_order: Mapping[fx.Node, Collection[fx.Node]] = MappingProxyType({}),
) -> Program:
    """Lower nodes, in topological order, to a program.

    Args:
        nodes: The nodes to compute; ``getitem`` nodes are resolved by their readers and may be left out.
        inputs: The nodes whose values are given, in the order of the program's inputs.
        outputs: The nodes whose values are wanted.
        positions: From :func:`random_positions`.
        in_order: For nodes the arguments that they have to read contiguous.

    Raises:
        CaptureError: An operator or an argument cannot travel.
    """
    builder = _Builder(inputs, in_order)
    for node in nodes:
        if node.target is not operator.getitem and node not in builder.slots:
            builder.add(node, positions.get(node, -1))
    return with_deaths(builder.program(outputs))


class _Builder:
    """Slots and operators under construction."""

    def __init__(self, inputs: Sequence[fx.Node], in_order: Mapping[fx.Node, Collection[fx.Node]]) -> None:
        self._in_order = in_order
        self._contiguous_slots: dict[int, int] = {}
        self.slots: dict[fx.Node, int] = {node: number for number, node in enumerate(inputs)}
        self.inputs = tuple(_spec(node.meta["val"], node) for node in inputs)
        self.count = len(self.slots)
        self.operators: list[Operator] = []

    def add(self, node: fx.Node, position: int) -> None:
        target = runs_as(node.target)
        if not is_known(target):
            raise node_refusal(node, f"it calls {target}, which no worker has", "Use plain PyTorch operators")
        args = tuple(self._value(argument, node) for argument in node.args)
        kwargs = {key: self._value(value, node) for key, value in node.kwargs.items() if key != "pin_memory"}
        made = node.meta["val"]
        outs: list[int | None] = []
        specs: list[TensorSpec | None] = []
        picks = [made] if isinstance(made, Tensor) else list(made)
        for index, value in enumerate(picks):
            wanted = node if isinstance(made, Tensor) else _picker(node, index)
            if wanted is None or not isinstance(value, Tensor):
                outs.append(None)
                specs.append(_spec(value, node) if isinstance(value, Tensor) else None)
            else:
                outs.append(self._slot(wanted))
                specs.append(_spec(value, node))
        self.operators.append(Operator(str(target), args, kwargs, tuple(outs), tuple(specs), (), position))

    def program(self, outputs: Sequence[fx.Node]) -> Program:
        return Program(self.inputs, tuple(self.operators), tuple(self.slots[node] for node in outputs), self.count)

    def _slot(self, node: fx.Node) -> int:
        self.slots[node] = self.count
        self.count += 1
        return self.slots[node]

    def _contiguous(self, slot: int, node: fx.Node) -> int:
        """Return the slot of a contiguous tensor with the values of another."""
        if slot not in self._contiguous_slots:
            made = self._contiguous_slots[slot] = self.count
            self.count += 1
            options: dict[str, Value] = {"memory_format": MemoryFormat("contiguous_format")}
            spec = _spec(node.meta["val"], node)
            self.operators.append(Operator("aten.clone.default", (SlotArgument(slot),), options, (made,), (spec,)))
        return self._contiguous_slots[slot]

    def _value(self, argument: Any, node: fx.Node) -> Value:
        if isinstance(argument, fx.Node):
            slot = self.slots[canonical(argument)]
            return SlotArgument(self._contiguous(slot, argument) if argument in self._in_order.get(node, ()) else slot)
        if isinstance(argument, torch.dtype):
            return DType(program_dtype_name(argument))
        if isinstance(argument, torch.device):
            return OwnDevice()
        if argument is torch.strided:
            return LayoutArgument()
        if isinstance(argument, torch.memory_format):
            return MemoryFormat(str(argument).removeprefix("torch."))
        if isinstance(argument, list | tuple):
            return Many(tuple(self._item(item, node) for item in argument))
        if argument is None or isinstance(argument, bool | int | float | str):
            return argument
        if isinstance(argument, complex):
            return Complex(argument.real, argument.imag)
        raise node_refusal(
            node, f"{node.target} takes a {type(argument).__name__}, which cannot travel", "Use another operator"
        )

    def _item(self, item: Any, node: fx.Node) -> SlotArgument | bool | int | float | None:
        value = self._value(item, node)
        if isinstance(value, SlotArgument | bool | int | float) or value is None:
            return value
        raise node_refusal(
            node, f"{node.target} takes a list of {type(item).__name__}, which cannot travel", "Use another operator"
        )


def canonical(node: fx.Node) -> fx.Node:
    """Return the node that represents a value: resolved, and one ``getitem`` for each output of an operator."""
    node = resolve(node)
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return _picker(source, index) or node
    return node


def _picker(node: fx.Node, index: int) -> fx.Node | None:
    """Return the first ``getitem`` of an output of a node, if there is one."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return None


def _spec(value: Any, node: fx.Node) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise node_refusal(node, f"{node} is a {type(value).__name__}, not a tensor", "Keep it in a tensor")
    return TensorSpec(program_dtype_name(value.dtype), tuple(int(size) for size in value.shape))
