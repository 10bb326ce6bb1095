"""Control groups of leases (``cgroups(7)``, version 2): limits of memory, processes and processor time for all workers
of a lease together, and an end of all its processes at once.

The part of the tree that this process may manage is found: the cgroup that the system has delegated, in which the
agent runs. Systemd delegates to a service with ``Delegate=yes`` (https://systemd.io/CGROUP_DELEGATION), and an
attribute of the folder shows it; where there is no systemd, as in containers, the cgroup that the agent runs in is its
own if it can write to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onebox.agent.admission import Share
from onebox.reaping import has_ended
from onebox.worker.accelerator import needs_driver
from onebox.worker.memory.shared import shared_limit_bytes
from onebox.worker.sandbox.confine import memory_limit_bytes

CONTROLLERS = ("memory", "pids", "cpu")

_WORKER_PROCESSES = 2048
_PROCESSES_PER_THREAD = 8
"""The most threads of a worker: those of libraries, two for each peer on another host in each group, and for each
thread of its operators those of several pools."""

_DRIVER_BYTES = 4 << 30
"""Host memory of a GPU's driver and libraries in each worker."""

_CPU_PERIOD_US = 100_000

_SYSTEMD = Path("/run/systemd/system")
_PROC = Path("/proc")


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of all processes of a lease together.

    Args:
        memory_bytes: Most memory, with memory that its workers share and cached files; 0 for no limit.
        processes: Most processes and threads.
        cores: Most processor time, in cores.
    """

    memory_bytes: int
    processes: int
    cores: int

    @classmethod
    def of(cls, shares: Sequence[Share]) -> CgroupLimits:
        """Return the limits of a lease, from the shares of its workers.

        Memory is what each worker's own limit allows, and what it may share with others; cores are those of its
        operators, and one for each worker's other threads.
        """
        gpus = sum(needs_driver(share.device) for share in shares)
        memory = [
            shared_limit_bytes(share.memory_bytes) + memory_limit_bytes(share.memory_bytes, share.threads)
            for share in shares
        ]
        limited = all(share.memory_bytes for share in shares)
        return cls(
            sum(memory) + gpus * _DRIVER_BYTES if limited else 0,
            sum(_WORKER_PROCESSES + _PROCESSES_PER_THREAD * share.threads for share in shares),
            sum(share.threads + 1 for share in shares),
        )

    def files(self) -> dict[str, str]:
        """Return the content of the files of each controller."""
        return {
            "memory": str(self.memory_bytes or "max"),
            "pids": str(self.processes),
            "cpu": f"{self.cores * _CPU_PERIOD_US} {_CPU_PERIOD_US}",
        }


class LeaseCgroup:
    """The cgroup of a lease.

    Args:
        folder: Its folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, process: int, descriptor: int = -1) -> None:
        """Move a process into it, unless it has ended.

        Args:
            process: Its id; 0 for this one.
            descriptor: A descriptor of the process; -1 where its id stays its own, as a child's that is not awaited.

        Raises:
            ProcessLookupError: It has ended by now, so that its id may have been another's.
            OSError: The system refuses.
        """
        with contextlib.suppress(ProcessLookupError):
            (self._folder / "cgroup.procs").write_text(str(process))
        if descriptor >= 0 and has_ended(descriptor, 0.0):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def processes(self) -> list[int]:
        """Return the ids of its processes."""
        return _processes(self._folder)

    def kill(self) -> None:
        """Kill all its processes at once, where the system can: from Linux 5.14."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove it; return whether it is gone, as it is once its processes have ended."""
        try:
            self._folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class LeaseCgroups:
    """The cgroups of an agent's leases. The constructor finds out where they can be made, and makes a folder for them.

    Args:
        proc: Where ``proc(5)`` is mounted.
    """

    limits: tuple[str, ...] = ()
    """Controllers that limit leases."""

    state: str
    """``on``, with the limits that there are not, or ``off`` with the reason."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._folder: Path | None = None
        self._base = Path()
        try:
            own = own_cgroup(proc)
            base = _delegated(own)
            for left in base.glob("onebox-*"):
                if not Path(_PROC, left.name.split("-")[1]).exists():  # of an agent that was killed
                    _remove_tree(left)
            self._folder = base / f"onebox-{os.getpid()}-{secrets.token_hex(4)}"
            self._folder.mkdir()
            self._base = base
            self.state = self._limit(own)
        except (OSError, ValueError) as error:
            self.close()
            self.state = f"off: {error}"

    @property
    def folder(self) -> Path:
        """The folder of the cgroups of leases.

        Raises:
            FileNotFoundError: There is none.
        """
        if self._folder is None:
            raise FileNotFoundError(self.state)
        return self._folder

    def make(self, lease: int, shares: Sequence[Share]) -> LeaseCgroup | None:
        """Return a new cgroup for a lease; ``None`` where there are none.

        Raises:
            OSError: The system refuses, although it did not at first.
        """
        if self._folder is None:
            return None
        folder = self._folder / f"lease-{lease}"
        folder.mkdir()
        for controller, text in CgroupLimits.of(shares).files().items():
            if controller in self.limits:
                (folder / f"{controller}.max").write_text(text)
        return LeaseCgroup(folder)

    def close(self) -> None:
        """Remove all cgroups, and kill what is left in them. Idempotent."""
        if self._folder is not None:
            for folder in (self._folder, self._base):
                for name in self.limits:
                    with contextlib.suppress(OSError):  # another agent has limits here
                        (folder / "cgroup.subtree_control").write_text(f"-{name}")
            if (self._folder / "agent").exists():
                with contextlib.suppress(OSError):
                    LeaseCgroup(self._base).add(0)
            _remove_tree(self._folder)
            self._folder = None

    def _limit(self, own: Path) -> str:
        """Enable controllers for the cgroups of leases; return the state.

        A cgroup whose children have controllers must hold no process itself, so the agent moves into one of its own if
        it is alone in it.
        """
        assert self._folder is not None
        there = (self._base / "cgroup.controllers").read_text().split()
        wanted = [name for name in CONTROLLERS if name in there]
        enabled = _enabled(self._base, wanted)
        if len(enabled) < len(wanted) and own == self._base and set(_processes(own)) == {os.getpid()}:
            (self._folder / "agent").mkdir()
            LeaseCgroup(self._folder / "agent").add(0)
            enabled = _enabled(self._base, wanted)
        self.limits = tuple(_enabled(self._folder, enabled))
        absent = [name for name in CONTROLLERS if name not in there]
        busy = [name for name in wanted if name not in self.limits]
        missing = [f"{', '.join(absent)}: the system has no such controller here"] if absent else []
        missing += [f"{', '.join(busy)}: {self._base} has other processes"] if busy else []
        return f"on, without limits of {'; '.join(missing)}" if missing else "on"


def own_cgroup(proc: Path = _PROC) -> Path:
    """Return the folder of this process's cgroup.

    Raises:
        OSError: This system has no cgroups of version 2, or they cannot be seen.
    """
    place = next((line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")), "")
    for line in (proc / "self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split()[0] == "cgroup2" and place and "/.." not in place:
            root, point = (_unescaped(text) for text in fields.split()[3:5])
            if Path(place).is_relative_to(root):
                return Path(point) / Path(place).relative_to(root)
    raise OSError("this system has no cgroups of version 2, or this process does not see its own")


def _delegated(own: Path) -> Path:
    """Return the nearest cgroup that was delegated to this process.

    Raises:
        OSError: There is none.
    """
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


def _processes(folder: Path) -> list[int]:
    """Return the processes of a cgroup, without those of its children."""
    with contextlib.suppress(OSError):
        return [int(word) for word in (folder / "cgroup.procs").read_text().split()]
    return []


def _remove_tree(folder: Path) -> None:
    """Kill the processes of a cgroup of leases, and remove it, as far as they have ended."""
    for child in folder.glob("lease-*"):
        LeaseCgroup(child).kill()
    for child in (*folder.glob("*/"), folder):
        with contextlib.suppress(OSError):
            child.rmdir()


def _unescaped(text: str) -> str:
    """Return a path of ``mountinfo``, in which blanks are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


__all__ = ["CONTROLLERS", "CgroupLimits", "LeaseCgroup", "LeaseCgroups", "own_cgroup"]
