"""Convolutions with channels last: what stages compute stays the same but for rounding, wherever they are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onebox.errors import UsageError
from onebox.graph.memory_format import with_channels_last
from onebox.plan import Stage
from onebox.wire import Operator, Program
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.programs.tape import Row, Step
from onebox.worker.progress import WorkerProgress
from tests.kit.models import FATED
from tests.unit.graph.lower.test_recompute import cut, expected_of
from tests.unit.graph.staged import SIZE, Traced, assert_alike, order_of, run, trace, traced_case, whole

CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")


def convolutions(program: Program) -> list[Operator]:
    return [operator for operator in program.operators if operator.name in CONVOLUTIONS]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "cnn", "vit", "unet", "inception"])
def test_some_stages_and_all_of_them(name: str) -> None:
    """The result is that of one stage; stages without convolutions are the ones that they were."""
    traced, stages = traced_case(name), cut(traced_case(name).model.segments)
    captured = traced.model.divide(stages)
    count = len(stages)
    for chosen in (range(count), range(0, count, 2)):
        model = with_channels_last(captured, chosen)
        assert set(model.phases) == set(captured.phases)
        for halves in (False, True):
            assert_alike(run(model, traced.given, order_of(model, halves=halves)), expected_of(name), 1e-11)
        for phase, named in model.phases.items():
            before = captured.phases[phase]
            assert (named.inputs, named.outputs, named.specs()) == (before.inputs, before.outputs, before.specs())
            assert phase.stage in chosen or named is before
            made = [spec for operator in before.program.operators for spec in operator.specs if spec]
            if not any(len(spec.shape) == 4 for spec in (*before.program.inputs, *made)):
                assert named.program == before.program


@pytest.mark.parametrize("name", ["alexnet", "vgg", "resnet"])
def test_recomputed_stages_and_such_that_draw(name: str) -> None:
    """Random operators fill memory in its order: they draw the same numbers, because their maps lie as captured."""
    case = FATED[name]
    traced = trace(case.model(), case.loss, case.batches([SIZE])[0])
    stages = cut(traced.model.segments)
    count = len(stages)
    expected = whole(traced)
    for policy in ("keep", "recompute"):
        model = with_channels_last(traced.model.divide(stages, policies=[policy] * count), range(count))
        assert_alike(run(model, traced.given, order_of(model, halves=False)), expected, 1e-11)


class Watched(CompiledProgram):
    """A tape whose convolutions tell whether what they read has its channels last."""

    def watch(self, inputs: list[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """Run, and return what each convolution read."""
        seen: list[bool] = []
        steps: list[Row] = []
        for step in map(Step._make, self.steps):
            call = step.run
            if step.name in CONVOLUTIONS:
                weight = 1 if step.name == CONVOLUTIONS[0] else 2

                def call(*arguments: Tensor, inner: object = step.run, weight: int = weight) -> Tensor:
                    last = torch.channels_last
                    seen.extend(arguments[place].is_contiguous(memory_format=last) for place in range(weight))
                    return inner(*arguments)  # type: ignore[operator, no-any-return]

            steps.append(step._replace(run=call))
        self.steps = steps
        return self.run(inputs, lambda position: None, WorkerProgress()), seen


def network() -> nn.Module:
    """A network of convolutions in which nothing but the first and the last operator needs another format."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def small() -> Traced:
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 10, 10, dtype=torch.float64), torch.randint(5, (4,))
    return trace(network().double(), nn.functional.cross_entropy, batch)


def test_formats_are_kept_from_one_convolution_to_the_next() -> None:
    """Forward changes the format of the images alone; backward of what comes from the last maps, and of gradients."""
    traced = small()
    model = with_channels_last(traced.model.divide(), [0])
    forward, backward = model.forward, model.backward
    assert backward is not None
    clones = [o for o in forward.program.operators if "memory_format" in o.kwargs]
    assert [o.specs[0] for o in clones] == [forward.program.inputs[forward.inputs.index(("leaf", 0))]]
    inputs = [traced.given[port] for port in forward.inputs]
    outputs, seen = Watched(forward.program, torch.device("cpu")).watch(inputs)
    assert seen == [True] * 2
    values = dict(traced.given) | dict(zip(forward.outputs, outputs, strict=True))
    made, seen = Watched(backward.program, torch.device("cpu")).watch([values[port] for port in backward.inputs])
    assert seen == [True] * 2 * len(convolutions(backward.program))
    expected = whole(traced).made
    for port, tensor in zip(backward.outputs, made, strict=True):
        assert tensor.is_contiguous(), "gradients lie as parameters do"
        torch.testing.assert_close(tensor, expected[port], rtol=1e-11, atol=1e-11)


class Last(nn.Module):
    """A network that moves its channels itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 4, 3)
        self.classify = nn.Linear(4, 5)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Classify images [B, H, W, C]."""
        return self.classify(self.convolve(x_BHWC.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).mean((1, 2)))


def test_models_that_move_channels_themselves_stay_as_they_are() -> None:
    batch = torch.randn(4, 8, 8, 3, dtype=torch.float64), torch.randint(5, (4,))
    model = trace(Last().double(), nn.functional.cross_entropy, batch).model.divide()
    assert with_channels_last(model, [0]).phases == model.phases


def test_layers_that_are_split_have_no_format() -> None:
    with pytest.raises(UsageError, match="channels_last of a stage whose layers are split"):
        Stage(replicas=((0, 1),), shares=(1.0,), channels_last=True)
