"""Scripts: operators that run here, as plain PyTorch, and are written down as kernels and calls for a worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from onebox.wire import (
    FREE,
    Complex,
    DType,
    GeneratorArgument,
    Hole,
    KernelSpec,
    Many,
    OwnDevice,
    SlotArgument,
    Strided,
    TapeSpec,
)
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.requests import Define
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.programs.kernels import flatten, strided_of
from tests.unit.machines import Batch, Rig


class Ref(NamedTuple):
    """A buffer, as an argument."""

    number: int


class Recorded(NamedTuple):
    """A call, or with kernel ``FREE`` the end of a buffer."""

    kernel: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()


class Script:
    """What plain PyTorch makes of some operators, and the instructions for a worker to do the same.

    Args:
        given: The first buffers, from number 1.
    """

    def __init__(self, *given: Tensor) -> None:
        self.given = [tensor.clone() for tensor in given]
        self.tensors: dict[int, Tensor] = dict(enumerate((tensor.clone() for tensor in given), 1))
        self.made = len(given)
        self.records: list[Recorded] = []
        self.floats: list[float] = []
        self.kernels: dict[str, tuple[int, KernelSpec]] = {}

    def ref(self, number: int) -> Ref:
        return Ref(number)

    def run(self, op: Any, *args: Any, **kwargs: Any) -> list[int]:
        """Run an operator and record it; return the numbers of the tensors that it made."""
        call = _Call(self.tensors)
        whole = tuple(map(call.argument, args))
        named = {key: call.argument(value) for key, value in kwargs.items()}
        with torch.inference_mode():
            result = op(*map(call.value, args), **{key: call.value(value) for key, value in kwargs.items()})
        known = {id(tensor) for tensor in self.tensors.values()}
        made = [item for item in flatten(result) if op._schema.returns]
        outs = tuple(strided_of(m) if isinstance(m, Tensor) and id(m) not in known else None for m in made)
        kernel = KernelSpec(str(op), whole, named, len(call.inputs), len(call.floats), outs)
        number, _ = self.kernels.setdefault(repr(kernel), (1000 + len(self.kernels), kernel))
        numbers = []
        for item, out in zip(made, outs, strict=True):
            if out is not None:
                self.made += 1
                self.tensors[self.made] = item
                numbers.append(self.made)
        self.floats += call.floats
        self.records.append(Recorded(number, tuple(call.inputs), tuple(numbers)))
        return numbers

    def free(self, number: int) -> None:
        """End a buffer."""
        del self.tensors[number]
        self.records.append(Recorded(FREE, (number,)))

    def definitions(self) -> list[Define]:
        """Return the instructions that define the kernels."""
        return [Define(number, kernel) for number, kernel in self.kernels.values()]

    def batch(self) -> Batch:
        """Return the calls, which are run once."""
        coded: list[int] = []
        for record in self.records:
            coded += [record.kernel, *record.inputs, *record.outputs]
        return Batch(tuple(coded), tuple(self.floats))

    def kept(self) -> tuple[int, ...]:
        """Return the numbers of what was made and is still there."""
        return tuple(number for number in self.tensors if number > len(self.given))

    def tape(self) -> TapeSpec:
        count = len(self.given)
        coded: list[int] = []
        for record in self.records:
            coded.append(record.kernel)
            coded += [number - 1 - count if number > count else -number for number in record.inputs]
        return TapeSpec(tuple(coded), count, len(self.floats))

    def replay(self, tape: int) -> Replay:
        return Replay(tape, tuple(range(1, len(self.given) + 1)), self.kept(), tuple(self.floats))

    def put(self, rig: Rig) -> None:
        """Fill the first buffers of a worker."""
        rig.put(**{f"b{number}": tensor for number, tensor in enumerate(self.given, 1)})

    def check(self, rig: Rig, numbers: Iterable[int] | None = None) -> None:
        """Require that a worker holds the same as plain PyTorch, to the last bit."""
        assert rig.failures == []
        for number in self.tensors if numbers is None else numbers:
            mine = self.tensors[number]
            made = rig.get(number)
            assert (made.shape, made.dtype) == (mine.shape, mine.dtype), number
            assert torch.equal(torch.nan_to_num(made), torch.nan_to_num(mine)), number


class _Call:
    """The arguments of one call, for PyTorch and for the wire."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        self.inputs: list[int] = []
        self.floats: list[float] = []
        self._tensors = tensors

    def value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._tensors[value.number]
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return torch.device("cpu") if isinstance(value, OwnDevice) else value

    def argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            self.inputs.append(value.number)
            return SlotArgument(len(self.inputs) - 1)
        if isinstance(value, float):
            self.floats.append(value)
            return Hole(len(self.floats) - 1)
        if isinstance(value, list):
            return Many(tuple(self.argument(item) for item in value))
        if isinstance(value, complex):
            return Complex(value.real, value.imag)
        if isinstance(value, torch.dtype):
            return DType(str(value).removeprefix("torch."))
        return GeneratorArgument(0) if isinstance(value, torch.Generator) else value


X = torch.arange(12, dtype=torch.float64).reshape(3, 4) - 5.0
FOUR = Strided("float64", (4,), (1,))
ONES = torch.ones(4, dtype=torch.float64)
ADD = KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {"alpha": Hole(0)}, 2, 1, (FOUR,))
MUL_ = KernelSpec("aten.mul_.Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0)
VIEW = KernelSpec(
    "aten.view.default", (SlotArgument(0), Many((2, 2))), {}, 1, 0, (Strided("float64", (2, 2), (2, 1), 0, 32),)
)
MM = KernelSpec("aten.mm.default", (SlotArgument(0), SlotArgument(1)), {}, 2, 0, (FOUR,))


def small_rig() -> Rig:
    """Return a machine with kernels 1 (add), 2 (mul_) and 3 (mm, which fails), and ones in buffers 11 to 13."""
    rig = Rig()
    rig.do(Define(1, ADD), Define(2, MUL_), Define(3, MM))
    rig.put(b11=ONES, b12=ONES, b13=ONES)
    return rig


def failure_of(rig: Rig, number: int) -> WorkerFailure:
    """Return why a buffer is void."""
    with pytest.raises(Poisoned) as caught:
        rig.get(number)
    return caught.value.failure


def on_a_worker(script: Script) -> Rig:
    """Run a script on a new worker."""
    rig = Rig()
    script.put(rig)
    rig.do(*script.definitions(), script.batch())
    return rig


def bytes_held(script: Script) -> int:
    """Return the bytes of the storages that a script holds in the end."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in script.tensors.values()}.values())
