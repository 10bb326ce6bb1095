"""Pools on a real Ray cluster: two nodes on this machine, each with an address of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from onebox.cluster.spec import GPU_MEMORY
from onebox.errors import PoolError, UsageError, WorkerDied, WorkerHung
from onebox.plan import Plan
from onebox.pool import open_pool
from tests.kit.reference import assert_same
from tests.kit.stages import reference, run, staged
from tests.process.cluster.conftest import HEAD, OTHER, Nodes
from tests.process.faults.training import WITHIN_S, fails, steps, train, trainer_on

SIZES = (8, 8, 5, 8)

THIRD = "127.0.0.4"


def actor_of(process: int) -> psutil.Process:
    """Return the actor whose agent has started a worker."""
    return next(each for each in psutil.Process(process).parents() if "AgentActor" in " ".join(each.cmdline()))


@pytest.mark.feature("Clusters: Train on a Ray cluster, from inside or outside")
def test_two_nodes_train_as_one_process_does_and_a_killed_worker_is_replaced(nodes: Nodes) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with open_pool("ray/cpu*2/spread/memory=512m", threads=1) as pool:
        assert signal.getsignal(signal.SIGTERM) is handler
        assert {device.address for device in pool.devices} == {HEAD, OTHER}
        assert len({device.host for device in pool.devices}) == 2
        assert [(device.memory_bytes, device.threads) for device in pool.devices] == [(512 << 20, 1)] * 2
        assert len({actor_of(process) for process in pool.process_ids}) == 2
        replicas = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=3)
        assert_same(run(pool, "mlp", replicas, SIZES), reference("mlp", replicas, SIZES))
        stages = staged("mlp", [0, 1])
        assert_same(run(pool, "mlp", stages, SIZES), reference("mlp", stages, SIZES))

        with trainer_on(pool, "workers") as trainer:
            steps(trainer, 2)
            os.kill(pool.process_ids[1], signal.SIGKILL)
            raised = fails(lambda: steps(trainer, 10_000))
        assert raised.after_s < WITHIN_S
        assert isinstance(raised.error, WorkerDied)
        assert (raised.error.worker, raised.error.exit_status) == (1, -signal.SIGKILL)
        assert raised.error.host == pool.devices[1].host
        assert pool.recover_workers().replaced == (1,)
        assert_same(run(pool, "mlp", replicas, SIZES), reference("mlp", replicas, SIZES))
        processes = pool.process_ids
    assert not any(psutil.pid_exists(process) for process in processes)


def test_a_killed_node_is_noticed_and_its_worker_moves_to_another_and_a_killed_actor_is_noticed(nodes: Nodes) -> None:
    with open_pool("ray/cpu*2/spread") as pool:  # each has both cores of its node
        with trainer_on(pool, "workers") as trainer:
            steps(trainer, 2)
            worker = [device.address for device in pool.devices].index(OTHER)
            nodes.kill(OTHER)
            raised = fails(lambda: steps(trainer, 10_000))
            nodes.add(THIRD)
        assert raised.after_s < WITHIN_S
        assert isinstance(raised.error, WorkerDied | WorkerHung)  # whoever notices first, Ray or the pool
        assert raised.error.worker == worker
        assert pool.recover_workers().replaced == (worker,)
        assert pool.devices[worker].address == THIRD
        train(pool, "workers", 2)

        actor_of(pool.process_ids[worker]).kill()
        raised = fails(lambda: train(pool, "workers", 10_000))
        assert raised.after_s < WITHIN_S
        assert isinstance(raised.error, WorkerDied | WorkerHung)
        assert raised.error.worker == worker


def test_a_worker_of_a_killed_node_is_given_up_where_there_is_no_room_for_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.cluster.source.ROOM_S", 1.0)
    with open_pool("ray/cpu*2/spread") as pool:
        worker = next(device.number for device in pool.devices if device.address != HEAD)
        nodes.kill(pool.devices[worker].address)
        fails(lambda: train(pool, "workers", 10_000))
        healing = pool.recover_workers()
        assert (healing.replaced, healing.gone) == ((), (worker,))
        assert "found no room for the actor" in str(healing.lost[worker])
        nodes.add(OTHER)


def test_workers_of_one_node_share_memory(nodes: Nodes) -> None:
    with open_pool("ray/cpu*2/pack", threads=1) as pool, trainer_on(pool, "workers") as trainer:
        assert len({device.address for device in pool.devices}) == 1
        steps(trainer, 1)
        for process in pool.process_ids:
            assert "memfd:onebox" in Path(f"/proc/{process}/maps").read_text()


def test_a_client_that_is_killed_leaves_nothing(nodes: Nodes) -> None:
    script = "import onebox, os; len(onebox.open('ray/cpu*2')); print('opened', flush=True); os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.stdout, ended.returncode) == ("opened\n", -signal.SIGKILL), ended.stderr


@pytest.mark.feature("Clusters: Train on a Ray cluster, from inside or outside")
def test_a_client_from_outside_trains_too(nodes: Nodes) -> None:
    with open_pool(f"ray://{HEAD}:{nodes.port}/cpu*2/spread", threads=1) as pool:
        replicas = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=3)
        assert_same(run(pool, "mlp", replicas, SIZES), reference("mlp", replicas, SIZES))


@pytest.mark.feature("Clusters: Ask for GPUs by type and memory")
def test_gpus_are_chosen_by_type_and_memory(nodes: Nodes) -> None:
    """These nodes only say that they have GPUs. The PyTorch of all has no CUDA, or no GPU: the error names the node."""
    small, large = "127.0.0.5", "127.0.0.6"
    try:
        for address, memory in ((small, "16GiB"), (large, "80GiB")):
            nodes.add(address, num_gpus=1, resources={"accelerator_type:A100": 1.0}, labels={GPU_MEMORY: memory})
        for _ in range(2):
            with pytest.raises(PoolError, match=re.escape(f"({large})")) as caught:
                open_pool("ray/cuda*1/type=A100/memory=40g")
            assert small not in str(caught.value)
        with pytest.raises(UsageError, match="GPUs of type A100 with 100 GiB of the cluster, which has none") as said:
            open_pool("ray/cuda*1/type=A100/memory=100g")
        assert "80 GiB on each GPU" in str(said.value)
    finally:
        for address in (small, large):
            nodes.stop(address)


def test_room_that_is_not_there_is_said_with_what_is(nodes: Nodes) -> None:
    with pytest.raises(PoolError) as caught:
        open_pool("ray/cpu*5/threads=1/wait=1")
    for part in ("no room", "asked for: 5 x (1 CPU), by PACK", "it has: 2 nodes", f"({HEAD}): 2 CPU", "taken: 4 CPU"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="all GPUs of the cluster, which has none: 2 nodes"):
        open_pool("ray/cuda")


def test_a_cluster_that_is_not_there_is_said(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        for spec in (f"ray://127.0.0.1:{port}/cpu", "ray/cpu"):
            with pytest.raises(PoolError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
                open_pool(spec)


def test_a_connection_of_the_user_s_own_is_used_and_left(nodes: Nodes) -> None:
    import ray

    ray.init(log_to_driver=False, configure_logging=False)
    try:
        with pytest.raises(UsageError, match=r"connected to a Ray cluster already; open 'ray'"):
            open_pool(f"ray://{HEAD}:10001/cpu")
        with pytest.raises(UsageError, match="all GPUs of type H100"):
            open_pool("ray/type=H100")
        assert ray.is_initialized()
    finally:
        ray.shutdown()
