"""Ranks of a group on one host that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from onebox.wire.messages import EmulatedLink, FormGroup
from onebox.worker.links import Wires
from onebox.worker.memory import PeerLost
from onebox.worker.shared import SharedGroup
from onebox.worker.tape import Progress
from tests.unit.programs import CPU


class Keys:
    """A key-value store of threads."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._timeout_s):
                raise PeerLost(f"nobody set {key}")
        return self._values[key]


Rank = Callable[[int, SharedGroup], Any]


def run_ranks(
    size: int,
    rank: Rank,
    *,
    timeout_s: float = 30.0,
    devices: Sequence[torch.device] = (),
    links: Mapping[int, Sequence[EmulatedLink]] | None = None,
) -> list[Any]:
    """Form a group, run a function for each rank, in threads, and return what each returns.

    Args:
        size: How many ranks.
        rank: Called with the number of the rank and its group.
        timeout_s: Bound of every wait.
        devices: Of each rank; CPUs where left out.
        links: Emulated links that each rank has to others.
    """
    keys = Keys()

    def one(number: int) -> Any:
        own = tuple((links or {}).get(number, ()))
        form = FormGroup(3, number, size, "gloo", "127.0.0.1", timeout_s, True, own)
        group = SharedGroup(form, keys, devices[number] if devices else CPU, Progress(), Wires())
        try:
            return rank(number, group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, number) for number in range(size)]
        return [future.result(60) for future in futures]
