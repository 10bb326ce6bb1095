"""How samples are prepared: whether random numbers are drawn, which decides if threads or processes may do it.

The first samples are prepared once for this, and thrown away. What draws for few samples only may go unseen; who has
such a transform lets it take a ``generator``, or says ``process_by="processes"``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.prepare.preparation import Preparation
from onebox.feed.seeding import draws

ProcessBy = Literal["threads", "processes", "auto"]

PROBED = 3
"""Samples that are looked at: more than one, as the first may be broken."""


@dataclass(frozen=True)
class RandomnessProfile:
    """How samples are prepared.

    Args:
        reading: Whether reading draws from the generators of the process.
        processing: Whether decoding or transforming does.
        encoded: Whether all that is read is bytes, which are still to be decoded.
        plain: Whether what is read can go to a child process.
    """

    reading: bool = False
    processing: bool = False
    encoded: bool = True
    plain: bool = True

    @property
    def draws(self) -> bool:
        """Whether anything draws."""
        return self.reading or self.processing


def profile_randomness(
    preparation: Preparation, indices: Sequence[int], *, timeout_s: float
) -> RandomnessProfile | None:
    """Find out how some samples are prepared; errors are left to when they are read again.

    Args:
        preparation: What is done to them.
        indices: The samples.
        timeout_s: Seconds that it may take.

    Returns:
        It; ``None`` where none of them could be had.

    Raises:
        DataError: It takes longer.
    """
    found: list[RandomnessProfile] = []

    def look() -> None:
        for index in indices:
            with contextlib.suppress(Exception):
                raw: list[Any] = []
                reading = draws(lambda i=index, to=raw: to.append(preparation.read_one(i)))  # type: ignore[misc]
                found.append(RandomnessProfile(reading, False, _is_encoded(raw[0]), _is_plain(raw[0])))
                processing = draws(lambda i=index, of=raw: preparation.process(of[0], i))  # type: ignore[misc]
                found.append(replace(found[-1], processing=processing))

    thread = threading.Thread(target=look, name="onebox-feed-probe", daemon=True)  # so that nobody waits for ever
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        first = preparation.named(indices[0])
        todo = "look for what it waits for, or allow more by timeout_s"
        raise DataError(
            f"read has been inside the first samples ({first}, ...) for {timeout_s:g} s: {todo}", path=first
        )
    if not found:
        return None
    return RandomnessProfile(
        reading=any(each.reading for each in found),
        processing=any(each.processing for each in found),
        encoded=all(each.encoded for each in found),
        plain=all(each.plain for each in found),
    )


def choose_workers(
    preparation: Preparation, by: ProcessBy, habits: RandomnessProfile, *, may_be_late: bool
) -> tuple[Preparation, Literal["threads", "processes"]]:
    """Let samples be prepared as what is done to them demands.

    Args:
        preparation: What is done to them.
        by: What a user wants.
        habits: How that is done.
        may_be_late: Whether processes can read samples themselves. They do where reading draws, and where what is read
            is more than bytes: then reading is most of the work.

    Returns:
        The preparation, and what runs it.

    Raises:
        UsageError: Processes are wanted, and this system has no way to fork them.
    """
    forks = hasattr(os, "fork")
    if by == "processes" and not forks:
        raise UsageError("process_by='processes' needs a system that can fork, which this one cannot; say 'threads'")
    wanted = habits.draws and forks and (may_be_late or habits.plain)
    if by == "processes" or (by == "auto" and wanted):
        late = may_be_late and (habits.reading or not habits.encoded)
        return replace(preparation, globals="owned", late=late), "processes"
    return replace(preparation, globals="shared" if habits.draws else "untouched"), "threads"


def _is_encoded(raw: Any) -> bool:
    return _consists_of(raw, (bytes, bytearray, str, int, float, type(None)))


def _is_plain(raw: Any) -> bool:
    return _consists_of(raw, (bytes, bytearray, str, int, float, type(None), Tensor, np.ndarray, np.generic))


def _consists_of(raw: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(raw, Mapping):
        return all(_consists_of(value, kinds) for value in raw.values())
    if isinstance(raw, list | tuple):
        return all(_consists_of(value, kinds) for value in raw)
    return isinstance(raw, kinds)
