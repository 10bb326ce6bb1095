"""The schedule of a batch: the plan's, made for the batch's own number of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from onebox.engine.partition.schedules import forward_only, make_schedule, make_window, stage_edges
from onebox.errors import UsageError
from onebox.plan import Plan, Prediction, Schedule, named_schedule, validate
from tests.unit.engine.nets import PLANS, plan, programs, stage

STAGES = (stage("ab", 0), stage("cd", 1))
ROWS = ("0: 0F0 0F1 0B1 0B0", "1: 1F0 1F1 1B1 1B0")
GUESS = Prediction(batch=4, step_s=1.0, bubble=0.1, peak_bytes=(1, 1), stages_s=((1.0, 1.0, 1.0), (2.0, 2.0, 1.0)))


def schedule_of(made: Plan, parts: int) -> Schedule:
    """Return the schedule of a batch of so many micro-batches."""
    stages = None if len(made.stages) == 1 else tuple(each.segments for each in made.stages)
    model = programs(2, stages, train=True, halves=False)
    return make_schedule(made, made.micro_batches(2 * parts), made.routes(2 * parts), model)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("name", PLANS)
def test_every_schedule_can_be_run(name: str, parts: int) -> None:
    made = PLANS[name]
    stages = None if len(made.stages) == 1 else tuple(each.segments for each in made.stages)
    edges = stage_edges(programs(2, stages, train=True, halves=False))
    validate(schedule_of(made, parts), made.routes(2 * parts), edges)


def test_replicas_of_the_whole_model_go_back_at_once() -> None:
    assert schedule_of(PLANS["two replicas"], 3).lines() == ("0: 0F0 0B0 0F2 0B2", "1: 0F1 0B1")


def test_a_table_is_taken_as_it_is_for_its_number_of_micro_batches() -> None:
    made = plan(*STAGES, schedule="table", table=ROWS)
    assert schedule_of(made, 2).lines() == ROWS


def test_for_another_number_a_table_gives_way() -> None:
    """To what is known: 1f1b, or where the plan expects times, a schedule made for them."""
    assert schedule_of(plan(*STAGES, schedule="table", table=ROWS), 3) == schedule_of(plan(*STAGES), 3)
    guessed = schedule_of(plan(*STAGES, schedule="table", table=ROWS, predicted=GUESS), 3)
    assert guessed == schedule_of(plan(*STAGES, schedule="auto", predicted=GUESS), 3)


def test_a_table_that_cannot_be_run_is_refused() -> None:
    made = plan(*STAGES, schedule="table", table=("0: 0F0 0B0 0F1 0B1", "1: 1F0 1F1 1B0 1B1"))
    with pytest.raises(UsageError, match="would wait for ever"):
        schedule_of(made, 2)


def test_auto_without_times_is_1f1b() -> None:
    assert schedule_of(plan(*STAGES, schedule="auto"), 4) == schedule_of(plan(*STAGES), 4)


def test_a_table_gives_way_to_what_needs_little_memory_where_that_is_what_counts() -> None:
    """Stages with policies, and stages of one device: the schedule is that of blocks, and none goes ahead for
    nothing."""
    one = (stage("ab", 0), stage("cd", 0))
    rows = ("0: 0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0",)
    made = plan(*one, schedule="table", table=rows, predicted=replace(GUESS, peak_bytes=(1,)))
    assert schedule_of(made, 2).lines() == rows
    assert schedule_of(made, 3).lines() == ("0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2",)
    fated = (replace(STAGES[0], policy="offload"), STAGES[1])
    made = plan(*fated, schedule="table", table=ROWS, predicted=GUESS)
    assert schedule_of(made, 4) == named_schedule("1f1b", made.routes(8))


def test_edges_are_those_of_the_values_and_not_of_a_chain() -> None:
    """From the first stage to the third, too; a table may rest on it."""
    stages = tuple((f"model.{letter}",) for letter in "abcd")
    assert stage_edges(programs(2, stages, train=True, halves=True)) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    made = PLANS["four stages"]
    assert schedule_of(made, 4) == named_schedule(
        "zb-h1", made.routes(8), edges=stage_edges(programs(2, stages, train=True, halves=False))
    )


def test_an_evaluation_goes_forward_one_micro_batch_after_the_other() -> None:
    made = PLANS["one by two"]
    assert forward_only(made.routes(6)).lines() == ("0: 0F0 0F1 0F2", "1: 1F0 1F2", "2: 1F1")


@pytest.mark.parametrize(("in_flight", "row"), [((), "0: 0F0 0B-1 0F1 0B0"), ((3, 1), "0: 0F0 0B-2 0F1 0B-1")])
def test_a_window_has_as_many_micro_batches_in_flight_as_the_plan_says(in_flight: tuple[int, ...], row: str) -> None:
    made = plan(*STAGES, schedule="async-1f1b", in_flight=in_flight)
    model = programs(2, tuple(each.segments for each in made.stages), train=True, halves=False)
    assert make_window(made, made.micro_batches(4), made.routes(4), model).lines()[0] == row


@pytest.mark.parametrize(
    "more",
    [{"schedule": "auto"}, {"schedule": "auto", "predicted": GUESS}, {"schedule": "table", "table": ROWS}],
    ids=["auto", "auto with times", "table"],
)
@pytest.mark.parametrize("parts", [2, 3])
def test_stages_whose_layers_are_split_have_backward_in_halves(parts: int, more: dict[str, Any]) -> None:
    """They are split for halves alone wherever a schedule may want them; a table is for two micro-batches."""
    split = replace(STAGES[1], replicas=((1, 2),))
    rows = (*ROWS, ROWS[1].replace("1:", "2:"))
    made = plan(STAGES[0], split, **({**more, "table": rows} if "table" in more else more))
    schedule = schedule_of(made, parts)
    kinds = {(action.stage, action.kind) for row in schedule.rows.values() for action in row}
    assert {kind for stage, kind in kinds if stage == 1} == {"F", "I", "W"}
    validate(schedule, made.routes(2 * parts), [(0, 1)])
