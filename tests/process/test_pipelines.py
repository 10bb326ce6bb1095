"""Every schedule and every number of stages gives the result of one process: in float64, to 1e-10 after 20 steps.

The full product of 7 schedules, 6 models and 5 layouts of stages would take minutes. The runs below are a covering
array of strength two: every two settings of different kinds that can go together meet in some run. ``zbv`` and
``interleaved`` put two stages on each device.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

import onebox
from onebox.plan import Plan, Stage
from tests.process.shelf import Shelf
from tests.process.stages import expected, reference, run, segments, staged, tabled
from tests.reference import assert_same

STEPS = 20
MICRO_BATCH = 3
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "auto", "table")
MODELS = ("mlp", "cnn", "unet", "resnet", "gpt2", "vit")
LAYOUTS = ("2", "3", "4", "2x2", "folded")
"""So many stages; two of two replicas each; four stages of which each device has two."""

OPTIMIZERS = ("sgd", "adamw", "adam-in-groups")
FEW = ("mlp", "cnn")
"""Models of three segments."""


class Setting(NamedTuple):
    """One run."""

    schedule: str
    model: str
    layout: str


def possible(schedule: str, model: str, layout: str) -> bool:
    """Tell whether settings go together: a model of three segments has no four stages."""
    return not (model in FEW and layout in ("4", "folded"))


def settings() -> list[Setting]:
    """Return the covering array, made greedily: the run that has most pairs that no run before had, and so on."""
    product = [Setting(*each) for each in itertools.product(SCHEDULES, MODELS, LAYOUTS) if possible(*each)]
    missing = {pair for each in product for pair in pairs(each)}
    found: list[Setting] = []
    while missing:
        found.append(max(product, key=lambda each: len(pairs(each) & missing)))
        missing -= pairs(found[-1])
    return found


def pairs(setting: Setting) -> set[tuple[tuple[int, str], ...]]:
    """Return every two settings of a run, each with its kind."""
    return set(itertools.combinations(enumerate(setting), 2))


def test_every_two_settings_meet() -> None:
    met = set().union(*(pairs(each) for each in settings()))
    for one, other in itertools.combinations(range(3), 2):
        kinds = (SCHEDULES, MODELS, LAYOUTS)
        for first, second in itertools.product(kinds[one], kinds[other]):
            apart = first in FEW and second in ("4", "folded")
            assert (((one, first), (other, second)) in met) == (not apart)


@pytest.fixture(scope="module")
def pool(pools: Shelf) -> onebox.Pool:
    """One pool of four workers for all runs."""
    return pools(4)


def batch_sizes(model: str) -> list[int]:
    """Return the samples of each step's batch: most with a rest, some of fewer micro-batches than stages, one tiny."""
    tiny = 5 if model == "resnet" else 2  # batch norm of one value a channel has no variance
    return [*[8] * 6, 5, *[12] * 3, tiny, *[8] * 8, 3][:STEPS]


def plan_of(setting: Setting) -> Plan:
    """Return the plan of a run."""
    devices = {
        "2": (0, 1),
        "3": (2, 0, 1),
        "4": (0, 1, 2, 3),
        "2x2": ((0, 1), (2, 3)),
        "folded": (0, 1, 1, 0) if setting.schedule == "zbv" else (0, 1, 0, 1),
    }[setting.layout]
    if setting.schedule == "table":
        table = tabled(staged(setting.model, devices, micro_batch=MICRO_BATCH), 8)
        return staged(setting.model, devices, micro_batch=MICRO_BATCH, schedule="table", table=table)
    plain = staged(setting.model, devices, micro_batch=MICRO_BATCH)
    guess = expected(plain, 8) if setting.schedule == "auto" else None
    return staged(setting.model, devices, micro_batch=MICRO_BATCH, schedule=setting.schedule, predicted=guess)


@pytest.mark.parametrize("setting", settings(), ids="-".join)
def test_any_plan_of_stages_gives_the_result_of_one_process(setting: Setting, pool: onebox.Pool) -> None:
    plan, sizes = plan_of(setting), batch_sizes(setting.model)
    optimizer = OPTIMIZERS[(LAYOUTS.index(setting.layout) + SCHEDULES.index(setting.schedule)) % 3]
    found = run(pool, setting.model, plan, sizes, optimizer=optimizer)
    assert_same(found, reference(setting.model, plan, sizes, optimizer=optimizer))


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
        ("dropping", "zb-h1"),
    ],
)
def test_other_models_in_stages(model: str, schedule: str, pool: onebox.Pool) -> None:
    """Branches, inputs that are used late, a stage of parameters, a weight in three stages, counters, dropout."""
    plan = staged(model, (0, 1, 2), schedule=schedule)
    sizes = [8, 5, 8, 2, 12]
    assert_same(run(pool, model, plan, sizes), reference(model, plan, sizes))


def test_parallel_branches_on_different_devices(pool: onebox.Pool) -> None:
    """Every segment is a stage, so that the branches of a block lie beside each other, on all devices."""
    stages = tuple(
        Stage(segments=(name,), replicas=((place % 4,),), shares=(1.0,))
        for place, name in enumerate(segments("inception"))
    )
    plan = Plan(stages=stages, micro_batch=2, schedule="1f1b")
    assert_same(run(pool, "inception", plan, (6, 5, 6)), reference("inception", plan, (6, 5, 6)))
