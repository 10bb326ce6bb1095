"""How fast, and how well, does a model train over hosts with slow links between them, by onebox and by PyTorch?

Hosts are network namespaces, each with one device, a worker of one thread; the first one is the client's, too. Their
links carry 10, 100 or 1,000 Mbit/s each way, and a packet takes 20 ms from host to host. A character GPT of 5.4 million
parameters reads the source of Python's standard library, 4,096 tokens a step over all hosts together, the same for each
side. The sides (``slow_links_sides.py``): PyTorch's DDP, with its fp16 and PowerSGD hooks, and its post-local SGD, all
on Gloo; and trainers of onebox, without recovery, which no other side has.

- ``speed``: all sides in turn, several times, on links of each rate; and those that choose nothing on ``infinite``
  ones, too, with no limit and no delay. A side takes as many steps in a turn as last ``--seconds``, but one at least;
  sides that exchange something in one of ``--every`` steps only take as many. What counts are seconds per token.
- ``loss``: on the held-out text after ``--tokens``, the same for each side, from the same seeds.
- ``drop``: a run on the fastest link, whose rate drops twice; each time some steps are not looked at.

The figures:

- ``seconds_per_token_over_infinite_RATE``: islands, over themselves on infinite links; the worst number of islands.
- ``loss_penalty_ISLANDS``: loss of islands over that of the synchronous side, less one; the mean over seeds.
- ``faster_than_ddp_RATE``: speed of islands over that of DDP; the worst number of islands.
- ``after_drop_over_best``: the adaptive side over the best static plan after each drop; the worst.
- ``default_over_best_single``: speed of a trainer without any choice over that of a single device, the fastest as all
  are equal; the worst rate, with no more hosts than there are cores.
- ``gate_regret``: the gated side over the best fixed choice in each cell, less one; the worst cell.
- ``bytes_saved``: the part of the synchronous side's bytes that is not sent; the least number of islands' saving.

Each cell goes into the file of ``--keep`` as it is
measured, and is not measured again: parts can be run one at a time. A full run takes some 40 minutes on two cores. It
takes root, ``ip``, ``tc`` and the kernel's TAP driver.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import commit, finish, machine, show, spread
from slow_links_keys import INFINITE, Cell, Cells, Part, append, figures, read
from slow_links_model import SIZES, size_of
from slow_links_sides import DROPPED, SCRIPTS, SIDES, Crew, Process, Setting

from tests.net.fleet import Fleet
from tests.net.hosts import Network, unavailable

RATES = (1000, 100, 10)
"""Mbit/s."""

MOST_S = 15.0
"""Of a side in a cell: after so many seconds it takes no further turn."""

ANSWER_S = 1200.0
"""For how long a process is waited for: a few steps on the slowest link."""

WARM = 3
"""Steps of a side that are not looked at, on links without limit; in the first ones PowerSGD sums exactly."""

LOSS_SIDES = ("sync", "islands")
"""Sides whose losses the figures need."""

WINDOWS = "4096 131072 67108864"
"""Of TCP, bytes: with the kernel's own a connection over 40 ms there and back carries half a Gbit/s."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--parts", nargs="+", default=["speed", "loss", "drop"], choices=["speed", "loss", "drop"])
    parser.add_argument("--rates", nargs="+", type=int, default=list(RATES), help="of links, Mbit/s")
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4], help="hosts, each of them an island")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES), metavar="SIDE")
    parser.add_argument("--loss-sides", nargs="+", default=list(LOSS_SIDES), choices=list(SIDES), metavar="SIDE")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side in a cell")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, about")
    parser.add_argument("--tokens", type=int, default=491_520, help="of a run whose loss is measured")
    parser.add_argument("--seeds", type=int, default=3, help="of those runs")
    parser.add_argument("--every", type=int, default=30, help="inner steps of an island for each outer step")
    parser.add_argument("--outer-rate", type=float, default=0.7, help="the outer learning rate")
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--fragments", type=int, default=1, help="of the model, which islands exchange one at a time")
    parser.add_argument(
        "--overlap", type=int, default=0, help="inner steps during which the sums of an outer one travel"
    )
    parser.add_argument("--compression", default="none", help="codec of outer gradients: none, bf16, int8 or e3m0")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="from host to host")
    parser.add_argument("--settled", type=int, default=6, help="steps after a drop that are not looked at")
    parser.add_argument("--size", default="full", choices=list(SIZES), help="of the model; tiny: to try it out")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step, over all hosts; as the model has")
    parser.add_argument("--keep", type=Path, help="a file of cells: those in it are not measured, others are added")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="more files of cells, which are only read")
    parser.add_argument("--only-read", action="store_true", help="show what the files have, and measure nothing")
    options = parser.parse_args()
    if problem := invalid(options):
        raise SystemExit(problem)
    options.rates = sorted(set(options.rates), reverse=True)
    settings = settings_of(options)
    cells = Cells(read([*options.merge, *([options.keep] if options.keep else [])]), settings)
    if not options.only_read:
        if why := unavailable():
            raise SystemExit(why)
        Benchmark(options, settings, cells).run()
    report(cells, options)


def invalid(options: argparse.Namespace) -> str:
    """Return what is wrong with the options; empty where they are right."""
    size = size_of(options.size, options.batch)
    period = options.every * size.tokens
    if "loss" in options.parts and options.tokens % period:
        return (
            f"--tokens {options.tokens}: islands exchange every {period} tokens ({options.every} steps of "
            f"{size.tokens}); take a multiple, such as {max(1, round(options.tokens / period)) * period}"
        )
    if uneven := [count for count in options.islands if count < 2 or size.batch % count]:
        return f"--islands {uneven[0]}: allowed are divisors of the batch of {size.batch} sequences, from 2"
    if min(options.rates) < 1:
        return f"--rates {min(options.rates)}: allowed are Mbit/s from 1"
    return ""


def settings_of(options: argparse.Namespace) -> dict[Part, dict[str, Any]]:
    """Return for each part what its cells must have been measured with."""
    both = {
        "size": options.size,
        "step_tokens": size_of(options.size, options.batch).tokens,
        "every": options.every,
        "outer_rate": options.outer_rate,
        "outer_momentum": options.outer_momentum,
        "fragments": options.fragments,
        "overlap": options.overlap,
        "compression": options.compression,
    }
    return {
        "speed": {**both, "delay_ms": options.delay_ms},
        "loss": {**both, "tokens": options.tokens},
        "drop": {**both, "delay_ms": options.delay_ms, "settled": options.settled, "from": max(options.rates)},
    }


class Group:
    """Hosts with agents, a client and PyTorch's ranks on them; a context manager.

    Args:
        setting: Without addresses.
        count: Hosts.
        delay_s: Of a packet from host to host.
    """

    def __init__(self, setting: Mapping[str, Any], count: int, delay_s: float) -> None:
        self._setting, self.count, self._delay_s = setting, count, delay_s
        self._stack = ExitStack()
        self._crews: dict[str, Crew] = {}
        self.made: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slow-links-")))
            others = [f"host{number}" for number in range(2, self.count + 1)]
            self._network = network = stack.enter_context(Network(["client", *others], self._delay_s))
            self._hosts = [network[name] for name in ("client", *others)]
            for host in self._hosts:
                for name in ("tcp_wmem", "tcp_rmem"):
                    host.run("sh", "-c", f"echo {WINDOWS} > /proc/sys/net/ipv4/{name}")
            self._fleet = fleet = stack.enter_context(Fleet(network, folder))
            for name in others:
                fleet.pair(name)
            fleet.start(others)
            addresses = tuple(host.address for host in self._hosts)
            setting = Setting(addresses=addresses, **self._setting).text
            environment = {
                **os.environ,
                **fleet.environment("client"),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "XDG_CACHE_HOME": str(folder),  # what the planner measured at another time is not for these links
            }
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            crews: dict[str, list[Process]] = {"torch": [], "onebox": []}
            for rank, host in enumerate(self._hosts):
                env = {**environment, "GLOO_SOCKET_IFNAME": "eth0"}
                arguments = (setting, str(rank), port)
                crews["torch"].append(
                    Process(host, SCRIPTS["torch"], arguments, env=env, output=folder / f"rank{rank}.err")
                )
                stack.callback(crews["torch"][-1].close)
            spec = ",".join(["cpu", *(f"{address}/cpu" for address in addresses[1:])])
            crews["onebox"].append(
                Process(
                    self._hosts[0], SCRIPTS["onebox"], (setting, spec), env=environment, output=folder / "client.err"
                )
            )
            stack.callback(crews["onebox"][-1].close)
            for process in (*crews["torch"], *crews["onebox"]):  # all at once, as each takes a while to end
                stack.callback(process.finish)
            self._crews = {by: Crew(processes, ANSWER_S) for by, processes in crews.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def crew(self, side: str) -> Crew:
        """Return the processes that have a side."""
        return self._crews[SIDES[side].by]

    def make(self, side: str, *, seed: int = 0, steps: int = 0, warm: int = 0) -> dict[str, Any]:
        """Make a side anew; return what its first process says."""
        answer = self.crew(side).ask("make", side=side, seed=seed, steps=steps, warm=warm)[0]
        self.made.add(side)
        return answer

    def drop(self, side: str) -> dict[str, Any]:
        """Close a side."""
        self.made.discard(side)
        return self.crew(side).ask("drop", side=side)[0]

    def limit(self, rate: int) -> None:
        """Let links carry so many Mbit/s, each way, from now on, or anything; the tokens of 8 ms at once, or 64 KiB."""
        for host in self._hosts:
            if rate:
                host.limit(1_000_000 * rate, burst=str(max(65_536, 1000 * rate)))
            else:
                host.unlimit()

    def measure(self) -> list[list[float]]:
        """Let onebox measure the links anew; return the Mbit/s from each host to the others."""
        found: list[list[float]] = self._crews["onebox"].ask("measure")[0]["mbit_per_s"]
        return found

    @property
    def sent_bytes(self) -> float:
        """Bytes that the hosts have sent to one another."""
        return sum(host.traffic_bytes() for host in self._hosts) / 2


class Benchmark:
    """All that is to be measured.

    Args:
        options: Of the command line.
        settings: Of each part.
        cells: What was measured before.
    """

    def __init__(self, options: argparse.Namespace, settings: Mapping[Part, Mapping[str, Any]], cells: Cells) -> None:
        self._options, self._settings, self._cells = options, settings, cells
        self._begin_s = time.monotonic()

    def run(self) -> None:
        """Measure the cells that are missing."""
        options = self._options
        names = ("size", "batch", "every", "outer_rate", "outer_momentum", "fragments", "overlap", "compression")
        setting = {name: getattr(options, name) for name in names}
        for count in options.islands:
            speeds = {rate: self._missing_speeds(count, rate) for rate in (INFINITE, *options.rates)}
            losses = self._missing_losses(count)
            drops = self._missing_drops(count)
            if speeds[INFINITE] or losses:
                with Group(setting, count, 0.0) as group:
                    self._speed(group, INFINITE, speeds.pop(INFINITE))
                    for side, seed in losses:
                        self._loss(group, side, seed)
            if any(speeds.get(rate) for rate in options.rates) or drops:
                with Group(setting, count, 1e-3 * options.delay_ms) as group:
                    for rate in options.rates:
                        self._speed(group, rate, speeds[rate])
                    if drops:
                        self._drop(group)

    def _missing_speeds(self, count: int, rate: int) -> list[str]:
        if "speed" not in self._options.parts:
            return []
        wanted = [side for side in self._options.sides if side not in DROPPED]
        if rate == INFINITE:  # with which there is nothing to choose
            wanted = [side for side in wanted if not SIDES[side].measures and not SIDES[side].codec]
        return [side for side in wanted if ("speed", count, rate, side, 0) not in self._cells]

    def _missing_losses(self, count: int) -> list[tuple[str, int]]:
        """Return sides and seeds; what is synchronous does not depend on the number of hosts."""
        if "loss" not in self._options.parts:
            return []
        first = count == min(self._options.islands)
        wanted = [side for side in self._options.loss_sides if first or side != "sync"]
        pairs = [(side, seed) for seed in range(self._options.seeds) for side in wanted]
        return [pair for pair in pairs if ("loss", count, INFINITE, *pair) not in self._cells]

    def _missing_drops(self, count: int) -> list[str]:
        """Return the sides of the drops, which are measured all or not at all."""
        if "drop" not in self._options.parts or count != min(self._options.islands):
            return []
        sides = [side for side in self._drop_sides() if side in self._options.sides]
        rates = self._options.rates[1:]
        there = all(("drop", count, rate, side, 0) in self._cells for rate in rates for side in sides)
        return [] if there or "adaptive" not in sides else sides

    @staticmethod
    def _drop_sides() -> list[str]:
        return ["adaptive", *(name for name, side in SIDES.items() if side.static)]

    def _speed(self, group: Group, rate: int, sides: Sequence[str]) -> None:
        """Measure the speed of sides on links of a rate."""
        if not sides:
            return
        notes: dict[str, str] = {}
        for side in sides:
            if not SIDES[side].measures and side not in group.made:
                group.make(side, warm=WARM)
        if rate:
            group.limit(rate)
        measuring = [side for side in sides if SIDES[side].measures]
        if measuring:
            print(f"links as measured, Mbit/s: {group.measure()}", file=sys.stderr, flush=True)
        for side in measuring:
            notes[side] = group.make(side, warm=1)["plan"]
        self._turns(group, "speed", rate, sides, notes)
        if rate:
            group.limit(INFINITE)
        for side in measuring:
            group.drop(side)

    def _turns(self, group: Group, part: Part, rate: int, sides: Sequence[str], notes: Mapping[str, str]) -> None:
        """Let sides take turns, and keep their cells."""
        values: dict[str, list[float]] = {side: [] for side in sides}
        used_s, sent, tokens = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0)
        counts: dict[str, int] = {}
        step_tokens = size_of(self._options.size, self._options.batch).tokens

        def turn(side: str, count: int) -> float:
            before = group.sent_bytes
            seconds = group.crew(side).steps(side, count)
            sent[side] += group.sent_bytes - before
            tokens[side] += count * step_tokens
            used_s[side] += seconds
            return seconds

        for _ in range(self._options.rounds):
            for side in sides:
                if values[side] and used_s[side] * (1 + 1 / len(values[side])) > MOST_S:
                    continue
                if side not in counts:
                    counts[side] = self._options.every if SIDES[side].periodic else 1
                    if not SIDES[side].periodic:
                        step_s = turn(side, 1)
                        counts[side] = max(1, round(self._options.seconds / step_s))
                        if counts[side] == 1:
                            values[side].append(step_s / step_tokens)
                            continue
                values[side].append(turn(side, counts[side]) / (counts[side] * step_tokens))
        for side in sides:
            self._keep(
                Cell(
                    part=part,
                    islands=group.count,
                    rate=rate,
                    side=side,
                    values=tuple(values[side]),
                    bytes_per_token=sent[side] / tokens[side],
                    note=notes.get(side, ""),
                    settings=self._settings[part],
                )
            )

    def _loss(self, group: Group, side: str, seed: int) -> None:
        """Measure the loss of a side after all tokens."""
        steps = self._options.tokens // size_of(self._options.size, self._options.batch).tokens
        group.make(side, seed=seed, steps=steps)
        seconds = group.crew(side).steps(side, steps)
        loss = group.crew(side).loss(side)
        group.drop(side)
        settings = self._settings["loss"]
        cell = Cell(
            part="loss", islands=group.count, rate=INFINITE, side=side, seed=seed, values=(loss,), settings=settings
        )
        self._keep(cell)
        print(f"  {steps} steps in {seconds:.1f} s", file=sys.stderr, flush=True)

    def _drop(self, group: Group) -> None:
        """Let a link drop under the adaptive side, and compare that with static plans."""
        options = self._options
        fixed = [side for side in self._drop_sides() if not SIDES[side].measures and side in options.sides]
        for side in fixed:
            if side not in group.made:
                group.make(side, warm=WARM)
        group.limit(options.rates[0])
        group.measure()
        begun = group.make("adaptive", warm=1)["plan"]
        group.crew("adaptive").steps("adaptive", options.settled)
        for rate in options.rates[1:]:
            group.limit(rate)
            group.crew("adaptive").steps("adaptive", options.settled)
            notes, sides = {"adaptive": f"began as {begun}"}, ["adaptive", *fixed]
            if "default" in options.sides:
                group.measure()
                notes["default"] = group.make("default", warm=1)["plan"]
                sides.append("default")
            self._turns(group, "drop", rate, sides, notes)
        group.limit(INFINITE)
        for line in group.drop("adaptive")["decisions"]:
            print(f"adaptive: {line}", file=sys.stderr, flush=True)

    def _keep(self, cell: Cell) -> None:
        self._cells.add(cell)
        if self._options.keep is not None:
            append(self._options.keep, cell)
        minutes = (time.monotonic() - self._begin_s) / 60
        values = f"{cell.value:.4f}" if cell.part == "loss" else f"{1e6 * cell.value:.1f} us/token"
        rate = f"{cell.rate} Mbit/s" if cell.rate else "infinite"
        where = f"{cell.part}, {cell.islands} hosts, {rate}, {cell.side}, seed {cell.seed}"
        print(f"{minutes:5.1f} min: {where}: {values} {cell.note}", file=sys.stderr, flush=True)


def report(cells: Cells, options: argparse.Namespace) -> None:
    """Print the tables and the figures."""
    size, rates = size_of(options.size, options.batch), (INFINITE, *options.rates)
    names = ["infinite", *(f"{rate} Mbit/s" for rate in options.rates)]
    speeds, losses, drops = [], [], []
    for count in options.islands:
        for side in options.sides:
            found = [cells.get("speed", count, rate, side) for rate in rates]
            texts = [spread([1e6 * value for value in cell.values], 0) if cell else "" for cell in found]
            sent = [f"{cell.bytes_per_token:,.0f}" if cell else "" for cell in found[-1:]]
            if any(texts):
                speeds.append([str(count), side, *texts, *sent])
            after = [cells.get("drop", count, rate, side) for rate in options.rates[1:]]
            if any(after):
                texts = [spread([1e6 * value for value in cell.values], 0) if cell else "" for cell in after]
                drops.append([str(count), side, *texts])
        for side in options.loss_sides:
            runs = [cells.get("loss", count, INFINITE, side, seed) for seed in range(options.seeds)]
            each = [run.value for run in runs if run]
            if each:
                losses.append([str(count), side, str(len(each)), spread(each, 4)])
    title = (
        f"{size.tokens} tokens a step, {options.delay_ms:g} ms from host to host: us per token, median (least to most)"
    )
    show(title, ["hosts", "side", *names, "bytes/token"], speeds)
    if losses:
        show(f"Loss on the held-out text after {options.tokens} tokens", ["hosts", "side", "seeds", "loss"], losses)
    if drops:
        title = f"After a drop from {names[1]}, from the {options.settled + 1}th step on: us per token"
        show(title, ["hosts", "side", *names[2:]], drops)
    cores = len(os.sched_getaffinity(0))
    result = figures(cells, options.rates, options.islands, options.seeds, cores)
    settings = {**settings_of(options)["speed"], "loss_tokens": options.tokens}
    named = {f"{cell.part} {cell.islands} {cell.rate or 'infinite'} {cell.side} {cell.seed}": cell for cell in cells}
    medians = {name: cell.value for name, cell in named.items()}
    result["plans"] = {name: cell.note for name, cell in named.items() if cell.note}
    result |= {"settings": settings, "machine": machine(), "commit": commit()}
    finish(result | {"cells": medians}, as_json=options.json)


if __name__ == "__main__":
    main()
