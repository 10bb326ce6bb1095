"""Runs of ``PlannedTrainer``: what they log, save and resume from is what a ``Trainer`` of transformers does."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import onebox
from onebox.engine.workload.batch import as_batch
from onebox.plan import Plan, Stage
from onebox.pool import Fault, Pool, open_pool
from tests.kit.pools import Pools

transformers = pytest.importorskip("transformers")

from onebox.integrations.transformers import PlannedTrainer  # noqa: E402 it imports transformers

GUARDED = True

EXACT, SINGLE, HALF = 1e-10, 1e-5, 2e-2
"""Tolerances: in float64; where the model's own loss is in float32; in bfloat16."""


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Log losses in float64, too: transformers sums them in the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and accelerate about themselves
        yield
    torch.set_default_dtype(before)


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of 12 tokens, some of which are not predicted; with ``classes`` one label each."""

    def __init__(self, size: int = 24, *, classes: bool = False, lengths: bool = False) -> None:
        self.tokens = torch.randint(1, 32, (size, 12), generator=torch.Generator().manual_seed(1))
        self.classes, self.lengths = classes, lengths

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        if self.classes:
            return {"input_ids": tokens, "labels": tokens[0] % 2}
        if self.lengths:
            tokens = tokens[: 12 - index // 4]
        labels = torch.where(torch.arange(len(tokens)) < 12 - index % 7, tokens, -100)
        return {"input_ids": tokens, "labels": labels}


def padded(texts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return texts of several lengths as a batch, on the left or on the right by their lengths."""
    longest = max(len(text["input_ids"]) for text in texts)

    def filled(tensor: Tensor, value: int) -> Tensor:
        missing = longest - len(tensor)
        return nn.functional.pad(tensor, (missing, 0) if missing % 2 else (0, missing), value=value)

    return {
        "input_ids": torch.stack([filled(text["input_ids"], 0) for text in texts]),
        "attention_mask": torch.stack([filled(torch.ones_like(text["input_ids"]), 0) for text in texts]),
        "labels": torch.stack([filled(text["labels"], -100) for text in texts]),
    }


def language_model(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=12,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.BertForSequenceClassification(config)


def loss_of_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss of a language model in its own type; that of transformers is in float32."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, targets)
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class Penalised(transformers.Trainer):
    """A trainer with a loss of its own."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels) + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Annealed(PlannedTrainer):
    """A trainer whose loss depends on the number of steps."""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(*arguments, **named) * (1 + self.state.global_step)


class PlannedPenalised(PlannedTrainer):
    compute_loss = Penalised.compute_loss
    loss_is_scaled_for_ga = False


def run(
    kind: Any,
    folder: Path,
    *,
    model: Callable[[], nn.Module] = language_model,
    data: Dataset[Any] | None = None,
    resume: Path | None = None,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Train for six updates with warm-up, weight decay, clipping, evaluations and checkpoints."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 6,
            "max_steps": 6,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **(settings or {}),
        },
    )
    data = data or Texts()
    trainer = kind(model(), arguments, train_dataset=data, eval_dataset=data, **more)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def logged(trainer: Any) -> list[tuple[int, str, float]]:
    """Return what was logged, but for times."""
    names = ("loss", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate", "train_loss")
    return [(line["step"], name, line[name]) for line in trainer.state.log_history for name in names if name in line]


def require_same(ours: Any, plain: Any, tolerance: float, *, resumed: bool = False) -> None:
    """Require that two runs have logged the same; of one that is resumed, ``train_loss`` is of the rest alone."""
    found, wanted = (
        [line for line in logged(each) if not (resumed and line[1] == "train_loss")] for each in (ours, plain)
    )
    assert [line[:2] for line in found] == [line[:2] for line in wanted]
    assert len(wanted) > 6
    assert max(abs(a[2] - b[2]) for a, b in zip(found, wanted, strict=True)) <= tolerance
    pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) <= 10 * tolerance


def in_two_stages(folder: Path, pool: Pool) -> Plan:
    """Return a plan of two stages, with the segments of a run's capture."""
    found: list[Plan] = []

    class Segments(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            batch = {name: value.repeat(2, 1) for name, value in Texts()[0].items()}
            pair = as_batch((batch, torch.ones(2), None), None)
            names = trainer.planned.captures.segments(pair, 2)
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            stages = [Stage(segments=part, replicas=((place,),), shares=(1.0,)) for place, part in enumerate(halves)]
            found.append(Plan(stages=tuple(stages), micro_batch=2, schedule="1f1b"))

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True
    )
    more = {"train_dataset": Texts(), "compute_loss_func": loss_of_tokens, "callbacks": [Segments()]}
    trainer = PlannedTrainer(language_model(), arguments, pool=pool, **more)
    trainer.train()
    return found[0]


TWO_REPLICAS = "1 stage, 2 replicas (0: 50%, 1: 50%), micro-batches of 2, gradients averaged worker to worker"


@pytest.mark.feature("Launchers: Hand the steps of transformers to a plan")
def test_a_run_logs_what_that_of_transformers_logs(
    tmp_path: Path, pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses, norms, rates and evaluations, with accumulated batches whose labels are unevenly many; and the plan."""
    settings = {"gradient_accumulation_steps": 2}
    more = {"compute_loss_func": loss_of_tokens, "settings": settings}
    plain = run(transformers.Trainer, tmp_path / "plain", **more)
    plan = onebox.DataParallel(micro_batch=2)
    ours = run(PlannedTrainer, tmp_path / "ours", pool=pools(2), plan=plan, **more)
    require_same(ours, plain, EXACT)
    assert ours.planned is None
    plans = [line for line in caplog.messages if line.startswith("steps run on ")]
    assert plans == [f"steps run on 2 of 2 devices: {TWO_REPLICAS}"]


CASES: dict[str, tuple[int, float, dict[str, Any]]] = {
    "one device": (1, EXACT, {"compute_loss_func": loss_of_tokens}),
    "the planner's plan": (2, EXACT, {"compute_loss_func": loss_of_tokens, "plan": "auto"}),
    "the model's own loss": (2, SINGLE, {}),
    "float32": (2, SINGLE, {"model": lambda: language_model().float(), "settings": {"learning_rate": 1e-3}}),
    "label smoothing": (2, SINGLE, {"settings": {"label_smoothing_factor": 0.1}}),
    "no clipping": (2, EXACT, {"compute_loss_func": loss_of_tokens, "settings": {"max_grad_norm": 0.0}}),
    "a classifier": (2, EXACT, {"model": classifier, "data": Texts(classes=True)}),
    "a classifier, stated as a mean": (
        2,
        EXACT,
        {"model": classifier, "data": Texts(classes=True), "loss_reduction": "mean"},
    ),
    "a classifier, accumulated": (
        2,
        EXACT,
        {"model": classifier, "data": Texts(classes=True), "settings": {"gradient_accumulation_steps": 3}},
    ),
    "epochs": (
        2,
        EXACT,
        {
            "compute_loss_func": loss_of_tokens,
            "data": Texts(22),
            "settings": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "logging_steps": 3},
        },
    ),
    "lengths": (2, EXACT, {"compute_loss_func": loss_of_tokens, "data": Texts(lengths=True), "data_collator": padded}),
    "lengths, accumulated": (
        2,
        EXACT,
        {
            "compute_loss_func": loss_of_tokens,
            "data": Texts(lengths=True),
            "data_collator": padded,
            "settings": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
        },
    ),
    "bf16": (2, HALF, {"settings": {"bf16": True}}),
    "another optimizer": (
        2,
        EXACT,
        {"compute_loss_func": loss_of_tokens, "settings": {"optim": "sgd", "lr_scheduler_type": "cosine"}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_other_runs_log_what_those_of_transformers_log(case: str, tmp_path: Path, pools: Pools) -> None:
    workers, tolerance, more = CASES[case]
    ours = run(PlannedTrainer, tmp_path / "ours", pool=pools(workers), **{"plan": onebox.DataParallel()} | more)
    more = {name: value for name, value in more.items() if name not in ("plan", "loss_reduction")}
    require_same(ours, run(transformers.Trainer, tmp_path / "plain", **more), tolerance)


@pytest.mark.feature("Launchers: Hand the steps of transformers to a plan")
def test_a_pipeline_logs_what_transformers_logs(tmp_path: Path, pools: Pools) -> None:
    more = {"compute_loss_func": loss_of_tokens}
    plan = in_two_stages(tmp_path / "segments", pools(2))
    ours = run(PlannedTrainer, tmp_path / "ours", pool=pools(2), plan=plan, **more)
    require_same(ours, run(transformers.Trainer, tmp_path / "plain", **more), EXACT)


def test_a_loss_of_a_subclass_is_captured(tmp_path: Path, pools: Pools) -> None:
    more = {"model": classifier, "data": Texts(classes=True), "settings": {"gradient_accumulation_steps": 2}}
    plan = onebox.DataParallel(micro_batch=3)
    ours = run(PlannedPenalised, tmp_path / "ours", pool=pools(2), plan=plan, **more)
    require_same(ours, run(Penalised, tmp_path / "plain", **more), EXACT)


@pytest.mark.parametrize(
    ("more", "times"),
    [
        ({}, 9),
        ({"model": classifier, "data": Texts(classes=True)}, 0),
        ({"model": classifier, "data": Texts(classes=True), "loss_reduction": "mean"}, 9),
    ],
)
def test_a_loss_is_evaluated_on_the_pool_where_micro_batches_are_known_to_make_it_up(
    more: dict[str, Any], times: int, tmp_path: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, found = onebox.Trainer.evaluate, []

    def counted(trainer: onebox.Trainer, batches: Any) -> onebox.Evaluation:
        found.append(evaluate(trainer, batches))
        return found[-1]

    monkeypatch.setattr(onebox.Trainer, "evaluate", counted)
    run(PlannedTrainer, tmp_path, pool=pools(2), **more)
    assert len(found) == times


def test_metrics_are_computed_with_the_present_weights(tmp_path: Path, pools: Pools) -> None:
    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    more = {"model": classifier, "data": Texts(classes=True), "compute_metrics": accuracy}
    ours = run(PlannedTrainer, tmp_path / "ours", pool=pools(2), **more)
    require_same(ours, run(transformers.Trainer, tmp_path / "plain", **more), EXACT)


@pytest.mark.feature("Launchers: Resume checkpoints with or without a plan")
@pytest.mark.parametrize("first", ["planned", "plain"])
def test_a_checkpoint_of_one_is_resumed_by_the_other(first: str, tmp_path: Path, pools: Pools) -> None:
    """The file of the optimizer, too, is what the other one writes."""
    more = {"compute_loss_func": loss_of_tokens}
    planned = {"pool": pools(2), "plan": onebox.DataParallel(micro_batch=3)}
    kinds = {"planned": (PlannedTrainer, planned), "plain": (transformers.Trainer, {})}
    (kind, own), (other, others) = kinds.pop(first), *kinds.values()
    whole = run(kind, tmp_path / "whole", **more, **own)
    resumed = run(other, tmp_path / "rest", resume=tmp_path / "whole" / "checkpoint-3", **more, **others)
    require_same(resumed, whole, EXACT, resumed=True)
    names = {path.name for path in (tmp_path / "whole" / "checkpoint-6").iterdir()}
    assert names == {path.name for path in (tmp_path / "rest" / "checkpoint-6").iterdir()}
    states = [
        torch.load(tmp_path / run_of / "checkpoint-6" / "optimizer.pt", weights_only=True)
        for run_of in ("whole", "rest")
    ]
    flat = [torch.utils._pytree.tree_flatten(state) for state in states]
    assert flat[0][1] == flat[1][1]
    for a, b in zip(flat[0][0], flat[1][0], strict=True):
        assert type(a) is type(b)
        assert torch.allclose(a, b, rtol=0, atol=1e-9) if isinstance(a, Tensor) else a == pytest.approx(b)


def test_a_resumed_run_draws_the_random_numbers_of_the_whole_one(tmp_path: Path, pools: Pools) -> None:
    more = {"model": lambda: language_model(0.2), "pool": pools(2), "plan": onebox.DataParallel(micro_batch=3)}
    whole = run(PlannedTrainer, tmp_path / "whole", **more)
    rest = run(PlannedTrainer, tmp_path / "rest", resume=tmp_path / "whole" / "checkpoint-3", **more)
    require_same(rest, whole, EXACT, resumed=True)


@pytest.mark.feature("Launchers: Recover beneath transformers and Lightning")
def test_the_loss_of_a_worker_is_not_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {"compute_loss_func": loss_of_tokens}
    plan = onebox.DataParallel(micro_batch=3)
    with open_pool("cpu*2", threads=1, faults={1: (Fault("kill", "reduce", 5),)}) as pool:
        caplog.set_level(logging.WARNING, logger="onebox")
        recovery = onebox.Recovery(snapshot_every=2)
        ours = run(PlannedTrainer, tmp_path / "ours", pool=pool, plan=plan, recovery=recovery, **more)
        assert any("recovered" in line for line in caplog.messages), caplog.messages
    require_same(ours, run(transformers.Trainer, tmp_path / "plain", **more), EXACT)


def test_a_pool_that_is_named_is_open_while_training(tmp_path: Path) -> None:
    """Twice: the second training goes on with the optimizer's state, as that of transformers does."""
    settings = {"max_steps": 2, "save_strategy": "no"}
    more = {"compute_loss_func": loss_of_tokens, "settings": settings}
    ours = run(PlannedTrainer, tmp_path, pool="cpu*2", **more)
    plain = run(transformers.Trainer, tmp_path, **more)
    for trainer in (ours, plain):
        trainer.train()
    pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) <= 1e-9


class Interrupting(transformers.TrainerCallback):
    def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_run_that_is_interrupted_leaves_the_present_weights_and_can_begin_again(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True
    )
    found = []
    for kind, more in ((PlannedTrainer, {"pool": "cpu*2"}), (transformers.Trainer, {})):
        trainer = kind(language_model(), arguments, train_dataset=Texts(), eval_dataset=Texts(), **more)
        trainer.add_callback(Interrupting)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        interrupted = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.remove_callback(Interrupting)
        before = trainer.evaluate()["eval_loss"]  # in this process
        trainer.train()
        found.append((before, trainer.evaluate()["eval_loss"], interrupted))
    ours, plain = found
    assert ours[:2] == pytest.approx(plain[:2], abs=SINGLE)
    assert plain[1] < plain[0]
    assert max((a - b).abs().max().item() for a, b in zip(ours[2], plain[2], strict=True)) <= 1e-9


def first_labels(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a mean over those first labels of texts that are predicted."""
    return nn.functional.cross_entropy(outputs.logits[:, 0], labels[:, -1])


@pytest.mark.parametrize("micro_batch", [12, 1])
def test_a_mean_over_labels_is_one_whatever_the_micro_batches(micro_batch: int, tmp_path: Path, pools: Pools) -> None:
    """A micro-batch without a label is refused: transformers would divide by the labels of the batch."""
    labels = onebox.Weighted(lambda labels: (labels[:, -1] != -100).sum())
    settings = {"per_device_train_batch_size": 24, "train_sampling_strategy": "sequential", "eval_strategy": "no"}
    more = {"compute_loss_func": first_labels, "settings": settings}
    plan = onebox.DataParallel(micro_batch=micro_batch)
    planned = {"pool": pools(2), "plan": plan, "loss_reduction": labels, **more}
    if micro_batch == 1:
        with pytest.raises(onebox.OneboxError, match="is 0 for a micro-batch: its loss is a mean over nothing"):
            run(PlannedTrainer, tmp_path / "ours", **planned)
        return
    ours = run(PlannedTrainer, tmp_path / "ours", **planned)
    require_same(ours, run(transformers.Trainer, tmp_path / "plain", **more), EXACT)


def test_buckets_pad_texts_as_the_collators_do(tmp_path: Path, pools: Pools) -> None:
    """Labels beyond the end of a text are none, and the losses are those of shorter texts."""
    settings = {"train_sampling_strategy": "sequential", "eval_strategy": "no"}
    more = {"data": Texts(lengths=True), "data_collator": padded, "compute_loss_func": loss_of_tokens}
    more |= {"settings": settings}
    plan = onebox.DataParallel(micro_batch=3)
    ours = run(PlannedTrainer, tmp_path / "ours", pool=pools(2), plan=plan, pad=onebox.Buckets(multiple=6), **more)
    require_same(ours, run(transformers.Trainer, tmp_path / "plain", **more), EXACT)


class OwnStep(PlannedTrainer):
    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        return super().training_step(*arguments, **named)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (PlannedTrainer, {"fp16": True}, "fp16=True: gradients are not scaled .* set bf16=True, or neither"),
        (PlannedTrainer, {"auto_find_batch_size": True}, "auto_find_batch_size=True: .*per_device_train_batch_size"),
        (OwnStep, {}, "OwnStep.training_step, which a plan replaces; override compute_loss"),
    ],
)
def test_what_a_plan_does_not_do_is_refused_at_once(
    kind: Any, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **settings)
    with pytest.raises(onebox.OneboxError, match=said):
        kind(language_model(), arguments, pool="cpu*2")


def penalised(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss of which only a part is divided by the items, as of a mixture of experts."""
    return loss_of_tokens(outputs, labels, num_items_in_batch) + 0.01 * outputs.logits.square().mean()


REFUSED_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": (
        {"data": Texts(lengths=True)},
        "input_ids of the 2 batches of an update differs .* pad all batches to one length",
    ),
    "sizes": (
        {"model": classifier, "data": Texts(22, classes=True)},
        r"the batches of an update have \[6, 4\] samples",
    ),
    "parts": ({"compute_loss_func": penalised}, "a part of the loss is divided by num_items_in_batch, and another"),
    "mean": (
        {"loss_reduction": "mean"},
        "loss_reduction='mean': the loss divides by num_items_in_batch, so that micro-batches add up; leave",
    ),
    "annealed": ({"kind": Annealed}, r"compute_loss reads state.global_step, but is captured once"),
    "adafactor": ({"settings": {"optim": "adafactor"}}, "no optimizer that workers run"),
}


@pytest.mark.parametrize("case", REFUSED_BATCHES)
def test_batches_that_are_not_one_step_are_refused(case: str, tmp_path: Path, pools: Pools) -> None:
    more, said = REFUSED_BATCHES[case]
    settings = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "no",
        "per_device_train_batch_size": 4 if case == "lengths" else 6,
        "train_sampling_strategy": "sequential" if case == "lengths" else "random",
    }
    more = {**more, "settings": settings | more.get("settings", {})}
    with pytest.raises(onebox.OneboxError, match=said):
        run(more.pop("kind", PlannedTrainer), tmp_path, pool=pools(2), **more)
