"""Randomness profile of samples: use of random generators, which decides between threads and processes.

The first samples are prepared once for this, and discarded. A transform that draws for few samples only may go
undetected; it should take a ``generator``, or the feed be given ``process_by="processes"``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.prepare.preparation import Preparation
from onebox.feed.seeding import draws
from onebox.portable import LINUX, SYSTEM

ProcessBy = Literal["threads", "processes", "auto"]

PROBED = 3
"""Number of probed samples: more than one, as the first may be broken."""


@dataclass(frozen=True)
class RandomnessProfile:
    """Properties of the preparation of samples.

    Args:
        reading: Whether reading draws from the generators of the process.
        processing: Whether decoding or transforming does.
        encoded: Whether reading returns only bytes, which are still to be decoded.
        plain: Whether read data can be sent to a child process.
    """

    reading: bool = False
    processing: bool = False
    encoded: bool = True
    plain: bool = True

    @property
    def draws(self) -> bool:
        """True if anything draws random numbers."""
        return self.reading or self.processing


def profile_randomness(
    preparation: Preparation, indices: Sequence[int], *, timeout_s: float
) -> RandomnessProfile | None:
    """Profile the preparation of some samples; errors are left to when they are read again.

    Args:
        preparation: The preparation.
        indices: The samples.
        timeout_s: Time limit in seconds.

    Returns:
        The profile; ``None`` where no sample could be prepared.

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

    thread = threading.Thread(target=look, name="onebox-feed-probe", daemon=True)  # daemon: may hang
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
    """Choose threads or processes for a preparation, from its profile.

    Args:
        preparation: The preparation.
        by: The user's choice.
        habits: Its profile.
        may_be_late: Whether processes can read samples themselves. They do where reading draws, and where it returns
            more than bytes: then reading is most of the work.

    Returns:
        The preparation, and the kind of its workers.

    Raises:
        UsageError: Processes are requested, on another system than Linux.
    """
    if by == "processes" and not LINUX:
        raise UsageError(f"process_by='processes' needs Linux, and this machine has {SYSTEM}; say 'threads'")
    wanted = habits.draws and LINUX and (may_be_late or habits.plain)
    if by == "processes" or (by == "auto" and wanted):
        late = may_be_late and (habits.reading or not habits.encoded)
        seeded = habits.draws or late or preparation.transform is not None  # the last two may draw, unnoticed
        return replace(preparation, globals="owned" if seeded else "untouched", late=late), "processes"
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
