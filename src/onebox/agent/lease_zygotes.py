"""The zygotes of an agent: each forks the workers of all leases that have its number of threads.

A fork has its parent's address layout, and so have the workers of all clients that one zygote has forked. It costs a
fork instead of the import of PyTorch, and shares nearly all of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import IO

from onebox.forking import ForkServerEnded, SpawnFailed
from onebox.pool.launch.worker_user import WorkerUser
from onebox.pool.launch.zygotes import ForkedWorker, ZygoteProcess

MOST = 2
"""The most zygotes of an agent, which differ by the number of threads; each takes some 160 MB of memory of its own."""

IMPORT_S = 30.0
"""How long the imports of a zygote may take; then leases that wait for it import PyTorch themselves."""

SPAWN_S = 2.0
"""Bound of a fork, of a hundredth of a second: the agent, which has a single thread, waits for it."""

USED_S = 60.0
"""Time after the last use of a zygote in which none of another environment takes its place: clients choose theirs,
and none of them can have those of others import anew."""

RETRY_S = 60.0
"""Time without a zygote after one that could not be started, did not become ready or did not fork."""


@dataclass
class _Found:
    zygote: ZygoteProcess
    environment: dict[str, str]
    until_s: float
    used_s: float
    failure: str = ""


class LeaseZygotes:
    """The zygotes of an agent, each started when the first lease with its environment begins, and kept; a
    :class:`~onebox.pool.launch.zygotes.WorkerSpawner`.

    Args:
        users: Whether each lease has a user of its own.
        enough_memory: Returns whether this machine has memory for a zygote.
    """

    def __init__(self, *, users: bool, enough_memory: Callable[[], bool]) -> None:
        self._users = users
        self._enough_memory = enough_memory
        self._found: list[_Found] = []  # the one that was used last comes last
        self._retired: list[ZygoteProcess] = []  # those that end with the last of their workers
        self._ended: list[tuple[int, str]] = []
        self._retry_s = 0.0

    def prepare(self, environment: Mapping[str, str], now_s: float) -> bool:
        """Start the zygote of an environment, unless there is one or cannot be one now; return whether workers can be
        started, by it or from scratch: ``False`` while it imports.

        Args:
            environment: The environment.
            now_s: The time.
        """
        found = next((each for each in self._found if each.environment == environment), None)
        if found is None:
            found = self._start(environment, now_s)
            if found is None:
                return True
        else:
            self._found.remove(found)
        self._found.append(found)
        found.used_s = now_s
        return found.zygote.ready or bool(found.failure)

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedWorker | None:
        """Start a worker; see :class:`~onebox.pool.launch.zygotes.WorkerSpawner`."""
        for found in self._found:
            if found.environment == environment and found.zygote.ready and not found.failure:
                try:
                    return found.zygote.fork_worker(stderr, account, within_s=SPAWN_S)
                except ForkServerEnded:
                    return None  # which the next call of attend() finds
                except SpawnFailed as error:
                    found.failure = str(error)
                except OSError:
                    pass  # as without a free descriptor
        return None

    def news(self) -> list[tuple[int, str]]:
        """Return, once, those that have ended before :meth:`close`: the process, 0 for one that could not be started,
        and the reason of each."""
        ended, self._ended = self._ended, []
        return ended

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors that are readable when :meth:`attend` has work."""
        for found in self._found:
            yield found.zygote.channel

    def attend(self, ready: Set[int], now_s: float) -> None:
        """End those that do not become ready in time, or do not fork, or send anything by themselves.

        Args:
            ready: The descriptors that are readable.
            now_s: The time.
        """
        for zygote in [each for each in self._retired if each.ended]:
            self._retired.remove(zygote)
            zygote.close()
        for found in list(self._found):
            lost = found.zygote.ready and found.zygote.channel in ready
            if not found.zygote.ready and not found.failure:
                self._attend_imports(found, now_s)
            if found.failure:
                self._retry_s = now_s + RETRY_S
            if found.failure or lost:
                self._end(found, found.failure or f"it has ended{found.zygote.last_words()}")
                found.zygote.close()

    def attend_memory(self) -> None:
        """End all if this machine has too little memory."""
        if self._found and not self._enough_memory():
            for found in list(self._found):
                self._retire(found, "memory is short")

    def close(self) -> None:
        """End all. Idempotent."""
        for zygote in [*(found.zygote for found in self._found), *self._retired]:
            zygote.close()
        self._found, self._retired = [], []

    def _start(self, environment: Mapping[str, str], now_s: float) -> _Found | None:
        if now_s < self._retry_s or not self._enough_memory():
            return None
        unused = [found for found in self._found if found.zygote.ready and now_s >= found.used_s + USED_S]
        if len(self._found) >= MOST and not unused:
            return None
        try:
            zygote = ZygoteProcess(environment, users=self._users, stays=True)
        except (OSError, SubprocessError) as error:
            self._retry_s = now_s + RETRY_S
            self._ended.append((0, f"it could not be started: {error}"))
            return None
        if len(self._found) >= MOST:
            self._retire(unused[0], "leases have other environments")
        return _Found(zygote, dict(environment), now_s + IMPORT_S, now_s)

    def _attend_imports(self, found: _Found, now_s: float) -> None:
        try:
            if not found.zygote.wait_ready(0.0) and now_s >= found.until_s:
                found.failure = f"it is not ready after {IMPORT_S:.0f} s"
        except (ForkServerEnded, SpawnFailed) as error:
            found.failure = str(error)

    def _retire(self, found: _Found, why: str) -> None:
        """Have a zygote fork no more; it tells how its workers end, and ends with the last of them."""
        self._end(found, why)
        found.zygote.stop()
        self._retired.append(found.zygote)

    def _end(self, found: _Found, why: str) -> None:
        self._found.remove(found)
        self._ended.append((found.zygote.pid, why))
