"""The zygotes of an agent: each forks the fork servers of all leases whose environment it has.

A fork has its parent's address layout, and so have the workers of all clients whose fork servers one zygote has
forked. It costs a fork instead of the import of PyTorch, and shares nearly all of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from subprocess import SubprocessError

from onebox.forking import ForkServerEnded, SpawnFailed
from onebox.pool.launch.fork_server import ZygoteProcess

MOST = 2
"""The most zygotes of an agent, which differ by the number of threads; each takes some 160 MB of memory of its own."""

IMPORT_S = 30.0
"""How long the imports of a zygote may take; then leases that wait for it import PyTorch themselves."""

USED_S = 60.0
"""Time after the last use of a zygote in which none of another environment takes its place: clients choose theirs,
and none of them can have those of others import anew."""

RETRY_S = 60.0
"""Time without a zygote after one that could not be started, did not become ready or fork, or whose forks failed."""


@dataclass
class _Found:
    zygote: ZygoteProcess
    environment: dict[str, str]
    until_s: float
    used_s: float
    ready: bool = False
    failure: str = ""


class Zygotes:
    """The zygotes of an agent, each started when the first lease with its environment begins, and kept.

    Args:
        users: Whether each lease has a user of its own.
        enough_memory: Returns whether this machine has memory for a zygote.
    """

    def __init__(self, *, users: bool, enough_memory: Callable[[], bool]) -> None:
        self._users = users
        self._enough_memory = enough_memory
        self._found: list[_Found] = []  # the one that was used last comes last
        self._ended: list[tuple[int, str]] = []
        self._retry_s = 0.0

    def find(self, environment: Mapping[str, str], now_s: float) -> ZygoteProcess | None:
        """Return the zygote of an environment, which may still import; ``None`` where there is none, and none is
        started.

        Args:
            environment: The environment.
            now_s: The time.
        """
        for found in self._found:
            if found.environment == environment:
                self._found.remove(found)
                self._found.append(found)
                found.used_s = now_s
                return None if found.failure else found.zygote
        if now_s < self._retry_s or not self._enough_memory():
            return None
        unused = [found for found in self._found if found.ready and now_s >= found.used_s + USED_S]
        if len(self._found) >= MOST and not unused:
            return None
        try:
            zygote = ZygoteProcess(environment, users=self._users)
        except (OSError, SubprocessError) as error:
            self._retry_s = now_s + RETRY_S
            self._ended.append((0, f"it could not be started: {error}"))
            return None
        if len(self._found) >= MOST:
            self._end(unused[0], "leases have other environments")
        self._found.append(_Found(zygote, dict(environment), now_s + IMPORT_S, now_s))
        return zygote

    def drop(self, zygote: ZygoteProcess, why: str) -> None:
        """Use a zygote no more that does not fork, or whose forks fail; it ends in the next :meth:`attend`."""
        for found in self._found:
            if found.zygote is zygote:
                found.failure = why

    def retire(self, zygote: ZygoteProcess, why: str) -> None:
        """End a zygote, unless it has ended; the next lease with its environment has another. Its forks go on."""
        for found in list(self._found):
            if found.zygote is zygote:
                self._end(found, why)

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
        for found in list(self._found):
            lost = found.ready and found.zygote.channel in ready
            if not found.ready and not found.failure:
                self._attend_imports(found, now_s)
            if found.failure:
                self._retry_s = now_s + RETRY_S
            if found.failure or lost:
                self._end(found, found.failure or f"it has ended{found.zygote.last_words()}")

    def attend_memory(self) -> None:
        """End all if this machine has too little memory."""
        if self._found and not self._enough_memory():
            for found in list(self._found):
                self._end(found, "memory is short")

    def close(self) -> None:
        """End all. Idempotent."""
        while self._found:
            self._found.pop().zygote.close()

    def _attend_imports(self, found: _Found, now_s: float) -> None:
        try:
            found.ready = found.zygote.wait_ready(0.0)
            if not found.ready and now_s >= found.until_s:
                found.failure = f"it is not ready after {IMPORT_S:.0f} s"
        except (ForkServerEnded, SpawnFailed) as error:
            found.failure = str(error)

    def _end(self, found: _Found, why: str) -> None:
        self._found.remove(found)
        self._ended.append((found.zygote.pid, why))
        found.zygote.close()
