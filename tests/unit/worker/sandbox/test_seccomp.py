"""Calls of a confined process against its neighbours, as root and as an ordinary user; and the filter's text."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebox.worker.sandbox import seccomp

NOBODY = 65534

SCRIPT = """
import ctypes, encodings.ascii, encodings.idna, encodings.latin_1, fcntl, json, os, resource, signal, socket, struct
import subprocess, sys, tempfile, threading, time
from onebox.worker.sandbox.confine import confine, confine_sockets, failures

user, device, mark = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
victim = subprocess.Popen(["/bin/sleep", "600"], cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid
folder = tempfile.mkdtemp(dir="/tmp")
listener, packets, datagrams = (socket.socket(socket.AF_UNIX, kind) for kind in
    (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM))
for made, name in (listener, "stream"), (packets, "packets"), (datagrams, "datagrams"):
    made.bind(f"{folder}/{name}")
listener.listen(), packets.listen()
server = socket.create_server(("127.0.0.1", 0))
far = server.getsockname()
libc = ctypes.CDLL(None, use_errno=True)
shared, semaphores, messages = libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)
private = f"{folder}/private"
open(private, "w").close(), os.chmod(private, 0o600)
own, home = os.open(private, os.O_RDONLY), os.open(folder, os.O_RDONLY)
found = {"victim": victim, "folder": folder, "ipc": (shared, semaphores, messages)}
done = confine(device, "127.0.0.1", memory_bytes=1 << 20)
found["confined"] = failures(done | confine_sockets(device))

def attempt(name, action):
    try:
        action()
        found[name] = 0
    except OSError as error:
        found[name] = error.errno

def call(number, *arguments):
    value = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
    return value

def child():
    pid = os.fork()
    leave(pid)

def leave(pid):
    if not pid:  # nothing should have started this
        os.setsid(), os.close(1), os.close(2)
        time.sleep(600)
        os._exit(0)

def to(kind, name):
    with socket.socket(socket.AF_UNIX, kind) as made:
        made.connect(f"{folder}/{name}")

def say():
    one, two = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    one.bind(""), two.bind("")
    two.sendto(b"x", one.getsockname())
    assert one.recv(1) == b"x"

def start_thread():
    made = threading.Thread(target=lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)))
    made.start(), made.join()

NETWORKS = {
    "MPTCP": (socket.AF_INET, socket.SOCK_STREAM, 262),
    "MPTCP of IPv6": (socket.AF_INET6, socket.SOCK_STREAM, 262),
    "SMC": (socket.AF_INET, socket.SOCK_STREAM, 256),
    "SCTP": (socket.AF_INET, socket.SOCK_STREAM, 132),
    "packets in sequence": (socket.AF_INET, socket.SOCK_SEQPACKET, 0),
    "raw packets": (socket.AF_INET, socket.SOCK_RAW, 1),
    "UDP lite": (socket.AF_INET, socket.SOCK_DGRAM, 136),
    "a virtual machine's host": (40, socket.SOCK_STREAM, 0),
}
PARAMETER, ATTRIBUTES = struct.pack("i", 0), struct.pack("=IIQiIQQQ", 48, 0, 0, 19, 0, 0, 0, 0)
at = lambda text: ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
limits = resource.getrlimit(resource.RLIMIT_NOFILE)

attempt("prlimit", lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)))
attempt("read prlimit", lambda: resource.prlimit(victim, resource.RLIMIT_CPU))
attempt("sched_setaffinity", lambda: os.sched_setaffinity(victim, {min(os.sched_getaffinity(0))}))
attempt("sched_setscheduler", lambda: call(144, victim, os.SCHED_IDLE, at(PARAMETER)))
attempt("sched_setparam", lambda: call(142, victim, at(PARAMETER)))
attempt("sched_setattr", lambda: call(314, victim, at(ATTRIBUTES), 0))
attempt("setpriority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 19))
attempt("setpriority of a group", lambda: os.setpriority(os.PRIO_PGRP, 0, 19))
attempt("setpriority of a user", lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt("ioprio_set", lambda: call(251, 1, victim, 3 << 13))
attempt("migrate_pages", lambda: call(256, victim, 0, 0, 0))
attempt("move_pages", lambda: call(279, victim, 0, 0, 0, 0, 0))
attempt("mbind all", lambda: call(237, 0, 0, 0, 0, 0, 4))
attempt("process_vm_readv", lambda: call(310, victim, 0, 0, 0, 0, 0))
attempt("process_vm_writev", lambda: call(311, victim, 0, 0, 0, 0, 0))
attempt("process_madvise", lambda: call(440, -1, 0, 0, 0, 0))
attempt("ptrace", lambda: call(101, 16, victim, 0, 0))
attempt("pidfd_open", lambda: os.pidfd_open(victim))
attempt("pidfd_getfd", lambda: call(438, 0, 0, 0))
attempt("pidfd_send_signal", lambda: call(424, 0, 0, 0, 0))
attempt("kcmp", lambda: call(312, os.getpid(), victim, 0, 0, 0))
attempt("perf_event_open", lambda: call(298, 0, 0, -1, -1, 0))
attempt("bpf", lambda: call(321, 0, 0, 0))
attempt("userfaultfd", lambda: call(323, 1))
attempt("landlock_add_rule", lambda: call(445, -1, 1, 0, 0))
attempt("keyctl", lambda: call(250, 0, -3, 0))
attempt("io_uring_setup", lambda: call(425, 1, 0))
attempt("kill", lambda: os.kill(victim, 0))
attempt("kill its group", lambda: os.kill(0, 0))
attempt("tgkill", lambda: call(234, victim, victim, 0))
attempt("tkill", lambda: call(200, victim, 0))
attempt("rt_sigqueueinfo", lambda: call(129, victim, 0, 0))
attempt("a signal when a file is ready", lambda: fcntl.fcntl(listener, fcntl.F_SETOWN, victim))
attempt("the same by ioctl", lambda: fcntl.ioctl(listener, 0x8901, struct.pack("i", victim)))
attempt("fork", child)
attempt("a process by clone", lambda: leave(call(56, 17, 0, 0, 0, 0)))
attempt("clone3", lambda: call(435, 0, 0))
attempt("posix_spawn", lambda: os.posix_spawn("/bin/sleep", ["sleep", "600"], {}))
attempt("a service's socket", lambda: to(socket.SOCK_STREAM, "stream"))
attempt("a service's packets", lambda: to(socket.SOCK_SEQPACKET, "packets"))
attempt("a socket of the kernel's ciphers", lambda: socket.socket(38, socket.SOCK_SEQPACKET))
attempt("shmget", lambda: libc.shmctl(call(29, 0, 4096, 0o1600), 0, None))
attempt("msgget", lambda: call(68, 0, 0o1600))
attempt("a neighbour's shared memory", lambda: call(30, shared, 0, 0))
attempt("its removal", lambda: call(31, shared, 0, 0))
attempt("a neighbour's semaphores", lambda: call(65, semaphores, at(struct.pack("HhH", 0, 1, 0)), 1))
attempt("the same with a limit", lambda: call(220, semaphores, at(struct.pack("HhH", 0, 1, 0)), 1, 0))
attempt("their removal", lambda: call(66, semaphores, 0, 0))
attempt("a message to a neighbour", lambda: call(69, messages, at(struct.pack("q", 1)), 0, 0o4000))
attempt("a message for a neighbour", lambda: call(70, messages, at(bytes(64)), 8, 0, 0o4000))
attempt("a queue's removal", lambda: call(71, messages, 0, 0))
attempt("a named queue's removal", lambda: call(241, at(b"onebox-none")))
attempt("the rights of a file", lambda: os.chmod(private, 0o666))
attempt("the rights of an open file", lambda: os.fchmod(1, 0o666))
attempt("the owner of a file", lambda: os.chown(private, os.getuid(), os.getgid()))
attempt("the owner of a link", lambda: os.lchown(private, os.getuid(), os.getgid()))
attempt("the times of a file", lambda: os.utime(private, (1, 1)))
attempt("the attributes of a file", lambda: os.setxattr(private, "user.onebox", b"1"))
attempt("their removal from a file", lambda: os.removexattr(private, "user.onebox"))

attempt("a lease on a file", lambda: fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK))
attempt("news of a folder", lambda: fcntl.fcntl(home, fcntl.F_NOTIFY, fcntl.DN_CREATE))
attempt("a lock of a file", lambda: fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB))
attempt("a lock of its part", lambda: fcntl.lockf(own, fcntl.LOCK_SH | fcntl.LOCK_NB))
for name, (family, kind, protocol) in NETWORKS.items():
    attempt(name, lambda: socket.socket(family, kind, protocol).close())
attempt("a connection by a message", lambda: socket.socket().sendto(b"x", 0x20000000, far))
attempt("a connection by parts of one", lambda: socket.socket().sendmsg([b"x"], [], 0x20000000, far))
attempt("a connection by several", lambda: call(307, socket.socket().fileno(), 0, 0, 0x20000000))
attempt("another kind of TCP", lambda: socket.socket().setsockopt(socket.IPPROTO_TCP, 31, b"smc"))
attempt("a stream", lambda: socket.create_connection(far, 5).close())
attempt("a datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", far))

attempt("limit itself", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
attempt("its affinity", lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)))
attempt("its scheduler", lambda: call(314, 0, at(struct.pack("=IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0)), 0))
attempt("its priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, 1))
attempt("its pages", lambda: call(279, 0, 0, 0, 0, 0, 0))
attempt("a thread", start_thread)
attempt("a signal to itself", lambda: os.kill(os.getpid(), 0))
attempt("a pair", lambda: socket.socketpair())
attempt("datagrams", say)
attempt("interfaces", lambda: socket.if_nameindex())
attempt("a name", lambda: socket.getaddrinfo("127.0.0.1", 80))
attempt("a listening socket", lambda: socket.create_server(("127.0.0.1", 0)).close())
print(json.dumps(found))
"""

OTHERS = [
    "prlimit",
    "read prlimit",
    "setpriority",
    "setpriority of a group",
    "setpriority of a user",
    "ioprio_set",
    "migrate_pages",
    "move_pages",
    "mbind all",
    "process_vm_readv",
    "process_vm_writev",
    "process_madvise",
    "ptrace",
    "pidfd_open",
    "pidfd_getfd",
    "pidfd_send_signal",
    "kcmp",
    "perf_event_open",
    "bpf",
    "userfaultfd",
    "landlock_add_rule",
    "keyctl",
    "io_uring_setup",
    "kill",
    "kill its group",
    "tgkill",
    "tkill",
    "rt_sigqueueinfo",
    "a signal when a file is ready",
    "the same by ioctl",
    "fork",
    "a process by clone",
    "posix_spawn",
    "msgget",
    "a message to a neighbour",
    "a message for a neighbour",
    "a queue's removal",
    "a named queue's removal",
    "a socket of the kernel's ciphers",
    "a lease on a file",
    "news of a folder",
    "MPTCP",
    "MPTCP of IPv6",
    "SMC",
    "SCTP",
    "packets in sequence",
    "raw packets",
    "UDP lite",
    "a virtual machine's host",
    "a connection by several",
    "another kind of TCP",
]
WITHOUT_EFFECT = ["sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"]
BY_MESSAGES = ["a connection by a message", "a connection by parts of one"]
ONLY_CPU = [
    "a service's socket",
    "a service's packets",
    "a lock of a file",
    "a lock of its part",
    "shmget",
    "a neighbour's shared memory",
    "its removal",
    "a neighbour's semaphores",
    "the same with a limit",
    "their removal",
    "the rights of a file",
    "the rights of an open file",
    "the owner of a file",
    "the owner of a link",
    "the times of a file",
    "the attributes of a file",
    "their removal from a file",
]
ITS_OWN = [
    "limit itself",
    "its affinity",
    "its scheduler",
    "its priority",
    "its pages",
    "a thread",
    "a signal to itself",
    "a pair",
    "datagrams",
    "a name",
]
OF_NETWORKS = ["interfaces", "a listening socket", "a stream", "a datagram"]

filtered = pytest.mark.skipif(not seccomp.supported(), reason="no filter of system calls here")
USERS = [
    pytest.param((0, "cpu"), id="the user of these tests"),
    pytest.param((NOBODY, "cpu"), id="an ordinary user"),
    pytest.param((NOBODY, "cuda:0"), id="an ordinary user with a GPU"),
    pytest.param((NOBODY, "sim"), id="an ordinary user that emulates"),
]


@pytest.fixture(scope="module", params=USERS)
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What a confined process could do: by what it tried, 0 or the number of the error."""
    user, device = request.param
    if user and os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    mark = f"onebox-confined-{os.getpid()}"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(user), device, mark],
        env={**os.environ, "HOME": "/nonexistent", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    try:
        yield said | {"device": device, "mark": mark}
    finally:
        os.kill(said["victim"], signal.SIGKILL)
        shared, semaphores, messages = said["ipc"]
        libc = ctypes.CDLL(None)
        for removed in libc.shmctl(shared, 0, None), libc.semctl(semaphores, 0, 0), libc.msgctl(messages, 0, None):
            assert removed in (0, -1)  # by a process with a GPU, which may remove its own
        subprocess.run(["rm", "-r", said["folder"]], check=True)


@filtered
def test_calls_against_others_fail(found: dict[str, Any]) -> None:
    assert found["confined"] == []
    refused = OTHERS + BY_MESSAGES + (ONLY_CPU if found["device"] != "cuda:0" else [])
    refused += OF_NETWORKS if found["device"] == "sim" else []
    assert {what: found[what] for what in refused} == dict.fromkeys(refused, errno.EPERM)
    assert {what: found[what] for what in WITHOUT_EFFECT} == dict.fromkeys(WITHOUT_EFFECT, 0)
    assert found["clone3"] == errno.ENOSYS


@filtered
def test_its_neighbour_is_as_it_was(found: dict[str, Any]) -> None:
    victim = Path("/proc", str(found["victim"]))
    assert "sleep" in (victim / "cmdline").read_text()
    limits = (victim / "limits").read_text().splitlines()
    assert next(line for line in limits if line.startswith("Max cpu time")).split()[3:5] == ["unlimited"] * 2
    assert os.sched_getaffinity(found["victim"]) == os.sched_getaffinity(0)
    assert os.getpriority(os.PRIO_PROCESS, found["victim"]) == os.getpriority(os.PRIO_PROCESS, 0)
    assert os.sched_getscheduler(found["victim"]) == os.sched_getscheduler(0)
    if found["device"] != "cuda:0":
        assert Path(found["folder"], "private").stat().st_mode & 0o777 == 0o600


@filtered
def test_nothing_of_it_is_left(found: dict[str, Any]) -> None:
    lines = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdecimal())
    assert not [str(line) for line in lines if line.exists() and found["mark"] in line.read_text(errors="replace")]


def test_what_it_does_to_itself_works(found: dict[str, Any]) -> None:
    own = ITS_OWN + {"cpu": OF_NETWORKS, "cuda:0": OF_NETWORKS + ONLY_CPU[:4], "sim": []}[found["device"]]
    assert {what: found[what] for what in own} == dict.fromkeys(own, 0)


# ---- the filter's text


@pytest.mark.parametrize("gpu", [False, True])
def test_the_filter_refuses_its_calls_and_no_others(gpu: bool) -> None:
    code = seccomp.program(gpu=gpu, process=77)
    refused = {*seccomp.REFUSED.values(), *(() if gpu else seccomp.CPU_REFUSED.values())}
    for call in {*range(600)} - {41}:
        signals = call in seccomp.OWN_PROCESS.values()
        expected = errno.EPERM if call in refused else errno.ENOSYS if call == 435 else 0
        assert verdict(code, call, 77 if signals else 0x10000 if call == 56 else 0) == expected, call
    assert verdict(code, 1 | 0x40000000) == errno.EPERM
    assert verdict(code, 1, processor=0x40000003) is None, "i386 ends the process"


@pytest.mark.parametrize("number", [*seccomp.OWN_THREAD.values(), *seccomp.OWN_PROCESS.values()])
def test_calls_by_process_id_are_for_itself(number: int) -> None:
    code = seccomp.program(gpu=False, process=77)
    own = 77 if number in seccomp.OWN_PROCESS.values() else 0
    for process in (0, 1, 76, 77, 78, 0xFFFFFFFF):
        assert verdict(code, number, process) == (0 if process == own else errno.EPERM)


@pytest.mark.parametrize("number", seccomp.SCHEDULER.values())
def test_calls_to_the_scheduler_for_others_are_left_out(number: int) -> None:
    for gpu in (False, True):
        code = seccomp.program(gpu=gpu, process=77)
        assert [effect(code, number, thread) for thread in (0, 1, 77, 0xFFFFFFFF)] == [True, False, False, False]
        assert [verdict(code, number, thread) for thread in (0, 1)] == [0, 0]


def test_clone_starts_threads_alone() -> None:
    code = seccomp.program(gpu=True, process=77)
    assert verdict(code, 56, 0x3D0F00) == 0, "threads are started"
    for flags in (17, 0x4111, 0x4000 | 0x100, 0x10000000 | 17, 0x10000000 | 0x3D0F00):
        assert verdict(code, 56, flags) == errno.EPERM, hex(flags)


def test_priorities_pages_and_owners_of_files_by_their_arguments() -> None:
    code = seccomp.program(gpu=False, process=77)
    assert [verdict(code, 141, which, who) for which, who in ((0, 0), (0, 77), (1, 0), (2, 0))] == [0, 1, 1, 1]
    assert [verdict(code, 237, 0, 0, 0, 0, 0, flags) for flags in (0, 2, 3, 4, 6)] == [0, 0, 0, 1, 1]
    commands = (1, 8, 10, 15, 1024, 1026, 1030, 1033)
    assert [verdict(code, 72, 5, command) for command in commands] == [0, 1, 0, 1, 1, 1, 0, 0]
    for gpu in (False, True):
        code = seccomp.program(gpu=gpu, process=77)
        assert {verdict(code, 72, 5, command) for command in (6, 7, 37, 38)} == {0 if gpu else 1}
    assert [verdict(code, 16, 5, command) for command in (0x5401, 0x8901, 0x8902, 0xC020462A)] == [0, 1, 1, 0]


@pytest.mark.parametrize("gpu", [False, True])
def test_sockets_are_of_listed_families_kinds_and_protocols(gpu: bool) -> None:
    code, network = seccomp.program(gpu=gpu, process=77), (socket.AF_INET, socket.AF_INET6)
    for family in (*seccomp.FAMILIES, 5, 17, 38, 40, 43):
        for kind in (1, 2, 3, 5, 6, 0x80801, 0x80805):
            for protocol in (0, 1, 6, 17, 132, 136, 256, 262):
                listed = kind & 0xF in (socket.SOCK_STREAM, socket.SOCK_DGRAM) and protocol in (0, 6, 17)
                stays = listed if family in network else family in seccomp.FAMILIES
                assert verdict(code, 41, family, kind, protocol) == (0 if stays else errno.EPERM)


@pytest.mark.parametrize(("call", "place"), [(44, 3), (46, 2), (307, 3)])
def test_no_message_connects(call: int, place: int) -> None:
    code = seccomp.program(gpu=True, process=77)
    for flags, error in ((0, 0), (0x4040, 0), (0x20000000, errno.EPERM), (0x20004040, errno.EPERM)):
        assert verdict(code, call, *[0] * place, flags) == error


def test_an_emulated_device_has_no_sockets_of_networks() -> None:
    code = seccomp.socket_program(networks=False)
    for family in range(50):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            stays = (family, kind) == (socket.AF_UNIX, socket.SOCK_DGRAM)
            assert verdict(code, 41, family, kind) == (0 if stays else errno.EPERM)


def test_sockets_are_those_of_networks_and_datagrams() -> None:
    code = seccomp.socket_program()
    for family in range(50):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            stays = family in seccomp.FAMILIES and (family != socket.AF_UNIX or kind == socket.SOCK_DGRAM)
            for flags in (0, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
                assert verdict(code, 41, family, kind | flags) == (0 if stays else errno.EPERM), (family, kind)
    assert all(verdict(code, call, 1, 1) == 0 for call in range(600) if call != 41), "pairs among them"


def verdict(code: bytes, call: int, *arguments: int, processor: int = 0xC000003E) -> int | None:
    """Return the error of a call by a filter, 0 where it succeeds, or that it kills."""
    action = run(code, call, *arguments, processor=processor)
    return None if action == 0x80000000 else action & 0xFFFF if action >> 16 == 5 else 0


def effect(code: bytes, call: int, *arguments: int) -> bool:
    """Return whether a filter lets the kernel do a call."""
    return run(code, call, *arguments) == 0x7FFF0000


def run(code: bytes, call: int, *arguments: int, processor: int = 0xC000003E) -> int:
    """Run a filter as the kernel does, and return its action."""
    lines = [struct.unpack_from("=HBBI", code, start) for start in range(0, len(code), 8)]
    loaded = {0: call, 4: processor} | {16 + 8 * place: 0 for place in range(6)}
    loaded |= {16 + 8 * place: value for place, value in enumerate(arguments)}
    place, value = 0, 0
    while True:
        operation, yes, no, operand = lines[place]
        place += 1
        if operation == 0x20:
            value = loaded[operand]
        elif operation == 0x54:
            value &= operand
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            place += yes if holds else no


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its numbers are those of x86-64")
def test_the_numbers_are_those_of_this_system() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    numbers = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    known = {name: int(number) for name, number in numbers.items()}
    for name, number in {
        **seccomp.REFUSED,
        **seccomp.CPU_REFUSED,
        **seccomp.OWN_THREAD,
        **seccomp.SCHEDULER,
        **seccomp.OWN_PROCESS,
        **{"clone": 56, "clone3": 435, "setpriority": 141, "mbind": 237, "fcntl": 72, "ioctl": 16, "socket": 41},
        **{"setsockopt": 54, "sendto": 44, "sendmsg": 46, "sendmmsg": 307},
    }.items():
        assert known.get(f"__NR_{name}", number) == number, name
