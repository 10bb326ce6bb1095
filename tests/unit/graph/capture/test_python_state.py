"""Python's state in a capture: what is read is watched, what forward changes is refused, and all is as before."""

from __future__ import annotations

import random
import re
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from onebox.errors import CaptureError
from onebox.graph.capture.export import capture
from onebox.graph.capture.guards import Watch

EXAMPLE = torch.zeros(3, 4), torch.zeros(3, 2)
FACTOR = 1.0


class Line(nn.Module):
    """A linear layer, what a test computes with it, and state."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.compute = compute
        self.count, self.rates, self.hidden = 0, [0.5], None
        self.schedule = SimpleNamespace(rate=0.5)
        self.plain = torch.zeros(2)
        self.generator = random.Random(0)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return whatever the test computes."""
        return self.compute(self, self.line(x_BD))


def reads(model: nn.Module, loss: Any = mse_loss) -> Watch:
    """Return a watch over what a capture read."""
    captured = capture(model, loss, EXAMPLE)
    assert captured.unread is None
    return captured.watch


def name(watch: Watch) -> str | None:
    """Return what has changed, without its present value."""
    return None if watch.changed is None else watch.changed.partition(" (now")[0]


# ---- what is read


def test_nothing_has_changed_at_first() -> None:
    model = Line(lambda self, y: y * self.count * self.rates[0] * self.schedule.rate + self.plain)
    assert name(reads(model)) is None


@pytest.mark.parametrize(
    ("compute", "change", "changed"),
    [
        (lambda self, y: y * self.count, lambda model: setattr(model, "count", 2), "model.count"),
        (lambda self, y: y * getattr(self, "t", 1), lambda model: setattr(model, "t", 2), "model.t"),
        (lambda self, y: y * self.rates[0], lambda model: model.rates.append(2), "model.rates"),
        (
            lambda self, y: y * self.schedule.rate,
            lambda model: setattr(model.schedule, "rate", 2),
            "model.schedule.rate",
        ),
        (lambda self, y: y + self.plain, lambda model: model.plain.add_(1), "model.plain"),
        (lambda self, y: y if self.training else -y, lambda model: model.eval(), "model.training"),
    ],
)
def test_a_change_of_what_was_read_is_noticed(compute: Any, change: Callable[[Any], Any], changed: str) -> None:
    model = Line(compute)
    watch = reads(model)
    change(model)
    assert name(watch) == changed


def test_of_a_property_what_it_reads_is_watched() -> None:
    class Rated(Line):
        @property
        def settings(self) -> dict[str, float]:
            return {"rate": self.rates[0]}

    model = Rated(lambda self, y: y * self.settings["rate"])
    watch = reads(model)
    assert name(watch) is None
    model.rates[0] = 0.25
    assert name(watch) == "model.rates[0]"


FACTORS = {"half": 0.5}


def test_of_a_property_the_globals_that_it_reads_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Line):
        @property
        def factor(self) -> float:
            return FACTORS["half"]

    watch = reads(Scaled(lambda self, y: y * self.factor))
    assert name(watch) is None
    monkeypatch.setitem(FACTORS, "half", 0.25)
    assert name(watch) == f"{__name__}.FACTORS['half']"


def test_what_was_not_read_may_change() -> None:
    model = Line(lambda self, y: y)
    watch = reads(model)
    model.count, model.rates, model.extra = 3, [], "new"
    assert name(watch) is None


def test_it_is_noticed_that_a_value_is_as_before_again() -> None:
    model = Line(lambda self, y: y * self.count)
    watch = reads(model)
    model.count = 1
    assert name(watch) == "model.count"
    model.count = 0
    assert name(watch) is None


def test_variables_of_closures_are_watched() -> None:
    beta, weights = [0.0], {"a": 1.0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return mse_loss(outputs, targets) + beta[0] * weights["a"]

    watch = reads(Line(lambda self, y: y), loss)
    beta[0] = 1.0
    assert name(watch) == "beta[0]"
    beta[0], weights["a"] = 0.0, 2.0
    assert name(watch) == "weights['a']"


def test_globals_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = reads(Line(lambda self, y: y * FACTOR))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert name(watch) == f"{__name__}.FACTOR"


def test_attributes_that_a_loss_reads_of_an_object_are_watched_and_others_are_not() -> None:
    class Loss:
        def __init__(self) -> None:
            self.beta, self.calls = 0.0, 0

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return mse_loss(outputs, targets) + self.beta

    loss = Loss()
    watch = reads(Line(lambda self, y: y), loss)
    loss.calls = 3
    assert name(watch) is None
    loss.beta = 1.0
    assert name(watch) == "loss.beta"


def test_tensors_of_closures_are_watched_by_their_versions() -> None:
    weight = torch.ones(2)
    watch = reads(Line(lambda self, y: y * weight))
    assert name(watch) is None
    weight.mul_(2)
    assert name(watch) == "a tensor that is none of the model's (float32 [2])"


def test_values_of_a_module_of_the_users_are_watched() -> None:
    settings = types.ModuleType("settings")
    settings.__file__, settings.rate = __file__, 0.5  # type: ignore[attr-defined]
    watch = reads(Line(lambda self, y: y * settings.rate))
    assert name(watch) is None
    settings.rate = 0.25  # type: ignore[attr-defined]
    assert name(watch) == "settings.rate"


def test_a_model_that_is_no_part_of_the_trained_one_is_watched_for_changes_of_its_weights() -> None:
    teacher = nn.Linear(4, 2)

    class Distilled(Line):
        def forward(self, x_BD: Tensor) -> Tensor:
            return self.line(x_BD) - teacher(x_BD).detach()

    watch = reads(Distilled(lambda self, y: y))
    assert name(watch) is None
    with torch.no_grad():
        teacher.weight.mul_(2)
    assert name(watch) == "a tensor that is none of the model's (float32 [2, 4])"


def test_parameters_are_no_state_of_python() -> None:
    model = Line(lambda self, y: y)
    weight = model.line.weight

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return mse_loss(outputs, targets) + weight.square().sum()

    watch = reads(model, loss)
    with torch.no_grad():
        weight.zero_()
    assert name(watch) is None


def test_hooks_that_come_later_are_noticed() -> None:
    model = Line(lambda self, y: y)
    watch = reads(model)
    handle = model.line.weight.register_hook(lambda gradient: gradient * 2)
    assert name(watch) == "a hook of a gradient"
    handle.remove()
    assert name(watch) is None
    model.line.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    assert name(watch) == "model.line._forward_hooks"


# ---- what is changed


def counts(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y * self.count


def carries(self: Any, y: Tensor) -> Tensor:
    hidden = y if self.hidden is None else y + self.hidden
    self.hidden = hidden.detach()
    return hidden


def carries_from_the_first(self: Any, y: Tensor) -> Tensor:
    self.plain = (y + self.plain).mean(0).detach()
    return y + self.plain


def collects(self: Any, y: Tensor) -> Tensor:
    self.rates.append(y)
    return y


@pytest.mark.parametrize(
    ("compute", "name"),
    [(counts, "count"), (carries, "hidden"), (carries_from_the_first, "plain"), (collects, "rates")],
)
def test_state_that_forward_carries_on_is_refused_and_stays(compute: Any, name: str) -> None:
    model = Line(compute)
    with pytest.raises(CaptureError, match=rf"changes model\.{name}") as caught:
        capture(model, mse_loss, EXAMPLE)
    assert "register_buffer" in str(caught.value)
    assert "vgpu" in str(caught.value)
    assert (model.count, model.rates, model.hidden, model.plain.tolist()) == (0, [0.5], None, [0.0, 0.0])


def test_the_line_that_changes_an_attribute_is_named() -> None:
    with pytest.raises(
        CaptureError, match=re.escape(f"{__file__}:{counts.__code__.co_firstlineno + 1}: self.count += 1")
    ):
        capture(Line(counts), mse_loss, EXAMPLE)


def test_a_hook_that_collects_what_it_sees_is_refused() -> None:
    seen: list[Tensor] = []
    model = Line(lambda self, y: y)
    model.line.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs))
    with pytest.raises(CaptureError, match="changes seen"):
        capture(model, mse_loss, EXAMPLE)
    assert seen == []


def draws_python(self: Any, y: Tensor) -> Tensor:
    return y * random.random()


def draws_numpy(self: Any, y: Tensor) -> Tensor:
    return y * float(np.random.rand())


@pytest.mark.parametrize(("compute", "module"), [(draws_python, "random"), (draws_numpy, "numpy.random")])
def test_numbers_that_are_no_tensors_are_refused_with_the_line_that_draws(compute: Any, module: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    line = f"{__file__}:{compute.__code__.co_firstlineno + 1}"
    with pytest.raises(CaptureError, match=f"draws numbers from {module}") as caught:
        capture(Line(compute), mse_loss, EXAMPLE)
    assert caught.value.where == line
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr, index]


def test_a_generator_that_is_an_attribute_is_refused_too() -> None:
    with pytest.raises(CaptureError, match=r"changes model\.generator"):
        capture(Line(lambda self, y: y * self.generator.random()), mse_loss, EXAMPLE)


def test_what_forward_assigns_and_never_reads_is_warned_of() -> None:
    def remembers(self: Any, y: Tensor) -> Tensor:
        self.last = y
        return y

    model = Line(remembers)
    with pytest.warns(UserWarning, match=r"forward assigns model\.last at .*: self\.last = y"):
        capture(model, mse_loss, EXAMPLE)
    assert not hasattr(model, "last")


def test_a_counter_that_begins_where_there_was_none_is_refused() -> None:
    def counted(self: Any, y: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return y * self.calls

    model = Line(counted)
    with pytest.raises(CaptureError, match=r"changes model\.calls"):
        capture(model, mse_loss, EXAMPLE)
    assert not hasattr(model, "calls")


def test_a_generator_of_numpy_is_said_to_be_one() -> None:
    generator = np.random.default_rng(0)
    captured = capture(Line(lambda self, y: y * generator.random()), mse_loss, EXAMPLE)
    assert captured.unread is not None
    assert "`random` of class `Generator`" in str(captured.unread)
    assert "guards=False" in str(captured.unread)
