"""Models of unusual structure in stages give the result of one process, in float64 to 1e-10.

That every schedule goes with every layout is in ``test_covering_array``.
"""

from __future__ import annotations

import pytest

import onebox
from onebox.plan import Plan, Stage
from tests.kit.reference import assert_same
from tests.kit.stages import expected, reference, run, segments, staged, tabled

DEVICES = 4
"""Workers of the pool."""


@pytest.mark.feature("Pipelines: Run named schedules and tables")
@pytest.mark.feature("Pipelines: Train models in stages and parallel branches")
@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        ("inception", "1f1b"),
        ("late", "zb-h1"),
        ("prompted", "gpipe"),
        ("tied", "interleaved"),
        ("branches", "auto"),
        ("recurrent", "zb-h1"),
        ("attention", "1f1b"),
        ("mlp", "table"),
        ("resnet", "zbv"),
        ("vit", "auto"),
    ],
)
def test_other_models_in_stages(model: str, schedule: str, pool: onebox.Pool) -> None:
    """Branches, inputs that are used late, a stage of parameters, a weight in three stages, counters."""
    plain = staged(model, (0, 1, 2))
    more = {"table": {"table": tabled(plain, 8)}, "auto": {"predicted": expected(plain, 8)}}
    plan = staged(model, (0, 1, 2), schedule=schedule, **more.get(schedule, {}))
    sizes = [8, 5, 8, 5 if model == "resnet" else 2, 12]  # batch norm of one value a channel has no variance
    sizes = [*sizes, *sizes]
    assert_same(run(pool, model, plan, sizes), reference(model, plan, sizes))


@pytest.mark.feature("Pipelines: Train models in stages and parallel branches")
def test_parallel_branches_on_different_devices(pool: onebox.Pool) -> None:
    """Every segment is a stage, so that the branches of a block lie beside each other, on all devices."""
    stages = tuple(
        Stage(segments=(name,), replicas=((place % 4,),), shares=(1.0,))
        for place, name in enumerate(segments("inception"))
    )
    plan = Plan(stages=stages, micro_batch=2, schedule="1f1b")
    assert_same(run(pool, "inception", plan, (6, 5, 6)), reference("inception", plan, (6, 5, 6)))
