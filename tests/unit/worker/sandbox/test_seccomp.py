"""Calls of a confined process against its neighbours, as root and as an ordinary user; and the filter's text."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
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
from onebox.worker.sandbox.system_calls import DRIVER, EVERY

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
    "a thread",
    "a signal to itself",
    "a pair",
    "datagrams",
    "a name",
]
OF_GPUS = ["its pages"]
OF_NETWORKS = ["interfaces", "a listening socket", "a stream", "a datagram"]

filtered = pytest.mark.skipif(
    not seccomp.supported() or platform.machine() != "x86_64", reason="no filter here, or calls of other numbers"
)
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
    own = ITS_OWN + {"cpu": OF_NETWORKS, "cuda:0": OF_NETWORKS + ONLY_CPU[:4] + OF_GPUS, "sim": []}[found["device"]]
    assert {what: found[what] for what in own} == dict.fromkeys(own, 0)


# ---- the filter's text

X86, ARM = "x86_64", "aarch64"

FOREIGN = """
ptrace execve execveat fork vfork process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_open
pidfd_getfd pidfd_send_signal tkill kcmp ioprio_set migrate_pages get_robust_list unshare setns mount umount2 pivot_root
chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr open_by_handle_at fanotify_init add_key
request_key keyctl rt_sigqueueinfo rt_tgsigqueueinfo bpf perf_event_open userfaultfd landlock_add_rule
io_uring_setup io_uring_enter io_uring_register
init_module finit_module kexec_load kexec_file_load syslog modify_ldt reboot swapon acct msgget msgsnd msgrcv msgctl
mq_open mq_unlink setuid setgid setresuid setresgid setgroups capset iopl ioperm
"""
"""Calls that start, inspect, signal or slow down other processes, gain rights, or outlive the process."""

OF_DRIVERS = """
shmget shmat shmctl semget semop semctl semtimedop chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime
utimes futimesat utimensat setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr flock
"""
"""Calls on what other processes of the user have, which workers of GPUs make alone."""

CHECKED = {
    *("clone", "clone3", "socket", "fcntl", "ioctl", "setsockopt", "setpriority", "mbind", "sendto", "sendmsg"),
    *("sendmmsg", *seccomp.OWN_THREAD, *seccomp.OWN_PROCESS, *seccomp.SCHEDULER),
}
"""Calls that depend on their arguments."""

both = pytest.mark.parametrize("machine", [X86, ARM])


def number(machine: str, name: str) -> int:
    return seccomp.PROCESSORS[machine].numbers(EVERY | DRIVER)[name]


def test_no_call_that_reaches_others_is_listed() -> None:
    assert not {*FOREIGN.split()} & {*EVERY, *DRIVER}
    assert {*OF_DRIVERS.split()} <= {*DRIVER} and not {*DRIVER} & {*EVERY}


@both
@pytest.mark.parametrize("gpu", [False, True])
def test_the_filter_allows_the_listed_calls_and_no_others(gpu: bool, machine: str) -> None:
    code = seccomp.program(gpu=gpu, process=77, machine=machine)
    listed = seccomp.PROCESSORS[machine].numbers(EVERY | DRIVER if gpu else EVERY)
    allowed = {listed[name] for name in listed if name not in CHECKED}
    checked = {listed[name] for name in CHECKED if name in listed}
    for call in {*range(600)} - checked:
        expected = 0 if call in allowed else errno.EPERM if call < 453 else errno.ENOSYS
        assert verdict(code, call, machine=machine) == expected, call
    assert verdict(code, number(machine, "clone3"), machine=machine) == errno.ENOSYS
    assert verdict(code, 1 | 0x40000000, machine=machine) == errno.EPERM
    assert run(code, 1, processor=0x40000003) == KILLED, "i386 ends the process"
    assert run(code, 1, processor=seccomp.PROCESSORS[ARM if machine == X86 else X86].audit) == KILLED


@both
@pytest.mark.parametrize("name", [*seccomp.OWN_THREAD, *seccomp.OWN_PROCESS])
def test_calls_by_process_id_are_for_itself(name: str, machine: str) -> None:
    code = seccomp.program(gpu=True, process=77, machine=machine)
    own = 77 if name in seccomp.OWN_PROCESS else 0
    for process in (0, 1, 76, 77, 78, 0xFFFFFFFF):
        expected = 0 if process == own else errno.EPERM
        assert verdict(code, number(machine, name), process, machine=machine) == expected


@both
@pytest.mark.parametrize("name", seccomp.SCHEDULER)
def test_calls_to_the_scheduler_for_others_are_left_out(name: str, machine: str) -> None:
    call = number(machine, name)
    for gpu in (False, True):
        code = seccomp.program(gpu=gpu, process=77, machine=machine)
        done = [run(code, call, thread, machine=machine) == DONE for thread in (0, 1, 77, 0xFFFFFFFF)]
        assert done == [True, False, False, False]
        assert [verdict(code, call, thread, machine=machine) for thread in (0, 1)] == [0, 0]


@both
def test_clone_starts_threads_alone(machine: str) -> None:
    code, clone = seccomp.program(gpu=True, process=77, machine=machine), number(machine, "clone")
    assert verdict(code, clone, 0x3D0F00, machine=machine) == 0, "threads are started"
    for flags in (17, 0x4111, 0x4000 | 0x100, *(space | flags for space in SPACES for flags in (17, 0x3D0F00))):
        assert verdict(code, clone, flags, machine=machine) == errno.EPERM, hex(flags)


@both
def test_priorities_pages_and_owners_of_files_by_their_arguments(machine: str) -> None:
    code = seccomp.program(gpu=True, process=77, machine=machine)

    def said(name: str, *arguments: int) -> int:
        return verdict(code, number(machine, name), *arguments, machine=machine)

    assert [said("setpriority", *whom) for whom in ((0, 0), (0, 77), (1, 0), (2, 0))] == [0, 1, 1, 1]
    assert [said("mbind", 0, 0, 0, 0, 0, flags) for flags in (0, 2, 3, 4, 6)] == [0, 0, 0, 1, 1]
    commands = (1, 8, 10, 15, 1024, 1026, 1030, 1033)
    assert [said("fcntl", 5, command) for command in commands] == [0, 1, 0, 1, 1, 1, 0, 0]
    assert [said("ioctl", 5, command) for command in (0x5401, 0x8901, 0x8902, 0xC020462A)] == [0, 1, 1, 0]
    assert [said("setsockopt", 5, *option) for option in ((6, 31), (6, 1), (1, 31))] == [1, 0, 0]
    for gpu in (False, True):
        code = seccomp.program(gpu=gpu, process=77, machine=machine)
        assert {said("fcntl", 5, command) for command in (6, 7, 37, 38)} == {0 if gpu else 1}


@both
@pytest.mark.parametrize("gpu", [False, True])
def test_sockets_are_of_listed_families_kinds_and_protocols(gpu: bool, machine: str) -> None:
    code, network = seccomp.program(gpu=gpu, process=77, machine=machine), (socket.AF_INET, socket.AF_INET6)
    call = number(machine, "socket")
    for family in (*seccomp.FAMILIES, 5, 17, 38, 40, 43):
        for kind in (1, 2, 3, 5, 6, 0x80801, 0x80805):
            for protocol in (0, 1, 6, 17, 132, 136, 256, 262):
                listed = kind & 0xF in (socket.SOCK_STREAM, socket.SOCK_DGRAM) and protocol in (0, 6, 17)
                stays = listed if family in network else family in seccomp.FAMILIES
                expected = 0 if stays else errno.EPERM
                assert verdict(code, call, family, kind, protocol, machine=machine) == expected


@both
@pytest.mark.parametrize(("name", "place"), [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)])
def test_no_message_connects(name: str, place: int, machine: str) -> None:
    code = seccomp.program(gpu=True, process=77, machine=machine)
    for flags, error in ((0, 0), (0x4040, 0), (0x20000000, errno.EPERM), (0x20004040, errno.EPERM)):
        assert verdict(code, number(machine, name), *[0] * place, flags, machine=machine) == error


@both
@pytest.mark.parametrize("networks", [False, True])
def test_sockets_after_its_own_listen_are_those_of_networks_and_datagrams(networks: bool, machine: str) -> None:
    """Those of networks not for an emulated device."""
    code, call = seccomp.socket_program(networks=networks, machine=machine), number(machine, "socket")
    for family in range(50):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            near = (family, kind) == (socket.AF_UNIX, socket.SOCK_DGRAM)
            stays = near or (networks and family in seccomp.FAMILIES and family != socket.AF_UNIX)
            for flags in (0, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
                assert verdict(code, call, family, kind | flags) == (0 if stays else errno.EPERM), (family, kind)
    assert all(verdict(code, other, 1, 1) == 0 for other in range(600) if other != call), "pairs among them"


SPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of ``clone`` for new namespaces."""

KILLED, DONE = 0x80000000, 0x7FFF0000


def verdict(code: bytes, call: int, *arguments: int, machine: str = X86) -> int:
    """Return the error of a call by a filter; 0 where it succeeds."""
    action = run(code, call, *arguments, machine=machine)
    assert action == DONE or action >> 16 == 5
    return action & 0xFFFF if action >> 16 == 5 else 0


def run(code: bytes, call: int, *arguments: int, machine: str = X86, processor: int | None = None) -> int:
    """Run a filter as the kernel does, and return its action."""
    lines = [struct.unpack_from("=HBBI", code, start) for start in range(0, len(code), 8)]
    audit = seccomp.PROCESSORS[machine].audit if processor is None else processor
    loaded = {0: call, 4: audit} | {16 + 8 * place: 0 for place in range(6)}
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


# ---- the numbers

HEADERS = {X86: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", ARM: "/usr/include/asm-generic/unistd.h"}
"""Files of the kernel's, both of which an x86-64 has; an aarch64 has the generic numbers."""


@both
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    defined = dict(re.findall(r"^#define (__NR\w+)\s+(\w+)", header.read_text(), re.MULTILINE))
    meant = {name[5:]: defined.get(value, value) for name, value in defined.items() if name.startswith("__NR_")}
    known = {name: int(value) for name, value in meant.items() if value.isdecimal()}  # without those of 32 bits
    newest = max(value for name, value in known.items() if not name.endswith("syscalls"))
    place = seccomp.PROCESSORS[machine].place
    for name, numbers in (EVERY | DRIVER).items():
        if (numbers[place] or 0) <= newest:
            assert known.get(name) == numbers[place], name
