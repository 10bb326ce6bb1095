"""Stages whose products are of bfloat16: the bits are those of programs in which each product rounds for itself."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebox.errors import UsageError
from onebox.graph import ModelPrograms, NamedProgram, Port
from onebox.plan import Plan, Stage
from onebox.wire import DType, Operator, Program, SlotArgument, TensorSpec, reads, specs_by_slot, with_deaths
from tests.kit.models import CASES
from tests.unit.graph.lower.test_recompute import cut, saved_bytes
from tests.unit.graph.staged import SIZE, Ran, Traced, order_of, run, trace

PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
)
NORMS = {
    "aten._native_batch_norm_legit_functional.default": (0,),
    "aten._native_batch_norm_legit_no_training.default": (0,),
    "aten.native_batch_norm_backward.default": (1, 0),
}
"""Batch norms, and the places of what they read in bfloat16 where the first of that was made by a product."""

CHOOSING = frozenset(
    f"aten.{name}.default"
    for name in (
        "cat", "clone", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "permute", "relu", "reshape",
        "t", "threshold_backward", "transpose", "_unsafe_view", "view",
    )
)  # fmt: skip
"""What makes something widened of that."""

CAST = "aten._to_copy.default"
NARROW: Literal["bfloat16"] = "bfloat16"


@functools.cache
def traced(name: str) -> Traced:
    """Return a case in float32."""
    case = CASES[name]
    loss = case.loss.float() if isinstance(case.loss, nn.Module) else case.loss
    return trace(case.model().float(), loss, tree_map(single, case.batches([SIZE])[0]))


def single(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


class Rounding:
    """Programs each of whose products rounds what it reads for itself, and has what it makes widened.

    Batch norms do so with what has been widened, whether by the same program or another one.
    """

    def __init__(self) -> None:
        self.widened: set[Port] = set()

    def program(self, named: NamedProgram) -> NamedProgram:
        """Return what stands for a program, those that it reads of being known."""
        program = named.program
        self._specs, self._count = specs_by_slot(program), program.slots
        self._operators: list[Operator] = []
        widened = {slot for slot, port in enumerate(named.inputs) if port in self.widened}
        for operator in program.operators:
            places = self._places(operator, widened)
            self._operators += [] if places else [operator]
            if places:
                self._add(operator, places)
            if places or (operator.name in CHOOSING and widened.issuperset(self._floating(operator))):
                widened |= {slot for slot in operator.outs[:1] if slot is not None}
                widened |= {slot for slot in operator.outs if slot is not None and operator.name in PRODUCTS}
        self.widened |= {port for port, slot in zip(named.outputs, program.outputs, strict=True) if slot in widened}
        made = Program(program.inputs, tuple(self._operators), program.outputs, self._count)
        return replace(named, program=with_deaths(made))

    def _floating(self, operator: Operator) -> list[int]:
        return [slot for slot in reads(operator) if self._specs[slot].dtype == "float32"]

    def _places(self, operator: Operator, widened: set[int]) -> tuple[int, ...]:
        """Return which arguments are rounded."""
        if operator.name in PRODUCTS:
            return tuple(place for place, value in enumerate(operator.args) if isinstance(value, SlotArgument))
        places = NORMS.get(operator.name, ())
        source = operator.args[places[0]] if places else None
        return places if isinstance(source, SlotArgument) and source.index in widened else ()

    def _add(self, operator: Operator, places: tuple[int, ...]) -> None:
        args = list(operator.args)
        for place in places:
            source = args[place]
            assert isinstance(source, SlotArgument)
            args[place] = SlotArgument(self._cast(source.index, NARROW, self._specs[source.index]))
        outs, specs = list(operator.outs), list(operator.specs)
        chosen = [place for place, spec in enumerate(specs) if spec and (place == 0 or operator.name in PRODUCTS)]
        for place in chosen:
            spec = specs[place]
            assert spec is not None
            specs[place] = TensorSpec(NARROW, spec.shape)
            if outs[place] is not None:
                outs[place], self._count = self._count, self._count + 1
        self._operators.append(Operator(operator.name, tuple(args), operator.kwargs, tuple(outs), tuple(specs)))
        for place in chosen:
            slot, new = operator.outs[place], outs[place]
            if slot is not None and new is not None:
                self._cast(new, "float32", self._specs[slot], slot)

    def _cast(self, slot: int, dtype: Literal["bfloat16", "float32"], like: TensorSpec, into: int | None = None) -> int:
        if into is None:
            into, self._count = self._count, self._count + 1
        spec = TensorSpec(dtype, like.shape)
        self._operators.append(Operator(CAST, (SlotArgument(slot),), {"dtype": DType(dtype)}, (into,), (spec,)))
        return into


def expected(model: ModelPrograms, narrow: set[int], given: Traced, *, halves: bool) -> Ran:
    """Return what programs of float32 make with the products of some stages rounded."""
    rounding, order = Rounding(), order_of(model, halves=halves)
    phases = dict(model.phases)
    for phase in order:
        if phase.stage in narrow:
            phases[phase] = rounding.program(model.phases[phase])
    return run(replace(model, phases=phases), given.given, order)


def found(model: ModelPrograms, given: Traced, *, halves: bool) -> Ran:
    """Return what programs make that read parameters in bfloat16."""
    ports = {port for part in model.phases.values() for port in part.inputs if port.kind == "rounded"}
    rounded = {port: given.given[Port("parameter", port.name)].bfloat16() for port in ports}
    return run(model, {**given.given, **rounded}, order_of(model, halves=halves))


def require_same_bits(one: Ran, other: Ran) -> None:
    assert one.made.keys() == other.made.keys()
    for port, tensor in other.made.items():
        assert torch.equal(one.made[port], tensor), port


@pytest.mark.parametrize("name", CASES)
def test_all_stages_and_some_of_them(name: str) -> None:
    case, stages = traced(name), cut(traced(name).model.segments)
    plain = case.model.divide(stages)
    for chosen in (set(range(len(stages))), set(range(0, len(stages), 2))):
        model = case.model.divide(stages, narrow=chosen)
        for halves in (False, True):
            require_same_bits(found(model, case, halves=halves), expected(plain, chosen, case, halves=halves))
    again = case.model.divide(stages)
    assert {phase: part.program for phase, part in again.phases.items()} == {
        phase: part.program for phase, part in plain.phases.items()
    }, "stages in float32 stay what they were"


@pytest.mark.parametrize("name", ["cnn", "gpt2", "tied", "resnet"])
def test_recomputed_stages(name: str) -> None:
    """Their backward makes the same values again; parameters in bfloat16 are there for both."""
    case, stages = traced(name), cut(traced(name).model.segments)
    every = range(len(stages))
    kept = found(case.model.divide(stages, narrow=every), case, halves=False)
    model = case.model.divide(stages, narrow=every, policies=["recompute"] * len(stages))
    require_same_bits(found(model, case, halves=False), kept)


@pytest.mark.parametrize("name", ["cnn", "gpt2", "resnet", "recurrent"])
def test_values_are_rounded_once_and_kept_as_they_are_read(name: str) -> None:
    case = traced(name)
    plain, model = case.model.divide(), case.model.divide(narrow=[0])
    assert saved_bytes(model, 0) < saved_bytes(plain, 0)
    for part in model.phases.values():
        casts = [o for o in part.program.operators if o.kwargs.get("dtype") == DType(NARROW)]
        assert len({operator.args for operator in casts}) == len(casts)
        slots = dict(zip(part.inputs, range(len(part.inputs)), strict=True))
        weights = {SlotArgument(slot) for port, slot in slots.items() if port.kind == "parameter"}
        assert not weights & {operator.args[0] for operator in casts}, "parameters come rounded"


def network() -> nn.Module:
    """A network of nothing but products and of operators that choose among elements."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 5),
    )  # fmt: skip


def test_what_only_chooses_stays_in_bfloat16() -> None:
    """From the images to the loss, and back, nothing is widened or rounded again but for sums of gradients."""
    torch.manual_seed(0)
    case = trace(network(), nn.functional.cross_entropy, (torch.randn(4, 3, 10, 10), torch.randint(5, (4,))))
    model = case.model.divide(narrow=[0])
    for halves in (False, True):
        require_same_bits(found(model, case, halves=halves), expected(case.model.divide(), {0}, case, halves=halves))
    forward = [o for o in model.forward.program.operators if o.name == "aten._to_copy.default"]
    assert [o.kwargs["dtype"] for o in forward] == [DType(NARROW), DType("float32")], "the images, and the outputs"
    assert model.backward is not None
    back = [o for o in model.backward.program.operators if o.kwargs.get("dtype") == DType(NARROW)]
    assert len(back) == 1, "the gradient of the outputs"
    values = [spec for port, spec in model.forward.specs().items() if port.kind == "value"]
    assert {spec.dtype for spec in values} == {NARROW, "int64", "float32"}
    large = [spec for spec in values if len(spec.shape) == 4]
    assert all(spec.dtype in (NARROW, "int64") for spec in large)


def test_models_of_float64_are_refused() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 10, 10, dtype=torch.float64), torch.randint(5, (4,))
    case = trace(network().double(), nn.functional.cross_entropy, batch)
    with pytest.raises(UsageError, match=r"precision='bf16' of the stage with segment 'model.0'.* float64"):
        case.model.divide(narrow=[0])


def test_plans_say_which_stages() -> None:
    stage = Stage(replicas=((0,),), shares=(1.0,), segments=("a",))
    other = Stage(replicas=((0,),), shares=(1.0,), segments=("b",), precision="bf16", channels_last=True)
    plan = Plan(stages=(stage, other), micro_batch=1)
    assert Plan.from_json(plan.to_json()) == plan
    assert (set(plan.narrow), other.formats) == ({1}, ("channels last", "bf16"))
    assert not stage.formats
    assert plan.describe().endswith("1 of bf16")
    with pytest.raises(UsageError, match="precision='bf16' of a stage whose layers are split"):
        Stage(replicas=((0, 1),), shares=(1.0,), precision="bf16")
    with pytest.raises(UsageError, match="precision='fp8' of a stage: allowed are 'fp32', 'bf16'"):
        Stage(replicas=((0,),), shares=(1.0,), precision="fp8")  # type: ignore[arg-type]
