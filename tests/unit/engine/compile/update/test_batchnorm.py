"""Statistics: replicas that take micro-batches in turn end with the buffers of one process, whatever the gaps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onebox.engine.compile.batch_job import BufferNumbers
from onebox.engine.compile.update.batchnorm import BatchNormStatistics
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.partition.sharding_spec import find_sharding_spec
from onebox.errors import CaptureError
from onebox.graph import TracedModel
from onebox.plan import Plan, deal
from onebox.wire.protocol.instructions import Call
from tests.kit.captures import capture
from tests.unit.engine.nets import Lowered, batch, build, lower, plan, stage, state_of
from tests.unit.engine.player import play, steps_of


def updated(parts: int) -> dict[str, Tensor]:
    """Return the state after so many micro-batches of two samples, as one process has it."""
    model = build()
    x_BD, _ = batch(2 * parts)
    with torch.no_grad():
        for start in range(0, 2 * parts, 2):
            model(x_BD[start : start + 2])
    return state_of(model)


def check(lowered: Lowered, parts: int) -> None:
    """Require the buffers of one process on every holder."""
    played, expected = play(lowered, batch(2 * parts)), updated(parts)
    assert set(lowered.model.updates) == {
        "model.mean", "model.calls", "model.norm.running_mean", "model.norm.running_var",
        "model.norm.num_batches_tracked",
    }  # fmt: skip
    for worker, state in played.state.items():
        for name in lowered.model.updates:
            assert (name in state) == (worker in lowered.holdings.holders[name])
            if name in state:
                torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-14, msg=name)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=2, max_size=4).filter(any),
    st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=1, max_size=3).filter(any),
    st.integers(1, 9),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_interleaved_micro_batches(first: list[float], second: list[float], parts: int) -> None:
    """A replica sees gaps before, between and behind its own micro-batches; some have none at all."""
    devices = range(len(first)), range(len(first) + len(second))[-len(second) :]
    made = plan(stage("ab", *devices[0], shares=first), stage("cd", *devices[1], shares=second))
    check(lower(made, 2 * parts), parts)


@given(st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=2, max_size=3).filter(any), st.integers(1, 6))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_replicas_of_the_whole_model(shares: list[float], parts: int) -> None:
    check(lower(Plan.data_parallel(range(len(shares)), shares, micro_batch=2), 2 * parts), parts)


def test_two_replicated_stages_on_the_same_devices() -> None:
    for order in ((0, 1), (1, 0)):
        check(lower(plan(stage("ab", 0, 1), stage("cd", *order, shares=(1.0, 3.0))), 10), 5)


def test_decays_are_over_the_gaps() -> None:
    """Micro-batches 0, 2, 3 and 5 of six go to one replica, 1 and 4 to the other."""
    assert deal(6, [2.0, 1.0]) == [0, 1, 0, 0, 1, 0]
    lowered = lower(plan(stage("ab", 0, 1, shares=(2.0, 1.0)), stage("cd", 2)), 12)
    for worker, gaps in ((0, 2), (1, 2)):  # 0: before 2 and before 5; 1: before 4 and behind it
        labels = lowered.routines[worker].labels
        decays = [
            step
            for step, label in zip(steps_of(lowered, worker), labels, strict=True)
            if isinstance(step, Call) and label.name == "statistics"
        ]
        assert len(decays) == gaps + 1, "one more puts all together"


def test_a_stage_without_replicas_updates_in_place() -> None:
    lowered = lower(plan(stage("ab", 0), stage("cd", 1)), 8)
    for worker in (0, 1):
        assert not any(label.name in ("statistics", "zero", "count") for label in lowered.routines[worker].labels)


def test_a_counter_counts_the_micro_batches_of_the_others_too() -> None:
    lowered = lower(plan(stage("ab", 0), stage("cd", 1, 2)), 10)
    counts = [[label.name for label in lowered.routines[worker].labels].count("count") for worker in (0, 1, 2)]
    assert counts == [0, 2, 3]


class Greatest(nn.Module):
    """A buffer whose change depends on the order of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("most", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.most.copy_(torch.maximum(self.most, y.detach().amax(0)))
        return self.b(y)


@pytest.mark.parametrize(("first", "second", "refused"), [((0, 1), (2,), True), ((0,), (1, 2), False)])
def test_only_a_replicated_stage_refuses_what_replicas_cannot_share(first: Any, second: Any, refused: bool) -> None:
    example = torch.zeros(2, 5), torch.zeros(2, 3)
    traced = TracedModel(capture(Greatest(), nn.functional.mse_loss, example), backward=True)
    made = plan(stage("a", *first), stage("b", *second))
    model = traced.divide([each.segments for each in made.stages])
    numbers = BufferNumbers(state={}, optimizer=0, groups={}, new=itertools.count().__next__)
    if refused:
        with pytest.raises(CaptureError, match=r"buffer model\.most changes .* train this model on one device"):
            BatchNormStatistics(find_sharding_spec(made, PhasePrograms(model, made, halves=())), numbers, model, {})
    else:
        BatchNormStatistics(find_sharding_spec(made, PhasePrograms(model, made, halves=())), numbers, model, {})
