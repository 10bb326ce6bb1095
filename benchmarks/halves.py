"""Does it pay to send a large value in parts, the first of which travels while the rest is computed?

Four EMULATED devices in a row (they sleep), links of 1, 2.5 and 10 gigabits a second, 1F1B of few micro-batches, exact
steps that overlap: what stages exchange is large, and a step waits for it again and again. Both sides run the same plan
in turn in every round: all values sent whole, and in as many parts as the trainer chooses, which is one where that is
not predicted to pay.

``gain_<link>`` is the step time with whole values over that with parts, a median over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from common import finish, show, spread
from pipeline_sides import in_turn, ratios
from torch import nn

import onebox
from onebox.engine.partition import value_chunks
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Prediction, Stage
from onebox.pool import Link

DEVICES, COUNT, SAMPLES = 4, 4, 64
"""Devices, micro-batches of a step, samples of a micro-batch."""

WIDTH, NARROW = 16384, 16
"""Features of what stages exchange, and between: 4 MiB a micro-batch."""

WORK_S = 0.03
"""Seconds of each of forward, input gradient and weight gradient of a stage for a micro-batch."""

LINKS = {f"{gigabits:g}_gbit": Link(latency_s=0.2e-3, bandwidth_bps=gigabits * 125e6) for gigabits in (1, 2.5, 10)}

CALL_S = 0.3e-3
"""Of an action, and of each further piece of one, beside its work, as in ``pipeline.py``."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    names = segments()
    rows, result = [], {}
    for link, speed in LINKS.items():
        plan = plan_of(names)
        with ExitStack() as stack:
            row = {(device, device + 1): speed for device in range(DEVICES - 1)}
            pool = stack.enter_context(onebox.open(f"sim*{DEVICES}", threads=1, links=row))
            sides = {"whole": False, "parts": True}
            runs = {name: Side(pool, plan, stack, parts=parts).run for name, parts in sides.items()}
            found = in_turn(runs, options.rounds, options.steps, most_s=40.0)
        gain = ratios(found["whole"], found["parts"])
        for name, parts in sides.items():
            told = spread(gain) if parts else "-"
            times = spread([1e3 * one for one in found[name]], 0)
            rows.append([link.replace("_", " "), name, times, told])
        result[f"gain_{link}"] = round(statistics.median(gain), 4)
    show(
        f"EMULATED: {DEVICES} devices in a row, 1F1B of {COUNT} micro-batches, {1e3 * WORK_S:.0f} ms for each of "
        f"forward and both gradients, {SAMPLES * WIDTH * 4 / 1e6:.1f} MB between stages: median (least to most)",
        ["link", "values", "step, ms", "gain"],
        rows,
    )
    finish(result, as_json=options.json)


def layers() -> nn.Module:
    """Return a model whose every stage is narrow inside and wide at its ends."""
    stages = [nn.Sequential(nn.Linear(WIDTH, NARROW), nn.Linear(NARROW, WIDTH)) for _ in range(DEVICES - 1)]
    return nn.Sequential(nn.Linear(NARROW, WIDTH), *stages, nn.Linear(WIDTH, NARROW))


def segments() -> tuple[tuple[str, ...], ...]:
    """Return the segments of each stage."""
    batch = torch.zeros(SAMPLES, NARROW), torch.zeros(SAMPLES, NARROW)
    names = TracedModel(capture(layers(), nn.functional.mse_loss, batch), backward=True).segments
    bounds = [0, *(1 + 2 * stage for stage in range(1, DEVICES)), len(names)]
    return tuple(names[a:b] for a, b in itertools.pairwise(bounds))


def plan_of(names: tuple[tuple[str, ...], ...]) -> Plan:
    """Return the plan, with the times that devices sleep for."""
    return Plan(
        stages=tuple(Stage(segments=own, replicas=((n,),), shares=(1.0,)) for n, own in enumerate(names)),
        micro_batch=SAMPLES,
        schedule="1f1b",
        predicted=Prediction(
            batch=SAMPLES * COUNT,
            step_s=1.0,
            bubble=0.0,
            peak_bytes=(1,) * DEVICES,
            stages_s=((WORK_S, WORK_S, WORK_S),) * DEVICES,
        ),
    )


class Side:
    """A trainer of the plan.

    Args:
        pool: Where.
        plan: How.
        stack: Closes it.
        parts: Whether values may be sent in parts.
    """

    def __init__(self, pool: onebox.Pool, plan: Plan, stack: ExitStack, *, parts: bool) -> None:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._data = torch.zeros(SAMPLES * COUNT, NARROW), torch.zeros(SAMPLES * COUNT, NARROW)
        self._trainer = stack.enter_context(
            onebox.Trainer(
                model, nn.functional.mse_loss, optimizer, pool=pool, plan=plan, engine=onebox.Engine(overlap=True)
            )
        )
        with at_most(value_chunks.MOST if parts else 1):
            self.run(1)  # what leaves when is fixed with the first step

    def run(self, steps: int) -> float:
        """Run so many steps and return how many seconds they took."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._trainer.step(*self._data)
        self._trainer.wait()
        return time.perf_counter() - begin


@contextmanager
def at_most(parts: int) -> Iterator[None]:
    """Let values be sent in so many parts at most."""
    before, value_chunks.MOST = value_chunks.MOST, parts
    try:
        yield
    finally:
        value_chunks.MOST = before


if __name__ == "__main__":
    main()
