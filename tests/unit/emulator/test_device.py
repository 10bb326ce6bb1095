"""The sim device: it sleeps instead of computing; programs, shapes, memory and quotas are as on a CPU."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.cost import ACCELERATOR_BPS
from onebox.emulator.clock import DeviceClock
from onebox.emulator.device import MEMORY_BYTES, EmulatedDevice, EmulatedProgram
from onebox.emulator.optimizer import EmulatedOptimizer
from onebox.errors import UsageError, WireError
from onebox.wire import Many, Operator, Program, SlotArgument, TensorSpec, spec_of, with_deaths
from onebox.wire.protocol.groups import Retime
from onebox.wire.protocol.instructions import Ask, Call, Evict, Free, Get, Offload, OptimizerStep, Options, Prefetch
from onebox.wire.protocol.requests import Define, OptimizerSpec, Put, Routine, Run, StoredProgram
from onebox.wire.protocol.responses import Digest, OptimizerState, Scalars, WorkerMemory
from onebox.wire.protocol.snapshots import StateEntry
from onebox.worker.device import ComputeDevice
from onebox.worker.memory.buffers import BufferStore, Poisoned
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import ALLOWED, NativeOptimizer
from onebox.worker.progress import WorkerProgress
from tests.unit.machines import Rig, define, elementwise
from tests.unit.programs import Sample, samples

SPEC = TensorSpec("float64", (2, 2))
X = torch.tensor([[1.0, -2.0], [3.0, -4.0]], dtype=torch.float64)
RELU = elementwise("aten.relu.default", SPEC)


@pytest.fixture
def rig() -> Rig:
    """A sim device with a program, relu (100), and X in buffer 1."""
    rig = Rig(device=EmulatedDevice())
    rig.do(define(100, RELU))
    rig.put(b1=X)
    return rig


# ---- time


def lasted_ns(rig: Rig) -> list[int]:
    """Return how long each instruction of the last run took."""
    return [end - start for start, end in zip(rig.times_ns[::2], rig.times_ns[1::2], strict=True)]


@pytest.mark.parametrize(("speed", "lasts_ns"), [(1.0, 2_000_000_000), (0.5, 4_000_000_000), (4.0, 500_000_000)])
def test_calls_and_steps_of_an_optimizer_last_what_they_cost_and_nothing_else_does(speed: float, lasts_ns: int) -> None:
    rig = Rig(device=EmulatedDevice(speed))
    rig.put(b1=X)
    rig.do(
        define(100, RELU),
        Define(101, StoredProgram(RELU, 2.0)),
        Define(102, OptimizerSpec("Adam", (((0,), {"lr": 1.0}),), (1,), (), 2.0)),
    )
    steps = (Call(100, (1,), (2,)), Call(101, (1,), (3,)), Free((2,)), Ask("scalars", ()), OptimizerStep(102, (3,)))
    rig.do(Define(103, Routine(steps, 0)))
    begin_ns = time.monotonic_ns()
    rig.do(Run(103, trace=True))
    assert rig.failures == []
    assert lasted_ns(rig) == [0, lasts_ns, 0, 0, lasts_ns]
    assert begin_ns <= rig.times_ns[0] <= time.monotonic_ns(), "and nobody has slept"
    rig.do(Run(103, trace=True))
    assert rig.times_ns[0] >= begin_ns + 2 * lasts_ns, "work begins when the device has done what came before"


def test_steps_of_some_parameters_cost_their_share() -> None:
    rig = Rig(device=EmulatedDevice())
    rig.put(b1=X, b2=torch.zeros(3, 4, dtype=torch.float64))
    rig.do(Define(102, OptimizerSpec("SGD", (((0, 1), {"lr": 1.0}),), (1, 2), (), 4.0)))
    rig.do(Define(103, Routine((OptimizerStep(102, (1,), members=(0,)), OptimizerStep(102, (1, 2))), 0)))
    rig.do(Run(103, trace=True))
    assert rig.failures == []
    assert lasted_ns(rig) == [1_000_000_000, 4_000_000_000]


def test_times_stay_numbers_that_fit_into_messages(rig: Rig) -> None:
    rig.do(Define(101, StoredProgram(RELU, 1e300)))
    for _ in range(100):
        rig.do(Call(101, (1,), (2,)))
    assert rig.failures == []
    assert rig.machine._now_ns() < 1 << 63


@pytest.mark.parametrize("cost_s", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none(rig: Rig, cost_s: float) -> None:
    stored = StoredProgram(RELU, cost_s)
    rig.do(Define(5, stored), Define(6, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,), (), cost_s)))
    assert [failure.kind for failure in rig.failures] == ["protocol"] * 2


def test_offloaded_buffers_take_the_time_of_an_accelerators_copies(rig: Rig) -> None:
    wide = TensorSpec("float64", (1 << 20,))
    rig.put(b1=torch.zeros(1 << 20, dtype=torch.float64))
    rig.do(define(104, elementwise("aten.relu.default", wide)))
    rig.do(Define(103, Routine((Offload((1,)), Evict((1,)), Prefetch((1,)), Call(104, (1,), (2,))), 0)))
    rig.do(Run(103, trace=True))
    assert rig.failures == []
    once_ns = math.ceil((8 << 20) / ACCELERATOR_BPS * 1e9)
    offload, evict, prefetch, call = zip(rig.times_ns[::2], rig.times_ns[1::2], strict=True)
    assert offload[1] - offload[0] == evict[1] - evict[0] == prefetch[1] - prefetch[0] == once_ns
    assert call[0] == prefetch[1]


@pytest.mark.parametrize("speed", [0.0, -1.0, math.inf, math.nan])
def test_speeds_that_are_none(speed: float) -> None:
    with pytest.raises(UsageError, match="speed"):
        EmulatedDevice(speed)


def test_speed_changes_between_instructions(rig: Rig) -> None:
    rig.do(Define(101, StoredProgram(RELU, 1.0)), Define(102, Routine((Call(101, (1,), (2,)),), 0)))
    found = []
    for change in (Retime(1.0), Retime(0.01), Retime()):
        rig.do(change, Run(102, trace=True))
        found += lasted_ns(rig)
    assert rig.failures == []
    assert found == [1_000_000_000, 100_000_000_000, 100_000_000_000]


@pytest.mark.parametrize("speed", [-1.0, math.inf, math.nan])
def test_a_speed_that_is_none_is_refused(rig: Rig, speed: float) -> None:
    rig.do(Retime(speed))
    assert rig.failures[0].kind == "protocol"
    assert "sim at speed" in rig.failures[0].message


# ---- programs


@given(samples(), st.data())
def test_shapes_types_and_memory_are_those_of_a_cpu(sample: Sample, data: st.DataObject) -> None:
    """The same calls on both devices leave the same buffers and the same bytes in use."""
    program = sample.program
    count = len(program.inputs)
    takes = tuple(sorted(data.draw(st.sets(st.integers(0, count - 1)))))
    inputs, outputs = tuple(range(count)), tuple(range(50, 50 + len(program.outputs)))
    rigs = [Rig(), Rig(device=EmulatedDevice())]
    for rig in rigs:
        rig.put(**{f"b{number}": tensor for number, tensor in enumerate(sample.inputs)})
        rig.do(define(100, program), Call(100, inputs, outputs, takes))
        assert rig.failures == []
    stores = [rig.machine.store for rig in rigs]
    found = [[spec_of(store.get(number)) for number in outputs] for store in stores]
    assert found[0] == found[1]
    assert [store.used_bytes for store in stores] == [stores[0].used_bytes] * 2
    assert [store.peak_bytes for store in stores] == [stores[0].peak_bytes] * 2
    for rig in rigs:
        rig.do(Free((*inputs, *outputs)))
        assert rig.used == 0


def test_outputs_that_view_one_another_share_their_memory() -> None:
    """Half of a computed value keeps all of it, also where the value itself is no output; types may differ."""
    operators = (
        Operator("aten.relu.default", (SlotArgument(0),), {}, (1,), (SPEC,)),
        Operator("aten.select.int", (SlotArgument(1), 0, 0), {}, (2,), (TensorSpec("float64", (2,)),)),
        Operator("aten.expand.default", (SlotArgument(2), Many((3, 2))), {}, (3,), (TensorSpec("float64", (3, 2)),)),
        Operator("aten.t.default", (SlotArgument(0),), {}, (4,), (SPEC,)),
    )
    program = with_deaths(Program((SPEC,), operators, (2, 3, 4, 0, 2), 5))
    store = BufferStore()
    for number, tensor in enumerate([torch.empty(2, 2, dtype=torch.float64, device="meta")]):
        store.put(number, tensor)
    made = EmulatedProgram(StoredProgram(program), DeviceClock()).run(
        [store.get(0)], lambda position: None, WorkerProgress()
    )
    for number, tensor in enumerate(made, start=1):
        store.put(number, tensor)
    assert store.used_bytes == 64
    assert [tuple(tensor.shape) for tensor in made] == [(2,), (3, 2), (2, 2), (2, 2), (2,)]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (elementwise("aten.relu_.default", SPEC), "allow-list"),
        (elementwise("os.system", SPEC), "allow-list"),
        (Program((SPEC,), (), (1,), 2), "gives out a slot"),
    ],
)
def test_what_no_worker_runs_is_refused(rig: Rig, program: Program, message: str) -> None:
    rig.do(define(101, program))
    assert rig.failures[0].kind == "protocol"
    assert message in rig.failures[0].message


def test_inputs_are_checked(rig: Rig) -> None:
    rig.put(b2=torch.zeros(3))
    rig.do(Call(100, (2,), (3,)))
    assert "input 0 of the program is float64[2, 2], but its buffer holds float32[3]" in rig.failures[0].message


# ---- memory


def test_a_quota_holds(rig: Rig) -> None:
    rig = Rig(quota_bytes=100, device=EmulatedDevice())
    rig.do(define(100, RELU))
    rig.put(b1=X)
    rig.do(Call(100, (1,), (2,)), Call(100, (1,), (3,)), Call(100, (1,), (4,)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("memory", "aten.relu.default")
    assert "the quota is 100" in failure.message
    assert rig.do(Ask("memory")) == [WorkerMemory(96, 96, 100)]


def test_it_has_the_memory_of_an_accelerator_unless_the_pool_says_otherwise() -> None:
    assert EmulatedDevice().quota_bytes(0) == EmulatedDevice().memory_bytes() == MEMORY_BYTES
    assert EmulatedDevice().quota_bytes(100) == 100
    assert ComputeDevice("cpu", 1).quota_bytes(0) == 0


# ---- values


def test_what_is_put_is_a_shape_and_wrong_frames_are_refused(rig: Rig) -> None:
    rig.do(Put((2,), (SPEC,)), frames=[bytes(31)])
    assert "needs 32 bytes" in rig.failures[0].message
    assert rig.machine.store.get(1).device.type == "meta"


def test_there_are_no_values_to_get(rig: Rig) -> None:
    with pytest.raises(Poisoned) as caught:
        rig.do(Get((1,)))
    failure = caught.value.failure
    assert (failure.kind, failure.operator) == ("values", "get")
    assert "float64[2, 2] on a sim device has no values" in failure.message
    assert "allowed are questions about times" in failure.message


def test_scalars_are_no_numbers(rig: Rig) -> None:
    rig.put(b2=torch.tensor(2.5), b3=torch.tensor([7]))
    (scalars,) = rig.do(Ask("scalars", (2, 3)))
    assert isinstance(scalars, Scalars)
    assert [math.isnan(value) for value in scalars.values] == [True, True]
    with pytest.raises(Poisoned, match="no single value"):
        rig.do(Ask("scalars", (1,)))


def test_digests_are_those_of_shapes(rig: Rig) -> None:
    rig.put(b2=X + 1, b3=X.float(), b4=X.view(4))
    digests = [rig.do(Ask("digest", (number,))) for number in (1, 2, 3, 4)]
    assert isinstance(digests[0][0], Digest)
    assert digests[0] == digests[1]
    assert len({repr(digest) for digest in digests}) == 3
    other = Rig(device=EmulatedDevice(0.5))
    other.put(b9=X)
    assert other.do(Ask("digest", (9,))) == digests[0], "replicas agree"


# ---- optimizers


def optimizers(kind: str, options: Options) -> tuple[NativeOptimizer, EmulatedOptimizer, list[Tensor]]:
    """Return an optimizer on a CPU and the same one on a sim device."""
    ours = [torch.randn(4, 3), torch.randn(2, 5)]
    spec = OptimizerSpec(kind, (((0, 1), options),), (1, 2))
    return NativeOptimizer(spec, ours, []), EmulatedOptimizer(spec, [tensor.to("meta") for tensor in ours], []), ours


@pytest.mark.parametrize("kind", [kind for kind in ALLOWED if hasattr(torch.optim, kind)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_state_takes_the_bytes_that_it_takes_on_a_cpu(kind: str, dtype: str) -> None:
    native, sim, ours = optimizers(kind, {"lr": 0.1})
    for _ in range(2):
        native.step([torch.ones_like(tensor) for tensor in ours], 0.0)
        sim.step([torch.ones_like(tensor, device="meta") for tensor in ours], 0.0)
    assert sim.charged_bytes == native.charged_bytes
    assert [entry for entry in sim.state()[0] if entry.key != "step"] == [
        entry for entry in native.state()[0] if entry.key != "step"
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("Adam", {"lr": 0.1, "fused": True}),
        ("Adam", {"lr": 0.1, "foreach": True}),
        ("RMSprop", {"lr": 0.1, "momentum": 0.5, "centered": True}),
    ],
)
def test_options_count_and_kernels_do_not(kind: str, options: Options) -> None:
    native, sim, ours = optimizers(kind, options)
    native.step([torch.ones_like(tensor) for tensor in ours], 0.0)
    sim.step([torch.ones_like(tensor, device="meta") for tensor in ours], 0.0)
    assert sim.charged_bytes == native.charged_bytes
    sim.set_options(({**options, "lr": 0.5},))
    assert sim.groups[0]["lr"] == 0.5


_FIRST_STEPS = """
import sys, torch
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.emulator.optimizer import EmulatedOptimizer
from onebox.worker.optimizer.native import ALLOWED
more = {
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}],
}
steps = [(kind, options) for kind in ALLOWED if hasattr(torch.optim, kind) for options in [{}, *more.get(kind, [])]]
with torch.inference_mode():
    for kind, options in steps:
        for delay in ("none", "feedback"):
            ours = [torch.empty(shape, device="meta") for shape in ((4, 3), (2, 5))]
            optimizer = EmulatedOptimizer(OptimizerSpec(kind, (((0, 1), options),), (1, 2), delay=delay), ours, [])
            for _ in range(2):
                optimizer.step(ours, 1.0, late=True)
            if "sympy" in sys.modules:
                sys.exit(f"{kind} with {options} and delay {delay!r} imports sympy")
"""


def test_no_first_step_imports_sympy() -> None:
    ran = subprocess.run([sys.executable, "-c", _FIRST_STEPS], capture_output=True, text=True, timeout=120, check=False)
    assert not ran.returncode, ran.stderr


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *((key, torch.ones(shape)) for key in ("exp_avg", "exp_avg_sq") for shape in ((5, 7), (3,), (2, 4, 3), (4, 1))),
        ("exp_avg", torch.ones(4, 3, dtype=torch.float64)),
    ],
)
def test_a_state_that_does_not_fit_fails_as_on_a_cpu(key: str, wrong: Tensor) -> None:
    parameter = torch.ones(4, 3)
    state = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": torch.tensor(1.0)} | {key: wrong}
    entries = tuple(StateEntry(0, name, spec_of(tensor)) for name, tensor in state.items())
    spec = OptimizerSpec("Adam", (((0,), {"fused": False, "foreach": False}),), (1,), entries)
    for kind, device in ((NativeOptimizer, "cpu"), (EmulatedOptimizer, "meta")):
        tensors = [tensor.to(device) if tensor.dim() else tensor.clone() for tensor in state.values()]
        optimizer = kind(spec, [torch.ones(4, 3, device=device)], tensors)
        with pytest.raises(RuntimeError, match=r"size|shape|dimension|dtype"):
            optimizer.step([torch.ones(4, 3, device=device)], 0.0)


def test_an_optimizer_without_values(rig: Rig) -> None:
    rig.put(b2=X)
    state = (StateEntry(0, "exp_avg", SPEC), StateEntry(0, "exp_avg_sq", SPEC))
    state += (StateEntry(0, "step", TensorSpec("float32", ())),)
    adam = OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,), state)
    rig.do(Define(7, adam), frames=[bytes(32), bytes(32), bytes(4)])
    (norm,) = rig.do(OptimizerStep(7, (2,), 1.0))
    assert isinstance(norm, Scalars)
    assert math.isnan(norm.values[0])
    with pytest.raises(Poisoned, match="no values"):
        rig.do(Ask("optimizer", (7,)))
    rig.do(OptimizerStep(7, ()), OptimizerStep(7, (2, 2)))
    assert len(rig.failures) == 3, "also in a later step"
    rig.do(Free((1, 2), (7, 100)))
    assert rig.used == 0


def test_the_state_of_an_optimizer_counts_towards_the_quota() -> None:
    rig = Rig(quota_bytes=100, device=EmulatedDevice())
    rig.put(b1=X, b2=X)
    rig.do(Define(7, OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,))), OptimizerStep(7, (2,)))
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert "132 bytes needed" in rig.failures[0].message


def test_a_state_that_is_empty_can_be_asked_for(rig: Rig) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 0.1}),), (1,))), OptimizerStep(7, (1,)))
    assert rig.do(Ask("optimizer", (7,))) == [OptimizerState(())]


def test_optimizers_that_no_worker_runs_are_refused() -> None:
    with pytest.raises(WireError, match="not allowed"):
        EmulatedDevice().optimizer(
            OptimizerSpec("LBFGS", (((0,), {}),), (1,)), [torch.empty(2, device="meta")], [], HostMemory(0)
        )
