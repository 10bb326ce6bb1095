"""What does encryption cost between the workers of two hosts?

Two hosts on one machine, in network namespaces, with a link of a limited rate between them. On each is one rank of two
groups, one encrypted and one not, which take turns: tensors one way, sums, and short messages to and fro; beside a copy
of as many bytes over plain sockets, with a thread for each direction. It takes root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from common import finish, show, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from onebox.pool.launch.zygotes import worker_environment
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm.api import MembershipStore, ReceivedTensor, WorkerGroup
from onebox.worker.comm.group import CarriedGroup
from onebox.worker.comm.tcp.carrier import TcpCarrier
from onebox.worker.progress import WorkerProgress
from tests.net.hosts import Host, Network, unavailable

MIB = 1 << 20
LARGE = TensorSpec("float32", (16 * MIB,))
SHORT = TensorSpec("float32", (256,))
SIDES = ("copy", "plain", "encrypted")
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
                sides = [found[f"{side} {what}"] for side in SIDES]
                ratios = [[ours / theirs for ours, theirs in zip(side, sides[0], strict=True)] for side in sides[1:]]
                rows.append([name, what, *(spread(side, 2) for side in sides), *map(spread, ratios)])
                key = what.translate(str.maketrans(" /", "__")).lower()
                for side, found_ratios in zip(SIDES[1:], ratios, strict=True):
                    result[f"{side}_{key}_{name}"] = round(statistics.median(found_ratios), 4)
    show(
        "Two hosts with a link of so many bits per second, tensors of 64 MiB: median (least to most)",
        ["link", "what", *SIDES, *(f"{side} / copy" for side in SIDES[1:])],
        rows,
    )
    finish(result, as_json=options.json)


def measure(hosts: tuple[Host, Host], rounds: int) -> dict[str, list[float]]:
    """Run the ranks of two hosts, and return the figures of the first, with the processor time of both."""
    addresses = [host.address for host in hosts]
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, **worker_environment(1), "PYTHONPATH": source}
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
    groups: dict[str, WorkerGroup | SocketPair] = {"copy": SocketPair(rank, addresses)}
    for side in SIDES[1:]:
        groups[side] = form(side == "encrypted", rank, addresses[rank], dist.PrefixStore(side, store))
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


def form(encrypted: bool, rank: int, address: str, store: dist.Store) -> WorkerGroup:
    """Form a group of the two ranks."""
    asked = FormGroup(1, rank, 2, "tcp", address, 60.0)
    keys = cast(MembershipStore, store)
    device, progress = accelerator_for("cpu"), WorkerProgress()
    carrier = TcpCarrier(asked, keys, device, progress, address, encrypted=encrypted)
    return CarriedGroup(asked, [carrier], device, progress)


class SocketPair:
    """Two plain sockets, one for each direction, each with a thread: what the kernel and Python can do."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        self.rank = rank
        if rank == 0:
            with socket.create_server((addresses[0], PORT + 1)) as listener:
                made = [listener.accept()[0] for _ in range(2)]
        else:
            made = []
            while len(made) < 2:
                with contextlib.suppress(ConnectionRefusedError):
                    made.append(socket.create_connection((addresses[0], PORT + 1)))
        for each in made:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out, self._in = made if rank == 0 else made[::-1]
        self._sending = ThreadPoolExecutor(1)

    def send(self, tensor: torch.Tensor, peer: int, channel: int) -> None:
        """Send a tensor: a short one at once, as a program would that only does this."""
        data = tensor.view(torch.uint8).numpy().data
        if tensor.nbytes < MIB:
            self._out.sendall(data)
        else:
            self._sending.submit(self._out.sendall, data)

    def receive(self, spec: TensorSpec, peer: int, channel: int) -> Callable[[], ReceivedTensor]:
        """Return a wait for a tensor."""
        return lambda: ReceivedTensor(self._receive(spec), 0)

    def reduce(self, tensors: Sequence[torch.Tensor]) -> Callable[[], ReceivedTensor]:
        """Send a tensor, and return a wait for the sum with the other one."""
        self.send(tensors[0], 1 - self.rank, 0)
        return lambda: ReceivedTensor(tensors[0] + self._receive(spec_of(tensors[0])), 0)

    def close(self) -> None:
        """Close them."""
        self._sending.shutdown()
        self._in.close()
        self._out.close()

    def _receive(self, spec: TensorSpec) -> torch.Tensor:
        data = torch.empty(spec.size_bytes, dtype=torch.uint8)
        target = data.numpy().data
        while len(target):
            target = target[self._in.recv_into(target, min(len(target), MIB)) :]
        return data.view(torch.float32)


def one_turn(group: WorkerGroup | SocketPair, rank: int) -> dict[str, float]:
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
