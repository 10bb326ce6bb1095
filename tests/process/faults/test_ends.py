"""However a process that has a pool ends, its workers end too, and soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from onebox.wire import new_keys
from onebox.worker import WorkerConfig
from tests.process.faults.scripts import START_S, Script, gone, happens

INTERRUPTED_S = 30.0
"""An interrupted script has ended within this time."""

ORPHANED_S = 60.0
"""Workers whose owner was killed have ended within this time."""

TRAIN = """
with open_pool("cpu*2", threads=1) as pool:
    trainer = trainer_on(pool, "workers")
    steps(trainer, 3)
    ready(pool)
    steps(trainer, 1_000_000)
"""


def test_ctrl_c_while_training(tmp_path: Path) -> None:
    with Script(tmp_path, TRAIN) as script:
        script.wait_until_ready()
        script.signal(signal.SIGINT, group=True)  # as a terminal does
        status, _, errors = script.end(INTERRUPTED_S)
        assert status == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert gone(script.workers, 0)


@pytest.mark.parametrize("processes", [1, 3], ids=["the zygote is there", "workers are there"])
def test_ctrl_c_while_opening(tmp_path: Path, processes: int) -> None:
    body = f"""
import psutil, threading
def interrupt():
    while len(psutil.Process().children(recursive=True)) < {processes}:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    with open_pool("cpu*2", threads=1):
        time.sleep({START_S})
except KeyboardInterrupt:
    end_s = time.monotonic() + {INTERRUPTED_S}
    while len(psutil.Process().children(recursive=True)) > 1 and time.monotonic() < end_s:
        time.sleep(0.01)  # a worker that was just being born finds that nobody tells it anything, and ends
    print("interrupted", len(psutil.Process().children(recursive=True)))  # the zygote is there for the next
"""
    with Script(tmp_path, body) as script:
        assert script.end(START_S) == (0, "interrupted 1\n", "")


@pytest.mark.feature("Recovery: Leave no process behind")
@pytest.mark.parametrize(
    ("last", "status", "words"),
    [
        ("", 0, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("os._exit(4)", 4, ""),
    ],
    ids=["end", "exception", "hard exit"],
)
def test_a_script_that_never_closes_its_pool(tmp_path: Path, last: str, status: int, words: str) -> None:
    body = f"""
pool = open_pool("cpu*1", threads=1)
trainer = trainer_on(pool, "client")
ready(pool)
{last}
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        found, _, errors = script.end(INTERRUPTED_S)
        assert found == status
        assert words in errors
        assert not errors or words
        assert gone(script.workers, ORPHANED_S)


def test_a_script_that_ends_before_its_tensors_are_sent(tmp_path: Path) -> None:
    body = """
from onebox.wire import TensorSpec
from onebox.wire.protocol.requests import Put
pool = open_pool("cpu*1", threads=1)
ready(pool)
os.kill(pool.process_ids[0], signal.SIGSTOP)  # so that it reads none of them
for number in range(1, 9):
    zeros = torch.zeros(1 << 24, dtype=torch.uint8).numpy()
    pool.post(0, [Put((number,), (TensorSpec("uint8", (len(zeros),)),))], [zeros])
    del zeros
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        assert script.end(INTERRUPTED_S) == (0, "", "")
        assert gone(script.workers, ORPHANED_S)


@pytest.mark.feature("Recovery: Leave no process behind")
def test_workers_of_a_killed_process_end_by_themselves(tmp_path: Path) -> None:
    body = """
with open_pool("cpu*2", threads=1) as pool:
    trainer = trainer_on(pool, "workers")
    steps(trainer, 2)
    if os.fork() == 0:
        time.sleep(60)  # and holds all of its parent's pipes open
        os._exit(0)
    ready(pool)
    steps(trainer, 1_000_000)
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        script.signal(signal.SIGKILL)
        assert gone(script.workers, ORPHANED_S)
        script.signal(signal.SIGKILL, group=True)


def test_stopped_workers_of_a_killed_process_end_too(tmp_path: Path) -> None:
    body = """
with open_pool("cpu*2", threads=1) as pool:
    if os.fork() == 0:
        time.sleep(60)  # and holds all of its parent's pipes open
        os._exit(0)
    ready(pool)
    time.sleep(60)
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        for worker in script.workers:
            os.kill(worker, signal.SIGSTOP)
        assert happens(lambda: all(stopped(worker) for worker in script.workers), ORPHANED_S)
        script.signal(signal.SIGKILL)
        assert gone(script.workers, ORPHANED_S)
        script.signal(signal.SIGKILL, group=True)


def stopped(process: int) -> bool:
    """Tell whether a process has been stopped."""
    return psutil.Process(process).status() == psutil.STATUS_STOPPED


def test_workers_stay_when_the_thread_that_opened_their_pool_ends(tmp_path: Path) -> None:
    body = """
import threading
pools = []
thread = threading.Thread(target=lambda: pools.append(open_pool("cpu*2", threads=1)))
thread.start()
thread.join()
time.sleep(0.5)
with pools[0] as pool:
    train(pool, "workers", 2)
    print("trained")
"""
    with Script(tmp_path, body) as script:
        assert script.end(START_S) == (0, "trained\n", "")


def test_a_worker_whose_owner_has_ended_meanwhile_does_not_start() -> None:
    """Its owner may end before the worker can watch it; then its parent is another process."""
    keys = new_keys()
    config = WorkerConfig("cpu", 1, keys.public, keys.secret, keys.public, owner=1)
    command = [sys.executable, "-P", "-m", "onebox.worker"]
    words = msgspec.json.encode(config) + b"\n"
    ended = subprocess.run(command, input=words, capture_output=True, timeout=START_S, check=False)
    assert ended.returncode == 1
    assert b"process 1, which started this worker, has ended" in ended.stderr
    assert ended.stdout == b""


def test_forked_children_leave_the_pool_to_their_parent(tmp_path: Path) -> None:
    body = """
import multiprocessing
from torch.utils.data import DataLoader, TensorDataset

def child():
    for use in (lambda: trainer.step(*batch(0)), trainer.memory, lambda: train(pool, "workers", 1)):
        try:
            use()
        except onebox.errors.PoolError as error:
            print("refused" if "forked" in str(error) else error, flush=True)
    trainer.close()
    pool.close()

with open_pool("cpu*2", threads=1) as pool:
    trainer = trainer_on(pool, "workers")
    steps(trainer, 2)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode, flush=True)
    if os.fork() == 0:
        sys.exit(0)  # runs what is registered with atexit
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    for inputs, targets in DataLoader(TensorDataset(*batch(0, 64)), batch_size=16, num_workers=2):
        trainer.step(inputs, targets).item()
    print(trainer.steps_done)
"""
    with Script(tmp_path, body) as script:
        assert script.end(START_S) == (0, "refused\nrefused\nrefused\n0\n0\n6\n", "")
