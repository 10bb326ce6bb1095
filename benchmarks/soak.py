"""Does a run that is hit by 200 faults at random moments end with the parameters of an undisturbed one?

A small model with dropout is trained for 2,000 steps on three workers: two processes of this machine, and one of an
agent that is reached through a proxy. Once undisturbed, then with faults at moments drawn from a seed; data-parallel
and as a pipeline. Both runs must end with the same bits. A fault is one of these:

- kill: a worker is killed while a step is under way, or while it starts;
- stop: it is stopped for good, which takes seconds to be noticed;
- pause: it is stopped and goes on before that is noticed;
- cut: all connections to the agent and its worker are cut, and there are none for a while that is ridden out.

The seed is printed first; with ``--seed`` the same faults are drawn again.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import finish, show
from torch import Tensor, nn

import onebox
from onebox.graph import TracedModel, capture
from onebox.plan import Plan, Stage
from onebox.pool.backends.agents.remote_worker import RemoteWorker
from onebox.pool.keys.keyring import KnownAgent, remember_agent
from onebox.worker import Ports

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.process.agent.hosts import start
from tests.process.faults.proxy import Network

WORKERS = 3
MICRO_BATCH = 4
SAMPLES = 12
LATE_S = 0.01
"""A fault comes up to so long after a step has been begun: a step takes about as long."""

KINDS = {"kill": 0.5, "stop": 0.1, "pause": 0.15, "cut": 0.25}
"""How often each kind of fault is drawn."""

LOSSES = ("kill", "stop")
"""Of these one comes when what the one before did is over: what a stage of a pipeline holds is kept by two workers, so
that the loss of both at once is more than a run can survive."""

AWAY_S = 1.5
"""A pause or cut takes up to so long; after three seconds it would be taken for a loss."""

REPORTED = 10
"""So often a run says how far it is."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls a run.

    Args:
        kind: One of :data:`KINDS`.
        worker: Whom; a cut befalls the agent's.
        late_s: How long after the beginning of a step.
        away_s: How long a pause or cut takes.
    """

    kind: str
    worker: int
    late_s: float
    away_s: float


Faults = dict[int, list[Fault]]
"""From a step to what comes in it."""


def main() -> None:
    """Train, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn if not given")
    parser.add_argument("--plans", default="data-parallel,pipeline")
    options = parser.parse_args()
    logging.getLogger("onebox").setLevel(logging.ERROR)  # a line for each recovery
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    result: dict[str, Any] = {"seed": seed, "steps": options.steps, "faults": options.faults, "equal": True}
    for name in options.plans.split(","):
        faults = drawn(random.Random(f"{seed}/{name}"), options.steps, options.faults)
        expected, _, undisturbed_s = train(name, options.steps, {})
        found, told, disturbed_s = train(name, options.steps, faults)
        equal = all(torch.equal(found[key], expected[key]) for key in expected)
        result[name] = told | {"seconds": disturbed_s, "undisturbed_s": undisturbed_s, "equal": equal}
        result["equal"] &= equal
        cells = [*map(str, told.values()), f"{undisturbed_s:.0f}", f"{disturbed_s:.0f}", "yes" if equal else "NO"]
        show(f"{name}: {options.steps} steps", [*told, "undisturbed s", "disturbed s", "same bits"], [cells])
    finish(result, as_json=options.json)
    sys.exit(not result["equal"])


def drawn(draw: random.Random, steps: int, faults: int) -> Faults:
    """Draw what comes when."""
    found: Faults = {}
    for _ in range(faults):
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        step, worker = draw.randrange(1, steps), draw.randrange(WORKERS)
        fault = Fault(
            kind=kind, worker=worker, late_s=draw.uniform(0.0, LATE_S), away_s=draw.uniform(0.0, AWAY_S) ** 2 / AWAY_S
        )
        found.setdefault(step, []).append(fault)
    return found


def train(name: str, steps: int, faults: Faults) -> tuple[dict[str, Tensor], dict[str, int], float]:
    """Train; return the parameters, what happened, and the seconds that it took."""
    model, loss, optimizer = parts()
    told: Counter[str] = Counter(dict.fromkeys(KINDS, 0), missed=0)
    begin_s = time.monotonic()
    with (
        workers() as (pool, network),
        onebox.Trainer(
            model, loss, optimizer, pool=pool, plan=plan(name), seed=1, recovery=onebox.Recovery()
        ) as trainer,
    ):
        for step in range(steps):
            trainer.step(*batch(step))
            for fault in faults.get(step, ()):
                if fault.kind in LOSSES and told["kill"] + told["stop"]:
                    trainer.wait()
                    trainer.memory()  # all have answered, also who came in the place of the last one that was lost
                time.sleep(fault.late_s)
                told[hit(fault, pool, network)] += 1
            if faults and (step + 1) * REPORTED % steps < REPORTED:
                struck = ", ".join(f"{count} {kind}" for kind, count in told.items())
                recovered = f"{len(trainer.recoveries)} recoveries, {time.monotonic() - begin_s:.0f} s"
                print(f"{name}: step {step + 1} of {steps}: {struck}, {recovered}", flush=True)
        weights = trainer.tensors()
        told["recoveries"] = len(trainer.recoveries)
        told["steps redone"] = sum(recovery.redone for recovery in trainer.recoveries)
        told["devices gone"] = len(pool.gone)
    return weights, dict(told), time.monotonic() - begin_s


def hit(fault: Fault, pool: onebox.Pool, network: Network) -> str:
    """Let a fault come; return what became of it."""
    if fault.kind == "cut":
        with network.down():
            time.sleep(fault.away_s)
        return fault.kind
    process = pool.process_ids[fault.worker]
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.kind == "pause":
            time.sleep(fault.away_s)
            os.kill(process, signal.SIGCONT)
        return fault.kind
    return "missed"


@contextlib.contextmanager
def workers() -> Iterator[tuple[onebox.Pool, Network]]:
    """Open a pool of two workers of this machine and one of an agent behind a network that can be cut."""
    network, found = Network(), RemoteWorker.ports

    def through(member: RemoteWorker) -> Ports:
        ports = found(member)
        return Ports(network.door(ports.commands, wears=False), network.door(ports.heartbeats, wears=False))

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.environ["ONEBOX_CONFIG"] = folder  # for keys that nobody else knows
        (host,) = start(1)
        stack.callback(host.kill)
        stack.callback(network.close)
        address = network.door(f"tcp://{host.address}", wears=False).removeprefix("tcp://")
        remember_agent(KnownAgent(address, host.keys.public, "host"))
        RemoteWorker.ports = through  # type: ignore[method-assign]
        stack.callback(setattr, RemoteWorker, "ports", found)
        yield stack.enter_context(onebox.open(f"cpu*2,{address}/cpu", threads=1)), network


def parts() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return the model, its loss and its optimizer, the same each time."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    model = body.double()
    return model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    x_BD = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return x_BD, torch.randint(0, 4, (SAMPLES,), generator=generator)


def plan(name: str) -> Plan:
    """Return a plan by its name."""
    if name == "data-parallel":
        return Plan.data_parallel(range(WORKERS), [1.0] * WORKERS, micro_batch=MICRO_BATCH, sync="workers")
    model, loss, _ = parts()
    names = TracedModel(capture(model, loss, batch(0)), backward=True).segments
    bounds = [len(names) * place // WORKERS for place in range(WORKERS + 1)]
    stages = tuple(
        Stage(segments=names[bounds[device] : bounds[device + 1]], replicas=((device,),), shares=(1.0,))
        for device in range(WORKERS)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")


if __name__ == "__main__":
    main()
