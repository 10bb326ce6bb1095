"""Training from a feed: what is uploaded ahead is what one process computes, also where a run goes on elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import DataError
from onebox.feed import Position
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.stages import tensors_of
from tests.kit.trainer_arguments import grouped
from tests.unit.feed.random_data import Numbers, all_globals, own_generator

EPOCHS = 3
MICRO_BATCH = 4


class Spread(Numbers):
    """Numbers as inputs that differ, with a target each."""

    def decode(self, raw: bytes, index: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor(float(int.from_bytes(raw, "little")), dtype=torch.float64)
        return torch.stack([value.sin(), value.cos(), value / 10]), value.sin().reshape(1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_feed(transform: Any, upload: Any = None, broken: dict[int, str] | None = None, **options: Any) -> onebox.Feed:
    """26 samples, 4 batches, of which the last is small."""
    skip: Any = "skip" if broken else "stop"
    return onebox.Feed(
        Spread(26, broken), batch_size=8, seed=5, transform=transform, upload=upload, on_error=skip, **options
    )


def run(trainer: onebox.Trainer, feed: onebox.Feed, steps: int) -> list[float]:
    """Train as a user does, for so many steps at most."""
    losses: list[onebox.StepLoss] = []
    for epoch in range(feed.position.epoch, EPOCHS):
        with feed.epoch(epoch) as batches:
            for batch in batches:
                losses.append(trainer.step(batch))
                if len(losses) == steps:
                    return [float(loss) for loss in losses]
    return [float(loss) for loss in losses]


@pytest.mark.feature("Feed: Train from a feed, and resume at the next sample")
@pytest.mark.parametrize(
    ("stop", "transform", "broken", "before", "after"),
    [
        (6, own_generator, {}, 1, 2),
        (9, all_globals, {3: "read", 20: "read"}, 2, 1),
    ],
    ids=["to more devices", "to fewer, with broken samples"],
)
def test_a_run_that_goes_on_with_another_plan_sees_the_same_samples(
    stop: int, transform: Any, broken: dict[int, str], before: int, after: int, pools: Pools, tmp_path: Path
) -> None:
    plain = make_feed(transform, broken=broken)
    batches = [batch for epoch in range(EPOCHS) for batch in plain.epoch(epoch)]
    model = make_model()
    alone = train(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=0.05), batches, MICRO_BATCH)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options: dict[str, Any] = {"micro_batch": MICRO_BATCH, "seed": 1}
    with onebox.Trainer(model, nn.functional.mse_loss, optimizer, **grouped(pool=pools(before), **options)) as trainer:
        feed = make_feed(transform, trainer.upload, broken)
        losses = run(trainer, feed, stop)
        trainer.save(tmp_path, extra={"feed": feed.position.to_dict()})

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with onebox.Trainer.resume(tmp_path, model, nn.functional.mse_loss, optimizer, pool=pools(after)) as trainer:
        feed = make_feed(transform, trainer.upload, broken, process=2)
        feed.resume(Position.from_dict(trainer.extra["feed"]))
        losses += run(trainer, feed, len(batches))
        tensors = tensors_of(trainer)

    assert len(losses) == len(batches)
    assert_same(Outcome(losses=losses, norms=[], tensors=tensors), alone)


def test_what_was_uploaded_and_never_stepped_is_freed(pools: Pools) -> None:
    pool = pools(2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(
        model, nn.functional.mse_loss, optimizer, pool=pool, plan=onebox.DataParallel(micro_batch=4)
    ) as trainer:
        feed = make_feed(own_generator, trainer.upload)
        run(trainer, feed, 4)
        trainer.wait()
        used = [each.used_bytes for each in trainer.memory()]
        for _ in range(3):
            with feed.epoch(1) as batches:
                trainer.step(next(batches)).item()
        list(map(trainer.step, feed.epoch(2)))
        trainer.wait()
        assert [each.used_bytes for each in trainer.memory()] == used


def test_bad_data_ends_the_epoch_and_the_trainer_goes_on(pools: Pools) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pools(2)) as trainer:
        broken = onebox.Feed(Spread(26, {3: "read"}), batch_size=8, shuffle=False, upload=trainer.upload)
        with pytest.raises(DataError, match=r"sample 3 \(file-3.jpg\) failed in read: OSError"):
            run(trainer, broken, 4)
        assert len(run(trainer, make_feed(None, trainer.upload), 4)) == 4


@pytest.mark.feature("Feed: Train from a feed, and resume at the next sample")
def test_the_example_learns(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "trainer" / "pictures.py"
    options = ["--pool", "cpu*2", "--batch-size", "120", "--epochs", "2", "--json", "losses.json"]
    line = [sys.executable, "-W", "error", str(script), *options]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = r"(epoch \d  loss .*  test accuracy .* %  (bound by \w+ \(.* % busy\)|the feed keeps up): .*\n){2}"
    assert re.fullmatch(said, done.stdout)
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert losses[1] < losses[0] < 2.3
