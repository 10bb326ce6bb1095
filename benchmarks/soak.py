"""Do runs that are hit by hundreds of faults at random moments end with the parameters of undisturbed ones?

A small model with dropout is trained on three workers: two processes of this machine, and one of an agent that is
reached through a proxy. Once undisturbed, then with faults at moments drawn from a seed; under every kind of plan. Both
runs must end with the same bits. A fault is one of these:

- kill: a worker is killed while a step is under way, or while it starts;
- stop: it is stopped for good, which takes seconds to be noticed;
- pause: it is stopped and goes on before that is noticed;
- cut: all connections to the agent and its worker are cut, and there are none for a while that is ridden out;
- agent: the agent is killed, and its worker with it, and started again after a while;
- disk: a checkpoint is saved where there is no room (the limit of a file's size stands in for a disk), and then again.

The seed is printed first; with ``--seed`` the same faults are drawn again. The faults are spread evenly over the plans.
``lost`` counts runs that ended with an error, ``different_bits`` those that ended with other parameters, ``given_up``
devices that were not there at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import resource
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
from onebox.engine.state.checkpoint_files import read
from onebox.errors import CheckpointError
from onebox.graph import TracedModel, capture
from onebox.plan import Plan, Stage
from onebox.pool.backends.agents.remote_worker import RemoteWorker
from onebox.pool.keys.keyring import KnownAgent, remember_agent
from onebox.worker import Ports

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.process.agent.hosts import Host, start
from tests.process.faults.proxy import Network

WORKERS = 3
MICRO_BATCH = 4
SAMPLES = 12
LATE_S = 0.01
"""A fault comes up to so long after a step has been begun: a step takes about as long."""

KINDS = {"kill": 0.4, "stop": 0.1, "pause": 0.1, "cut": 0.2, "agent": 0.1, "disk": 0.1}
"""How often each kind of fault is drawn."""

LOSSES = ("kill", "stop", "agent")
"""Of these one comes when what the one before did is over: what a stage of a pipeline holds is kept by two workers, so
that the loss of both at once is more than a run can survive."""

AWAY_S = 1.5
"""A pause or cut takes up to so long; after three seconds it would be taken for a loss."""

REPORTED = 10
"""So often a run says how far it is."""

FULL_BYTES = 4096
"""Room on the disk that is full."""

STEPS_A_FAULT = 10

PLANS = ("data-parallel", "pipeline", "replicas", "split", "late", "adaptive", "offload")


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
    parser.add_argument("--steps", type=int, default=None, help=f"of each run; {STEPS_A_FAULT} a fault if not given")
    parser.add_argument("--faults", type=int, default=1000, help="of all runs together")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn if not given")
    parser.add_argument("--plans", default=",".join(PLANS))
    options = parser.parse_args()
    logging.getLogger("onebox").setLevel(logging.ERROR)  # a line for each recovery
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    names = options.plans.split(",")
    result: dict[str, Any] = {"seed": seed, "faults": 0, "lost": 0, "different_bits": 0, "given_up": 0}
    for place, name in enumerate(names):
        count = options.faults * (place + 1) // len(names) - options.faults * place // len(names)
        steps = options.steps or max(2, STEPS_A_FAULT * count)
        faults = drawn(random.Random(f"{seed}/{name}"), steps, count)
        expected, _, undisturbed_s = train(name, steps, {})
        assert expected is not None, "the undisturbed run failed"
        found, told, disturbed_s = train(name, steps, faults)
        different = found is not None and not all(torch.equal(found[key], expected[key]) for key in expected)
        result[name] = told | {"seconds": disturbed_s, "undisturbed_s": undisturbed_s}
        result["faults"] += sum(told[kind] for kind in KINDS)
        result["lost"] += found is None
        result["different_bits"] += different
        result["given_up"] += told["devices gone"]
        same = "ended with an error" if found is None else "NO" if different else "yes"
        cells = [*map(str, told.values()), f"{undisturbed_s:.0f}", f"{disturbed_s:.0f}", same]
        show(f"{name}: {steps} steps", [*told, "undisturbed s", "disturbed s", "same bits"], [cells])
    finish(result, as_json=options.json)
    sys.exit(bool(result["lost"] or result["different_bits"] or result["given_up"]))


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


def train(name: str, steps: int, faults: Faults) -> tuple[dict[str, Tensor] | None, dict[str, int], float]:
    """Train; return the parameters, ``None`` after an error, what happened, and the seconds that it took."""
    model, loss, optimizer = parts()
    told: Counter[str] = Counter(dict.fromkeys(KINDS, 0), missed=0)
    begin_s, weights = time.monotonic(), None
    options: dict[str, Any] = {"stale": onebox.StaleGradients()} if name == "late" else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        workers() as (pool, network, host),
        onebox.Trainer(
            model,
            loss,
            optimizer,
            pool=pool,
            plan=plan(name),
            seed=1,
            recovery=onebox.Recovery(),
            adaptive=bool(faults) and name == "adaptive",
            **options,
        ) as trainer,
    ):
        try:
            for step in range(steps):
                trainer.step(*batch(step))
                for fault in faults.get(step, ()):
                    if fault.kind in (*LOSSES, "disk") and told["kill"] + told["stop"] + told["agent"]:
                        trainer.wait()
                        trainer.memory()  # all have answered, also who came in the place of the last one that was lost
                    time.sleep(fault.late_s)
                    told[hit(fault, trainer, network, host, Path(folder))] += 1
                if faults and (step + 1) * REPORTED % steps < REPORTED:
                    struck = ", ".join(f"{count} {kind}" for kind, count in told.items())
                    recovered = f"{len(trainer.recoveries)} recoveries, {time.monotonic() - begin_s:.0f} s"
                    print(f"{name}: step {step + 1} of {steps}: {struck}, {recovered}", flush=True)
            weights = trainer.tensors()
        except onebox.OneboxError as error:
            print(f"{name}: step {trainer.steps_done} of {steps}: {type(error).__name__}: {error}", flush=True)
        told["recoveries"] = len(trainer.recoveries)
        told["steps redone"] = sum(recovery.redone for recovery in trainer.recoveries)
        told["devices gone"] = len(pool.gone)
    return weights, dict(told), time.monotonic() - begin_s


def hit(fault: Fault, trainer: onebox.Trainer, network: Network, host: Host, folder: Path) -> str:
    """Let a fault come; return what became of it."""
    match fault.kind:
        case "cut":
            with network.down():
                time.sleep(fault.away_s)
            return fault.kind
        case "agent":
            host.kill()
            time.sleep(fault.away_s)
            host.start_again()
            return fault.kind
        case "disk":
            save_without_room(trainer, folder)
            return fault.kind
    process = trainer.pool.process_ids[fault.worker]
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.kind == "pause":
            time.sleep(fault.away_s)
            os.kill(process, signal.SIGCONT)
        return fault.kind
    return "missed"


def save_without_room(trainer: onebox.Trainer, folder: Path) -> None:
    """Save where there is no room, which must fail, and then where there is."""
    trainer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
    try:
        trainer.save(folder)
        raise AssertionError("a checkpoint was saved where there is no room")
    except CheckpointError:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trainer.save(folder)
    assert read(folder).manifest.step == trainer.steps_done


@contextlib.contextmanager
def workers() -> Iterator[tuple[onebox.Pool, Network, Host]]:
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
        yield stack.enter_context(onebox.open(f"cpu*2,{address}/cpu", threads=1)), network, host


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
    if name in ("data-parallel", "late"):
        return Plan.data_parallel(range(WORKERS), [1.0] * WORKERS, micro_batch=MICRO_BATCH, sync="workers")
    if name == "split":
        return Plan(stages=(Stage(segments=(), replicas=((0, 2),), shares=(1.0,)),), micro_batch=MICRO_BATCH)
    model, loss, _ = parts()
    names = TracedModel(capture(model, loss, batch(0)), backward=True).segments
    devices = [(0, 1), (2,)] if name == "replicas" else [(0,), (1,), (2,)]
    bounds = [len(names) * place // len(devices) for place in range(len(devices) + 1)]
    stages = tuple(
        Stage(
            segments=names[bounds[place] : bounds[place + 1]],
            replicas=tuple((device,) for device in own),
            shares=(1.0,) * len(own),
            policy="offload" if name == "offload" and place == 0 else "keep",
        )
        for place, own in enumerate(devices)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")


if __name__ == "__main__":
    main()
