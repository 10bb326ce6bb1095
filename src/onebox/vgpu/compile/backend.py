"""``torch.compile(model, backend="onebox")``: forward and backward are stored on the workers and called by number.

Dynamo traces the script's function, AOTAutograd makes functional graphs of forward and backward, :mod:`sections` cuts
them into programs, and this module runs them: a call of a program is one instruction in the command queue of its
device, in order with the operators that the script issues itself. Its results are ordinary virtual tensors. Random
operators draw from the device's generator, as those of the script do, so that a compiled model draws the same numbers
as the model itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from onebox.errors import PoolError
from onebox.graph.lower.lowering import canonical
from onebox.vgpu.compile.dynamo import BACKEND, DYNAMO
from onebox.vgpu.compile.graph_corrections import choose_kernels, correct, partition
from onebox.vgpu.compile.sections import Section, copies_needed, output_nodes, sections, storage_of
from onebox.vgpu.core.metadata import metadata_of
from onebox.vgpu.core.tensor import Handle, command_queue_of, handle_of, is_virtual, wrap
from onebox.vgpu.dispatch.copies import upload
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.runtime.context import queue_of
from onebox.wire.protocol.requests import Define, StoredProgram

aten = torch.ops.aten

Registers = list[Any]
"""The values of a graph during a run, by number."""


def onebox(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo; registered with ``torch.compile`` as the backend ``onebox``.

    Args:
        module: The graph.
        inputs: Examples of its inputs.

    Returns:
        A function of the inputs: the graph itself where nothing is on a virtual device or, with a warning, where an
            input is a size that the script has marked as dynamic.
    """
    if not has_virtual(module, inputs):
        return module.forward
    if not all(isinstance(value, Tensor) for value in inputs):
        warnings.warn(
            f"backend {BACKEND!r} compiles graphs of fixed shapes; this one has a size that is marked as dynamic, so "
            "it runs operator by operator",
            stacklevel=2,
        )
        return module.forward
    choose_kernels(module)
    backend = aot_autograd(fw_compiler=_compile, bw_compiler=_compile, partition_fn=partition)
    compiled: Callable[..., Any] = backend(module, inputs)
    return compiled


def has_virtual(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether a graph of Dynamo has tensors on virtual devices, given examples of its inputs."""
    values = [*inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    return any(isinstance(value, Tensor) and value.device.type == "vgpu" for value in values)


def _compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile a functional graph of ATen operators: forward or backward."""
    correct(module.graph)
    return CompiledGraph(module)


class _Step(Protocol):
    """A step that reads registers and fills others."""

    reads: tuple[int, ...]
    dies: tuple[int, ...]

    def run(self, registers: Registers) -> None:
        """Run the step."""


class CompiledGraph:
    """A functional graph whose sections are programs on workers.

    Args:
        module: The graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._boxed_call = True  # for AOTAutograd: inputs come in a list that is emptied, so that they end early
        graph = module.graph
        for node in graph.find_nodes(op="get_attr"):
            node.meta.setdefault("val", getattr(module, node.target))
        self._places: dict[object, int] = {}
        for node in graph.find_nodes(op="placeholder"):
            self._place(node)
        self._inputs = len(self._places)
        self._steps = [self._step(step, module) for step in sections(graph)]
        results = output_nodes(graph)
        copied = copies_needed(results)
        self._results = [self._result(result, copied) for result in results]
        self._count = len(self._places)
        self._let_die()

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the graph."""
        registers: Registers = [*inputs, *[None] * (self._count - self._inputs)]
        inputs.clear()
        for place in self._unread:
            registers[place] = None
        for step in self._steps:
            step.run(registers)
        return tuple(registers[place] for place in self._results)

    # ---- construction

    def _place(self, key: object) -> int:
        return self._places.setdefault(key, len(self._places))

    def _step(self, step: Any, module: fx.GraphModule) -> _Step:
        if isinstance(step, Section):
            reads = tuple(self._places[node] for node in step.inputs)
            return _Call(step, reads, tuple(self._place(node) for node in step.outputs))
        node = step.node
        if node.op == "get_attr":
            value = getattr(module, node.target)
            return _Issue(lambda: value, (), {}, (), self._place(node))
        reads = tuple(self._places[canonical(source)] for source in node.all_input_nodes)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _Place(self._places[canonical(source)]))
        return _Issue(_function(node.target), args, kwargs, reads, self._place(node))

    def _result(self, result: Any, copied: set[fx.Node]) -> int:
        """Return the register of a result: a tensor of its own for each node, or a constant such as None."""
        if not isinstance(result, fx.Node):
            return self._last(lambda: result, ())
        place = self._places[canonical(result)]
        if result in copied:
            return self._last(aten.clone.default, (place,))
        return self._places[result] if result in self._places else self._last(aten.detach.default, (place,), result)

    def _last(self, function: Any, reads: tuple[int, ...], node: fx.Node | None = None) -> int:
        """Append a function of registers, and return its result's register, the node's if there is one."""
        target = self._place(node or object())
        self._steps.append(_Issue(function, tuple(map(_Place, reads)), {}, reads, target))
        return target

    def _let_die(self) -> None:
        """Set for each step the registers that no later step reads."""
        read = set(self._results)
        for step in reversed(self._steps):
            step.dies = tuple(dict.fromkeys(place for place in step.reads if place not in read))
            read |= set(step.reads)
        self._unread = [place for place in range(self._inputs) if place not in read]


def _function(target: Any) -> Any:
    """Return the client's implementation of an operator; one that takes graphs, such as ``cond``, evaluates them."""
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return target
    kernel = target.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd, target)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # in its first call, AOTAutograd observes through a mode
            return kernel(*args, **kwargs)

    return run


class _Place(int):
    """A register number as an argument."""


class _Issue:
    """An operator that the client issues itself."""

    def __init__(self, function: Any, args: Any, kwargs: Any, reads: tuple[int, ...], place: int) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._target = place
        self.reads = reads
        self.dies: tuple[int, ...] = ()

    def run(self, registers: Registers) -> None:
        """Run it."""
        made = self._function(*_filled(self._args, registers), **_filled(self._kwargs, registers))
        for place in self.dies:
            registers[place] = None
        registers[self._target] = made


def _filled(value: Any, registers: Registers) -> Any:
    """Replace register numbers in arguments by their values."""
    if isinstance(value, _Place):
        return registers[value]
    if isinstance(value, dict):
        return {key: _filled(item, registers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, registers) for item in value]
    return value


class _Call:
    """A program on a worker, defined there before its first call."""

    def __init__(self, section: Section, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        values = [node.meta["val"] for node in section.outputs]
        looks = [metadata_of(value) for value in values]
        inputs = set(section.inputs)
        layouts = tuple(
            None if storage_of(node) in inputs else look.strided()
            for node, look in zip(section.outputs, looks, strict=True)
        )
        self._stored = StoredProgram(section.program, layouts=layouts)
        self._device = section.device
        self._outputs = tuple(zip(writes, looks, strict=True))
        self._numbers: weakref.WeakKeyDictionary[CommandQueue, int] = weakref.WeakKeyDictionary()
        self.reads = reads
        self.dies: tuple[int, ...] = ()

    def run(self, registers: Registers) -> None:
        """Run it."""
        given = [registers[place] for place in self.reads]
        for place in self.dies:
            registers[place] = None
        queue = next((command_queue_of(v) for v in given if is_virtual(v)), None) or queue_of(self._device)
        if queue.unwaited:
            queue.write_unwaited()
        handles = [self._on_device(value, queue) for value in given]
        given.clear()  # a tensor without other references is freed by the call
        number = self._numbers.get(queue) or self._define(queue)
        first = queue.call(number, handles, len(self._outputs))
        for at, (place, look) in enumerate(self._outputs, first):
            registers[place] = wrap(Handle(queue, at), look)

    def _on_device(self, value: Any, queue: CommandQueue) -> Handle:
        if not is_virtual(value):
            return handle_of(upload(value, queue))
        if command_queue_of(value) is not queue:
            raise PoolError(
                f"a tensor of {value.device} is of another pool than the others; move the whole model to the devices "
                "of the pool that is open"
            )
        return handle_of(value)

    def _define(self, queue: CommandQueue) -> int:
        with queue.lock:
            if queue not in self._numbers:
                number = queue.pool.new_number()
                queue.before(Define(number, self._stored))
                self._numbers[queue] = number
            return self._numbers[queue]

    def __del__(self) -> None:
        for queue, number in self._numbers.items():
            queue.ended.append(number)


DYNAMO.apply()
__all__ = ["CompiledGraph", "onebox"]
