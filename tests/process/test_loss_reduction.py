"""Losses that are no mean over samples: exact where the user says what they are, refused where they are not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.workload import captures
from onebox.errors import UsageError
from onebox.plan import Plan, Stage
from tests.kit.pools import Pools
from tests.kit.trainer_arguments import grouped

CLASSES = 4
FEATURES = 5
IGNORED = -100
WEIGHTS = torch.tensor([1.0, 5.0, 0.3, 2.0], dtype=torch.float64)

Batches = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[Any, Any], Tensor]


def mlp(*more: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), *more, nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


class Language(nn.Module):
    """Predicts a class for each token, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 6)
        self.mixed = nn.Linear(6, 8)
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mixed(self.embedding(tokens_BT))))  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(
    sizes: Sequence[int], ignored: Sequence[Sequence[int]] = (), *, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and classes; of each batch the targets at some places are ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, size in enumerate(sizes):
        x_BD = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        y_B = torch.randint(CLASSES, (size,), generator=generator)
        y_B[list(ignored[number]) if number < len(ignored) else []] = IGNORED
        found.append((x_BD, y_B))
    return found


def texts(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and what follows them; each is as long as it is, and the rest is ignored."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        tokens_BT = torch.randint(CLASSES, (size, 7), generator=generator)
        targets_BT = torch.randint(CLASSES, (size, 7), generator=generator)
        lengths_B = torch.randint(0, 8, (size,), generator=generator)
        lengths_B[0] = 3
        targets_BT[torch.arange(7)[None] >= lengths_B[:, None]] = IGNORED
        found.append((tokens_BT, targets_BT))
    return found


def plain(model: nn.Module, loss: Loss, data: Batches) -> list[float]:
    """Train with whole batches, and return the losses."""
    optimizer, found = sgd(model), []
    for inputs, targets in data:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def weighted_ce(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight=WEIGHTS)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.1 * functional.cross_entropy(outputs, targets, reduction="sum")


def by_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != IGNORED).to(outputs.dtype)
    each = functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def count(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


def class_weights(targets: Tensor) -> Tensor:
    return WEIGHTS[targets[targets != IGNORED]].sum()


@dataclass(frozen=True, kw_only=True)
class Case:
    model: Callable[[], nn.Module] = mlp
    loss: Loss
    reduction: Any
    data: Batches


SIZES = [10, 10, 7, 10]
CASES = {
    "class weights": Case(loss=weighted_ce, reduction=onebox.Weighted(class_weights), data=batches(SIZES)),
    "class weights of a module": Case(
        loss=nn.CrossEntropyLoss(weight=WEIGHTS), reduction=onebox.Weighted(class_weights), data=batches(SIZES)
    ),
    "sum": Case(loss=summed, reduction="sum", data=batches(SIZES)),
    "ignored": Case(
        loss=functional.cross_entropy, reduction=onebox.Weighted(count), data=batches(SIZES, [[0], [], [5], [3, 9]])
    ),
    "a share of ignored alone": Case(
        loss=functional.cross_entropy,
        reduction=onebox.Weighted(count),
        data=batches(SIZES, [[0, 1, 2, 3], [], [3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]),
    ),
    "tokens": Case(model=Language, loss=by_token, reduction=onebox.Weighted(count), data=texts(SIZES)),
    "masked": Case(loss=masked, reduction=onebox.Weighted(count), data=batches(SIZES, [[0, 1, 2, 3], [], [6]])),
}


WAYS: dict[str, dict[str, Any]] = {
    "unequal shares": {"shares": [0.3, 0.7]},
    "micro-batches": {"micro_batch": 2},
    "overlap": {"micro_batch": 3, "overlap": True},
    "at the client": {"sync": "client", "micro_batch": 3},
}


def assert_equal(model: nn.Module, losses: Sequence[float], case: Case) -> nn.Module:
    """Compare a run with plain PyTorch on whole batches, and return the model that this has trained."""
    expected = case.model()
    assert losses == pytest.approx(plain(expected, case.loss, case.data), abs=1e-10)
    for (name, found), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10), name
    return expected


def all_at_once(model: nn.Module, case: Case) -> float:
    inputs, targets = (torch.cat(each) for each in zip(*case.data, strict=True))
    with torch.no_grad():
        return case.loss(model(inputs), targets).item()


@pytest.mark.feature("Trainer: Say what a loss is, if it is no mean")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_whole_batch(name: str, way: str, pools: Pools) -> None:
    case = CASES[name]
    model = case.model()
    options = {**WAYS[way], "loss_reduction": case.reduction}
    with onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pools(2), **options)) as trainer:
        losses = [trainer.step(*batch) for batch in case.data]
        losses = [loss.item() for loss in losses]
        evaluation = trainer.evaluate(case.data)
        trainer.pull()
    expected = assert_equal(model, losses, case)
    assert evaluation.loss == pytest.approx(all_at_once(expected, case), abs=1e-10)


def pipeline(names: Sequence[str], schedule: str = "1f1b", micro_batch: int = 2) -> Plan:
    half = (len(names) + 1) // 2
    stages = (
        Stage(replicas=((0,),), segments=tuple(names[:half]), shares=(1.0,)),
        Stage(replicas=((1,),), segments=tuple(names[half:]), shares=(1.0,)),
    )
    return Plan(stages=stages, micro_batch=micro_batch, schedule=schedule)  # type: ignore[arg-type]


def segments(model: nn.Module, case: Case, pool: Any) -> Sequence[str]:
    with onebox.Trainer(model, case.loss, sgd(model), pool=pool) as trainer:
        from onebox.engine.workload.batch import as_batch

        return trainer.captures.segments(as_batch(*case.data[0]), 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("name", ["class weights", "sum", "a share of ignored alone", "tokens"])
def test_pipelines_give_the_result_of_the_whole_batch(name: str, schedule: str, pools: Pools) -> None:
    case = CASES[name]
    model = case.model()
    plan = pipeline(segments(model, case, pools(2)), schedule)
    with onebox.Trainer(
        model, case.loss, sgd(model), pool=pools(2), plan=plan, loss_reduction=case.reduction
    ) as trainer:
        losses = [loss.item() for loss in [trainer.step(*batch) for batch in case.data]]
        trainer.pull()
    assert_equal(model, losses, case)


@pytest.mark.parametrize("cache", [None, "1MiB"])
def test_uploads_and_samples_that_stay_have_their_weights(cache: str | None, pools: Pools) -> None:
    case = CASES["tokens"]
    data = [*case.data, *case.data]
    case = Case(model=Language, loss=case.loss, reduction=case.reduction, data=data)
    model = case.model()
    numbers = [torch.arange(len(inputs)) + 100 * (place % len(SIZES)) for place, (inputs, _) in enumerate(data)]
    options: dict[str, Any] = {"micro_batch": 1, "loss_reduction": case.reduction, "cache": cache}
    with onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pools(2), **options)) as trainer:
        losses = []
        for batch, samples in zip(data, numbers, strict=True):
            uploaded = trainer.upload(*batch, samples if cache else None)
            losses.append(trainer.step(uploaded))
        found = [loss.item() for loss in losses]
        trainer.pull()
        assert cache is None or trainer.upload_counters().hits > 0
    assert_equal(model, found, case)


def test_steps_that_overlap_have_their_own_weights(pools: Pools) -> None:
    """In an asynchronous pipeline the end of backward comes in the window of the next step, which has other weights."""
    case = CASES["tokens"]
    options: dict[str, Any] = {"loss_reduction": case.reduction, "staleness": 1, "delay": "none", "warm_up": 0}
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for workers in (1, 2):
        model = case.model()
        names = segments(model, case, pools(2))
        ways: dict[str, Any] = {"plan": pipeline(names, "async-1f1b")} if workers == 2 else {"micro_batch": 2}
        with onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pools(workers), **ways, **options)) as trainer:
            losses = [loss.item() for loss in [trainer.step(*batch) for batch in [*case.data, *case.data]]]
            trainer.pull()
        found.append((losses, dict(model.state_dict())))
    (losses, state), (others, tensors) = found
    assert others == pytest.approx(losses, abs=1e-10)
    for name, tensor in state.items():
        assert torch.allclose(tensors[name], tensor, rtol=0, atol=1e-10), name


def test_steps_are_done_again_with_their_weights() -> None:
    case = CASES["a share of ignored alone"]
    model, data = case.model(), list(case.data) * 3
    case = Case(loss=case.loss, reduction=case.reduction, data=data)
    options: dict[str, Any] = {"micro_batch": 2, "recover": True, "snapshot_every": 2}
    with (
        onebox.open("cpu*2") as pool,
        onebox.Trainer(
            model, case.loss, sgd(model), **grouped(pool=pool, loss_reduction=case.reduction, **options)
        ) as trainer,
    ):
        losses = [trainer.step(*batch) for batch in data[:7]]
        os.kill(pool.process_ids[1], signal.SIGKILL)
        losses += [trainer.step(*batch) for batch in data[7:]]
        found = [loss.item() for loss in losses]
        trainer.pull()
        assert trainer.recoveries
    assert_equal(model, found, case)


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path, pools: Pools) -> None:
    case = CASES["class weights"]
    model = case.model()
    with onebox.Trainer(
        model,
        case.loss,
        sgd(model),
        pool=pools(2),
        plan=onebox.DataParallel(micro_batch=3),
        loss_reduction=case.reduction,
    ) as trainer:
        losses = [trainer.step(*batch).item() for batch in case.data[:2]]
        trainer.save(tmp_path)
    model = case.model()
    with pytest.raises(UsageError, match="a function is in no checkpoint"):
        onebox.Trainer.resume(tmp_path, model, case.loss, sgd(model), pool=pools(2))
    with onebox.Trainer.resume(
        tmp_path, model, case.loss, sgd(model), pool=pools(2), loss_reduction=case.reduction
    ) as trainer:
        losses += [trainer.step(*batch).item() for batch in case.data[2:]]
        trainer.pull()
    assert_equal(model, losses, case)


def test_batch_norm_sees_the_samples_of_a_micro_batch_without_targets(pools: Pools) -> None:
    """Other targets take the place of ignored ones, but inputs stay; so do the running statistics."""
    data = batches([6, 6], [[0, 1, 2], [3, 4, 5]])

    def whole(model: nn.Module) -> nn.Module:
        optimizer = sgd(model)
        for inputs, targets in data:
            optimizer.zero_grad()
            for half in (slice(0, 3), slice(3, 6)):
                each = functional.cross_entropy(
                    model(inputs[half]), targets[half], ignore_index=IGNORED, reduction="sum"
                )
                (each / count(targets)).backward()
            optimizer.step()
        return model

    expected, model = whole(mlp(nn.BatchNorm1d(8))), mlp(nn.BatchNorm1d(8))
    with onebox.Trainer(
        model,
        functional.cross_entropy,
        sgd(model),
        pool=pools(2),
        plan=onebox.DataParallel(micro_batch=3),
        loss_reduction=onebox.Weighted(count),
    ) as trainer:
        for batch in data:
            trainer.step(*batch)
        trainer.pull()
    for (name, found), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10), name


# ---- refused


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    del targets
    normal_BC = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(normal_BC @ normal_BC.T, torch.arange(len(outputs)))


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, functional.one_hot(targets, CLASSES).to(outputs)).sqrt()


def refused(loss: Loss, data: Batches, pool: Any, **options: Any) -> str:
    """Return why a batch is refused, after which nothing has changed."""
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with onebox.Trainer(model, loss, sgd(model), **grouped(pool=pool, **{"micro_batch": 3, **options})) as trainer:
        for batch in data[:-1]:
            trainer.step(*batch)
        trainer.pull()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(UsageError) as error:
            trainer.step(*data[-1])
        trainer.pull()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    return str(error.value)


@pytest.mark.feature("Trainer: Say what a loss is, if it is no mean")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (weighted_ce, "classes have weights"),
        (nn.CrossEntropyLoss(weight=WEIGHTS), "classes have weights"),
        (summed, 'It looks like a sum over samples (reduction="sum")'),
        (contrastive, "one micro-batch on one replica"),
        (rmse, "the loss is no mean over samples"),
    ],
)
def test_what_is_no_mean_over_samples_is_refused(loss: Loss, words: str, workers: int, pools: Pools) -> None:
    said = refused(loss, batches([8]), pools(workers))
    assert words in said
    assert "loss_reduction" in said


@pytest.mark.parametrize("loss", [functional.cross_entropy, masked, nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_later_batches_whose_targets_are_ignored_unevenly_are_refused(loss: Loss, pools: Pools) -> None:
    said = refused(loss, batches([8, 8, 8], [[], [1, 6], [0, 1]]), pools(2), micro_batch=4)
    assert "That is 2 for the 4 samples of micro-batch 0 and 4 for the 4 of micro-batch 1" in said
    assert "loss_reduction=onebox.Weighted" in said


class Variational(nn.Module):
    """Draws random numbers in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(FEATURES, 6).double(), nn.Linear(3, FEATURES).double()

    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean_BH, logvar_BH = self.encoder(x_BD).chunk(2, dim=1)
        drawn_BH = mean_BH + torch.randn_like(mean_BH) * (logvar_BH / 2).exp()
        return self.decoder(drawn_BH).sigmoid(), mean_BH, logvar_BH


def evidence(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    found, mean, logvar = outputs
    apart = functional.binary_cross_entropy(found, targets, reduction="sum")
    return apart - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()


def test_a_model_that_draws_random_numbers_is_checked(pools: Pools) -> None:
    inputs = batches([8])[0][0].sigmoid()
    for loss, mean in ((evidence, False), (lambda found, targets: functional.mse_loss(found[0], targets), True)):
        model = Variational()
        with onebox.Trainer(model, loss, sgd(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=2)) as trainer:
            if mean:
                assert trainer.step(inputs, inputs).item() > 0
                continue
            with pytest.raises(UsageError, match="It looks like a sum over samples"):
                trainer.step(inputs, inputs)


@pytest.mark.parametrize(
    ("layers", "samples", "micro_batch", "expected"),
    [
        ([], 8, 4, [(4, "train"), (2, "train")]),
        ([], 6, 4, [(4, "train"), (2, "train")]),  # both are of training
        ([nn.Dropout(0.5)], 8, 4, [(4, "train"), (2, "train")]),
        ([nn.BatchNorm1d(8)], 8, 4, [(4, "train"), (2, "train")]),
    ],
)
def test_the_check_uses_captures_of_training(
    layers: Sequence[nn.Module],
    samples: int,
    micro_batch: int,
    expected: Sequence[tuple[int, str]],
    pools: Pools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, str]] = []
    original = captures.capture

    def capture(model: nn.Module, loss: Loss, example: tuple[Any, Any], **options: Any) -> Any:
        made.append((len(example[1]), options["mode"]))
        return original(model, loss, example, **options)

    monkeypatch.setattr(captures, "capture", capture)
    model, plan = mlp(*layers), onebox.DataParallel(micro_batch=micro_batch)
    with onebox.Trainer(model, functional.cross_entropy, sgd(model), pool=pools(1), plan=plan) as trainer:
        for batch in batches([samples, samples]):
            assert trainer.step(*batch).item() > 0
    assert made == expected


class Balanced(nn.Module):
    """A loss that, in training, has a part that is no mean over samples."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, targets)
        return loss + outputs.mean(0).square().sum() if self.training else loss


def test_what_is_computed_in_training_alone_is_checked(pools: Pools) -> None:
    model, plan = mlp(), onebox.DataParallel(micro_batch=2)
    with (
        onebox.Trainer(model, Balanced(), sgd(model), pool=pools(1), plan=plan) as trainer,
        pytest.raises(UsageError, match="the loss is no mean over samples"),
    ):
        trainer.step(*batches([8])[0])


def test_with_mean_nothing_is_refused(pools: Pools) -> None:
    data, model, expected = batches([8]), mlp(), mlp()
    with onebox.Trainer(model, weighted_ce, sgd(model), pool=pools(2), loss_reduction="mean") as trainer:
        loss = trainer.step(*data[0]).item()
    (x_BD, y_B), halves = data[0], (slice(0, 4), slice(4, 8))
    means = [weighted_ce(expected(x_BD[half]), y_B[half]).item() for half in halves]
    assert loss == pytest.approx(sum(means) / 2, abs=1e-10)


def test_a_contrastive_loss_is_exact_in_one_micro_batch(pools: Pools) -> None:
    case = Case(loss=contrastive, reduction=None, data=batches(SIZES))
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(1)) as trainer:
        losses = [trainer.step(*batch).item() for batch in case.data]
        trainer.pull()
    assert_equal(model, losses, case)


def test_synchronized_batch_norm_needs_one_micro_batch(pools: Pools) -> None:
    def synchronized() -> nn.Module:
        return mlp(nn.SyncBatchNorm(8))

    case = Case(model=synchronized, loss=functional.cross_entropy, reduction=None, data=batches(SIZES))
    model = case.model()
    with (
        onebox.Trainer(model, case.loss, sgd(model), pool=pools(2)) as trainer,
        pytest.raises(UsageError, match="layer 1 is a SyncBatchNorm"),
    ):
        trainer.step(*case.data[0])
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(1)) as trainer:
        losses = [trainer.step(*batch).item() for batch in case.data]
        trainer.pull()
    assert_equal(model, losses, case)


# ---- not refused


def ridge(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets) + 0.01 * outputs.square().mean()


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], (targets > 1).to(outputs.dtype))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, functional.one_hot(targets, CLASSES).to(outputs.dtype))


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.smooth_l1_loss(outputs[:, 0], targets.to(outputs.dtype))


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        squares,
        binary,
        huber,
        ridge,
    ],
)
def test_means_over_samples_are_not_refused(loss: Loss, pools: Pools) -> None:
    case = Case(loss=loss, reduction=None, data=batches(SIZES))
    model = case.model()
    with onebox.Trainer(
        model, case.loss, sgd(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=3)
    ) as trainer:
        losses = [trainer.step(*batch).item() for batch in case.data]
        trainer.pull()
    assert_equal(model, losses, case)


class Named(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x_BD: Tensor) -> dict[str, Tensor]:
        return {"scores": self.body(x_BD)}


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)), functional.cross_entropy),
        (lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)), functional.cross_entropy),
        (Named, lambda outputs, targets: functional.cross_entropy(outputs["scores"], targets)),
        (lambda: mlp(dtype=torch.float32), functional.cross_entropy),
        (lambda: mlp(nn.LayerNorm(8), dtype=torch.float32), squares),
        (lambda: mlp(dtype=torch.bfloat16), functional.cross_entropy),
    ],
    ids=["norm and dropout", "norm without running statistics", "dict", "float32", "layer norm", "bfloat16"],
)
def test_models_of_all_kinds_are_not_refused(model: Callable[[], nn.Module], loss: Loss, pools: Pools) -> None:
    made = model()
    dtype = next(made.parameters()).dtype
    with onebox.Trainer(made, loss, sgd(made), pool=pools(2), plan=onebox.DataParallel(micro_batch=4)) as trainer:
        for x_BD, y_B in batches([16, 10, 16]):
            assert trainer.step(x_BD.to(dtype), y_B).item() > 0


def test_autocast_is_not_refused(pools: Pools) -> None:
    model = mlp(dtype=torch.float32)
    with onebox.Trainer(
        model,
        functional.cross_entropy,
        sgd(model),
        pool=pools(2),
        plan=onebox.DataParallel(micro_batch=4),
        precision="bf16",
    ) as trainer:
        for x_BD, y_B in batches([16, 10]):
            assert trainer.step(x_BD.float(), y_B).item() > 0


def test_a_pipeline_checks_what_its_stages_compute(pools: Pools) -> None:
    case = Case(loss=functional.cross_entropy, reduction=None, data=batches(SIZES))
    model = case.model()
    plan = pipeline(segments(model, case, pools(2)), micro_batch=3)
    assert 'reduction="sum"' in refused(summed, batches([8]), pools(2), plan=plan, micro_batch=None)
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), plan=plan) as trainer:
        losses = [trainer.step(*batch).item() for batch in case.data]
        trainer.pull()
    assert_equal(model, losses, case)


def test_what_is_no_reduction_is_refused(pools: Pools) -> None:
    model = mlp()
    with pytest.raises(UsageError, match=r"loss_reduction='total': allowed are None"):
        onebox.Trainer(model, summed, sgd(model), pool=pools(1), loss_reduction="total")  # type: ignore[arg-type]
    with (
        onebox.Trainer(
            model, summed, sgd(model), pool=pools(2), loss_reduction=onebox.Weighted(lambda targets: targets)
        ) as trainer,
        pytest.raises(UsageError, match=r"returned a tensor of shape \[4\]"),
    ):
        trainer.step(*batches([8])[0])
