"""The emulated device and its programs: shapes are propagated, and work takes its modelled time.

Tensors are on PyTorch's device ``meta``: they have an element type, a shape and a storage size, but no elements.
Programs are checked, memory is counted and quotas apply as on a CPU, so that plans and the engine itself can be tested
with a model that would not fit on this machine. Measurements on such a device are always labelled emulated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onebox.cost import owners
from onebox.emulator.clock import DeviceClock
from onebox.emulator.optimizer import EmulatedOptimizer
from onebox.errors import UsageError, WireError
from onebox.wire import DTYPES, TensorSpec, check_elements, spec_of, specs_by_slot
from onebox.wire.protocol.requests import OptimizerSpec, StoredProgram
from onebox.wire.protocol.responses import InstructionSets, Scalars
from onebox.worker.accelerator import HostAccelerator
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.errors import NoValues
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import NativeOptimizer
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.programs.tape import Seed
from onebox.worker.progress import WorkerProgress

PRODUCT = "computes nothing"
"""Substitute for a product name."""

MEMORY_BYTES = 16 << 30
"""Memory of a ``sim`` device if the pool sets no quota: that of a common accelerator."""

_META = torch.device("meta")


class EmulatedAccelerator(HostAccelerator):
    """The host as a device of tensors without elements, which takes time on a clock of its own."""

    def __init__(self, clock: DeviceClock) -> None:
        super().__init__(_META)
        self.clock = clock
        self.generator = torch.Generator()  # not the process's
        self.backends = ()


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
        self.clock = DeviceClock(speed)
        self.accelerator = EmulatedAccelerator(self.clock)
        self.device = _META
        self.threads = 1
        self.speed = speed
        self.emulated = True
        self._memory_bytes = MEMORY_BYTES
        torch.set_num_threads(1)

    def load(self, stored: StoredProgram) -> CompiledProgram:
        """Check a program as every worker does, and create its substitute."""
        _check_cost(stored.cost_s)
        return EmulatedProgram(stored, self.clock)

    def optimizer(
        self, spec: OptimizerSpec, parameters: list[Tensor], state: list[Tensor], host: HostMemory
    ) -> NativeOptimizer:
        """Create an optimizer with a state but no values."""
        _check_cost(spec.cost_s)
        return EmulatedOptimizer(spec, parameters, state, host, self.clock)

    def instructions(self) -> InstructionSets:
        """Return no instruction sets: nothing is computed."""
        return InstructionSets()

    def seed(self, run: int, step: int, micro_batch: int, position: int) -> None:
        """Do nothing: no random number is drawn."""

    def retime(self, speed: float) -> None:
        """Change the speed."""
        if not 0 < speed < math.inf:
            raise WireError(f"sim at speed {speed}: allowed is any number above 0")
        self.clock.speed = speed

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


def _check_cost(cost_s: float) -> None:
    """Require that a cost is valid.

    Raises:
        WireError: It is invalid.
    """
    if not 0 <= cost_s < math.inf:
        raise WireError(f"a cost of {cost_s} s; allowed are seconds from 0")


class EmulatedProgram(CompiledProgram):
    """Emulated execution of a program: its outputs are created from their specs.

    An output that would be a view shares the storage of its base, so that memory is counted as in a real run; one with
    the base's own spec, as of an operator that writes to its input, is the base.

    Args:
        stored: The program and its cost.
        clock: The clock of the device.

    Raises:
        WireError: As for a real program.
    """

    def __init__(self, stored: StoredProgram, clock: DeviceClock) -> None:
        super().__init__(stored.program, _META, stored.layouts)
        program = stored.program
        self._cost_s, self._clock = stored.cost_s, clock
        specs, owner = specs_by_slot(program), owners(program)
        made = [slot for slot in dict.fromkeys(program.outputs) if slot >= len(program.inputs)]
        self._own = [_plan(slot, specs[slot]) for slot in made if owner[slot] == slot]
        bases = dict.fromkeys(owner[slot] for slot in made if owner[slot] != slot)
        self._bases = [_plan(slot, specs[slot]) for slot in bases if slot >= len(program.inputs)]
        others = [slot for slot in made if owner[slot] != slot]
        self._same = [(slot, owner[slot]) for slot in others if specs[slot] == specs[owner[slot]]]
        self._views = [(*_plan(slot, specs[slot]), owner[slot]) for slot in others if specs[slot] != specs[owner[slot]]]

    def run(self, inputs: list[Tensor], seed: Seed, progress: WorkerProgress) -> list[Tensor]:
        """Return tensors with the program's specs when it would have made them; nothing is computed."""
        self.check_inputs(inputs)
        self._clock.work(self._cost_s)
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
