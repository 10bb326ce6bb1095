"""Plans as tables: everything that a person needs to trust one is there."""

from __future__ import annotations

import dataclasses
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console, RenderableType

from onebox.plan import ActivationPolicy, Plan, PlanCandidate, Shortfall, Stage, search
from onebox.plan.evaluate.modes import TrainingMode
from onebox.plan.model.problem import StepSpread
from onebox.report import (
    candidate_table,
    compare,
    comparison_tables,
    mode_table,
    plan_device_table,
    stage_table,
    summary_line,
)
from onebox.report.tables.plan import devices_text, noise_line, rejection_reason, segments_text
from onebox.sizes import time_text
from tests.unit.report.steps import SEGMENTS, as_measured, candidate, foreseen, plan, problem

NAMES = [f"model.{n}" for n in range(SEGMENTS)]


def shown(table: RenderableType, width: int = 150) -> list[list[str]]:
    """Return the cells of a table's rows, heading left out."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]


def test_the_summary_says_time_rate_and_bubble() -> None:
    expected, simulation = foreseen(plan("1f1b"))
    line = summary_line(expected)
    assert line == (
        f"step {time_text(simulation.step_s)} for 8 samples, {8 / simulation.step_s:,.0f} samples/s, "
        f"bubble {simulation.bubble:.1%}"
    )


def test_the_summary_has_the_interval_of_a_step_if_it_is_known() -> None:
    expected, _ = foreseen(plan("1f1b"), dataclasses.replace(problem(), spread={"cpu": (StepSpread(1.0, 0.9, 1.25),)}))
    assert expected.predicted is not None
    step_s = expected.predicted.step_s
    spread = f"{time_text(0.9 * step_s)} to {time_text(1.25 * step_s)} in 8 of 10 steps"
    assert f"for 8 samples, {spread}, {8 / step_s:,.0f} samples/s" in summary_line(expected)


@pytest.mark.parametrize(("spread", "noisy"), [((0.5, 1.6), True), ((0.99, 1.01), False), (None, False)])
def test_a_plan_that_gains_less_than_times_vary_is_pointed_out(spread: tuple[float, float] | None, noisy: bool) -> None:
    given = dataclasses.replace(problem(), spread={"cpu": (StepSpread(1.0, *spread),)} if spread else {})
    chosen, trivial = (
        foreseen(plan("1f1b"), given)[0],
        foreseen(Plan.data_parallel([0], [1.0], micro_batch=2), given)[0],
    )
    candidates = [PlanCandidate(label="the best found", plan=chosen), PlanCandidate(label="one", plan=trivial)]
    line = noise_line(candidates)
    assert chosen.predicted is not None and trivial.predicted is not None
    assert bool(line) == noisy
    if noisy:
        gain_s = trivial.predicted.step_s - chosen.predicted.step_s
        assert f"one takes only {time_text(gain_s)} longer; end other programs" in line
    if noisy:  # a simpler plan that is as quick is preferred, so that the chosen one may even be a little slower
        slower = replace(chosen, predicted=replace(chosen.predicted, step_s=trivial.predicted.step_s * 1.001))
        assert "one takes no longer; end" in noise_line([PlanCandidate(label="found", plan=slower), candidates[1]])
    assert not noise_line(candidates[::-1]), "a plan of one stage needs no planner"
    assert not noise_line(candidates[:1])


def test_the_stages() -> None:
    expected, _ = foreseen(plan("1f1b", replicas=2))
    assert shown(stage_table(expected, NAMES, emulated=[3])) == [
        ["0", "model.0 … model.1 (2)", "0: 50%, 3*: 50%", "4", "4", "4"],
        ["1", "model.2 … model.3 (2)", "1", "4", "4", "4"],
        ["2", "model.4 … model.5 (2)", "2", "4", "4", "4"],
    ]
    captions = stage_table(expected, NAMES, emulated=[3]).caption, stage_table(expected, NAMES).caption
    assert captions == ("* emulated", None)


def test_formats_are_shown_where_they_are_not_the_usual_ones() -> None:
    expected, _ = foreseen(plan("1f1b"))
    first, second, *rest = expected.stages
    stages = (replace(first, precision="bf16", channels_last=True), replace(second, precision="bf16"), *rest)
    table = stage_table(replace(expected, stages=stages), NAMES)
    assert [row[3] for row in shown(table)] == ["channels last, bf16", "bf16", ""]


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ((), "model.0 … model.5 (6)"),
        (("model.3",), "model.3"),
        (("model.0", "model.1", "model.4"), "model.0 … model.1, model.4 (3)"),
        (("model.5", "model.0", "model.2"), "model.0, model.2, model.5 (3)"),
    ],
)
def test_segments_that_do_not_follow_on_each_other_are_told_apart(segments: tuple[str, ...], text: str) -> None:
    assert segments_text(Stage(replicas=((0,),), shares=(1.0,), segments=segments), NAMES) == text


def test_where_a_stage_is() -> None:
    assert devices_text(Stage(replicas=((4,),), shares=(2.0,))) == "4"
    assert devices_text(Stage(replicas=((0, 1), (2, 3)), shares=(3.0, 1.0)), emulated=[2]) == "0+1: 75%, 2*+3: 25%"


def test_the_devices_with_their_memory() -> None:
    expected, simulation = foreseen(plan("gpipe"))
    peaks = simulation.peak_bytes
    rows = shown(plan_device_table(expected, simulation, {0: 1 << 20, 1: peaks[1] - 1, 2: None}, emulated=[2]))
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2*", "2"]]
    assert rows[0][2:5] == [f"{peaks[0] / 2**20:.3g} MiB", "1 MiB", f"{peaks[0] / 2**20:.1%}"]
    assert rows[1][4] == f"{peaks[1] / (peaks[1] - 1):.1%} too much"
    assert rows[2][3:5] == ["-", "-"]
    assert [row[5] for row in rows] == [f"{simulation.busy_s[n] / simulation.step_s:.1%}" for n in range(3)]


def test_the_candidates_say_how_much_slower_and_why_not() -> None:
    best, other = plan("1f1b"), plan("gpipe")
    lacking = (Shortfall(stage=1, device=2, missing_bytes=1234, capacity_bytes=1),)
    rows = shown(
        candidate_table(
            [
                candidate("the best found", best),
                candidate("best under 1f1b", best),
                candidate("device 0 alone", Plan.data_parallel([0], [1.0], micro_batch=8)),
                candidate("even cuts, gpipe", other, shortfalls=lacking),
                candidate("even cuts, zb-h1", other, refused="schedule gpipe is not allowed"),
            ]
        )
    )
    assert rows[0][:4] == ["the best found; best under 1f1b", "3 on 0, 1, 2", "2", "1f1b"]
    assert rows[0][5:] == ["", ""]
    assert rows[1][:4] == ["device 0 alone", "1 on 0", "8", "-"]
    assert rows[1][5].startswith("× ") and rows[1][6] in ("slower", "as quick")
    assert rows[2][6] == "stage 1 misses device 2 by 1234 bytes"
    assert rows[3][6] == "schedule gpipe is not allowed"


def split_over_two(step_s: float) -> Plan:
    """Return a plan of one stage that two devices split, with a prediction of its step."""
    made = candidate("", Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=8)).plan
    assert made.predicted is not None
    stage = Stage(replicas=((0, 1),), shares=(1.0,))
    return replace(made, stages=(stage,), predicted=replace(made.predicted, step_s=step_s))


def test_a_split_plan_that_gains_too_little_is_not_called_as_quick() -> None:
    best = candidate("the best found", plan("1f1b"))
    split = PlanCandidate(label="layers split", plan=split_over_two(0.97 * best.step_s))
    assert shown(candidate_table([best, split]))[1][5:] == ["× 0.97", "splits layers to gain less than 5%"]
    slower = PlanCandidate(label="layers split", plan=split_over_two(1.5 * best.step_s))
    assert shown(candidate_table([best, slower]))[1][6] == "slower"


def test_a_split_plan_needs_a_planner_and_may_be_within_the_noise() -> None:
    given = dataclasses.replace(problem(), spread={"cpu": (StepSpread(1.0, 0.5, 1.6),)})
    whole = foreseen(Plan.data_parallel([0], [1.0], micro_batch=2), given)[0]
    assert whole.predicted is not None
    split = split_over_two(0.9 * whole.predicted.step_s)
    assert split.predicted is not None
    interval_s = 0.5 * whole.predicted.step_s, 1.5 * whole.predicted.step_s
    noisy = replace(split, predicted=replace(split.predicted, interval_s=interval_s))
    candidates = [PlanCandidate(label="split", plan=noisy), PlanCandidate(label="one", plan=whole)]
    assert "one takes only" in noise_line(candidates)
    assert not noise_line([candidates[0], candidates[0]]), "compared with plans of whole layers"


def test_ways_to_train_stand_beside_each_other() -> None:
    groups = ((0, 1), (2,))
    modes = [
        TrainingMode(
            name="synchronous",
            text="2 replicas",
            batch=64,
            step_s=0.5,
            groups=groups,
            traffic={(0, 1): 3 * 2**20, (1, 0): 2**20},
            peak_bytes={0: 2**20, 2: 3 * 2**20},
        ),
        TrainingMode(name="compressed", text="no codec", groups=groups, traffic={}, peak_bytes={}),
        TrainingMode(
            name="islands",
            text="one each",
            batch=64,
            step_s=0.2,
            groups=groups,
            traffic={(0, 1): 2**18, (1, 0): 2**18},
            peak_bytes={0: 2**20},
            accuracy="loss +0.7 %",
        ),
    ]
    rows = shown(mode_table(modes))
    losses = (2.0, None, 2.1)
    probed = shown(mode_table([dataclasses.replace(mode, loss=loss) for mode, loss in zip(modes, losses, strict=True)]))
    assert [[row[-2], row[-1]] for row in probed] == [["2", ""], ["", ""], ["2.1 (+5.0%)", "loss +0.7 %"]]
    assert rows == [
        ["synchronous", "2 replicas", "500 ms", "7.81 ms", "× 2.50", "4 MiB", "3 MiB", ""],
        ["compressed", "no codec", "", "", "", "", "", ""],
        ["islands", "one each", "200 ms", "3.12 ms", "", "0.5 MiB", "1 MiB", "loss +0.7 %"],
    ]


def test_a_search_shows_the_trivial_plans() -> None:
    found = search(problem(3), budget_s=1.0, effort=20_000)
    text = "\n".join(" ".join(row) for row in shown(candidate_table(found.candidates)))
    for label in (
        "the best found",
        "device 0 alone",
        "data parallel, equal shares",
        "even cuts, gpipe",
        "even cuts, 1f1b",
    ):
        assert label in text, text
    first = found.candidates[0]
    assert not rejection_reason(first)


def test_predicted_and_measured() -> None:
    expected, simulation = foreseen(plan("1f1b"))
    found = compare(
        expected, as_measured(simulation, 0, factor=2.0, peak_bytes=(1 << 20, 0, 0)), batch=8, exact={0: 1 << 19}
    )
    times, whole, memory = (shown(table) for table in comparison_tables(found))
    assert times[0] == ["0", "0", "2", "4      8  -50.0%", "8     16  -50.0%"]
    assert whole[0] == [
        "time for 8 samples",
        time_text(simulation.step_s),
        time_text(2 * simulation.step_s),
        "-50.0%",
    ]
    assert whole[1][0] == "bubble"
    assert memory[0][:2] == ["0", "peak, by the plan"] and memory[0][3] == "1 MiB"
    assert memory[1] == ["", "peak, by buffer lifetimes", "0.5 MiB", "1 MiB", "-50.0%"]
    assert memory[2][3:] == ["-", "-"]


def test_a_plan_without_prediction_shows_measurements_alone() -> None:
    _, simulation = foreseen(plan("zb-h1"))
    found = compare(plan("zb-h1"), as_measured(simulation, 0), batch=8)
    times, whole, _ = (shown(table) for table in comparison_tables(found))
    assert times[0] == ["0", "0", "2", "-      4", "-      4", "-      4"]
    assert whole[0][1] == "-" and whole[0][3] == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (1e-7, "0.10 µs"),
        (2.5e-6, "2.50 µs"),
        (99.95e-6, "100 µs"),
        (0.99951e-3, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (1.0, "1.00 s"),
        (123.4, "123 s"),
    ],
)
def test_times_as_text(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@given(st.floats(1e-6, 1e4))
def test_a_time_as_text_is_that_time(seconds: float) -> None:
    number, unit = time_text(seconds).split()
    assert float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=6e-3)


def test_many_stages_on_one_device_are_told_as_one_with_their_policies() -> None:
    names = [f"model.{n}" for n in range(SEGMENTS)]
    policies: list[ActivationPolicy] = ["offload", "recompute", "offload", "keep", "keep", "keep"]
    stages = tuple(
        Stage(segments=(name,), replicas=((int(name == names[-1]),),), shares=(1.0,), policy=policy)
        for name, policy in zip(names, policies, strict=True)
    )
    one, _ = foreseen(Plan(stages=stages, micro_batch=2, schedule="1f1b"))
    (row,) = shown(candidate_table([PlanCandidate(label="with policies", plan=one)]), 160)
    assert row[1] == "6 on 0 × 5, 1; 2 offloaded; 1 recomputed"
    assert [row[3] for row in shown(stage_table(one, names), 160)] == policies
