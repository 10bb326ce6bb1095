"""What does encryption cost between the workers of two hosts?

Two hosts on one machine, in network namespaces, with a link of a limited rate between them. On each is one rank of two
groups, one encrypted and one not, which take turns: tensors one way, sums, and short messages to and fro. It takes
root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import finish, show, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm.api import WorkerGroup
from onebox.worker.comm.tls_mesh import connect_mesh
from onebox.worker.comm.torch_dist import GlooGroup
from onebox.worker.progress import WorkerProgress
from tests.net.hosts import Host, Network, unavailable

MIB = 1 << 20
LARGE = TensorSpec("float32", (16 * MIB,))
SHORT = TensorSpec("float32", (256,))
SIDES = ("plain", "encrypted")
MESSAGES = 200
PORT = 29_500
ASKED = {"10g": 10_000_000_000, "1g": 1_000_000_000}


def main() -> None:
    """Measure and print; or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int, help="be one of the ranks: for this program's own use")
    parser.add_argument("--addresses", nargs=2)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(take_turns(options.rank, options.addresses, options.rounds)))
        return
    why = unavailable()
    if why:
        raise SystemExit(why)
    result: dict[str, float] = {}
    rows = []
    with Network(["one", "other"]) as network:
        hosts = network["one"], network["other"]
        for name, rate_bps in ASKED.items():
            for host in hosts:
                host.limit(rate_bps, burst="1mb")
            found = measure(hosts, options.rounds)
            for host in hosts:
                host.unlimit()
            for what in ("GB/s one way", "GB/s summed", "us there and back", "CPU s per GB"):
                plain, encrypted = found[f"plain {what}"], found[f"encrypted {what}"]
                ratios = [ours / theirs for ours, theirs in zip(encrypted, plain, strict=True)]
                rows.append([name, what, spread(plain, 2), spread(encrypted, 2), spread(ratios)])
                key = what.translate(str.maketrans(" /", "__")).lower()
                result[f"{key}_ratio_{name}"] = round(statistics.median(ratios), 4)
    show(
        "Two hosts with a link of so many bits per second, tensors of 64 MiB: median (least to most)",
        ["link", "what", "plain", "encrypted", "encrypted / plain"],
        rows,
    )
    finish(result, as_json=options.json)


def measure(hosts: tuple[Host, Host], rounds: int) -> dict[str, list[float]]:
    """Run the ranks of two hosts, and return the figures of the first, with the processor time of both."""
    addresses = [host.address for host in hosts]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    ranks = []
    with contextlib.ExitStack() as stack:
        for rank, host in enumerate(hosts):
            arguments = ["--rank", str(rank), "--rounds", str(rounds), "--addresses", *addresses]
            command = host.command(sys.executable, __file__, *arguments)
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            stack.callback(ranks[-1].kill)
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    one, other = (json.loads(output.splitlines()[-1]) for output in outputs)
    for side in SIDES:
        cpu = f"{side} CPU s per GB"
        one[cpu] = [sum(both) for both in zip(one[cpu], other[cpu], strict=True)]
    return one


def take_turns(rank: int, addresses: list[str], rounds: int) -> dict[str, list[float]]:
    """Be a rank of both groups, and return its figures by side and name."""
    torch.set_num_threads(1)
    store = dist.TCPStore(addresses[0], PORT, 2, rank == 0, timedelta(seconds=60))
    groups = {side: form(side, rank, addresses[rank], dist.PrefixStore(side, store)) for side in SIDES}
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for side in SIDES if turn % 2 else reversed(SIDES):
            figures = one_turn(groups[side], rank)
            if turn:  # the first one warms up
                for what, figure in figures.items():
                    found.setdefault(f"{side} {what}", []).append(figure)
    for group in groups.values():
        group.reduce([torch.ones(1)])()
    for group in groups.values():
        group.close()
    return found


def form(side: str, rank: int, address: str, store: dist.Store) -> WorkerGroup:
    """Form a group of the two ranks."""
    asked = FormGroup(1, rank, 2, "gloo", address, 60.0)
    links = connect_mesh(rank, 2, address, store) if side == "encrypted" else None
    return GlooGroup(asked, store, accelerator_for("cpu"), WorkerProgress(), address, links)


def one_turn(group: WorkerGroup, rank: int) -> dict[str, float]:
    """Return the figures of one turn of a group."""
    large, short = torch.rand(LARGE.shape), torch.rand(SHORT.shape)

    def one_way() -> None:
        if rank == 0:
            group.send(large, 1, 0)
            group.receive(SHORT, 1, 1)()
        else:
            group.receive(LARGE, 0, 0)()
            group.send(short, 0, 1)

    def to_and_fro() -> None:
        for _ in range(MESSAGES):
            if rank == 0:
                group.send(short, 1, 0)
                group.receive(SHORT, 1, 0)()
            else:
                group.receive(SHORT, 0, 0)()
                group.send(short, 0, 0)

    def summed() -> None:
        group.reduce([large])()

    def timed(work: Callable[[], object]) -> float:
        group.reduce([short])()
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    cpu_s = time.process_time()
    way_s = timed(one_way)
    cpu_s = time.process_time() - cpu_s
    return {
        "GB/s one way": LARGE.size_bytes / way_s / 1e9,
        "GB/s summed": LARGE.size_bytes / timed(summed) / 1e9,
        "us there and back": timed(to_and_fro) / MESSAGES * 1e6,
        "CPU s per GB": cpu_s / LARGE.size_bytes * 1e9,
    }


if __name__ == "__main__":
    main()
