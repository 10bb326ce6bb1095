"""Does the account of wall time say where an epoch's time has gone?

Two hosts on one machine, in network namespaces, each with an agent; the monotonic clock of one is a day ahead. Delays
are injected one at a time: a host whose link has 50 Mbit/s, a feed that is late, checkpoints that travel to the client
at 50 Mbit/s, at once and aside, and a device at half of its speed. Each has to appear in its own share of the account;
what that should be follows from the delay or, for the link and the slow device, from the time without it. It takes
root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import finish, show
from torch import nn

import onebox
from onebox.engine.steps.account import FEED, HERE, SAVING, UNKNOWN, Account, link_between, waiting_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.net.fleet import Fleet
from tests.net.hosts import Host, Network, unavailable

DAY_S = 86_400
RATE_BPS = 50_000_000
LATE_S = 0.1
NAMES = ("red", "green")
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch: its account, the time that should be in one share, and the length of its timeline."""

    account: Account
    saved_s: float
    timeline_s: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder, Network([*NAMES, "client"]) as network:
        network["green"].ahead_s = DAY_S
        with Fleet(network, Path(folder)) as fleet:
            for name in NAMES:
                fleet.pair(name)
            fleet.start(NAMES)
            found = measured(fleet, network, options.steps)
    rows, result = [], dict[str, float]()
    for name, (epoch, causes, expected) in found.items():
        account = epoch.account
        share, lost = part(account, causes), part(account, [UNKNOWN])
        cells = f"{account.seconds:.2f}", ", ".join(causes), f"{share:.3f}", f"{expected:.3f}", f"{lost:.4f}"
        rows.append([name, *cells, account.text])
        key = name.replace(" ", "_")
        result |= {
            f"{key}_points": round(100 * abs(share - expected), 2),
            f"{key}_not_attributed": round(100 * lost, 2),
            f"{key}_sum": round(sum(account.shares.values()), 9),
        }
    seconds = {name: epoch.account.seconds for name, (epoch, *_) in found.items()}
    result["saving_over_none"] = round(seconds["saving"] / seconds["none"], 3)
    result["saving_aside_over_none"] = round(seconds["saving aside"] / seconds["none"], 3)
    result["timeline_s"] = round(max(epoch.timeline_s for epoch, *_ in found.values()), 3)
    show(
        f"Epochs of {options.steps} steps with one delay each; the clock of one host is a day ahead",
        ["delay", "s", "share of", "account", "expected", "not attributed", "the account"],
        rows,
    )
    finish(result, as_json=options.json)


def part(account: Account, causes: Sequence[str]) -> float:
    """Return the share of some causes together."""
    return sum(account.shares.get(cause, 0.0) for cause in causes)


def measured(fleet: Fleet, network: Network, steps: int) -> dict[str, tuple[Epoch, Sequence[str], float]]:
    """Return the epoch of each delay, the causes that it belongs to, and the share that these should have."""
    red, green = (network[name].address for name in NAMES)
    links = link_between(red, green), link_between(green, HERE)
    with fleet.client(), onebox.open(fleet.spec(*NAMES), threads=1) as pool:
        plain = epoch(pool, steps)
        with limited(network["green"]):
            slow = epoch(pool, steps)
        late = epoch(pool, steps, feed=lambda: time.sleep(LATE_S))
        with limited(network["client"]):
            saved = epoch(pool, steps, saves=True)
            aside = epoch(pool, steps, saves=True, aside=True)
    even, uneven = in_turn(("cpu,cpu", "cpu,cpu@0.5"), steps)
    before_s, slow_s = plain.account.seconds, slow.account.seconds
    carried_s = part(plain.account, links) * before_s
    more_s = uneven.account.seconds - even.account.seconds
    slow_one = [waiting_for(1)]
    waited_s = part(even.account, slow_one) * even.account.seconds
    return {
        "none": (plain, [UNKNOWN], 0.0),
        "link": (slow, links, (carried_s + slow_s - before_s) / slow_s),
        "feed": (late, [FEED], steps * LATE_S / late.account.seconds),
        "saving": (saved, [SAVING], saved.saved_s / saved.account.seconds),
        "saving aside": (aside, [SAVING], aside.saved_s / aside.account.seconds),
        # the slow device computes for longer, and the other one waits for it: half of both devices' time
        "slow device": (uneven, slow_one, (waited_s + more_s / 2) / uneven.account.seconds),
    }


def in_turn(devices: Sequence[str], steps: int) -> list[Epoch]:
    """Return for each of some pools its epoch of median length, of several in turn: an epoch takes half a second."""
    found: list[list[Epoch]] = [[] for _ in devices]
    for _ in range(ROUNDS):
        for each, epochs in zip(devices, found, strict=True):
            with onebox.open(each, threads=1) as pool:
                epochs.append(epoch(pool, steps))
    return [sorted(epochs, key=lambda one: one.account.seconds)[ROUNDS // 2] for epochs in found]


def epoch(
    pool: onebox.Pool,
    steps: int,
    *,
    feed: Callable[[], None] = lambda: None,
    saves: bool = False,
    aside: bool = False,
) -> Epoch:
    """Train an epoch of data parallel steps, each of which is waited for; return its account."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(2048, 4), torch.randint(0, 10, (2048,))
    saved_s = 0.0
    settings = {"pool": pool, "plan": onebox.DataParallel(shares="equal"), "recovery": None}
    with (
        tempfile.TemporaryDirectory() as folder,
        onebox.Trainer(model, nn.functional.cross_entropy, optimizer, **settings) as trainer,
    ):
        for _ in range(3):  # the first steps are slower
            trainer.step(inputs, targets).item()
        trainer.wall.take()
        for step in range(steps):
            with trainer.wall.during(FEED):
                feed()
            trainer.step(inputs, targets).item()
            if saves and step % 5 == 4:
                trainer.wait()
                begun_s = time.monotonic()
                (trainer.begin_save if aside else trainer.save)(folder)
                saved_s += time.monotonic() - begun_s
        account = trainer.wall.take()
        events = [event for event in trainer.events() if event.step >= 3]
        first_ns, last_ns = min(each.start_ns for each in events), max(each.end_ns for each in events)
        return Epoch(account=account, saved_s=saved_s, timeline_s=(last_ns - first_ns) / 1e9)


@contextlib.contextmanager
def limited(host: Host) -> Iterator[None]:
    """Limit the link of a host."""
    host.limit(RATE_BPS)
    try:
        yield
    finally:
        host.unlimit()


if __name__ == "__main__":
    main()
