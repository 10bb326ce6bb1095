"""What remote.py measures of the channel: what encryption and acknowledgements cost a training, and a transfer."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from channels import CHANNELS, Client, open_channels
from common import BATCH, MODELS, Budget, batches, make, show, spread
from torch import nn

import onebox
from onebox.wire import spec_of, to_frame
from onebox.wire.protocol.instructions import Get
from onebox.wire.protocol.requests import Put
from tests.kit.slow_channel import slow_channel

WITHOUT = {"encryption": "not encrypted", "acknowledgement": "not acknowledged"}
STEPS = {"cnn": 2, "mlp": 12}
"""Turns are short: what else the machine does is then much the same in those that are compared."""

FAR_S = 0.03
FAR_STEPS = {"cnn": 10, "mlp": 50}
FILLING = 12
"""Steps before those that are counted: more than are under way at once."""

TRANSFER_BYTES = 32 << 20
TRANSFERS = 6

SHARES, FAR_SHARES, TRANSFER_SHARE = {"cnn": 0.42, "mlp": 0.48}, {"cnn": 0.54, "mlp": 0.58}, 0.6
"""Parts of the time after which no further round begins."""


def measure_channel(rounds: int, budget: Budget) -> dict[str, float]:
    """Measure, print tables, and return what belongs into the JSON object."""
    rows: list[list[str]] = []
    result: dict[str, float] = {}
    for name in MODELS:
        with open_channels() as client:
            wall, processor = train_in_turn(name, budget.rounds(rounds, SHARES[name]), client, list(CHANNELS))
        for what in CHANNELS:
            over, more = (
                [ours / theirs - 1 for ours, theirs in zip(sides["as it is"], sides[what], strict=True)]
                for sides in (wall, processor)
            )
            last = [spread([100 * share for share in shares], 1) for shares in (over, more)]
            median = f"{statistics.median(processor[what]):.2f}"
            rows.append([f"{name}, {what}", spread(wall[what], 1), median, *(last if what != "as it is" else ["", ""])])
            for part in [part for part, without in WITHOUT.items() if without == what]:
                for key, found in ((f"{part}_overhead", over), (f"{part}_cpu_overhead", more)):
                    result[key] = max(result.get(key, -1.0), round(statistics.median(found), 4))
    show(
        f"Training over TCP on one worker, batch {BATCH}, one thread: median (least to most)",
        ["channel", "ms/step", "CPU ms/step", "as it is / this - 1, %", "likewise of the CPU, %"],
        rows,
    )
    few = max(3, rounds // 4)
    far = {name: train_far(name, budget.rounds(few, FAR_SHARES[name])) for name in MODELS}
    show(
        f"Training on a worker that is far, nothing read, {round(1000 * FAR_S)} ms each way: median (least to most)",
        ["model", "near, ms/step", "far, ms/step", "far / near"],
        [
            [name, spread(near), spread(away), spread([a / n for a, n in zip(away, near, strict=True)])]
            for name, (near, away) in far.items()
        ],
    )
    ratios = [statistics.median(a / n for a, n in zip(away, near, strict=True)) for near, away in far.values()]
    result["far_ratio"] = round(max(ratios), 4)
    rates = transfer_in_turn(budget.rounds(few, TRANSFER_SHARE))
    show(
        f"Tensors of {TRANSFER_BYTES >> 20} MiB over TCP: median (least to most)",
        ["channel", "to the worker, GB/s", "from the worker, GB/s"],
        [[what, *(spread(each, 2) for each in rates[what])] for what in CHANNELS],
    )
    for key, what in (("encrypted_gb_s", "as it is"), ("unencrypted_gb_s", "not encrypted")):
        result[key] = round(statistics.median(rates[what][0]), 3)
    return result


class Sides(Protocol):
    """A pool of one worker that can be used in several ways."""

    @property
    def pool(self) -> onebox.Pool:
        """The pool."""

    def use(self, name: str) -> None:
        """Use it in one of the ways from now on; nothing may be under way."""


def in_turn(names: Sequence[str], rounds: Iterable[int]) -> Iterator[str]:
    """Yield the names in each round, each round beginning with another one."""
    for turn in rounds:
        first = turn % len(names)
        yield from [*names[first:], *names[:first]]


def train_in_turn(
    name: str, rounds: Iterable[int], sides: Sides, names: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return milliseconds a step by the clock, and of the processors of client and worker, for each way by its name."""
    data = batches(8, BATCH)
    model, optimizer = make(name)
    with onebox.Trainer(
        model, nn.functional.cross_entropy, optimizer, pool=sides.pool, engine=onebox.Engine(trace=False)
    ) as trainer:

        def train(steps: int) -> None:
            for step in range(steps):
                trainer.step(*data[step % len(data)])
            trainer.wait()

        return steps_in_turn(train, STEPS[name], rounds, sides, names)


def steps_in_turn(
    run: Callable[[int], object], steps: int, rounds: Iterable[int], sides: Sides, names: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run steps in each of several ways; return the same as :func:`train_in_turn`.

    Args:
        run: Runs steps, and waits for them.
        steps: Of one turn.
        rounds: Numbers of the turns of each way.
        sides: The ways.
        names: Of them.
    """
    wall: dict[str, list[float]] = {what: [] for what in names}
    processor: dict[str, list[float]] = {what: [] for what in names}
    worker = sides.pool.process_ids[0]
    run(steps)
    for what in in_turn(names, rounds):
        sides.use(what)
        run(1)
        begin, used = time.perf_counter(), time.process_time() + _processor_s(worker)
        run(steps)
        processor[what].append((time.process_time() + _processor_s(worker) - used) / steps * 1e3)
        wall[what].append((time.perf_counter() - begin) / steps * 1e3)
    return wall, processor


def _processor_s(process: int) -> float:
    """Return the processor time of another process, to the nanosecond: ``clock_getcpuclockid`` of POSIX on Linux."""
    return time.clock_gettime((~process << 3) | 2)


def train_far(name: str, rounds: Iterable[int]) -> tuple[list[float], list[float]]:
    """Return milliseconds a step on one worker as it is, and with latency on its channel, without the first steps."""
    model, optimizer = make(name)
    data = batches(8, BATCH)
    loss = nn.functional.cross_entropy
    times: dict[float, list[float]] = {0.0: [], FAR_S: []}
    with slow_channel(FAR_S) as channel, onebox.open("cpu", threads=1) as pool:
        pool.round_trip_s = 2 * FAR_S
        with onebox.Trainer(model, loss, optimizer, pool=pool, engine=onebox.Engine(trace=False)) as trainer:
            for latency_s in (each for _ in itertools.chain([-1], rounds) for each in times):
                channel.latency_s = latency_s
                for step in range(FILLING + FAR_STEPS[name]):
                    trainer.step(*data[step % len(data)])  # returns when an earlier one has been answered
                    if step == FILLING - 1:
                        begin = time.perf_counter()
                times[latency_s].append((time.perf_counter() - begin) / FAR_STEPS[name] * 1e3)
                trainer.wait()
    return times[0.0][1:], times[FAR_S][1:]


def transfer_in_turn(rounds: Iterable[int]) -> dict[str, tuple[list[float], list[float]]]:
    """Return 10^9 bytes a second to the worker and back, for each channel; several tensors are under way at once."""
    rates: dict[str, tuple[list[float], list[float]]] = {what: ([], []) for what in CHANNELS}
    tensor = torch.rand(TRANSFER_BYTES // 4)
    spec, frame = spec_of(tensor), to_frame(tensor)
    with open_channels() as client:
        number = client.pool.new_number()
        put, get = Put((number,), (spec,)), Get((number,))
        _transfer(client, put, [frame])
        for what in in_turn(list(CHANNELS), rounds):
            client.use(what)
            rates[what][0].append(_transfer(client, put, [frame]))
            rates[what][1].append(_transfer(client, get, []))
    return rates


def _transfer(client: Client, message: Put | Get, frames: Sequence[Any]) -> float:
    """Return 10^9 bytes a second of several tensors, of which some are under way at once."""
    begin = time.perf_counter()
    sent = [client.pool.post(0, [message], frames, answer=True) for _ in range(TRANSFERS)]
    for each in sent:
        each.result(60)
    return TRANSFERS * TRANSFER_BYTES / (time.perf_counter() - begin) / 1e9
