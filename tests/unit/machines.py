"""A worker's machine without its process: what it answers, what it reports, what it says to its client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.emulator.device import EmulatedDevice
from onebox.emulator.executor import EmulatedExecutor
from onebox.wire import (
    FREE,
    KernelSpec,
    Operator,
    Program,
    SlotArgument,
    TapeSpec,
    TensorSpec,
    from_frame,
    spec_of,
    to_frame,
    with_deaths,
)
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Free, Get
from onebox.wire.protocol.requests import Define, Instruction, Put, StoredProgram
from onebox.wire.protocol.responses import Result, Tensors, WorkerFailure
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import RankLost
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.executor import Executor
from onebox.worker.execution.throttled import ThrottledExecutor
from onebox.worker.faults import Fault, FaultInjector

_accelerators: list[Accelerator | None] = [None]


@contextmanager
def rigs_on(accelerator: Accelerator) -> Iterator[None]:
    """Let machines that name no device compute on an accelerator."""
    _accelerators.append(accelerator)
    try:
        yield
    finally:
        _accelerators.pop()


class Batch(NamedTuple):
    """Calls that occur once, over buffers by number: ``kernel, inputs..., outputs...`` or ``FREE, number``."""

    calls: tuple[int, ...]
    floats: tuple[float, ...] = ()

    def instructions(self, kernels: dict[int, KernelSpec]) -> list[Instruction]:
        """Return the definition of the batch, its replay, and the end of its definition."""
        code: list[int] = []
        inputs: list[int] = []
        strays: list[int] = []
        slots: dict[int, int] = {}  # of the buffers that are alive
        made = at = 0
        while at < len(self.calls):
            kernel, at = self.calls[at], at + 1
            if kernel == FREE:
                number, at = self.calls[at], at + 1
                if number in slots:
                    code += (FREE, slots.pop(number))
                else:
                    strays.append(number)
                continue
            code.append(kernel)
            spec = kernels[kernel]
            for number in self.calls[at : at + spec.inputs]:
                if number not in slots:
                    inputs.append(number)
                    slots[number] = -len(inputs)
                code.append(slots[number])
            at += spec.inputs
            kept = sum(out is not None for out in spec.outs)
            slots |= {number: made + index for index, number in enumerate(self.calls[at : at + kept])}
            made, at = made + kept, at + kept
        outputs = tuple(number for number, slot in slots.items() if slot >= 0)
        if not code:
            return [Free(tuple(strays))]
        return [
            Define(_TAPE, TapeSpec(tuple(code), len(inputs), len(self.floats))),
            Replay(_TAPE, tuple(inputs), outputs, self.floats, tuple(strays)),
            Free((), (_TAPE,)),
        ]


_TAPE = 999
"""The number of the definition of a :class:`Batch`."""


class Rig:
    """A machine, and a client that takes down what it hears and never answers.

    Args:
        quota_bytes: The most bytes that its buffers may take.
        faults: To inject.
        device: Its device; where ``None``, that of :func:`rigs_on`, or a CPU.
    """

    def __init__(
        self, quota_bytes: int = 0, faults: tuple[Fault, ...] = (), device: ComputeDevice | None = None
    ) -> None:
        self.failures: list[WorkerFailure] = []
        self.said: list[Any] = []
        self.kernels: dict[int, KernelSpec] = {}
        self.tickets = 0
        self.frames_out: list[Any] = []
        self.times_ns: tuple[int, ...] = ()
        self.used_bytes: tuple[int, ...] = ()
        injector = FaultInjector(faults)
        device = device or ComputeDevice("cpu", 1, accelerator=_accelerators[-1])
        kind = ThrottledExecutor if device.speed < 1 else Executor
        if isinstance(device, EmulatedDevice):
            kind = EmulatedExecutor
        self.machine = kind(device, self, self.failures.append, quota_bytes=quota_bytes, faults=injector)

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        self.said.append(message)

    def settle(self) -> None:
        """Do nothing: no reply waits."""

    def new_ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def await_ticket(self, ticket: int, timeout_s: float) -> Any:
        raise RankLost(f"nobody answers ticket {ticket}")

    def do(self, *instructions: Instruction | Batch, frames: Sequence[Any] = ()) -> list[Result]:
        """Execute the instructions of one message."""
        left = iter(frames)
        whole: list[Instruction] = []
        for each in instructions:
            if isinstance(each, Define) and isinstance(each.what, KernelSpec):
                self.kernels[each.number] = each.what
            whole += each.instructions(self.kernels) if isinstance(each, Batch) else [each]
        self.machine.begin()
        with torch.inference_mode():
            results = [result for instruction in whole for result in self.machine.execute(instruction, left)]
            reply = self.machine.reply(0, results)
            if reply.after is not None and not isinstance(self.machine, EmulatedExecutor):
                reply.after.synchronize()
            assert reply.complete or isinstance(self.machine, EmulatedExecutor)
            message, self.frames_out = reply.message()
            self.times_ns, self.used_bytes = message.times_ns, message.used_bytes
            return list(message.results)

    def put(self, **tensors: Tensor) -> None:
        """Fill buffers; ``b3`` is number 3."""
        numbers = tuple(int(name[1:]) for name in tensors)
        specs = tuple(spec_of(tensor) for tensor in tensors.values())
        self.do(Put(numbers, specs), frames=[bytes(to_frame(tensor)) for tensor in tensors.values()])

    def get(self, number: int) -> Tensor:
        """Return a buffer."""
        (listing,) = self.do(Get((number,)))
        assert isinstance(listing, Tensors)
        return from_frame(listing.specs[0], bytes(self.frames_out[0]))

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self.machine.store.used_bytes


def elementwise(name: str, spec: TensorSpec, inputs: int = 1) -> Program:
    """Return a program of one operator whose arguments and result are alike."""
    slots = tuple(SlotArgument(index) for index in range(inputs))
    operator = Operator(name, slots, {}, (inputs,), (spec,))
    return with_deaths(Program((spec,) * inputs, (operator,), (inputs,), inputs + 1))


def define(number: int, program: Program) -> Define:
    """Return the instruction that stores a program."""
    return Define(number, StoredProgram(program))
