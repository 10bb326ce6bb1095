"""Train deep transformer blocks with little memory: activations are computed again in the backward pass.

Each block runs under torch.utils.checkpoint, which keeps its input only. In the middle of the run the script saves
model and optimizer, makes new ones, loads the file into them and goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tagger(nn.Module):
    """Vectors in, a class for each of them out; the blocks are recomputed in the backward pass."""

    def __init__(self, args):
        super().__init__()
        self.reentrant, self.enabled = args.reentrant, not args.no_checkpoint
        self.inlet = nn.Linear(args.features, args.width)
        self.places = nn.Parameter(0.1 * torch.randn(args.length, args.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, 4, 2 * args.width, args.dropout, batch_first=True, norm_first=True)
            for _ in range(args.layers)
        )
        self.outlet = nn.Linear(args.width, args.classes)

    def forward(self, x):
        x = self.inlet(x) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.enabled else block(x)
        return self.outlet(x)


def make_data(args):
    """Sequences drawn from a seed; a place's class is the largest of some mixed features of it and its neighbour."""
    draws = torch.Generator().manual_seed(args.seed)
    inputs = torch.randn(args.samples, args.length, args.features, generator=draws)
    mix = torch.randn(args.features, args.classes, generator=draws)
    targets = ((inputs + 0.5 * inputs.roll(1, dims=1)) @ mix).argmax(dim=-1)
    return inputs, targets


def make(args, device):
    """Return a new model on the device, and its optimizer."""
    model = Tagger(args).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


def train(args, model, optimizer, data, steps, device):
    """Train for some steps and return the loss of each."""
    model.train()
    inputs, targets = data
    losses = []
    for step in steps:
        chosen = torch.arange(step * args.batch_size, (step + 1) * args.batch_size) % args.samples
        logits = model(inputs[chosen].to(device))
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets[chosen].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--features", type=int, default=12)
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--reentrant", action="store_true", help="the older way of checkpointing")
    parser.add_argument("--no-checkpoint", action="store_true", help="keep all activations")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = make_data(args)
    half = args.steps // 2
    model, optimizer = make(args, device)
    losses = train(args, model, optimizer, data, range(half), device)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "half.pt"
        torch.save({"step": half, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        del model, optimizer
        model, optimizer = make(args, device)
        stored = torch.load(file, map_location=device)
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    print(f"saved and loaded after {stored['step']} steps")
    losses += train(args, model, optimizer, data, range(stored["step"], args.steps), device)

    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    if peak:
        print(f"at most {peak / 2**20:.1f} MiB on {torch.cuda.get_device_name(device)}")
    if args.json:
        Path(args.json).write_text(json.dumps({"device": str(device), "losses": losses, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
