"""Cores of this machine for workers' threads: dealt out by whoever starts workers, to each worker its own.

Several processes of a user may start workers at once: one core is one locked file, which the kernel unlocks when its
holder ends, however that comes about. Where there are not enough cores left for all threads, or where the user has
limited this process to some of them, workers run where the kernel lets them.
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
    """The cores that one owner of workers has dealt out.

    Args:
        folder: Where the locks are; of this user, made when first needed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir(), f"onebox-cores-{os.getuid()}")
        self._held: dict[int, int] = {}

    def deal(self, threads: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return for each worker as many cores as it has threads, which no other worker of this user has.

        Args:
            threads: Of each worker; 0 for one that needs no core of its own.

        Returns:
            The cores of each; none for any where they do not suffice for all.
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
        """Let others have cores; of any that are not held nothing is done."""
        for core in cores:
            descriptor = self._held.pop(core, None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Let others have all of them. Idempotent."""
        self.give_back(list(self._held))

    def _take(self, core: int) -> bool:
        """Lock a core; tell whether that succeeded."""
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
    """Return the cores of this machine that are switched on."""
    try:
        text = (_TOPOLOGY / "online").read_text()
    except OSError:
        return set(range(os.cpu_count() or 1))
    return numbers(text)


def siblings_of(cores: set[int]) -> dict[int, tuple[int, ...]]:
    """Return for each core those that share its circuits (hyperthreads), itself among them, as the kernel says."""
    found: dict[int, tuple[int, ...]] = {}
    for core in cores:
        try:
            text = (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            text = str(core)
        found[core] = tuple(sorted(numbers(text)))
    return found


def by_preference(cores: set[int], siblings: Mapping[int, Sequence[int]]) -> list[int]:
    """Return cores in the order in which to use them: one of each group of siblings first, then their second ones.

    Args:
        cores: They.
        siblings: For each those that share its circuits, itself among them.
    """
    return sorted(cores, key=lambda core: (sum(other < core and other in cores for other in siblings[core]), core))


def numbers(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it, such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
