"""Do runs that are hit by hundreds of faults at random moments end with the parameters of undisturbed ones?

A small model with dropout is trained on three workers: two processes of this machine, and one of an agent that is
reached through a proxy. Once with faults at moments drawn from a seed, once undisturbed; under every kind of plan. Both
runs must have the same bits at ten places and at the end. A fault is one of these:

- kill: a worker is killed while a step is under way, or while it starts;
- stop: it is stopped for good, which takes seconds to be noticed;
- pause: it is stopped and goes on before that is noticed;
- cut: all connections to the agent and its worker are cut, and there are none for a while that is ridden out;
- agent: the agent is killed, and its worker with it, and started again after a while;
- host: there is no connection to the agent and its worker for longer than is ridden out, so that the run goes on
  without them; half of the agents are started anew meanwhile. Then they are back, and the run takes the device back;
- disk: a checkpoint is saved where there is no room (the limit of a file's size stands in for a disk), and then again.

The seed is printed first; with ``--seed`` the same faults are drawn again. The faults are spread evenly over the plans.
``lost`` counts runs that ended with an error, ``different_bits`` those with other parameters, ``given_up`` devices that
were not in use at the end. Without a host a plan may have fewer replicas, whose gradients are added in another order:
the undisturbed run changes to the same plans at the same steps. Most of the time is spent on waits, so that several
plans take little longer than one: ``--together``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from common import finish, show
from torch import Tensor, nn

import onebox
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.state.checkpoint_files import read
from onebox.engine.steps.observer import StepObserver
from onebox.errors import CheckpointError
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
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

KINDS = {"kill": 0.35, "stop": 0.1, "pause": 0.1, "cut": 0.2, "agent": 0.1, "host": 0.05, "disk": 0.1}
"""How often each kind of fault is drawn."""

LOSSES = ("kill", "stop", "agent", "host")
"""Of these one comes when what the one before did is over: what a stage of a pipeline holds is kept by two workers, so
that the loss of both at once is more than a run can survive."""

AWAY_S = 1.5
"""A pause or cut takes up to so long; after three seconds it would be taken for a loss."""

HOST_AWAY_S = 6.0
"""A host is away for so long, and for as long as a cut on top: after five seconds the run has gone on without it."""

PACE_S = 0.2
"""Pause after each step while a host is away, or steps would run out."""

BACK_S = 90.0
"""A device is taken back within this time: a refused attempt is repeated after a minute at the latest."""

LAST = 5
"""Steps at the end without faults, in which devices are waited for that are not back yet."""

SAFE_S = 30.0
"""Longest wait for the state to be stored with two workers again."""

REPORTED = 10
"""So often a run says how far it is, and its parameters are compared."""

FULL_BYTES = 4096
"""Room on the disk that is full."""

STEPS_A_FAULT = 10

PLANS = ("data-parallel", "pipeline", "replicas", "split", "late", "adaptive", "offload")

_LOG = logging.getLogger("soak")


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


@dataclass(kw_only=True)
class Outcome:
    """What came of a run.

    Args:
        told: How often each kind of fault came, and what followed.
        digests: Digests of the parameters after some steps; that after the last one is missing after an error.
        plans: From a step to the plan that is in use from it on.
        seconds: Time that it took.
    """

    told: Counter[str]
    digests: dict[int, str] = field(default_factory=dict)
    plans: Mapping[int, Plan] = field(default_factory=dict)
    seconds: float = 0.0


def main() -> None:
    """Train, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--steps", type=int, default=None, help=f"of each run; {STEPS_A_FAULT} a fault if not given")
    parser.add_argument("--faults", type=int, default=1000, help="of all runs together")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn if not given")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--together", type=int, default=1, help="plans at a time, each in a process of its own")
    parser.add_argument("--verbose", action="store_true", help="log each fault and recovery")
    options = parser.parse_args()
    logging.basicConfig(format=f"%(asctime)s {options.plans}: %(message)s")
    logging.getLogger("onebox").setLevel(logging.WARNING if options.verbose else logging.ERROR)
    _LOG.setLevel(logging.INFO if options.verbose else logging.WARNING)
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    names = options.plans.split(",")
    counts = {
        name: options.faults * (place + 1) // len(names) - options.faults * place // len(names)
        for place, name in enumerate(names)
    }

    def soak(name: str) -> dict[str, Any]:
        steps = options.steps or max(2 * LAST, STEPS_A_FAULT * counts[name])
        return compare(name, steps, counts[name], seed) if options.together == 1 else elsewhere(name, steps, seed)

    def elsewhere(name: str, steps: int, seed: int) -> dict[str, Any]:
        arguments = [
            "--plans",
            name,
            "--steps",
            str(steps),
            "--faults",
            str(counts[name]),
            "--seed",
            str(seed),
            "--json",
        ]
        return in_process(arguments + ["--verbose"] * options.verbose)[name]

    with ThreadPoolExecutor(options.together) as threads:
        found = dict(zip(names, threads.map(soak, names) if options.together > 1 else map(soak, names), strict=True))
    result: dict[str, Any] = {
        "seed": seed,
        "faults": sum(each[kind] for each in found.values() for kind in KINDS),
        "lost": sum(each["same bits"] == "ended with an error" for each in found.values()),
        "different_bits": sum(each["same bits"] == "NO" for each in found.values()),
        "given_up": sum(each["devices gone"] for each in found.values()),
    }
    columns = list(next(iter(found.values())))
    show(
        f"{result['faults']} faults, seed {seed}",
        ["plan", *columns],
        [
            [name, *(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in each.values())]
            for name, each in found.items()
        ],
    )
    finish(result | found, as_json=options.json)
    sys.exit(bool(result["lost"] or result["different_bits"] or result["given_up"]))


def in_process(arguments: list[str]) -> dict[str, Any]:
    """Run this program with other arguments; print its lines, and return the JSON object in the last one."""
    command = [sys.executable, __file__, *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line
            if line.startswith((arguments[1], "{")):
                print(line, end="", flush=True)
    assert last.startswith("{"), f"{' '.join(command)} ended with status {process.returncode}"
    result: dict[str, Any] = json.loads(last)
    return result


def compare(name: str, steps: int, count: int, seed: int) -> dict[str, Any]:
    """Train with so many faults and without; return what happened and whether the bits are the same."""
    faults = drawn(random.Random(f"{seed}/{name}"), steps - LAST, count)
    found = train(name, steps, faults)
    expected = train(name, steps, {}, found.plans)
    assert steps - 1 in expected.digests, "the undisturbed run failed"
    same = "yes" if steps - 1 in found.digests else "ended with an error"
    before = 0
    for step, digest in sorted(found.digests.items()):
        if digest != expected.digests[step]:
            print(f"{name}: other bits after step {step + 1}, the same ones after step {before}", flush=True)
            same = "NO"
            break
        before = step + 1
    return {"steps": steps, **found.told, "undisturbed s": expected.seconds, "s": found.seconds, "same bits": same}


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


class Timeline(StepObserver):
    """The plans that the steps of a run were computed under; a recovery does the steps since a snapshot again.

    Args:
        trainer: The run's trainer.
    """

    def __init__(self, trainer: onebox.Trainer) -> None:
        self._trainer = trainer
        self._events: list[tuple[Literal["recovery", "change"], int, Plan] | tuple[Literal["digest"], int, str]] = []
        trainer._run.subscribe(self)

    def installed(self, plan: InstalledPlan) -> None:
        """Note the plan of a recovery, or the first one."""
        self._events.append(("recovery", len(self._trainer.recoveries), plan.plan))

    def replaced(self, before: InstalledPlan, after: InstalledPlan) -> None:
        """Note a plan that takes over from the next step on."""
        self._events.append(("change", self._trainer.steps_done, after.plan))

    def read(self, step: int) -> None:
        """Read the parameters after a step."""
        made = hashlib.sha256()
        for key, tensor in sorted(self._trainer.tensors().items()):
            made.update(key.encode() + tensor.contiguous().numpy().tobytes())
        self._events.append(("digest", step, made.hexdigest()))

    def outcome(self) -> tuple[dict[int, Plan], dict[int, str]]:
        """Return from a step to the plan from it on, and digests of the parameters after steps, without those that
        were computed again with sums in another order."""
        plans: dict[int, Plan] = {}
        digests: dict[int, str] = {}
        recoveries = self._trainer.recoveries
        for event in self._events:
            if event[0] == "digest":
                digests[event[1]] = event[2]
                continue
            what, number, plan = event
            if what == "recovery" and plans and number == len(recoveries):  # it failed
                continue
            start = 0 if not plans else recoveries[number].snapshot_step if what == "recovery" else number
            before = [sums(each) for step, each in plans.items() if step > start]
            before += [sums(plans[max(step for step in plans if step <= start)])] if plans else []
            if any(each != sums(plan) for each in before):
                digests = {step: digest for step, digest in digests.items() if step < start}
            plans = {step: each for step, each in plans.items() if step < start} | {start: plan}
        return plans, digests


def sums(plan: Plan) -> list[object]:
    """Return what the order of a plan's sums depends on: the stages whose gradients or values several devices add."""
    return [
        (stage.segments, [len(replica) for replica in stage.replicas], stage.shares)
        for stage in plan.stages
        if len(stage.replicas) > 1 or stage.ranks > 1
    ]


def train(name: str, steps: int, faults: Faults, plans: Mapping[int, Plan] | None = None) -> Outcome:
    """Train.

    Args:
        name: Of a plan.
        steps: How many.
        faults: What comes.
        plans: From a step to the plan of another run from it on, whose sums this run adds in the same order.
    """
    model, loss, optimizer = parts()
    outcome = Outcome(told=Counter(dict.fromkeys(KINDS, 0), missed=0))
    begin_s = time.monotonic()
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
        timeline, strikes = Timeline(trainer), Strikes(trainer, network, host, Path(folder), outcome.told)
        try:
            for step in range(steps):
                successor = (plans or {}).get(step)
                if successor is not None and sums(successor) != sums(trainer.plan or plan(name)):
                    trainer._run.adopt(successor)
                if step >= steps - LAST:
                    strikes.await_devices()
                trainer.step(*batch(step))
                strikes.come(faults.get(step, ()))
                if (step + 1) * REPORTED % steps < REPORTED:
                    timeline.read(step)
                    if faults:
                        struck = ", ".join(f"{count} {kind}" for kind, count in outcome.told.items())
                        recovered = f"{len(trainer.recoveries)} recoveries, {time.monotonic() - begin_s:.0f} s"
                        print(f"{name}: step {step + 1} of {steps}: {struck}, {recovered}", flush=True)
        except onebox.OneboxError as error:
            print(f"{name}: step {trainer.steps_done} of {steps}: {type(error).__name__}: {error}", flush=True)
        outcome.told["recoveries"] = len(trainer.recoveries)
        outcome.told["steps redone"] = sum(recovery.redone for recovery in trainer.recoveries)
        outcome.told["devices away"] = sum(len(recovery.gone) for recovery in trainer.recoveries)
        outcome.told["devices gone"] = len(pool.gone)
        outcome.plans, outcome.digests = timeline.outcome()
    outcome.seconds = time.monotonic() - begin_s
    return outcome


class Strikes:
    """The faults that come over a run.

    Args:
        trainer: The run's trainer.
        network: The network between the client, and the agent and its worker.
        host: The agent.
        folder: A folder for checkpoints.
        told: How often each kind came.
    """

    def __init__(self, trainer: onebox.Trainer, network: Network, host: Host, folder: Path, told: Counter[str]) -> None:
        self._trainer = trainer
        self._network = network
        self._host = host
        self._folder = folder
        self._told = told
        self._waiting: deque[Fault] = deque()
        self._back_s: float | None = None
        self._anew = False

    def come(self, faults: list[Fault] | tuple[()]) -> None:
        """Let faults come after a step was begun; while a host is away they wait."""
        self._waiting.extend(faults)
        if self._back_s is not None:
            time.sleep(PACE_S)
            if time.monotonic() > self._back_s:
                self._bring_back()
        while self._waiting and self._back_s is None:
            fault = self._waiting.popleft()
            if fault.kind in (*LOSSES, "disk") and any(self._told[kind] for kind in LOSSES):
                self._trainer.wait()
                self._trainer.memory()  # all have answered, also who came in the place of the last one that was lost
                self._trainer._run.recovery.run(lambda: self._trainer._run.snapshots.wait(SAFE_S))
            time.sleep(fault.late_s)
            became = self._hit(fault)
            self._told[became] += 1
            _LOG.info("step %d: %s, worker %d, %.2f s", self._trainer.steps_done, became, fault.worker, fault.away_s)

    def await_devices(self) -> None:
        """Wait until the devices that are gone can be taken back; faults that still wait come before."""
        if self._back_s is not None:
            time.sleep(max(0.0, self._back_s - time.monotonic()))
            self._bring_back()
        end_s, pool = time.monotonic() + BACK_S, self._trainer.pool
        while pool.gone and not pool.returning and time.monotonic() < end_s:
            time.sleep(PACE_S)

    def _bring_back(self) -> None:
        if self._anew:
            self._host.kill()
            self._host.start_again()
        self._network.up, self._back_s = True, None

    def _hit(self, fault: Fault) -> str:
        """Let a fault come; return what became of it."""
        match fault.kind:
            case "cut":
                with self._network.down():
                    time.sleep(fault.away_s)
                return fault.kind
            case "agent":
                self._host.kill()
                time.sleep(fault.away_s)
                self._host.start_again()
                return fault.kind
            case "host":
                self._network.up, self._back_s = False, time.monotonic() + HOST_AWAY_S + fault.away_s
                self._network.cut()
                self._anew = fault.late_s > LATE_S / 2
                return fault.kind
            case "disk":
                save_without_room(self._trainer, self._folder)
                return fault.kind
        pool = self._trainer.pool
        worker = fault.worker if fault.worker in pool.present else pool.present[fault.worker % len(pool.present)]
        process = pool.process_ids[worker]
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
