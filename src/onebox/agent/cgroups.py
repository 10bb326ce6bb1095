"""Control groups of leases (``cgroups(7)``, version 2): limits of memory, processes and processor time for all workers
of a lease together, and an end of all its processes at once.

They are made in the cgroup that the system has delegated to the agent. Systemd delegates to a service with
``Delegate=yes`` (https://systemd.io/CGROUP_DELEGATION), which an attribute of the folder shows; without systemd, as in
containers, it is the agent's own cgroup if that can be written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from onebox.agent.admission import Share
from onebox.reaping import has_ended
from onebox.worker.accelerator import needs_driver
from onebox.worker.memory.shared import shared_limit_bytes
from onebox.worker.sandbox.confine import memory_limit_bytes

_WORKER_PROCESSES = 2048
_PROCESSES_PER_THREAD = 8
"""The most threads of a worker: those of libraries, two for each peer on another host in each group, and for each
thread of its operators those of several pools."""

_DRIVER_BYTES = 4 << 30
"""Host memory of a GPU's driver and libraries in each worker."""

_CPU_PERIOD_US = 100_000

_AGENT = "agent"
"""Cgroup of the agent, if it has to leave its own."""

_SYSTEMD = Path("/run/systemd/system")
_PROC = Path("/proc")

_OWN = re.compile(r"^0::(/.*)$", re.MULTILINE)
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- cgroup2 ", re.MULTILINE)


def most_processes(shares: Sequence[Share]) -> int:
    """Return the most processes and threads of a lease together, from the shares of its workers."""
    return sum(_WORKER_PROCESSES + _PROCESSES_PER_THREAD * share.threads for share in shares)


def lease_limits(shares: Sequence[Share]) -> dict[str, str]:
    """Return the limits of all processes of a lease together, by controller, as the kernel reads them.

    Memory is what each worker's own limit allows, and what it may share with others; none if a worker has no limit.
    Cores are those of its operators, and one for each worker's other threads.
    """
    memory_bytes = 0
    for share in shares:
        memory_bytes += shared_limit_bytes(share.memory_bytes) + memory_limit_bytes(share.memory_bytes, share.threads)
        memory_bytes += _DRIVER_BYTES if needs_driver(share.device) else 0
    cores = sum(share.threads + 1 for share in shares)
    return {
        "memory": str(memory_bytes) if all(share.memory_bytes for share in shares) else "max",
        "pids": str(most_processes(shares)),
        "cpu": f"{cores * _CPU_PERIOD_US} {_CPU_PERIOD_US}",
    }


class LeaseCgroup:
    """A cgroup, by its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, process: int, descriptor: int = -1) -> None:
        """Move a process into it, by its id and a descriptor of it; none is needed of a child that is not awaited.

        Raises:
            ProcessLookupError: It has ended by now, so that its id may have been another's.
            OSError: The system refuses.
        """
        with contextlib.suppress(ProcessLookupError):
            (self._folder / "cgroup.procs").write_text(str(process))
        if descriptor >= 0 and has_ended(descriptor, 0.0):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def processes(self) -> list[int]:
        """Return the ids of its processes; none where it is gone."""
        with contextlib.suppress(OSError):
            return [int(word) for word in (self._folder / "cgroup.procs").read_text().split()]
        return []

    def kill(self) -> None:
        """Kill all its processes at once, where the system can: from Linux 5.14."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove it; return whether it is gone, as it is once its processes have ended."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        return not self._folder.exists()


class LeaseCgroups:
    """The cgroups of an agent's leases, in a folder that the constructor makes where ``proc(5)`` says that it may."""

    folder: Path | None = None
    """``None`` where there are no cgroups."""

    limits: tuple[str, ...] = ()
    """Controllers that limit leases."""

    state: str
    """``on``, with the limits that there are not, or ``off`` with the reason."""

    def __init__(self, proc: Path = _PROC) -> None:
        try:
            own = _own(proc)
            base = _delegated(own)
            for left in base.glob("onebox-*"):
                if not Path(_PROC, left.name.split("-")[1]).exists():  # of an agent that was killed
                    _remove_tree(left)
            folder = base / f"onebox-{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir()
            self.folder = folder
            self.state = self._limit(folder, alone=own == base and LeaseCgroup(own).processes() == [os.getpid()])
        except OSError as error:
            self.close()
            self.state = f"off: {error}"

    def make(self, lease: int, shares: Sequence[Share]) -> LeaseCgroup | None:
        """Return a new cgroup for a lease, ``None`` where there are none; an ``OSError`` if the system refuses."""
        if self.folder is None:
            return None
        folder = self.folder / f"lease-{lease}"
        folder.mkdir()
        for controller, text in lease_limits(shares).items():
            if controller in self.limits:
                (folder / f"{controller}.max").write_text(text)
        return LeaseCgroup(folder)

    def close(self) -> None:
        """Remove all cgroups, and kill what is left in them. Idempotent."""
        folder, self.folder = self.folder, None
        if folder is not None:
            for limited in (folder, folder.parent):
                for name in self.limits:
                    with contextlib.suppress(OSError):  # another agent has limits here
                        (limited / "cgroup.subtree_control").write_text(f"-{name}")
            if (folder / _AGENT).exists():
                with contextlib.suppress(OSError):
                    LeaseCgroup(folder.parent).add(0)
            _remove_tree(folder)

    def _limit(self, folder: Path, *, alone: bool) -> str:
        """Enable controllers for the cgroups of leases; return the state.

        A cgroup whose children have controllers must hold no process itself, so an agent that is alone in it moves.
        """
        there = (folder.parent / "cgroup.controllers").read_text().split()
        absent = [name for name in ("memory", "pids", "cpu") if name not in there]
        wanted = [name for name in ("memory", "pids", "cpu") if name in there]
        if len(_enabled(folder.parent, wanted)) < len(wanted) and alone:
            (folder / _AGENT).mkdir()
            LeaseCgroup(folder / _AGENT).add(0)
        self.limits = tuple(_enabled(folder, _enabled(folder.parent, wanted)))
        busy = [name for name in wanted if name not in self.limits]
        missing = [f"{', '.join(absent)}: the system has no such controller here"] if absent else []
        missing += [f"{', '.join(busy)}: {folder.parent} has other processes"] if busy else []
        return f"on, without limits of {'; '.join(missing)}" if missing else "on"


def _own(proc: Path) -> Path:
    """Return the folder of this process's cgroup; an ``OSError`` where it has none, or cannot see it."""
    place = _OWN.search((proc / "self/cgroup").read_text())
    for mount in _MOUNT.findall((proc / "self/mountinfo").read_text()):
        root, point = (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text) for text in mount)
        if place and "/.." not in place[1] and Path(place[1]).is_relative_to(root):
            return Path(point) / Path(place[1]).relative_to(root)
    raise OSError("this system has no cgroups of version 2, or this process does not see its own")


def _delegated(own: Path) -> Path:
    """Return the nearest cgroup that was delegated to this process; an ``OSError`` where there is none."""
    if not _SYSTEMD.exists():
        if _writable(own):
            return own
        raise OSError(f"{own} cannot be written to")
    for folder in (own, *own.parents):
        for attribute in ("user.delegate", "trusted.delegate"):
            with contextlib.suppress(OSError):
                if os.getxattr(folder, attribute) == b"1" and _writable(folder):
                    return folder
    raise OSError(f"systemd has not delegated {own}: a service needs Delegate=yes")


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _enabled(folder: Path, controllers: Sequence[str]) -> list[str]:
    """Enable controllers for the children of a cgroup; return those that are enabled."""
    for name in controllers:
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{name}")
    there = (folder / "cgroup.subtree_control").read_text().split()
    return [name for name in controllers if name in there]


def _remove_tree(folder: Path) -> None:
    """Kill the processes of an agent's leases, and remove their cgroups, as far as they have ended."""
    children = list(folder.glob("*/"))
    for child in children:
        if child.name != _AGENT:
            LeaseCgroup(child).kill()
    for each in (*children, folder):
        LeaseCgroup(each).remove()


__all__ = ["LeaseCgroup", "LeaseCgroups", "lease_limits", "most_processes"]
