"""Stages by processes: what they make, how they fail, and that they are gone afterwards, however it ends."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from onebox.errors import DataError, PlanError, UsageError
from onebox.feed.pipeline import runner as pipeline_module
from onebox.feed.pipeline.runner import Pipeline, StageSpec
from tests.kit import leaks
from tests.kit.waiting import until

SCRIPT = Path(__file__).with_name("feed_script.py")
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with leaks.nothing_left():
        yield
    assert [thread for thread in threading.enumerate() if thread.name.startswith("onebox-feed")] == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def run(work: Callable[[Any], Any], items: Any = range(8), concurrency: Any = 1, **options: Any) -> list[Any]:
    with Pipeline(items, [StageSpec("process", work, concurrency, "processes", **options)]) as ready:
        return list(ready)


def test_results_come_in_order_from_processes_that_are_not_this_one():
    table = torch.arange(50_000).reshape(500, 100)  # inherited: it does not travel

    def work(number):
        time.sleep(0.01 * (1 + number % 3))  # long enough that each process has some
        return {"row": table[number].clone(), "large": table + number, "pid": os.getpid()}

    results = run(work, range(30), 3)
    for number, result in enumerate(results):
        assert torch.equal(result["row"], table[number])
        assert torch.equal(result["large"], table + number)
    pids = {result["pid"] for result in results}
    assert len(pids) == 3
    assert os.getpid() not in pids


def test_stages_of_both_kinds_hand_on_to_each_other():
    specs = [
        StageSpec("read", lambda number: (number, bytes([number]) * 100_000), 2, "processes"),
        StageSpec("process", lambda pair: (pair[0], torch.frombuffer(bytearray(pair[1]), dtype=torch.uint8)), 2),
        StageSpec("upload", lambda pair: (pair[0], pair[1].long().sum()), 2, "processes"),
    ]
    with Pipeline(range(20), specs) as ready:
        assert [(number, int(total)) for number, total in ready] == [(n, 100_000 * n) for n in range(20)]
        read, process, upload, _ = ready.counters()
    assert read.by == "processes"
    assert (read.bytes, process.bytes, upload.bytes) == (2_000_000, 2_000_000, 160)


# ---- what is not there in a process of its own


def test_one_thread_computes_even_after_many_did_here():
    torch.set_num_threads(2)  # OpenMP's threads do not survive a fork; who waits for them waits for ever
    data = torch.randn(200, 200)
    for _ in range(3):
        (data @ data).exp().sum()
    found = run(lambda number: (torch.get_num_threads(), (data @ data).sum().item()), range(2), timeout_s=PATIENCE_S)
    assert [threads for threads, _ in found] == [1, 1]
    assert found[0][1] == pytest.approx((data @ data).sum().item(), rel=1e-3)


def test_what_others_talk_through_is_not_held_open():
    one, other = socket.socketpair()
    read_end, write_end = os.pipe()
    held = [one.fileno(), write_end]
    with other, Pipeline(range(100), [StageSpec("process", lambda number: number, 1, "processes")]) as ready:
        assert next(ready) == 0
        one.close()
        os.close(write_end)
        other.settimeout(PATIENCE_S)
        assert other.recv(1) == b""  # would block if a child had the other end, too
        assert os.read(read_end, 1) == b""
        assert next(ready) == 1
    os.close(read_end)
    assert held


def test_files_that_are_open_stay_so(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(10)))
    with path.open("rb") as file:
        assert run(lambda number: os.pread(file.fileno(), 1, number)) == [bytes([number]) for number in range(8)]


def test_what_is_printed_is_seen_once(capfd):
    print("before")

    def work(number):
        print("at", number)
        return number

    run(work, range(3))
    out = capfd.readouterr().out
    assert out.splitlines() == ["before", "at 0", "at 1", "at 2"]


def test_no_warning_of_threads_beside_a_fork(monkeypatch):
    fork = os.fork

    def forks_as_python_3_12():
        said = f"This process (pid={os.getpid()}) is multi-threaded, use of fork() may lead to deadlocks in the child."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return fork()

    monkeypatch.setattr(os, "fork", forks_as_python_3_12)
    assert run(lambda number: number) == list(range(8))


# ---- errors


def test_an_error_comes_in_its_place_with_what_was_said_there():
    def broken(number):
        if number == 5:
            raise KeyError("label")
        return number

    with Pipeline(range(10), [StageSpec("process", broken, 2, "processes")]) as ready:
        assert [next(ready) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match="process failed at item 5: KeyError: 'label'") as raised:
            next(ready)
        assert list(ready) == []
    assert raised.value.sample == 5
    assert 'raise KeyError("label")' in "".join(raised.value.__cause__.__notes__)


@pytest.mark.parametrize(
    "error", [DataError("it is damaged", path="a.jpg", sample=3), UsageError("do not"), PlanError("none fits")]
)
def test_errors_that_say_all_are_kept(error):
    def broken(number):
        raise error

    with pytest.raises(type(error)) as raised:
        run(broken)
    assert str(raised.value) == str(error)
    assert raised.value.__notes__[-1] == "process failed at item 0"
    if isinstance(error, DataError):
        assert (raised.value.path, raised.value.sample) == ("a.jpg", 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "its process was killed by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process was killed by SIGKILL, as the system does"),
        (lambda: os._exit(3), "its process ended with status 3"),
        (lambda: sys.exit(4), "SystemExit: 4"),
    ],
)
def test_a_process_that_ends_is_an_error_that_names_the_item(end, said):
    def work(number):
        if number == 5:
            end()
        return number

    with Pipeline(range(10), [StageSpec("read", work, 2, "processes")]) as ready:
        assert [next(ready) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match=f"^read failed at item 5: {said}"):
            next(ready)


def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(UsageError, match=r"a threading\.Event cannot go between processes"):
        run(lambda number: {"a": threading.Event()})


def test_an_item_that_cannot_travel_is_named():
    with pytest.raises(UsageError, match=r"a threading\.Event cannot go between processes"):
        run(lambda event: 1, [threading.Event()])


def test_a_process_that_hangs_is_named_and_killed():
    def work(number):
        if number == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        return number

    with Pipeline(range(10), [StageSpec("process", work, 2, "processes", timeout_s=0.5)]) as ready:
        assert [next(ready), next(ready)] == [0, 1]
        with pytest.raises(DataError, match=r"process has been inside item 2 for 0\.5 s"):
            next(ready)


def test_without_whoever_forks_there_is_an_error():
    before = {child.pid for child in feed_children()}  # of earlier tests: what forks programs, or workers
    with Pipeline(itertools.count(), [StageSpec("process", lambda number: number, 1, "processes")]) as ready:
        next(ready)
        (server,) = {child.ppid() for child in feed_children() if child.pid not in before} - {os.getpid()}
        os.kill(server, signal.SIGKILL)
        with pytest.raises(DataError, match=r"^process failed at item \d+: the process that forks its processes has"):
            deque(ready, maxlen=0)


def feed_children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


# ---- ends


def test_leaving_early_ends_processes_in_the_middle_of_their_work(tmp_path):
    begun = tmp_path / "begun"

    def work(number):
        if number == 3:
            begun.touch()
            time.sleep(600)
        return number

    with pytest.raises(KeyboardInterrupt), Pipeline(range(9), [StageSpec("read", work, 2, "processes")]) as ready:
        assert next(ready) == 0
        until(begun.exists)
        raise KeyboardInterrupt


@pytest.mark.feature("Feed: Find the bottleneck, and adjust to it")
def test_auto_forks_more_while_it_runs(monkeypatch):
    monkeypatch.setattr(pipeline_module, "WINDOW_S", 0.0)

    def slow(number):
        time.sleep(0.01)
        return os.getpid()

    with Pipeline(range(60), [StageSpec("process", slow, "auto", "processes")], cores=3) as ready:
        seen = [(pid, ready.counters()[0].concurrency) for pid in ready]
    assert seen[0][1] == 1
    assert max(count for _, count in seen) > 1
    assert len({pid for pid, _ in seen}) > 1


def gone(pids: list[int]) -> bool:
    """Whether processes are gone, within some seconds; who has not been waited for counts as gone."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        states = [psutil.Process(pid).status() for pid in pids if psutil.pid_exists(pid)]
        if all(state == psutil.STATUS_ZOMBIE for state in states):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(params=["iterating", "computing"])
def script(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A feed in a session of its own, and the processes that work there."""
    command = [sys.executable, str(SCRIPT), request.param]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            workers = [int(word) for word in process.stdout.readline().split()]
            assert len(workers) == 2, process.communicate(timeout=PATIENCE_S)
            yield process, [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        finally:
            process.kill()


def test_ctrl_c_ends_everything_at_once(script):
    process, pids = script
    assert len(pids) == 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (1, -signal.SIGINT)
    assert out.split() == ["left:"]
    assert errors.count("Traceback") == 1  # that of the consumer
    assert "KeyboardInterrupt" in errors
    assert "Warning" not in errors
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("script", ["iterating"], indirect=True)
def test_nobody_outlives_a_parent_that_is_killed(script):
    process, pids = script
    assert len(pids) == 3
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert gone(pids)


def test_what_processes_take_of_processors_is_counted():
    def compute(number):
        end_s = time.process_time() + 0.05
        while time.process_time() < end_s:
            pass
        return number

    specs = [StageSpec("read", compute, 1, "processes"), StageSpec("process", compute, 1)]
    with Pipeline(range(2), specs) as ready:
        assert list(ready) == [0, 1]
        read, process, _ = ready.counters()
    assert 0.1 <= read.cpu_s <= read.busy_s
    assert process.cpu_s <= process.busy_s


def test_a_process_has_its_next_item_before_it_has_finished_one(tmp_path):
    let_go, pulled = tmp_path / "go", []

    def work(number):
        while not let_go.exists():
            time.sleep(0.005)
        return number

    def items():
        for number in range(8):
            pulled.append(number)
            yield number

    specs = [StageSpec("read", lambda number: number), StageSpec("process", work, 1, "processes")]
    with Pipeline(items(), specs) as ready:
        until(lambda: len(pulled) >= 4)  # two at the process, and two that are read
        let_go.touch()
        assert list(ready) == list(range(8))


def test_it_may_begin_in_any_thread():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run(lambda number: (number, os.getpid()), range(3), 2)))
    thread.start()
    thread.join(PATIENCE_S)
    assert [number for number, _ in found] == [0, 1, 2]
    assert os.getpid() not in {pid for _, pid in found}
