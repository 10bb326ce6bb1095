"""Batches of many lengths: few captures, or a warning, and the result of plain PyTorch in any case."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from tests.kit.models import CLASSES
from tests.kit.pools import Pools

GUARDED = True

WORDS, MICRO_BATCH = 11, 3


class Sums(nn.Module):
    """The mean of words, of which 0 is none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify sentences."""
        there_BT = (x_BT != 0).to(self.head.weight.dtype)
        return self.head((self.embed(x_BT) * there_BT[..., None]).sum(1) / there_BT.sum(1, keepdim=True))


class Unrolled(Sums):
    """A loop over the words."""

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify sentences."""
        h_BD = torch.zeros(len(x_BT), 6, dtype=self.head.weight.dtype)
        for word in range(x_BT.shape[1]):
            h_BD = torch.tanh(h_BD + self.embed(x_BT[:, word]))
        return self.head(h_BD)


def build(kind: type[Sums]) -> Sums:
    """Return a model, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return kind().double()


def batches(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return batches of lengths."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(1, WORDS, (6, length), generator=generator),
            torch.randint(CLASSES, (6,), generator=generator),
        )
        for length in lengths
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(model: Sums, given: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Train as PyTorch does; return the losses."""
    optimizer, losses = sgd(model), []
    for inputs, targets in given:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal(model: Sums, losses: Sequence[float], other: Sums, expected: Sequence[float]) -> None:
    """Require the same results."""
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-10
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, other.state_dict()[name], rtol=0, atol=1e-10), name


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    """Return the lines of the log with a text."""
    return [record for record in caplog.records if text in record.getMessage()]


@pytest.mark.feature("Trainer: Pad batches of many lengths to buckets")
def test_padded_batches_are_captured_for_each_bucket(pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    given = batches((3, 5, 2, 4, 7, 6, 8, 1, 3))
    model, other = build(Unrolled), build(Unrolled)
    pad = onebox.Buckets(sizes=(4, 8))
    with (
        caplog.at_level(logging.INFO, "onebox"),
        onebox.Trainer(
            model,
            functional.cross_entropy,
            sgd(model),
            pool=pools(2),
            plan=onebox.DataParallel(micro_batch=MICRO_BATCH),
            pad=pad,
        ) as trainer,
    ):
        losses = [trainer.step(*batch) for batch in given[:4]]
        losses += [trainer.step(trainer.upload(*batch)) for batch in given[4:]]
        found = trainer.evaluate(given)
        trainer.pull()
    padded = [pad(batch) for batch in given]
    assert {tuple(inputs.shape) for inputs, _ in padded} == {(6, 4), (6, 8)}
    assert_equal(model, [float(loss) for loss in losses], other, plain(other, padded))
    with torch.no_grad():
        expected = sum(functional.cross_entropy(other(x), y).item() for x, y in padded) / len(padded)
    assert abs(found.loss - expected) < 1e-10
    assert len(said(caplog, "for training")) == 1  # beside the first capture, of which nothing is said


def test_padding_changes_nothing_for_a_model_that_masks(pools: Pools) -> None:
    given = batches((3, 5, 2, 7))
    model, other = build(Sums), build(Sums)
    pad = onebox.Buckets(multiple=4)
    with onebox.Trainer(
        model,
        functional.cross_entropy,
        sgd(model),
        pool=pools(2),
        plan=onebox.DataParallel(micro_batch=MICRO_BATCH),
        pad=pad,
    ) as trainer:
        losses = [float(trainer.step(*batch)) for batch in given]
        trainer.pull()
    assert_equal(model, losses, other, plain(other, given))


@pytest.mark.parametrize("kind", [Sums, Unrolled])
def test_lengths_that_vary(kind: type[Sums], pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    given = batches((3, 5, 4, 7, 6, 8, 3, 2, 9))
    model, other = build(kind), build(kind)
    with (
        caplog.at_level(logging.INFO, "onebox"),
        onebox.Trainer(
            model,
            functional.cross_entropy,
            sgd(model),
            pool=pools(2),
            plan=onebox.DataParallel(micro_batch=MICRO_BATCH),
        ) as trainer,
    ):
        losses = [float(trainer.step(*batch)) for batch in given]
        trainer.pull()
    assert_equal(model, losses, other, plain(other, given))
    warned = said(caplog, "pad=onebox.Buckets")
    if kind is Sums:
        assert len(said(caplog, "with symbols for sizes that vary")) == 1
        assert len(said(caplog, "for training")) == 1
        assert not warned
    else:
        assert len(said(caplog, "cannot be symbols (the model decides by them)")) == 1
        assert [record.levelname for record in warned] == ["WARNING"]


def test_a_length_beyond_the_buckets_is_refused_before_the_step(pools: Pools) -> None:
    model = build(Sums)
    with onebox.Trainer(
        model, functional.cross_entropy, sgd(model), pool=pools(1), pad=onebox.Buckets(sizes=(4,))
    ) as trainer:
        with pytest.raises(onebox.OneboxError, match="size of 5 in dimension 1 is larger than the largest bucket, 4"):
            trainer.step(*batches((5,))[0])
        assert float(trainer.step(*batches((3,))[0])) > 0
    with pytest.raises(onebox.OneboxError, match="pad is a int"):
        onebox.Trainer(model, functional.cross_entropy, sgd(model), pool=pools(1), pad=4)  # type: ignore[arg-type]
