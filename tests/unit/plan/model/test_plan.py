"""Plans: every sample of a batch is computed once, in order, whatever the plan; a plan file says what it says."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from onebox.errors import UsageError
from onebox.plan import SCHEDULES, MicroBatch, Plan, Prediction, Stage, apportion, as_data, deal
from onebox.plan.model.plan import MOST_MICRO_BATCHES, MOST_STAGES


@st.composite
def weights(draw: st.DrawFn) -> tuple[float, ...]:
    return tuple(draw(st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda found: sum(found) > 1e-3)))


@st.composite
def data_parallel_plans(draw: st.DrawFn) -> Plan:
    shares = draw(weights())
    return Plan.data_parallel(range(len(shares)), shares, micro_batch=draw(st.none() | st.integers(1, 40)))


@st.composite
def stages(draw: st.DrawFn, name: str, number: int) -> Stage:
    """Draw a stage whose replicas are of one size; one that splits its layers has devices of its own."""
    shares = draw(weights())
    width = draw(st.integers(1, 2))
    first = 12 * number if width > 1 else 0
    devices = draw(st.permutations(range(first, first + 12)))[: width * len(shares)]
    replicas = tuple(tuple(devices[i : i + width]) for i in range(0, len(devices), width))
    policy = draw(st.sampled_from(["keep", "recompute", "offload"]))
    return Stage(segments=(name, f"{name}.more"), replicas=replicas, shares=shares, policy=policy)


@st.composite
def staged_plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(2, 4))
    made = tuple(draw(stages(f"part{number}", number + 1)) for number in range(count))
    schedule = draw(st.sampled_from([*SCHEDULES, "table"]))
    table = ("0: 0F0 0B0",) if schedule == "table" else ()
    update = draw(st.sampled_from(["device", "host"]))
    return Plan(stages=made, micro_batch=draw(st.integers(1, 40)), schedule=schedule, table=table, update=update)


plans = data_parallel_plans() | staged_plans()
batches = st.integers(1, 200)


# ---- micro-batches


@given(plans, batches)
def test_micro_batches_cover_the_batch_once_and_in_order(plan: Plan, batch: int) -> None:
    parts = plan.micro_batches(batch)
    assert [part.index for part in parts] == list(range(len(parts)))
    covered = [sample for part in parts for sample in range(part.start, part.start + part.size)]
    assert covered == list(range(batch))
    assert all(part.size > 0 for part in parts)


@given(plans, batches)
def test_a_micro_batch_has_its_size_but_for_the_last(plan: Plan, batch: int) -> None:
    sizes = [part.size for part in plan.micro_batches(batch)]
    if plan.micro_batch is None:
        assert sizes == [size for size in apportion(batch, plan.stages[0].shares) if size]
    else:
        assert all(size == plan.micro_batch for size in sizes[:-1])
        assert 0 < sizes[-1] <= plan.micro_batch


@given(plans, batches)
def test_micro_batches_do_not_depend_on_how_many_share_them(plan: Plan, batch: int) -> None:
    """The loss curve is a property of the micro-batches, so these may not change with the devices or the stages."""
    if plan.micro_batch is not None:
        alone = Plan.data_parallel([0], [1.0], micro_batch=plan.micro_batch, sync="client")
        assert plan.micro_batches(batch) == alone.micro_batches(batch)


# ---- routes


@given(plans, batches)
def test_each_stage_computes_each_micro_batch_on_one_of_its_replicas(plan: Plan, batch: int) -> None:
    routes = plan.routes(batch)
    assert len(routes) == len(plan.stages)
    for stage, route in zip(plan.stages, routes, strict=True):
        assert len(route) == len(plan.micro_batches(batch))
        assert set(route) <= set(stage.replicas)


@given(plans, batches)
def test_a_replica_has_its_share_of_the_micro_batches(plan: Plan, batch: int) -> None:
    """One without a share has none; where a share is one micro-batch, that is the share of the samples."""
    parts = plan.micro_batches(batch)
    for stage, route in zip(plan.stages, plan.routes(batch), strict=True):
        turns = Counter(route)
        assert all(share > 0 or not turns[r] for r, share in zip(stage.replicas, stage.shares, strict=True))
        if plan.micro_batch is not None:
            assert [turns[replica] for replica in stage.replicas] == apportion(len(parts), stage.shares)
        else:
            samples = Counter[tuple[int, ...]]()
            for part, replica in zip(parts, route, strict=True):
                samples[replica] += part.size
            assert [samples[replica] for replica in stage.replicas] == apportion(batch, stage.shares)


@given(staged_plans(), batches)
def test_replicas_take_turns(plan: Plan, batch: int) -> None:
    """At any time each replica has had its part, or its neighbours would wait for it: within one micro-batch."""
    for stage, route in zip(plan.stages, plan.routes(batch), strict=True):
        due = apportion(len(route), stage.shares)
        for place in range(1, len(route) + 1):
            turns = Counter(route[:place])
            for replica, units in zip(stage.replicas, due, strict=True):
                assert abs(turns[replica] - units * place / len(route)) < len(stage.replicas)


@given(st.integers(0, 60), weights())
def test_dealing_gives_what_sharing_out_says(count: int, shares: tuple[float, ...]) -> None:
    dealt = deal(count, shares)
    assert [dealt.count(receiver) for receiver in range(len(shares))] == apportion(count, shares)


def test_an_example() -> None:
    plan = Plan.data_parallel([0, 1], [2 / 3, 1 / 3], micro_batch=4)
    one, two, three = (MicroBatch(index=i, start=4 * i, size=s) for i, s in ((0, 4), (1, 4), (2, 2)))
    assert plan.micro_batches(10) == (one, two, three)
    assert plan.routes(10) == (((0,), (1,), (0,)),)


def test_an_example_of_stages() -> None:
    first = Stage(segments=("a",), replicas=((0,),), shares=(1.0,))
    second = Stage(segments=("b",), replicas=((2,), (1,)), shares=(1.0, 1.0))
    plan = Plan(stages=(first, second), micro_batch=2)
    assert plan.routes(7) == (((0,),) * 4, ((2,), (1,), (2,), (1,)))
    assert plan.devices == (0, 2, 1)


# ---- what a plan is


@given(staged_plans())
def test_each_device_is_there_once(plan: Plan) -> None:
    every = [device for stage in plan.stages for replica in stage.replicas for device in replica]
    assert sorted(set(every)) == sorted(plan.devices)
    assert plan.devices[0] == every[0]
    assert plan.split == any(len(replica) > 1 for stage in plan.stages for replica in stage.replicas)
    assert not plan.whole


ONE = Stage(segments=("a",), replicas=((0,),), shares=(1.0,))
TWO = Stage(segments=("b",), replicas=((1,),), shares=(1.0,))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"replicas": ()}, "one for each"),
        ({"replicas": ((),)}, "one for each"),
        ({"shares": (1.0, 1.0)}, "one for each"),
        ({"shares": (0.0,)}, "not all 0"),
        ({"shares": (float("nan"),)}, "finite"),
        ({"shares": (-1.0,)}, "from 0 up"),
        ({"replicas": ((0,), (0,)), "shares": (1.0, 1.0)}, "each may be there once"),
        ({"replicas": ((0, 0),)}, "each may be there once"),
        ({"replicas": ((-1,),)}, "by its number in the pool"),
        ({"policy": "forget"}, "policy='forget' of a stage: allowed are 'keep', 'recompute', 'offload'"),
    ],
)
def test_stages_that_are_none(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"replicas": ((0,),), "shares": (1.0,)}
    with pytest.raises(UsageError, match=message):
        Stage(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stages": ()}, "at least one stage"),
        ({"micro_batch": 0}, "at least one sample"),
        ({"micro_batch": -3}, "at least one sample"),
        ({"micro_batch": None}, "needs micro_batch"),
        ({"sync": "server"}, "'workers' and 'client'"),
        ({"sync": "client"}, "for plans of one stage"),
        ({"schedule": "pipedream"}, "schedule='pipedream': allowed are gpipe, 1f1b"),
        ({"schedule": "table"}, "'table' with the rows in 'table'"),
        ({"table": ("0: 0F0",)}, "'table' with the rows in 'table'"),
        ({"stages": (ONE, ONE)}, "segment 'a' is in two stages"),
        ({"stages": (ONE, Stage(replicas=((1,),), shares=(1.0,)))}, "a stage has no segment"),
        ({"format": 2}, "knows format 1"),
        ({"update": "cloud"}, "update='cloud': allowed are 'device', 'host'"),
        ({"stages": (replace(ONE, policy="offload"),)}, "gain nothing; divide the model into several stages"),
    ],
)
def test_plans_that_are_none(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"stages": (ONE, TWO), "micro_batch": 4}
    with pytest.raises(UsageError, match=message):
        Plan(**{**arguments, **changed})


def test_a_plan_describes_itself() -> None:
    one = Plan.data_parallel([0], [1.0])
    assert one.describe() == "1 stage on device 0, one micro-batch each"
    two = Plan.data_parallel([0, 1], [0.75, 0.25], micro_batch=8, sync="client")
    assert two.describe() == (
        "1 stage, 2 replicas (0: 75%, 1: 25%), micro-batches of 8, gradients averaged at the client"
    )
    replicated = Stage(segments=("b",), replicas=((1, 3), (2, 4)), shares=(1.0, 1.0))
    staged = Plan(stages=(ONE, replicated), micro_batch=8, schedule="zb-h1")
    assert staged.describe() == "2 stages on devices 0; 1+3 | 2+4, micro-batches of 8, schedule zb-h1"
    places = {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0, "f": 0, "g": 1}
    several = tuple(replace(ONE, segments=(name,), replicas=((place,),)) for name, place in places.items())
    assert Plan(stages=several, micro_batch=8).describe() == (
        "7 stages on devices 0 (stages 0, 3 to 5); 1 (stages 1 to 2, 6), micro-batches of 8, schedule 1f1b"
    )
    spans = tuple(
        replace(ONE, segments=(name,), policy=policy) for name, policy in (("a", "recompute"), ("b", "offload"))
    )
    thrifty = Plan(stages=spans, micro_batch=8, update="host")
    assert thrifty.describe() == (
        "2 stages on device 0, micro-batches of 8, 1 recomputed, 1 offloaded, the optimizer on the host"
    )


# ---- plan files


@given(plans)
def test_a_plan_file_says_what_the_plan_is(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json()) == json.loads(json.dumps(as_data(plan)))


def test_a_plan_file_keeps_what_the_planner_expected(tmp_path: Path) -> None:
    times = ((0.1, 0.2, 0.3),) * 2
    expected = Prediction(batch=8, step_s=0.5, bubble=0.1, peak_bytes=(1, 2), stages_s=times)
    plan = Plan(stages=(ONE, TWO), micro_batch=4, predicted=expected)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert Plan.read(tmp_path / "plan.json") == plan


def test_an_edited_plan_file_may_leave_out_what_has_a_default() -> None:
    text = '{"stages": [{"replicas": [[0]], "shares": [1]}]}'
    assert Plan.from_json(text) == Plan.data_parallel([0], [1.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no plan file"),
        ("[]", "is no plan file"),
        ('{"stages": [], "micro_batch": 4}', "at least one stage"),
        ('{"stages": [{"replicas": [[0]], "shares": [1]}], "micro_batches": 4}', "unknown field `micro_batches`"),
        ('{"stages": [{"replicas": [["cpu"]], "shares": [1]}]}', r"got `str` - at `\$\.stages\[0\]\.replicas"),
        ('{"stages": [{"replicas": [[0]], "shares": [0]}]}', "not all 0"),
        (
            '{"stages": [{"replicas": [[0]], "shares": [1], "policy": "sell"}]}',
            r"'sell' - at `\$\.stages\[0\]\.policy`",
        ),
    ],
)
def test_a_plan_file_that_is_none_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Plan.read(path)


def test_a_plan_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        Plan.read(tmp_path / "none.json")


def test_a_plan_file_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="is no plan file"):
        Plan.read(path)


def test_a_device_that_splits_layers_has_no_other_stage() -> None:
    split = Stage(segments=("a",), replicas=((0, 1),), shares=(1.0,))
    other = Stage(segments=("b",), replicas=((1,),), shares=(1.0,))
    with pytest.raises(UsageError, match="device 1 splits the layers of a stage"):
        Plan(stages=(split, other), micro_batch=4)


def test_replicas_of_a_stage_are_split_alike() -> None:
    with pytest.raises(UsageError, match="as many devices"):
        Stage(replicas=((0, 1), (2,)), shares=(1.0, 1.0))


def test_a_plan_has_a_bounded_number_of_stages_and_micro_batches() -> None:
    made = tuple(Stage(segments=(f"part{number}",), replicas=((0,),), shares=(1.0,)) for number in range(MOST_STAGES))
    assert len(Plan(stages=made, micro_batch=1).stages) == MOST_STAGES
    more = (*made, replace(made[0], segments=("one more",)))
    with pytest.raises(UsageError, match=f"{len(more)} stages; allowed are {MOST_STAGES}"):
        Plan(stages=more, micro_batch=1)
    plan = Plan.data_parallel([0], [1.0], micro_batch=2)
    assert len(plan.micro_batches(2 * MOST_MICRO_BATCHES - 1)) == MOST_MICRO_BATCHES
    with pytest.raises(UsageError, match="raise micro_batch"):
        plan.micro_batches(1 << 60)


def test_no_special_file_is_read_as_a_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    for file in (tmp_path / "plan.json", "/dev/zero"):
        with pytest.raises(UsageError, match="no regular file"):
            Plan.read(file)
