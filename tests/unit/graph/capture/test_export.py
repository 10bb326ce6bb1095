"""Capture: what can be captured, what is refused and how, and that nothing else is said or changed."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.errors import CaptureError
from onebox.graph import ModelPrograms, Precision, model_programs
from onebox.graph.capture.export import capture, quiet
from onebox.wire import SlotArgument, specs_by_slot
from onebox.worker.sandbox.allow_list import allowed
from tests.kit.models import CASES

EXAMPLE = torch.zeros(3, 4), torch.zeros(3, 2)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


class Line(nn.Module):
    """A linear layer, and a forward that a test gives, or a class below."""

    def __init__(self, compute: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.compute = compute

    def forward(self, x_BD: Tensor) -> Any:
        """Return whatever the test computes."""
        return self.compute(self, x_BD)


def programs(model: nn.Module, loss: Any = squared, example: Any = EXAMPLE, **options: Any) -> ModelPrograms:
    return model_programs(capture(model, loss, example, **options), backward=options.get("mode") != "evaluate")


# ---- what is refused


class Decide(Line):
    """Runs on or not, by a value."""

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.line(x_BD)
        if y_BD.sum() > 0:  # here
            return y_BD * 2
        return y_BD


class Repeat(Line):
    """Runs as often as a value says."""

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.line(x_BD)
        for _ in range(int(x_BD.sum())):  # here
            y_BD = y_BD + 1
        return y_BD


class Scale(Line):
    """Makes a number out of a tensor."""

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.line(x_BD)
        return y_BD * y_BD.max().item()  # here


class Select(Line):
    """Makes a shape out of values."""

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.line(x_BD)
        return y_BD[y_BD > 0].sum() + y_BD  # here


class Leave(Line):
    """Computes with something else than PyTorch."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.from_numpy(self.line(x_BD).numpy())  # here


class Misfit(Line):
    """Fails without onebox too."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.line(x_BD.reshape(7, -1))  # here


class WriteInput(Line):
    """Writes to its input."""

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD.mul_(2)  # here
        return self.line(x_BD)


class WritePlain(Line):
    """Writes to a tensor that is no buffer."""

    def forward(self, x_BD: Tensor) -> Tensor:
        self.plain.add_(1)  # here
        return self.line(x_BD) + self.plain


def assign_other(self: Any, x_BD: Tensor) -> Tensor:
    self.mean = self.line(x_BD)
    return self.line(x_BD)


def write_parameter(self: Any, x_BD: Tensor) -> Tensor:
    with torch.no_grad():
        self.line.weight.mul_(0.9)
    return self.line(x_BD)


@pytest.mark.feature("Errors: Name the line of the model that cannot be captured")
@pytest.mark.parametrize(
    ("model", "reason", "advice"),
    [
        (Decide, "data-dependent", "decides by the value of a tensor"),
        (Repeat, "data-dependent", "decides by the value of a tensor"),
        (Scale, "out of the values of a tensor", "torch.where"),
        (Select, "out of the values of a tensor", "torch.where"),
        (Leave, ".numpy() takes values out of PyTorch", "in the data set"),
        (Misfit, "shape '[7, -1]' is invalid", "PyTorch itself refuses it"),
        (WriteInput, "writes to its inputs", "x.clone()"),
        (WritePlain, "writes to a tensor that is an attribute of a module, and no buffer", "register_buffer"),
    ],
)
def test_a_refusal_names_the_line_and_tells_what_to_do(model: Any, reason: str, advice: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i in range(model.forward.__code__.co_firstlineno, len(lines)) if "# here" in lines[i]) + 1
    with pytest.raises(CaptureError) as caught:
        programs(model())
    message = str(caught.value)
    assert caught.value.where == f"{__file__}:{number}"
    assert f"{__file__}:{number}: {lines[number - 1].strip()}" in message
    assert reason in message
    assert advice in message
    assert ("virtual device (vgpu)" in message) == (model is not Misfit)  # which runs nowhere


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (write_parameter, "forward writes to a parameter"),
        (assign_other, "Line.mean is a buffer to which forward assigns something of another type or shape"),
        (lambda self, x: self.line(x).detach(), "no parameter gets a gradient from the loss"),
    ],
)
def test_what_else_is_refused(compute: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        programs(Line(compute))


def test_a_decision_in_the_loss_is_named_too() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean() if outputs.mean() > 0 else -outputs.mean()

    with pytest.raises(CaptureError, match=re.escape(f"{__file__}:{loss.__code__.co_firstlineno + 1}")):
        programs(nn.Linear(4, 2), loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: (o - t) ** 2, r"the loss has the shape \[3, 2\], but must be a scalar"),
        (lambda o, t: ((o - t) ** 2).mean(0, keepdim=True).mean(1), r"the loss has the shape \[1\]"),
        (lambda o, t: 3.0, "the loss is a float"),
        (lambda o, t: (o.mean(),), "the loss is a tuple"),
        (lambda o, t: torch.zeros(()), "no parameter gets a gradient"),
        (lambda o, t: (o > t).sum(), "no parameter gets a gradient"),
    ],
)
def test_a_loss_must_be_a_scalar_that_depends_on_parameters(loss: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        programs(nn.Linear(4, 2), loss)


def test_a_metric_must_be_a_scalar() -> None:
    with pytest.raises(CaptureError, match=r"metric 'errors' has the shape \[3, 2\]"):
        programs(nn.Linear(4, 2), mode="evaluate", metrics={"errors": lambda o, t: o - t})


def test_arguments_that_the_model_does_not_take_are_named() -> None:
    with pytest.raises(CaptureError, match="takes 2 positional arguments but 3 were given"):
        programs(nn.Linear(4, 2), example=((EXAMPLE[0], EXAMPLE[0]), EXAMPLE[1]))


# ---- silence


@pytest.mark.parametrize("model", [Decide, Repeat, Scale, Select, Misfit])
def test_a_refusal_prints_and_logs_nothing(model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        programs(model())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["recurrent", "vit"])
def test_a_capture_prints_and_warns_of_nothing(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        programs(case.model(), case.loss, case.batches([3])[0])
    assert capfd.readouterr() == ("", "")


def test_an_attribute_that_forward_assigns_is_warned_of() -> None:
    def remember(self: Any, x_BD: Tensor) -> Tensor:
        self.plain = self.line(x_BD)
        return self.plain

    model = Line(remember)
    with pytest.warns(UserWarning, match=r"forward assigns model\.plain at .*test_export\.py:\d+: self\.plain ="):
        programs(model)
    assert torch.equal(model.plain, torch.zeros(2))


def test_loggers_are_as_before() -> None:
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = list(logger.filters), logger.level, list(logger.handlers), logger.disabled
    with pytest.raises(CaptureError):
        programs(Decide())
    assert (logger.filters, logger.level, logger.handlers, logger.disabled) == before
    with quiet():
        assert not logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, "", (), None))


def test_random_numbers_and_modes_are_as_before() -> None:
    case = CASES["dropping"]
    model = case.model().train()
    model.body.eval()
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    for mode in ("train", "evaluate"):
        programs(model, case.loss, case.batches([3])[0], mode=mode)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_a_loss_that_is_a_module_is_in_eval_mode_too() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return squared(self.drop(outputs), targets)

    loss = Dropped()
    assert not _random(programs(nn.Linear(4, 2), loss, mode="evaluate"))
    assert _random(programs(nn.Linear(4, 2), loss))
    assert loss.drop.training


def _random(made: ModelPrograms) -> list[str]:
    return [operator.name for operator in _operators(made) if operator.position >= 0]


# ---- programs


def _operators(made: ModelPrograms) -> list[Any]:
    parts = [made.forward, made.backward]
    return [operator for part in parts if part for operator in part.program.operators]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mlp", "tied", "branches")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_programs_for_gpus_hold_no_operator_of_cpus_alone(name: str, precision: Precision) -> None:
    case = CASES[name]
    example = case.batches([3], torch.float32)[0]
    made = programs(case.model(torch.float32), case.loss, example, precision=precision, device_type="cuda")
    names = Counter(operator.name for operator in _operators(made))
    assert not [name for name in names if "cpu" in name or "mkldnn" in name]
    assert all(allowed(name) for name in names)


def test_programs_for_cpus_use_their_fused_attention() -> None:
    case = CASES["attention"]
    made = programs(case.model(), case.loss, case.batches([3])[0], device_type="cpu")
    names = {operator.name for operator in _operators(made)}
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in names


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_operators_of_cpus_are_back_after_a_capture(device_type: str) -> None:
    before = torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()
    programs(nn.Linear(4, 2), device_type=device_type)
    assert (torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()) == before


def test_bfloat16_multiplies_in_bfloat16_and_normalises_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.Linear(6, 2))
    forward = programs(model, functional.mse_loss, precision="bf16").forward.program
    specs = specs_by_slot(forward)
    seen: dict[str, set[str]] = {}
    for operator in forward.operators:
        types = {specs[value.index].dtype for value in operator.args if isinstance(value, SlotArgument)}
        seen.setdefault(operator.name, set()).update(types)
    assert seen["aten.addmm.default"] == {"bfloat16"}
    assert seen["aten.native_layer_norm.default"] == {"float32"}
    assert seen["aten.native_group_norm.default"] == {"float32"}


def test_evaluation_changes_no_buffer() -> None:
    def count(self: Any, x_BD: Tensor) -> Tensor:
        self.mean.add_(1)
        return self.line(x_BD)

    made = programs(Line(count), mode="evaluate", metrics={"again": squared})
    assert [port.kind for port in made.forward.outputs] == ["result", "result"]
    assert not made.updates


def test_every_output_of_a_program_has_a_slot_of_its_own() -> None:
    class Scalars(Line):
        def __init__(self) -> None:
            super().__init__(lambda self, x: (self.line(x), self.one, self.two))
            self.one, self.two = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    made = programs(Scalars(), lambda outputs, t: squared(outputs[0], t) + outputs[1] + outputs[2])
    assert made.backward is not None
    slots = made.backward.program.outputs
    assert len(set(slots)) == len(slots) == 4
    assert min(slots) >= len(made.backward.program.inputs)
