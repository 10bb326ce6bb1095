"""Data-parallel training by hand: one thread per GPU, 200 samples each, gradients averaged on the host.

Every thread owns a replica of the model on its GPU. In each step it computes the gradients of its own samples and hands
them to the host; the last one to arrive averages all of them; then each thread applies the average to its replica. The
replicas stay equal. Without a GPU the replicas live on the CPU; with too few GPUs, they share.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector


def make_model() -> nn.Module:
    """A LeNet for images of 1 x 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def load_digits():
    """Read 1,797 scans of 8 x 8 pixels, with levels from 0 to 16, and the digits that they show."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)


def make_sets():
    """Return images of 1 x 28 x 28 and labels, of the training set and of the test set, which is every fifth."""
    scans, digits = load_digits()
    images = torch.tensor(scans / 8 - 1, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, size=28, mode="bilinear")
    labels = torch.tensor(digits)
    test = torch.arange(len(labels)) % 5 == 4
    return (images[~test], labels[~test]), (images[test], labels[test])


class Replicas:
    """The replicas of a model, and the place on the host where their gradients meet."""

    def __init__(self, args, data):
        self.args, self.data = args, data
        gpus = torch.cuda.device_count()
        self.devices = [torch.device("cuda", rank % gpus) if gpus else torch.device("cpu") for rank in range(args.gpus)]
        start = make_model()
        self.models = [make_model().to(device) for device in self.devices]
        for model in self.models:
            model.load_state_dict(start.state_dict())
        self.gradients: list[torch.Tensor | None] = [None] * args.gpus
        self.average: torch.Tensor | None = None
        self.losses = torch.zeros(args.gpus, args.steps)
        self.failures: list[BaseException] = []
        self.barrier = threading.Barrier(args.gpus, action=self.reduce)

    def reduce(self):
        """Average the gradients; the last thread at the barrier does it while the others wait."""
        self.average = torch.stack(self.gradients).mean(dim=0)

    def train(self, rank: int):
        """Train one replica: what each thread runs."""
        device, model = self.devices[rank], self.models[rank]
        images, labels = self.data
        if device.type == "cuda":
            torch.cuda.set_device(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.args.lr)
        picks = torch.Generator().manual_seed(1000 * self.args.seed + rank)
        parameters = list(model.parameters())
        for step in range(self.args.steps):
            chosen = torch.randint(len(images), (self.args.batch_size,), generator=picks)
            loss = F.cross_entropy(model(images[chosen].to(device)), labels[chosen].to(device))
            optimizer.zero_grad()
            loss.backward()
            self.gradients[rank] = torch.cat([each.grad.flatten() for each in parameters]).cpu()
            self.losses[rank, step] = loss.item()
            self.barrier.wait()
            shares = self.average.to(device).split([each.numel() for each in parameters])
            for parameter, share in zip(parameters, shares, strict=True):
                parameter.grad.copy_(share.view_as(parameter))
            optimizer.step()
            if rank == 0 and step % 10 == 0:
                print(f"step {step:3d}  loss of replica 0: {self.losses[0, step]:.4f}")

    def guarded(self, rank: int):
        """Train; when that fails, wake the other threads and keep the reason."""
        try:
            self.train(rank)
        except threading.BrokenBarrierError:
            pass  # another thread failed, and says why
        except BaseException as failure:
            self.failures.append(failure)
            self.barrier.abort()

    def run(self):
        """Run all threads to their end."""
        threads = [threading.Thread(target=self.guarded, args=(rank,)) for rank in range(self.args.gpus)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in self.failures:
            raise failure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="replicas, each with its thread")
    parser.add_argument("--batch-size", type=int, default=200, help="samples of each replica in a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_set, (test_images, test_labels) = make_sets()
    replicas = Replicas(args, train_set)
    print(f"{args.gpus} replicas on {', '.join(str(device) for device in replicas.devices)}")
    start = time.perf_counter()
    replicas.run()
    rate = args.gpus * args.batch_size * args.steps / (time.perf_counter() - start)

    weights = [parameters_to_vector(model.parameters()).detach().cpu() for model in replicas.models]
    apart = max((each - weights[0]).abs().max().item() for each in weights)
    with torch.no_grad():
        outputs = replicas.models[0](test_images.to(replicas.devices[0]))
    accuracy = (outputs.argmax(1).cpu() == test_labels).float().mean().item()
    print(f"{rate:,.0f} samples/s, test accuracy {accuracy:.1%}, replicas differ by {apart:.1e}")
    if args.json:
        results = {"devices": [str(device) for device in replicas.devices], "samples_per_s": rate}
        results |= {"losses": replicas.losses.mean(dim=0).tolist(), "accuracy": accuracy, "apart": apart}
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
