"""The gate of lossy codecs: chosen where messages over slow links take the step, nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from onebox.plan import Links, Plan, Problem, Stage, predict, stage_work
from onebox.plan.evaluate.lossy import best_of, exposed_step_s, with_codecs
from onebox.plan.model.problem import ComputeTime, DeviceSpec, Segment, SegmentValue
from onebox.plan.model.work import StageWork
from onebox.plan_names import GradientCodec

MIB = 1 << 20
FAST: dict[GradientCodec, float] = {"bf16": 4e9, "int8": 2e9}


def problem(bandwidth_bps: float, *, devices: int = 2, coding: dict[GradientCodec, float] | None = None) -> Problem:
    """Return four segments of 10 MiB of parameters each, with 8 ms of compute a sample."""
    time = {"gpu": ComputeTime(sample_s=2e-3 / 3)}
    numbers = range(devices)
    return Problem(
        segments=tuple(
            Segment(
                name=f"s{n}",
                forward_s=time,
                input_s=time,
                weight_s=time,
                update_s={"gpu": 1e-4},
                state_bytes=40 * MIB,
                saved_bytes=100,
                parameter_bytes=10 * MIB,
            )
            for n in range(4)
        ),
        devices=tuple(DeviceSpec(number=n, type="gpu", coding_bps=FAST if coding is None else coding) for n in numbers),
        links=Links(
            latency_s={a: dict.fromkeys(numbers, 1e-4) for a in numbers},
            bandwidth_bps={a: dict.fromkeys(numbers, bandwidth_bps) for a in numbers},
        ),
        batch=8,
        micro_batches=(4,),
    )


REPLICAS = Plan.data_parallel((0, 1), (1.0, 1.0), micro_batch=4)


def lossy_gradients(case: Problem, plan: Plan) -> Plan:
    return with_codecs(case, plan, "gradients")


def codecs(found: Plan) -> list[GradientCodec]:
    return [stage.gradients for stage in found.stages]


def test_a_slow_link_gets_the_codec_that_gains_enough_over_the_one_that_loses_less() -> None:
    assert codecs(lossy_gradients(problem(100e6), REPLICAS)) == ["int8"]
    slow_int8 = problem(100e6, coding={"bf16": 4e9, "int8": 0.2e9})
    assert codecs(lossy_gradients(slow_int8, REPLICAS)) == ["bf16"]


def test_a_fast_link_gets_none() -> None:
    found = lossy_gradients(problem(10e9), REPLICAS)
    assert found is REPLICAS


def test_what_backward_hides_is_no_reason() -> None:
    """40 MiB over 3 GB/s take 14 ms, of a step of 46, and 21 ms of backward are there to hide 80 % of them."""
    shown = problem(3e9, coding={"bf16": 1e12, "int8": 1e12})
    assert lossy_gradients(shown, REPLICAS) is REPLICAS
    predicted, _ = predict(shown, REPLICAS)
    assert exposed_step_s(shown, REPLICAS) < predicted.step_s


@pytest.mark.parametrize("coding", [{}, {"bf16": 20e6, "int8": 20e6}])
def test_slow_or_unmeasured_encoding_is_never_chosen(coding: dict[GradientCodec, float]) -> None:
    assert lossy_gradients(problem(100e6, coding=coding), REPLICAS) is REPLICAS


def test_the_prediction_is_that_of_the_lossy_plan() -> None:
    case = problem(100e6)
    found = lossy_gradients(case, REPLICAS)
    exact, _ = predict(case, REPLICAS)
    assert found.predicted == predict(case, found)[0]
    assert found.predicted is not None and found.predicted.step_s < 0.9 * exact.step_s
    # residuals: of all gradients, and of the sums of one of two slices
    assert found.predicted.peak_bytes[0] == exact.peak_bytes[0] + 60 * MIB


def test_only_stages_that_gain_become_lossy() -> None:
    """Replicas 0 and 1 of the first stage are joined by a slow link, 2 and 3 of the last by a fast one."""
    case = problem(10e9, devices=4)
    bandwidth_bps = {a: dict(row) for a, row in case.links.bandwidth_bps.items()}
    bandwidth_bps[0][1] = bandwidth_bps[1][0] = 50e6
    case = replace(case, links=Links(latency_s=case.links.latency_s, bandwidth_bps=bandwidth_bps))
    plan = Plan(
        stages=(
            Stage(segments=("s0", "s1"), replicas=((0,), (1,)), shares=(1.0, 1.0)),
            Stage(segments=("s2", "s3"), replicas=((2,), (3,)), shares=(1.0, 1.0)),
        ),
        micro_batch=4,
    )
    assert codecs(lossy_gradients(case, plan)) == ["int8", "none"]


def test_a_plan_that_was_worse_may_be_the_best_lossy_gradients() -> None:
    """One device wins over replicas with a slow link between them, until these send less."""
    alone = Plan.data_parallel((0,), (1.0,), micro_batch=4)
    slow = problem(0.8e9, coding={"bf16": 20e9, "int8": 20e9})
    assert exposed_step_s(slow, alone) < exposed_step_s(slow, REPLICAS)
    found = best_of(slow, (alone, REPLICAS))
    assert found.devices == (0, 1) and codecs(found) == ["int8"]
    assert best_of(problem(20e9), (REPLICAS, alone)) is REPLICAS


def test_sums_at_the_client_stay_exact() -> None:
    client = with_fields(REPLICAS, sync="client")
    assert lossy_gradients(problem(1e6), client) is client


def test_hosts_that_sum_first_encode_between_each_other_only() -> None:
    """Two hosts of two: the slow link carries a quarter as much, quick ones what they carried before."""
    quick, slow = 10e9, 50e6
    near = {(0, 1), (1, 0), (2, 3), (3, 2)}
    numbers = range(4)
    links = Links(
        latency_s={a: dict.fromkeys(numbers, 1e-5) for a in numbers},
        bandwidth_bps={a: {b: quick if (a, b) in near else slow for b in numbers} for a in numbers},
    )
    stage = StageWork(forward_s={}, input_s={}, weight_s={}, update_s={}, gradient_bytes=40 * MIB)
    replicas = [(number,) for number in numbers]
    exact_s = links.sum_seconds(replicas, stage)
    assert exact_s == links.ring_seconds(replicas, 40 * MIB)
    coded_s = links.sum_seconds(replicas, replace(stage, travelling_bytes=10 * MIB, coding_s=0.01))
    across = [(0,), (2,)]
    saved_s = links.ring_seconds(across, 40 * MIB) - links.ring_seconds(across, 10 * MIB)
    assert coded_s == pytest.approx(exact_s - saved_s + 0.01)


# ---- activations


def pipeline(bandwidth_bps: float, coding: dict[GradientCodec, float] | None = None) -> tuple[Problem, Plan]:
    """Return two stages with 4 MiB a sample between them, both ways."""
    case = problem(bandwidth_bps, coding=coding)
    value = SegmentValue(source=1, consumers=(2,), forward_bytes=4 * MIB, backward_bytes=4 * MIB, kept=True)
    plan = Plan(
        stages=(
            Stage(segments=("s0", "s1"), replicas=((0,),), shares=(1.0,)),
            Stage(segments=("s2", "s3"), replicas=((1,),), shares=(1.0,)),
        ),
        micro_batch=4,
        schedule="gpipe",
    )
    return replace(case, values=(value,)), plan


def test_a_slow_cut_gets_a_codec_and_a_fast_one_none() -> None:
    case, plan = pipeline(100e6)
    found = with_codecs(case, plan, "activations")
    assert [stage.activations for stage in found.stages] == ["int8", "int8"]
    assert found.predicted is not None
    assert found.predicted.step_s < 0.5 * predict(case, plan)[0].step_s
    fast, _ = pipeline(100e9)
    assert with_codecs(fast, plan, "activations") is plan
    slow_coding, _ = pipeline(1e9, {"bf16": 0.2e9, "int8": 0.2e9})
    assert with_codecs(slow_coding, plan, "activations") is plan


def test_bytes_and_seconds_of_a_coded_cut() -> None:
    case, plan = pipeline(100e6)
    first, last = plan.stages
    work = stage_work(case, with_fields(plan, stages=(with_fields(first, activations="int8"), last)))
    exact = stage_work(case, plan)
    ((edge,), (before,)) = work.edges, exact.edges
    size = 4 * 4 * MIB
    assert (before.forward_bytes, before.backward_bytes) == (size, size)
    assert (edge.forward_bytes, edge.backward_bytes) == (size // 4 * 260 // 256, size)
    assert work.stages[0].forward_s[0] - exact.stages[0].forward_s[0] == pytest.approx(size / 2e9)
    assert work.stages[1].forward_s[1] - exact.stages[1].forward_s[1] == pytest.approx(size / 2e9 / 2)
    assert work.stages[1].input_s == exact.stages[1].input_s


def test_nothing_that_is_not_allowed_is_compressed() -> None:
    case, plan = pipeline(100e6)
    assert best_of(case, (plan,), ("gradients",)) is plan
    assert best_of(case, (plan,), ("gradients", "activations")).lossy == {"activations": ("int8",)}
