"""Train a convolutional network on handwritten digits, the way the first PyTorch script of most people does.

The digits are the 1,797 images of 8 x 8 pixels in digits.csv.gz, enlarged to the 28 x 28 pixels of MNIST.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions, two linear layers, dropout after each pair."""

    def __init__(self, dropout: float):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.drop1 = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(32 * 12 * 12, 128)
        self.drop2 = nn.Dropout(2 * dropout)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.drop1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.drop2(x)), dim=1)


def load_digits():
    """Read 1,797 scans of 8 x 8 pixels, with levels from 0 to 16, and the digits that they show."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)


def make_sets():
    """Return the training set and the test set, which is every fifth digit: images of 1 x 28 x 28, labels 0 to 9."""
    scans, digits = load_digits()
    images = F.interpolate(torch.tensor(scans, dtype=torch.float32).unsqueeze(1), size=28, mode="bilinear")
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits)
    test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def train(args, model, device, loader, optimizer, epoch):
    """Train for one epoch and return the losses that were printed."""
    model.train()
    losses = []
    for batch, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            losses.append(loss.item())
            seen = batch * args.batch_size
            print(f"epoch {epoch}  [{seen:4d}/{len(loader.dataset)}]  loss {losses[-1]:.6f}")
            if args.dry_run:
                break
    return losses


def test(model, device, loader):
    """Return mean loss and accuracy on the test set."""
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            prediction = output.argmax(dim=1, keepdim=True)
            correct += prediction.eq(target.view_as(prediction)).sum().item()
    test_loss /= len(loader.dataset)
    print(f"test: mean loss {test_loss:.4f}, accuracy {correct}/{len(loader.dataset)}")
    return test_loss, correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=360)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="the learning rate's factor after each epoch")
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--dry-run", action="store_true", help="a single step of each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--save-model", metavar="FILE", help="where to save the weights")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    use_cuda = not args.no_cuda and torch.cuda.is_available()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if use_cuda else "cpu")

    train_kwargs = {"batch_size": args.batch_size, "shuffle": True}
    test_kwargs = {"batch_size": args.test_batch_size}
    if use_cuda:
        cuda_kwargs = {"num_workers": 1, "pin_memory": True}
        train_kwargs.update(cuda_kwargs)
        test_kwargs.update(cuda_kwargs)
    train_set, test_set = make_sets()
    train_loader = DataLoader(train_set, **train_kwargs)
    test_loader = DataLoader(test_set, **test_kwargs)

    model = Net(args.dropout).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    losses = []
    for epoch in range(1, args.epochs + 1):
        losses += train(args, model, device, train_loader, optimizer, epoch)
        test_loss, accuracy = test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        torch.save(model.state_dict(), args.save_model)
    if args.json:
        results = {"device": str(device), "losses": losses, "test_loss": test_loss, "accuracy": accuracy}
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
