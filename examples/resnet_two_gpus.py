"""Train a residual network that lies on two GPUs: the first half on cuda:0, the second half on cuda:1.

The images cross over in the middle of the forward pass, their gradients in the middle of the backward pass. With one
GPU both halves share it, without a GPU they run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two convolutions with batch normalization and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class TwoGpuResNet(nn.Module):
    """A residual network whose halves are on two devices."""

    def __init__(self, first: torch.device, second: torch.device, width: int = 16):
        super().__init__()
        self.first, self.second = first, second
        self.front = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            Block(width, width),
            Block(width, width),
        ).to(first)
        self.back = nn.Sequential(
            Block(width, 2 * width, stride=2),
            Block(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        ).to(second)

    def forward(self, x):
        return self.back(self.front(x.to(self.first)).to(self.second))


def two_devices() -> tuple[torch.device, torch.device]:
    """Return the devices of the two halves."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda:0"), torch.device("cuda:1" if gpus > 1 else "cuda:0")


def load_digits():
    """Read 1,797 scans of 8 x 8 pixels, with levels from 0 to 16, and the digits that they show."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)


def make_sets(size: int):
    """Return images of 1 x size x size and labels, of the training set and of the test set, which is every fifth."""
    scans, digits = load_digits()
    images = torch.tensor(scans / 8 - 1, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=size, mode="bilinear")
    labels = torch.tensor(digits)
    test = torch.arange(len(labels)) % 5 == 4
    return (images[~test], labels[~test]), (images[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--size", type=int, default=16, help="width and height of the images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    first, second = two_devices()
    print(f"front on {first}, back on {second}")
    model = TwoGpuResNet(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=1e-4)
    (images, labels), (test_images, test_labels) = make_sets(args.size)

    model.train()
    losses = []
    start = time.perf_counter()
    for step in range(args.steps):
        chosen = torch.randint(len(images), (args.batch_size,))
        outputs = model(images[chosen])
        loss = F.cross_entropy(outputs, labels[chosen].to(outputs.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss:.4f}")
    losses = torch.stack(losses).tolist()
    print(f"{args.steps * args.batch_size / (time.perf_counter() - start):.0f} samples/s")

    model.eval()
    with torch.inference_mode():
        hits = model(test_images).argmax(1).cpu() == test_labels
    accuracy = hits.float().mean().item()
    print(f"test accuracy {accuracy:.1%}")
    if args.json:
        results = {"devices": [str(first), str(second)], "losses": losses, "accuracy": accuracy}
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
