"""Are pipelines of onebox quicker than those of ``torch.distributed.pipelining`` and than even cuts?

Both sides train the same model, cut into the same stages, with the same micro-batches and optimizer, in turn in every
round; each figure is a median over the rounds. A side runs a few steps at a time. They follow each other without a
barrier, on both sides: a device that is done with a step begins the next one, so that a step may take a little less
than the theory of a single one says.

- ``real``: two stages' worth of devices, one core each, real work in float32. The ceiling is what both cores do when
  each trains the whole model for itself in plain PyTorch. ``real_vs_torch`` is the throughput of the best of our
  schedules over that of the best of theirs, the least over the models.
- ``equal``: 4 and 8 emulated equal devices: forward, input gradient and weight gradient of each take the same time, on
  our side on the devices' clocks. What our workers do takes none of the devices' time unless it delays an answer, as
  where hosts run ahead of GPUs. The processes of the other side sleep so long, and do nothing else meanwhile. The
  bubble is the part of the devices' time that isn't work. ``bubble_over_theory_4`` and ``_8`` are measured bubble over
  that of theory for 1F1B, whose theory is exact; the table has the other schedules, too. Schedules whose theory has
  next to no bubble (``zbv``) are compared by step time instead. ``equal_vs_torch`` is the step time of the best of our
  schedules over that of the best of theirs, the worse of 4 and 8 devices.
- ``uneven``: 4 emulated devices of speeds 1, 1, 0.5 and 0.25 with one slow link: throughput of the plan that the
  planner finds over that of even cuts under GPipe and under 1F1B.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from common import finish, show, spread
from pipeline_models import CASES, STAGES_PER_DEVICE, Case, Linears
from pipeline_sides import Ours, Run, Theirs, Times, at_weights, best, in_turn, plan_for, ratios, segments_of
from pipeline_uneven import compare_uneven

import onebox
from onebox.plan import ideal_step_time

WORK_S = 0.012
"""Seconds of each of forward, input gradient and weight gradient of a micro-batch on an emulated device."""

MICRO_BATCHES = {4: 8, 8: 16}
"""Micro-batches for so many emulated devices."""

OURS = ("1f1b", "interleaved", "zb-h1", "zbv")
THEIRS = ("1f1b", "interleaved", "zbv")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="a,b,c", help="a: real, b: equal, c: uneven")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    parts = options.parts.split(",")
    if "a" in parts:
        result |= real(options.rounds)
    if "b" in parts:
        result |= equal(options.rounds)
    if "c" in parts:
        result |= compare_uneven(options.rounds)
    finish(result, as_json=options.json)


# ---- real work


def real(rounds: int) -> dict[str, float]:
    """Compare on two cores."""
    rows: list[list[str]] = []
    compared: list[float] = []
    result: dict[str, float] = {}
    for name, case in CASES.items():
        found = measure_real(name, case, rounds)
        ceiling = [2 * case.batch / seconds for seconds in found.pop("alone")]
        rates = {side: [case.batch / seconds for seconds in times] for side, times in found.items()}
        for side, rate in rates.items():
            rows.append([name, side, spread(rate, 0), spread(ratios(rate, ceiling))])
        ours = best(found, [side for side in found if side.startswith("onebox")])
        theirs = best(found, [side for side in found if side.startswith("torch")])
        ratio = ratios(rates[ours], rates[theirs])
        rows += [
            [name, "two copies, no pipeline", spread(ceiling, 0), "the ceiling"],
            [name, f"{ours} / {theirs}", "", spread(ratio)],
        ]
        compared.append(statistics.median(ratio))
        result[f"real_{name}_vs_torch"] = round(compared[-1], 4)
        result[f"real_{name}_share_of_ceiling"] = round(statistics.median(ratios(rates[ours], ceiling)), 4)
    counts = ", ".join(f"{name}: {case.count} micro-batches of {case.micro_batch}" for name, case in CASES.items())
    show(
        f"Pipelines over two cores, one thread each ({counts}): median (least to most)",
        ["model", "side", "samples/s", "share of the ceiling"],
        rows,
    )
    return {"real_vs_torch": round(min(compared), 4), **result}


def measure_real(name: str, case: Case, rounds: int, steps: int = 3) -> dict[str, list[float]]:
    """Return seconds of a step of each side in each round."""
    with ExitStack() as stack:
        theirs = Theirs(name, 2, stack)
        segments = segments_of(case)
        pool = stack.enter_context(onebox.open("cpu*2", threads=1))
        require_same_loss(name, case, segments, pool, theirs)
        sides: dict[str, Run] = {}
        ours = {schedule: Ours(case, pool, plan_for(case, segments, schedule, 2), stack) for schedule in OURS}
        ours["zb-h1"].run(3)
        times = ours["zb-h1"].stage_times()
        ours["auto"] = Ours(case, pool, plan_for(case, segments, "auto", 2, times), stack)
        sides |= {f"onebox {schedule}": one.run for schedule, one in ours.items()}
        sides |= {f"torch {schedule}": theirs.runner(schedule) for schedule in THEIRS}
        sides["alone"] = theirs.runner("alone")
        return in_turn(sides, rounds, steps, most_s=20.0)


def require_same_loss(name: str, case: Case, segments: Sequence[str], pool: onebox.Pool, theirs: Theirs) -> None:
    """Require that both sides compute the same loss after two steps of training, in float64."""
    expected = theirs.loss("1f1b")
    with ExitStack() as stack:
        found = Ours(case, pool, plan_for(case, segments, "zbv", 2), stack, torch.float64).loss(3)
    if abs(found - expected) > 1e-10 * abs(expected):
        raise SystemExit(f"{name}: the loss is {found} on our side and {expected} on theirs")


# ---- emulated equal devices


def equal(rounds: int) -> dict[str, float]:
    """Compare on emulated devices that are equal."""
    rows: list[list[str]] = []
    compared: list[float] = []
    result: dict[str, float] = {}
    for devices, count in MICRO_BATCHES.items():
        found = measure_equal(devices, count, rounds)
        busy = count * 3 * WORK_S
        for side, times in found.items():
            who, schedule = side.split()
            ideal = ideal_step_time(
                schedule, devices, count, WORK_S, WORK_S, WORK_S, STAGES_PER_DEVICE.get(schedule, 1)
            )
            bubbles = [1 - busy / seconds for seconds in times]
            over = [bubble / (1 - busy / ideal) for bubble in bubbles]
            clear = schedule != "zbv"
            rows.append(
                [
                    str(devices),
                    side,
                    spread([1e3 * seconds for seconds in times], 1),
                    f"{1e3 * ideal:.1f}",
                    spread([seconds / ideal for seconds in times]),
                    f"{1 - busy / ideal:.3f}",
                    spread(over) if clear else "-",
                ]
            )
            if who == "onebox":
                key = schedule.replace("-", "")
                kind, values = ("bubble", over) if clear else ("step", ratios(times, [ideal] * len(times)))
                result[f"{key}_{kind}_over_theory_{devices}"] = round(statistics.median(values), 4)
        ours = best(found, [side for side in found if side.startswith("onebox")])
        theirs = best(found, [side for side in found if side.startswith("torch")])
        ratio = ratios(found[ours], found[theirs])
        rows.append([str(devices), f"{ours} / {theirs}", "", "", spread(ratio), "", ""])
        compared.append(statistics.median(ratio))
        result[f"equal_vs_torch_{devices}"] = round(compared[-1], 4)
        result[f"bubble_over_theory_{devices}"] = result[f"1f1b_bubble_over_theory_{devices}"]
    show(
        f"EMULATED equal devices, F = I = W = {1e3 * WORK_S:.0f} ms slept for each of "
        f"{' / '.join(str(count) for count in MICRO_BATCHES.values())} micro-batches: median (least to most)",
        ["devices", "side", "step, ms", "theory", "step / theory", "bubble in theory", "bubble / theory"],
        rows,
    )
    return {"equal_vs_torch": round(max(compared), 4), **result}


def measure_equal(devices: int, count: int, rounds: int, steps: int = 3) -> dict[str, list[float]]:
    """Return seconds of a step of each side in each round."""
    with ExitStack() as stack:
        theirs = Theirs(f"sleep:{WORK_S}:{count}", devices, stack)
        case = Linears(parts=2 * devices, count=count).case()
        segments = segments_of(case)
        pool = stack.enter_context(onebox.open(f"sim*{devices}"))
        ours = {}
        for schedule in OURS:
            plan = plan_for(case, segments, schedule, devices, times_of(schedule, devices))
            ours[schedule] = Ours(case, pool, plan, stack)
            ours[schedule].run(1)
            ours[schedule].require_work(dict.fromkeys(range(devices), count * 3 * WORK_S))
        sides: dict[str, Run] = {f"onebox {schedule}": one.run for schedule, one in ours.items()}
        sides |= {f"torch {schedule}": theirs.runner(schedule) for schedule in THEIRS}
        return in_turn(sides, rounds, steps, most_s=35.0)


def times_of(schedule: str, devices: int) -> Times:
    """Return what each stage takes; the stages of a device share its time."""
    each = STAGES_PER_DEVICE.get(schedule, 1)
    return at_weights([(WORK_S / each,) * 3] * (devices * each))


if __name__ == "__main__":
    main()
