"""A trainer's options that depend on its pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from onebox.engine.config import chosen_recovery, steps_in_flight
from onebox.errors import UsageError
from onebox.pool import Pool
from onebox.trainer_options import Recovery

OFTEN = Recovery(snapshot_every=5)


def pool(*hosts: str, kind: str = "cpu") -> Pool:
    return cast(Pool, SimpleNamespace(devices=[SimpleNamespace(host=host, kind=kind) for host in hosts]))


@pytest.mark.parametrize(
    ("hosts", "recovery", "expected"),
    [
        (("localhost", "localhost"), "auto", None),
        (("localhost", "localhost"), OFTEN, OFTEN),
        (("localhost", "lab1"), "auto", Recovery()),
        (("lab1",), "auto", Recovery()),
        (("lab1", "lab2"), None, None),
    ],
)
def test_runs_recover_where_other_machines_have_a_part_or_where_they_are_asked_to(
    hosts: tuple[str, ...], recovery: Any, expected: Recovery | None
) -> None:
    assert chosen_recovery(pool(*hosts), recovery) == expected


def test_devices_that_compute_nothing_have_nothing_to_recover() -> None:
    assert chosen_recovery(pool("lab1", kind="sim"), "auto") is None
    with pytest.raises(UsageError, match="sim devices"):
        chosen_recovery(pool("localhost", kind="sim"), OFTEN)


@pytest.mark.parametrize(
    ("round_trip_s", "steps"), [(0.0, 2), (0.0005, 2), (0.009, 2), (0.031, 5), (0.06, 8), (9.0, 8)]
)
def test_more_steps_are_under_way_where_workers_are_far(round_trip_s: float, steps: int) -> None:
    assert steps_in_flight(round_trip_s) == steps
