"""A plan as tables: its stages, its devices, the alternatives, and the accuracy of its predictions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from onebox.cost import DeviceGroups
from onebox.plan import Kind, Plan, PlanCandidate, Simulation, Stage
from onebox.plan.evaluate.modes import TrainingMode
from onebox.plan.model.stage import POLICY_WORDS
from onebox.plan.search.result import SPLIT_WORTH
from onebox.report.tables.comparison import IslandsComparison, PlanComparison, PredictedMeasured
from onebox.report.tables.text import emulated_caption, marked, rate_text, share_text
from onebox.sizes import bit_rate_text, size_text, time_text

_LONG_RUN = 4
"""So many consecutive stages on the same devices are shown as one."""

_NAMES: dict[Kind, str] = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}


def summary_line(plan: Plan) -> str:
    """Describe the predicted step in one line.

    Args:
        plan: A plan with its prediction.
    """
    assert plan.predicted is not None, "a plan that was predicted"
    predicted = plan.predicted
    rate = rate_text(predicted.batch / predicted.step_s)
    spread = ""
    if predicted.interval_s is not None:
        low_s, high_s = predicted.interval_s
        spread = f", {time_text(low_s)} to {time_text(high_s)} in 8 of 10 steps"
    step = f"step {time_text(predicted.step_s)} for {predicted.batch} samples"
    return f"{step}{spread}, {rate}, bubble {predicted.bubble:.1%}"


def noise_line(candidates: Sequence[PlanCandidate]) -> str:
    """Return a line about a chosen plan that gains less than the machine's times varied; empty if it gains more.

    It is compared with the fastest plan of one stage and whole layers, which needs no planner.

    Args:
        candidates: The chosen plan, then those that it was compared with.
    """
    chosen = candidates[0].plan
    fitting = [one for one in candidates if not one.refused and not one.shortfalls]
    trivial = [one for one in fitting if _is_trivial(one.plan)]
    if chosen.predicted is None or chosen.predicted.interval_s is None or _is_trivial(chosen) or not trivial:
        return ""
    other = min(trivial, key=lambda one: one.step_s)
    low_s, high_s = chosen.predicted.interval_s
    gain_s = other.step_s - chosen.predicted.step_s
    if high_s - low_s <= gain_s:
        return ""
    longer = f"only {time_text(gain_s)} longer" if gain_s > 0 else "no longer"
    return (
        f"too noisy to choose by: the times of a step vary by {time_text(high_s - low_s)}, and {other.label} takes "
        f"{longer}; end other programs, or leave them cores with --threads, and measure again with --fresh"
    )


def _is_trivial(plan: Plan) -> bool:
    """Return whether a plan is one stage of whole layers."""
    return len(plan.stages) == 1 and not plan.split


def stage_table(plan: Plan, names: Sequence[str], emulated: Collection[int] = ()) -> Table:
    """Return the table of a plan's stages.

    Args:
        plan: A plan with its prediction.
        names: All segments of the model, in their order.
        emulated: Numbers of the emulated devices.
    """
    assert plan.predicted is not None, "a plan that was predicted"
    policies = any(stage.policy != "keep" for stage in plan.stages)
    formats = any(stage.formats for stage in plan.stages)
    headings = (
        "stage",
        "segments",
        "devices",
        *(["activations"] if policies else []),
        *(["formats"] if formats else []),
    )
    table = Table(*headings, caption=emulated_caption(plan.devices, emulated), caption_justify="left")
    for heading in ("forward\nms", "input grad.\nms", "weight grad.\nms"):
        table.add_column(heading, justify="right")
    for number, stage in enumerate(plan.stages):
        times = [f"{seconds * 1e3:.3g}" for seconds in plan.predicted.stages_s[number]]
        cells = [segments_text(stage, names), devices_text(stage, emulated), *([stage.policy] if policies else [])]
        cells += [", ".join(stage.formats)] if formats else []
        table.add_row(str(number), *map(Text, cells), *times)
    return table


def plan_device_table(
    plan: Plan, simulation: Simulation, capacity_bytes: Mapping[int, int | None], emulated: Collection[int] = ()
) -> Table:
    """Return the table of a plan's devices: memory against their capacity, and utilisation.

    Args:
        plan: A plan with its prediction.
        simulation: Its step.
        capacity_bytes: Memory of each device; ``None`` for one without limit.
        emulated: Numbers of the emulated devices.
    """
    table = Table("device", "stages", caption=emulated_caption(plan.devices, emulated), caption_justify="left")
    for heading in ("memory", "of", "", "busy"):
        table.add_column(heading, justify="right")
    assert plan.predicted is not None, "a plan that was predicted"
    peaks = dict(zip(plan.devices, plan.predicted.peak_bytes, strict=True))
    for device in sorted(plan.devices):
        own = [str(n) for n, stage in enumerate(plan.stages) if any(device in replica for replica in stage.replicas)]
        peak, most = peaks[device], capacity_bytes.get(device)
        busy = simulation.busy_s.get(device, 0.0) / simulation.step_s if simulation.step_s else 0.0
        room = "-" if most is None else size_text(most)
        table.add_row(
            marked(device, emulated), ", ".join(own), _bytes(peak), room, share_text(peak, most), f"{busy:.1%}"
        )
    return table


def candidate_table(candidates: Sequence[PlanCandidate]) -> Table:
    """Return the table of the plans that a search compared, the chosen one first.

    Plans that are the same under several labels share a row.

    Args:
        candidates: The candidates, in the order of the table.
    """
    table = Table("candidate", "stages on devices")
    for heading in ("micro-\nbatch", "schedule", "step", ""):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    table.add_column("why not", max_width=40)
    best_s, whole = candidates[0].step_s, not candidates[0].plan.split
    for _, group in groupby(candidates, key=lambda one: (one.plan, one.refused, one.shortfalls)):
        same = list(group)
        one, label = same[0], "; ".join(each.label for each in same)
        ratio = "" if one is candidates[0] else f"× {one.step_s / best_s:.2f}"
        beaten = "slower" if one.step_s > best_s else "as quick"
        if one.plan.split and whole and one.step_s < best_s:
            beaten = f"splits layers to gain less than {1 - SPLIT_WORTH:.0%}"
        reason = "" if one is candidates[0] else rejection_reason(one) or beaten
        schedule = "-" if len(one.plan.stages) == 1 else one.plan.schedule
        size = "share" if one.plan.micro_batch is None else str(one.plan.micro_batch)
        cells = (label, _where(one.plan), size, schedule, time_text(one.step_s), ratio, reason)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def mode_table(modes: Sequence[TrainingMode]) -> Table:
    """Return the table of exact, compressed and island training: times, bytes of a step on each link, memory, accuracy.

    A link between two groups of devices is named by these; its bytes are those of both directions.

    Args:
        modes: The ways to train.
    """
    pairs = sorted({(min(way), max(way)) for mode in modes for way in mode.traffic})
    table = Table("training", "plan")
    for heading in (
        "step",
        "sample",
        "",
        *(_link_text(modes[0].groups, pair) for pair in pairs),
        "memory of\na device",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    probed = [mode.loss for mode in modes if mode.loss is not None]
    if probed:
        table.add_column("loss of\nthe probe", justify="right", no_wrap=True)
    table.add_column("published price in accuracy", max_width=40)
    best_s = min(mode.step_s for mode in modes if mode.batch)
    for mode in modes:
        cells = [mode.name, mode.text]
        if mode.sample_s is None:
            table.add_row(*map(Text, cells))
            continue
        both = [mode.traffic.get(pair, 0.0) + mode.traffic.get(pair[::-1], 0.0) for pair in pairs]
        ratio = f"× {mode.step_s / best_s:.2f}" if mode.step_s > best_s else ""
        cells += [time_text(mode.step_s), time_text(mode.sample_s), ratio, *map(_bytes, both)]
        cells += [_bytes(max(mode.peak_bytes.values()))]
        if probed:
            cells += ["-" if mode.loss is None else _probed_text(mode.loss, probed[0])]
        cells += [mode.accuracy]
        table.add_row(*map(Text, cells))
    return table


def _probed_text(loss: float, exact: float) -> str:
    return f"{loss:.4g}" if loss == exact or not exact else f"{loss:.4g} ({loss / exact - 1:+.1%})"


def _link_text(groups: DeviceGroups, pair: tuple[int, int]) -> str:
    one, other = (",".join(map(str, groups[place])) for place in pair)
    return f"bytes\n{one} – {other}"


def rejection_reason(candidate: PlanCandidate) -> str:
    """Return the reason for which a candidate may not be chosen; empty if it may."""
    return "; ".join(part for part in (candidate.refused, *map(str, candidate.shortfalls)) if part)


def comparison_tables(found: PlanComparison) -> list[Table]:
    """Return the tables of predictions and measurements: stages, the whole step, memory.

    Args:
        found: The comparison.
    """
    times = Table("stage", "on", "size")
    kinds = [kind for kind in _NAMES if any(kind in row.seconds for row in found.stages)]
    for kind in kinds:
        times.add_column(f"{_NAMES[kind]}, ms\n pred.  meas.   error", justify="left", no_wrap=True)
    for row in found.stages:
        cells = [_milliseconds(row.seconds[kind]) if kind in row.seconds else "" for kind in kinds]
        times.add_row(str(row.stage), "+".join(map(str, row.devices)), str(row.samples), *cells)
    whole = Table("whole step")
    memory = Table("device", "memory")
    for table in (whole, memory):
        for heading in ("predicted", "measured", "error"):
            table.add_column(heading, justify="right")
    whole.add_row(f"time for {found.batch} samples", *_cells(found.step_s, time_text))
    idle = ["-" if value is None else f"{value:.1%}" for value in (found.bubble.predicted, found.bubble.measured)]
    whole.add_row("bubble", *idle, "")
    for device in found.devices:
        memory.add_row(str(device.device), "peak, by the plan", *_cells(device.peak_bytes, _bytes))
        if device.exact_bytes not in (None, device.peak_bytes.predicted):
            exact = PredictedMeasured(predicted=device.exact_bytes, measured=device.peak_bytes.measured)
            memory.add_row("", "peak, by buffer lifetimes", *_cells(exact, _bytes))
    return [times, whole, memory]


def islands_table(found: IslandsComparison) -> Table:
    """Return the table of the predictions and measurements of a run of islands as a whole.

    Args:
        found: The comparison.
    """
    table = Table("steps of all islands")
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right")
    table.add_row(f"time for {found.batch} samples, outer steps included", *_cells(found.step_s, time_text))
    table.add_row("of it sums between islands, hidden ones included", *_cells(found.sums_s, time_text))
    table.add_row("rate of a link during these", *_cells(found.link_bps, bit_rate_text))
    return table


def segments_text(stage: Stage, names: Sequence[str]) -> str:
    """Describe the segments of a stage: first and last of each run, and their number."""
    own = list(stage.segments or names)
    place = {name: index for index, name in enumerate(names)}
    known = sorted((name for name in own if name in place), key=place.__getitem__)
    runs = [
        [name for _, name in group] for _, group in groupby(enumerate(known), key=lambda pair: place[pair[1]] - pair[0])
    ]
    text = ", ".join(run[0] if len(run) == 1 else f"{run[0]} … {run[-1]}" for run in runs)
    return f"{text} ({len(own)})" if len(own) > 1 else text


def devices_text(stage: Stage, emulated: Collection[int] = ()) -> str:
    """Describe the devices of a stage: replicas with their shares; ``+`` joins devices that split its layers."""
    total = sum(stage.shares)
    replicas = ["+".join(marked(device, emulated) for device in replica) for replica in stage.replicas]
    if len(replicas) == 1:
        return replicas[0]
    shares = (f"{share / total:.0%}" for share in stage.shares)
    return ", ".join(f"{replica}: {share}" for replica, share in zip(replicas, shares, strict=True))


def _where(plan: Plan) -> str:
    if len(plan.stages) == 1:
        return f"1 on {devices_text(plan.stages[0])}"
    stages = ["|".join("+".join(map(str, replica)) for replica in stage.replicas) for stage in plan.stages]
    runs = [(text, len(list(group))) for text, group in groupby(stages)]
    where = ", ".join(f"{text} × {count}" if count >= _LONG_RUN else ", ".join([text] * count) for text, count in runs)
    policies = [stage.policy for stage in plan.stages]
    freed = [
        f"{policies.count(policy)} {POLICY_WORDS[policy]}"
        for policy in dict.fromkeys(policies)
        if policy in POLICY_WORDS
    ]
    return "; ".join([f"{len(plan.stages)} on {where}", *freed])


def _cells(pair: PredictedMeasured, text: Callable[[float], str]) -> list[str]:
    found = ["-" if value is None else text(value) for value in (pair.predicted, pair.measured)]
    error = "-" if pair.error is None else "0.0%" if abs(pair.error) < 5e-4 else f"{pair.error:+.1%}"
    return [*found, error]


def _milliseconds(pair: PredictedMeasured) -> str:
    """Format prediction, measurement and error in columns."""
    predicted, measured, error = _cells(pair, lambda seconds: f"{seconds * 1e3:.3g}")
    return f"{predicted:>6} {measured:>6} {error if pair.error is not None else '':>7}"


def _bytes(value: float) -> str:
    return size_text(int(value)) if value >= 100 * 2**20 else f"{value / 2**20:.3g} MiB"
