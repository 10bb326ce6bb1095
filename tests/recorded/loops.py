"""Loops of training that do more than one step after the other: feeds, padding, changes by hand, a lost worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import onebox
from tests.recorded.hashing import hash_of, text
from tests.recorded.inner import Fault, Position, open_pool, resume_trainer, set_synchronous, trainer_of
from tests.recorded.models import CASES, CLASSES, WORDS, fractions
from tests.recorded.traffic import recorded

Record = dict[str, Any]
SEED = 5


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of these runs."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)


def finished(
    trainer: onebox.Trainer, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[onebox.StepLoss]
) -> Record:
    """Return what a run ended with."""
    trainer.pull()
    return {
        "losses": [text(float(loss)) for loss in losses],
        "parameters": hash_of(model.state_dict()),
        "optimizer": hash_of(optimizer.state_dict()),
    }


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Features, each made of its number, with a class."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return fractions((10,), torch.Generator().manual_seed(index)), torch.tensor(index % CLASSES)


def shifted(sample: Tensor, generator: torch.Generator) -> Tensor:
    """Return a sample with random numbers of its own added."""
    return sample + torch.randint(-8, 9, sample.shape, generator=generator) / 64


def feed(folder: Path) -> Record:
    """Train from a feed that uploads ahead, with random samples; go on from a checkpoint within the second epoch."""
    case = CASES["deep"]
    losses: list[onebox.StepLoss] = []
    options = {"batch_size": 8, "seed": 9, "transform": shifted, "process": 1, "read": 1}
    with onebox.open("cpu*2", threads=1) as pool:
        model = case.model()
        with trainer_of(model, case.loss, adamw(model), pool=pool, micro_batch=3, seed=SEED) as trainer:
            source = onebox.Feed(Samples(), upload=trainer.upload, **options)
            for epoch in range(2):
                with source.epoch(epoch) as batches:
                    for batch in batches:
                        losses.append(trainer.step(batch))
                        if len(losses) == 6:
                            break
            trainer.save(folder, extra={"feed": source.position.to_dict()})
        model = case.model()
        optimizer = adamw(model)
        with resume_trainer(folder, model, case.loss, optimizer, pool=pool) as trainer:
            source = onebox.Feed(Samples(), upload=trainer.upload, **options)
            source.resume(Position.from_dict(trainer.extra["feed"]))
            with source.epoch(source.position.epoch) as batches:
                losses += [trainer.step(batch) for batch in batches]
            return finished(trainer, model, optimizer, losses)


def cached(folder: Path) -> Record:
    """Train on samples that stay on the devices, of which two epochs use the same ones in another order."""
    case = CASES["deep"]
    ((inputs, targets),) = case.batches((16,))
    order = [range(8), range(8, 16), range(4, 12), [3, 1, 14, 0, 15, 2, 12, 13]]
    with recorded() as traffic, onebox.open("cpu*2", threads=1) as pool:
        model = case.model()
        optimizer = adamw(model)
        with trainer_of(model, case.loss, optimizer, pool=pool, micro_batch=4, cache="1MiB", seed=SEED) as trainer:
            losses = [
                trainer.step(inputs[list(part)], targets[list(part)], samples=torch.tensor(list(part)))
                for part in order
            ]
            record = finished(trainer, model, optimizer, losses)
    return {**record, "messages": traffic.record()}


class Tagger(nn.Module):
    """A class for each word; words 0 are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return logits [B, classes, T]."""
        return self.head(torch.tanh(self.embed(x_BT))).transpose(1, 2)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over words that are not padding."""
    return nn.functional.cross_entropy(outputs, targets, ignore_index=-100)


def tokens(targets: Tensor) -> Tensor:
    """Return how many words count."""
    return (targets != -100).sum()


def weighted(folder: Path) -> Record:
    """Train with a mean over words, on sentences of several lengths that are padded to two."""
    generator = torch.Generator().manual_seed(2)
    model = Tagger().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(fractions(tuple(parameter.shape), generator))
    pad = onebox.Buckets(sizes=(4, 6), dim=1, tensors={"inputs": 0, "targets": -100})
    options = {"micro_batch": 2, "pad": pad, "loss_reduction": onebox.Weighted(tokens), "seed": SEED}
    with recorded() as traffic, onebox.open("cpu*2", threads=1) as pool:
        optimizer = adamw(model)
        with trainer_of(model, token_loss, optimizer, pool=pool, **options) as trainer:
            losses = []
            for length in (3, 5, 4, 6):
                words = torch.randint(1, WORDS, (5, length), generator=generator)
                targets = torch.randint(CLASSES, (5, length), generator=generator)
                targets[1:3, 2:] = -100
                losses.append(trainer.step(words, targets))
            record = finished(trainer, model, optimizer, losses)
    return {**record, "messages": traffic.record()}


def by_hand(folder: Path) -> Record:
    """Change weights, learning rate and the optimizer's state between steps."""
    case = CASES["deep"]
    with recorded() as traffic, onebox.open("cpu*2", threads=1) as pool:
        model = case.model()
        optimizer = adamw(model)
        with trainer_of(model, case.loss, optimizer, pool=pool, micro_batch=3, seed=SEED) as trainer:
            losses = []
            for step, batch in enumerate(case.batches((8, 8, 8, 8))):
                losses.append(trainer.step(*batch))
                if step == 0:
                    optimizer.param_groups[0]["lr"] = 1e-2
                elif step == 1:
                    trainer.pull()
                    with torch.no_grad():
                        next(iter(model.parameters())).mul_(0.5)
                elif step == 2:
                    saved = optimizer.state_dict()
                    saved["state"][0]["exp_avg"].zero_()
                    optimizer.load_state_dict(saved)
            record = finished(trainer, model, optimizer, losses)
    return {**record, "messages": traffic.record()}


def recovery(folder: Path) -> Record:
    """Lose a worker in the fourth step: it is started again, and gets the newest snapshot."""
    case = CASES["cnn"]
    faults = {1: (Fault("kill", "optimizerstep", 4),)}
    with open_pool("cpu*2", threads=1, faults=faults) as pool:
        model = case.model()
        optimizer = adamw(model)
        options = {"micro_batch": 3, "seed": SEED, "recover": True, "snapshot_every": 2}
        with trainer_of(model, case.loss, optimizer, pool=pool, **options) as trainer:
            losses = [trainer.step(*batch) for batch in case.batches((6,) * 6)]
            record = finished(trainer, model, optimizer, losses)
            return {**record, "recoveries": len(trainer.recoveries)}


def synchronous(folder: Path) -> Record:
    """Train on a virtual device with each operator waited for, so that none depends on times."""
    case = CASES["deep"]
    with recorded() as traffic, onebox.open("cpu*1", threads=1):
        set_synchronous(True)
        model = case.model().to("vgpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for inputs, targets in case.batches((4, 4, 4)):
            optimizer.zero_grad()
            loss = case.loss(model(inputs.to("vgpu")), targets.to("vgpu"))
            loss.backward()
            optimizer.step()
            losses.append(text(loss.item()))
        record = {"losses": losses, "parameters": hash_of(model.state_dict())}
    return {**record, "instructions": traffic.instructions()}


RUNS: dict[str, Callable[[Path], Record]] = {
    "feed, resumed": feed,
    "cached samples": cached,
    "weighted loss, padded": weighted,
    "changes by hand": by_hand,
    "a worker lost and started again": recovery,
    "vgpu: synchronous training": synchronous,
}
