"""A part of PyTorch's own operator, module and optimizer databases, on a virtual device against the CPU.

``benchmarks/coverage.py`` goes through all of them.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from onebox.errors import WorkerDied

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from coverage_judge import Trial, judge
from coverage_shards import Case, Runner, Tally, names_of, run_cases

CPU = torch.device("cpu")
SEED = 4
TRIALS = 4
OPERATORS, MODULES = 150, 30
PARTS = 3
"""The long tier has one of these, make soak the others."""

REFUSED = {
    "linalg_ldl_solve": "is not on the workers' list of operators",
    "sparse_mm_reduce": "compressed sparse rows",
    "sparse_sampled_addmm": "compressed sparse rows",
}
"""Names of what a virtual device refuses, with the reason."""

ALSO_REFUSED_BY_THE_CPU = "Jiterator is only supported on CUDA"
"""The one error of the CPU: anything else would be due to the device beside it."""


@pytest.fixture(autouse=True, scope="module")
def own_profile() -> Iterator[None]:
    """Undo that PyTorch's databases load a profile of hypothesis as they are imported, one of their own where CI=1."""
    profile = settings.get_current_profile_name()
    yield
    settings.load_profile(profile)


@pytest.mark.feature("Virtual devices: Run PyTorch's operators as on the CPU")
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(0, marks=pytest.mark.long),
        *(pytest.param(other, marks=pytest.mark.soak) for other in range(1, PARTS)),
    ],
)
def test_a_part_of_the_databases_gives_what_the_cpu_gives(part: int) -> None:
    choose = random.Random(SEED)
    cases = [
        Case(kind="opinfo", name=name, dtype=dtype, seed=SEED, limit=TRIALS, repeat=2)
        for name in choose.sample(names_of("opinfo"), OPERATORS)
        for dtype in ("float32", "float64", "int64", "bool")
    ]
    cases += [
        Case(kind="moduleinfo", name=name, dtype="float64", seed=SEED, limit=TRIALS)
        for name in choose.sample(names_of("moduleinfo"), MODULES)
    ]
    cases += [
        Case(kind="optimizerinfo", name=name, dtype="float64", seed=SEED, limit=TRIALS)
        for name in names_of("optimizerinfo")
    ]
    tallies = run_cases(cases[part::PARTS], "cpu", 1)
    assert not _told(tallies, "wrong")
    assert not _told(tallies, "crashed")
    assert not _told(tallies, "failed")
    assert not [line for line in _told(tallies, "unsupported") if line.split()[1] not in REFUSED]
    assert not [line for line in _told(tallies, "skipped") if ALSO_REFUSED_BY_THE_CPU not in line]
    assert sum(tally.count("passed") for tally in tallies) > 2 * OPERATORS / PARTS


def _told(tallies: list[Tally], *outcomes: str) -> list[str]:
    return [
        f"{tally.case.kind} {tally.case.name} {tally.case.dtype} {name}: {message}"
        for tally in tallies
        for name, outcome, message in tally.outcomes
        if outcome in outcomes
    ]


def test_a_case_whose_process_dies_counts_as_crashed_and_ends() -> None:
    runner = Runner("none")
    try:
        assert runner.run(_case("add")).count("passed") == 3
        process: Any = runner._process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        tally = runner.run(_case("add"))
        assert (tally.count("crashed"), tally.count("passed")) == (1, 2)
        assert "status -9" in tally.message()
    finally:
        runner.close()


def test_other_numbers_are_wrong_and_errors_are_told_apart() -> None:
    assert judge(_trial(lambda device: torch.ones(2)), CPU).outcome == "passed"
    assert judge(_trial(_drifting()), CPU).outcome == "wrong"
    assert judge(_trial(_drifting(torch.int32)), CPU) == ("wrong", "output: dtype torch.int32, not torch.int64")
    assert judge(_trial(_failing(1, RuntimeError("no"))), CPU) == ("skipped", "RuntimeError: no")
    assert judge(_trial(_failing(2, RuntimeError("no"))), CPU) == ("failed", "RuntimeError: no")
    assert judge(_trial(_failing(2, RuntimeError("is not supported"))), CPU).outcome == "unsupported"
    assert judge(_trial(_failing(2, WorkerDied("gone"))), CPU).outcome == "crashed"


def _trial(run: Callable[[torch.device], Any]) -> Trial:
    return Trial(name="", run=lambda device: {"output": run(device)}, seed=0)


def _drifting(dtype: torch.dtype = torch.int64) -> Callable[[torch.device], Any]:
    calls = iter((torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=dtype) + 1))
    return lambda device: next(calls)


def _failing(call: int, error: Exception) -> Callable[[torch.device], Any]:
    count = itertools.count(1)

    def run(device: torch.device) -> Any:
        if next(count) == call:
            raise error
        return torch.ones(2)

    return run


def _case(name: str) -> Case:
    return Case(kind="opinfo", name=name, dtype="float32", seed=SEED, limit=3)
