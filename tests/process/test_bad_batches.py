"""Training with a bad batch: its step raises once and changes nothing, and the run ends as plain PyTorch without it."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.workload import index_ranges
from onebox.errors import DeviceMemoryError, OperatorError
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import ASYNC, Plan, Stage
from onebox.pool import Fault, open_pool
from tests.kit.late import train_late
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.stages import outcome, tensors_of
from tests.kit.trainer_arguments import grouped

GUARDED = True

WORDS, CLASSES, BAD = 7, 3, 2
"""Words, classes, and the step with the bad batch."""


class Net(nn.Module):
    """Words, batch norm, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.mix = nn.Linear(10, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.mix(self.words(x_BT).flatten(1)))))


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net().double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps for gradients that are rounding noise, as before batch norm, are small."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(WORDS, (8, 2), generator=generator), torch.randint(CLASSES, (8,), generator=generator))
        for _ in range(count)
    ]


def spoiled(batch: tuple[Tensor, Tensor], kind: str) -> tuple[Tensor, Tensor]:
    """Return a batch with one label or one word, of the last sample, that is out of range."""
    x_BT, y_B = batch[0].clone(), batch[1].clone()
    if kind == "label":
        y_B[-1] = CLASSES + 2
    elif kind == "word":
        x_BT[-1, 0] = WORDS + 2
    return x_BT, y_B


def layout(which: str) -> Plan:
    names = TracedModel(capture(net(), functional.cross_entropy, batches(1)[0]), backward=True).segments
    first, second = names[: len(names) // 2], names[len(names) // 2 :]

    def stages(*replicas: Sequence[int]) -> tuple[Stage, ...]:
        parts = (first, second) if len(replicas) > 1 else ((),)
        return tuple(
            Stage(segments=part, replicas=tuple((one,) for one in own), shares=(1.0,) * len(own))
            for part, own in zip(parts, replicas, strict=True)
        )

    match which:
        case "one device":
            return Plan(stages=stages((0,)), micro_batch=4)
        case "replicas":
            return Plan(stages=stages((0, 1)), micro_batch=4)
        case "stages":
            return Plan(stages=stages((0,), (1,)), micro_batch=4, schedule="1f1b")
        case "both":
            return Plan(stages=stages((0, 1), (2,)), micro_batch=4, schedule="1f1b")
        case "shared out":
            return Plan(stages=stages((0, 1)), micro_batch=4, optimizer="sharded")
        case "late":
            return Plan(stages=stages((0,), (1,)), micro_batch=4, schedule=ASYNC)
        case "on the host":
            return Plan(stages=stages((0, 1)), micro_batch=4, update="host")
        case "split":
            return Plan(stages=(Stage(segments=(), replicas=((0, 1),), shares=(1.0,)),), micro_batch=4)
    raise AssertionError(which)


def expected(given: Sequence[tuple[Tensor, Tensor]], **options: Any) -> Outcome:
    model = net()
    return train(model, functional.cross_entropy, adamw(model), given, lambda size: [4] * (size // 4), **options)


def run(trainer: onebox.Trainer, kind: str, *, refused: bool = False) -> tuple[Outcome, OperatorError]:
    """Train with a bad batch in the middle; return the outcome and the error."""
    losses, caught = [], []
    for step, batch in enumerate(batches()):
        if step == BAD:
            with pytest.raises(OperatorError) as raised:
                loss = trainer.step(*spoiled(batch, kind))
                assert not refused
                float(loss)
            caught.append(raised.value)
        losses.append(trainer.step(*batch))
        float(losses[-1])
    return outcome(trainer, losses), caught[0]


def trained(pool: onebox.Pool, which: str, kind: str, *, refused: bool = False, **more: Any) -> OperatorError:
    """Train with a bad batch, compare with plain PyTorch without it, and return the error."""
    plan, model = layout(which), net()
    optimizer = adamw(model)
    arguments = grouped(pool=pool, plan=plan, check_every=1, **more)
    with onebox.Trainer(model, functional.cross_entropy, optimizer, **arguments) as trainer:
        found, error = run(trainer, kind, refused=refused)
        assert trainer.steps_done == len(batches())
        assert len(trainer.recoveries) == 0
        trainer.evaluate(batches(1))
        trainer.pull()
    wanted = expected(batches(), max_norm=more.get("clip_grad_norm"))
    assert_same(found, wanted)
    torch.testing.assert_close(dict(model.state_dict()), wanted.tensors, rtol=0, atol=1e-10)
    assert error.kept
    return error


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bad batches come to the workers, as large ones do."""
    monkeypatch.setattr(index_ranges, "MOST_ELEMENTS", 0)


@pytest.mark.parametrize("kind", ["label", "word"])
def test_a_small_bad_batch_is_refused_at_its_line(kind: str, pools: Pools) -> None:
    error = trained(pools(3), "stages", kind, refused=True)
    assert error.cause == "IndexError"
    assert "nothing has been sent" in str(error)


@pytest.mark.feature("Trainer: Lose one step to a bad batch or a NaN")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("which", ["one device", "replicas", "stages", "both", "shared out", "on the host", "split"])
@pytest.mark.parametrize("kind", ["label", "word"])
def test_a_bad_batch_costs_one_step(kind: str, which: str, pools: Pools) -> None:
    error = trained(pools(3), which, kind)
    assert error.cause == "IndexError"
    assert "embedding" in str(error) if kind == "word" else "a target of the batch is 5" in str(error)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "more", [{"recover": True, "snapshot_every": 1}, {"overlap": True}, {"clip_grad_norm": 0.5}], ids=str
)
def test_so_with_recovery_and_overlap(more: dict[str, Any], pools: Pools) -> None:
    trained(pools(3), "shared out", "label", **more)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("which", "delay"), [("late", "none"), ("late", "both"), ("shared out", "predict")])
@pytest.mark.parametrize("kind", ["label", "word"])
def test_so_with_late_gradients(kind: str, which: str, delay: str, pools: Pools) -> None:
    """The step after the bad one reads the weights that it would have read after it."""
    plan, model, given = layout(which), net(), batches()
    optimizer = adamw(model)
    arguments = grouped(pool=pools(3), plan=plan, check_every=1, staleness=1, delay=delay, warm_up=0)
    with onebox.Trainer(model, functional.cross_entropy, optimizer, **arguments) as trainer:
        found, error = run(trainer, kind)
        trainer.pull()
    reference, skipped = net(), [*given[:BAD], given[BAD], *given[BAD:]]
    wanted = train_late(
        reference,
        functional.cross_entropy,
        adamw(reference),
        skipped,
        lambda size: [4] * (size // 4),
        delay=delay,
        warm_up=0,
        skipped=[BAD],
    )
    assert_same(found, wanted)
    assert error.kept


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        ("one device", Fault("memory", "call", 20)),
        ("replicas", Fault("memory", "call", 14)),
        ("replicas", Fault("memory", "reduce", 3)),
        ("stages", Fault("memory", "call", 20)),
        ("stages", Fault("memory", "receive", 5)),
        ("stages", Fault("memory", "send", 3)),
        ("shared out", Fault("memory", "call", 21)),
        ("split", Fault("memory", "call", 25)),
        ("split", Fault("memory", "gather", 3)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.instruction,
)
def test_a_step_without_memory_can_be_repeated(which: str, fault: Fault) -> None:
    model, failures, losses = net(), 0, []
    last = 0 if which == "one device" else 1
    with (
        open_pool(f"cpu*{last + 1}", threads=1, faults={last: (fault,)}) as pool,
        onebox.Trainer(
            model, functional.cross_entropy, adamw(model), **grouped(pool=pool, plan=layout(which), check_every=1)
        ) as trainer,
    ):
        for batch in batches():
            try:
                losses.append(float(trainer.step(*batch)))
            except DeviceMemoryError as error:
                assert error.kept
                failures += 1
                losses.append(float(trainer.step(*batch)))
        tensors = tensors_of(trainer)
    assert failures == 1
    assert_same(Outcome(losses=losses, norms=[], tensors=tensors), expected(batches()))


@pytest.mark.parametrize("which", ["one device", "late"])
def test_a_recovery_leaves_out_what_was_left_out_before(which: str) -> None:
    """The batch could be trained on in the second attempt, but the script has been told that it was not."""
    late = which == "late"
    faults = {0: (Fault("memory", "call", 20), Fault("memory", "optimizerstep", 4))}
    model, failed = net(), list[int]()
    arguments = grouped(plan=layout(which), recover=True, snapshot_every=100)
    if late:
        arguments |= grouped(staleness=1, delay="none", warm_up=0)
    with (
        open_pool("cpu*2" if late else "cpu", threads=1, faults=faults) as pool,
        onebox.Trainer(model, functional.cross_entropy, adamw(model), pool=pool, **arguments) as trainer,
    ):
        for batch in batches(6):
            try:
                float(trainer.step(*batch))
            except DeviceMemoryError as error:
                assert error.kept
                failed += error.steps
        trainer.pull()
        assert len(trainer.recoveries) == 1
        assert len(failed) == 1
        assert trainer.steps_done == 5
    reference, given = net(), batches(6)
    if late:
        train_late(
            reference, functional.cross_entropy, adamw(reference), given, lambda size: [4] * (size // 4), skipped=failed
        )
    else:
        kept = [batch for step, batch in enumerate(given) if step not in failed]
        train(reference, functional.cross_entropy, adamw(reference), kept, lambda size: [4] * (size // 4))
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()), rtol=0, atol=1e-10)


@pytest.mark.feature("Trainer: Lose one step to a bad batch or a NaN")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_nan_under_anomaly_detection_costs_one_step_and_is_trained_on_without(stages: int, pools: Pools) -> None:
    x_B, y_B = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None], torch.zeros(8, 1, dtype=torch.float64)
    bad_B = x_B.clone()
    bad_B[-1] = torch.nan
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    reference = copy.deepcopy(model)
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=4)
    if stages == 2:
        names = TracedModel(capture(model, functional.mse_loss, (x_B, y_B)), backward=True).segments
        parts = (names[:1], (0,)), (names[1:], (1,))
        plan = Plan(
            stages=tuple(Stage(segments=part, replicas=(own,), shares=(1.0,)) for part, own in parts),
            micro_batch=4,
            schedule="1f1b",
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(model, functional.mse_loss, optimizer, pool=pools(2), plan=plan) as trainer:
        with torch.autograd.set_detect_anomaly(True):
            float(trainer.step(x_B, y_B))
            with pytest.raises(OperatorError, match="returned nan values") as caught:
                float(trainer.step(bad_B, y_B))
            assert caught.value.kept
            float(trainer.step(x_B, y_B))
        trainer.pull()
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        assert float(trainer.step(bad_B, y_B)) != 0, "a nan, as in PyTorch"
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        functional.mse_loss(reference(x_B), y_B).backward()
        optimizer.step()
    torch.testing.assert_close(trained, [parameter.detach() for parameter in reference.parameters()])


@pytest.mark.parametrize(
    ("worker", "instruction", "counts", "failed"),
    [
        (0, "call", (20, 33, 34, 49), [(1,), (4, 5), (7,)]),  # accumulate; forward and a late backward; in the drain
        (0, "receive", (5, 8), [(0,), (2,)]),
    ],
)
def test_late_work_without_memory_costs_the_step_that_it_is_of(
    worker: int, instruction: str, counts: Sequence[int], failed: list[tuple[int, ...]]
) -> None:
    model, given, errors = net(), batches(8), list[DeviceMemoryError]()
    faults = {worker: tuple(Fault("memory", instruction, count) for count in counts)}
    arguments = grouped(plan=layout("late"), staleness=1, delay="none", warm_up=0)
    with (
        open_pool("cpu*2", threads=1, faults=faults) as pool,
        onebox.Trainer(model, functional.cross_entropy, adamw(model), pool=pool, **arguments) as trainer,
    ):
        for call in [*(functools.partial(trainer.step, *batch) for batch in given), trainer.pull]:
            try:
                float(call() or 0.0)
            except DeviceMemoryError as error:
                assert error.kept
                errors.append(error)
        trainer.pull()
        assert trainer.steps_done == len(given) - sum(map(len, failed))
    assert [error.steps for error in errors] == failed
    assert "Left out: step" in str(errors[0].__notes__)
    reference = net()
    skipped = [step for steps in failed for step in steps]
    train_late(
        reference, functional.cross_entropy, adamw(reference), given, lambda size: [4] * (size // 4), skipped=skipped
    )
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("recover", "failures"), [(False, 1), (True, 1), (True, 2)])
def test_an_update_that_fails_is_repeated_from_a_snapshot_once(recover: bool, failures: int, tmp_path: Path) -> None:
    faults = {0: tuple(Fault("memory", "optimizerstep", 3 + count) for count in range(failures))}
    model, ends, losses = net(), not recover or failures > 1, []
    arguments = grouped(plan=layout("replicas"), recover=recover, **({"snapshot_every": 2} if recover else {}))
    with (
        open_pool("cpu*2", threads=1, faults=faults) as pool,
        onebox.Trainer(model, functional.cross_entropy, adamw(model), pool=pool, **arguments) as trainer,
    ):
        saved = trainer.save(tmp_path)
        for number, batch in enumerate(batches()):
            with pytest.raises(DeviceMemoryError) if ends and number >= BAD else contextlib.nullcontext() as raised:
                losses.append(float(trainer.step(*batch)))
        if raised is not None:
            assert not raised.value.kept
            assert f"cannot go on: resume from the last checkpoint, {saved}" in str(raised.value)
            with pytest.raises(DeviceMemoryError):
                trainer.pull()
            return
        assert "an operator failed" in str(trainer.recoveries[0])
        tensors = tensors_of(trainer)
    assert_same(Outcome(losses=losses, norms=[], tensors=tensors), expected(batches()))


@pytest.mark.usefixtures("unchecked")
def test_a_run_that_is_resumed_after_a_bad_batch_draws_the_same(pools: Pools, tmp_path: Path) -> None:
    given = [spoiled(batch, "label") if step == BAD else batch for step, batch in enumerate(batches())]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Embedding(WORDS, 5), nn.Flatten(), nn.Dropout(0.5), nn.Linear(10, CLASSES))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def go(trainer: onebox.Trainer, some: Sequence[tuple[Tensor, Tensor]]) -> None:
        for batch in some:
            with contextlib.suppress(OperatorError):
                float(trainer.step(*batch))

    (model, optimizer), (other, others) = made(), made()
    with onebox.Trainer(model, functional.cross_entropy, optimizer, pool=pools(2)) as trainer:
        go(trainer, given[: BAD + 1])
        trainer.save(tmp_path)
        go(trainer, given[BAD + 1 :])
        trainer.pull()
    with onebox.Trainer.resume(tmp_path, other, functional.cross_entropy, others, pool=pools(2)) as trainer:
        assert trainer.steps_done == BAD
        go(trainer, given[BAD + 1 :])
        trainer.pull()
        assert trainer.steps_done == len(given) - 1
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


class Mix(nn.Module):
    """A layer that looks something up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(WORDS, 6))
        self.change = nn.Linear(6, 6)

    def forward(self, x_BD: Tensor, index_B: Tensor) -> Tensor:
        changed_BD = torch.tanh(self.change(x_BD))
        return changed_BD + self.table[index_B]


class Block(nn.Module):
    """A layer of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x_BD: Tensor, index_B: Tensor) -> Tensor:
        return x_BD + self.mix(x_BD, index_B)


class Mixed(nn.Module):
    """Equal layers, each with a column of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x_BD: Tensor, index_BN: Tensor) -> Tensor:
        for block, index_B in zip(self.blocks, index_BN.unbind(1), strict=True):
            x_BD = block(x_BD, index_B)
        return self.out(x_BD)


@pytest.mark.feature("Errors: Name layer and line of a failed operator")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("cut", [None, 2])
def test_the_error_names_the_layer_and_the_line_of_an_operator(cut: int | None, pools: Pools) -> None:
    """The layers are equal, and so are their operators."""
    model = Mixed()
    good = {"x_BD": torch.zeros(8, 6), "index_BN": torch.zeros(8, 3, dtype=torch.long)}
    y_B, bad = torch.zeros(8, dtype=torch.long), {**good, "index_BN": torch.zeros(8, 3, dtype=torch.long)}
    bad["index_BN"][-1, 1] = WORDS + 2
    plan: Plan | onebox.DataParallel = onebox.DataParallel(micro_batch=4)
    if cut is not None:
        names = TracedModel(capture(model, functional.cross_entropy, (good, y_B)), backward=True).segments
        parts = names[:cut], names[cut:]
        stages = (Stage(segments=part, replicas=((place,),), shares=(1.0,)) for place, part in enumerate(parts))
        plan = Plan(stages=tuple(stages), micro_batch=4, schedule="1f1b")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(model, functional.cross_entropy, optimizer, pool=pools(2), plan=plan) as trainer:
        float(trainer.step(good, y_B))
        for call in (lambda: float(trainer.step(bad, y_B)), lambda: trainer.evaluate([(bad, y_B)])):
            with pytest.raises(OperatorError) as raised:
                call()
            error, line = raised.value, "return changed_BD + self.table[index_B]"
            assert error.layer == "model.blocks.1.mix"
            assert error.where is not None
            assert f"called at {error.where}: {line} (layer {error.layer})" in str(error)
            file, _, number = error.where.rpartition(":")
            assert linecache.getline(file, int(number)).strip() == line
        trainer.pull()


@pytest.mark.usefixtures("unchecked")
def test_an_unread_failure_is_raised_by_the_next_call_that_waits(pools: Pools) -> None:
    model = net()
    optimizer = adamw(model)
    with onebox.Trainer(model, functional.cross_entropy, optimizer, pool=pools(2)) as trainer:
        given = batches()
        for step, batch in enumerate(given[: BAD + 1]):
            bad = trainer.step(*(spoiled(batch, "label") if step == BAD else batch))
        for again in ("the trainer can go on", ""):
            with pytest.raises(OperatorError, match="the trainer can go on") if again else contextlib.nullcontext():
                trainer.pull()
        with pytest.raises(OperatorError):
            float(bad)
        for batch in given[BAD + 1 :]:
            trainer.step(*batch)
        trainer.pull()
    wanted = expected(given[:BAD] + given[BAD + 1 :])
    torch.testing.assert_close(dict(model.state_dict()), wanted.tensors, rtol=0, atol=1e-10)
