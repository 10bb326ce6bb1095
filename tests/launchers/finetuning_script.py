"""Fine-tuning of a classifier of sentence pairs with accelerate, after its examples: one feature a run.

Model and tokenizer are saved to a folder first and loaded from there in each rank, as scripts load a pretrained model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs, ProfileKwargs, find_executable_batch_size, set_seed
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

WORDS = 40
BATCH = 4
ROWS = 36
FOLDER = "pretrained"


def save_pretrained() -> None:
    """Write what others download: a model and its tokenizer."""
    words = ["[PAD]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", sep_token="[SEP]")
    wrapped.save_pretrained(FOLDER)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    BertForSequenceClassification(config).save_pretrained(FOLDER)


def rows() -> Dataset:
    draws = torch.Generator().manual_seed(1)
    numbers = torch.randint(WORDS, (ROWS, 10), generator=draws).tolist()
    texts = [" ".join(f"w{number}" for number in row[: 6 + row[0] % 5]) for row in numbers]
    return Dataset.from_dict({"first": texts, "second": texts[::-1], "labels": [row[0] % 2 for row in numbers]})


class Finetuning:
    """What a script has prepared: a model on its device, loaders of which each rank has its share."""

    def __init__(self, accelerator: Accelerator, batch: int = BATCH, chosen: Dataset | None = None) -> None:
        self.accelerator = accelerator
        set_seed(3)
        with accelerator.main_process_first():
            if accelerator.is_main_process and not Path(FOLDER).exists():
                save_pretrained()
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        with accelerator.main_process_first():
            encoded = (rows() if chosen is None else chosen).map(
                lambda row: tokenizer(row["first"], row["second"], truncation=True, max_length=24),
                batched=True,
                remove_columns=["first", "second"],
            )

        def padded(samples: list[dict[str, Any]]) -> Any:
            return tokenizer.pad(samples, padding="longest", return_tensors="pt")

        def loader(*, shuffle: bool) -> DataLoader[Any]:
            return DataLoader(encoded, batch, shuffle=shuffle, collate_fn=padded)  # type: ignore[arg-type]

        model = AutoModelForSequenceClassification.from_pretrained(FOLDER, return_dict=True)
        model = model.to(accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 30)
        prepared = accelerator.prepare(model, optimizer, loader(shuffle=True), loader(shuffle=False), schedule)
        self.model, self.optimizer, self.loader, self.test_loader, self.schedule = prepared
        self.losses: list[float] = []

    def batches(self, loader: Any = None) -> Iterator[torch.Tensor]:
        """Yield the loss of each batch, of which the caller takes a step by :meth:`step`."""
        self.model.train()
        for batch in loader or self.loader:
            yield self.model(**batch).loss

    def step(self, loss: torch.Tensor) -> float:
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(self.accelerator.gather(loss.detach().reshape(1)).mean().item())
        return self.losses[-1]

    def epoch(self, loader: Any = None) -> None:
        for loss in self.batches(loader):
            self.step(loss)

    def evaluate(self) -> float:
        """Return the accuracy over all samples: those that fill the last batch up count once."""
        self.model.eval()
        hits: list[torch.Tensor] = []
        for batch in self.test_loader:
            with torch.no_grad():
                scores = self.model(**batch).logits
            found, labels = self.accelerator.gather_for_metrics((scores.argmax(-1), batch["labels"]))
            hits.append(found == labels)
        every = torch.cat(hits)
        assert len(every) == self.accelerator.gather(torch.tensor([len(every)], device=every.device)).min() == ROWS
        self.losses.append(every.float().mean().item())
        return self.losses[-1]


def plain(**options: Any) -> Finetuning:
    job = Finetuning(Accelerator(**options))
    for _ in range(2):
        job.epoch()
        job.evaluate()
    return job


def accumulated() -> Finetuning:
    job = Finetuning(Accelerator(gradient_accumulation_steps=2))
    for loss_of in (job.loader, job.loader):
        for batch in loss_of:
            with job.accelerator.accumulate(job.model):
                job.step(job.model(**batch).loss)
    return job


def resumed() -> Finetuning:
    job = Finetuning(Accelerator())
    job.accelerator.save_state("start")
    for number, loss in enumerate(job.batches()):
        job.step(loss)
        if number == 1:
            job.accelerator.save_state("middle")
    whole = job.losses[2:]
    job.accelerator.load_state("start")
    job.accelerator.load_state("middle")
    job.epoch(job.accelerator.skip_first_batches(job.loader, 2))
    assert len(job.losses) == 2 + 2 * len(whole)
    return job


def stopped_early() -> Finetuning:
    job = Finetuning(Accelerator())
    for number, loss in enumerate(job.batches()):
        job.step(loss)
        if number == 2 and job.accelerator.process_index == job.accelerator.num_processes - 1:
            job.accelerator.set_trigger()
        if job.accelerator.check_trigger():
            break
    assert len(job.losses) == 3
    return job


def local_updates() -> Finetuning:
    job = Finetuning(Accelerator())
    with LocalSGD(accelerator=job.accelerator, model=job.model, local_sgd_steps=2, enabled=True) as local:
        for loss in job.batches():
            job.step(loss)
            local.step()
    return job


def smaller_batch(*, same_total: bool) -> Finetuning:
    accelerator = Accelerator()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=4 * BATCH)
    def train(batch: int) -> Finetuning:
        accelerator.free_memory()
        tried.append(batch)
        job = Finetuning(accelerator, batch)
        if batch > BATCH:
            raise RuntimeError("CUDA out of memory.")
        accelerator.gradient_accumulation_steps = 4 * BATCH // batch if same_total else 1
        for samples in job.loader:
            with accelerator.accumulate(job.model):
                job.step(job.model(**samples).loss)
        return job

    job = train()
    assert tried[0] == 4 * BATCH and tried[-1] <= BATCH, tried
    return job


class Notes(GeneralTracker):
    """A tracker that writes each call as a line."""

    name = "notes"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        Path("notes").write_text(f"{values}\n")

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with Path("notes").open("a") as file:
            file.write(f"{step} {values}\n")


def tracked() -> Finetuning:
    accelerator = Accelerator(log_with=Notes())
    accelerator.init_trackers("notes", {"batch": BATCH})
    job = Finetuning(accelerator)
    for step, loss in enumerate(job.batches()):
        accelerator.log({"loss": job.step(loss)}, step=step)
    assert not accelerator.is_main_process or len(Path("notes").read_text().splitlines()) == 1 + len(job.losses)
    return job


def folded() -> Finetuning:
    accelerator = Accelerator()
    losses: list[float] = []
    everything = rows()
    for fold in range(2):
        part = everything.select(range(fold, ROWS, 2))
        job = Finetuning(accelerator, chosen=part)
        job.epoch()
        losses += job.losses
        accelerator.free_memory()
    job.losses = losses
    return job


def profiled() -> Finetuning:
    job = Finetuning(Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], record_shapes=True)]))
    with job.accelerator.profile() as profile:
        job.epoch()
    assert profile.key_averages()
    return job


FEATURES: dict[str, Callable[[], Finetuning]] = {
    "nlp": plain,
    "accumulation": accumulated,
    "automatic-accumulation": lambda: smaller_batch(same_total=True),
    "checkpointing": resumed,
    "cross-validation": folded,
    "early-stopping": stopped_early,
    "local-sgd": local_updates,
    "memory": lambda: smaller_batch(same_total=False),
    "parallel-options": lambda: plain(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)]
    ),
    "profiler": profiled,
    "split-batches": lambda: plain(split_batches=True, step_scheduler_with_optimizer=False),
    "tracking": tracked,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("feature", choices=FEATURES)
    done = FEATURES[parser.parse_args().feature]()
    done.accelerator.wait_for_everyone()
    done.accelerator.unwrap_model(done.model).save_pretrained("tuned", is_main_process=done.accelerator.is_main_process)
    done.accelerator.wait_for_everyone()
    again = AutoModelForSequenceClassification.from_pretrained("tuned").state_dict()
    for name, tensor in done.accelerator.unwrap_model(done.model).state_dict().items():
        assert torch.equal(tensor.cpu(), again[name]), name
    if done.accelerator.is_main_process:
        print(json.dumps({"losses": done.losses, "ranks": done.accelerator.num_processes}), flush=True)
    done.accelerator.end_training()
