"""Fork servers that a zygote has forked: they are what fork servers that import PyTorch themselves are, and nothing of
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onebox.agent.admission import Share
from onebox.agent.lease_processes import LeaseIsolation, LeaseProcesses
from onebox.agent.workers import LeaseClosed, LeaseEvent, LeaseReady, Workers
from onebox.forking import ForkServerEnded
from onebox.pool.launch import fork_server as fork_server_module
from onebox.pool.launch.fork_server import ForkServerProcess, ZygoteProcess, worker_environment
from onebox.pool.launch.worker_user import WorkerUser, running_process
from onebox.pool.launch.zygotes import RETRY_S, Zygotes
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Done, LeaseEnded, Refused, Release, Want, WorkerEnded
from onebox.worker.sandbox import landlock, seccomp
from tests.kit import warm
from tests.kit.waiting import until
from tests.process.agent.fork_server_state import PATCH
from tests.process.agent.raw import gone, house
from tests.process.agent.test_lease_users import readable_by_all

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
    """Zygotes are started and fork servers kept however much memory other tests take."""
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


def lease(workers: Workers, number: int, client: str, share: Share = SHARE, now_s: float = 0.0) -> psutil.Process:
    """Return the worker of a new lease."""
    assert workers.start(number, [share], client, new_keys().public, 1.0, now_s) is None
    until(lambda: any(isinstance(news, LeaseReady) for news in turn(workers, now_s)))
    (worker,) = workers._crews[number].workers
    return psutil.Process(worker.pid)


def end(workers: Workers, number: int) -> None:
    workers.end(number, 0.0, 0.0)
    until(lambda: any(isinstance(news, LeaseClosed) for news in turn(workers)))


def ancestors(worker: psutil.Process) -> list[int]:
    """Return the fork server of a worker, and what is between it and this process."""
    found = [each.pid for each in worker.parents()]
    return found[: found.index(os.getpid())]


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
    line = [sys.executable, "-m", "tests.process.agent.fork_server_state", *user]
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
    for which in ("server", "worker"):
        forked, started = found["forked"][which], found["started"][which]
        limits = [MAX_DATA.search(each["limits"]) for each in (forked, started)]
        if None not in limits and which == "worker":  # what it may take beside what it has, which differs
            assert abs(int(limits[0][1]) - int(limits[1][1])) < 64 << 20
            for each in (forked, started):
                each["limits"] = MAX_DATA.sub("", each["limits"])
        assert forked == started
    (probed,) = re.findall(r"probed .*", found["forked"]["words"])
    assert probed in found["started"]["words"]
    if landlock.version() and seccomp.supported():
        refused = dict(re.findall(r"'(\w+)': (\d+)", probed))
        assert {refused[name] for name in ("read", "write", "signal", "memory", "fork")} <= {"1", "13"}
    zygote = found["zygote"]
    assert "must not be seen" not in zygote["environ"] and "OMP_NUM_THREADS=1\0" in zygote["environ"]
    assert zygote["environ"] == found["forked"]["server"]["environ"]
    kinds = [what for what, _ in zygote["descriptors"] if what != "anon_inode:[landlock-ruleset]"]
    assert len(kinds) == 5 and kinds[:2] == ["/dev/null"] * 2  # beside them standard error
    assert kinds[3:] == ["anon_inode:[pidfd]", "socket:[]"], "the agent's process, and the socket to it"
    assert zygote["Threads"] == "1" and zygote["leads its session"]


def test_a_forked_fork_server_and_its_worker_are_what_started_ones_are(tmp_path: Path) -> None:
    check_states(states(tmp_path))


@as_root
def test_so_they_are_with_a_user_of_their_own_and_the_zygote_has_the_capabilities_to_change_it(tmp_path: Path) -> None:
    found = states(tmp_path, USER)
    check_states(found)
    server, zygote = found["forked"]["server"], found["zygote"]
    assert server["Uid"].split() == server["Gid"].split() == [USER] * 4 and not server["Groups"].split()
    assert [server[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")] == ["0" * 16] * 4
    assert [zygote[name] for name in ("CapPrm", "CapEff")] == [f"{1 << 6 | 1 << 7:016x}"] * 2  # CAP_SETGID, CAP_SETUID
    assert zygote["owner of its memory"] == 0 and zygote["Uid"].split() == ["0"] * 4, "which security.md says"


@as_root
@pytest.mark.parametrize("users", [False, True])
def test_a_zygote_of_root_forks_none_without_a_user_and_another_none_with_one(users: bool) -> None:
    environment = worker_environment(1)
    zygote = ZygoteProcess(environment, users=users)
    try:
        assert zygote.wait_ready(WAIT_S)
        made = ForkServerProcess(environment, None if users else WorkerUser(60830, 60830), zygote)
        with pytest.raises(ForkServerEnded, match="is no user for a fork of this zygote") as ended:
            made.wait_ready(WAIT_S)
        assert "Traceback" not in str(ended.value)
        made.close()
        root = ForkServerProcess(environment, WorkerUser(0, 0), zygote)
        with pytest.raises(ForkServerEnded, match="is no user for a fork of this zygote"):
            root.wait_ready(WAIT_S)
        root.close()
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


def test_clients_have_fork_servers_of_their_own_and_one_zygote(made: Callable[..., Workers]) -> None:
    workers = made()
    ana, bob, again = (lease(workers, number, client) for number, client in enumerate(("ana", "bob", "ana")))
    chains = [ancestors(each) for each in (ana, bob, again)]
    assert {len(chain) for chain in chains} == {2} and len({chain[1] for chain in chains}) == 1
    assert len({chain[0] for chain in chains}) == 3
    assert psutil.Process(chains[0][1]).name() == "onebox-zygote"
    assert library(ana.pid) == library(bob.pid), "which docs/concepts/security.md says"
    end(workers, 0)
    third = lease(workers, 3, "cy")
    assert ancestors(third)[0] not in {chain[0] for chain in chains}
    assert ancestors(lease(workers, 4, "ana"))[0] == chains[0][0], "which was kept"
    processes = [each.pid for each in (bob, again, third)] + [each for chain in chains for each in chain]
    workers.close()
    assert gone(processes) and not workers.ended_zygotes()


def test_without_a_zygote_clients_have_other_addresses(made: Callable[..., Workers]) -> None:
    workers = made(import_per_client=True)
    ana, bob = lease(workers, 1, "ana"), lease(workers, 2, "bob")
    assert [len(ancestors(each)) for each in (ana, bob)] == [1, 1]
    assert library(ana.pid) != library(bob.pid)


def test_another_number_of_threads_has_another_zygote(made: Callable[..., Workers]) -> None:
    workers = made()
    narrow, wide, again = (
        lease(workers, number, client, share)
        for number, (client, share) in enumerate((("ana", SHARE), ("bob", WIDE), ("cy", WIDE)))
    )
    zygotes = [ancestors(each)[1] for each in (narrow, wide, again)]
    assert zygotes[0] != zygotes[1] == zygotes[2]
    for worker, threads in ((narrow, "1"), (wide, "2")):
        assert all(
            psutil.Process(each).environ()["OMP_NUM_THREADS"] == threads for each in [worker.pid, *ancestors(worker)]
        )


def test_a_lease_that_is_given_back_at_once_leaves_nothing(made: Callable[..., Workers]) -> None:
    workers = made()
    (zygote,) = {ancestors(lease(workers, 0, "ana"))[1]}
    for number in range(1, 4):
        assert workers.start(number, [SHARE], f"client {number}", new_keys().public, 1.0, 0.0) is None
        end(workers, number)
    end(workers, 0)
    kept = workers._kept._kept[0].process
    until(lambda: [each.pid for each in psutil.Process(zygote).children()] == [kept])


# ---- how they end


def test_a_killed_zygote_is_replaced_and_leases_go_on(made: Callable[..., Workers]) -> None:
    workers = made()
    before = lease(workers, 1, "ana")
    zygote = ancestors(before)[1]
    os.kill(zygote, signal.SIGKILL)
    until(lambda: turn(workers) == [] and workers._zygotes is not None and not list(workers._zygotes.descriptors()))
    (news,) = workers.ended_zygotes()
    assert news.process == zygote and news.why == "it has ended"
    after = lease(workers, 2, "bob")
    assert ancestors(after)[1] != zygote and before.is_running()
    end(workers, 1)
    server = workers._kept._kept[0].process
    assert lease(workers, 3, "ana").ppid() == server, "which was kept, although its parent has ended"
    workers.close()
    assert gone([server])


def test_a_zygote_that_is_killed_as_a_lease_begins_is_done_without(made: Callable[..., Workers]) -> None:
    workers = made()
    zygote = ancestors(lease(workers, 1, "ana"))[1]
    os.kill(zygote, signal.SIGKILL)
    assert gone([zygote])
    after = lease(workers, 2, "bob")
    assert len(ancestors(after)) == 1
    assert [each.process for each in workers.ended_zygotes()] == [zygote]


def test_a_stopped_zygote_holds_up_no_lease_for_long(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "ZYGOTE_FORK_S", 0.2)
    workers = made()
    zygote = ancestors(lease(workers, 1, "ana"))[1]
    os.kill(zygote, signal.SIGSTOP)
    assert len(ancestors(lease(workers, 2, "bob"))) == 1
    (news,) = workers.ended_zygotes()
    assert news.process == zygote and "nothing was forked within 0.2 s" in news.why
    assert gone([zygote])
    assert len(ancestors(lease(workers, 3, "cy"))) == 1, "no other is started at once"
    end(workers, 3)
    assert len(ancestors(lease(workers, 4, "di", now_s=RETRY_S))) == 2


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_zygote_whose_imports_fail_or_hang_is_done_without(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program = "raise ImportError('no torch here')" if how == "fails" else "import time; time.sleep(600)"
    monkeypatch.setattr(fork_server_module, "ZYGOTE_COMMAND", (sys.executable, "-P", "-c", program))
    monkeypatch.setattr("onebox.pool.launch.zygotes.IMPORT_S", 60.0 if how == "fails" else 0.0)
    workers = made()
    assert len(ancestors(lease(workers, 1, "ana"))) == 1
    (news,) = workers.ended_zygotes()
    assert ("ImportError: no torch here" if how == "fails" else "not ready after 0 s") in news.why
    assert running_process(news.process) is None
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, RETRY_S - 1) is None
    assert not list(workers._zygotes.descriptors()) if workers._zygotes else False


FAILING = """
import atexit, os, sys
import onebox.worker.process.zygote as zygote

atexit.register(lambda: print("left as an interpreter ends", file=sys.stderr, flush=True))

def fail(*given, **named):
    raise PermissionError(1, "setgroups")

zygote._take_user = fail
zygote.main(users=False)
os._exit(0)
"""
"""A zygote none of whose forks can take its user."""


def test_a_zygote_whose_forks_fail_is_told_of_and_done_without(
    made: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "ZYGOTE_COMMAND", (sys.executable, "-P", "-c", FAILING))
    limited: list[int] = []
    monkeypatch.setattr(LeaseProcesses, "add", lambda self, process, descriptor: limited.append(process))
    workers = made()
    first = lease(workers, 1, "ana")
    (server,) = ancestors(first)
    assert limited[-2:] == [server, first.pid]
    assert psutil.Process(server).name() == "onebox-fork-srv", "which has imported PyTorch itself"
    turn(workers)
    (news,) = workers.ended_zygotes()
    assert "a fork server that it has forked fails" in news.why and "PermissionError" in news.why
    assert "left as" not in news.why, "it would clean up what is the zygote's"
    assert gone([news.process]) and first.is_running()
    assert len(ancestors(lease(workers, 2, "bob", now_s=RETRY_S - 1))) == 1
    assert not workers.ended_zygotes(), "no other is started at once"


CRASHING = """
import faulthandler, os
import onebox.worker.process.fork_server as fork_server

def crash(*given):
    faulthandler.enable()
    os.abort()

fork_server.serve_worker = crash
fork_server.main()
os._exit(0)
"""
"""A fork server whose workers crash."""

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
            assert sorted(each.name() for each in family) == ["onebox-fork-srv", "onebox-worker", "onebox-zygote"]
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
        zygote = ancestors(psutil.Process(leased.workers[0].process))[1]
        os.kill(zygote, signal.SIGKILL)
        agent.until("zygote-ended")
        assert agent.told("zygote-ended") == [{"process": zygote, "reason": "it has ended"}]
        other = agent.client("bob").lease(Want("cpu", threads=1))
        assert ancestors(psutil.Process(other.workers[0].process))[1] != zygote
        (began,) = agent.told("started")
        assert began["imports"] == "one for all clients"


def test_an_agent_imports_for_each_client_where_its_owner_says_so(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "onebox", "serve", "--bind", "127.0.0.1", "--port", "0", "--devices", "sim"]
    environment = warm.single() | {"ONEBOX_CONFIG": str(tmp_path)}
    options = ["--import-per-client", *(["--allow-root"] if os.geteuid() == 0 else [])]
    with warm.Popen([*line, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as agent:
        try:
            assert agent.stdout is not None
            began = json.loads(agent.stdout.readline())
            assert (began["event"], began["imports"]) == ("started", "one for each client")
        finally:
            agent.terminate()


def canary(process: int) -> bytes:
    """Return the random bytes from which a process has the values that guard its stack: ``AT_RANDOM`` of
    ``getauxval(3)``."""
    entries = dict(struct.iter_unpack("QQ", Path(f"/proc/{process}/auxv").read_bytes()))
    with open(f"/proc/{process}/mem", "rb") as memory:
        memory.seek(entries[25])
        return memory.read(16)


def test_after_a_crash_new_leases_have_other_addresses_and_running_ones_go_on() -> None:
    with house() as agent:
        ana, bob = agent.client("ana"), agent.client("bob")
        crashed, running = (each.lease(Want("cpu", threads=1)) for each in (ana, bob))
        crash, neighbour = (psutil.Process(each.workers[0].process) for each in (crashed, running))
        zygote = ancestors(crash)[1]
        assert canary(crash.pid) == canary(neighbour.pid), "which docs/concepts/security.md says"
        os.kill(crash.pid, signal.SIGSEGV)
        ana.take(WorkerEnded)
        agent.until("zygote-ended")
        reason = "a worker that descends from it ended by SIGSEGV"
        assert agent.told("zygote-ended") == [{"process": zygote, "reason": reason}]
        ana.send(Release(ana.number(), crashed.lease))
        ana.take(Done)
        again = psutil.Process(ana.lease(Want("cpu", threads=1)).workers[0].process)
        assert canary(again.pid) != canary(neighbour.pid) and library(again.pid) != library(neighbour.pid)
        bob.send(Release(bob.number(), running.lease))
        bob.take(Done)
        assert not any(isinstance(message, WorkerEnded | LeaseEnded) for message in bob.heard)


def test_a_client_whose_worker_crashes_gets_no_address() -> None:
    with house() as agent:
        ana = agent.client("ana")
        os.kill(ana.lease(Want("cpu", threads=1)).workers[0].process, signal.SIGABRT)
        ended = ana.take(WorkerEnded)
        assert ended.exit_status == -signal.SIGABRT and "Fatal Python error: Aborted" in ended.last_words
        assert "hread 0x… " in ended.last_words and not ADDRESS.search(ended.last_words)


def test_a_client_whose_worker_crashes_as_it_starts_gets_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_module, "COMMAND", (sys.executable, "-P", "-c", CRASHING))
    monkeypatch.setattr(Zygotes, "find", lambda *given: None)
    with house() as agent:
        ana = agent.client("ana")
        ana.ask(Want("cpu", threads=1))
        why = ana.take(Refused).reason
        assert "Fatal Python error: Aborted" in why and "0x…" in why and not ADDRESS.search(why)
