"""Confinement: a worker gives up unneeded rights before it processes any client message.

It drops all privileges, starts no program and no process, writes no file, reads only files that Python, torch and the
drivers need, opens no sockets of other networks than TCP and UDP, connects to no TCP port below 1024 (an emulated one
to no port at all), nor to services of its machine, and neither signals, slows down nor limits other processes; a worker
of a CPU changes no rights of files either. If a message exploits a hole in a library, its author is confined to the
worker.

:func:`confinement` describes the parts that this kernel does not support.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from onebox.worker.accelerator import needs_driver
from onebox.worker.memory.host import HOST_SHARE
from onebox.worker.sandbox import landlock, seccomp

PORTS = range(1024, 1 << 16)
"""TCP ports that stay reachable, including those of other workers, which their systems choose."""

SPARE_BYTES = 1 << 30
THREAD_BYTES = 128 << 20
"""Memory of a worker besides its buffers: temporary needs of operators, incoming messages, and for each thread an arena
of the allocator and a stack."""

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 39, 47
_CLEAR_AMBIENT = 4
_CAPABILITIES = 64
_CAPABILITY_VERSION = 0x20080522

_SYSTEM = ("/usr", "/lib", "/lib64", "/opt", "/nix/store", "/gnu/store", "/proc", "/sys")
_SETTINGS = (
    "ld.so.cache",
    "ld.so.preload",
    "localtime",
    "nsswitch.conf",
    "hosts",
    "host.conf",
    "resolv.conf",
    "gai.conf",
    "services",
    "protocols",
    "nccl.conf",
    "nvidia",
    "OpenCL",
)
"""Files of ``/etc`` that libraries read."""

_SOURCES = ("/dev/zero", "/dev/random", "/dev/urandom")
_GPU_DEVICES = ("/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels", "/dev/dxg", "/dev/infiniband", "/dev/gdrdrv")

_PORTS_SINCE = 4

_prepared: list[landlock.Ruleset] = []
"""Prepared port rules: none or one."""

_libc = ctypes.CDLL(None, use_errno=True)


def confine(
    device: str, address: str, *, memory_bytes: int = 0, threads: int = 1, most_processes: int = 0
) -> dict[str, str]:
    """Give up unneeded rights, for this thread and everything started from it.

    Args:
        device: ``cpu``, ``sim`` or ``cuda:K``, which needs its driver's files.
        address: Where its sockets will be bound: an IP address, or a folder.
        memory_bytes: Most bytes of its buffers, 0 for no limit; the total memory of a CPU worker is limited to
            :func:`memory_limit_bytes` of them.
        threads: Threads of its operators.
        most_processes: Most processes and threads of its user, 0 for no limit. Root's have none.

    Returns:
        The state of each part: ``on``, or the reason that it is not.
    """
    gpu = needs_driver(device)
    tempfile.gettempdir()  # looks for a writable folder once
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.prefix  # torch looks for one, too; nothing is compiled here
    most_bytes = memory_limit_bytes(memory_bytes, threads) if memory_bytes and not gpu else 0
    return {
        "memory": _attempt(lambda: _limit_memory(most_bytes)),
        "threads": _attempt(lambda: _limit_processes(most_processes)),
        "core files": _attempt(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
        "new privileges": _attempt(_no_new_privileges),
        "capabilities": _attempt(_drop_capabilities),
        "files": _attempt(lambda: _enforce(gpu, address, tcp=device != "sim" or not address.startswith("/"))),
        "system calls": _filter(lambda: seccomp.program(gpu=gpu, process=os.getpid())),
    }


def confine_sockets(device: str) -> dict[str, str]:
    """Give up sockets to other services of this machine, in all threads, once the worker's own sockets listen; an
    emulated device's worker gives up those of networks, too, as its groups share memory.

    Workers of GPUs keep them: MPS talks to its clients through Unix sockets (CUDA's documentation, "Multi-Process
    Service", ``CUDA_MPS_PIPE_DIRECTORY``), and it does not say which sockets the driver's other services need.

    Args:
        device: As for :func:`confine`.

    Returns:
        The state of the part, as :func:`confine` returns it; empty where nothing is given up.
    """
    if needs_driver(device):
        return {}
    return {"sockets": _filter(lambda: seccomp.socket_program(networks=device != "sim"))}


def memory_limit_bytes(memory_bytes: int, threads: int) -> int:
    """Return the limit of a worker's total memory: twice that of its buffers, plus its share of host memory
    (:data:`~onebox.worker.memory.host.HOST_SHARE` times as much), plus :data:`SPARE_BYTES`, and :data:`THREAD_BYTES`
    for each thread.
    """
    return (2 + HOST_SHARE) * memory_bytes + SPARE_BYTES + threads * THREAD_BYTES


def failures(done: dict[str, str]) -> list[str]:
    """Return readable messages for the parts that :func:`confine` failed to apply although this kernel supports
    them.
    """
    can = confinement()
    return [
        f"{part}: {result}" for part, result in done.items() if result != "on" and can.get(part, "").startswith("on")
    ]


def confinement() -> dict[str, str]:
    """Return the confinement of workers on this host: for each part ``on`` with a description, or the reason that it is
    off.

    This changes nothing.
    """
    abi = landlock.version()
    none = "off: this kernel has no Landlock, or it is switched off (Linux 5.13 and later can have it)"
    return {
        "memory": f"on: of a CPU's worker {2 + HOST_SHARE} times that of its buffers, and some; of a GPU's that of its "
        "buffers only",
        "threads": "on: of all workers of a lease together, where the lease has a user or a cgroup of its own",
        "core files": "on: none are written",
        "new privileges": _new_privileges(),
        "capabilities": "on: none",
        "files": "on: workers write none, run none, and read only libraries and settings" if abi else none,
        "device files": _since(abi, 5, "commands only to those of GPUs", "6.10"),
        "ports": _since(abi, _PORTS_SINCE, f"of TCP only from {PORTS.start} on; UDP is as it was", "6.7"),
        "signals": _since(abi, 6, "none to processes outside", "6.12"),
        "system calls": _filtered(
            "those that start processes, or that inspect, signal or slow down others, fail; sockets of networks are "
            "those of TCP and UDP; a CPU's worker changes no rights of files"
        ),
        "sockets": _filtered(
            "of a CPU's worker none to services of this machine (Unix streams); of an emulated device's no networks"
        ),
    }


_NO_FILTER = "off: the kernel has no filters of system calls, or the processor is neither an x86-64 nor an aarch64"


def _since(abi: int, least: int, what: str, linux: str) -> str:
    if abi >= least:
        return f"on: {what}"
    return f"off: Landlock here is of version {abi}, which needs {least} (Linux {linux})"


def _new_privileges() -> str:
    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) < 0:
        return "off: this kernel cannot give them up"
    return "on: none by starting a program"


def _filtered(what: str) -> str:
    return f"on: {what}" if seccomp.supported() else _NO_FILTER


def _filter(program: Callable[[], bytes]) -> str:
    return _attempt(lambda: seccomp.refuse_calls(program())) if seccomp.supported() else _NO_FILTER


def _attempt(part: Callable[[], object]) -> str:
    try:
        part()
    except (OSError, ValueError) as error:
        return f"off: {error}"
    return "on"


def _limit_memory(most_bytes: int) -> None:
    """Limit allocations to the present use and the given number of bytes; 0 for no limit.

    Memory shared by processes does not count, nor does address space that is only reserved.
    """
    if not most_bytes:
        return
    taken = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    _lower(resource.RLIMIT_DATA, int(taken) * 1024 + most_bytes)


def _limit_processes(most: int) -> None:
    """Limit the processes and threads of this user; 0 for no limit."""
    if most:
        _lower(resource.RLIMIT_NPROC, most)


def _lower(kind: int, limit: int) -> None:
    """Set a limit of this process, unless it is as low already."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(kind, (limit, limit))


def _no_new_privileges() -> None:
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities() -> None:
    """Drop capabilities from all sets; from the bounding set only with the required capability."""
    for capability in range(_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    limit_capabilities(())


def limit_capabilities(kept: Sequence[int]) -> None:
    """Give up all capabilities of this thread but some, which it must have; the bounding set stays (``capset(2)``).

    Args:
        kept: Numbers of those that it keeps, below 32.

    Raises:
        OSError: The system refuses.
    """
    _libc.prctl(_PR_CAP_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    bits = sum(1 << each for each in kept)
    sets = (ctypes.c_uint32 * 6)(bits, bits)  # effective and permitted; inheritable, and those from 32 on, are empty
    if _libc.capset(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


# ---- files and ports


def _enforce(gpu: bool, address: str, *, tcp: bool) -> None:
    """Enforce what remains of files and ports; without ``tcp`` no port does, which is quickest: the kernel copies all
    rules for each process.
    """
    abi = landlock.version()
    if not abi:
        raise OSError("this kernel has no Landlock, or it is switched off")
    try:
        _enforce_files(abi, gpu, address, tcp=tcp)
        if tcp:
            prepare()
            for ports in _prepared:
                ports.enforce()
    finally:
        while _prepared:  # an open one could be added to, and it is that of all forks
            _prepared.pop().close()


def _enforce_files(abi: int, gpu: bool, address: str, *, tcp: bool) -> None:
    rules = landlock.Ruleset(abi, ports=not tcp and abi >= _PORTS_SINCE)
    if gpu:
        _libraries.cache_clear()  # those of the driver have been loaded since
    try:
        for folder in {*map(Path, _SYSTEM), *_libraries()}:
            rules.allow(folder, landlock.READ)
        for name in _SETTINGS:
            rules.allow(Path("/etc", name), landlock.READ)
        for path in _SOURCES:
            rules.allow(path, landlock.READ_FILE)
        rules.allow("/dev/null", landlock.READ_FILE | landlock.WRITE_FILE)
        if address.startswith("/"):
            rules.allow(address, landlock.MAKE_SOCKET | landlock.REMOVE_FILE)
        if gpu:
            _allow_driver(rules)
        rules.enforce()
    finally:
        rules.close()


def prepare() -> None:
    """Prepare the slowest parts of :func:`confine`, which are the same for all workers: a rule for each port, and the
    folders of libraries. They are used by forks of this process and by its next call.

    Raises:
        OSError: The kernel refuses.
    """
    abi = landlock.version()
    _libraries()
    if abi >= _PORTS_SINCE and not _prepared:
        ports = landlock.Ruleset(abi, files=False, ports=True)
        try:
            ports.allow_ports(PORTS)
        except OSError:
            ports.close()
            raise
        _prepared.append(ports)


def _allow_driver(rules: landlock.Ruleset) -> None:
    """Allow access for CUDA and NCCL: driver devices, shared memory, MPS if it is used, and the process's own files in
    ``/proc``, by which drivers from 570 on name their threads; they do not start if they cannot.
    """
    use = landlock.READ | landlock.WRITE_FILE | landlock.DEVICE_COMMANDS
    for path in (*Path("/dev").glob("nvidia*"), *map(Path, _GPU_DEVICES)):
        rules.allow(path, use)
    rules.allow("/dev/shm", landlock.READ | _WRITE)  # NCCL's memory between processes
    rules.allow("/run/nvidia-persistenced", use)
    os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)  # stays open: the rule is for this entry of the kernel's cache
    rules.allow("/proc/self", landlock.READ | landlock.WRITE_FILE)
    rules.allow(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), use | _WRITE)


_WRITE = landlock.WRITE_FILE | landlock.MAKE_FILE | landlock.MAKE_SOCKET | landlock.REMOVE_FILE | landlock.TRUNCATE


@functools.cache
def _libraries() -> tuple[Path, ...]:
    """Return the folders of Python's imports and of loaded libraries.

    The user's home and its parents are left out, even if they are on the import path: loaded libraries stay loaded.
    """
    private = {Path("/"), Path.home(), *Path.home().parents}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = (line.rstrip("\n").split(maxsplit=5)[-1].rpartition("/") for line in maps)
        folders = {folder for folder, _, name in loaded if ".so" in name}
    places = map(Path, {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *folders} - {""})
    return tuple(place for place in places if place.is_absolute() and place.resolve() not in private)


__all__ = [
    "PORTS",
    "confine",
    "confine_sockets",
    "confinement",
    "failures",
    "limit_capabilities",
    "memory_limit_bytes",
    "prepare",
]
