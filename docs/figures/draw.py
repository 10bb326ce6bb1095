"""The pictures of README and docs, as SVG and PNG files in docs/images.

They are drawn from recorded values, so that the same files come out everywhere: plan, memory, timeline and topology
from recorded.json beside this file, scaling and prediction error from the tables in benchmarks/results.md.

    python docs/figures/draw.py [--folder FOLDER]   draws them; make figures does so
    python docs/figures/draw.py --record step       measures a part of recorded.json anew, in half a minute; the other
                                                    part is topology, which takes root
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from PIL import Image

from onebox.drawing import (
    MemoryRow,
    Place,
    PlaceLink,
    StepChart,
    memory_figure,
    save,
    step_figure,
    topology_figure,
)
from onebox.drawing.style import COLOURS, GRID, MEASURED, canvas, headline, legend, matplotlib, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded.json"
RESULTS = HERE.parents[1] / "benchmarks" / "results.md"
IMAGES = HERE.parent / "images"
_COLOURS = 64

MARKERS = ("o", "s", "^")
SERIES = (MEASURED, COLOURS["B"], COLOURS["W"])
"""A series has a colour and a marker of its own, so that it is known without its colour."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What was recorded of a plan and its run, and of a pool.

    Args:
        plan: The plan in a line.
        predicted: Its predicted step.
        measured: The same step as it was measured.
        memory: The memory of each device, predicted and measured.
        emulated: Numbers of the emulated devices.
        places: The places of the pool.
        links: The links between these.
    """

    plan: str
    predicted: StepChart
    measured: StepChart
    memory: tuple[MemoryRow, ...]
    emulated: tuple[int, ...]
    places: tuple[Place, ...]
    links: tuple[PlaceLink, ...]


def main() -> None:
    """Draw all figures, or record their values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=IMAGES, help="folder of the files; docs/images without it")
    parser.add_argument("--record", choices=("step", "topology"), help="measure one part of recorded.json anew")
    options = parser.parse_args()
    if options.record:
        found = replace(recorded(), **(record_step() if options.record == "step" else record_topology()))
        RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    for name, draw in FIGURES.items():
        print(*write(draw(), options.folder / name))


def write(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write a figure as an SVG file, and as a PNG file of few colours, which is a third as large.

    Args:
        figure: The figure.
        path: The files without their suffixes.
    """
    vector, raster = path.with_suffix(".svg"), path.with_suffix(".png")
    save(figure, vector)
    save(figure, raster)
    with Image.open(raster) as image:
        image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(raster, optimize=True)
    return vector, raster


def record_step() -> dict[str, Any]:
    """Plan and train a small language model on emulated devices with links of 100 Mbit/s; return what happened."""
    import onebox
    from onebox.cli.options.jobs import PlanConfig
    from onebox.cli.planning import job_of
    from onebox.cli.training.run_setup import load_data
    from onebox.engine.steps.step_chart import measured_chart
    from onebox.plan import predict, simulated_chart
    from onebox.report.figures.memory_figure import measured_rows

    links = dict.fromkeys(combinations(range(4), 2), onebox.Link(latency_s=3e-4, bandwidth_bps=1.25e7))
    with onebox.open(POOL, threads=1, links=links, memory=MEMORY) as pool:
        config = PlanConfig(model="gpt").resolved()
        model, loss, optimizer, *batch = job_of(config, load_data(config))
        planned = onebox.make_plan(model, loss, optimizer, *batch, pool=pool, micro_batches=[8], fresh=True)
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan=planned.plan) as trainer:
            for _ in range(STEPS):
                trainer.step(*batch)
                trainer.wait()
            events, curves = trainer.events(), trainer.predicted_curves(*batch)
        _, simulation = predict(planned.problem, planned.plan)
        budgets = {device.number: device.memory_bytes for device in pool.devices}
        rows = measured_rows(curves, events, STEPS - 1, budgets)
        emulated = tuple(device.number for device in pool.devices if device.emulated)
    return {
        "plan": planned.plan.describe(),
        "predicted": simulated_chart(simulation),
        "measured": measured_chart(events, STEPS - 1),
        "memory": rows,
        "emulated": emulated,
    }


def record_topology() -> dict[str, Any]:
    """Measure the links between three hosts in network namespaces, and return what is drawn; this takes root."""
    import onebox
    from onebox.pool.topology_view import places_of

    sys.path.insert(0, str(HERE.parents[1]))
    from tests.net.fleet import Fleet
    from tests.net.hosts import Network

    with (
        tempfile.TemporaryDirectory() as folder,
        Network([*HOSTS, "client"]) as network,
        Fleet(network, Path(folder)) as fleet,
    ):
        for name in HOSTS:
            fleet.pair(name)
        fleet.start(list(HOSTS), "--cores", "2")
        for name, rate in HOSTS.items():
            network[name].limit(rate)
        with fleet.client(), onebox.open(",".join(f"{network[n].address}/cpu*2" for n in HOSTS), threads=1) as pool:
            profile = pool.profile(fresh=True, cache=False)
            names = {network[name].address: name for name in HOSTS}
            places, links = places_of([replace(device, host=names[device.host]) for device in pool.devices], profile)
            return {"places": places, "links": links}


POOL, MEMORY, STEPS = "sim*2@0.1,sim*2@0.05", "16MiB", 6

HOSTS = {"lab1": 1_000_000_000, "lab2": 1_000_000_000, "lab3": 100_000_000}
"""Bits per second in and out of each host of the topology."""


def recorded() -> Recorded:
    """Return the recorded values."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=Recorded)


def plan() -> Figure:
    """Return the figure of a planned step, as ``onebox plan --figure`` draws it."""
    found = recorded()
    return step_figure([found.predicted], title=found.plan, emulated=found.emulated)


def timeline() -> Figure:
    """Return the figure of a step, predicted and measured, as ``onebox train`` leaves it in a run's folder."""
    found = recorded()
    return step_figure([found.predicted, found.measured], title=found.plan, emulated=found.emulated)


def memory() -> Figure:
    """Return the figure of the memory over a step, predicted and measured."""
    found = recorded()
    return memory_figure(found.memory, title=found.plan, emulated=found.emulated)


def topology() -> Figure:
    """Return the figure of a pool, as ``onebox profile --figure`` draws it."""
    found = recorded()
    return topology_figure(found.places, found.links)


def scaling() -> Figure:
    """Return the figure of what two workers reach of two independent copies, and DistributedDataParallel."""
    names = {"onebox, 2 workers": "onebox", "DDP on Gloo, 2 ranks": "DDP on Gloo"}
    models = {"cnn": "CNN", "mlp": "MLP"}
    found = {
        (models[cells[0]], names[cells[1]]): _spread(cells[3])
        for cells in table("scaling.py")
        if cells[0] in models and cells[1] in names
    }
    with style():
        figure, (axes,) = canvas(3.1)
        for place, ((_, side), (middle, least, most)) in enumerate(found.items()):
            series = list(names.values()).index(side)
            look: dict[str, Any] = {"color": SERIES[series], "marker": MARKERS[series], "ms": 7, "capsize": 4}
            spread = [[100 * (middle - least)], [100 * (most - middle)]]
            axes.errorbar(100 * middle, -place, xerr=spread, lw=1.6, **look)
            axes.text(100 * middle, 0.18 - place, f"{100 * middle:.0f} %", ha="center")
        axes.axvline(100, color=COLOURS["sum"], lw=1.0, ls=(0, (4, 3)), zorder=0)
        axes.set_yticks(range(0, -len(found), -1), [f"{model}, {side}" for model, side in found])
        axes.set_ylim(-len(found) + 0.4, 0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("two workers, in % of two independent copies on the same two cores; median, least and most")
        headline(figure, "Scaling to two workers on one machine")
    return figure


def prediction() -> Figure:
    """Return the figure of predicted and measured times of steps."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cells in table("prediction.py"):
        if len(cells) in (6, 7) and cells[1] in ("cpu*2", "emulated"):  # 7 with corrected predictions
            name = "on CPU workers" if cells[1] == "cpu*2" else "on emulated devices"
            series.setdefault(name, []).append((float(cells[2]), _spread(cells[3])[0]))
        elif len(cells) == 4 and re.fullmatch(r"[\d.]+", cells[1]):
            series.setdefault("on emulated devices, slow links", []).append((float(cells[1]), _spread(cells[2])[0]))
    points = [pair for pairs in series.values() for pair in pairs]
    errors = [abs(expected / measured - 1) for expected, measured in points]
    ends = [min(min(pair) for pair in points) * 0.85, max(max(pair) for pair in points) * 1.15]
    with style():
        figure, (axes,) = canvas(5.6, width_in=7.5)
        axes.fill_between(ends, [0.95 * end for end in ends], [1.05 * end for end in ends], color=GRID, lw=0, zorder=0)
        axes.plot(ends, ends, color=COLOURS["transfer"], lw=0.9, zorder=1)
        for number, (name, pairs) in enumerate(sorted(series.items())):
            look = {"color": SERIES[number], "marker": MARKERS[number], "label": name}
            axes.scatter(*zip(*pairs, strict=True), s=34, edgecolors="white", linewidths=0.6, zorder=2, **look)
        for axis, set_scale, set_limits in (
            (axes.xaxis, axes.set_xscale, axes.set_xlim),
            (axes.yaxis, axes.set_yscale, axes.set_ylim),
        ):
            set_scale("log")
            set_limits(*ends)
            axis.set_major_locator(matplotlib("ticker").FixedLocator([50, 100, 200, 400]))
            axis.set_major_formatter(matplotlib("ticker").FormatStrFormatter("%d"))
            axis.set_minor_locator(matplotlib("ticker").NullLocator())
        axes.set_aspect("equal")
        axes.grid()
        axes.set_xlabel("predicted step in ms")
        axes.set_ylabel("measured step in ms")
        band = matplotlib("patches").Patch(facecolor=GRID, label="within 5 %")
        legend(figure, [*axes.get_legend_handles_labels()[0], band], 1.2)
        mean = sum(errors) / len(errors)
        told = f"mean error {mean:.1%}, largest {max(errors):.1%}"
        headline(figure, f"{len(points)} plans, predicted and measured: {told}")
    return figure


def table(benchmark: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables of a benchmark's section in benchmarks/results.md."""
    _, _, after = RESULTS.read_text().partition(f"\n## {benchmark}:")
    for line in after.partition("\n## ")[0].splitlines():
        if line.startswith(("│", "|")):
            yield [cell.strip() for cell in re.split(r"[│|]", line)[1:-1]]


def _spread(cell: str) -> tuple[float, float, float]:
    """Return the median, the least and the most of a cell such as ``0.979 (0.973 to 1.149)``."""
    middle, least, most = map(float, re.fullmatch(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", cell).groups())
    return middle, least, most


FIGURES: dict[str, Callable[[], Figure]] = {
    "plan": plan,
    "memory": memory,
    "timeline": timeline,
    "topology": topology,
    "scaling": scaling,
    "prediction": prediction,
}

if __name__ == "__main__":
    main()
