"""State of the user's optimizers: it is read as a plain optimizer's is, goes on in one, and may be changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan
from tests.kit.models import CASES
from tests.kit.pools import Pools
from tests.kit.reference import AGREE, backward
from tests.kit.stages import staged

SIZES = (8, 8, 5, 8, 8)
HALF = 3

MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "plain SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}


def replicas() -> Plan:
    return Plan.data_parallel(range(2), [1.0, 1.0], micro_batch=3)


LAYOUTS: dict[str, Callable[[], Plan]] = {
    "replicas": replicas,
    "shares of the state": lambda: replace(replicas(), optimizer="sharded"),
    "a pipeline": lambda: staged("mlp", [0, 1]),
    "steps on the host": lambda: replace(staged("mlp", [0, 1]), update="host"),
}


def plainly(model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    batches = CASES["mlp"].batches(list(SIZES))
    for step in range(first, last):
        for each in optimizers:
            each.zero_grad()
        parts = [part.size for part in replicas().micro_batches(SIZES[step])]
        backward(model, CASES["mlp"].loss, batches[step], lambda size, p=parts: p, lambda index: None)
        for each in optimizers:
            each.step()


def stepped(trainer: onebox.Trainer, first: int, last: int) -> None:
    for batch in CASES["mlp"].batches(list(SIZES))[first:last]:
        trainer.step(*batch)


def assert_alike(found: Any, expected: Any, where: str = "") -> None:
    """Require the same nesting, keys, types, element types and, to 1e-10, values."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device), where
        torch.testing.assert_close(found, expected, rtol=0, atol=AGREE, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_alike(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{where}.{place}")
    else:
        assert found == expected, where


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.feature("Optimizers: Read, load and go on with the optimizer's state")
@pytest.mark.parametrize("name", MAKE)
def test_a_state_dict_is_that_of_plain_training_and_goes_on_in_it(name: str, pools: Pools) -> None:
    expected = CASES["mlp"].model()
    plain = MAKE[name](expected)
    plainly(expected, [plain], 0, HALF)
    model = CASES["mlp"].model()
    optimizer = MAKE[name](model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=replicas()) as trainer:
        stepped(trainer, 0, HALF)
        trainer.pull()
        assert_alike(optimizer.state_dict(), plain.state_dict())
        saved = through_a_file(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        stepped(trainer, HALF, len(SIZES))
        trainer.pull()
    plainly(expected, [plain], HALF, len(SIZES))
    assert_alike(optimizer.state_dict(), plain.state_dict(), "after close()")
    again = CASES["mlp"].model()
    again.load_state_dict(weights)
    going_on = MAKE[name](again)
    going_on.load_state_dict(saved)
    plainly(again, [going_on], HALF, len(SIZES))
    assert_alike(dict(again.state_dict()), dict(expected.state_dict()))
    assert_alike(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_it_and_takes_it_back(layout: str, pools: Pools) -> None:
    """Both weights and state go back to what they were after the first steps, as after a step that went wrong."""
    expected = CASES["mlp"].model()
    plain = MAKE["Adam"](expected)
    plainly(expected, [plain], 0, HALF)
    model = CASES["mlp"].model()
    optimizer = MAKE["Adam"](model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=LAYOUTS[layout]()) as trainer:
        stepped(trainer, 0, HALF)
        trainer.pull()
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        assert_alike(saved, plain.state_dict())
        stepped(trainer, 0, 2)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        trainer.push()
        stepped(trainer, HALF, len(SIZES))
        trainer.pull()
        plainly(expected, [plain], HALF, len(SIZES))
        assert_alike(optimizer.state_dict(), plain.state_dict())
    assert_alike(dict(model.state_dict()), dict(expected.state_dict()))


def test_it_is_brought_when_it_is_read_and_not_before(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASES["mlp"].model()
    optimizer = MAKE["Adam"](model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=replicas()) as trainer:
        stepped(trainer, 0, 2)
        reads: list[None] = []
        original = type(trainer._run.transfer).optimizer_state
        monkeypatch.setattr(
            type(trainer._run.transfer), "optimizer_state", lambda self: (reads.append(None), original(self))[1]
        )
        trainer.pull()
        assert not reads
        weight = next(model.parameters())
        assert float(optimizer.state[weight]["step"]) == 2
        assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        optimizer.state_dict()
        assert len(reads) == 1
        stepped(trainer, 2, 3)
        assert float(optimizer.state[weight]["step"]) == 3
        assert len(reads) == 2
        assert len(copy.deepcopy(optimizer).state) == len(list(model.parameters()))


def test_several_optimizers(pools: Pools) -> None:
    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    expected = CASES["mlp"].model()
    plain = both(expected)
    plainly(expected, plain, 0, HALF)
    model = CASES["mlp"].model()
    optimizers = both(model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizers, pool=pools(2), plan=replicas()) as trainer:
        stepped(trainer, 0, HALF)
        trainer.pull()
    for found, wanted in zip(optimizers, plain, strict=True):
        assert_alike(found.state_dict(), wanted.state_dict())


def test_another_trainer_goes_on_with_it(pools: Pools) -> None:
    expected = CASES["mlp"].model()
    plainly(expected, [MAKE["Adam"](expected)], 0, len(SIZES))
    model = CASES["mlp"].model()
    optimizer = MAKE["Adam"](model)
    for plan, part in ((replicas(), (0, HALF)), (staged("mlp", [0, 1]), (HALF, len(SIZES)))):
        with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=plan) as trainer:
            stepped(trainer, *part)
            trainer.pull()
    assert_alike(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("change", ["in place", "cleared", "another mapping"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_by_hand_is_taken_over(change: str, layout: str, pools: Pools) -> None:
    def reset(optimizer: torch.optim.Optimizer) -> None:
        if change == "in place":
            for entries in optimizer.state.values():
                entries["exp_avg"].mul_(0.5)
        elif change == "cleared":
            optimizer.state.clear()
        else:
            optimizer.state = type(plain.state)(dict)

    expected = CASES["mlp"].model()
    plain = MAKE["Adam"](expected)
    plainly(expected, [plain], 0, HALF)
    model = CASES["mlp"].model()
    optimizer = MAKE["Adam"](model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=LAYOUTS[layout]()) as trainer:
        stepped(trainer, 0, HALF)
        reset(optimizer)
        stepped(trainer, HALF, len(SIZES))
        trainer.pull()
    reset(plain)
    plainly(expected, [plain], HALF, len(SIZES))
    assert_alike(dict(model.state_dict()), dict(expected.state_dict()))


def test_a_change_of_old_state_is_refused(pools: Pools) -> None:
    model = CASES["mlp"].model()
    optimizer = MAKE["Adam"](model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=replicas()) as trainer:
        stepped(trainer, 0, 1)
        kept = optimizer.state[next(model.parameters())]["exp_avg"]
        stepped(trainer, 1, 2)
        kept.zero_()
        with pytest.raises(UsageError, match=r"optimizer's state was changed by hand, but steps have been made"):
            stepped(trainer, 2, 3)


def test_state_that_is_loaded_before_the_first_step_counts(pools: Pools) -> None:
    expected = CASES["mlp"].model()
    plain = MAKE["Adam"](expected)
    plainly(expected, [plain], 0, HALF)
    model = CASES["mlp"].model()
    optimizer = MAKE["Adam"](model)
    with onebox.Trainer(model, CASES["mlp"].loss, optimizer, pool=pools(2), plan=replicas()) as trainer:
        model.load_state_dict(expected.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        stepped(trainer, HALF, len(SIZES))
        trainer.pull()
    plainly(expected, [plain], HALF, len(SIZES))
    assert_alike(dict(model.state_dict()), dict(expected.state_dict()))
