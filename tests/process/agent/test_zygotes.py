"""Workers of leases that a zygote has forked: they are what workers that import PyTorch themselves are, and nothing of
them, or of the zygote, outlives the agent.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onebox.agent.admission import Share
from onebox.agent.lease_processes import RETRY_S, LeaseIsolation, LeaseZygotes
from onebox.agent.workers import (
    ClientImportsAlone,
    LeaseClosed,
    LeasedWorkerExited,
    LeaseEvent,
    LeaseNotStarted,
    LeaseReady,
    Workers,
)
from onebox.forking import SpawnFailed
from onebox.pool.launch import zygotes as zygotes_module
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.worker_user import WorkerUser, running_process
from onebox.pool.launch.zygotes import ZygoteProcess, worker_environment
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Done, LeaseEnded, Refused, Release, Want, WorkerEnded
from onebox.worker.sandbox import landlock, seccomp
from tests.kit import warm
from tests.kit.waiting import until
from tests.process.agent.raw import gone, house
from tests.process.agent.test_lease_users import readable_by_all
from tests.process.agent.worker_state import PATCH

ROOT = Path(__file__).resolve().parents[3]
SHARE = Share(device="cpu", threads=1, memory_bytes=1 << 26)
WIDE = Share(device="cpu", threads=2, memory_bytes=1 << 26)
WAIT_S = 60.0
USER = "60830"
ADDRESS = re.compile(r"[0-9a-fA-F]{7,}")
MAX_DATA = re.compile(r"Max data size +(\d+) +\d+")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zygotes are started however much memory other tests take."""
    monkeypatch.setattr("onebox.agent.lease_processes.SPARE_BYTES", 0)


@pytest.fixture
def made() -> Iterator[Callable[..., Workers]]:
    """Makes the workers of an agent, which are closed."""
    found: list[Workers] = []

    def make(**isolation: Any) -> Workers:
        found.append(
            Workers(host="lab", bind="127.0.0.1", advertise="127.0.0.1", isolation=LeaseIsolation(**isolation))
        )
        return found[-1]

    yield make
    for workers in found:
        workers.close()


def turn(workers: Workers, now_s: float = 0.0) -> list[LeaseEvent]:
    """Process what has happened by now."""
    poll = select.poll()
    for descriptor in workers.descriptors():
        poll.register(descriptor, select.POLLIN)
    return workers.attend({descriptor for descriptor, _ in poll.poll(10)}, now_s)


def lease(
    workers: Workers, number: int, client: str, share: Share = SHARE, now_s: float = 0.0, count: int = 1
) -> psutil.Process:
    """Return the first worker of a new lease."""
    assert workers.start(number, [share] * count, client, new_keys().public, 1.0, now_s) is None
    (ready,) = until(lambda: [news for news in turn(workers, now_s) if isinstance(news, LeaseReady)])
    return psutil.Process(ready.workers[0].process)


def end(workers: Workers, number: int) -> None:
    workers.end(number, 0.0, 0.0)
    until(lambda: any(isinstance(news, LeaseClosed) for news in turn(workers)))


def zygote_of(worker: psutil.Process) -> int | None:
    """Return the zygote that has forked a worker; ``None`` if this process has started it."""
    (parent, *_) = worker.parents()
    assert parent.pid == os.getpid() or (parent.ppid() == os.getpid() and parent.name() == "onebox-zygote")
    return None if parent.pid == os.getpid() else parent.pid


def library(process: int) -> str:
    """Return the address of PyTorch in a process."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return next(line.split("-")[0] for line in lines if line.endswith("libtorch_cpu.so"))


# ---- what they are


def states(folder: Path, *user: str) -> dict[str, Any]:
    """Return what processes of both kinds are."""
    (folder / "sitecustomize.py").write_text(PATCH)
    for each in (folder, *folder.parents[:3]):
        each.chmod(each.stat().st_mode | 0o055)
    line = [sys.executable, "-m", "tests.process.agent.worker_state", *user]
    environment = {
        **warm.single(),
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT))),
        "ONEBOX_SECRET": "must not be seen",
    }
    read, written = os.pipe()
    try:
        done = subprocess.run(
            readable_by_all(line) if user else line,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            pass_fds=[read],
        )
    finally:
        os.close(read)
        os.close(written)
    if user and "Permission denied" in done.stderr:
        pytest.skip("other users cannot run Python here")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_states(found: dict[str, Any]) -> None:
    """Require that both kinds are the same, and that the zygote has nothing of the agent."""
    forked, started = found["forked"], found["started"]
    words = [each.pop("words") for each in (forked, started)]
    limits = [MAX_DATA.search(each["limits"]) for each in (forked, started)]
    if None not in limits:  # what it may take beside what it has, which differs
        assert abs(int(limits[0][1]) - int(limits[1][1])) < 64 << 20
        for each in (forked, started):
            each["limits"] = MAX_DATA.sub("", each["limits"])
    assert forked == started
    (probed,) = re.findall(r"probed .*", words[0])
    assert probed in words[1]
    if landlock.version() and seccomp.supported():
        refused = dict(re.findall(r"'(\w+)': (\d+)", probed))
        assert {refused[name] for name in ("read", "write", "signal", "memory", "fork")} <= {"1", "13"}
    zygote = found["zygote"]
    assert "must not be seen" not in zygote["environ"] and "OMP_NUM_THREADS=1\0" in zygote["environ"]
    assert zygote["environ"] == forked["environ"]
    kinds = [what for what, _ in zygote["descriptors"] if what != "anon_inode:[landlock-ruleset]"]
    assert len(kinds) == 5 and kinds[:2] == ["/dev/null"] * 2  # beside them standard error
    assert kinds[3:] == ["anon_inode:[pidfd]", "socket:[]"], "the agent's process, and the socket to it"
    assert zygote["Threads"] == "1" and zygote["leads its session"]
    assert zygote["owner of its memory"] == 0 or os.geteuid() != 0, "no process of its user may inspect it"


def test_a_forked_worker_is_what_a_started_one_is(tmp_path: Path) -> None:
    check_states(states(tmp_path))


@as_root
def test_so_it_is_with_a_user_of_its_own_and_the_zygote_has_the_capabilities_to_change_it(tmp_path: Path) -> None:
    found = states(tmp_path, USER)
    check_states(found)
    worker, zygote = found["forked"], found["zygote"]
    assert worker["Uid"].split() == worker["Gid"].split() == [USER] * 4 and not worker["Groups"].split()
    assert [worker[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")] == ["0" * 16] * 4
    assert [zygote[name] for name in ("CapPrm", "CapEff")] == [f"{1 << 6 | 1 << 7:016x}"] * 2  # CAP_SETGID, CAP_SETUID
    assert zygote["Uid"].split() == ["0"] * 4, "which security.md says"


@as_root
@pytest.mark.parametrize("users", [False, True])
def test_a_zygote_of_root_forks_none_without_a_user_and_another_none_with_one(users: bool) -> None:
    zygote = ZygoteProcess(worker_environment(1), users=users)
    try:
        for account in (None if users else WorkerUser(60830, 60830), WorkerUser(0, 0)):
            with tempfile.TemporaryFile() as words, pytest.raises(SpawnFailed, match="is no user for a process of"):
                zygote.fork_worker(words, account)
        assert not psutil.Process(zygote.pid).children()
    finally:
        zygote.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="of root, which may do anything with any process")
def test_no_process_of_its_user_may_inspect_a_zygote() -> None:
    zygote = ZygoteProcess(worker_environment(1))
    try:
        assert zygote.wait_ready(WAIT_S)
        with pytest.raises(PermissionError):
            Path(f"/proc/{zygote.pid}/environ").read_bytes()
    finally:
        zygote.close()


def test_forks_of_one_zygote_draw_different_random_numbers() -> None:
    """Keys and nonces come from these; what Python draws at its start, such as the seed of hashes, is shared."""
    program = """
import os, random, secrets, ssl, sys
import zmq
import onebox.worker.process.zygote
from onebox.forking import fork
ssl.RAND_bytes(1), random.random(), zmq.curve_keypair()
for _ in range(2):
    if not fork():
        key, _ = zmq.curve_keypair()
        print(ssl.RAND_bytes(16).hex(), random.random(), secrets.token_hex(), key.decode(), flush=True)
        os._exit(0)
    os.wait()
"""
    done = warm.run([sys.executable, "-c", program], timeout=WAIT_S, env=warm.single())
    one, other = (line.split() for line in done.stdout.decode().splitlines())
    assert len(one) == len(other) == 4 and not set(one) & set(other), done.stderr


# ---- whose they are


def test_workers_of_all_clients_are_children_of_one_zygote(made: Callable[..., Workers]) -> None:
    workers = made()
    ana, bob, again = (lease(workers, number, client) for number, client in enumerate(("ana", "bob", "ana")))
    (zygote,) = {zygote_of(each) for each in (ana, bob, again)}
    assert zygote is not None
    assert library(ana.pid) == library(bob.pid), "which docs/concepts/security.md says"
    sessions = {os.getsid(each.pid) for each in (ana, bob, again)}
    assert sessions == {ana.pid, bob.pid, again.pid}
    end(workers, 0)
    assert zygote_of(lease(workers, 3, "cy")) == zygote
    workers.close()
    assert gone([zygote, bob.pid, again.pid]) and not workers.ended_zygotes()


def test_without_a_zygote_workers_have_other_addresses(made: Callable[..., Workers]) -> None:
    workers = made(import_per_client=True)
    ana, bob = lease(workers, 1, "ana"), lease(workers, 2, "bob")
    assert zygote_of(ana) is zygote_of(bob) is None
    assert library(ana.pid) != library(bob.pid)


def test_another_number_of_threads_has_another_zygote(made: Callable[..., Workers]) -> None:
    workers = made()
    narrow, wide, again = (
        lease(workers, number, client, share)
        for number, (client, share) in enumerate((("ana", SHARE), ("bob", WIDE), ("cy", WIDE)))
    )
    zygotes = [zygote_of(each) for each in (narrow, wide, again)]
    assert zygotes[0] != zygotes[1] == zygotes[2] and None not in zygotes
    for worker, threads in ((narrow, "1"), (wide, "2")):
        assert worker.environ()["OMP_NUM_THREADS"] == threads


def test_a_lease_with_two_numbers_of_threads_has_workers_of_two_zygotes(made: Callable[..., Workers]) -> None:
    workers = made()
    assert workers.start(1, [SHARE, WIDE], "ana", new_keys().public, 1.0, 0.0) is None
    (ready,) = until(lambda: [news for news in turn(workers) if isinstance(news, LeaseReady)])
    zygotes = {zygote_of(psutil.Process(each.process)) for each in ready.workers}
    assert len(zygotes) == 2 and None not in zygotes


def test_a_lease_that_is_given_back_at_once_leaves_nothing(made: Callable[..., Workers]) -> None:
    workers = made()
    zygote = zygote_of(lease(workers, 0, "ana"))
    for number in range(1, 4):
        assert workers.start(number, [SHARE], f"client {number}", new_keys().public, 1.0, 0.0) is None
        end(workers, number)
    end(workers, 0)
    until(lambda: not psutil.Process(zygote).children())


# ---- how they end


def test_a_killed_zygote_is_replaced_and_leases_go_on(made: Callable[..., Workers]) -> None:
    workers = made()
    before = lease(workers, 1, "ana")
    zygote = zygote_of(before)
    assert zygote is not None
    os.kill(zygote, signal.SIGKILL)
    (news,) = until(lambda: turn(workers) == [] and workers.ended_zygotes())
    assert news.process == zygote and news.why == "it has ended"
    after = lease(workers, 2, "bob")
    assert zygote_of(after) not in (zygote, None) and before.is_running()
    end(workers, 1)
    assert gone([before.pid])


def test_a_zygote_that_is_killed_as_a_lease_begins_is_done_without(made: Callable[..., Workers]) -> None:
    workers = made()
    zygote = zygote_of(lease(workers, 1, "ana"))
    assert zygote is not None
    os.kill(zygote, signal.SIGKILL)
    assert gone([zygote])
    assert zygote_of(lease(workers, 2, "bob")) is None
    assert [each.process for each in workers.ended_zygotes()] == [zygote]


def test_a_stopped_zygote_holds_up_no_lease_for_long(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.agent.lease_processes.SPAWN_S", 0.2)
    workers = made()
    zygote = zygote_of(lease(workers, 1, "ana"))
    assert zygote is not None
    os.kill(zygote, signal.SIGSTOP)
    assert zygote_of(lease(workers, 2, "bob")) is None
    (news,) = workers.ended_zygotes()
    assert news.process == zygote and "nothing was forked within 0.2 s" in news.why
    assert gone([zygote])
    assert zygote_of(lease(workers, 3, "cy")) is None, "no other is started at once"
    end(workers, 3)
    assert zygote_of(lease(workers, 4, "di", now_s=RETRY_S)) is not None


def test_a_zygote_that_is_to_give_way_tells_how_its_workers_end(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = made()
    worker = lease(workers, 1, "ana")
    zygote = zygote_of(worker)
    assert zygote is not None
    monkeypatch.setattr("onebox.agent.lease_processes.SPARE_BYTES", 1 << 60)
    assert until(lambda: turn(workers, 10.0) == [] and workers.ended_zygotes())[0].why == "memory is short"
    assert zygote_of(lease(workers, 2, "bob")) is None
    os.kill(worker.pid, signal.SIGSEGV)
    exited = until(lambda: [each for each in turn(workers) if isinstance(each, LeasedWorkerExited)])
    assert exited[0].exit_status == -signal.SIGSEGV
    until(lambda: turn(workers) == [] and running_process(zygote) is None)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_zygote_whose_imports_fail_or_hang_is_done_without(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program = "raise ImportError('no torch here')" if how == "fails" else "import time; time.sleep(600)"
    monkeypatch.setattr(zygotes_module, "COMMAND", (sys.executable, "-P", "-c", program))
    monkeypatch.setattr("onebox.agent.lease_processes.IMPORT_S", 60.0 if how == "fails" else 0.0)
    workers = made()
    assert zygote_of(lease(workers, 1, "ana")) is None
    (news,) = workers.ended_zygotes()
    assert ("ImportError: no torch here" if how == "fails" else "not ready after 0 s") in news.why
    assert running_process(news.process) is None
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, RETRY_S - 1) is None
    assert not workers.pressed and len(list(workers.descriptors())) == 3, "those of the workers, and no zygote"


FAILING = """
import atexit, os, sys
import onebox.worker.process.zygote as zygote

atexit.register(lambda: print("left as an interpreter ends", file=sys.stderr, flush=True))

def fail(*given, **named):
    raise PermissionError(1, "setgroups")

zygote.serve_worker = fail
zygote.main(users=False, stays=True)
os._exit(0)
"""
"""A zygote none of whose forks can become a worker."""


def test_a_client_of_whom_a_fork_fails_is_told_and_does_without(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes_module, "COMMAND", (sys.executable, "-P", "-c", FAILING))
    workers = made()
    assert workers.start(1, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None
    found = until(lambda: turn(workers))
    assert found[0] == ClientImportsAlone(1, "a forked worker ended as it started")
    assert isinstance(found[1], LeaseNotStarted)
    assert "PermissionError" in found[1].why
    assert "left as" not in found[1].why, "it would clean up what is the zygote's"
    assert zygote_of(lease(workers, 2, "ana")) is None
    assert not workers.ended_zygotes()


SERVE = """
import signal, sys
from onebox.agent.lease_processes import LeaseIsolation
from onebox.agent.workers import Workers
from tests.process.agent.test_zygotes import lease

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background of a shell ignores it
workers = Workers(host="lab", bind="127.0.0.1", advertise="127.0.0.1", isolation=LeaseIsolation())
lease(workers, 1, "ana")
print("ready", flush=True)
sys.stdin.read()
"""
"""An agent's workers, without what ends them in order."""


@pytest.mark.parametrize("stopped", [False, True])
def test_all_end_with_an_agent_that_is_killed_or_interrupted(stopped: bool) -> None:
    environment = warm.single() | {"PYTHONPATH": str(ROOT)}
    for number in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        ) as agent:
            assert agent.stdout is not None and agent.stdout.readline() == b"ready\n"
            family = psutil.Process(agent.pid).children(recursive=True)
            assert sorted(each.name() for each in family) == ["onebox-worker", "onebox-zygote"]
            if stopped:
                for each in family:
                    each.suspend()
            os.killpg(agent.pid, number)
        assert gone([each.pid for each in family]), number


# ---- in an agent


def test_the_journal_tells_of_a_zygote_that_has_ended_and_a_new_client_is_served() -> None:
    with house() as agent:
        ana = agent.client("ana")
        leased = ana.lease(Want("cpu", threads=1))
        zygote = zygote_of(psutil.Process(leased.workers[0].process))
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        agent.until("zygote-ended")
        assert agent.told("zygote-ended") == [{"process": zygote, "reason": "it has ended"}]
        other = agent.client("bob").lease(Want("cpu", threads=1))
        assert zygote_of(psutil.Process(other.workers[0].process)) not in (zygote, None)
        (began,) = agent.told("started")
        assert began["imports"] == "one for all clients"


def test_an_agent_imports_for_each_worker_where_its_owner_says_so(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "onebox", "serve", "--bind", "127.0.0.1", "--port", "0", "--devices", "sim"]
    environment = warm.single() | {"ONEBOX_CONFIG": str(tmp_path)}
    options = ["--import-per-client", *(["--allow-root"] if os.geteuid() == 0 else [])]
    with warm.Popen([*line, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as agent:
        try:
            assert agent.stdout is not None
            began = json.loads(agent.stdout.readline())
            assert (began["event"], began["imports"]) == ("started", "one for each worker")
        finally:
            agent.terminate()


def canary(process: int) -> bytes:
    """Return the random bytes from which a process has the values that guard its stack: ``AT_RANDOM`` of
    ``getauxval(3)``."""
    entries = dict(struct.iter_unpack("QQ", Path(f"/proc/{process}/auxv").read_bytes()))
    with open(f"/proc/{process}/mem", "rb") as memory:
        memory.seek(entries[25])
        return memory.read(16)


def test_after_a_crash_its_client_imports_alone_and_others_keep_their_zygote() -> None:
    with house() as agent:
        ana, bob = agent.client("ana"), agent.client("bob")
        crashed, running = (each.lease(Want("cpu", threads=1)) for each in (ana, bob))
        crash, neighbour = (psutil.Process(each.workers[0].process) for each in (crashed, running))
        zygote = zygote_of(crash)
        assert zygote == zygote_of(neighbour) is not None
        others = canary(neighbour.pid), library(neighbour.pid)
        assert canary(crash.pid) == others[0], "which docs/concepts/security.md says"
        os.kill(crash.pid, signal.SIGSEGV)
        ana.take(WorkerEnded)
        agent.until("imports-alone")
        assert agent.told("imports-alone") == [
            {"client": "ana", "lease": crashed.lease, "reason": "a worker ended by SIGSEGV"}
        ]
        bob.send(Release(bob.number(), running.lease))
        bob.take(Done)
        assert not any(isinstance(message, WorkerEnded | LeaseEnded) for message in bob.heard)
        ana.send(Release(ana.number(), crashed.lease))
        ana.take(Done)
        ana.heard.clear()  # such as what was told twice
        again = psutil.Process(ana.lease(Want("cpu", threads=1)).workers[0].process)
        assert zygote_of(again) is None
        assert canary(again.pid) != others[0] and library(again.pid) != others[1]
        other = psutil.Process(agent.client("cy").lease(Want("cpu", threads=1)).workers[0].process)
        assert zygote_of(other) == zygote and not agent.told("zygote-ended")


def test_a_client_whose_worker_crashes_gets_no_address() -> None:
    with house() as agent:
        ana = agent.client("ana")
        os.kill(ana.lease(Want("cpu", threads=1)).workers[0].process, signal.SIGABRT)
        ended = ana.take(WorkerEnded)
        assert ended.exit_status == -signal.SIGABRT and "Fatal Python error: Aborted" in ended.last_words
        assert "hread 0x… " in ended.last_words and not ADDRESS.search(ended.last_words)


CRASHING = "import faulthandler, os; faulthandler.enable(); os.abort()"
"""A worker that crashes as it starts."""


def test_a_client_whose_worker_crashes_as_it_starts_gets_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "command", (sys.executable, "-P", "-c", CRASHING))
    monkeypatch.setattr(LeaseZygotes, "spawn_worker", lambda *given: None)
    with house() as agent:
        ana = agent.client("ana")
        ana.ask(Want("cpu", threads=1))
        why = ana.take(Refused).reason
        assert "Fatal Python error: Aborted" in why and "0x…" in why and not ADDRESS.search(why)
