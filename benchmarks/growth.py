"""What does each cost grow with: a start, a pool, a step's client, a message, a plan, a capture?

Each part is measured at several sizes, and the exponent of its growth is fitted to them (the slope of the logarithms):
1 is linear, 2 quadratic.

- ``start``: a script that imports PyTorch under ``onebox run`` with two workers, over plain Python.
- ``workers``: seconds until a pool of emulated workers of this machine is open, in a process that has PyTorch imported
  and no zygote yet; milliseconds of the client's processor for a step of a small model over them, by all of its
  threads; and one way of a short message between two CPU workers of this machine, by the pool's own measurement.
- ``plans``: seconds of one core for a search, and the least step that any plan can have over that of its plan
  (``growth_plans.py``).
- ``model``: seconds of ``make_plan`` for a transformer on two CPU workers, and over six of its steps and 10 s; and
  seconds that a run with ``plan="auto"`` waits for its first step, without captures.
- ``captures``: seconds of one core for capture, model and programs (``growth_captures.py``), the client's peak beyond
  the model, the captures of a run over many lengths; and seconds from a trainer to its first loss, for a model of 50
  layers in the second process that trains it.

By default sizes are such that it ends within five minutes, and a plan for a model and a second start are measured once;
``--long`` has the largest, and repeats these, too.

    python benchmarks/growth.py [--parts workers plans] [--long] [--figure growth.svg] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from common import finish, show, spread
from growth_captures import LENGTHS, WIDTH, Stack, batch, capture_rows, captures_of_lengths
from growth_plans import plan_rows
from opening import show_commands
from torch import nn

import onebox
from onebox.drawing import save
from onebox.drawing.style import COLOURS, MEASURED, canvas, headline, style
from onebox.engine.workload import captures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("start", "workers", "plans", "model", "captures")
WORKERS = (1, 8, 64)
PLANS, LONG_PLANS = ("20x4", "100x16", "1000x64"), ("20x4", "100x16", "1000x64", "1000x256")
LAYERS = (12, 50, 200)
START_LAYERS = 50
"""Of the model whose second start is timed."""
MODEL_WIDTH, MODEL_LENGTH, MODEL_LAYERS, LONG_MODEL_LAYERS = 1024, 32, 2, 12
"""Of the planned transformer: width, words of a sentence, and layers, 12 for 151 million parameters."""

STEPS = 100
WAIT_S = 300.0
"""Most seconds of a process that measures one size."""


def workers(count: int) -> tuple[float, float]:
    """Return the seconds until a pool of this process, which has had none before, is open, and the milliseconds of this
    process's processor for a step over its emulated devices, without the first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())))
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin_s = time.monotonic()
    with onebox.open(f"sim*{count}") as pool:
        open_s = time.monotonic() - begin_s
        with onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pool, recovery=None) as trainer:
            for _ in range(5):
                trainer.step(x, y)
            trainer.wait()
            begin_s = time.process_time()
            for _ in range(STEPS):
                trainer.step(x, y)
            trainer.wait()
            return open_s, 1e3 * (time.process_time() - begin_s) / STEPS


def message_us() -> float:
    """Return the microseconds of one way of a short message between two workers of this machine."""
    with onebox.open("cpu*2", threads=1) as pool:
        return 1e6 * pool.profile(fresh=True).latency_s[0][1]


def planned(layers: int) -> tuple[float, float]:
    """Return the seconds of a plan for a transformer on two CPU workers, measured anew, and those of a step by it."""
    torch.manual_seed(0)
    model = Stack(layers, MODEL_WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = batch(MODEL_LENGTH)
    loss = nn.functional.cross_entropy
    with onebox.open("cpu*2", threads=1) as pool:
        begin_s = time.monotonic()
        found = onebox.make_plan(model, loss, optimizer, inputs, targets, pool=pool, fresh=True)
        plan_s = time.monotonic() - begin_s
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan=found.plan, recovery=None) as trainer:
            trainer.step(inputs, targets).item()
            steps_s = []
            for _ in range(3):
                begin_s = time.monotonic()
                trainer.step(inputs, targets).item()
                steps_s.append(time.monotonic() - begin_s)
    return plan_s, statistics.median(steps_s)


def started(layers: int) -> float:
    """Return the seconds from a trainer to its first loss on two CPU workers."""
    torch.manual_seed(0)
    model = Stack(layers, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.open("cpu*2", threads=1) as pool:
        begin_s = time.monotonic()
        with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, recovery=None) as trainer:
            trainer.step(*batch()).item()
            return time.monotonic() - begin_s


def auto_wait(layers: int) -> tuple[float, float, float]:
    """Return the seconds until the first step of a run with ``plan="auto"`` begins on two CPU workers, nothing of which
    is known before, without captures; those of the captures; and those of a step by its plan.
    """
    torch.manual_seed(0)
    model = Stack(layers, MODEL_WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = batch(MODEL_LENGTH)
    captures_s = [0.0]
    plain_capture = captures.capture

    def timed(*arguments: Any, **options: Any) -> Any:
        begin_s = time.monotonic()
        try:
            return plain_capture(*arguments, **options)
        finally:
            captures_s[0] += time.monotonic() - begin_s

    captures.capture = timed
    with onebox.open("cpu*2", threads=1) as pool:
        begin_s = time.monotonic()
        loss = nn.functional.cross_entropy
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan="auto", recovery=None) as trainer:
            first = trainer.step(inputs, targets)
            wait_s = time.monotonic() - begin_s - captures_s[0]
            first.item()
            steps_s = []
            for _ in range(3):
                begin_s = time.monotonic()
                trainer.step(inputs, targets).item()
                steps_s.append(time.monotonic() - begin_s)
    return wait_s, captures_s[0], statistics.median(steps_s)


MEASURES: dict[str, Callable[[int], Any]] = {
    "workers": workers,
    "message": lambda _: message_us(),
    "started": started,
    "planned": planned,
    "auto_wait": auto_wait,
}


def apart(measure: str, size: int, times: int = 1) -> Any:
    """Return what a process of its own measures, the last of some with the same cache."""
    run = [sys.executable, __file__, "--one", measure, str(size)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        for _ in range(times):
            done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def exponent(costs: Mapping[int, float]) -> float:
    """Return the slope of the logarithms of costs over those of sizes.

    Example:
        >>> round(exponent({1: 2.0, 10: 200.0}), 3)
        2.0
    """
    slope, _ = np.polyfit(np.log(list(costs)), np.log(list(costs.values())), 1)
    return float(slope)


def figure(series: Mapping[str, Mapping[int, float]]) -> Figure:
    """Return the figure of each cost over its size, on logarithmic axes."""
    with style():
        drawn, (axes,) = canvas(4.6)
        colours = (MEASURED, COLOURS["B"], COLOURS["W"], COLOURS["F"], COLOURS["transfer"])
        for (name, costs), colour, marker in zip(series.items(), colours, "os^Dv", strict=False):
            label = f"{name}: exponent {exponent(costs):.2f}" if len(costs) > 1 else name
            axes.loglog(list(costs), list(costs.values()), marker=marker, color=colour, lw=1.4, label=label)
        axes.set_xlabel("workers, segments times devices, or layers")
        axes.set_ylabel("cost")
        axes.grid(which="major")
        axes.legend(loc="upper left")
        headline(drawn, "How costs grow")
    return drawn


def measure_workers(rounds: int, series: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Measure pools, the client's part of a step, and a message; the numbers of workers in turn."""
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in WORKERS}
    for _ in range(rounds):
        for size, values in found.items():
            values.append(apart("workers", size))
    opened_s, client_ms = ({size: [row[at] for row in rows] for size, rows in found.items()} for at in (0, 1))
    series["open, s"] = {size: statistics.median(values) for size, values in opened_s.items()}
    series["client, ms a step"] = {size: statistics.median(values) for size, values in client_ms.items()}
    show(
        "A pool of emulated workers",
        ["workers", "opened, s", "the client's processor, ms a step"],
        [[str(size), spread(opened_s[size]), spread(client_ms[size])] for size in WORKERS],
    )
    trips = [apart("message", 2) for _ in range(rounds)]
    show("A short message between two CPU workers, one way", ["us"], [[spread(trips, 1)]])
    return {
        f"open_s_{WORKERS[-1]}": series["open, s"][WORKERS[-1]],
        **{f"client_ms_{size}": value for size, value in series["client, ms a step"].items()},
        "message_us": statistics.median(trips),
    }


def measure_plans(sizes: Sequence[str], seeds: int, series: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Measure searches for plans."""
    rows = plan_rows(sizes, range(seeds))
    result: dict[str, Any] = {}
    shown, costs = [], {}
    for size in sizes:
        spent, near = ([row[key] for row in rows if row["size"] == size] for key in ("processor_s", "of_bound"))
        segments, devices = map(int, size.split("x"))
        costs[segments * devices] = statistics.median(spent)
        result |= {f"plan_s_{size}": statistics.median(spent), f"share_of_bound_{size}": statistics.median(near)}
        shown.append([size, spread(spent), spread(near)])
    series["plan, s"] = costs
    show("A search for a plan", ["segments x devices", "processor, s", "least step over predicted"], shown)
    return result


def measure_model(layers: int, rounds: int) -> dict[str, Any]:
    """Measure planning of a transformer against its steps."""
    pairs = [apart("planned", layers) for _ in range(rounds)]
    over = [plan_s / (6 * step_s + 10) for plan_s, step_s in pairs]
    show(
        f"A plan for {layers} layers of width {MODEL_WIDTH}, measured anew",
        ["plan, s", "step, s", "plan over six steps and 10 s"],
        [[*(spread(values) for values in zip(*pairs, strict=True)), spread(over)]],
    )
    waits = [apart("auto_wait", layers) for _ in range(rounds)]
    show(
        f'The first step of {layers} layers with plan="auto", nothing of which is known before',
        ["wait, s", "captures besides, s", "step by its plan, s"],
        [[spread(values) for values in zip(*waits, strict=True)]],
    )
    return {
        f"plan_s_{layers}_layers": statistics.median(plan_s for plan_s, _ in pairs),
        "plan_over_steps": max(over),
        "auto_wait_s": statistics.median(wait_s for wait_s, _, _ in waits),
    }


def measure_captures(rounds: int, series: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Measure captures."""
    rows = capture_rows(LAYERS)
    whole = {row["layers"]: row["capture_s"] + row["model_s"] + row["segments_s"] for row in rows}
    series["capture, s"] = whole
    starts = [apart("started", START_LAYERS, times=2) for _ in range(rounds)]
    result = {
        f"capture_s_{LAYERS[-1]}_layers": whole[LAYERS[-1]],
        "second_start_s": statistics.median(starts),
        "client_peak_over_model": 1 + max(row["peak_mb"] / row["model_mb"] for row in capture_rows([6], 2048)),
        "captures_100_lengths": captures_of_lengths(LENGTHS)["captures"],
    }
    show(
        "Captures, one core",
        ["layers", "capture, s", "model, s", "programs of all segments, s"],
        [[str(row[key]) for key in ("layers", "capture_s", "model_s", "segments_s")] for row in rows],
    )
    show(f"First loss of {START_LAYERS} layers, in the second process", ["s"], [[spread(starts)]])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each start, pool and step")
    parser.add_argument("--long", action="store_true", help="the largest problems and models, too; half an hour")
    parser.add_argument("--figure", type=Path, help="a file for the figure, .svg, .png or .pdf")
    parser.add_argument("--one", nargs=2, metavar=("MEASURE", "SIZE"), help="measure here: for this program's own use")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        measure, size = options.one
        print(json.dumps(MEASURES[measure](int(size))))
        return
    series: dict[str, dict[int, float]] = {}
    result: dict[str, Any] = {}
    whole_runs = options.rounds if options.long else 1
    if "start" in options.parts:
        result |= show_commands(options.rounds)
    if "workers" in options.parts:
        result |= measure_workers(options.rounds, series)
    if "plans" in options.parts:
        result |= measure_plans(LONG_PLANS if options.long else PLANS, 3 if options.long else 1, series)
    if "model" in options.parts:
        result |= measure_model(LONG_MODEL_LAYERS if options.long else MODEL_LAYERS, whole_runs)
    if "captures" in options.parts:
        result |= measure_captures(whole_runs, series)
    result["exponents"] = {name: round(exponent(costs), 2) for name, costs in series.items() if len(costs) > 1}
    show("Exponents", ["cost", "exponent"], [[name, f"{found:.2f}"] for name, found in result["exponents"].items()])
    if options.figure is not None:
        save(figure(series), options.figure)
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
