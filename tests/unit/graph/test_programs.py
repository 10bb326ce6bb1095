"""Programs of stages: whatever the stages, together they compute what one stage computes, whole and in halves."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from onebox.errors import UsageError
from onebox.graph import TRACING, ModelPrograms, Phase, Port, TracedModel
from onebox.graph.lower.phases import Division
from tests.kit.captures import capture
from tests.kit.models import CASES
from tests.kit.reference import call
from tests.unit.graph.staged import (
    SIZE,
    Ran,
    assert_alike,
    check_division,
    order_of,
    run,
    trace,
    traced_case,
    whole,
)

FEW = ("mlp", "cnn", "late", "branches", "tied", "attention")
"""Models of so few segments that all their cuts are tried."""

QUICK = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@functools.cache
def expected_of(name: str) -> Ran:
    """Return what one stage makes of a case."""
    return whole(traced_case(name))


def cuts(names: Sequence[str], most: int) -> Iterator[list[list[str]]]:
    """Return all ways to cut segments into so many stages at most, or fewer."""
    for count in range(1, most + 1):
        for ends in itertools.combinations(range(1, len(names)), count - 1):
            bounds = (0, *ends, len(names))
            yield [list(names[a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropping"])
def test_one_stage_computes_what_pytorch_computes(name: str) -> None:
    case = CASES[name]
    model = case.model()
    inputs, targets = case.batches([SIZE])[0]
    loss = case.loss(call(model, inputs), targets)
    (loss * 0.375).backward()
    made = expected_of(name).made
    assert float(made[Port("result", 0)]) == pytest.approx(float(loss.detach()), abs=1e-12)
    gradients = {Port("gradient", f"model.{n}"): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {port for port in made if port.kind == "gradient"} == set(gradients)
    for port, gradient in gradients.items():
        torch.testing.assert_close(made[port], gradient, rtol=1e-11, atol=1e-12)
    for buffer, tensor in model.named_buffers():
        if (port := Port("update", f"model.{buffer}")) in made:
            torch.testing.assert_close(made[port], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FEW)
def test_every_cut_of_a_small_model(name: str) -> None:
    traced = traced_case(name)
    for stages in cuts(traced.model.segments, 4):
        check_division(traced, stages, expected_of(name))


@pytest.mark.parametrize("name", [name for name in CASES if name not in FEW])
def test_any_cut(name: str) -> None:
    traced = traced_case(name)
    segments = traced.model.segments

    @QUICK
    @given(st.sets(st.integers(1, len(segments) - 1), min_size=1, max_size=3))
    def check(ends: set[int]) -> None:
        bounds = (0, *sorted(ends), len(segments))
        check_division(traced, [segments[a:b] for a, b in itertools.pairwise(bounds)], expected_of(name))

    check()


@functools.cache
def before(name: str) -> dict[int, set[int]]:
    """Return for each segment of a case those that it takes forward values from."""
    traced = traced_case(name)
    found: dict[int, set[int]] = {number: set() for number in range(len(traced.model.segments))}
    for source, target in traced.edges():
        assert source < target, "segments are in the order of forward"
        found[target].add(source)
    return found


@pytest.mark.parametrize("name", CASES)
def test_any_assignment_that_keeps_the_order(name: str) -> None:
    """Stages are sets of segments, not runs of them: branches may be in other stages than what is between them."""
    traced = traced_case(name)
    segments = traced.model.segments

    @QUICK
    @given(st.data())
    def check(data: st.DataObject) -> None:
        stage_of: list[int] = []
        for number in range(len(segments)):
            least = max((stage_of[source] for source in before(name)[number]), default=0)
            stage_of.append(data.draw(st.integers(least, 3)))
        used = sorted(set(stage_of))
        stages = [[segments[n] for n, stage in enumerate(stage_of) if stage == each] for each in used]
        check_division(traced, stages, expected_of(name))

    check()


def test_branches_may_be_apart() -> None:
    """The four branches of a block of the inception are in four stages, none of which needs another of them."""
    traced = traced_case("inception")
    names = traced.model.segments
    branches = [[name for name in names if name.startswith(f"model.blocks.0.{n}")] for n in range(4)]
    rest = [name for name in names if not name.startswith(("model.stem", "model.blocks.0"))]
    joined = branches[3]  # the concatenation goes with the last branch
    model = check_division(traced, [["model.stem"], *branches[:3], [*joined, *rest]], expected_of("inception"))
    makers = {port: stage for stage in range(5) for port in model.of(stage, "F").outputs}
    for stage in (1, 2, 3):
        sources = {makers[port] for port in model.of(stage, "F").inputs if port.kind == "value"}
        assert sources == {0}


# ---- what goes from phase to phase


@functools.cache
def divisions(name: str) -> tuple[ModelPrograms, ...]:
    """Return a case in two, three and four stages of about equal numbers of segments."""
    traced = traced_case(name)
    names = traced.model.segments
    found = []
    for count in range(2, min(4, len(names)) + 1):
        bounds = [len(names) * place // count for place in range(count + 1)]
        found.append(traced.model.divide([names[a:b] for a, b in itertools.pairwise(bounds)]))
    return tuple(found)


@pytest.mark.parametrize("name", CASES)
def test_values_are_made_once_and_all_are_read(name: str) -> None:
    for model in divisions(name):
        for kinds in ("FB", "FIW"):
            parts = {phase: part for phase, part in model.phases.items() if phase.kind in kinds}
            made = Counter(port for part in parts.values() for port in part.outputs if port.kind == "value")
            assert set(made.values()) <= {1}
            read = {port for part in parts.values() for port in part.inputs if port.kind == "value"}
            assert read <= set(made)
            if kinds == "FIW":
                both = {port for part in model.phases.values() for port in part.inputs if port.kind == "value"}
                assert set(made) <= both, "nothing is given out that nobody reads"


@pytest.mark.parametrize("name", CASES)
def test_values_of_forward_go_to_later_stages_and_gradients_to_earlier_ones(name: str) -> None:
    for model in divisions(name):
        made = {port: phase for phase, part in model.phases.items() for port in part.outputs if phase.kind in "FB"}
        for phase, part in model.phases.items():
            for port in part.inputs:
                if port.kind == "value" and phase.kind in "FB":
                    source = made[port]
                    if source.kind == phase.kind == "F":
                        assert source.stage < phase.stage
                    if source.kind == phase.kind == "B":
                        assert source.stage > phase.stage


@pytest.mark.parametrize("name", CASES)
def test_no_stage_waits_for_the_weight_gradients_of_another(name: str) -> None:
    """W may be put off as long as one likes: what it makes stays where it is, and is all that I leaves."""
    for model in divisions(name):
        late = {port for phase, part in model.phases.items() for port in part.outputs if phase.kind == "W"}
        for part in (part for phase, part in model.phases.items() if phase.kind != "W"):
            assert not late & {port for port in part.inputs if port.kind == "value"}
        for stage in range(model.stages):
            whole_ports = {port for port in model.of(stage, "B").outputs if port.kind == "gradient"}
            halves = [port for kind in "IW" for port in model.of(stage, kind).outputs if port.kind == "gradient"]  # type: ignore[arg-type]
            assert sorted(halves) == sorted(whole_ports)
        assert not model.of(0, "I").program.operators, "nobody waits for the gradients of the first stage's inputs"


@given(st.sampled_from(["unet", "inception", "tied", "resnet"]), st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_weight_gradients_may_come_in_any_order(name: str, data: st.DataObject) -> None:
    model = divisions(name)[-1]
    first = [phase for phase in order_of(model, halves=True) if phase.kind != "W"]
    late = [Phase(stage, "W") for stage in data.draw(st.permutations(range(model.stages)))]
    found = run(model, traced_case(name).given, [*first, *late])
    assert_alike(found, expected_of(name))


@pytest.mark.parametrize("name", ["cnn", "resnet", "unet", "mlp"])
def test_the_halves_compute_no_more_than_the_whole(name: str) -> None:
    """Convolutions are called twice, once for each half; nothing else is."""
    for model in divisions(name):
        for stage in range(1, model.stages):
            whole_names = Counter(o.name for o in model.of(stage, "B").program.operators)
            halves = Counter(o.name for kind in "IW" for o in model.of(stage, kind).program.operators)  # type: ignore[arg-type]
            cheap = {
                n for n in halves if n.split(".")[1] in ("permute", "view", "t", "expand", "transpose", "unsqueeze")
            }
            extra = {n: c for n, c in (halves - whole_names).items() if n not in cheap}
            assert not extra, "what W needs of I's work is handed on, not made again"


def test_a_tied_weight_has_a_term_in_each_stage_that_reads_it() -> None:
    traced = traced_case("gpt2")
    names = traced.model.segments
    model = traced.model.divide([names[:4], names[4:8], names[8:]])
    tied = Port("gradient", "model.transformer.wte.weight")
    assert [tied in model.of(stage, "B").outputs for stage in range(3)] == [True, False, True]
    found = run(model, traced.given, order_of(model, halves=False))
    assert found.terms[tied] == 2
    assert_alike(found, expected_of("gpt2"))
    alone = traced.model.divide([names[:4], names[4:]])
    assert run(alone, traced.given, order_of(alone, halves=False)).terms[tied] == 2


def test_a_skip_crosses_once_and_is_the_same_value_for_all_that_read_it() -> None:
    traced = traced_case("unet")
    names = traced.model.segments
    model = traced.model.divide([names[:1], names[1:3], names[3:5], names[5:]])
    skips = [port for port in model.of(0, "F").outputs if port in model.of(3, "F").inputs]
    assert len(skips) == 1
    assert skips[0] not in model.of(2, "F").inputs
    found = run(model, traced.given, order_of(model, halves=False))
    assert skips[0] in found.crossed


def test_a_stage_of_parameters_only_takes_nothing_from_the_batch() -> None:
    traced = traced_case("prompted")
    names = traced.model.segments
    assert names[:2] == ("model", "model.widen")
    model = check_division(traced, [names[:2], names[2:]], expected_of("prompted"))
    assert {port.kind for port in model.of(0, "F").inputs} == {"parameter"}
    assert [port.kind for port in model.of(0, "F").outputs if port in model.of(1, "F").inputs] == ["value"]
    apart = check_division(traced, [names[:1], names[1:2], names[2:]], expected_of("prompted"))
    assert {port.kind for port in apart.of(1, "F").inputs} == {"parameter", "value"}


def test_inputs_go_to_the_stages_that_read_them() -> None:
    traced = traced_case("late")
    names = traced.model.segments
    model = traced.model.divide([[name] for name in names])
    leaves = [{port.name for port in model.of(s, "F").inputs if port.kind == "leaf"} for s in range(4)]
    assert leaves == [{0}, {1}, {0}, {2, 3}], "what is joined to a layer's output goes with that layer"


# ---- layouts


class Turning(nn.Module):
    """Values that do not lie in the order of their dimensions, some as views of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.b = nn.Linear(4, 6)
        self.c = nn.Conv2d(6, 5, 1)
        self.d = nn.Linear(5 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).permute(0, 2, 3, 1).tanh()  # channels last in memory
        z = self.b(y).transpose(1, 3)
        z = self.c(z.sigmoid()) + z[:, :5].flip(-1)
        return self.d(z.transpose(2, 3).flatten(1)) + y.mean((1, 2))[:, :3]


@pytest.mark.parametrize("channels_last", [False, True])
def test_layouts_cross_cuts(channels_last: bool) -> None:
    """A permuted value arrives in the order of its dimensions; views made for the old layout still fit."""
    torch.manual_seed(0)
    model = Turning().double()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    batch = torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    traced = trace(model, functional.mse_loss, batch)
    expected = whole(traced)
    loss = functional.mse_loss(model(batch[0]), batch[1])
    assert float(expected.made[Port("result", 0)]) == pytest.approx(float(loss.detach()), abs=1e-12)
    assert traced.model.segments == ("model.a", "model.b", "model.c", "model.d")
    permuted = 0
    for stages in cuts(traced.model.segments, 4):
        divided = check_division(traced, stages, expected)
        permuted += any(
            operator.name == "aten.permute.default"
            for stage in range(len(stages) - 1)
            for operator in divided.of(stage, "F").program.operators[-len(divided.of(stage, "F").outputs) :]
        )
    assert permuted, "some value crosses in another order than it lies in"


class Views(nn.Module):
    """Several views of one value, which is read on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(3, 3)
        self.c = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.b(y.view(-1, 3)) * y.reshape(-1, 2, 3)[:, :1].reshape(-1, 1, 3).expand(-1, 2, -1).reshape(-1, 3)
        return self.c(z.view(-1, 6) + y.t().tanh().t())


def test_views_of_a_value_travel_as_one_value() -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    traced = trace(Views().double(), functional.mse_loss, batch)
    expected = whole(traced)
    for stages in cuts(traced.model.segments, 3):
        check_division(traced, stages, expected)
    model = traced.model.divide([["model.a"], ["model.b", "model.c"]])
    crossing = [port for port in model.of(1, "F").inputs if port.kind == "value"]
    assert len(crossing) == 1, "one value, of which the other stage makes the views that it wants"


# ---- what is refused, and what is passed over


@pytest.mark.parametrize("name", ["mlp", "unet", "inception", "late", "gpt2"])
def test_an_order_of_stages_that_cannot_be_is_refused(name: str) -> None:
    """Both stages are named, and the segment that needs the value."""
    traced = traced_case(name)
    names = traced.model.segments
    for source, target in sorted(traced.edges()):
        rest = [n for n in names if n not in (names[source], names[target])]
        with pytest.raises(UsageError, match=r"stage \d \(segment '.*'\) needs a value of stage \d") as caught:
            traced.model.divide([[names[target]], [names[source]], rest])
        numbers = [int(word) for word in str(caught.value).replace(":", " ").split() if word.isdigit()]
        assert numbers[0] < numbers[1], "a stage needs a value of a later one"
    with pytest.raises(UsageError, match=f"segment '{names[-2]}'"):
        traced.model.divide([names[-2:-1], [*names[:-2], names[-1]]])


def test_two_stages_that_need_each_other_are_refused() -> None:
    traced = traced_case("mlp")
    with pytest.raises(UsageError, match="let no two stages need each other"):
        traced.model.divide([["model.0", "model.5"], ["model.2"]])


def test_names_that_a_capture_has_not_are_passed_over_and_what_is_not_named_goes_with_what_is_before() -> None:
    traced = traced_case("mlp")
    model = traced.model.divide([["model.0", "model.ghost"], ["model.2"]])
    one = traced.model.divide([["model.0"], ["model.2", "model.5"]])
    assert model.phases == one.phases


def test_evaluation_has_forward_alone_and_updates_nothing() -> None:
    for name in ("cnn", "dropping", "unet"):
        case = CASES[name]
        batch = case.batches([SIZE])[0]
        traced = TracedModel(capture(case.model(), case.loss, batch, mode="evaluate"), backward=False)
        model = traced.divide([traced.segments[:1], traced.segments[1:]])
        assert {phase.kind for phase in model.phases} == {"F"}
        ports = {port.kind for part in model.phases.values() for port in part.outputs}
        assert ports == {"value", "result"}


def test_random_operators_keep_their_places_in_the_whole_model() -> None:
    traced = traced_case("dropping")
    names = traced.model.segments

    def positions(model: ModelPrograms) -> list[int]:
        forwards = [model.of(stage, "F") for stage in range(model.stages)]
        return [o.position for part in forwards for o in part.program.operators if o.position >= 0]

    alone = positions(traced.model.divide())
    assert alone == list(range(len(alone))) != []
    assert positions(traced.model.divide([names[:2], names[2:4], names[4:]])) == alone


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_is_made_where_its_parameter_is_read_whatever_it_is_the_sum_of(size: int) -> None:
    """With one sample, the gradient of a position embedding is that of the stream, a sum of all later stages' parts."""
    case = CASES["vit"]
    traced = trace(case.model(), case.loss, case.batches([size])[0])
    names = traced.model.segments
    model = check_division(traced, [names[:8], names[8:]], whole(traced))
    positions = Port("gradient", "model.vit.embeddings.position_embeddings")
    assert [positions in model.of(stage, "B").outputs for stage in (0, 1)] == [True, False]


def test_no_garbage_is_collected_within_a_trace() -> None:
    assert gc.isenabled()
    with TRACING:
        with TRACING:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with TRACING:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_each_output_is_placed_once_however_many_phases_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_case("mlp").model
    placed: list[Port] = []
    original = Division.phase_of_output

    def counted(division: Division, node: fx.Node, port: Port, early: set[fx.Node] | None) -> Phase:
        placed.append(port)
        return original(division, node, port, early)

    monkeypatch.setattr(Division, "phase_of_output", counted)
    traced.divide([[name] for name in traced.segments])
    assert len(traced.segments) > 2
    assert max(Counter(placed).values()) == 2  # with backward whole, and in halves
