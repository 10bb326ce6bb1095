"""Train an image classifier in mixed precision: autocast for the forward pass, a GradScaler for float16 gradients."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_model(width: int) -> nn.Module:
    """A convolutional network for images of 1 x 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_digits():
    """Read 1,797 scans of 8 x 8 pixels, with levels from 0 to 16, and the digits that they show."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="of the forward pass; float32: no autocast")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[args.dtype]
    scans, digits = load_digits()
    images = torch.tensor(scans / 8 - 1, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits)
    train_images, train_labels = images[:1437].to(device), labels[:1437].to(device)

    model = make_model(args.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    mixed = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    losses = []
    for step in range(args.steps):
        chosen = torch.randint(1437, (args.batch_size,)).to(device)
        optimizer.zero_grad(set_to_none=True)
        with mixed:
            outputs = model(train_images[chosen])
            loss = nn.functional.cross_entropy(outputs, train_labels[chosen])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}  scale {scaler.get_scale():g}  outputs {outputs.dtype}")

    model.eval()
    with torch.no_grad(), mixed:
        outputs = model(images[1437:].to(device))
    accuracy = (outputs.argmax(1).cpu() == labels[1437:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}")
    if args.json:
        results = {"device": str(device), "outputs": str(outputs.dtype), "scale": scaler.get_scale()}
        results |= {"losses": losses, "accuracy": accuracy}
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
