"""Plans on the command line: what does not fit, and the command that runs one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cli.commands.plan import command_line
from onebox.cli.options.jobs import PlanConfig, TrainConfig
from onebox.cli.options.run_config import to_stored
from onebox.cli.parser import parse
from onebox.cli.planning import PlanForecast, plan_of_run, write_plan
from onebox.errors import UsageError
from onebox.feed import load_dataset
from onebox.plan import Plan
from onebox.report import RunFolder
from tests.unit.report.steps import foreseen, plan, problem


@pytest.mark.parametrize(("missing", "text"), [(0, ""), (1, "device 1 lacks 1 bytes"), (-1, "")])
def test_a_plan_lacks_what_its_prediction_has_too_much(missing: int, text: str) -> None:
    expected, simulation = foreseen(plan())
    assert expected.predicted is not None
    first, second, third = expected.predicted.peak_bytes
    capacity = second - missing
    assert capacity > max(first, third)
    found = PlanForecast(plan=expected, simulation=simulation, problem=problem(3, capacity))
    assert found.shortfall == text
    assert found.peak_bytes == dict(enumerate(expected.predicted.peak_bytes))


def test_devices_without_limit_lack_nothing() -> None:
    expected, simulation = foreseen(plan())
    assert PlanForecast(plan=expected, simulation=simulation, problem=problem(3, None)).shortfall == ""


NAMES = st.sampled_from(["mlp", "gpt"])


@given(NAMES, st.integers(1, 99), st.sampled_from(["cpu*2", "sim*2,sim@0.5", "auto"]), st.sampled_from([None, "1GiB"]))
def test_the_command_that_is_shown_trains_the_plan(model: Any, batch: int, pool: str, memory: str | None) -> None:
    config = PlanConfig(model=model, batch=batch, pool=pool, memory=memory, budget=1.0)
    words = shlex.split(command_line(config, {"--plan": Path("my plan.json")}))
    assert words[0] == "onebox"
    expected = TrainConfig(model=model, batch=batch, pool=pool, memory=memory, plan="my plan.json")
    assert parse(words[1:]) == expected


def test_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--out .* cannot be written: No such file"):
        write_plan(tmp_path / "nowhere" / "plan.json", plan())


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    """A new run has the plan of the file; one that is resumed its own, unless it is given another."""
    data = load_dataset("digits")
    folder = RunFolder.create("mlp", path=tmp_path / "run")
    given_file, other_file, odd_file = (tmp_path / f"{n}.json" for n in range(3))
    mine = plan()
    write_plan(given_file, mine)
    write_plan(other_file, msgspec.structs.replace(mine, schedule="gpipe"))
    write_plan(odd_file, msgspec.structs.replace(mine, micro_batch=4))
    config = TrainConfig(plan=str(given_file)).resolved()
    assert plan_of_run(config, folder, data) == (mine, None)
    assert plan_of_run(TrainConfig().resolved(), folder, data) == (None, None)

    write_plan(folder.plan, mine)
    folder.write_config(to_stored(config))
    given_file.unlink()

    def resumed(file: Path) -> Plan | None:
        return plan_of_run(TrainConfig(plan=str(file), resume=folder.path).resolved(), folder, data)[0]

    assert resumed(given_file) == mine
    assert resumed(other_file) == msgspec.structs.replace(mine, schedule="gpipe")
    with pytest.raises(UsageError, match="micro-batches of 4, the run to be resumed of 2"):
        resumed(odd_file)
