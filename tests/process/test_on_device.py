"""Tensor code in front of a model, run by the workers: fewer bytes travel, and the result is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.errors import CaptureError
from onebox.plan import Plan
from tests.kit.models import CASES, CLASSES, sgd
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, drawing, state_of, train
from tests.kit.stages import staged, tensors_of

GUARDED = True

MICRO_BATCH, SEED = 3, 5
SIZES = [8, 8, 5, 8]


def normalise(x: Tensor) -> Tensor:
    return (x.double() / 255 - torch.tensor([0.4] * 10, dtype=torch.float64)) / 0.3


class Augment(nn.Module):
    """Scales as a buffer says, and drops features in training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.register_buffer("scale", torch.tensor(0.01, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x.double() * self.scale) + 0.1 * torch.rand_like(x, dtype=torch.float64)


def batches(sizes: list[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(256, (size, 10), dtype=torch.uint8, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def reference(on_device: Any) -> Outcome:
    case = CASES["mlp"]
    model = case.model()

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(on_device(x))

    found = train(Whole(), case.loss, sgd(model), batches(), MICRO_BATCH, around=drawing(SEED))
    return Outcome(losses=found.losses, norms=[], tensors=state_of(model))


PLANS: list[Plan] = [
    Plan.data_parallel([0, 1, 2], [1.0, 2.0, 1.0], micro_batch=MICRO_BATCH),
    staged("mlp", [0, (1, 2)], micro_batch=MICRO_BATCH),
]


@pytest.mark.feature("Trainer: Prepare inputs on the devices")
@pytest.mark.parametrize("plan", PLANS, ids=["replicas", "stages"])
@pytest.mark.parametrize("kind", ["function", "module"])
def test_it_trains_like_one_process_that_calls_it_first(kind: str, plan: Plan, pools: Pools) -> None:
    case = CASES["mlp"]
    on_device = normalise if kind == "function" else Augment()
    expected = reference(on_device)
    model = case.model()
    with onebox.Trainer(
        model, case.loss, sgd(model), pool=pools(3), plan=plan, seed=SEED, on_device=on_device
    ) as trainer:
        losses = [trainer.step(trainer.upload(*batch)) for batch in batches()]
        tensors = tensors_of(trainer)
        assert_same(Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=tensors), expected)


def test_it_is_used_in_evaluation_and_kept_in_no_checkpoint(tmp_path: Path, pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    given = batches([8, 5])
    augment = Augment()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), on_device=augment, seed=SEED) as trainer:
        trainer.step(*given[0]).item()
        assert {name.removeprefix("model.") for name in trainer.tensors()} == set(model.state_dict())
        saved = trainer.save(tmp_path)
        model = case.model()
    with onebox.Trainer.resume(saved, model, case.loss, sgd(model), pool=pools(2), on_device=normalise) as trainer:
        found = trainer.evaluate(given)
        expected = sum(case.loss(model.eval()(normalise(x)), y).item() * len(x) for x, y in given) / 13
        assert found.loss == pytest.approx(expected, abs=1e-12)


def test_what_no_graph_can_hold_is_referred_to_the_feed(pools: Pools) -> None:
    case = CASES["mlp"]
    refused = {
        "numpy": lambda x: torch.from_numpy(x.numpy()).double(),
        "shape depends": lambda x: x[x > 3].double(),
        "data-dependent": lambda x: x.double() if x.sum() > 3 else -x.double(),
    }
    for reason, on_device in refused.items():
        model = case.model()
        with (
            onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), on_device=on_device) as trainer,
            pytest.raises(CaptureError, match="(?s)on_device=.*" + reason + ".*transform="),
        ):
            trainer.step(*batches()[0])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)], ids=["MNIST", "CIFAR-10"])
def test_a_quarter_of_the_bytes_travels(shape: tuple[int, ...], pools: Pools) -> None:
    size, pool = 32, pools(2)
    x = torch.randint(256, (size, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    y = torch.randint(10, (size,), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    sent, losses = [], []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets.long())

    for on_device, inputs in ((None, x.float() / 255), (lambda x: x.float() / 255, x)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 10))
        with onebox.Trainer(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool, on_device=on_device
        ) as trainer:
            trainer.step(inputs, y).item()
            before = sum(pool.sent_bytes)
            losses.append(trainer.step(inputs, y).item())
            sent.append(sum(pool.sent_bytes) - before - y.nbytes)
    assert losses[0] == losses[1]
    assert sent == [4 * x.nbytes, x.nbytes]
