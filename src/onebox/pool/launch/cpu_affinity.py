"""CPU affinity of workers on this machine: cores are allocated to workers, each core to one worker only.

Several processes of a user may start workers at once: a core is allocated by a lock on a file, which the kernel
releases when its holder ends in any way. Where too few cores are left for all threads, or the user has limited this
process to some of them, no affinity is set.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


class CoreAllocator:
    """The cores that one process has allocated to its workers.

    Args:
        folder: Folder of the lock files; belongs to this user, created when first needed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir(), f"onebox-cores-{os.getuid()}")
        self._held: dict[int, int] = {}

    def allocate(self, threads: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Allocate to each worker as many cores as it has threads; no other worker of this user gets them.

        Args:
            threads: Threads of each worker; 0 for one that needs no core of its own.

        Returns:
            The cores of each worker; empty for all workers where they do not suffice.
        """
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(threads)
        allowed = os.sched_getaffinity(0)
        if sum(threads) > len(allowed) or len(allowed) < len(online_cores()):
            return nothing
        taken: list[int] = []
        for core in by_preference(allowed, siblings_of(allowed)):
            if len(taken) == sum(threads):
                break
            if self._take(core):
                taken.append(core)
        if len(taken) < sum(threads):
            self.give_back(taken)
            return nothing
        left = iter(taken)
        return tuple(tuple(sorted(next(left) for _ in range(count))) for count in threads)

    def give_back(self, cores: Sequence[int]) -> None:
        """Free cores; those that are not held are ignored."""
        for core in cores:
            descriptor = self._held.pop(core, None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Free all cores. Idempotent."""
        self.give_back(list(self._held))

    def _take(self, core: int) -> bool:
        """Lock a core; return whether that succeeded."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._folder / str(core), flags, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._held[core] = descriptor
        return True


def online_cores() -> set[int]:
    """Return the cores of this machine that are online."""
    try:
        text = (_TOPOLOGY / "online").read_text()
    except OSError:
        return set(range(os.cpu_count() or 1))
    return numbers(text)


def siblings_of(cores: set[int]) -> dict[int, tuple[int, ...]]:
    """Return each core's hyperthread siblings, including itself, as the kernel reports them."""
    found: dict[int, tuple[int, ...]] = {}
    for core in cores:
        try:
            text = (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            text = str(core)
        found[core] = tuple(sorted(numbers(text)))
    return found


def by_preference(cores: set[int], siblings: Mapping[int, Sequence[int]]) -> list[int]:
    """Return cores in order of preference: one of each group of siblings first, then their second ones.

    Args:
        cores: The cores.
        siblings: The hyperthread siblings of each, including itself.
    """
    return sorted(cores, key=lambda core: (sum(other < core and other in cores for other in siblings[core]), core))


def numbers(text: str) -> set[int]:
    """Parse a list of numbers in the kernel's format, such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
