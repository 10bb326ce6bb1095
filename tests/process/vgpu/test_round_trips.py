"""How often a script waits for its devices: only where it reads a value, or nobody but the worker knows a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onebox
from onebox.vgpu.runtime.context import current_context
from tests.kit.slow_channel import slow_channel

HERE, THERE = "vgpu:0", "vgpu:1"

Step = Callable[[], object]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[onebox.Pool]:
    with slow_channel(latency_s=0.01), onebox.open("cpu*2", threads=1) as opened:
        yield opened


def waits(run: Step) -> int:
    """Return how often a function waits for the devices."""
    streams = current_context().queues
    before = sum(stream.channel.waits for stream in streams)
    run()
    return sum(stream.channel.waits for stream in streams) - before


class Training:
    """A step that trains a small model.

    Args:
        optimizer: Its optimizer.
        clip: Whether gradients are clipped.
        amp: Whether it runs under autocast.
        recompute: Whether activations are computed again.
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        *,
        clip: bool = False,
        amp: bool = False,
        recompute: bool = False,
    ) -> None:
        self.clip, self.amp, self.recompute = clip, amp, recompute
        self.model = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(18, 3)
        ).to(HERE)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)

    def __call__(self) -> Tensor:
        x, y = torch.randn(5, 1, 8, 8).to(HERE), torch.randint(0, 3, (5,)).to(HERE)
        self.optimizer.zero_grad()
        with torch.autocast("vgpu", torch.bfloat16, enabled=self.amp):
            out = checkpoint(self.model, x, use_reentrant=False) if self.recompute else self.model(x)
            loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss


@pytest.mark.feature("Virtual devices: Train without waiting for the devices")
@pytest.mark.parametrize(
    "step",
    [
        Training,
        lambda: Training(torch.optim.Adam),
        lambda: Training(torch.optim.AdamW, clip=True),
        lambda: Training(torch.optim.RMSprop, amp=True),
        lambda: Training(torch.optim.Adagrad, recompute=True),
    ],
    ids=["SGD", "Adam", "clipping", "autocast", "checkpointing"],
)
def test_a_training_step_that_reads_nothing_waits_for_nothing(step: Callable[[], Training]) -> None:
    training = step()
    assert waits(training) == 1  # before the optimizer's first step
    training()
    for _ in range(3):
        assert waits(training) == 0
    assert training().item() > 0


def test_what_another_device_learns_holds_up_no_step() -> None:
    training = Training()
    training(), training()
    for size in range(2, 5):
        torch.ones(size, device=THERE).sin_()
        assert waits(training) == 0


def test_a_read_is_one_wait() -> None:
    training = Training()
    training(), training()
    assert waits(lambda: training().item()) == 1
    assert waits(lambda: float(training().detach())) == 1
    assert waits(training.model[0].weight.tolist) == 1
    assert waits(lambda: print(training().detach().cpu().dtype)) == 1


def test_evaluation_with_counts_on_the_device_waits_for_nothing() -> None:
    training = Training()
    hits = torch.zeros((), dtype=torch.int64, device=HERE)

    @torch.no_grad()
    def evaluate() -> None:
        out = training.model.eval()(torch.randn(5, 1, 8, 8, device=HERE))
        hits.add_((out.argmax(1) == torch.zeros(5, dtype=torch.int64, device=HERE)).sum())

    assert [waits(evaluate) for _ in range(3)] == [0, 0, 0]


def test_looks_are_known_without_asking() -> None:
    x = torch.zeros(3, 4, device=HERE)

    def look() -> None:
        assert x.t()[1:].reshape(-1).shape == (9,)
        assert x.unbind(0)[0].is_contiguous()
        assert torch.cat([x, x]).stride() == (4, 1)
        assert (x + 1).requires_grad is False
        assert x.to(torch.float64).element_size() == 8

    assert waits(look) == 0


def test_copies_between_devices_wait_only_for_the_first() -> None:
    x = torch.arange(4.0, device=HERE)
    x.to(THERE)
    assert waits(lambda: x.to(THERE).add_(1).to(HERE)) == 0
    assert x.to(THERE).to(HERE).tolist() == [0, 1, 2, 3]


def test_shapes_that_depend_on_values_are_one_wait_each() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device=HERE)
    assert waits(x.nonzero) == 1
    assert waits(lambda: x[x > 0]) == 1
    assert waits(lambda: torch.unique(x)) == 1


def test_many_steps_ahead_of_a_slow_channel() -> None:
    x = torch.zeros(2, dtype=torch.float64, device=HERE)

    def run() -> None:
        for number in range(3000):
            x.add_(number)

    assert waits(run) == 0
    assert x.tolist() == [sum(range(3000))] * 2


class Measures:
    """A step with four values, all computed before the first is read."""

    def __init__(self, device: str) -> None:
        self.x = torch.arange(12.0, device=device).reshape(3, 4)
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.loss, self.hits, self.norm = self.compute()

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        self.x = self.x.roll(1) * 1.01
        self.loss, self.hits, self.norm = self.x.exp().mean(), (self.x > 5).sum(), self.x.norm()
        self.total.add_(self.loss)
        return self.loss, self.hits, self.norm

    def __call__(self) -> list[object]:
        self.compute()
        return [self.loss.item(), int(self.hits), self.norm.cpu().item(), float(self.total), bool(self.hits)]


@pytest.fixture
def measures() -> Measures:
    made = Measures(HERE)
    for _ in range(3):
        made()
    return made


@pytest.mark.feature("Virtual devices: Read the values of a step by one wait")
def test_what_was_computed_before_the_first_value_is_read_comes_by_the_same_wait(measures: Measures) -> None:
    plain = Measures("cpu")
    for _ in range(3):
        plain()
    for _ in range(3):
        found: list[object] = []
        assert waits(lambda: found.extend(measures())) == 1  # noqa: B023
        assert found == plain()


def test_a_value_that_was_brought_along_counts_until_something_is_recorded(measures: Measures) -> None:
    loss, hits, norm = measures.compute()
    before = loss.item()
    assert waits(hits.item) == 0
    hits.add_(1000)
    assert waits(norm.item) == 1
    assert hits.item() > 1000
    assert measures.total.item() > before > 0
    loss, hits, norm = measures.compute()
    loss.item()
    norm.data.fill_(7)
    assert norm.item() == 7
    loss, hits, norm = measures.compute()
    loss.item()
    norm.copy_(torch.tensor(5.0))
    assert norm.item() == 5


def test_a_failure_after_the_first_value_is_raised_by_the_next(measures: Measures) -> None:
    loss, _, norm = measures.compute()
    loss.item()
    nn.functional.embedding(torch.tensor([9], device=HERE), torch.zeros(2, 2, device=HERE))
    with pytest.raises(onebox.OneboxError, match="index out of range"):
        norm.item()
    assert norm.item() > 0
    measures()
    nn.functional.embedding(torch.tensor([9], device=HERE), torch.zeros(2, 2, device=HERE))
    measures.compute()  # what is void
    with pytest.raises(onebox.OneboxError, match="index out of range"):
        torch.get_device_module("vgpu").synchronize(0)
    assert (torch.ones((), device=HERE) + 1).item() == 2
    kept = torch.ones(3, 4, device=HERE)
    measures.x, measures.total = kept, torch.zeros((), dtype=torch.float64, device=HERE)
    assert measures()[3] == pytest.approx(torch.e**1.01)


def test_values_that_are_freed_or_no_longer_read_are_not_brought_along(measures: Measures) -> None:
    queue = current_context().queues[0]
    _, hits, _ = measures.compute()
    measures.loss = measures.norm = hits
    del _
    assert waits(hits.item) == 1
    assert waits(measures.total.item) == 0
    for _ in range(3):
        measures.compute()[0].item()
    measures.compute()
    queue.flush()
    assert len(queue.native.take_expected()) == 1
    many = [measures.loss.exp() for _ in range(40)]
    for one in many[:2]:
        one.item()
    many += [measures.loss.exp() for _ in range(40)]
    queue.flush()
    assert len(queue.native.take_expected()) == 16
