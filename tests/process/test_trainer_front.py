"""Weights that nobody pulled, arguments of the wrong kind, and errors at the edge of the engine."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import onebox
from onebox.engine.compile.compiler import Compiler
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload import index_ranges
from onebox.engine.workload.captures import Captures
from onebox.errors import CaptureError, InternalError, OperatorError, UsageError
from onebox.graph import TracedModel
from tests.kit.pools import Pools

GUARDED = True


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch(samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def trainer_of(model: nn.Module, on: onebox.Pool, **options: Any) -> onebox.Trainer:
    loss, optimizer = options.pop("loss", functional.cross_entropy), options.pop("optimizer", None)
    return onebox.Trainer(model, loss, optimizer or sgd(model), **{"pool": on, **options})


def hooks_of(model: nn.Module) -> list[int]:
    return [len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()]


# ---- weights that nobody pulled


def test_hooks_go_with_the_trainer(pools: Pools) -> None:
    model, before = mlp(), AveragedModel.update_parameters
    optimizer = sgd(model)
    none = hooks_of(model)
    with trainer_of(model, pools(1), optimizer=optimizer) as trainer:
        trainer.step(*batch())
        assert hooks_of(model) != none
        trainer.pull()
    assert hooks_of(model) == none
    assert not optimizer._optimizer_step_pre_hooks
    assert AveragedModel.update_parameters is before
    abandoned = trainer_of(model, pools(1))
    del abandoned
    gc.collect()
    assert hooks_of(model) == none


def test_a_copy_and_a_pickle_know_no_trainer(pools: Pools) -> None:
    model = mlp()
    with trainer_of(model, pools(1)) as trainer:
        trainer.step(*batch())
        copied, pickled = copy.deepcopy(model), pickle.dumps(model)
        assert b"onebox" not in pickled
        trainer.step(*batch())
        trainer.pull()
    loaded = pickle.loads(pickled)
    for other in (copied, loaded):
        assert torch.equal(other[0].weight, copied[0].weight)
        assert not torch.equal(other[0].weight, model[0].weight)
        other(batch()[0])
        other.state_dict()


def test_a_change_by_hand_is_not_overwritten_by_a_reader(pools: Pools) -> None:
    model = mlp()
    with trainer_of(model, pools(1)) as trainer:
        trainer.step(*batch())
        with torch.no_grad():
            model[0].weight.zero_()
        assert not model.state_dict()["0.weight"].any()
        with pytest.raises(UsageError, match="changed by hand"):
            trainer.step(*batch())
        trainer.push()


@pytest.mark.parametrize("steps", [1, 3])
def test_close_says_what_is_lost(steps: int, pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="onebox"), trainer_of(mlp(), pools(1)) as trainer:
        for _ in range(steps):
            trainer.step(*batch())
    words = "its last step were neither pulled nor saved" if steps == 1 else "its last 3 steps were neither"
    assert words in caplog.text


@pytest.mark.parametrize(
    "keep",
    [
        lambda trainer, folder: trainer.pull(),
        lambda trainer, folder: trainer.save(folder),
        lambda trainer, folder: trainer.save_weights(folder),
        lambda trainer, folder: trainer.tensors(),
        lambda trainer, folder: trainer.model.state_dict(),
    ],
)
def test_what_was_kept_is_not_lost(
    keep: Callable[[onebox.Trainer, Path], object], pools: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="onebox"), trainer_of(mlp(), pools(1)) as trainer:
        trainer.step(*batch())
        keep(trainer, tmp_path / "kept")
    assert "neither pulled nor saved" not in caplog.text


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_current_weights(
    kind: type[BaseException], pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = mlp(), mlp()
    with caplog.at_level(logging.WARNING, logger="onebox"), pytest.raises(kind), trainer_of(found, pools(1)) as trainer:
        trainer.step(*batch())
        raise kind
    optimizer = sgd(expected)
    functional.cross_entropy(expected(batch()[0]), batch()[1]).backward()
    optimizer.step()
    torch.testing.assert_close(found[0].weight, expected[0].weight)
    assert "neither pulled" not in caplog.text


def test_a_failure_that_nobody_read_is_said_at_close(
    pools: Pools, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_ranges, "MOST_ELEMENTS", 0)  # as if the batch was too large to be looked at before
    inputs, targets = batch()
    targets[3] = 9
    with caplog.at_level(logging.ERROR, logger="onebox"), trainer_of(mlp(), pools(1)) as trainer:
        trainer.step(inputs, targets)
    assert "a step whose loss was not read has failed" in caplog.text
    assert "Target 9 is out of bounds" in caplog.text
    caplog.clear()
    with (
        caplog.at_level(logging.ERROR, logger="onebox"),
        trainer_of(mlp(), pools(1)) as trainer,
        pytest.raises(OperatorError),
    ):
        trainer.step(inputs, targets).item()
    assert "not read" not in caplog.text


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pool": "cpu*2"}, r"pool='cpu\*2'; allowed is a pool that has been opened, as by onebox\.open\('cpu\*2'\)"),
        ({"pool": None}, r"pool=None; allowed is a pool"),
        ({"loss": nn.CrossEntropyLoss}, r"loss=CrossEntropyLoss, a class; .*make one, CrossEntropyLoss\(\.\.\.\)"),
        ({"loss": "ce"}, r"loss='ce'; allowed are a function of \(outputs, targets\)"),
        ({"optimizer": torch.optim.AdamW}, r"the optimizer is the class AdamW; .*torch\.optim\.AdamW\(model"),
        ({"optimizer": 0.1}, r"the optimizer is a float; allowed"),
        ({"metrics": [functional.mse_loss]}, r"metrics=a list; allowed is a dict"),
        ({"metrics": {"f1": "f1"}}, r"metrics\['f1'\]='f1'; allowed"),
        ({"on_device": nn.Flatten}, r"on_device=Flatten, a class"),
        ({"clip_grad_norm": "1"}, r"clip_grad_norm='1': it must be positive"),
        ({"plan": "data-parallel"}, r"plan='data-parallel'.*did you mean plan=onebox\.DataParallel\(\)\?"),
        ({"plan": "ddp"}, r"did you mean plan=onebox\.DataParallel\(\)\?"),
        ({"plan": "atuo"}, r"plan='atuo'.*did you mean plan='auto'\?"),
        ({"plan": "fast"}, r"plan='fast': there is no such file; allowed are"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], words: str, pools: Pools) -> None:
    with pytest.raises(UsageError, match=words):
        trainer_of(mlp(), pools(1), **arguments)


def test_a_class_is_no_model(pools: Pools) -> None:
    with pytest.raises(UsageError, match=r"model=Linear, a class; allowed is a torch\.nn\.Module: make one, Linear"):
        onebox.Trainer(nn.Linear, functional.mse_loss, sgd(mlp()), pool=pools(1))  # type: ignore[arg-type]


def test_options_that_become_something_else(pools: Pools) -> None:
    model = mlp()
    optimizer = sgd(model)
    with trainer_of(model, pools(1), optimizer=optimizer) as trainer:
        trainer.step(*batch())
        optimizer.param_groups[0]["lr"] = "0.1"
        with pytest.raises(UsageError, match=r"option 'lr' of the optimizer is '0\.1', a string; allowed are numbers"):
            trainer.step(*batch())
        optimizer.param_groups[0]["lr"] = 0.1
        trainer.step(*batch()).item()
        trainer.pull()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m, o: m[0].requires_grad_(False),
            r"requires_grad has become False for model\.0\.weight, model\.0\.bias",
        ),
        (lambda m, o: o.param_groups[0]["params"].reverse(), r"put in another order, model\.2\.bias first"),
        (lambda m, o: o.add_param_group({"params": nn.Parameter(torch.ones(2))}), r"added to the .*2 groups, 1 before"),
        (lambda m, o: o.param_groups[0]["params"].pop(), r"model\.2\.bias has been removed from"),
    ],
)
def test_what_is_trained_has_changed(change: Callable[[Any, Any], object], words: str, pools: Pools) -> None:
    model = mlp()
    optimizer = sgd(model)
    with trainer_of(model, pools(1), optimizer=optimizer) as trainer:
        trainer.step(*batch())
        change(model, optimizer)
        with pytest.raises(UsageError, match=rf"{words}.* since this trainer was made.*close this trainer"):
            trainer.step(*batch())
        trainer.pull()


@pytest.mark.parametrize(
    "change", [lambda m: m.float(), lambda m: setattr(m[0].weight, "data", torch.zeros(16, 9, dtype=torch.float64))]
)
def test_parameters_of_another_kind(change: Callable[[Any], object], pools: Pools) -> None:
    model = mlp().double()
    inputs, targets = batch()
    with trainer_of(model, pools(1)) as trainer:
        trainer.step(inputs.double(), targets)
        trainer.pull()
        change(model)
        with pytest.raises(
            UsageError, match=r"model\.0\.weight, .*float64\[16, 8\] when this trainer was made, is now"
        ):
            trainer.step(inputs.double(), targets)


@pytest.mark.parametrize("copier", [pickle.dumps, copy.deepcopy, copy.copy])
def test_trainers_and_pools_are_not_copied(copier: Callable[[object], object], pools: Pools) -> None:
    with trainer_of(mlp(), pools(1)) as trainer, pytest.raises(UsageError, match="Trainer cannot be pickled or copied"):
        copier(trainer)
    with pytest.raises(UsageError, match="Pool cannot be pickled or copied"):
        copier(pools(1))


def test_threads_take_turns(pools: Pools) -> None:
    model, losses = mlp(), []
    with trainer_of(model, pools(1)) as trainer:
        threads = [threading.Thread(target=lambda: losses.append(float(trainer.step(*batch())))) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        trainer.pull()
    assert len(set(losses)) == 4
    assert trainer.steps_done == 4


def test_metrics_of_an_evaluation_belong_to_the_trainer(pools: Pools) -> None:
    with trainer_of(mlp(), pools(1)) as trainer, pytest.raises(UsageError, match=r"Trainer\(\.\.\., metrics="):
        trainer.evaluate([batch()], metrics={"mse": functional.mse_loss})  # type: ignore[arg-type]


# ---- errors of onebox itself


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Captures, "stamped"),
        (TracedModel, "divide"),
        (Compiler, "step"),
        (InstalledPlan, "bring"),
        (InstalledPlan, "step"),
    ],
)
@pytest.mark.parametrize("error", [KeyError("x"), AssertionError(), RuntimeError("Expected all tensors")])
def test_what_is_not_ours_becomes_one_error(where: type, name: str, error: Exception, pools: Pools) -> None:
    with trainer_of(mlp(), pools(1)) as trainer:
        with mock.patch.object(where, name, side_effect=error), pytest.raises(InternalError) as raised:
            trainer.step(*batch())
        assert raised.value.__cause__ is error
        assert type(error).__name__ in str(raised.value)
        assert "Trainer.step()" in str(raised.value)
        assert "torch.nn.modules.container.Sequential" in str(raised.value)
        assert "virtual devices (vgpu)" in str(raised.value)
        assert (raised.value.where or "").startswith(__file__)
        assert trainer.step(*batch()).item() > 0
        trainer.pull()


def test_an_error_of_a_capture_names_the_model(pools: Pools) -> None:
    with (
        trainer_of(mlp(), pools(1)) as trainer,
        mock.patch("onebox.graph.capture.export.trace", side_effect=KeyError("x")),
        pytest.raises(CaptureError, match="Sequential cannot be captured"),
    ):
        trainer.step(*batch())


def test_what_users_raise_is_theirs(pools: Pools) -> None:
    class Mine(Exception):
        pass

    def raising(*_: object) -> Any:
        raise Mine

    def data() -> Any:
        yield batch()
        raise Mine

    with trainer_of(mlp(), pools(1)) as trainer:
        with pytest.raises(Mine):
            trainer.evaluate(data())
        loader = torch.utils.data.DataLoader([0], collate_fn=raising)
        with pytest.raises(Mine):
            trainer.evaluate(loader)
    reduction = onebox.Weighted(raising)
    with trainer_of(mlp(), pools(1), loss_reduction=reduction) as trainer, pytest.raises(Mine):
        trainer.step(*batch())


def test_make_plan_raises_one_error(pools: Pools) -> None:
    model = mlp()
    with (
        mock.patch("onebox.engine.planning.make_plan.profile_model", side_effect=ZeroDivisionError),
        pytest.raises(InternalError, match=r"onebox\.make_plan\(\).*ZeroDivisionError"),
    ):
        onebox.make_plan(model, functional.cross_entropy, sgd(model), batch(), pool=pools(1))


class Settings(dict[str, float]):
    """Read like an object, by what Dynamo does not read."""

    __getattr__ = dict.__getitem__


SETTINGS = Settings(k=2.0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * SETTINGS.k


def test_code_that_cannot_be_guarded_is_refused_unless_its_state_is_said_not_to_change(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = batch()
    with trainer_of(Scaled(), pools(1)) as trainer, pytest.raises(CaptureError, match=r"guards=False") as caught:
        trainer.step(inputs, targets)
    assert caught.value.where is not None
    assert caught.value.where.startswith(__file__)
    torch.manual_seed(1)
    model = Scaled()
    plain = functional.cross_entropy(model(inputs), targets).item()
    with trainer_of(model, pools(1), guards=False) as trainer:
        assert trainer.step(inputs, targets).item() == pytest.approx(plain)
        before = trainer.evaluate([(inputs, targets)]).loss
        monkeypatch.setitem(SETTINGS, "k", 5.0)
        assert trainer.evaluate([(inputs, targets)]).loss == before
        trainer.save(tmp_path)
    again = Scaled()
    with onebox.Trainer.resume(
        tmp_path, again, functional.cross_entropy, sgd(again), pool=pools(1), guards=False
    ) as trainer:
        trainer.step(inputs, targets).item()
        trainer.pull()
    with pytest.raises(TypeError, match="unexpected keyword argument 'guard'"):
        trainer_of(mlp(), pools(1), guard=False)
    with pytest.raises(UsageError, match="guards="):
        trainer_of(mlp(), pools(1), guards="yes")


def test_a_swapped_layer_and_criterion_are_followed_as_by_plain_pytorch(pools: Pools) -> None:
    criteria: dict[str, nn.Module] = {"now": nn.CrossEntropyLoss()}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = criteria["now"](outputs, targets)
        return value

    inputs, targets = batch()
    model, other = mlp(), mlp()
    optimizer = sgd(other)
    with trainer_of(model, pools(2), loss=loss) as trainer:
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(other(inputs), targets)
            value.backward()
            optimizer.step()
            assert trainer.step(inputs, targets).item() == pytest.approx(value.item(), rel=1e-5)
            if not isinstance(model[1], nn.ReLU):
                model[1], other[1] = nn.ReLU(), nn.ReLU()
            else:
                criteria["now"] = nn.CrossEntropyLoss(label_smoothing=0.2)
        trainer.pull()
