"""Random small programs for property tests, and plain ways to run and to measure them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebox.wire import Many, Operator, Program, SlotArgument, Value, overload, spec_of, with_deaths
from onebox.worker.accelerator import accelerator_for

CPU = torch.device("cpu")
HOST = accelerator_for("cpu")


@dataclass
class Sample:
    """A program and inputs for it."""

    program: Program
    inputs: list[Tensor]


@dataclass
class Maker:
    """Makes a program operator by operator; every slot's value is known while it grows."""

    values: list[Tensor]
    count: int = 0
    operators: list[Operator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = len(self.values)

    def add(self, name: str, *args: Value, keep: Sequence[bool] | None = None, **kwargs: Value) -> list[int]:
        """Append an operator and return the slots of its outputs."""
        made = overload(name)(*(self._given(value) for value in args), **kwargs)
        made = [made] if isinstance(made, Tensor) else list(made)
        keep = keep or [True] * len(made)
        slots = [len(self.values) + index for index in range(sum(keep))]
        numbers = iter(slots)
        outs = tuple(next(numbers) if kept else None for kept in keep)
        specs = tuple(spec_of(tensor) for tensor in made)
        self.operators.append(Operator(name, args, kwargs, outs, specs))
        self.values += [tensor for tensor, kept in zip(made, keep, strict=True) if kept]
        return slots

    def program(self, outputs: Sequence[int]) -> Program:
        """Return the program, deaths set."""
        inputs = tuple(spec_of(tensor) for tensor in self.values[: self.count])
        return with_deaths(Program(inputs, tuple(self.operators), tuple(outputs), len(self.values)))

    def _given(self, value: Value) -> Any:
        if isinstance(value, SlotArgument):
            return self.values[value.index]
        if isinstance(value, Many):
            return [self._given(item) for item in value.items]
        return value


_SHAPES = [(3,), (2, 3), (3, 3), (2, 1, 3)]


@st.composite
def samples(draw: st.DrawFn, most: int = 8) -> Sample:
    """Programs of element-wise operators, products, views, lists of views and operators of several outputs."""
    shapes = draw(st.lists(st.sampled_from(_SHAPES), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    maker = Maker(list(inputs))
    for _ in range(draw(st.integers(1, most))):
        _grow(draw, maker)
    slots = st.integers(0, len(maker.values) - 1)
    outputs = draw(st.lists(slots, min_size=1, max_size=4))
    return Sample(maker.program(outputs), inputs)


def _grow(draw: st.DrawFn, maker: Maker) -> None:
    floats = [n for n, value in enumerate(maker.values) if value.is_floating_point()]
    a = draw(st.sampled_from(floats))
    value = maker.values[a]
    like = [n for n in floats if maker.values[n].shape == value.shape]
    after = [n for n in floats if value.dim() == 2 and maker.values[n].dim() == 2]
    after = [n for n in after if maker.values[n].shape[0] == value.shape[1]]
    choices = ["add", "mul", "relu", "cat"]
    choices += ["unsqueeze"] if value.dim() < 4 else []
    choices += ["transpose"] if value.dim() >= 2 else []
    choices += ["select", "split", "max"] if value.dim() and value.numel() else []
    choices += ["mm"] if after else []
    match draw(st.sampled_from(choices)):
        case "add":
            maker.add("aten.add.Tensor", SlotArgument(a), SlotArgument(draw(st.sampled_from(like))))
        case "mul":
            maker.add("aten.mul.Scalar", SlotArgument(a), 0.5)
        case "relu":
            maker.add("aten.relu.default", SlotArgument(a))
        case "cat":
            parts = draw(st.lists(st.sampled_from(like), min_size=1, max_size=2)) if value.dim() else []
            if parts:
                maker.add("aten.cat.default", Many(tuple(SlotArgument(part) for part in parts)), 0)
        case "unsqueeze":
            maker.add("aten.unsqueeze.default", SlotArgument(a), 0)
        case "transpose":
            maker.add("aten.transpose.int", SlotArgument(a), 0, 1)
        case "select":
            maker.add("aten.select.int", SlotArgument(a), 0, 0)
        case "split":
            keep = [True] * value.shape[0]
            keep[-1] = draw(st.booleans()) or len(keep) == 1
            maker.add("aten.split.Tensor", SlotArgument(a), 1, 0, keep=keep)
        case "max":
            maker.add("aten.max.dim", SlotArgument(a), 0, keep=draw(st.sampled_from([(True, True), (True, False)])))
        case "mm":
            maker.add("aten.mm.default", SlotArgument(a), SlotArgument(draw(st.sampled_from(after))))


def run_plainly(program: Program, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the value of every slot, nothing ever dying."""
    values = dict(enumerate(inputs))

    def given(value: Value) -> Any:
        if isinstance(value, SlotArgument):
            return values[value.index]
        return [given(item) for item in value.items] if isinstance(value, Many) else value

    for operator in program.operators:
        made = overload(operator.name)(*(given(value) for value in operator.args), **operator.kwargs)
        made = [made] if isinstance(made, Tensor) else made
        values |= {slot: tensor for slot, tensor in zip(operator.outs, made, strict=True) if slot is not None}
    return values


class Meter(TorchDispatchMode):
    """Counts the bytes of all storages that are alive after each operator, whoever holds them.

    Args:
        tensors: What is there at the beginning.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in tensors:
            self._note(tensor)
        self.base_bytes = self.peak_bytes = self.now()

    def now(self) -> int:
        """Return the bytes that are alive."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        return sum(size for _, size in self._known.values())

    def _note(self, tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = (reference, tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.now()  # forget what has died before its address is used again
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        self.peak_bytes = max(self.peak_bytes, self.now())
        return made
