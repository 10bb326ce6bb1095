"""Captured programs on a modelled accelerator: replays are what the programs compute, or there are none."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.wire import Many, Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.worker.accelerator import Accelerator, accelerator_for
from onebox.worker.device import seed_of
from onebox.worker.memory.buffers import BufferStore, QuotaExceeded
from onebox.worker.programs import graphs
from onebox.worker.programs.graphs import GraphMemory
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.kit.accelerator import ModelAccelerator
from tests.kit.models import CASES, FATED
from tests.unit.graph.staged import Traced, order_of, trace, traced_case

SPEC = TensorSpec("float64", (4, 6))
S = SlotArgument
STEPS = 6
PLENTY = 1 << 30


def unary(name: str, source: int, target: int, *args: Any, spec: TensorSpec = SPEC, position: int = -1) -> Operator:
    return Operator(name, (S(source), *args), {}, (target,), (spec,), (), position)


def program(*operators: Operator, outputs: tuple[int, ...], inputs: int = 1) -> Program:
    return with_deaths(Program((SPEC,) * inputs, operators, outputs, 16))


CHAIN = program(
    unary("aten.sin.default", 0, 1),
    unary("aten.exp.default", 1, 2),
    unary("aten.neg.default", 2, 3),
    unary("aten.cos.default", 3, 4),
    unary("aten.tanh.default", 4, 5),
    outputs=(5,),
)


@pytest.fixture(autouse=True)
def accelerator() -> None:
    """No device beside the one of :func:`model`, while models are traced least of all."""


@pytest.fixture
def model(seed: int, collected: None) -> Iterator[ModelAccelerator]:
    """A modelled accelerator, which must not race."""
    made = ModelAccelerator(seed, memory_bytes=256 << 20)
    try:
        with torch.inference_mode():
            yield made
        made.synchronize()
        assert made.races == ()
    finally:
        made.close()


class Worker:
    """Runs one program as a worker does.

    Args:
        model: Its device; ``None`` for a CPU.
        program: The program.
    """

    def __init__(self, model: ModelAccelerator | None, program: Program) -> None:
        self.device: Accelerator = model or accelerator_for("cpu")
        self.graphs = GraphMemory(self.device)
        self.tape = CompiledProgram(program, self.device.device)
        self.progress = WorkerProgress()
        self.room = PLENTY
        self.mode: object = None

    def __call__(self, *inputs: Tensor, step: int = 0) -> list[Tensor]:
        given = list(inputs)

        def seed(position: int) -> int:
            return seed_of(7, step, 0, position)

        made = self.graphs.run(self.tape, given, seed, self.progress, lambda: self.room, self.mode)
        if made is not None:
            assert given == [], "the list is emptied"
            return made
        generator = self.device.generator

        def draw(position: int) -> None:
            generator.manual_seed(seed(position))

        return self.tape.run(given, draw, self.progress)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device."""
        return self.device.to_device(tensor, copy=True)


def values(count: int = 1) -> Tensor:
    return torch.arange(count * 24, dtype=torch.float64).view(count * 4, 6) / 24 - 0.5


# ---- whole models


def trained(traced: Traced, model: ModelAccelerator | None) -> tuple[list[list[Tensor]], list[Worker]]:
    """Run forward and backward for some steps, with changing parameters, batches and seeds; return what they made."""
    divided = traced.model.divide()
    phases = [divided.phases[phase] for phase in order_of(divided, halves=False) if phase in divided.phases]
    workers = [Worker(model, phase.program) for phase in phases]
    held = {port: workers[0].put(tensor) for port, tensor in traced.given.items()}
    made: list[list[Tensor]] = []
    for step in range(STEPS):
        state = dict(held)
        for port, tensor in traced.given.items():
            if port.kind == "parameter" and tensor.is_floating_point():
                held[port].mul_(1.01)
            if port.kind == "leaf":
                state[port] = workers[0].put(tensor * (1 + step / 8) if tensor.is_floating_point() else tensor.flip(0))
        outputs: list[Tensor] = []
        for phase, worker in zip(phases, workers, strict=True):
            found = worker(*[state[port] for port in phase.inputs], step=step)
            state.update(zip(phase.outputs, found, strict=True))
            outputs += found
        made.append([worker.device.to_host(tensor).clone() for tensor in outputs])
    return made, workers


@pytest.fixture
def traced(request: pytest.FixtureRequest) -> Traced:
    """A model, traced before there is a modelled accelerator."""
    case = FATED["gpt2"]
    if request.param == "gpt2 with dropout":
        return trace(case.model(), case.loss, case.batches([3])[0])
    return traced_case(request.param)


@pytest.mark.parametrize(
    "traced",
    [
        "mlp",
        "dropping",
        "prompted",
        pytest.param("gpt2 with dropout", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name not in ("mlp", "dropping", "prompted")),
    ],
    indirect=True,
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # by a kernel, as on a CPU
def test_replays_compute_what_the_programs_do(traced: Traced, model: ModelAccelerator) -> None:
    expected, _ = trained(traced, None)
    found, workers = trained(traced, model)
    for step, (left, right) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(left, right, strict=True):
            assert torch.equal(one, other), f"step {step}"
            assert one.stride() == other.stride()
    assert all(worker.graphs.captures for worker in workers), [worker.graphs.refusals for worker in workers]
    assert all(worker.graphs.replays >= STEPS - 3 and not worker.graphs.refusals for worker in workers)
    assert all(worker.progress.executed == STEPS * len(worker.tape.program.operators) for worker in workers)


# ---- the rules of a graph


def test_a_replay_is_one_launch_and_no_wait(model: ModelAccelerator) -> None:
    worker, x = Worker(model, CHAIN), values()
    there = worker.put(x)
    for _ in range(3):
        worker(there)
    before = model.counters
    made = worker(there)
    after = model.counters
    assert (after.launches - before.launches, after.synchronisations - before.synchronisations) == (2, 0)
    assert torch.equal(model.to_host(made[0]), x.sin().exp().neg().cos().tanh())


def test_memory_is_used_again_within_a_graph(model: ModelAccelerator) -> None:
    many = 12
    chain = [unary("aten.sin.default", number, number + 1) for number in range(many)]
    worker = Worker(model, program(*chain, outputs=(many,)))
    there = worker.put(values())
    for _ in range(3):
        worker(there)
    assert 0 < worker.graphs.size_bytes <= 3 * 512  # blocks of 512 bytes


def run_steps(worker: Worker, steps: Sequence[Tensor], *, hold: bool = True) -> list[Tensor]:
    """Run with inputs that are put anew each time, and return what was made, read after all runs."""
    held, made = [], []
    for tensor in steps:
        there = worker.put(tensor)
        held += [there] if hold else []
        made += worker(there)
    return [worker.device.to_host(tensor) for tensor in made]


def test_outputs_outlive_the_next_replay(model: ModelAccelerator) -> None:
    worker, steps = Worker(model, CHAIN), [values() * (1 + step) for step in range(STEPS)]
    made = run_steps(worker, steps)
    assert worker.graphs.replays == STEPS - 2
    assert all(torch.equal(one, x.sin().exp().neg().cos().tanh()) for one, x in zip(made, steps, strict=True))


def test_an_input_that_moves_is_copied_from_then_on(model: ModelAccelerator) -> None:
    worker, steps = Worker(model, CHAIN), [values() * (1 + step) for step in range(STEPS)]
    first = worker.put(steps[0])
    for _ in range(4):
        worker(first)
    assert worker.graphs.replays == 2
    made = run_steps(worker, steps)
    assert all(torch.equal(one, x.sin().exp().neg().cos().tanh()) for one, x in zip(made, steps, strict=True))
    assert (worker.graphs.captures, worker.graphs.replays) == (2, 2 + STEPS)


def test_without_the_check_a_stale_address_is_read(model: ModelAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault that the check of addresses is for: what was there is what is computed with."""
    monkeypatch.setattr(graphs._Captured, "moved", lambda self, inputs: [])
    worker, x = Worker(model, CHAIN), values()
    first = worker.put(x)
    for _ in range(3):
        worker(first)
    del first
    (made,) = worker(worker.put(values(2)[4:] * 9))
    expected = (values(2)[4:] * 9).sin().exp().neg().cos().tanh()
    assert not torch.equal(model.to_host(made), expected)


def test_without_copies_of_outputs_a_replay_overwrites_them(
    model: ModelAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, x = Worker(model, CHAIN), values()
    there = worker.put(x)
    for _ in range(3):
        worker(there)
    captured = worker.graphs._programs[worker.tape]._captured
    assert captured is not None
    (own,) = captured._storages
    (before,) = worker(there)
    early = model.to_host(own).clone()
    there.mul_(2)
    (after,) = worker(there)
    assert not torch.equal(model.to_host(own), early)
    assert torch.equal(model.to_host(before), early)
    assert torch.equal(model.to_host(after), model.to_host(own))


def test_views_of_inputs_are_views_of_the_inputs_of_the_run(model: ModelAccelerator) -> None:
    turned, flat = TensorSpec("float64", (6, 4)), TensorSpec("float64", (24,))
    views = program(
        unary("aten.t.default", 0, 1, spec=turned),
        unary("aten.sin.default", 1, 2, spec=turned),
        unary("aten.t.default", 2, 3),
        unary("aten.exp.default", 2, 4, spec=turned),
        unary("aten.view.default", 0, 5, Many((24,)), spec=flat),
        outputs=(1, 2, 3, 4, 0, 5),
    )
    worker = Worker(model, views)
    for step in range(5):
        there = worker.put(values() * (step + 1))
        one, two, three, four, same, five = worker(there)
        storage = there.untyped_storage()._cdata
        assert same is there
        assert one.untyped_storage()._cdata == storage == five.untyped_storage()._cdata
        assert two.untyped_storage()._cdata == three.untyped_storage()._cdata != four.untyped_storage()._cdata
        x = values() * (step + 1)
        expected = (x.t(), x.t().sin(), x.t().sin().t(), x.t().sin().exp(), x, x.view(24))
        for found, right in zip((one, two, three, four, same, five), expected, strict=True):
            assert torch.equal(model.to_host(found), right)
            assert found.stride() == right.stride()
    assert worker.graphs.replays == 3


def test_random_operators_have_the_seeds_of_their_positions(model: ModelAccelerator) -> None:
    drawn = program(
        unary("aten.sin.default", 0, 1),
        unary("aten.bernoulli.p", 1, 2, 0.5, position=3),
        unary("aten.bernoulli.p", 1, 3, 0.5, position=9),
        unary("aten.cos.default", 3, 4),
        unary("aten.neg.default", 2, 5),
        outputs=(4, 5),
    )
    state = torch.default_generator.get_state()
    here, there = Worker(None, drawn), Worker(model, drawn)
    x, far = values(), there.put(values())
    for step in (0, 1, 2, 3, 3, 1):
        expected = [tensor.clone() for tensor in here(x, step=step)]
        made = [model.to_host(tensor) for tensor in there(far, step=step)]
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    assert there.graphs.replays == 4
    torch.default_generator.set_state(state)


def test_another_layout_or_precision_is_another_graph(model: ModelAccelerator) -> None:
    worker = Worker(model, CHAIN)
    straight, turned = worker.put(values()), worker.put(values().view(6, 4)).t()
    for _ in range(3):
        worker(straight)
    (made,) = worker(turned)
    assert made.stride() == (1, 4)
    assert torch.equal(model.to_host(made), values().view(6, 4).t().sin().exp().neg().cos().tanh())
    assert worker.graphs.captures == 2
    worker.mode = "tf32"
    worker(turned)
    assert worker.graphs.captures == 3


# ---- programs that are interpreted


def test_a_wait_of_the_host_cannot_be_captured(model: ModelAccelerator) -> None:
    worker, x = Worker(model, CHAIN), values()
    line = worker.tape.steps[2]

    def reading(tensor: Tensor) -> Tensor:
        """An operator that reads a value on the host, as some do that check what they are given."""
        return tensor.neg() if tensor.sum().item() else tensor

    worker.tape.steps[2] = (reading, *line[1:])
    there = worker.put(x)
    for _ in range(5):
        (made,) = worker(there)
        assert torch.equal(model.to_host(made), x.sin().exp().neg().cos().tanh())
    assert worker.graphs.captures == worker.graphs.replays == worker.graphs.size_bytes == 0
    assert worker.graphs.refusals == {
        "aten.neg.default: the host cannot wait for the device while it captures work": 1,
    }


def test_a_program_that_would_lose_by_the_copies(model: ModelAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "COPIED_BYTES", 10)
    worker = Worker(model, CHAIN)
    there = worker.put(values())
    for _ in range(5):
        worker(there)
    assert worker.graphs.replays == 0
    assert list(worker.graphs.refusals) == ["copying its outputs takes longer than launching its operators"]


def test_a_graph_that_is_dropped_again_and_again(model: ModelAccelerator) -> None:
    worker = Worker(model, CHAIN)
    there = worker.put(values())
    for step in range(12):
        worker.mode = step // 2
        worker(there)
    assert worker.graphs.captures == graphs._CAPTURES
    assert list(worker.graphs.refusals) == ["its graph was dropped too often"]
    assert worker.graphs.size_bytes == 0


def test_small_programs_and_devices_without_graphs(model: ModelAccelerator) -> None:
    small = Worker(model, program(unary("aten.sin.default", 0, 1), outputs=(1,)))
    there, host = small.put(values()), Worker(None, CHAIN)
    for _ in range(4):
        small(there)
        host(values())
    for worker in (small, host):
        assert worker.graphs.captures == 0
        assert not worker.graphs.refusals
    with pytest.raises(RuntimeError, match="captures no work"):
        accelerator_for("cpu").capture(lambda draw: None, 0)


# ---- memory


def test_without_room_a_program_is_interpreted(model: ModelAccelerator) -> None:
    worker = Worker(model, CHAIN)
    there, worker.room = worker.put(values()), 10
    for _ in range(5):
        worker(there)
    assert worker.graphs.captures == 0
    worker.room = PLENTY
    for _ in range(graphs._PATIENCE):
        worker(there)
    assert worker.graphs.captures == 1


def test_buffers_come_before_graphs(model: ModelAccelerator) -> None:
    worker = Worker(model, CHAIN)
    there = worker.put(values())
    for _ in range(3):
        worker(there)
    size_bytes = worker.graphs.size_bytes
    store = BufferStore(10_000, worker.graphs)
    assert store.room_bytes() == 10_000 - size_bytes
    store.reserve(10_000 - size_bytes)
    assert worker.graphs.size_bytes == size_bytes
    store.reserve(10_000)
    assert worker.graphs.size_bytes == 0
    assert store.used_bytes == 0
    (made,) = worker(there)
    assert torch.equal(model.to_host(made), values().sin().exp().neg().cos().tanh())
    assert worker.graphs.captures == 1, "not before a while"
    with pytest.raises(QuotaExceeded):
        store.reserve(10_001)


def test_a_program_that_is_gone_leaves_no_memory(model: ModelAccelerator) -> None:
    worker = Worker(model, CHAIN)
    there = worker.put(values())
    for _ in range(3):
        worker(there)
    memory = worker.graphs
    assert memory.size_bytes
    del worker
    gc.collect()
    assert memory.size_bytes == 0
