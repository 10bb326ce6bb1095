"""Stages that are recomputed: their backward makes the values of their forward again, the same to the last bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from onebox.graph import ModelPrograms, PhaseKind, Port, TracedModel
from tests.kit.captures import capture
from tests.kit.models import CASES
from tests.unit.graph.staged import SIZE, Ran, Traced, assert_alike, check_division, order_of, run, trace, traced_case
from tests.unit.graph.staged import whole as one_stage
from tests.unit.graph.test_programs import Turning, Views

SPANS = 4
"""So many stages a model is cut into."""


def cut(names: Sequence[str], count: int = SPANS) -> list[list[str]]:
    """Cut segments into stages of about equal numbers, no more than there are segments."""
    count = min(count, len(names))
    bounds = [len(names) * place // count for place in range(count + 1)]
    return [list(names[a:b]) for a, b in itertools.pairwise(bounds)]


@functools.cache
def expected_of(name: str) -> Ran:
    """Return what one stage makes of a case."""
    return one_stage(traced_case(name))


def saved_bytes(model: ModelPrograms, stage: int) -> int:
    """Return the bytes that forward of a stage gives out for the backward of the same stage alone."""
    specs = model.of(stage, "F").specs()
    own = {port for port in model.of(stage, "B").inputs if port.kind == "value"}
    others = {port for phase, part in model.phases.items() if phase.stage != stage for port in part.inputs}
    return sum(spec.size_bytes for port, spec in specs.items() if port in own - others)


def both_ways(traced: Traced, model: ModelPrograms) -> tuple[Ran, Ran]:
    """Run stages with backward whole, and in halves."""
    whole, halves = (run(model, traced.given, order_of(model, halves=halves)) for halves in (False, True))
    return whole, halves


def require_same_bits(traced: Traced, model: ModelPrograms, expected: tuple[Ran, Ran]) -> None:
    """Require that stages make the very bits that others made."""
    for found, other in zip(both_ways(traced, model), expected, strict=True):
        assert found.made.keys() == other.made.keys()
        for port, tensor in other.made.items():
            assert torch.equal(found.made[port], tensor), port


@pytest.mark.parametrize("name", CASES)
def test_each_span_in_turn_and_all_of_them(name: str) -> None:
    """The result is that of one stage; forward keeps nothing for its own backward but buffers that it changes."""
    traced, stages = traced_case(name), cut(traced_case(name).model.segments)
    kept = traced.model.divide(stages)
    expected = both_ways(traced, kept)
    assert_alike(expected[1], expected_of(name))
    count = len(stages)
    some = 0
    for chosen in (*({stage} for stage in range(count)), set(range(count))):
        policies = ["recompute" if stage in chosen else "keep" for stage in range(count)]
        model = traced.model.divide(stages, policies=policies)
        require_same_bits(traced, model, expected)
        for stage in range(count):
            if stage not in chosen:
                continue
            ports = {port.name for port in model.of(stage, "F").outputs if port.kind == "update"}
            changed = sum(traced.given[Port("buffer", name)].nbytes for name in ports)
            before, after = saved_bytes(kept, stage), saved_bytes(model, stage)
            assert after <= min(before, changed) if before > changed else after <= changed
            some += before - after
    assert some > 0, "something is no longer kept"


@pytest.mark.parametrize("name", CASES)
def test_any_assignment_with_any_policies(name: str) -> None:
    traced = traced_case(name)
    segments = traced.model.segments
    edges = traced.edges()

    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        stage_of: list[int] = []
        for number in range(len(segments)):
            least = max((stage_of[source] for source, target in edges if target == number), default=0)
            stage_of.append(data.draw(st.integers(least, 3)))
        used = sorted(set(stage_of))
        stages = [[segments[n] for n, stage in enumerate(stage_of) if stage == each] for each in used]
        policies = [data.draw(st.sampled_from(["keep", "recompute", "offload"])) for _ in stages]
        check_division(traced, stages, expected_of(name), policies)

    check()


def handed_out(model: ModelPrograms) -> dict[Port, int]:
    """Return the bytes of each value that some forward gives out."""
    parts = [part for phase, part in model.phases.items() if phase.kind == "F"]
    return {port: spec.size_bytes for part in parts for port, spec in part.specs().items() if port.kind == "value"}


def operators_back(model: ModelPrograms) -> int:
    """Return how many operators backward has."""
    return sum(len(part.program.operators) for phase, part in model.phases.items() if phase.kind == "B")


@pytest.mark.parametrize("name", ["cnn", "unet", "gpt2", "tied", "inception", "dropping"])
def test_what_is_there_still_is_not_made_again(name: str) -> None:
    """Of stages that go back one right after the other on the same devices; nothing more is kept for it."""
    traced, stages = traced_case(name), [[each] for each in traced_case(name).model.segments]
    policies = ["recompute"] * len(stages)
    apart = traced.model.divide(stages, policies=policies)
    together = traced.model.divide(stages, policies=policies, blocks=[0] * len(stages))
    halfway = [int(stage > len(stages) // 2) for stage in range(len(stages))]
    expected = both_ways(traced, apart)
    for model in (together, traced.model.divide(stages, policies=policies, blocks=halfway)):
        require_same_bits(traced, model, expected)
    assert handed_out(together) == handed_out(apart)
    copies = sum(o.name == "aten.permute.default" for p in together.phases.values() for o in p.program.operators)
    assert operators_back(together) <= operators_back(apart) + copies


def test_a_layer_whose_output_is_there_is_not_computed_again() -> None:
    """Of two layers, the second: its gradient needs its input, and that of what is behind it its output."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    batch = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    traced = trace(model, functional.mse_loss, batch)
    first, second, third = traced.model.segments

    def layers(kind: PhaseKind, blocks: Sequence[int]) -> int:
        made = traced.model.divide([[first, second], [third]], policies=["recompute", "keep"], blocks=blocks)
        return sum(o.name == "aten.addmm.default" for o in made.of(0, kind).program.operators)

    assert (layers("B", [0, 1]), layers("B", [0, 0])) == (2, 1)
    assert (layers("I", [0, 1]), layers("I", [0, 0])) == (2, 1), "W of what is behind, which needs it, is still to come"


@pytest.mark.parametrize("name", CASES)
def test_all_of_backward_is_the_first_half(name: str) -> None:
    traced, stages = traced_case(name), cut(traced_case(name).model.segments)
    model = traced.model.divide(stages, policies=["recompute"] * len(stages))
    for stage in range(len(stages)):
        assert not model.of(stage, "W").program.operators
        assert not model.of(stage, "W").outputs
        gradients = [{p for p in model.of(stage, kind).outputs if p.kind == "gradient"} for kind in ("I", "B")]  # type: ignore[arg-type]
        assert gradients[0] == gradients[1]


def test_random_operators_draw_again_what_they_drew() -> None:
    """They keep their place in the whole model, which they are seeded with."""
    traced = traced_case("dropping")
    stages = cut(traced.model.segments, 3)
    model = traced.model.divide(stages, policies=["recompute"] * 3)

    def positions(stage: int, kind: str) -> list[int]:
        return [o.position for o in model.of(stage, kind).program.operators if o.position >= 0]  # type: ignore[arg-type]

    for stage in range(3):
        assert set(positions(stage, "B")) <= set(positions(stage, "F"))
    assert any(positions(stage, "B") for stage in range(3))


class Counting(nn.Module):
    """A buffer that forward reads, changes, and reads again, and whose value the gradient depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.a(x) * self.seen.clone()).tanh()
        self.seen = self.seen * 0.5 + y.detach().mean(0)
        z = (self.norm(self.b(y)) / self.seen.clone()).sigmoid()
        return self.c(z)


def test_values_are_made_from_buffers_as_they_were() -> None:
    """Backward comes when forward has changed them, in a pipeline for later micro-batches, too."""
    torch.manual_seed(0)
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    traced = trace(Counting().double(), functional.mse_loss, batch)
    expected = one_stage(traced)
    for stages in ([["model.a"], ["model.b", "model.c"]], [["model.a", "model.b"], ["model.c"]]):
        for policies in itertools.product(["keep", "recompute"], repeat=2):
            check_division(traced, stages, expected, policies)
            model = traced.model.divide(stages, policies=policies)
            for stage in range(2):
                assert not {port for port in model.of(stage, "B").inputs if port.kind == "buffer"}
                assert not {port for port in model.of(stage, "B").outputs if port.kind == "update"}


@pytest.mark.parametrize("channels_last", [False, True])
def test_layouts(channels_last: bool) -> None:
    torch.manual_seed(0)
    model = Turning().double()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    traced = trace(model, functional.mse_loss, batch)
    stages = [[name] for name in traced.model.segments]
    for policies in itertools.product(["keep", "recompute"], repeat=len(stages)):
        check_division(traced, stages, one_stage(traced), policies)


def test_views_of_values_of_other_stages() -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    traced = trace(Views().double(), functional.mse_loss, batch)
    stages = [["model.a"], ["model.b"], ["model.c"]]
    expected = both_ways(traced, traced.model.divide(stages))
    for policies in itertools.product(["keep", "recompute"], repeat=3):
        require_same_bits(traced, traced.model.divide(stages, policies=policies), expected)


def test_an_evaluation_has_nothing_to_recompute() -> None:
    case = CASES["cnn"]
    captured = capture(case.model(), case.loss, case.batches([SIZE])[0], mode="evaluate")
    traced = TracedModel(captured, backward=False)
    stages = cut(traced.segments)
    assert traced.divide(stages, policies=["recompute"] * len(stages)).phases == traced.divide(stages).phases
