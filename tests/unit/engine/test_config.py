"""What a trainer makes of its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from onebox.engine.config import recovery_enabled, steps_in_flight
from onebox.errors import UsageError
from onebox.pool import Pool


def pool(*hosts: str, kind: str = "cpu") -> Pool:
    return cast(Pool, SimpleNamespace(devices=[SimpleNamespace(host=host, kind=kind) for host in hosts]))


@pytest.mark.parametrize(
    ("hosts", "recover", "every", "expected"),
    [
        (("localhost", "localhost"), None, None, False),
        (("localhost", "localhost"), None, 5, True),
        (("localhost", "localhost"), True, None, True),
        (("localhost", "lab1"), None, None, True),
        (("lab1",), None, None, True),
        (("lab1", "lab2"), False, None, False),
    ],
)
def test_runs_recover_where_other_machines_have_a_part_or_where_they_are_asked_to(
    hosts: tuple[str, ...], recover: bool | None, every: int | None, expected: bool
) -> None:
    assert recovery_enabled(pool(*hosts), recover, every) is expected


def test_devices_that_compute_nothing_have_nothing_to_recover() -> None:
    assert not recovery_enabled(pool("lab1", kind="sim"), None, None)
    for options in ((True, None), (None, 5)):
        with pytest.raises(UsageError, match="sim devices"):
            recovery_enabled(pool("localhost", kind="sim"), *options)


@pytest.mark.parametrize("options", [(False, 3), (True, 0), (None, 0)])
def test_snapshots_that_cannot_be_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="snapshot_every"):
        recovery_enabled(pool("lab1"), *options)


@pytest.mark.parametrize(
    ("round_trip_s", "steps"), [(0.0, 2), (0.0005, 2), (0.009, 2), (0.031, 5), (0.06, 8), (9.0, 8)]
)
def test_more_steps_are_under_way_where_workers_are_far(round_trip_s: float, steps: int) -> None:
    assert steps_in_flight(round_trip_s) == steps
