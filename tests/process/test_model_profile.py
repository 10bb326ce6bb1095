"""Profiles of models: which segments are trained, and what the others get."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.cost.model_profile import ModelProfile
from onebox.engine.planning import make_plan as planning
from onebox.engine.planning import profile as planning_profile
from onebox.engine.planning import resolve_plan, size_runs
from onebox.engine.planning.partial_profile import PROFILING_S, TimeLimit
from onebox.engine.planning.piecewise_step import PiecewiseStep
from onebox.engine.planning.profile import profile_model
from onebox.engine.session import TrainingSession
from onebox.errors import UsageError
from onebox.plan import Action
from tests.kit.pools import untouched

WIDTH, WIDE, BLOCKS, BATCH = 16, 1024, 9, 8


class Blocks(nn.Module):
    """Equal residual blocks that read a common value, in whose gradient all of them take part."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.begin, self.context, self.end = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        h, context = self.begin(x), self.context(x)
        for block in self.blocks:
            h = h + functional.gelu(functional.dropout(block(h * context), 0.1))
        return self.end(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_equal_blocks_are_measured_once(norm: type[nn.Module]) -> None:
    model, batch = Blocks(norm), (torch.ones(BATCH, 4), torch.zeros(BATCH, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with onebox.open("cpu*2", threads=1) as pool:
        profile, _ = profile_model(
            model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=(2, BATCH), cache=False
        )
    names = [segment.name for segment in profile.bytes.segments]
    assert [times.size for times in profile.times["cpu"]] == [2, BATCH]
    for times in profile.times["cpu"]:
        assert len(times.seconds) == len(names) > BLOCKS
        assert min(map(min, times.seconds)) > 0 < times.update_s
        assert max(Counter(times.seconds).values()) == BLOCKS - 4, "those of the blocks in the middle"
        assert times.slowdown is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0.25, [1, 1, 8, 8, *[1] * 4, 8, 8, *[1] * 4, 8, 8, 8, 8, 8, 8]),
        (0.0, [*[1] * 10, *[8] * 10]),
    ],
)
def test_sizes_take_turns_in_slices_as_long_as_a_batch_if_there_is_memory_for_all(
    room: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Recording(TrainingSession):
        def step(self, batch: Any, **options: Any) -> Any:
            sizes.append(batch.size // 2)
            return super().step(batch, **options)

    monkeypatch.setattr(size_runs, "TrainingSession", Recording)
    monkeypatch.setattr(planning_profile, "_TOGETHER", room)
    monkeypatch.setattr(planning_profile, "_LONG_S", 1e3)
    monkeypatch.setattr(planning_profile, "_MOST", 10)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    batch, optimizer = (torch.ones(BATCH, 4), torch.zeros(BATCH, 2)), torch.optim.SGD(model.parameters())
    with onebox.open("cpu", threads=1) as pool:
        found, _ = profile_model(model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=[1, 8], cache=False)
    assert sizes == expected
    small, large = found.times["cpu"]
    assert small.slowdown is None and large.slowdown is None, "six slices are too few for quantiles"
    assert (small.size, large.size) == (1, 8)


@pytest.mark.parametrize(("enough_s", "steps"), [(0.0, 2), (1e3, 10)])
def test_long_steps_are_measured_once_and_short_ones_until_it_is_enough(
    enough_s: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[int] = Counter()

    class Counting(TrainingSession):
        def step(self, *arguments: Any, **options: Any) -> Any:
            counted[id(self)] += 1
            return super().step(*arguments, **options)

    monkeypatch.setattr(size_runs, "TrainingSession", Counting)
    monkeypatch.setattr(planning_profile, "_LONG_S", enough_s)
    monkeypatch.setattr(planning_profile, "_MOST", 10)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    batch, optimizer = (torch.ones(BATCH, 4), torch.zeros(BATCH, 2)), torch.optim.SGD(model.parameters())
    with onebox.open("cpu", threads=1) as pool:
        found, _ = profile_model(model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=[BATCH], cache=False)
    assert list(counted.values()) == [steps]
    (times,) = found.times["cpu"]
    assert min(map(min, times.seconds)) > 0 < times.update_s


class WideProducts(nn.Module):
    """Products with a large matrix, by which few samples take long."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        h = x.repeat(64, WIDE // WIDTH)
        for _ in range(4):
            h = h @ self.weight
        return h[: len(x), :WIDTH]


class Slow(nn.Module):
    """A layer between two small ones that takes very much longer than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.slow, self.end = nn.Linear(4, WIDTH), WideProducts(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.slow(functional.relu(self.begin(x))))  # type: ignore[no-any-return]


class Recorded(PiecewiseStep):
    """A step in pieces that keeps what was executed; the time that actions took is the clock of limits."""

    actions: list[tuple[int, Action]]
    spent_s: float
    pieces: int

    def end_piece(self, reply: Any) -> None:
        super().end_piece(reply)
        newest = [event for event in self.events() if event.action is not None][-1]
        assert newest.action is not None
        if (self._device, newest.action) not in Recorded.actions:
            Recorded.actions.append((self._device, newest.action))
            Recorded.spent_s += (newest.end_ns - newest.start_ns) / 1e9
        Recorded.pieces += 1


def cut_profile(
    model: nn.Module, pool: onebox.Pool, limit: float, clock: Any, patch: pytest.MonkeyPatch, **options: Any
) -> ModelProfile:
    """Return the profile of a model for a limit of a clock of its own, measured in pieces."""
    Recorded.actions, Recorded.spent_s, Recorded.pieces = [], 0.0, 0
    patch.setattr(planning_profile, "PiecewiseStep", Recorded)
    patch.setattr(planning_profile, "TimeLimit", lambda seconds: TimeLimit(seconds, clock))
    patch.setattr(planning_profile, "_UPLOAD_BPS", math.inf)
    batch = torch.ones(BATCH, 4), torch.zeros(BATCH, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    found, _ = profile_model(
        model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=[BATCH], within_s=limit, **options
    )
    return found


def test_a_slow_layer_ends_a_measurement_with_a_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with onebox.open("cpu", threads=1) as pool:
        whole = cut_profile(Slow(), pool, math.inf, lambda: 0.0, monkeypatch, cache=False)
        (times,) = whole.times["cpu"]
        slow_s = max(times.seconds[number][0] for number in range(len(times.seconds)))
        (slow,) = (number for number, each in enumerate(times.seconds) if each[0] == slow_s)
        found = cut_profile(Slow(), pool, slow_s / 2, lambda: Recorded.spent_s, monkeypatch, cache=False)
        assert untouched(pool)
    assert [action.kind for _, action in Recorded.actions] == ["F"] * (slow + 1)
    assert [action.stage for _, action in Recorded.actions] == list(range(slow + 1)), "nothing after the slow layer"
    (cut,) = found.times["cpu"]
    assert cut.seconds[slow][0] == pytest.approx(Recorded.spent_s, rel=0.5), "nearly all of the time"
    assert slow_s / 20 < min(cut.seconds[slow][1:]), "its gradients are as slow, as estimated"
    assert 0 < cut.measured < 1
    assert cut.update_s > 0 < cut.call_s


@pytest.mark.parametrize("pieces", [0, 1, 4, 5, 10, 1000])
def test_a_profile_that_is_cut_short_after_some_pieces_is_complete(
    pieces: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, options = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)), {"fresh": pieces > 10}
    with onebox.open("cpu*2", threads=1) as pool, caplog.at_level(logging.INFO, "onebox"):
        for _ in range(2):
            found = cut_profile(model, pool, 2 * pieces, lambda: float(Recorded.pieces), monkeypatch, **options)
            (times,) = found.times["cpu"]
            assert Recorded.pieces == 2 * min(pieces, 11), "again each time, as what was cut short is not stored"
            assert all(0 < seconds < math.inf for each in times.seconds for seconds in each)
            assert 0 < times.update_s < math.inf and 0 <= times.call_s < math.inf
            assert (times.measured == 0) == (pieces == 0)
            assert (times.measured == 1) == (pieces >= 5), "the actions of one micro-batch of two"
        assert untouched(pool)
    assert ("estimated" in caplog.text) == (pieces < 5)


def test_a_plan_of_a_run_is_measured_within_a_limit_and_others_without(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def profile(*arguments: Any, **options: Any) -> Any:
        limits.append(options["within_s"])
        return profile_model(*arguments, **options)

    monkeypatch.setattr(planning, "profile_model", profile)
    monkeypatch.setattr(resolve_plan, "_BUDGET_S", 0.2)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    job = model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(BATCH, 4), torch.zeros(BATCH, 2)
    with onebox.open("cpu*2", threads=1) as pool:
        with onebox.Trainer(*job, pool=pool, plan="auto") as trainer:
            assert trainer.step(*batch).item() > 0
        onebox.make_plan(*job, *batch, pool=pool, budget_s=0.2)
    assert limits == [PROFILING_S, math.inf]


@pytest.mark.parametrize("given", [{"profiling_s": -1.0}, {"profiling_s": math.nan}, {"budget_s": -0.5}])
def test_a_time_limit_is_not_negative(given: dict[str, float]) -> None:
    ((name, limit_s),) = given.items()
    model = nn.Linear(4, 2)
    job = model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        onebox.open("sim*2") as pool,
        pytest.raises(UsageError, match=f"{name} is {limit_s}; allowed are seconds from 0 up"),
    ):
        onebox.make_plan(*job, torch.ones(BATCH, 4), torch.zeros(BATCH, 2), pool=pool, **given)  # type: ignore[arg-type]
