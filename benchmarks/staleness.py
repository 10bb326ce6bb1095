"""What gradients that are a step late cost in accuracy, and what each treatment of them wins back, on real data.

Usage: python benchmarks/staleness.py [--json] [--long] [--tasks mnist,cifar,gpt] [--seeds 3] [--log FILE] [--only-read]

By default the task that is trained in seconds, with one seed; all three take hours, with three seeds, by ``--long``.

Each run trains through onebox on one worker of one thread: synchronously; with a staleness of one and no treatment; and
with each treatment. A run's outcome is a line of the log: what is there is not run again, so that the benchmark can be
stopped and goes on where it was. Seeds come one after another, each with everything else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import finish, show, spread
from staleness_sides import RULES, SIDES, auto, through, warm_up
from staleness_tasks import DATA, TASKS

import onebox

POINTS = 0.5
"""A treated run may have so many points of accuracy less than the synchronous one."""

PART = 0.01
"""Or its loss may be higher by this part of it, where a loss is what counts."""

QUICK = "mnist"
"""The task by default."""

BY_LOSS = ("gpt",)
"""Tasks that are judged by their loss: what comes next in a text is never certain."""

Key = tuple[str, str, str, int]
Found = Mapping[Key, Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", help=f"{QUICK}; with --long {','.join(TASKS)}")
    parser.add_argument("--seeds", type=int, help="1; with --long 3")
    parser.add_argument("--long", action="store_true", help="all tasks; hours")
    parser.add_argument("--log", type=Path, default=Path("runs/staleness.jsonl"))
    parser.add_argument("--only-read", action="store_true", help="show what is in the log, and run nothing")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    tasks = (asked.tasks or (",".join(TASKS) if asked.long else QUICK)).split(",")
    seeds = (3 if asked.long else 1) if asked.seeds is None else asked.seeds
    if not DATA.exists() and set(tasks) - {"gpt"}:
        sys.exit(f"{DATA} is not there: --tasks gpt needs no data besides Python itself")
    torch.set_num_threads(1)
    wanted = [(t, r, s, seed) for seed in range(seeds) for t in tasks for r in RULES for s in SIDES]
    found = _read(asked.log)
    if not asked.only_read:
        _run([key for key in wanted if key not in found], asked.log)
        found = _read(asked.log)
    _report({key: found[key] for key in wanted if key in found}, tasks, as_json=asked.json)


def _settings(name: str, rule: str) -> dict[str, Any]:
    """Return what a run in the log must have been made with."""
    task = TASKS[name]
    return {
        "steps": task.steps,
        "batch": task.batch,
        "rate": task.rates[rule],
        "warm_up": warm_up(task),
        "clip": task.clip,
    }


def _read(log: Path) -> dict[Key, Mapping[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    made = [json.loads(line) for line in lines]
    return {
        (one["task"], one["rule"], one["side"], one["seed"]): one
        for one in made
        if all(one.get(key) == value for key, value in _settings(one["task"], one["rule"]).items())
    }


def _run(missing: Sequence[Key], log: Path) -> None:
    if not missing:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with onebox.open("cpu", threads=1) as pool:
        for name, rule, side, seed in missing:
            outcome = through(pool, name, rule, side, seed)
            line = {"task": name, "rule": rule, "side": side, "seed": seed, **_settings(name, rule)}
            with log.open("a") as file:
                file.write(json.dumps(line | dataclasses.asdict(outcome)) + "\n")
            print(f"{name} {rule} {side} seed {seed}: {outcome}", file=sys.stderr, flush=True)


def _report(found: Found, tasks: Sequence[str], *, as_json: bool) -> None:
    rows = []
    result: dict[str, Any] = {}
    for task in tasks:
        for rule in RULES:
            chosen = auto(rule)[0]
            there = {side: {seed for t, r, s, seed in found if (t, r, s) == (task, rule, side)} for side in SIDES}
            seeds = sorted(there["sync"] & there[chosen])
            if not seeds:  # sides are compared over the same seeds
                continue
            shown = [side for side in SIDES if there[side] >= set(seeds)]
            runs = {side: [found[task, rule, side, seed] for seed in seeds] for side in shown}
            for side, each in runs.items():
                losses, right = ([float(one[what]) for one in each] for what in ("loss", "accuracy"))
                late = sorted({int(delay) for one in each for delay in one["delays"]})
                name = f"{side} (auto)" if side == chosen else side
                rows.append([task, rule, name, str(len(each)), spread(losses), spread(right, 2), str(late)])
            sums = {side: _summary(each) for side, each in runs.items()}
            result[f"{task} {rule}"] = {
                "sync": sums["sync"],
                "stale": sums.get("none"),
                "auto": {"delay": chosen, **sums[chosen], "within": _within(task, sums["sync"], sums[chosen])},
            }
    columns = ["task", "optimizer", "late gradients", "seeds", "loss", "accuracy, %", "delays"]
    show("Loss and accuracy on what was not trained on", columns, rows)
    finish(result, as_json=as_json)


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means over seeds."""
    return {what: statistics.fmean(float(one[what]) for one in runs) for what in ("loss", "accuracy")}


def _within(task: str, sync: Mapping[str, float], treated: Mapping[str, float]) -> bool:
    if task in BY_LOSS:
        return treated["loss"] <= sync["loss"] * (1 + PART)
    return treated["accuracy"] >= sync["accuracy"] - POINTS


if __name__ == "__main__":
    main()
