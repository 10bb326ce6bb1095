"""Train a convolutional network on pictures that are read, decoded and changed at random while the devices compute.

    python examples/trainer/pictures.py                                  # digits, on the devices of this machine
    python examples/trainer/pictures.py --data cifar10:FOLDER --pool 'cpu*2'
    python examples/trainer/pictures.py --data folder:PICTURES --size 64 --on-error skip

A run that was stopped goes on with --resume at the batch where its checkpoint stands.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import onebox
from onebox.feed import Data, Position, open_dataset


class Cnn(nn.Sequential):
    """Three convolutions, each of which halves the picture, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        layers: list[nn.Module] = []
        for features in (16, 32, 64):
            layers += [nn.Conv2d(channels, features, 3, stride=2, padding=1), nn.BatchNorm2d(features), nn.ReLU()]
            channels = features
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Normalize(nn.Module):
    """Bytes to numbers of mean 0 and deviation 1; on the devices, so that bytes travel."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(data.mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(data.std).reshape(-1, 1, 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return (x_BCHW.float() / 255 - self.mean) / self.std


def shift(x_CHW: Tensor, *, generator: torch.Generator) -> Tensor:
    """Move a picture by up to one pixel each way; the generator is the sample's own."""
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return x_CHW.roll((down, right), (1, 2))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def train(args: argparse.Namespace, data: Data, pool: onebox.Pool) -> list[float]:
    """Train, and return the mean loss of each epoch."""
    torch.manual_seed(args.seed)
    model = Cnn(data.shape[0], data.classes)
    job = model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=2e-3)
    options = {"pool": pool, "on_device": Normalize(data), "metrics": {"accuracy": accuracy}}
    make = onebox.Trainer.resume if args.resume else onebox.Trainer
    losses = []
    with make(*([args.checkpoint] if args.resume else []), *job, **options) as trainer:
        feed = onebox.Feed(
            data.train,
            batch_size=args.batch_size,
            seed=args.seed,
            drop_last=True,  # batch norm wants no batch of a few
            transform=shift,
            on_error=args.on_error,
            upload=trainer.upload,
        )
        test = onebox.Feed(data.test, batch_size=500, shuffle=False, on_error=args.on_error)
        if args.resume:
            feed.resume(Position.from_dict(trainer.extra["feed"]))
        for epoch in range(feed.position.epoch, args.epochs):
            with feed.epoch(epoch) as batches:
                steps = [(trainer.step(batch), batch.size) for batch in batches]
            losses.append(sum(float(loss) * size for loss, size in steps) / sum(size for _, size in steps))
            right = trainer.evaluate(test.epoch(0)).metrics["accuracy"]
            print(f"epoch {epoch + 1}  loss {losses[-1]:.4f}  test accuracy {100 * right:.1f} %  {feed.report()}")
            trainer.save(args.checkpoint, extra={"feed": feed.position.to_dict()})
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="digits", help="digits, mnist:FOLDER, cifar10:FOLDER, folder:PATH, tar:...")
    parser.add_argument("--size", type=int, help="height and width that pictures from files get")
    parser.add_argument("--pool", default="auto", help="devices, such as cuda:0,cuda:1 or cpu*2")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--json", type=Path, help="write the losses into this file")
    args = parser.parse_args()
    with onebox.open(args.pool) as pool:
        losses = train(args, open_dataset(args.data, size=args.size), pool)
    if args.json:
        args.json.write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
