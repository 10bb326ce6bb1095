"""Workers on the hosts of a test's network without agents, and a model that is trained over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import onebox
from onebox.plan import Plan, Stage
from onebox.pool.failures import Place
from onebox.pool.member import Member, end_all
from onebox.pool.opening import connect_pool
from onebox.pool.process import WorkerProcess
from onebox.wire import new_keys
from onebox.worker import WorkerConfig
from tests.net.hosts import Host
from tests.reference import Outcome, train

WIDTH = 256
GRADIENT_BYTES = 8 * WIDTH * WIDTH
"""Of the middle layer alone: far more than all else that travels in a step."""


class HostSource:
    """A worker on each of some hosts, bound to the host's own address; a :class:`~onebox.pool.member.Source`."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts

    def start(self, first: int, client_key: str) -> Sequence[tuple[Member, str]]:
        """Start the workers."""
        started: list[tuple[Member, str]] = []
        try:
            for number, host in enumerate(self._hosts, first):
                started.append(_worker(number, host, client_key))
        except BaseException:
            end_all([member for member, _ in started], grace_s=0.0)
            raise
        return started

    def replace(self, number: int, client_key: str) -> tuple[Member, str] | None:
        """Start a worker again, on the same host."""
        return _worker(number, self._hosts[number], client_key)

    def connected(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is open."""


def _worker(number: int, host: Host, client_key: str) -> tuple[Member, str]:
    pair = new_keys()
    config = WorkerConfig("cpu", 1, pair.public, pair.secret, client_key, host.address, owner=os.getpid())
    with host.inside():
        return WorkerProcess(Place(worker=number, host=host.name, device="cpu"), config), pair.public


def pool_of(hosts: Sequence[Host]) -> onebox.Pool:
    """Return a pool of a worker on each host; to be called on the client's network."""
    pool = connect_pool([HostSource(hosts)])
    pool.devices = tuple(
        replace(device, address=host.address) for device, host in zip(pool.devices, hosts, strict=True)
    )
    return pool


def parts() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return a model, its loss and its optimizer, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        layers = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
        model = nn.Sequential(*layers).double()
    return model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 8, generator=generator, dtype=torch.float64), torch.randint(
        0, 4, (size,), generator=generator
    )


def plans() -> dict[str, Plan]:
    """Return plans for three devices: a replica on each, and a stage on each."""
    names = onebox_segments()
    cut = [names[:1], names[1:3], names[3:]] if len(names) > 3 else [names[:1], names[1:2], names[2:]]
    stages = tuple(Stage(segments=own, replicas=((device,),), shares=(1.0,)) for device, own in enumerate(cut))
    whole = Stage(segments=names, replicas=((0,), (1,), (2,)), shares=(1 / 3,) * 3)
    return {
        "data-parallel": Plan(stages=(whole,), micro_batch=4),
        "pipelined": Plan(stages=stages, micro_batch=4, schedule="1f1b"),
    }


def onebox_segments() -> tuple[str, ...]:
    """Return the names of the model's segments."""
    from onebox.graph import TracedModel, capture

    model, loss, _ = parts()
    return TracedModel(capture(model, loss, batch(0)), backward=True).segments


def alone(plan: Plan, steps: int) -> Outcome:
    """Return the result of one process."""
    model, loss, optimizer = parts()

    def cut(size: int) -> list[int]:
        return [part.size for part in plan.micro_batches(size)]

    return train(model, loss, optimizer, [batch(step) for step in range(steps)], cut)


def outcome(trainer: onebox.Trainer, losses: Sequence[Any]) -> Outcome:
    """Return how a run on a pool went."""
    return Outcome(
        losses=[float(loss) for loss in losses],
        norms=[],
        tensors={name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()},
    )
