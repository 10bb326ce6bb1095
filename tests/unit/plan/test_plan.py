"""Plans: every sample of a batch is computed once, in order, whatever the plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import MicroBatch, Plan, apportion


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shares = draw(st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda found: sum(found) > 1e-3))
    micro_batch = draw(st.none() | st.integers(1, 40))
    return Plan(devices=tuple(range(len(shares))), shares=tuple(shares), micro_batch=micro_batch, sync="workers")


@given(plans(), st.integers(1, 200))
def test_micro_batches_cover_the_batch_once_and_in_order(plan: Plan, batch: int) -> None:
    dealt = plan.micro_batches(batch)
    assert len(dealt) == len(plan.devices)
    parts = [part for share in dealt for part in share]
    assert [part.index for part in parts] == list(range(len(parts)))
    covered = [sample for part in parts for sample in range(part.start, part.start + part.size)]
    assert covered == list(range(batch))
    assert all(part.size > 0 for part in parts)


@given(plans(), st.integers(1, 200))
def test_a_micro_batch_has_its_size_but_for_the_last(plan: Plan, batch: int) -> None:
    sizes = [part.size for share in plan.micro_batches(batch) for part in share]
    if plan.micro_batch is None:
        assert sizes == [size for size in apportion(batch, plan.shares) if size]
    else:
        assert all(size == plan.micro_batch for size in sizes[:-1])
        assert 0 < sizes[-1] <= plan.micro_batch


@given(plans(), st.integers(1, 200))
def test_a_device_without_a_share_has_no_micro_batch(plan: Plan, batch: int) -> None:
    for share, parts in zip(plan.shares, plan.micro_batches(batch), strict=True):
        assert share > 0 or not parts


@given(plans(), st.integers(1, 200))
def test_micro_batches_do_not_depend_on_how_many_share_them(plan: Plan, batch: int) -> None:
    """The loss curve is a property of the micro-batches, so these may not change with the devices."""
    if plan.micro_batch is not None:
        alone = Plan(devices=(0,), shares=(1.0,), micro_batch=plan.micro_batch, sync="client")
        flat = [part for share in plan.micro_batches(batch) for part in share]
        assert flat == alone.micro_batches(batch)[0]


def test_an_example() -> None:
    plan = Plan(devices=(0, 1), shares=(2 / 3, 1 / 3), micro_batch=4, sync="workers")
    one, two, three = (MicroBatch(index=i, start=4 * i, size=s) for i, s in ((0, 4), (1, 4), (2, 2)))
    assert plan.micro_batches(10) == [[one, two], [three]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"devices": (), "shares": ()}, "one for each"),
        ({"shares": (1.0,)}, "one for each"),
        ({"shares": (0.0, 0.0)}, "not all 0"),
        ({"shares": (1.0, float("nan"))}, "finite"),
        ({"micro_batch": 0}, "at least one sample"),
        ({"micro_batch": -3}, "at least one sample"),
        ({"sync": "server"}, "'workers' and 'client'"),
    ],
)
def test_plans_that_are_none(changed: dict[str, object], message: str) -> None:
    arguments = {"devices": (0, 1), "shares": (0.5, 0.5), "micro_batch": None, "sync": "workers"}
    with pytest.raises(UsageError, match=message):
        Plan(**{**arguments, **changed})  # type: ignore[arg-type]


def test_a_plan_describes_itself() -> None:
    one = Plan(devices=(0,), shares=(1.0,), micro_batch=None, sync="workers")
    assert one.describe() == "1 stage on device 0, one micro-batch each"
    two = Plan(devices=(0, 1), shares=(0.75, 0.25), micro_batch=8, sync="client")
    assert two.describe() == (
        "1 stage, 2 replicas (0: 75%, 1: 25%), micro-batches of 8, gradients averaged at the client"
    )
