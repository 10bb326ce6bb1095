"""What a process can still do once it has confined itself as a worker does."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebox.pool.launch.zygotes import worker_environment
from onebox.worker.sandbox import confine, landlock, seccomp
from tests.kit import warm

SCRIPT = """
import ctypes, json, mmap, os, resource, socket, subprocess, sys, threading
from onebox.worker.sandbox.confine import confine

private, writable, folder = sys.argv[1:]
listener = socket.create_server(("127.0.0.1", 0))
open_before = open(writable, "w")
started, go_on = threading.Event(), threading.Event()
threads = len(os.listdir("/proc/self/task"))
found = {"done": confine("cpu", folder, memory_bytes=1 << 20)}

def attempt(name, action):
    try:
        action()
        found[name] = 0
    except OSError as error:
        found[name] = error.errno

def read(path):
    with open(path, "rb") as file:
        file.read(1)

def write(path, flags=0):
    os.close(os.open(path, os.O_WRONLY | flags))

def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def bind(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)

def thread(action):
    errors = []
    def run():
        try:
            action()
        except OSError as error:
            errors.append(error)
    running = threading.Thread(target=run)
    running.start()
    running.join()
    for error in errors:
        raise error

attempt("read private", lambda: read(private))
attempt("read private in a thread", lambda: thread(lambda: read(private)))
attempt("list private", lambda: os.listdir(os.path.dirname(private)))
attempt("read a library", lambda: read(os.__file__))
attempt("read /proc/self/maps", lambda: read("/proc/self/maps"))
attempt("read /proc of the parent", lambda: read(f"/proc/{os.getppid()}/environ"))
attempt("write /etc/passwd", lambda: write("/etc/passwd"))
attempt("append", lambda: write(writable, os.O_APPEND))
attempt("truncate", lambda: os.truncate(writable, 0))
attempt("create", lambda: write(writable + "2", os.O_CREAT))
attempt("create in shared memory", lambda: write("/dev/shm/onebox-confined", os.O_CREAT))
attempt("remove", lambda: os.unlink(writable))
attempt("rename", lambda: os.rename(writable, writable + "3"))
attempt("make a folder", lambda: os.mkdir(folder + "/made"))
attempt("bind in the folder", lambda: bind(folder + "/socket"))
attempt("bind elsewhere", lambda: bind(os.path.dirname(writable) + "/socket"))
attempt("write what is open", lambda: os.write(open_before.fileno(), b"x"))
attempt("write /dev/null", lambda: write("/dev/null"))
attempt("run", lambda: subprocess.run(["/bin/true"]))
attempt("trace", lambda: call(101, 0, 0, 0, 0))
attempt("new users", lambda: call(272, 0x10000000))
attempt("signal", lambda: os.kill(os.getppid(), 0))
attempt("signal itself", lambda: os.kill(os.getpid(), 0))
attempt("connect", lambda: socket.create_connection(listener.getsockname()).close())
attempt("connect to 22", lambda: socket.create_connection(("127.0.0.1", 22)).close())
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)).close())
attempt("listen on 22", lambda: socket.create_server(("127.0.0.1", 22)).close())
attempt("take a little", lambda: mmap.mmap(-1, 1 << 29, mmap.MAP_PRIVATE))
attempt("take much", lambda: mmap.mmap(-1, 3 << 30, mmap.MAP_PRIVATE))
found["core"] = resource.getrlimit(resource.RLIMIT_CORE)
found["threads"] = threads
found["status"] = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a confined process could do: by what it tried, 0 or the number of the error."""
    home, folder, data = (tmp_path_factory.mktemp(name) for name in ("home", "sockets", "data"))
    key = home / ".ssh" / "id_ed25519"
    key.parent.mkdir()
    key.write_text("secret")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(key), str(data / "file"), str(folder)],
        env={**os.environ, "HOME": str(home), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    yield json.loads(run.stdout.splitlines()[-1])
    assert not Path("/dev/shm/onebox-confined").exists()
    assert sorted(path.name for path in data.iterdir()) == ["file"]


def needs(abi: int) -> pytest.MarkDecorator:
    """Skip a test where this kernel's Landlock is too old."""
    have = landlock.version()
    return pytest.mark.skipif(have < abi, reason=f"needs Landlock of version {abi}; here it is {have}")


def test_no_capability_is_left_and_none_can_be_had(found: dict[str, Any]) -> None:
    status = {name: value.strip() for name, value in found["status"].items()}
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert found["core"] == [0, 0]


def test_it_says_what_it_has_done(found: dict[str, Any]) -> None:
    expected = {part for part, can in confine.confinement().items() if can.startswith("on")}
    assert {part for part, done in found["done"].items() if done == "on"} == expected & set(found["done"])
    assert confine.failures(found["done"]) == []


def test_no_thread_is_there_before_it(found: dict[str, Any]) -> None:
    assert found["threads"] == 1, "what Landlock and capset do, they do to one thread"


@needs(1)
@pytest.mark.parametrize(
    "what",
    [
        "read private",
        "read private in a thread",
        "list private",
        "read /proc of the parent",
        "write /etc/passwd",
        "append",
        "create",
        "create in shared memory",
        "remove",
        "rename",
        "make a folder",
        "bind elsewhere",
        pytest.param("truncate", marks=needs(3)),
        pytest.param("connect to 22", marks=needs(4)),
        pytest.param("listen on 22", marks=needs(4)),
    ],
)
def test_what_it_cannot(found: dict[str, Any], what: str) -> None:
    assert found[what] in (errno.EACCES, errno.EPERM)


def test_memory_has_a_limit(found: dict[str, Any]) -> None:
    assert (found["take a little"], found["take much"]) == (0, errno.ENOMEM)


@needs(6)
def test_others_get_no_signal(found: dict[str, Any]) -> None:
    assert found["signal"] == errno.EPERM


NAMES = """
import json, os, sys, threading
from onebox.worker.sandbox.confine import confine

confine(sys.argv[1], "127.0.0.1")
found = []

def name(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
        found.append(0)
    except OSError as error:
        found.append(error.errno)

def name_both():
    name(f"/proc/self/task/{threading.get_native_id()}/comm")
    name(f"/proc/{os.getppid()}/comm")

thread = threading.Thread(target=name_both)
thread.start(), thread.join()
print(json.dumps(found))
"""


@needs(1)
@pytest.mark.parametrize(("device", "own"), [("cpu", errno.EACCES), ("cuda:0", 0)])
def test_the_driver_of_a_gpu_names_its_threads_and_no_others(device: str, own: int) -> None:
    line = [sys.executable, "-c", NAMES, device]
    done = subprocess.run(line, env=warm.single(), capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(done.stdout.splitlines()[-1]) == [own, errno.EACCES], done.stderr


THREADS = """
import encodings.ascii, encodings.latin_1, json, os, sys, threading
from onebox.worker.sandbox.confine import confine, failures

os.setgroups([]), os.setgid(60805), os.setuid(60805)
most, stop, started = int(sys.argv[1]), threading.Event(), 1
done = confine("cpu", "127.0.0.1", most_processes=most)
try:
    while started < 4 * most:
        threading.Thread(target=stop.wait).start()
        started += 1
except RuntimeError:
    pass
stop.set()
print(json.dumps([failures(done), started]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_lease_with_a_user_of_its_own_starts_no_more_threads_than_it_may() -> None:
    line = [sys.executable, "-c", THREADS, "64"]
    done = subprocess.run(line, env=warm.single(), capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(done.stdout.splitlines()[-1]) == [[], 64], done.stderr


READS = """
import json, os, sys
from onebox.worker.sandbox.confine import confine

done, found = confine("cpu", "127.0.0.1"), []
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        found.append(0)
    except OSError as error:
        found.append(error.errno)
print(json.dumps(found))
"""


@needs(1)
@pytest.mark.parametrize("entry", ["", ".", "data"])
def test_no_folder_of_its_owner_comes_by_an_empty_or_relative_entry(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, modules = tmp_path / "here", tmp_path / "modules"
    for folder in (here / "data", modules):
        folder.mkdir(parents=True)
        (folder / "file").write_text("content")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([entry, str(modules)]))
    run = subprocess.run(
        [sys.executable, "-P", "-c", READS, str(here / "data" / "file"), str(modules / "file")],
        env=worker_environment(1) | {"HOME": "/nonexistent"},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(run.stdout.splitlines()[-1]) == [errno.EACCES, 0]


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("fails", ["", "allow", "enforce", "close"])
def test_no_prepared_rules_stay_open(fails: str, tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of all forks, one of which could add to them."""
    made: list[Rules] = []

    class Rules:
        """Stands in for Landlock's rules, of which the next call fails."""

        def __init__(self, abi: int, *, files: bool = True, ports: bool = False) -> None:
            self.files, self.ports, self.closed = files, ports, False
            made.append(self)

        def __getattr__(self, name: str) -> Any:
            def call(*given: Any) -> None:
                if name == "close":
                    self.closed = True
                if name == fails and self.files:
                    raise OSError(errno.ENOMEM, "no memory")

            return call

    monkeypatch.setattr(landlock, "version", lambda: 4)
    monkeypatch.setattr(landlock, "Ruleset", Rules)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        confine.prepare()
        done = confine.confine(*(("cpu", "127.0.0.1") if tcp else ("sim", "/sockets")))
        found = [(rules.files, rules.ports, rules.closed) for rules in made]
        os.write(writing, json.dumps([done["files"], found]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as output:
        says, found = json.load(output)
    os.waitpid(child, 0)
    assert ("no memory" in says) if fails else says == "on"
    assert found == [[False, True, True], [True, not tcp, True]]


SIM = """
import json, socket, sys
from onebox.worker.sandbox.confine import confine

listener = socket.create_server(("127.0.0.1", 0))
confine(*sys.argv[1:])
found = []
for action in (socket.create_connection, socket.create_server):
    try:
        action(listener.getsockname() if action is socket.create_connection else ("127.0.0.1", 0)).close()
        found.append(0)
    except OSError as error:
        found.append(error.errno)
print(json.dumps(found))
"""


@needs(4)
@pytest.mark.parametrize("address", ["127.0.0.1", "folder"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_only_a_sim_on_the_machine_of_its_client_has_no_tcp(device: str, address: str, tmp_path: Path) -> None:
    line = [sys.executable, "-c", SIM, device, str(tmp_path) if address == "folder" else address]
    done = subprocess.run(line, env=warm.single(), capture_output=True, text=True, timeout=500, check=False)
    none = device == "sim" and address == "folder"
    assert json.loads(done.stdout) == ([errno.EACCES] * 2 if none else [0, 0]), done.stderr


@pytest.mark.skipif(
    not seccomp.supported() or platform.machine() != "x86_64", reason="no filter here, or calls of other numbers"
)
@pytest.mark.parametrize("what", ["run", "trace", "new users"])
def test_calls_that_fail(found: dict[str, Any], what: str) -> None:
    assert found[what] == errno.EPERM


@pytest.mark.parametrize(
    "what",
    [
        "read a library",
        "read /proc/self/maps",
        "bind in the folder",
        "write what is open",
        "write /dev/null",
        "signal itself",
        "connect",
        "listen",
    ],
)
def test_what_it_needs_works(found: dict[str, Any], what: str) -> None:
    assert found[what] == 0


# ---- what it says where the system is another


@pytest.mark.parametrize(("abi", "off"), [(0, 4), (1, 3), (3, 3), (4, 2), (5, 1), (6, 0)])
def test_what_a_kernel_cannot_do_is_said(abi: int, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: abi)
    said = confine.confinement()
    assert sum(said[part].startswith("off: ") for part in ("files", "device files", "ports", "signals")) == off


def test_what_fails_although_the_kernel_could_is_said() -> None:
    done = dict.fromkeys(confine.confinement(), "on")
    assert confine.failures(done) == []
    assert confine.failures(done | {"capabilities": "off: no"}) == ["capabilities: off: no"]


def test_the_rights_of_each_version() -> None:
    assert [landlock.handled_files(abi).bit_count() for abi in (1, 2, 3, 4, 5, 6, 7)] == [13, 14, 15, 15, 16, 16, 16]
