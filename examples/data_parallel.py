"""Train a small image classifier with nn.DataParallel on all GPUs of this machine.

Each step the module is copied to every GPU, the batch is split between them, and the outputs are gathered on the first
one. With one GPU, or none, the same loop trains the bare module.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Classifier(nn.Module):
    """Convolutions with group normalization, which does not depend on how a batch is split."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.AvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(32 * width, 10))

    def forward(self, images):
        return self.head(self.features(images))


def evaluate(model, loader, device):
    """Return the accuracy on a data set."""
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            correct += (model(images).argmax(dim=-1) == labels).sum()
    return correct.item() / len(loader.dataset)


def load_digits():
    """Read 1,797 scans of 8 x 8 pixels, with levels from 0 to 16, and the digits that they show."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0, help="processes that read the data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    scans, digits = load_digits()
    images = torch.tensor(scans / 16, dtype=torch.float32).unsqueeze(1)
    dataset = TensorDataset(images, torch.tensor(digits))
    splits = random_split(dataset, [1440, 357], generator=torch.Generator().manual_seed(args.seed))
    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(splits[0], batch_size=args.batch_size, shuffle=True, **options)
    test_loader = DataLoader(splits[1], batch_size=357, **options)

    model = Classifier(args.width, args.dropout)
    if torch.cuda.device_count() > 1:
        print(f"using {torch.cuda.device_count()} GPUs")
        model = nn.DataParallel(model)
    model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)

    losses = []
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {losses[-1]:.4f}  test accuracy {accuracy:.1%}")

    bare = model.module if isinstance(model, nn.DataParallel) else model
    print(f"{sum(weight.numel() for weight in bare.parameters()):,} parameters")
    if args.json:
        Path(args.json).write_text(json.dumps({"device": str(device), "losses": losses, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
