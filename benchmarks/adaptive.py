"""How much faster is a pipeline that is never empty, and that follows the machines, than those that wait for each step?

Emulated: 4 and 8 devices that sleep, with Gigabit Ethernet between all of them; a chain of equal segments whose times
are slept; messages of half a megabyte whose time on a link is slept. Each side of a comparison suffers the same devices
and links (for the peer see ``adaptive_torch.py``: its links are never slower than ours). The cases, in steps:

- ``equal devices`` and ``uneven devices`` (speeds 1, ½ and ¼), 60 steps each;
- ``a device slows down`` to a third of its speed after 50 steps, and is as before after 150, of 200;
- ``a link drops`` to a tenth of its bandwidth after 50 steps, of 150: the one between the two devices in the middle.

The sides:

- ``gpipe`` and ``1f1b``: even cuts, by onebox, exact; ``torch …``: even cuts, by ``torch.distributed.pipelining``, each
  of its schedules that run here (its users cut by hand; it has no model of devices);
- ``static``: the plan that onebox finds for the state of the start, stale gradients;
- ``adaptive``: the same plan, with ``adaptive=True``.

What does not adapt takes the same time in each step of a state, so that these sides are timed in turn in each state, a
few steps at a time and some steps in, and a whole case is put together of that; the adaptive side runs the whole case,
some steps in, too, changes of plan included. Figures are the means over all cases and both numbers of devices:

- ``mean_vs_gpipe``, ``mean_vs_best_peer``: speed of the adaptive side over that of ``gpipe``, and over that of the
  quickest side that is exact, in each case. A step has twice as many micro-batches as there are devices; a second table
  has four times as many, with which pipelines that drain lose less.
- ``slow_device``, ``slow_link``: seconds of a step of the adaptive side, from the 11th after each change on, over those
  of the best static plan for the state that there is then; the worst. At most 1.1 is wanted.
- ``share_of_bound``: the work of the busiest device, if whole segments are dealt out best, over the time of adaptive's
  side. ``bound_vs_gpipe`` is what nobody could exceed who leaves each segment on one device.
- ``share_of_busy``: the time that all work takes if every device is busy always, over that of the adaptive side. Where
  speeds are uneven, segments would have to be cut apart for that.

By default 4 devices are measured once, in cases of half as many steps, in less than five minutes; ``--long`` has three
rounds of whole cases, and 8 devices, too.

What is slept does not depend on the machine that this runs on; what the sides themselves do does. ``--slower`` makes up
for a slow machine: devices, links and steps are slower by the same factor, and shares of a step stay what they are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import adaptive_world as world_of
from adaptive_sides import SCHEDULES, Ours, Theirs, World, in_turn
from adaptive_world import EACH, Scenario, State, even_cuts, planned, scenarios
from common import finish, show, spread

import onebox
from onebox.plan import Plan

LATE = onebox.StaleGradients(warm_up=0)

EXACT = ("gpipe", "1f1b")
"""Even cuts, by onebox."""

SETTLED = 10
"""Steps after a change that are not looked at."""

Seconds = dict[str, list[float]]
"""For each side, the seconds of a step in each round."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, help="1; with --long 3")
    parser.add_argument("--steps", type=int, default=4, help="of a side at a time")
    parser.add_argument("--devices", help="4; with --long 4,8")
    parser.add_argument("--long", action="store_true", help="all of it, more than twenty minutes")
    parser.add_argument("--cases", default="0,1,2,3", help="of the four, from 0")
    parser.add_argument(
        "--many", type=int, help="micro-batches for each device in the second table; 0: none, with --long 4"
    )
    parser.add_argument("--shorter", type=int, help="divides the steps of all cases: 2; with --long 1")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="all that is emulated takes so many times as long: for slow machines"
    )
    parser.add_argument("--quick", action="store_true", help="one short case on 4 devices, to see that all of it runs")
    options = parser.parse_args()
    whole, some = (
        {"devices": "4,8", "rounds": 3, "many": 4, "shorter": 1},
        {"devices": "4", "rounds": 1, "many": 0, "shorter": 2},
    )
    for name, value in (whole if options.long else some).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.quick:
        quick = {"devices": "4", "cases": "2", "rounds": 1, "steps": 1, "many": 0, "shorter": 10}
        options = argparse.Namespace(**{**vars(options), **quick})
        world_of.coarsen()
    world_of.slow_down(options.slower)
    cases = [int(case) for case in options.cases.split(",")]
    found: list[Outcome] = []
    for devices in map(int, options.devices.split(",")):
        chosen = [scenarios(devices, options.shorter)[case] for case in cases]
        with ExitStack() as stack:
            theirs = Theirs(devices, stack)
            measured = Measured(theirs, devices * EACH, options.rounds, options.steps, quick=options.quick)
            found += [measured.outcome(scenario) for scenario in chosen]
            if options.many:
                many = Measured(theirs, devices * options.many, 1, 2)
                show_many(devices, many.count, [many.states(scenario)[-1] for scenario in chosen[:2]])
        show_cases(devices, [one for one in found if one.devices == devices])
    finish(summary(found), as_json=options.json)


class Outcome:
    """What a case turned out to be.

    Args:
        scenario: The case.
        phases: For each of its states the seconds of each side that does not adapt.
        adaptive: The seconds of each step of the adaptive side.
        decisions: What it decided, a line each.
        count: Micro-batches of a step.
    """

    def __init__(
        self,
        scenario: Scenario,
        phases: Sequence[Seconds],
        adaptive: Sequence[float],
        decisions: Sequence[str],
        count: int,
    ) -> None:
        self.scenario, self.phases, self.adaptive, self.decisions = scenario, phases, adaptive, decisions
        self.devices = len(scenario.phases[0][0].speeds)
        steps = [steps for _, steps in scenario.phases]
        self.total_s = {
            side: sum(n * statistics.median(phase[side]) for n, phase in zip(steps, phases, strict=True))
            for side in phases[0]
            if side != "best static"
        }
        self.total_s["adaptive"] = sum(adaptive)
        self.bound_s = sum(n * state.bound_s(count) for state, n in scenario.phases)
        self.busy_s = sum(n * state.busy_s(count) for state, n in scenario.phases)
        exact = [side for side in self.total_s if side in EXACT or side.startswith("torch")]
        self.best_peer = min(exact, key=self.total_s.__getitem__)

    def gain(self, side: str) -> float:
        """Return the speed of the adaptive side over that of another one."""
        return self.total_s[side] / self.total_s["adaptive"]

    @property
    def settled(self) -> list[float]:
        """For each change of the machines the time of a step from the 11th on, over the best static plan's."""
        found, begin = [], 0
        for place, (_, steps) in enumerate(self.scenario.phases):
            if place:
                mean_s = statistics.fmean(self.adaptive[begin + min(SETTLED, steps // 2) : begin + steps])
                found.append(mean_s / statistics.median(self.phases[place]["best static"]))
            begin += steps
        return found

    @property
    def steps_to_settle(self) -> list[int]:
        """For each change the steps until the next ten take no more than 1.1 of the best static plan's time."""
        found, begin = [], 0
        for place, (_, steps) in enumerate(self.scenario.phases):
            if place:
                limit_s = 1.1 * statistics.median(self.phases[place]["best static"])
                own = self.adaptive[begin : begin + steps]
                means = [statistics.fmean(own[first : first + 10]) for first in range(len(own) - 9)]
                found.append(next((first for first, mean in enumerate(means) if mean <= limit_s), steps))
            begin += steps
        return found


class Measured:
    """Times of the sides that do not adapt, each state once.

    Args:
        theirs: The peer.
        count: Micro-batches of a step.
        rounds: How often the sides take turns.
        steps: Of a side in each.
        quick: Whether to try one exact schedule of each only, and to plan in a hurry.
    """

    def __init__(self, theirs: Theirs, count: int, rounds: int, steps: int, *, quick: bool = False) -> None:
        self.count = count
        self._exact, self._schedules = (EXACT[:1], SCHEDULES[:1]) if quick else (EXACT, SCHEDULES)
        self._budget_s = 0.5 if quick else 5.0
        self._theirs, self._rounds, self._steps = theirs, rounds, steps
        self._known: dict[tuple[State, State], Seconds] = {}

    def outcome(self, scenario: Scenario) -> Outcome:
        """Run a case."""
        phases = [seconds for _, seconds in self.states(scenario)]
        start = scenario.phases[0][0]
        with ExitStack() as stack:
            world = World(start, stack)
            adaptive = Ours(world, self._planned(start), self.count, stack, stale=LATE, adaptive=True)
            seconds = adaptive.through(scenario, world)
            lines = [decision.line for decision in adaptive.trainer.decisions]
        return Outcome(scenario, phases, seconds, lines, self.count)

    def _planned(self, state: State) -> Plan:
        return planned(state, self.count, self._budget_s)

    def states(self, scenario: Scenario) -> list[tuple[State, Seconds]]:
        """Return the seconds of a step of each side in each state of a case."""
        start = scenario.phases[0][0]
        with ExitStack() as stack:
            world = World(start, stack)
            sides = {
                name: Ours(world, even_cuts(start, self.count, name), self.count, stack).run for name in self._exact
            }
            sides |= {f"torch {name}": self._theirs.runner(name, self.count) for name in self._schedules}
            sides["static"] = Ours(world, self._planned(start), self.count, stack, stale=LATE).run
            for state, _ in scenario.phases:
                if (start, state) not in self._known:
                    world.change(state)
                    self._theirs.change(state)
                    own = dict(sides)
                    if state != start:
                        own["best static"] = Ours(world, self._planned(state), self.count, stack, stale=LATE).run
                    found = in_turn(own, self._rounds, self._steps)
                    found.setdefault("best static", found["static"])
                    self._known[start, state] = found
        return [(state, self._known[start, state]) for state, _ in scenario.phases]


def show_cases(devices: int, outcomes: Sequence[Outcome]) -> None:
    """Print what the cases turned out to be."""
    rows = []
    for one in outcomes:
        steps = one.scenario.steps
        for side, total_s in one.total_s.items():
            rows.append(
                [
                    one.scenario.name,
                    side,
                    f"{1e3 * total_s / steps:.0f}",
                    f"{one.gain(side):.2f}" if side != "adaptive" else "-",
                    f"{one.bound_s / total_s:.3f}",
                ]
            )
        for name, least_s in (("bound: busiest device", one.bound_s), ("every device is busy", one.busy_s)):
            rows.append([one.scenario.name, name, f"{1e3 * least_s / steps:.0f}", "", f"{one.bound_s / least_s:.3f}"])
        settled = ", ".join(
            f"{ratio:.2f} after {took} steps" for ratio, took in zip(one.settled, one.steps_to_settle, strict=True)
        )
        if settled:
            rows.append([one.scenario.name, "adaptive / best static plan", settled, "", ""])
    show(
        f"EMULATED: {devices} devices, {devices * EACH} micro-batches a step, {world_of.PARTS} segments of "
        f"{1e3 * world_of.PART_S:.2f} ms for each of forward, input and weight gradient, "
        f"{world_of.MESSAGE_BYTES / 1e3:.0f} kB a message, {world_of.ETHERNET.bandwidth_bps * 8 / 1e6:.0f} Mbit/s",
        ["case", "side", "step, ms (mean)", "adaptive's gain", "share of bound"],
        rows,
    )
    for one in outcomes:
        for line in one.decisions:
            print(f"{one.scenario.name}: {line}")


def show_many(devices: int, count: int, states: Sequence[tuple[State, Seconds]]) -> None:
    """Print the times with more micro-batches, in states that last."""
    rows = []
    for state, found in states:
        bound_s = state.bound_s(count)
        best_s = statistics.median(found["best static"])
        for side, times in found.items():
            ratio = f"{statistics.median(times) / best_s:.2f}" if side != "best static" else "-"
            share = f"{bound_s / statistics.median(times):.3f}"
            rows.append([state.name, side, spread([1e3 * one for one in times], 0), ratio, share])
    show(
        f"EMULATED: the same with {count} micro-batches a step on {devices} devices",
        ["state", "side", "step, ms", "best static's gain", "share of bound"],
        rows,
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures over all cases."""

    def worst(name: str) -> float | None:
        ratios = [ratio for one in outcomes if one.scenario.name == name for ratio in one.settled]
        return round(max(ratios), 4) if ratios else None

    def mean(values: Sequence[float]) -> float:
        return round(statistics.fmean(values), 4)

    each: Mapping[str, Any] = {
        f"{one.scenario.name}, {one.devices} devices": {
            "vs_gpipe": round(one.gain("gpipe"), 4),
            "best_peer": one.best_peer,
            "vs_best_peer": round(one.gain(one.best_peer), 4),
            "vs_static": round(one.gain("static"), 4),
            "share_of_bound": round(one.bound_s / one.total_s["adaptive"], 4),
            "share_of_busy": round(one.busy_s / one.total_s["adaptive"], 4),
            "steps_to_settle": one.steps_to_settle,
        }
        for one in outcomes
    }
    return {
        "mean_vs_gpipe": mean([one.gain("gpipe") for one in outcomes]),
        "mean_vs_best_peer": mean([one.gain(one.best_peer) for one in outcomes]),
        "slow_device": worst("a device slows down"),
        "slow_link": worst("a link drops"),
        "share_of_bound": mean([one.bound_s / one.total_s["adaptive"] for one in outcomes]),
        "share_of_busy": mean([one.busy_s / one.total_s["adaptive"] for one in outcomes]),
        "bound_vs_gpipe": mean([one.total_s["gpipe"] / one.bound_s for one in outcomes]),
        "bound_vs_best_peer": mean([one.total_s[one.best_peer] / one.bound_s for one in outcomes]),
        "cases": each,
    }


if __name__ == "__main__":
    main()
