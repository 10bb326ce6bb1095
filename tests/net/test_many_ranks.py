"""Groups of several ranks on each of several hosts: they sum within their host first, and one of each host connects to
those of the others; the result is that of one process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import onebox
from onebox.plan import Plan
from onebox.pool import Pool
from tests.kit import reference
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import assert_same
from tests.net.fleet import GRACE_S, MACHINES, Fleet
from tests.net.hosts import Network
from tests.net.training import outcome
from tests.process.test_island_membership import SEED, SMALL, Changing, compare

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PORT = 7181
RANKS = 2
"""Of each host."""

pytestmark = pytest.mark.skipif(
    (os.cpu_count() or 1) < RANKS, reason="an agent offers as many workers as there are cores"
)


@pytest.fixture(scope="module")
def many_groups() -> Iterator[ModuleType]:
    """``benchmarks/many_groups.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import many_groups

        yield many_groups
    for name in ("many_groups", "common"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def crowd(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Another agent on each machine, at another port, which offers as many cores as a host has ranks."""
    with Fleet(network, tmp_path_factory.mktemp("crowd")) as made:
        for name in MACHINES:
            made.pair(name, port=PORT)
        made.start(MACHINES, "--cores", str(RANKS), "--port", str(PORT))
        yield made


@pytest.fixture
def ranks(crowd: Fleet) -> Iterator[Pool]:
    """A pool of all ranks, and this thread on the client's host."""
    spec = ",".join(f"{crowd.network[name].address}:{PORT}/cpu*{RANKS}" for name in MACHINES)
    with crowd.client(), onebox.open(spec, threads=1, grace_s=GRACE_S, virtual_devices=False) as pool:
        yield pool


def test_training_on_several_hosts_with_several_ranks_each(crowd: Fleet, ranks: Pool, many_groups: ModuleType) -> None:
    """With buffers that change with the data; the benchmark compares parameters and buffers with one process."""
    crew = many_groups.Crew(crowd, MACHINES, ranks)
    assert many_groups.parts_of(ranks) == ((0, 1), (2, 3), (4, 5))
    assert crew.trained()["deviation"] < 1e-10
    assert crew.summed(1 << 20, 1)["sum_1mb_s"] > 0


def test_only_one_rank_of_each_host_connects_to_other_hosts(crowd: Fleet, ranks: Pool, many_groups: ModuleType) -> None:
    crew, hosts = many_groups.Crew(crowd, MACHINES, ranks), len(MACHINES)
    groups = many_groups.summing_groups(ranks)
    assert groups == [(0, 1), (2, 3), (4, 5), (0, 2, 4)]
    assert crew.formed(groups)["connections"] == hosts * (hosts - 1), "one for each direction"
    pairs = crew.formed([many_groups.everybody(ranks)])
    assert pairs["connections"] == hosts * (hosts - 1) * RANKS**2, "as of a plan with several stages"


def test_islands_of_several_hosts_with_several_ranks(ranks: Pool) -> None:
    """What an outer step changes goes to all ranks of an island through the first one of each host."""
    case, model, outer = CASES["cnn"], CASES["cnn"].model(), onebox.Outer(every=2)
    batches = case.batches([12] * 5)
    with onebox.Trainer(
        model,
        case.loss,
        OPTIMIZERS["adamw"](model),
        pool=ranks,
        seed=SEED,
        islands=[[0, 1, 2], [3, 4, 5]],
        plan=SMALL,
        outer=outer,
    ) as trainer:
        losses = [trainer.step(*batch) for batch in batches]
        compare(trainer, losses, Changing("cnn", "adamw", [1, 1], outer), batches)


@pytest.mark.parametrize("lost", [2, 3], ids=["the first of its host", "another one"])
def test_a_run_goes_on_after_a_rank_is_lost(ranks: Pool, many_groups: ModuleType, lost: int) -> None:
    count = len(ranks)
    plan = Plan.data_parallel(range(count), [1 / count] * count, micro_batch=many_groups.SAMPLES)
    batches = [many_groups.batch(step, count) for step in range(6)]
    recovery = onebox.Recovery(snapshot_every=2)
    with onebox.Trainer(*many_groups.parts(), pool=ranks, plan=plan, recovery=recovery) as trainer:
        losses = [trainer.step(*batch) for batch in batches[:3]]
        trainer.wait()
        os.kill(ranks.process_ids[lost], signal.SIGKILL)
        losses += [trainer.step(*batch) for batch in batches[3:]]
        trainer.wait()
        found = outcome(trainer, losses)
        assert trainer.recoveries
    model, loss, optimizer = many_groups.parts()
    cut = lambda size: [part.size for part in plan.micro_batches(size)]  # noqa: E731
    assert_same(found, reference.train(model, loss, optimizer, batches, cut))
