"""The connection with a cluster: what is tried again, and what is said of what is not."""

from __future__ import annotations

import pytest

from onebox.cluster import connection
from onebox.errors import PoolError

LATE = ConnectionAbortedError("Initialization failure from server:\nRuntimeError: Proxy failed to Connect to backend!")
"""What Ray's client raises where the head did not start its server within 30 s."""


class Head:
    """Stands for ``ray``, with a head that fails some times."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked = 0
        self.ended = 0

    def init(self, **options: object) -> None:
        """Connect."""
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)

    def shutdown(self) -> None:
        """Forget what has failed."""
        self.ended += 1


def test_a_head_that_is_busy_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    head = Head(LATE, LATE)
    connection._initialize(head, "ray://head:10001")
    assert (head.asked, head.ended) == (3, 2)
    assert caplog.text.count("too busy to start a server for this client") == 2


def test_a_server_that_met_a_process_at_its_end_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    head = Head(ConnectionAbortedError("Initialization failure from server:\npsutil.ZombieProcess: PID still exists"))
    connection._initialize(head, "ray://head:10001")
    assert head.asked == 2
    assert caplog.text.count("failed to start a server for this client") == 1


def test_one_that_stays_so_is_given_up_with_what_to_do() -> None:
    head = Head(*[LATE] * 9)
    with pytest.raises(PoolError, match="CHECK_CHANNEL_TIMEOUT_S=120"):
        connection._initialize(head, "ray://head:10001")
    assert (head.asked, head.ended) == (3, 3)


def test_another_error_is_told_at_once() -> None:
    head = Head(ConnectionError("ray client connection timeout"))
    with pytest.raises(PoolError, match="no Ray cluster can be reached") as caught:
        connection._initialize(head, "ray://head:10001")
    assert "ray start --head" in str(caught.value)
    assert "ray client connection timeout" in str(caught.value)
    assert head.asked == 1
