"""Steps of one to three replicas against plain PyTorch: the same parameters, buffers and losses, in float64.

The models here are those that are easy to get wrong; ``tests/process`` trains the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.config import steps_in_flight
from onebox.errors import CaptureError, UsageError
from onebox.plan import Plan
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.slow_channel import slow_channel
from tests.kit.stages import outcome, tensors_of
from tests.kit.trainer_arguments import grouped
from tests.unit.engine.conftest import Pools
from tests.unit.house import OpenPool

BATCHES = [8, 5, 8, 2]


class Normed(nn.Module):
    """Batch norm before and behind, of two momenta, one without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(4, momentum=0.3),
            nn.Linear(4, 6),
            nn.BatchNorm1d(6, affine=False),
            nn.Tanh(),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Added(nn.Module):
    """Two parameters whose gradients are one and the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.one + self.other)


class Level(nn.Module):
    """A parameter whose gradient is the weight of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.level


class Counting(nn.Module):
    """Buffers that count, sum, average, and are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("grown", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += x.sum(0)
        self.mean.mul_(0.75).add_(x.mean(0), alpha=0.25)
        self.seen += (x > 0).sum()
        self.last.copy_(x[-1])
        self.grown.mul_(1.5)
        return self.linear(x)


class Scaled(nn.Module):
    """Reads a buffer and changes it: backward needs what it was when forward read it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.scale.clone()
        self.scale.mul_(0.5)
        return y


class Frozen(nn.Module):
    """A frozen layer, a layer that nothing reads, a parameter of no elements, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.idle = nn.Linear(2, 2)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.second = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.second.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.nothing])
        return self.head(torch.tanh(self.again(torch.tanh(self.second(self.first(x))))))


class Halved(nn.Module):
    """Parameters of two types, so that gradients travel in buckets of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 5)
        self.narrow = nn.Linear(5, 3).to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Halved:
        super().to(*args, **kwargs)
        self.narrow.to(torch.float32)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).tanh().to(torch.float32)).to(torch.float64)


def mse_and_level(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs[0], targets) + outputs[1]


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "normed": (Normed, functional.mse_loss),
    "added": (Added, functional.mse_loss),
    "level": (Level, mse_and_level),
    "counting": (Counting, functional.mse_loss),
    "frozen": (Frozen, functional.mse_loss),
    "halved": (Halved, functional.mse_loss),
}


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind().to(torch.float64)


def batches(sizes: list[int] = BATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 4, generator=generator).double(), torch.randn(n, 3, generator=generator).double())
        for n in sizes
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def plan(workers: int, micro_batch: int | None, shares: tuple[float, ...] | None = None) -> Callable[[int], list[int]]:
    made = Plan.data_parallel(range(workers), shares or (1.0,) * workers, micro_batch=micro_batch)
    return lambda size: [part.size for part in made.micro_batches(size)]


@pytest.mark.parametrize(("workers", "sync"), [(1, "workers"), (2, "workers"), (3, "client")])
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_replicas(name: str, workers: int, sync: Any, pools: Pools) -> None:
    kind, loss = MODELS[name]
    sizes = [size for size in BATCHES if size > 2] if name == "normed" else BATCHES  # one sample has no variance
    model, expected = build(kind), build(kind)
    micro_batch = 4 if name == "normed" else 3
    with onebox.Trainer(
        model, loss, sgd(model), pool=pools(workers), plan=onebox.DataParallel(micro_batch=micro_batch, sync=sync)
    ) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in batches([8, 8, 6] if name == "normed" else sizes)])
    data = batches([8, 8, 6] if name == "normed" else sizes)
    reference = train(expected, loss, sgd(expected), data, plan(workers, micro_batch))
    assert_same(found, reference, 1e-6 if name == "halved" else 1e-12)


@pytest.mark.parametrize("shares", [(3.0, 1.0, 2.0), (1.0, 0.0, 1.0)])
def test_uneven_shares_and_a_device_without_any(shares: tuple[float, ...], pools: Pools) -> None:
    model, expected = build(Counting), build(Counting)
    with onebox.Trainer(
        model, functional.mse_loss, sgd(model), pool=pools(3), plan=onebox.DataParallel(shares=shares)
    ) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in batches()])
    reference = train(expected, functional.mse_loss, sgd(expected), batches(), plan(3, None, shares))
    assert_same(found, reference, 1e-12)


def test_clipping_and_a_scheduler_and_groups(pools: Pools) -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": model.linear.weight}, {"params": model.linear.bias, "lr": 0.05, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.02)

    found: list[Outcome] = []
    model = build(Counting)
    ours = optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, 0.7)
    trainer = onebox.Trainer(
        model, functional.mse_loss, ours, pool=pools(2), plan=onebox.DataParallel(micro_batch=2), clip_grad_norm=0.5
    )
    losses, norms = [], []
    with trainer:
        for batch in batches():
            step = trainer.step(*batch)
            losses.append(float(step))
            norms.append(step.gradient_norm)
            scheduler.step()
        tensors = tensors_of(trainer)
    found = Outcome(losses=losses, norms=norms, tensors=tensors)  # type: ignore[assignment, arg-type]
    expected = build(Counting)
    theirs = optimizer(expected)
    theirs_scheduler = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.7)
    reference = train(
        expected, functional.mse_loss, theirs, batches(), plan(2, 2), max_norm=0.5, after_step=theirs_scheduler.step
    )
    assert_same(found, reference, 1e-12)  # type: ignore[arg-type]
    assert norms == pytest.approx(reference.norms, rel=1e-12)


def test_backward_reads_a_buffer_as_it_was_in_forward(pools: Pools) -> None:
    model, expected = build(Scaled), build(Scaled)
    with onebox.Trainer(
        model, functional.mse_loss, sgd(model), pool=pools(1), plan=onebox.DataParallel(micro_batch=3)
    ) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in batches()])
    assert_same(found, train(expected, functional.mse_loss, sgd(expected), batches(), plan(1, 3)), 1e-12)


def test_a_buffer_that_replicas_cannot_share_is_named(pools: Pools) -> None:
    model = build(Scaled)
    trainer = onebox.Trainer(
        model, functional.mse_loss, sgd(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=3)
    )
    with trainer, pytest.raises(CaptureError, match=r"model\.scale.*one device"):
        trainer.step(*batches()[0])


def test_replicas_have_the_same_bits(pools: Pools) -> None:
    model = build(Normed)
    options = {"pool": pools(3), "shares": (3.0, 1.0, 2.0), "check_every": 1}
    with onebox.Trainer(model, functional.mse_loss, sgd(model), **grouped(**options)) as trainer:
        outcome(trainer, [trainer.step(*batch) for batch in batches([12, 12])])


def test_two_runs_have_the_same_bits(pools: Pools) -> None:
    def run() -> dict[str, Tensor]:
        model = build(Normed)
        with onebox.Trainer(
            model, functional.mse_loss, sgd(model), pool=pools(3), plan=onebox.DataParallel(micro_batch=4)
        ) as trainer:
            return outcome(trainer, [trainer.step(*batch) for batch in batches([12, 12, 8])]).tensors

    one, other = run(), run()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_random_operators_follow_the_micro_batch_and_not_the_device(pools: Pools) -> None:
    """One worker, since these share one generator; ``tests/process`` does the same over several."""

    def run(micro_batch: int, seed: int) -> Outcome:
        model = build(lambda: nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3)))
        options = {"pool": pools(1), "micro_batch": micro_batch, "seed": seed}
        with onebox.Trainer(model, functional.mse_loss, sgd(model), **grouped(**options)) as trainer:
            return outcome(trainer, [trainer.step(*batch) for batch in batches([8, 8])])

    assert run(4, 1).losses == run(4, 1).losses
    assert run(4, 1).losses != run(4, 2).losses
    assert run(4, 1).losses != run(2, 1).losses


def test_weights_come_back_into_the_model(pools: Pools) -> None:
    model, expected = build(Frozen), build(Frozen)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with onebox.Trainer(
        model, functional.mse_loss, sgd(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=3)
    ) as trainer:
        for batch in batches():
            trainer.step(*batch)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters()), "not before pull"
        trainer.pull()
    train(expected, functional.mse_loss, sgd(expected), batches(), plan(2, 3))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-12)
    assert model.again.weight is model.second.weight


@pytest.mark.parametrize("workers", [1, 3])
def test_evaluation_is_that_of_the_model_in_eval_mode_and_changes_nothing(workers: int, pools: Pools) -> None:
    model = build(Normed)
    metrics = {"mae": functional.l1_loss}
    options = {"pool": pools(workers), "micro_batch": 4, "metrics": metrics}
    with onebox.Trainer(model, functional.mse_loss, sgd(model), **grouped(**options)) as trainer:
        trainer.step(*batches([8])[0])
        before = trainer.tensors()
        found = trainer.evaluate(batches([7, 2, 1]))
        assert all(torch.equal(before[name], tensor) for name, tensor in trainer.tensors().items())
        trainer.pull()
    model.eval().requires_grad_(False)
    data = batches([7, 2, 1])
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    assert found.samples == 10
    assert found.loss == pytest.approx(float(functional.mse_loss(model(x), y)), rel=1e-12)
    assert found.metrics["mae"] == pytest.approx(float(functional.l1_loss(model(x), y)), rel=1e-12)


# ---- what stays on the workers


@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_leaves_nothing_behind_and_closing_frees_all(workers: int, pools: Pools) -> None:
    pool = pools(workers)
    stores = [process.server.machine for process in pool._handles]  # type: ignore[attr-defined]

    def settled() -> list[tuple[int, int, int]]:
        """What the workers hold when they have done all that was sent to them, also by the tests before this one."""
        for worker in range(workers):
            pool.post(worker, [], answer=True).result(30)
        return [(machine.store.used_bytes, len(machine.store), len(machine._definitions)) for machine in stores]

    before = settled()
    model = build(Normed)
    with onebox.Trainer(
        model, functional.mse_loss, sgd(model), pool=pool, plan=onebox.DataParallel(micro_batch=4)
    ) as trainer:
        held = []
        for batch in batches([12, 8, 12, 8, 12, 8]):
            float(trainer.step(*batch))
            trainer.evaluate([batch])
            held.append(settled())
        assert held[-1] == held[-2] == held[2]
        assert [memory.used_bytes for memory in trainer.memory()] == [used for used, *_ in held[-1]]
        assert all(memory.peak_bytes > memory.used_bytes for memory in trainer.memory())
    assert settled() == before


def test_the_state_of_a_step_is_small_beside_its_messages(pools: Pools) -> None:
    """A step is one message a worker: data, and a few dozen bytes."""
    pool = pools(1)
    posted: list[int] = []
    original = pool._client_loop.post

    def post(worker: int, instructions: Any, frames: Any = (), *, answer: bool = False) -> Any:
        posted.append(len(instructions))
        return original(worker, instructions, frames, answer=answer)

    model = build(Counting)
    with onebox.Trainer(model, functional.mse_loss, sgd(model), pool=pool) as trainer:
        float(trainer.step(*batches([8])[0]))
        pool._client_loop.post = post  # type: ignore[method-assign]
        try:
            float(trainer.step(*batches([8])[0]))
        finally:
            pool._client_loop.post = original  # type: ignore[method-assign]
    assert posted == [2]


def test_at_most_so_many_steps_are_under_way(pools: Pools) -> None:
    model = build(Counting)
    with onebox.Trainer(
        model, functional.mse_loss, sgd(model), pool=pools(1), engine=onebox.Engine(in_flight=2)
    ) as trainer:
        losses = [trainer.step(*batch) for batch in batches([8] * 6)]
        assert all(loss.done for loss in losses[:-2])
        trainer.wait()
        assert all(loss.done for loss in losses)


@pytest.mark.feature("Trainer: Read a loss later")
def test_steps_are_under_way_while_those_before_travel(open_pool: OpenPool) -> None:
    """Several steps fit into a round trip: the loop, which reads nothing, is not held up for each."""
    model = build(Counting)
    with slow_channel(latency_s=0.3), open_pool(1) as pool:
        pool.round_trip_s = 0.6
        trainer = onebox.Trainer(model, functional.mse_loss, sgd(model), pool=pool)
        first, *others = (trainer.step(*batch) for batch in batches([8] * steps_in_flight(pool.round_trip_s)))
        assert len(others) == 7
        assert not first.done, "all have been posted before the first could be answered"
        trainer.wait()
        assert all(loss.done for loss in others)
        trainer.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, "fp32"),
        ({"clip_grad_norm": 0.0}, "positive"),
        ({"clip_grad_norm": float("nan")}, "positive"),
        ({"seed": 2**70}, "seed"),
        ({"plan": 5}, "'auto', and onebox.DataParallel"),
        ({"plan": Plan.data_parallel([1], [1.0])}, "uses device 1, but the pool has 1"),
        ({"stale": True}, r"StaleGradients\(\.\.\.\), and None"),
        ({"recovery": True}, r"onebox.Recovery\(\.\.\.\)"),
        ({"staging": None}, r"onebox.Staging\(\.\.\.\)"),
        ({"engine": {}}, r"onebox.Engine\(\.\.\.\)"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], message: str, pools: Pools) -> None:
    model = build(Counting)
    with pytest.raises(UsageError, match=message):
        onebox.Trainer(model, functional.mse_loss, sgd(model), pool=pools(1), **arguments)


def test_shares_of_other_devices(pools: Pools) -> None:
    model = build(Counting)
    asked = onebox.DataParallel(shares=(1.0,))
    trainer = onebox.Trainer(model, functional.mse_loss, sgd(model), pool=pools(2), plan=asked)
    with trainer, pytest.raises(UsageError, match="shares"):
        trainer.step(*batches()[0])


def test_measured_shares_train_too(pools: Pools) -> None:
    model = build(Counting)
    trainer = onebox.Trainer(
        model,
        functional.mse_loss,
        sgd(model),
        pool=pools(2),
        plan=onebox.DataParallel(micro_batch=1, shares="measured"),
    )
    with trainer:
        float(trainer.step(*batches()[0]))
        assert trainer.plan is not None
        (stage,) = trainer.plan.stages
        assert sum(stage.shares) == pytest.approx(1)
        assert min(stage.shares) > 0


def test_a_closed_trainer_says_so(pools: Pools) -> None:
    model = build(Counting)
    trainer = onebox.Trainer(model, functional.mse_loss, sgd(model), pool=pools(1))
    trainer.close()
    trainer.close()
    for call in (lambda: trainer.step(*batches()[0]), trainer.pull, lambda: trainer.evaluate([]), trainer.memory):
        with pytest.raises(UsageError, match="closed"):
            call()
