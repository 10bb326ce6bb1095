"""Which models share a capture: those that are the same in all that a capture sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import onebox
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from tests.kit.models import CASES, sgd
from tests.kit.pools import Pools
from tests.process import captured
from tests.process.captured import capture, what_it_sees

GUARDED = True


def recipe(name: str = "cnn", dtype: torch.dtype = torch.float64) -> CaptureSpec:
    """Return what a trainer captures a case with."""
    case = CASES[name]
    model = case.model(dtype)
    trained = frozenset(f"model.{key}" for key, _ in model.named_parameters())
    return CaptureSpec(model=model, loss=case.loss, metrics={}, precision="fp32", device_type="cpu", trained=trained)


def other_momentum(model: nn.Module) -> None:
    model[1].momentum = 0.5


def freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


def other_type(model: nn.Module) -> None:
    model[0] = model[0].float()


def evaluate(model: nn.Module) -> None:
    model[1].eval()


def hook(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda module, inputs, outputs: 2 * outputs)


def other_layer(model: nn.Module) -> None:
    model[2] = nn.Tanh()


def own_forward(model: nn.Module) -> None:
    model[2].forward = torch.tanh


@pytest.mark.parametrize(
    "change",
    [other_momentum, freeze, other_type, evaluate, hook, other_layer, own_forward],
    ids=lambda change: change.__name__,
)
def test_a_model_that_was_changed_has_a_capture_of_its_own(change: Callable[[nn.Module], None]) -> None:
    plain, other = recipe(), recipe()
    assert what_it_sees(plain) == what_it_sees(other) is not None
    change(other.model)
    assert what_it_sees(other) != what_it_sees(plain)


def test_weights_that_become_one_are_seen() -> None:
    plain, other = recipe("tied"), recipe("tied")
    assert what_it_sees(plain) == what_it_sees(other)
    other.model.other.weight = nn.Parameter(other.model.first.weight.detach().clone())
    assert what_it_sees(other) != what_it_sees(plain)


def test_so_does_one_that_is_captured_otherwise() -> None:
    plain = recipe()
    ways = (
        replace(plain, precision="bf16"),
        replace(plain, device_type="cuda"),
        replace(plain, fuse=True),
        replace(plain, metrics={"loss": plain.loss}),
        replace(plain, trained=frozenset()),
        replace(plain, loss=nn.functional.mse_loss),
        recipe(dtype=torch.float32),
    )
    assert len({what_it_sees(each) for each in (plain, *ways)}) == 1 + len(ways)
    assert what_it_sees(replace(plain, model=nn.Linear(1, 1))) is None


def test_what_is_the_same_is_captured_once() -> None:
    batch = as_batch(*CASES["mlp"].batches([4])[0])
    found = [
        capture(Captures(recipe("mlp")), batch, size, train=train) for size in (2, 2, 4) for train in (True, False)
    ]
    graphs = [each._joint for each in found]
    assert [graphs.index(each) for each in graphs] == [0, 1, 0, 1, 4, 5]


def test_trainers_share_captures(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "_known", {})
    made: list[int] = []
    plain = captured._plain
    monkeypatch.setattr(captured, "_plain", lambda *args, **options: made.append(args[2]) or plain(*args, **options))
    case = CASES["mlp"]
    for _ in range(2):
        model = case.model()
        with onebox.Trainer(model, case.loss, sgd(model), pool=pools(1), plan=onebox.DataParallel()) as trainer:
            trainer.step(*case.batches([4])[0])
        assert len(made) == len(set(made))
