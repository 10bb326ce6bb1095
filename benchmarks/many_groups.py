"""Groups of many ranks, for ``many.py``: agents in network namespaces with some CPU workers each.

Measured for several numbers of hosts, so that what grows faster than linearly has an exponent:

- forming the groups in which a data-parallel trainer sums: one on each host, and one of a worker for each host;
- forming one group of all, which plans with several stages need, alone and with a message of each rank to the next, as
  in a pipeline: ranks connect when they first exchange something;
- a sum over all ranks, through memory within a host and a ring between the hosts;
- the first steps of a trainer, whose parameters are compared with those of one process in float64.

All ranks share the cores of this machine, so that times are about the sum of all processor times by its cores, and
these count.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from common import show
from torch import Tensor, nn

import onebox
from onebox.cost.benchmark_kernels import filled, first_element
from onebox.engine.partition.hierarchical_reduction import find_reductions, group_leaders, subgroups
from onebox.engine.partition.optimizer_sharding import Members
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.pool import Pool, raise_first
from onebox.pool.client.group_services import GroupServices
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Ask, Broadcast, Call, Free, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, Instruction, StoredProgram
from onebox.wire.protocol.responses import Lookup, Scalars
from tests.kit import reference
from tests.net.fleet import PORT, Fleet
from tests.net.hosts import Network

GRACE_S = 60.0
"""For how long an agent is waited for that is silent, as those of this machine are while it is busy."""

SUMS_MB = (1, 16)
STEPS = 3
SAMPLES = 4
"""Of a step, for each rank."""

_ESTABLISHED = "01"  # of include/net/tcp_states.h
_TICKS = os.sysconf("SC_CLK_TCK")


class ManyCores(Fleet):
    """Agents that offer more cores than this machine has."""

    def command(self, name: str, *arguments: str) -> Popen[bytes]:
        """Start a command of onebox on a host."""
        return self.python(name, name, str(Path(__file__).with_name("many_agent.py")), *arguments)


def measure_groups(hosts: Sequence[int], ranks: int, *, rounds: int) -> dict[str, Any]:
    """Print and return the figures.

    Args:
        hosts: Numbers of hosts, ascending.
        ranks: Workers of each host.
        rounds: Of each sum.
    """
    found: dict[int, dict[str, Any]] = {}
    names = [f"host{number:02}" for number in range(hosts[-1])]
    with (
        Network([*names, "client"]) as network,
        tempfile.TemporaryDirectory() as folder,
        ManyCores(network, Path(folder)) as fleet,
    ):
        for name in names:
            fleet.pair(name)
        fleet.start(names, "--devices", "cpu", "--cores", str(ranks))
        for count in hosts:
            used = names[:count]
            spec = ",".join(f"{network[name].address}:{PORT}/cpu*{ranks}" for name in used)
            with fleet.client(), onebox.open(spec, threads=1, grace_s=GRACE_S, virtual_devices=False) as pool:
                crew = Crew(fleet, used, pool)
                found[count] = crew.formed(summing_groups(pool))
                found[count] |= {f"all_{key}": value for key, value in crew.formed([everybody(pool)]).items()}
                found[count] |= {f"pipeline_{key}": value for key, value in crew.pipelined().items()}
                for size in SUMS_MB:
                    found[count] |= crew.summed(size << 20, rounds)
                found[count] |= crew.trained()
    return in_short(found, ranks)


def everybody(pool: Pool) -> Members:
    """Return all workers of a pool."""
    return tuple(range(len(pool)))


def parts_of(pool: Pool) -> tuple[Members, ...]:
    """Return the parts in which a sum over all workers of a pool begins, as a trainer chooses them."""
    (way,) = find_reductions(pool.devices, pool.links, [everybody(pool)])[everybody(pool)]
    return way.parts


def summing_groups(pool: Pool) -> list[Members]:
    """Return the groups that a data-parallel trainer forms of all workers of a pool."""
    return subgroups(find_reductions(pool.devices, pool.links, [everybody(pool)])[everybody(pool)])


class Crew:
    """The workers of a pool on some hosts.

    Args:
        fleet: The agents.
        names: The hosts.
        pool: The pool.
    """

    def __init__(self, fleet: Fleet, names: Sequence[str], pool: Pool) -> None:
        self._fleet, self._names, self._pool = fleet, names, pool
        self._processes = [process for name in names for process in fleet.workers(name)]

    def formed(self, groups: Sequence[Members]) -> dict[str, Any]:
        """Form groups and leave them; return what that takes."""
        numbers = {self._pool.new_number(): members for members in groups}
        with lookups() as asked, self._spent() as spent:
            self._form(numbers)
        connections = self._connections()
        threads = max(len(os.listdir(f"/proc/{process}/task")) for process in self._processes)
        self._leave(numbers)
        return {
            "connections": connections,
            "lookups": asked["lookups"],
            "threads": threads,
            **{f"form_{key}": value for key, value in spent.items()},
        }

    def pipelined(self) -> dict[str, Any]:
        """Form a group of all workers, send a tensor of each to the next one, and leave; return what that takes."""
        pool, spec = self._pool, TensorSpec("float32", (256,))
        group, fill, take, value, came, first = (pool.new_number() for _ in range(6))
        last = len(pool) - 1
        self._all(
            lambda worker: [
                Define(fill, StoredProgram(filled(spec))),
                Define(take, StoredProgram(first_element(spec))),
                Call(fill, (), (value,)),
            ]
        )

        def instructions(worker: int) -> list[Instruction]:
            sent = [Send(value, group, worker + 1)] if worker < last else []
            received = [Receive(came, spec, group, worker - 1)] if worker else []
            return [*sent, *received, Call(take, (came if worker else value,), (first,)), Ask("scalars", (first,))]

        with self._spent() as spent:
            self._form({group: everybody(pool)})
            answers = self._all(instructions)
        scalars = [each for answer in answers for each in answer.results if isinstance(each, Scalars)]
        assert len(scalars) == len(pool) and {each.values for each in scalars} == {(1.0,)}, scalars
        connections = self._connections()
        self._leave({group: everybody(pool)})
        self._all(lambda worker: [Free((value, first, *([came] if worker else [])), (fill, take))])
        return {"connections": connections, **{f"form_{key}": value for key, value in spent.items()}}

    def summed(self, size_bytes: int, rounds: int) -> dict[str, Any]:
        """Sum so many bytes of each rank over all; return what that takes."""
        pool, parts, spec = self._pool, parts_of(self._pool), TensorSpec("float32", (size_bytes // 4,))
        numbers = {pool.new_number(): members for members in summing_groups(pool)}
        self._form(numbers)
        of = {members: number for number, members in numbers.items()}
        fill, take, value, first = (pool.new_number() for _ in range(4))
        found: list[dict[str, float]] = []
        for _ in range(rounds):
            self._all(
                lambda worker: [
                    Define(fill, StoredProgram(filled(spec))),
                    Define(take, StoredProgram(first_element(spec))),
                    Call(fill, (), (value,)),
                ]
            )
            with self._spent() as spent:
                answers = self._all(
                    lambda worker: [
                        *sum_of(worker, value, spec, parts, of),
                        Call(take, (value,), (first,)),
                        Ask("scalars", (first,)),
                    ]
                )
            found.append(spent)
            scalars = [each for answer in answers for each in answer.results if isinstance(each, Scalars)]
            assert {each.values for each in scalars} == {(float(len(pool)),)}, scalars
            self._all(lambda worker: [Free((value, first), (fill, take))])
        self._leave(numbers)
        name = f"sum_{size_bytes >> 20}mb"
        return {f"{name}_{key}": round(statistics.median(each[key] for each in found), 3) for key in found[0]}

    def trained(self) -> dict[str, Any]:
        """Train a small model on all workers; return what that takes, and the largest deviation from one process."""
        ranks = len(self._pool)
        model, loss, optimizer = parts()
        segments = TracedModel(capture(model, loss, batch(0, ranks)), backward=True).segments
        replicas = tuple((worker,) for worker in everybody(self._pool))
        plan = Plan(
            stages=(Stage(segments=segments, replicas=replicas, shares=(1 / ranks,) * ranks),), micro_batch=SAMPLES
        )
        spent: list[dict[str, float]] = []
        with onebox.Trainer(*parts(), pool=self._pool, plan=plan, engine=onebox.Engine(check_every=1)) as trainer:
            for step in range(STEPS):
                with self._spent() as one:
                    trainer.step(*batch(step, ranks))
                    trainer.wait()
                spent.append(one)
            tensors = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
        batches = [batch(step, ranks) for step in range(STEPS)]
        alone = reference.train(
            model, loss, optimizer, batches, lambda size: [part.size for part in plan.micro_batches(size)]
        )
        deviation = max(float((tensor - tensors[name]).abs().max()) for name, tensor in alone.tensors.items())
        assert deviation < reference.AGREE, deviation
        return (
            {f"first_step_{key}": value for key, value in spent[0].items()}
            | {f"step_{key}": value for key, value in spent[-1].items()}
            | {"deviation": deviation}
        )

    def _form(self, groups: Mapping[int, Members]) -> None:
        asked = [
            future for number, own in groups.items() for future in self._pool.begin_group(own, "workers", number=number)
        ]
        raise_first(asked)

    def _leave(self, groups: Mapping[int, Members]) -> None:
        for number, members in groups.items():
            self._pool.leave_group(number, members)
        self._all(lambda worker: [Ask("memory")])  # they have left by then

    def _all(self, instructions: Callable[[int], list[Instruction]]) -> Sequence[Any]:
        """Send instructions to all workers, and wait for their replies."""
        with self._pool.order:
            asked = [self._pool.post(worker, instructions(worker), answer=True) for worker in everybody(self._pool)]
        return raise_first(asked)

    @contextmanager
    def _spent(self) -> Iterator[dict[str, float]]:
        """Measure seconds, those of all workers' processors, and of the client's."""
        found: dict[str, float] = {}
        workers_s, client_s, begin = self._processor_s(), time.process_time(), time.perf_counter()
        yield found
        found["s"] = round(time.perf_counter() - begin, 3)
        found["workers_s"] = round(self._processor_s() - workers_s, 2)
        found["client_s"] = round(time.process_time() - client_s, 3)

    def _processor_s(self) -> float:
        total = 0
        for process in self._processes:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def _connections(self) -> int:
        """Return the number of TCP connections between the workers of different hosts."""
        addresses = [self._fleet.network[name].address for name in self._names]
        hosts, found = {hexadecimal(address) for address in addresses}, 0
        for name, address in zip(self._names, addresses, strict=True):
            own = hexadecimal(address)
            for line in Path(f"/proc/{self._fleet.agents[name].pid}/net/tcp").read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                found += state == _ESTABLISHED and local[:8] == own != remote[:8] and remote[:8] in hosts
        return found // 2


def sum_of(
    worker: int, value: int, spec: TensorSpec, parts: Sequence[Members], groups: Mapping[Members, int]
) -> list[Instruction]:
    """Return a worker's instructions of a sum in parts, as a trainer's routines have them."""
    own, leaders = next(part for part in parts if worker in part), group_leaders(parts)
    found: list[Instruction] = []
    if len(own) > 1:
        found.append(Reduce((value,), groups[own], 0))
    if worker == own[0]:
        found.append(Reduce((value,), groups[leaders]))
    if len(own) > 1:
        found.append(Broadcast((value,), groups[own], 0, (spec,)))
    return found


@contextmanager
def lookups() -> Iterator[Counter[str]]:
    """Count the lookups that workers make at this client for their groups."""
    found: Counter[str] = Counter()
    take = GroupServices.take

    def counted(self: GroupServices, place: Any, message: Any, frames: Any) -> Any:
        found["lookups"] += isinstance(message, Lookup)
        return take(self, place, message, frames)

    GroupServices.take = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        GroupServices.take = take  # type: ignore[method-assign]


def hexadecimal(address: str) -> str:
    """Return an IPv4 address as ``/proc/net/tcp`` has it."""
    return "".join(f"{int(number):02X}" for number in reversed(address.split(".")))


def parts() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return a model with buffers that change with the data, its loss and its optimizer, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        layers = [nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)]
        model = nn.Sequential(*layers).double()
    return model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES * ranks, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (SAMPLES * ranks,), generator=generator)


def in_short(found: Mapping[int, Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """Print a table of all figures, and return those of the most hosts with exponents of the number of ranks."""
    keys = list(dict.fromkeys(key for each in found.values() for key in each))
    exponents = {}
    for key in keys:
        measured = {hosts: figures[key] for hosts, figures in found.items() if figures.get(key)}
        if len(measured) > 1 and key != "deviation":
            first, last = min(measured), max(measured)
            exponents[key] = round(math.log(measured[last] / measured[first]) / math.log(last / first), 2)
    rows = [[key, *(f"{found[hosts].get(key, '')}" for hosts in found), f"{exponents.get(key, '')}"] for key in keys]
    show("Groups of many ranks", ["figure", *(f"{hosts} x {ranks}" for hosts in found), "exponent"], rows)
    last = {f"group_{key}": value for key, value in found[max(found)].items()}
    return {"group_ranks": max(found) * ranks} | last | {f"group_{key}_exponent": exponents[key] for key in exponents}
