"""What does a virtual device cost a script that was written for one machine?

The same script runs in its own process and on one worker, one thread each, in turn. The published system (Yang 2018)
takes 2.44 times as long on a remote GPU as on a local one. Then: what the client does for an operator, how long a token
of generated text takes, how often a script waits for its device, and how much faster several workers are (published:
1.6 times with two, 2.2 with four).

The CNN is that of PyTorch's MNIST example (two convolutions of 3 x 3 with 32 and 64 channels, two linear layers), the
MLP has layers of 784, 1024, 1024 and 10; both are trained by SGD with momentum on float32 images of 28 x 28 that come
from the host in each step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from common import BATCH, Peer, finish, show, spread
from eager_client import against_cpu, geometric_mean, in_loops
from eager_script import READ_EVERY
from eager_waits import measure_waits

PUBLISHED = 2.44
"""Time on a remote GPU over that on a local one (Yang 2018)."""

PUBLISHED_SPEEDUPS = {2: 1.6, 4: 2.2}

STEPS = {"cnn": 12, "mlp": 80}
THREAD_STEPS = 8
LATENCY_S = 0.03

TOKENS = 96

PARTS = ("ratio", "client", "generation", "waits", "workers")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool", default="cpu", help="the device of the worker")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    if "ratio" in options.parts:
        result |= compare(options.pool, options.rounds)
    if "client" in options.parts:
        result |= client(options.pool)
    if "generation" in options.parts:
        result |= generation(options.pool, options.rounds)
    if "waits" in options.parts:
        result |= waits(options.pool)
    if "workers" in options.parts:
        result |= workers(options.pool, max(3, options.rounds - 1))
    finish(result, as_json=options.json)


# ---- one worker against the script's own process


def compare(pool: str, rounds: int) -> dict[str, float]:
    """Compare, with the loss read in every tenth step and in every one."""
    rows: list[list[str]] = []
    result: dict[str, float] = {}
    local_device = pool if pool.startswith("cuda") else "cpu"
    for name, steps in STEPS.items():
        with ExitStack() as stack:
            sides = [
                peer(stack, "one", name, local_device),
                peer(stack, "one", name, "vgpu:0", pool),
            ]
            times = alternate(sides, steps, rounds)
        for every, (local, remote) in times.items():
            ratios = [ours / theirs for ours, theirs in zip(remote, local, strict=True)]
            key = f"{name}_ratio" if every == READ_EVERY else f"{name}_ratio_read_each_step"
            result[key] = round(statistics.median(ratios), 4)
            read = f"every {every} steps" if every > 1 else "every step"
            rows.append([name, read, spread(local, 2), spread(remote, 2), spread(ratios)])
    rows.append(["published", "", "", "", f"{PUBLISHED}"])
    show(
        f"A script on one worker against its own process, batch {BATCH}, SGD, one thread each: median (least to most)",
        ["model", "loss read", "local ms/step", "worker ms/step", "worker / local"],
        rows,
    )
    return result


def alternate(sides: Sequence[Peer], steps: int, rounds: int) -> dict[int, list[list[float]]]:
    """Return milliseconds a step: by how often the loss is read, for each side, a figure a round."""
    times: dict[int, list[list[float]]] = {every: [[] for _ in sides] for every in (READ_EVERY, 1)}
    for side in sides:
        milliseconds(side, steps // 2, READ_EVERY)
    for _ in range(rounds):
        for every, of_sides in times.items():
            for side, of_side in zip(sides, of_sides, strict=True):
                of_side.append(milliseconds(side, steps, every))
    return times


def peer(stack: ExitStack, *arguments: str) -> Peer:
    """Start a script in a process of its own."""
    started = Peer(*arguments, script="eager_script.py")
    stack.callback(started.close)
    return started


def milliseconds(side: Peer, steps: int, every: int) -> float:
    """Run steps and return the milliseconds of one."""
    side.start(f"{steps} {every}")
    return side.seconds() / steps * 1e3


# ---- what the client does


def client(pool: str) -> dict[str, Any]:
    """Measure what the client does for an operator when shapes repeat, and what PyTorch does for one on a CPU."""
    runs, operators = in_loops(pool), against_cpu(pool)
    rows = [[name, spread(wall, 2), spread(processor, 2)] for name, (wall, processor) in runs.items()]
    show(
        "What the client does for an operator when shapes repeat: median (least to most)",
        ["what", "µs per operator", "of its processor"],
        rows,
    )
    shares = {name: ratios(ours, theirs) for name, (ours, theirs) in operators.items()}
    show(
        "Ten small operators, recorded and sent, against PyTorch's own on a CPU: median (least to most)",
        ["operator", "µs", "µs on a CPU", "ratio"],
        [[name, *(spread(times, 2) for times in operators[name]), spread(share, 2)] for name, share in shares.items()],
    )
    medians = [statistics.median(share) for share in shares.values()]
    return {
        "client_us_per_op": round(max(statistics.median(wall) for wall, _ in runs.values()), 2),
        "client_cpu_us_per_op": round(max(statistics.median(processor) for _, processor in runs.values()), 2),
        "operator_over_cpu": round(geometric_mean(medians), 3),
        "operator_over_cpu_most": round(max(medians), 3),
    }


# ---- text, a token at a time


def generation(pool: str, rounds: int) -> dict[str, float]:
    """Compare greedy decoding, each token of which is read, with keys and values in a cache that grows or does not."""
    local_device = pool if pool.startswith("cuda") else "cpu"
    rows: list[list[str]] = []
    result: dict[str, float] = {}
    for name, cache in (("generation_ratio", "static"), ("generation_ratio_growing", "growing")):
        with ExitStack() as stack:
            sides = [
                peer(stack, "decode", cache, local_device),
                peer(stack, "decode", cache, "vgpu:0", pool),
            ]
            for side in sides:
                milliseconds(side, TOKENS, 0)
            times: list[list[float]] = [[], []]
            for _ in range(rounds):
                for side, of_side in zip(sides, times, strict=True):
                    of_side.append(milliseconds(side, TOKENS, 0))
        shares = ratios(times[1], times[0])
        result[name] = round(statistics.median(shares), 3)
        rows.append([cache, spread(times[0], 2), spread(times[1], 2), spread(shares)])
    show(
        f"Greedy decoding of {TOKENS} tokens by a GPT of 4 layers of 256, each token read: median (least to most)",
        ["cache", "local ms/token", "worker ms/token", "worker / local"],
        rows,
    )
    return result


# ---- round trips


def waits(pool: str) -> dict[str, Any]:
    """Count how often steps wait for the worker behind a slow channel."""
    found = measure_waits(pool if pool.startswith("cuda") else several(pool, 2), LATENCY_S)
    show(
        f"Round trips of a step, with {LATENCY_S * 1e3:.0f} ms of emulated latency each way",
        ["step", "first", "later", "messages", "client ms"],
        [
            [name, str(step.first), f"{step.later:g}", f"{step.messages:g}", f"{step.client_ms:.1f}"]
            for name, step in found.items()
        ],
    )
    return {
        "waits_per_step": next(iter(found.values())).later,
        "waits": {name: {"first": step.first, "later": step.later} for name, step in found.items()},
    }


# ---- several workers


def workers(pool: str, rounds: int) -> dict[str, float]:
    """Run the published experiment: one, two and four workers, a thread each, gradients averaged on the host."""
    counts = (1, *PUBLISHED_SPEEDUPS)
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        teams = {count: peer(stack, "threads", "cnn", str(count), several(pool, count)) for count in counts}
        copies = [peer(stack, "threads", "cnn", "1", pool) for _ in range(max(counts))]
        milliseconds(copies[0], 2, 0)
        for team in (*teams.values(), *copies):
            milliseconds(team, 2, 0)
        for _ in range(rounds):
            for count in counts:
                rates.setdefault(("team", count), []).append(rate([teams[count]], count))
                rates.setdefault(("copies", count), []).append(rate(copies[:count], count))
    rows, result = [], {}
    for count in counts:
        speedups = ratios(rates["team", count], rates["team", 1])
        ceilings = ratios(rates["copies", count], rates["copies", 1])
        published = str(PUBLISHED_SPEEDUPS.get(count, ""))
        rows.append([str(count), spread(rates["team", count], 0), spread(speedups, 2), spread(ceilings, 2), published])
        result[f"speedup_{count}"] = round(statistics.median(speedups), 4)
        result[f"ceiling_{count}"] = round(statistics.median(ceilings), 4)
    show(
        f"The published experiment on the CNN, batch {BATCH} each: median (least to most); the ceiling is as many "
        "scripts at once, each with one worker",
        ["workers", "samples/s", "speed-up", "ceiling", "published"],
        rows,
    )
    return {key: value for key, value in result.items() if not key.endswith("_1")}


def several(pool: str, count: int) -> str:
    """Return a pool of several devices like one."""
    return ",".join(f"cuda:{k}" for k in range(count)) if pool.startswith("cuda") else f"{pool}*{count}"


def rate(running: Sequence[Peer], count: int) -> float:
    """Return samples per second of scripts that run at once, with so many workers in all."""
    for script in running:
        script.start(f"{THREAD_STEPS} 0")
    return count * BATCH * THREAD_STEPS / max(script.seconds() for script in running)


def ratios(parts: list[float], wholes: list[float]) -> list[float]:
    """Return the ratios of two series, round by round."""
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]


if __name__ == "__main__":
    main()
