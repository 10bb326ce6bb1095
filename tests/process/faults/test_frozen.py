"""Parameters that no step changes: in no snapshot, and back on a worker that was lost, as they were."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.errors import PoolError
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.pool import open_pool
from tests.process.faults.conftest import leaving_nothing

SIZE = 64
STEPS = 9

FROZEN_BYTES = (SIZE * SIZE, SIZE * SIZE * 8)
"""Of the weight of a layer, as it is and as integers; no other tensor has as many."""


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.down, self.up = nn.Linear(SIZE, 2, bias=False), nn.Linear(2, SIZE, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.base(inputs) + self.up(self.down(inputs)))


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(4)), nn.Linear(SIZE, 4)).double()
    onebox.quantize_frozen(model[:2], "int8", group=16)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, SIZE, generator=generator).double(), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def two_stages(names: tuple[str, ...], cut: int) -> Plan:
    first = Stage(segments=names[:cut], replicas=((0,),), shares=(1.0,))
    return Plan(stages=(first, Stage(segments=names[cut:], replicas=((1,),), shares=(1.0,))), micro_batch=4)


def pipelined(model: nn.Module) -> Plan:
    return two_stages(TracedModel(capture(model, functional.cross_entropy, batches()[0]), backward=True).segments, 6)


PLANS: dict[str, Callable[[nn.Module], Plan]] = {
    "stages": pipelined,
    "replicas": lambda model: Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=4),
}


MORE = (("stages", 1), ("replicas", 0), ("replicas", 1))


@pytest.fixture(autouse=True, scope="module")
def nothing_left(warm: None) -> Iterator[None]:
    """Fail if these tests leave something behind; a pool that heals is another one after each of them."""
    with leaving_nothing():
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    with open_pool("cpu*2", threads=1) as opened:
        yield opened


def trainer_on(pool: onebox.Pool, name: str, model: nn.Module) -> onebox.Trainer:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    recovery = onebox.Recovery(snapshot_every=4)
    plan = PLANS[name](model)
    return onebox.Trainer(model, functional.cross_entropy, optimizer, pool=pool, plan=plan, recovery=recovery)


def run(pool: onebox.Pool, name: str, before: Callable[[int, onebox.Trainer], None]) -> tuple[list[float], Any]:
    """Train; return losses and the state, with what is done before some steps."""
    model = adapted()
    with trainer_on(pool, name, model) as trainer:
        losses = []
        for number, batch in enumerate(batches()):
            before(number, trainer)
            losses.append(float(trainer.step(*batch)))
        return losses, trainer.tensors()


def kill(pool: onebox.Pool, worker: int) -> None:
    os.kill(pool.process_ids[worker], signal.SIGKILL)


def alone(before: Callable[[int, nn.Module], None] = lambda number, model: None) -> list[float]:
    """Return the losses of this process."""
    model = adapted()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for number, (inputs, targets) in enumerate(batches()):
        before(number, model)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "worker"), [("stages", 0), *MORE])
def test_a_lost_worker_gets_them_again_and_no_other(pool: onebox.Pool, name: str, worker: int) -> None:
    undisturbed, expected = run(pool, name, lambda number, trainer: None)
    assert undisturbed == pytest.approx(alone(), rel=0, abs=1e-10)
    sent = dict.fromkeys(range(2), 0)
    post = pool.post

    def counted(to: int, instructions: Any, frames: Any = (), **options: Any) -> Any:
        sent[to] += sum(memoryview(frame).nbytes in FROZEN_BYTES for frame in frames)
        return post(to, instructions, frames, **options)

    def before(number: int, trainer: onebox.Trainer) -> None:
        if number == 6:
            trainer.wait()
            pool.post = counted  # type: ignore[method-assign]
            kill(pool, worker)

    try:
        losses, found = run(pool, name, before)
    finally:
        del pool.post
    assert losses == undisturbed
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert sent == {worker: 4 if name == "replicas" else 2, 1 - worker: 0}


def test_a_snapshot_has_only_what_steps_change(pool: onebox.Pool) -> None:
    with trainer_on(pool, "stages", adapted()) as trainer:
        for batch in batches():
            trainer.step(*batch)
        trainer.wait()
        snapshots = trainer._run.snapshots
        assert snapshots is not None
        snapshots.wait(20)
        copies = snapshots._history.snapshot
    assert copies is not None
    trained = 8 * (4 * 2 * 2 * SIZE + 4 * SIZE + 4)
    assert 3 * trained <= copies.size_bytes < 3.1 * trained  # with the optimizer's two moments


@pytest.mark.parametrize("name", list(PLANS))
def test_one_that_the_user_changes_is_the_changed_one_after_a_loss(pool: onebox.Pool, name: str) -> None:
    """A snapshot is taken before the change, so that no step from before it is done again with what is changed."""

    def before(number: int, trainer: onebox.Trainer) -> None:
        if number == 5:
            trainer.pull()
            halve(trainer.model)
        if number == 7:
            kill(pool, 1)

    losses, _ = run(pool, name, before)
    expected = alone(lambda number, model: halve(model) if number == 5 else None)
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)


def test_a_loss_in_the_very_moment_of_such_a_change_is_final(pool: onebox.Pool) -> None:
    """Nobody has what a step before the change would have to be done again with."""

    def before(number: int, trainer: onebox.Trainer) -> None:
        if number == 5:
            trainer.pull()
            halve(trainer.model)
            kill(pool, 1)

    with pytest.raises(PoolError, match=r"the run cannot go on: model\.2\.base\.weight was changed by hand"):
        run(pool, "stages", before)


def test_a_change_that_the_workers_have_not_got_is_never_taken_for_what_they_had(pool: onebox.Pool) -> None:
    """The change is made without a pull, and a loss is noticed before anything could have refused it."""
    model = adapted()
    trainer = trainer_on(pool, "replicas", model)
    losses = [trainer.step(*batch) for batch in batches()[:3]]
    trainer.wait()
    halve(model)
    kill(pool, 1)
    with pytest.raises(PoolError, match=r"model\.2\.base\.weight was changed by hand"):
        trainer.memory()
        trainer.pull()
    assert all(float(loss) > 0 for loss in losses)
    with contextlib.suppress(PoolError):
        trainer.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_loss_while_they_move_to_other_workers(pool: onebox.Pool, worker: int) -> None:
    """None counts as present then, whether it had arrived or not."""

    def adopting(number: int, trainer: onebox.Trainer, *, blow: bool) -> None:
        if number == 4:
            names = trainer.plan.stages[0].segments + trainer.plan.stages[1].segments  # type: ignore[union-attr]
            trainer._run.adopt(two_stages(names, 9))  # type: ignore[union-attr]
            if blow:
                kill(pool, worker)

    undisturbed, expected = run(pool, "stages", functools.partial(adopting, blow=False))
    losses, found = run(pool, "stages", functools.partial(adopting, blow=True))
    assert losses == undisturbed
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_what_another_trainer_trains_is_in_snapshots(pool: onebox.Pool) -> None:
    """Two trainers of one model train different layers of it, in turn; a worker is lost in the turn of the second."""
    plain = disturbed = None
    for blow in (False, True):
        model = adapted()
        trained = [each for each in model.parameters() if each.requires_grad]
        first, second = trained[: len(trained) // 2], trained[len(trained) // 2 :]
        trainers = [
            onebox.Trainer(
                model,
                functional.cross_entropy,
                torch.optim.AdamW(part, lr=1e-2),
                pool=pool,
                plan=PLANS["replicas"](model),
                recovery=onebox.Recovery(snapshot_every=50),
            )
            for part in (first, second)
        ]
        losses = []
        for number, batch in enumerate(batches()):
            if number == 6 and blow:
                kill(pool, 1)
            losses.append(float(trainers[number // 3 % 2].step(*batch)))
        for trainer in trainers:
            trainer.close()
        plain, disturbed = (losses, disturbed) if not blow else (plain, losses)
    assert disturbed == plain


def test_pushing_a_model_does_not_put_them_into_snapshots(pool: onebox.Pool) -> None:
    model = adapted()
    with trainer_on(pool, "replicas", model) as trainer:
        trainer.step(*batches()[0])
        trainer.pull()
        trainer.push()
        state = trainer._run._remote  # type: ignore[union-attr]
        assert "model.2.base.weight" in state.constant
        halve(model)
        trainer.push()
        assert "model.2.base.weight" not in state.constant
        assert "model.3.base.weight" in state.constant


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("2.base").get_parameter("weight").mul_(0.5)
