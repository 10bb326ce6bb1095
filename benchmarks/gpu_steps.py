"""How long does a training step take on a GPU's worker, compared with plain PyTorch on the same GPU?

ResNet-50 (64 pictures) and GPT-2 small (8 texts of 1,024 tokens), in float32 and bf16: eager, ``torch.compile`` and
CUDA graphs in this process, and a worker over loopback. All take turns in every round, in another order each time; a
time ends when the device has finished. The target is a median of remote over eager of at most 1.02 for each model.

``--tiny`` tries it out without a GPU; its figures say nothing about one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import commit, finish, machine, show, spread
from gpu_models import CASES, TINY
from gpu_sides import Side, sides

import onebox

SIDES = ("eager", "remote", "compile", "graph")
TARGET = 1.02

WARM_UP = 3
"""Steps of each side before the first round."""

ROUND_S = 1.0
"""About how long the steps of a side in a round take."""

CLOSE = 0.05
"""Relative difference of the first losses beyond which sides do not compute the same."""


@dataclass(kw_only=True)
class Measured:
    """What was measured of a model.

    Args:
        ms: For each side the milliseconds of a step in each round.
        losses: For each side the loss after the steps before the first round.
        errors: Why a side could not take part.
    """

    ms: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return medians, the least and the most, and ratios to eager of the same round."""
        found: dict[str, Any] = {"errors": self.errors, "losses": self.losses}
        for name, times in self.ms.items():
            found[f"{name}_ms"] = round(statistics.median(times), 3)
            found[f"{name}_ms_spread"] = [round(min(times), 3), round(max(times), 3)]
            if name != "eager" and "eager" in self.ms:
                ratios = self.ratios(name)
                found[f"{name}_over_eager"] = round(statistics.median(ratios), 4)
                found[f"{name}_over_eager_spread"] = [round(min(ratios), 4), round(max(ratios), 4)]
        found["rounds"] = len(next(iter(self.ms.values()), []))
        return found

    def ratios(self, name: str) -> list[float]:
        """Return times of a side over those of eager."""
        return [ours / theirs for ours, theirs in zip(self.ms[name], self.ms["eager"], strict=True)]


def main() -> None:
    """Measure and print; exit status 1 where eager or remote failed, or losses differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--pool", default="cuda", help="one device of this machine: cuda, cuda:1, cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds; rounds that do not fit are left out")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--timeline", type=Path, metavar="FOLDER", help="write a trace of each side of each model there"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, without TorchInductor")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.pool == "cuda" else torch.device(options.pool)
    chosen = [name for name in options.sides if name != "graph" or device.type == "cuda"]
    kinds = [(model, precision) for precision in options.precisions for model in options.models]
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "target": TARGET}
    rows, wrong = [], []
    if options.tiny:
        torch.set_num_threads(1)
    with onebox.open(str(device), threads=1 if options.tiny else None) as pool:
        begin_s = time.monotonic()
        for place, (model, precision) in enumerate(kinds):
            case = (TINY if options.tiny else CASES)[model]
            until_s = begin_s + options.limit * (place + 1) / len(kinds)
            backend = "aot_eager" if options.tiny else "inductor"
            makers = sides(case, precision, device, pool, chosen, backend)
            name = f"{model}_{precision}"
            found = measure(makers, options.rounds, until_s, options.timeline and options.timeline / name)
            result[name] = found.figures()
            wrong += [f"{name}: {problem}" for problem in problems(found)]
            rows += [row(name, side, found) for side in found.ms]
            rows += [[name, side, "", error.splitlines()[0][:60]] for side, error in found.errors.items()]
    ratios = [result["_".join(kind)].get("remote_over_eager") for kind in kinds]
    result["remote_over_eager"] = max((ratio for ratio in ratios if ratio is not None), default=None)
    show("A training step: median (least to most)", ["model", "side", "ms/step", "over eager"], rows)
    result["problems"] = wrong
    finish(result, as_json=options.json)
    sys.exit(1 if wrong else 0)


def measure(makers: Mapping[str, Any], rounds: int, until_s: float, traces: Path | None) -> Measured:
    """Make the sides, let them take turns, and close them.

    Args:
        makers: For each side what makes it.
        rounds: The most.
        until_s: When the last round begins, on the monotonic clock; there is always one.
        traces: Beginning of the names of the traces, where they are asked for.
    """
    found, made = Measured(), dict[str, Side]()
    try:
        for name, make in makers.items():
            try:
                side = made[name] = make()
                side.run(WARM_UP)
                found.losses[name] = side.loss()
            except Exception as error:  # out of memory, or no compiler: the others go on
                found.errors[name] = f"{type(error).__name__}: {error}"
                _close(made.pop(name, None))
        steps = _steps(made)
        names = list(made)
        for number in range(rounds):
            if number and time.monotonic() > until_s:
                break
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found.ms.setdefault(name, []).append(timed(made[name], steps))
        for name, side in made.items():
            if traces is not None:
                try:
                    side.timeline(traces.with_name(f"{traces.name}_{name}.json"))
                except Exception as error:  # the profiler of this driver: the figures are there
                    found.errors[f"{name}, timeline"] = f"{type(error).__name__}: {error}"
    finally:
        for name in list(made):
            _close(made.pop(name))
    return found


def _steps(made: Mapping[str, Side]) -> int:
    """Return the number of steps that take the first side about :data:`ROUND_S`."""
    for side in made.values():
        return max(3, min(50, round(ROUND_S * 1e3 / timed(side, 3))))
    return 0


def timed(side: Side, steps: int) -> float:
    """Return the milliseconds of a step."""
    begin_s = time.perf_counter()
    side.run(steps)
    return (time.perf_counter() - begin_s) / steps * 1e3


def _close(side: Side | None) -> None:
    if side is not None:
        side.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def problems(found: Measured) -> list[str]:
    """Return what makes the figures of no use."""
    wrong = [f"{name} failed: {found.errors[name]}" for name in ("eager", "remote") if name in found.errors]
    for name, loss in found.losses.items():
        if "eager" in found.losses and name != "graph":  # which has stepped on one batch while it was made
            expected = found.losses["eager"]
            if not abs(loss - expected) <= CLOSE * abs(expected):
                wrong.append(f"the loss of {name} is {loss}, that of eager {expected}")
    return wrong


def row(name: str, side: str, found: Measured) -> list[str]:
    """Return a row of the table."""
    ratio = spread(found.ratios(side)) if side != "eager" and "eager" in found.ms else ""
    return [name, side, spread(found.ms[side], 2), ratio]


if __name__ == "__main__":
    main()
