"""Workers that are ended together."""

from __future__ import annotations

from typing import Any, cast

import pytest

from onebox.pool.backends.base import WorkerHandle, end_all


class Handle:
    """A worker that notes its end."""

    def __init__(self, number: int, ended: list[int], *, fails: bool) -> None:
        self.number, self.ended, self.fails = number, ended, fails

    def close(self, *, grace_s: float) -> None:
        """End."""
        self.ended.append(self.number)
        if self.fails:
            raise OSError(f"worker {self.number}")


def test_a_worker_whose_end_fails_keeps_no_other_alive() -> None:
    ended: list[int] = []
    handles = [Handle(number, ended, fails=number == 1) for number in range(4)]
    with pytest.raises(OSError, match="worker 1"):
        end_all(cast(list[WorkerHandle], cast(Any, handles)), grace_s=1.0)
    assert ended == [0, 1, 2, 3]
