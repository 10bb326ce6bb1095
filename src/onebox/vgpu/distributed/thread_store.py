"""A key-value store inside one process, for ``torch.distributed`` among threads: no socket, and it can be aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from onebox.errors import PeerLost

_TIMEOUT_S = 1800.0
"""Default bound of a wait for a key; PyTorch's own value."""


class ThreadStore(dist.Store):
    """Keys with values; reads of a missing key wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = _TIMEOUT_S
        self._over = ""

    def give_up(self, why: str) -> None:
        """Fail all current and later waits for a key.

        Args:
            why: The reason.
        """
        with self._changed:
            self._over = why
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._update(lambda: self._values.__setitem__(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        return self._awaited([key], self._timeout_s)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, waiting for them."""
        return self._awaited(keys, self._timeout_s)

    def multi_set(self, keys: list[str], values: Sequence[Any]) -> None:
        """Set keys."""
        self._update(lambda: self._values.update(zip(keys, map(_bytes, values), strict=True)))

    def append(self, key: str, value: Any) -> None:
        """Add to the end of a key's value."""
        self._update(lambda: self._values.__setitem__(key, self._values.get(key, b"") + _bytes(value)))

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return it."""

        def change() -> int:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            return total

        return self._update(change)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value, or is missing and no value is expected; return its value."""

        def change() -> bytes:
            if self._values.get(key, b"") == _bytes(expected):
                self._values[key] = _bytes(desired)
            return self._values.get(key, _bytes(expected))

        return self._update(change)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        with self._changed:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return self._update(lambda: self._values.pop(key, None) is not None)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._awaited(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for a key."""
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """Return True: append, multi-set and multi-get are supported."""
        return True

    # PyTorch's C++ code calls some of them by its own names
    deleteKey = delete_key
    getNumKeys = num_keys
    hasExtendedApi = has_extended_api

    def _update(self, change: Callable[[], Any]) -> Any:
        with self._changed:
            made = change()
            self._changed.notify_all()
            return made

    def _awaited(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of keys, waiting until all exist.

        Raises:
            PeerLost: The store was aborted.
            dist.DistStoreError: They were not set in time.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not all(key in self._values for key in keys):
                if self._over:
                    raise PeerLost(self._over)
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    missing = ", ".join(key for key in keys if key not in self._values)
                    raise dist.DistStoreError(f"wait timeout after {timeout_s:.0f} s: nobody has set {missing}")
                self._changed.wait(left_s)
            return [self._values[key] for key in keys]


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
