"""Costs of split layers for the planner: they are those of the programs and collectives that the engine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import nn

from onebox.cost.model_profile import AS_CAPTURED, SegmentTimes, SegmentVariant
from onebox.engine.partition.elementwise import by_element
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.problem.planner_problem import divided_bytes
from onebox.engine.problem.split_costs import groups_of_ranks, split_costs, worthwhile_ranks
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.graph import Piece, Port
from onebox.graph.shard.placements import local_spec
from onebox.graph.shard.search import AllGather
from onebox.graph.shard.spmd import gather_bytes, reduce_bytes
from onebox.plan import ComputeTime, DeviceSpec, Plan, Problem, Stage
from onebox.plan.model.cost_model import CostModel
from tests.kit.models import CASES
from tests.unit.plan.problems import links, segment

SAMPLES = 8


def captures_of(model: nn.Module, loss: object) -> Captures:
    trained = frozenset(f"model.{name}" for name, _ in model.named_parameters())
    spec = CaptureSpec(model=model, loss=loss, metrics={}, precision="fp32", device_type="cpu", trained=trained)  # type: ignore[arg-type]
    return Captures(spec)


def case(name: str) -> tuple[Captures, Batch, torch.optim.Optimizer]:
    found = CASES[name]
    model = found.model()
    return captures_of(model, found.loss), as_batch(*found.batches([SAMPLES])[0]), torch.optim.SGD(model.parameters())


def problem_of(captures: Captures, batch: Batch, optimizer: torch.optim.Optimizer, devices: int = 2) -> Problem:
    """Return a problem with the sizes of a model, and equal times."""
    _, sizes = divided_bytes(captures, batch, SAMPLES, optimizer)
    made = (
        replace(
            segment(one.name, 1e-3),
            parameter_bytes=one.parameter_bytes,
            state_bytes=one.state_bytes,
            optimizer_bytes=one.optimizer_bytes,
            saved_bytes=-(-one.saved_bytes // SAMPLES),
        )
        for one in sizes.segments
    )
    return Problem(
        segments=tuple(made),
        devices=tuple(DeviceSpec(number=number, type="quick", host="h") for number in range(devices)),
        links=links(devices),
        batch=SAMPLES,
        micro_batches=(SAMPLES,),
    )


@pytest.mark.parametrize("name", ["mlp", "gpt2", "vit", "unet"])
def test_they_are_those_of_the_stage_that_the_engine_splits(name: str) -> None:
    captures, batch, optimizer = case(name)
    problem = problem_of(captures, batch, optimizer)
    problem = replace(problem, splits=split_costs(captures, batch, [SAMPLES // 2, SAMPLES], problem, [2]))
    every = tuple(range(len(problem.segments)))
    plan = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=SAMPLES)
    parts = PhasePrograms(captures.traced(batch, SAMPLES, train=True).divide(None), plan)
    for sent, kind in zip(CostModel(problem).messages(every, 2), ("F", "B"), strict=True):
        steps = [step for step in parts.of(0, 0, kind).steps if not isinstance(step, Piece)]  # type: ignore[arg-type]
        gathers = [step for step in steps if isinstance(step, AllGather)]
        sums = [step for step in steps if not isinstance(step, AllGather)]
        executed = sum(reduce_bytes(step.spec.size_bytes, 2) for step in sums)
        executed += sum(gather_bytes(step.spec.size_bytes, 2) for step in gathers)
        assert sent.fixed_bytes + SAMPLES * sent.sample_bytes == pytest.approx(executed, rel=0.1)
        assert sent.messages == pytest.approx(2 * len(sums) + len(gathers), abs=4)
    held = {
        port: local_spec(spec, parts.placements[str(port.name)], 0).size_bytes
        for kind in ("F", "B")
        for port, spec in parts.programs.of(0, kind).specs().items()  # type: ignore[arg-type]
        if port.kind == "gradient"
    }
    alone = sum(one.parameter_bytes for one in problem.segments)
    tied = sum(spec.size_bytes for spec in _gradients(parts).values()) - alone
    assert sum(one.parameter_bytes for one in problem.splits[2]) == pytest.approx(
        sum(held.values()), rel=0.02, abs=tied
    )
    assert all(0.5 <= one.forward_share <= 1 and 0.5 <= one.backward_share <= 1 for one in problem.splits[2])


def _gradients(parts: PhasePrograms) -> dict[Port, object]:
    program = parts.programs.of(0, "B")
    return {port: spec for port, spec in program.specs().items() if port.kind == "gradient"}


def wide(width: int = 64) -> tuple[Captures, Batch, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    batch = as_batch(torch.randn(SAMPLES, width), torch.randn(SAMPLES, 4))
    return captures_of(model, nn.functional.mse_loss), batch, torch.optim.SGD(model.parameters(), lr=0.1)


def test_bytes_of_activations_grow_with_samples() -> None:
    captures, batch, optimizer = wide()
    problem = problem_of(captures, batch, optimizer)
    (both,) = split_costs(captures, batch, [2, SAMPLES], problem, [2]).values()
    (one,) = split_costs(captures, batch, [SAMPLES], problem, [2]).values()
    for found in (both, one):
        assert sum(each.forward.sample_bytes + each.backward.sample_bytes for each in found) > 0
        assert all(each.forward.fixed_bytes == each.backward.fixed_bytes == 0 for each in found)
        assert [each.parameter_bytes for each in found[:2]] == [(64 * 64 + 64) * 2] * 2


def test_split_layers_take_as_long_as_captured_ones_not_as_the_quickest_format() -> None:
    captures, batch, optimizer = wide()
    problem = problem_of(captures, batch, optimizer)
    quick, plain = ((1.0, 1.0, 1.0),) * 3, ((2.0, 3.0, 5.0),) * 3
    times = SegmentTimes(size=SAMPLES, seconds=quick, update_s=0.0, call_s=0.0)
    ways = ((AS_CAPTURED, plain), (SegmentVariant(bf16=True), quick))
    (usual,) = split_costs(captures, batch, [SAMPLES], problem, [2], {"cpu": [times]}).values()
    (found,) = split_costs(
        captures, batch, [SAMPLES], problem, [2], {"cpu": [structs.replace(times, ways=ways)]}
    ).values()
    for before, after in zip(usual, found, strict=True):
        assert after.forward_share == pytest.approx(2 * before.forward_share)
        assert after.backward_share == pytest.approx(4 * before.backward_share)


def test_only_alike_devices_of_a_host_split_layers() -> None:
    captures, batch, optimizer = wide()
    problem = problem_of(captures, batch, optimizer, devices=6)
    assert groups_of_ranks(problem) == {2: (0, 1), 4: (0, 1, 2, 3)}
    apart = tuple(replace(device, host=f"h{device.number % 3}") for device in problem.devices)
    assert groups_of_ranks(replace(problem, devices=apart)) == {2: (0, 3)}
    unlike = tuple(replace(device, speed=1.0 / (1 + device.number)) for device in problem.devices)
    assert groups_of_ranks(replace(problem, devices=unlike)) == {}


def timed(*, fixed_s: float, sample_s: float, latency_s: float, state: int = 10**6, room: int | None = None) -> Problem:
    time_s = ComputeTime(fixed_s=fixed_s, sample_s=sample_s)
    one = replace(
        segment("s0", 0.0, state=state), forward_s={"quick": time_s}, input_s={"quick": time_s},
        weight_s={"quick": time_s},
    )  # fmt: skip
    return Problem(
        segments=(one, replace(one, name="s1")),
        devices=tuple(DeviceSpec(number=number, type="quick", host="h", capacity_bytes=room) for number in range(2)),
        links=links(2, latency_s=latency_s, bandwidth_bps=1e9),
        batch=8,
        micro_batches=(8,),
    )


def test_splits_are_looked_at_only_where_an_ideal_one_gains_time() -> None:
    assert worthwhile_ranks(timed(fixed_s=1e-2, sample_s=0.0, latency_s=1e-5)) == (2,)  # replicas divide no fixed time
    assert worthwhile_ranks(timed(fixed_s=0.0, sample_s=1e-3, latency_s=1e-5, state=10**8)) == (2,)  # large weights
    assert worthwhile_ranks(timed(fixed_s=0.0, sample_s=1e-3, latency_s=1e-5, state=1000)) == ()
    assert worthwhile_ranks(timed(fixed_s=1e-2, sample_s=0.0, latency_s=1e-1)) == ()
    assert worthwhile_ranks(timed(fixed_s=1e-4, sample_s=0.0, latency_s=1e-1, room=10**6)) == (2,)  # does not fit


def test_models_of_many_operators_are_left_whole_unless_a_segment_fits_no_device() -> None:
    captures, batch, optimizer = wide()
    problem = problem_of(captures, batch, optimizer)
    assert split_costs(captures, batch, [SAMPLES], problem, [2], most_operators=5) == {}
    small = tuple(replace(device, capacity_bytes=20_000) for device in problem.devices)
    tight = replace(problem, devices=small)
    assert set(split_costs(captures, batch, [SAMPLES], tight, [2], most_operators=5)) == {2}


def test_further_numbers_of_ranks_need_time() -> None:
    captures, batch, optimizer = wide()
    problem = problem_of(captures, batch, optimizer, devices=4)
    assert set(split_costs(captures, batch, [SAMPLES], problem, [2, 4])) == {2, 4}
    assert set(split_costs(captures, batch, [SAMPLES], problem, [2, 4], expired=lambda: True)) == {2}


def test_optimizers_that_look_at_whole_parameters_split_none() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    assert by_element([torch.optim.SGD(parameters), torch.optim.AdamW(parameters)])
    assert not by_element(torch.optim.Adafactor(parameters))
