"""Options of a trainer: their defaults, and what is refused at construction."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, get_args

import pytest

from onebox.engine.config import numeric_instructions, resolved_numerics
from onebox.errors import UsageError
from onebox.trainer_options import Correction, DataParallel, Engine, Numerics, Outer, Recovery, Staging, StaleGradients
from onebox.wire.protocol.instructions import Delay
from onebox.wire.protocol.requests import SetNumerics


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (DataParallel, {"micro_batch": 0}, "micro_batch=0: allowed are 1 and more"),
        (DataParallel, {"micro_batch": 2.0}, r"micro_batch=2\.0: allowed are 1 and more"),
        (DataParallel, {"sync": "somewhere"}, "sync='somewhere': allowed are 'workers', 'client'"),
        (DataParallel, {"update": "hosts"}, "update='hosts': allowed are 'device', 'host'"),
        (DataParallel, {"shard_optimizer": "yes"}, "shard_optimizer='yes': allowed are True and False"),
        (DataParallel, {"shard_optimizer": True, "sync": "client"}, "shard_optimizer=True needs sync='workers'"),
        (DataParallel, {"shares": "best"}, "shares='best': allowed are auto, equal, measured"),
        (DataParallel, {"shares": (0.0, 0.0)}, "not all 0"),
        (DataParallel, {"shares": (-1.0, 2.0)}, "from 0 up"),
        (DataParallel, {"shares": (float("nan"), 2.0)}, "from 0 up"),
        (DataParallel, {"shares": 3}, "shares=3"),
        (StaleGradients, {"correction": "some"}, "correction='some': allowed are 'auto', 'none'"),
        (StaleGradients, {"warm_up": -1}, "warm_up=-1: allowed are 0 and more"),
        (Recovery, {"snapshot_every": 0}, "snapshot_every=0: allowed are 1 and more"),
        (Staging, {"ahead": -1}, "ahead=-1: allowed are sizes"),
        (Staging, {"cache": "a lot"}, "cache a lot: allowed are bytes"),
        (Staging, {"cache": 1.5}, r"cache=1\.5: allowed are sizes"),
        (Outer, {"every": 0}, "every=0: allowed are 1 and more"),
        (Outer, {"every": None}, "every=None: allowed are 1 and more"),
        (Outer, {"lr": 0.0}, r"lr=0\.0: allowed are numbers above 0"),
        (Outer, {"lr": "fast"}, "lr='fast': allowed are numbers above 0"),
        (Outer, {"momentum": 1.0}, r"momentum=1\.0: allowed are 0 up to, but not, 1"),
        (Outer, {"fragments": 0}, "fragments=0: allowed are 1 and more"),
        (Outer, {"every": 2, "fragments": 3}, "fragments=3 and every=2: each fragment is synchronised once"),
        (Outer, {"overlap": -1}, "overlap=-1: allowed are 0 and more"),
        (Outer, {"every": 4, "overlap": 4}, "overlap=4 and every=4: an outer step is applied before the next one"),
        (
            Outer,
            {"compression": "int4"},
            "compression='int4': allowed are 'none', 'bf16', 'int8', 'e3m0'",
        ),
        (Outer, {"compression": "powersgd"}, "compression='powersgd': allowed are"),
        (Outer, {"state": "disk"}, "state='disk': allowed are 'device', 'host'"),
        (Outer, {"keep": 1.0}, r"keep=1\.0: allowed are 0 up to, but not, 1"),
        (Outer, {"shares": (0.0, 0.0)}, "one weight for each island"),
        (Engine, {"in_flight": 0}, "in_flight=0: allowed are 1 and more"),
        (Engine, {"check_every": -1}, "check_every=-1: allowed are 0 and more"),
        (Engine, {"check_every": None}, "check_every=None"),
        (Engine, {"trace": 1}, "trace=1: allowed are True and False"),
        (Engine, {"numerics": "high"}, "numerics='high': allowed are onebox.Numerics"),
        (Numerics, {"matmul": "tf32"}, "matmul='tf32': allowed are 'highest', 'high', 'medium'"),
        (Numerics, {"deterministic": "yes"}, "deterministic='yes': allowed are True, False and 'warn'"),
        (Numerics, {"cuda_graphs": 1}, "cuda_graphs=1: allowed are True and False"),
        (Numerics, {"cudnn_benchmark": 1}, "cudnn_benchmark=1: allowed are True and False"),
        (Engine, {"costs": {"a": (1.0, 2.0)}}, "costs of segment 'a'"),
        (Engine, {"costs": {"a": (1.0, 2.0, -3.0)}}, "costs of segment 'a'"),
    ],
)
def test_what_is_refused(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind(**wrong)


def test_groups_are_values() -> None:
    assert DataParallel(shares=[3, 1]) == DataParallel(shares=(3.0, 1.0))
    assert hash(DataParallel(shares=[3, 1])) == hash(DataParallel(shares=(3.0, 1.0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Engine().trace = False  # type: ignore[misc]


@pytest.mark.parametrize(("given", "size"), [(None, 0), (0, 0), ("0", 0), (10, 10), ("1KiB", 1024)])
def test_sizes_may_have_units(given: Any, size: int) -> None:
    assert Staging(cache=given).cache_bytes == size
    assert given is None or Staging(ahead=given).ahead_bytes == size


def test_corrections_are_those_of_the_workers() -> None:
    assert get_args(Correction) == ("auto", *get_args(Delay))


def test_they_are_imported_without_torch() -> None:
    code = "import sys, onebox.trainer_options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_captured_programs_are_switched_off_with_a_run() -> None:
    assert numeric_instructions(Numerics()) == ()
    assert numeric_instructions(Numerics(cuda_graphs=False)) == (SetNumerics(cuda_graphs=False),)
    assert resolved_numerics(Numerics(cuda_graphs=False)).cuda_graphs is False
