"""The emulated ``sim`` device: it computes nothing, sleeps for modelled times, and propagates shapes.

Its tensors are on PyTorch's device ``meta``: they have an element type, a shape and a storage size, but no elements.
Programs are checked, memory is counted and quotas apply as on a CPU, so that plans and the engine itself can be tested
with a model that would not fit on this machine. Its host runs ahead of it, as of the accelerator that it stands for
(see :class:`onebox.worker.progress.WorkerProgress`): what the host does while a program takes its time costs no time of
the device. Measurements on it are always labelled emulated.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onebox.cost import owners
from onebox.errors import UsageError, WireError
from onebox.wire import DTYPES, TensorSpec, check_elements, spec_of, specs_by_slot
from onebox.wire.protocol.instructions import Options
from onebox.wire.protocol.requests import OptimizerSpec, StoredProgram
from onebox.wire.protocol.responses import InstructionSets, Scalars
from onebox.worker.accelerator import accelerator_for
from onebox.worker.device import ComputeDevice, check_cost
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import KERNEL_OPTIONS, NativeOptimizer
from onebox.worker.programs.interpreter import CompiledProgram, Seed
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.clock import wake_on_time

PRODUCT = "computes nothing"
"""Substitute for a product name."""

MEMORY_BYTES = 16 << 30
"""Memory of a ``sim`` device if the pool sets no quota: that of a common accelerator."""

_META = torch.device("meta")

_SLICE_NS = 100_000
"""Shortest slice that the kernel grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # a system call without a libc function


class NoValues(Exception):
    """Elements of a tensor without elements were requested."""

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(
            f"{spec} on a sim device has no values: the device computes nothing; allowed are questions about times, "
            "memory and digests of shapes"
        )


class EmulatedDevice(ComputeDevice):
    """A device that computes nothing.

    Args:
        speed: Divisor of the costs of programs and optimizer steps.

    Raises:
        UsageError: The speed is invalid.
    """

    def __init__(self, speed: float = 1.0) -> None:
        if not 0 < speed < math.inf:
            raise UsageError(f"sim at speed {speed}: allowed is any number above 0")
        self.name = "sim"
        self.accelerator = accelerator_for("meta")
        self.device = _META
        self.threads = 1
        self.speed = speed
        self.emulated = True
        self._memory_bytes = MEMORY_BYTES
        wake_on_time()
        wake_promptly()
        torch.set_num_threads(1)

    def load(self, stored: StoredProgram) -> CompiledProgram:
        """Check a program as every worker does, and create its substitute."""
        check_cost(stored.cost_s)
        return EmulatedProgram(stored)

    def optimizer(
        self, spec: OptimizerSpec, parameters: list[Tensor], state: list[Tensor], host: HostMemory
    ) -> NativeOptimizer:
        """Create an optimizer with a state but no values."""
        check_cost(spec.cost_s)
        return EmulatedOptimizer(spec, parameters, state, host)

    def instructions(self) -> InstructionSets:
        """Return no instruction sets: nothing is computed."""
        return InstructionSets()

    def seed(self, run: int, step: int, micro_batch: int, position: int) -> None:
        """Do nothing: no random number is drawn."""

    def begin(self, cost_s: float, progress: WorkerProgress) -> int:
        """Return when work begins; work that costs something waits for the end of earlier work."""
        return progress.ready_ns() if cost_s else progress.now_ns()

    def pace(self, start_ns: int, cost_s: float, progress: WorkerProgress) -> None:
        """Give the device work with a given beginning and cost at speed 1, ahead of which the host runs."""
        if cost_s:
            progress.work(start_ns + math.ceil(cost_s / self.speed * 1e9))

    def retime(self, speed: float) -> None:
        """Change the speed."""
        if not 0 < speed < math.inf:
            raise WireError(f"sim at speed {speed}: allowed is any number above 0")
        self.speed = speed

    def fill(self, spec: TensorSpec, frame: memoryview | bytes) -> Tensor:
        """Return a tensor of a spec, ignoring the elements of a matching frame."""
        check_elements(spec, frame)
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=_META)

    def read(self, tensor: Tensor) -> memoryview:
        """Refuse with :class:`NoValues`."""
        raise NoValues(spec_of(tensor))

    def scalars(self, tensors: Sequence[Tensor]) -> Scalars:
        """Return NaN for each tensor of one element."""
        for tensor in tensors:
            if tensor.numel() != 1:
                raise ValueError(f"{spec_of(tensor)} is no single value")
        return Scalars((math.nan,) * len(tensors))

    def digest(self, tensors: list[Tensor]) -> bytes:
        """Return one hash over the types and shapes of tensors."""
        text = "\n".join(str(spec_of(tensor)) for tensor in tensors)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def product_name(self) -> str:
        """Return the substitute for a product name."""
        return PRODUCT

    def make(self) -> tuple[tuple[int, int], int, bool]:
        """Return the result of :meth:`onebox.worker.device.ComputeDevice.make` for a device other than a GPU."""
        return (0, 0), 0, False

    def memory_bytes(self) -> int:
        """Return the emulated memory."""
        return self._memory_bytes

    def quota_bytes(self, asked_bytes: int, sharing: int = 1) -> int:
        """Return the requested limit, which becomes the emulated memory: an accelerator would fail beyond it, too."""
        self._memory_bytes = asked_bytes or self._memory_bytes
        return self._memory_bytes


def wake_promptly() -> None:
    """Request short scheduler slices, so that this thread runs as soon as it wakes although other threads compute.

    A thread with shorter slices has an earlier deadline (Linux from 6.12; before, or without permission, this has no
    effect). With both cores of a machine busy, 1 sleep in 100 ended 4 ms late or more, with short slices 1 ms; half of
    them ended within 0.02 ms either way.
    """
    if _SCHED_SETATTR is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)  # sched_setattr(2)
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, attributes, 0)


class EmulatedProgram(CompiledProgram):
    """Emulated execution of a program: its outputs are created from their specs.

    An output that would be a view shares the storage of its base, so that memory is counted as in a real run; one with
    the base's own spec, as of an operator that writes to its input, is the base.

    Args:
        stored: The program and its cost.

    Raises:
        WireError: As for a real program.
    """

    def __init__(self, stored: StoredProgram) -> None:
        super().__init__(stored.program, _META, stored.layouts)
        program = stored.program
        self.cost_s = stored.cost_s
        specs, owner = specs_by_slot(program), owners(program)
        made = [slot for slot in dict.fromkeys(program.outputs) if slot >= len(program.inputs)]
        self._own = [_plan(slot, specs[slot]) for slot in made if owner[slot] == slot]
        bases = dict.fromkeys(owner[slot] for slot in made if owner[slot] != slot)
        self._bases = [_plan(slot, specs[slot]) for slot in bases if slot >= len(program.inputs)]
        others = [slot for slot in made if owner[slot] != slot]
        self._same = [(slot, owner[slot]) for slot in others if specs[slot] == specs[owner[slot]]]
        self._views = [(*_plan(slot, specs[slot]), owner[slot]) for slot in others if specs[slot] != specs[owner[slot]]]

    def run(self, inputs: list[Tensor], seed: Seed, progress: WorkerProgress) -> list[Tensor]:
        """Return tensors with the program's specs; nothing is computed, and no time passes."""
        self.check_inputs(inputs)
        progress.executed += len(self.program.operators)
        values = dict(enumerate(inputs))
        inputs.clear()
        for slot, dtype, shape in self._own:
            values[slot] = torch.empty(shape, dtype=dtype, device=_META)
        for slot, dtype, shape in self._bases:
            if slot not in values:
                values[slot] = torch.empty(shape, dtype=dtype, device=_META)
        for slot, base in self._same:
            values[slot] = values[base]
        for slot, dtype, shape, base in self._views:
            storage = values[base].untyped_storage()
            # A stride of 0 keeps any shape, such as an expanded one, inside the storage.
            values[slot] = torch.empty(0, dtype=dtype, device=_META).set_(storage, 0, shape, (0,) * len(shape))
        return [values[slot] for slot in self.program.outputs]


def _plan(slot: int, spec: TensorSpec) -> tuple[int, torch.dtype, tuple[int, ...]]:
    return slot, DTYPES[spec.dtype], spec.shape


def _methods(names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name) for name in names.split())


_IN_PLACE = _methods("add_ addcdiv_ addcmul_ clamp_ copy_ div_ lerp_ mul_ neg_ rsqrt_ sqrt_ square_ sub_ zero_")
"""Functions of optimizers that write to a tensor, element by element."""

_ELEMENTWISE = _methods("abs add addcmul clamp div lerp mul neg sign sqrt sub") | {
    torch.full_like,
    torch.maximum,
    torch.zeros_like,
}
"""Functions of optimizers whose result is of the shape and type of the first tensor."""

_COMPARISONS = _methods("eq gt lt")

_REDUCTIONS = _methods("mean norm") | {torch.norm}


class EmulatedOptimizer(NativeOptimizer):
    """An optimizer whose state takes the real number of bytes, and whose steps do nothing.

    The state is created by the real class and its first step, over tensors without elements.
    """

    def step(
        self,
        gradients: Sequence[Tensor],
        max_norm: float,
        norm: Tensor | None = None,
        *,
        members: Sequence[int] = (),
        late: bool = False,
    ) -> Tensor | None:
        """Create the state in the first step; return a tensor if a norm is requested."""
        chosen = self.chosen(members)
        late = late and self.remembers(chosen)
        if not {(index, late) for index in chosen} <= self._counted:
            with _AnyValue():
                super().step(gradients, 0.0, members=members, late=late)
        elif len(gradients) != len(chosen):
            raise WireError(f"{len(gradients)} gradients for {len(chosen)} parameters")
        return None if max_norm <= 0 and norm is None else torch.empty((), device=_META)

    def expect(self, index: int, into: Tensor) -> None:
        """Do nothing: there are no values."""

    def _expected(self, index: int) -> Tensor | None:
        """Return a tensor with the bytes of an update."""
        return self.parameters[index].clone()

    def _made(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """Create the classes, of which some create their state at once."""
        with _AnyValue():
            return super()._made(spec)

    def _options(self, options: Options) -> dict[str, Any]:
        """Return options without the selection of a kernel: there is none for tensors without elements."""
        return {key: value for key, value in super()._options(options).items() if key not in KERNEL_OPTIONS}

    def _choose_kernel(self, name: str, group: dict[str, Any]) -> None:
        group.update({key: False for key in ("fused", "foreach") if key in group})


class _AnyValue(TorchFunctionMode):
    """Lets optimizers read numbers from tensors without elements, each of which is 1, and answers what they compute.

    PyTorch itself imports sympy to find shapes, which takes a worker a second of processor. It is asked where operands
    do not fit, for its error, and for all else.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].device == _META:
            if func is Tensor.item:
                return 1.0
            answer = _shaped(func, args[0], args[1:], kwargs) if args[0].is_floating_point() else None
            if answer is not None:
                return answer
            if func is Tensor.__setitem__ and _fits(args[0], args[1:]):
                return None
        return func(*args, **kwargs)


def _shaped(func: Any, first: Tensor, others: Sequence[Any], options: dict[str, Any]) -> Tensor | None:
    """Return a result without elements, if the function is known and its operands fit."""
    shape, dtype = first.shape, first.dtype
    if func in _REDUCTIONS:
        dim, keep = options.get("dim"), options.get("keepdim")
        if len(others) > (func is not Tensor.mean) or not isinstance(dim, int | None):
            return None
        gone = range(len(shape)) if dim is None else (range(len(shape))[dim],)
        sizes = [1 if place in gone else size for place, size in enumerate(shape) if keep or place not in gone]
        return torch.empty(sizes, dtype=dtype, device=_META)
    if func is Tensor.matmul or func is torch.addmm:
        left, right = (first, *others)[-2:]
        if not left.dim() == right.dim() == 2 or left.shape[1] != right.shape[0] or left.dtype != right.dtype:
            return None
        made = torch.empty((left.shape[0], right.shape[1]), dtype=dtype, device=_META)
        return made if func is Tensor.matmul or _fits(made, [first]) else None
    if not _fits(first, [*others, *options.values()], converts=func in _IN_PLACE and func is not Tensor.lerp_):
        return None
    if func in _IN_PLACE:
        return first
    if func in _COMPARISONS:
        return torch.empty(shape, dtype=torch.bool, device=_META)
    if func in _ELEMENTWISE and options.get("dtype") is options.get("device") is None:
        out: Tensor | None = options.get("out")
        return torch.empty(shape, dtype=dtype, device=_META) if out is None else out if out.shape == shape else None
    return None


def _fits(into: Tensor, operands: Sequence[Any], *, converts: bool = False) -> bool:
    """Return whether operands extend to the shape of a tensor, and have its type, or one that is converted to it."""
    return all(
        (operand.dtype in (into.dtype, torch.bool) or (converts and operand.is_floating_point()))
        and operand.dim() <= into.dim()
        and all(size in (1, whole) for size, whole in zip(operand.shape[::-1], into.shape[::-1], strict=False))
        for operand in operands
        if isinstance(operand, Tensor)
    )
