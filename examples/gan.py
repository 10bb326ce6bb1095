"""Train a generative adversarial network that draws digits: two networks, two optimizers, one game.

The noise is drawn on the CPU and moved to the GPU, so that a run with the same seed gives the same pictures on any
machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn


def make_generator(latent: int, width: int) -> nn.Module:
    """From noise of latent x 1 x 1 to pictures of 1 x 8 x 8 with values from -1 to 1."""
    return nn.Sequential(
        nn.ConvTranspose2d(latent, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(2 * width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Module:
    """From pictures of 1 x 8 x 8 to one number each: how real it looks, as a logit."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(2 * width, 1, 4),
        nn.Flatten(start_dim=0),
    )


def initialize(module: nn.Module):
    """Small normal weights, as is usual for these networks."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.05)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def show(picture: torch.Tensor):
    """Print a picture of 8 x 8 with characters of growing darkness."""
    shades = " .:-=+*#%@"
    for row in ((picture.clamp(-1, 1) + 1) / 2 * (len(shades) - 1)).round().int().tolist():
        print("  " + "".join(2 * shades[value] for value in row))


def load_digits():
    """Read 1,797 scans of 8 x 8 pixels, with levels from 0 to 16, and the digits that they show."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--latent", type=int, default=16, help="numbers of noise for each picture")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scans, _ = load_digits()
    pictures = torch.tensor(scans / 8 - 1, dtype=torch.float32).unsqueeze(1).to(device)
    generator = make_generator(args.latent, args.width).apply(initialize).to(device)
    discriminator = make_discriminator(args.width).apply(initialize).to(device)
    criterion = nn.BCEWithLogitsLoss()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    real = torch.full((args.batch_size,), 0.9, device=device)  # not 1: a discriminator that is too sure stops teaching
    fake = torch.zeros(args.batch_size, device=device)
    draws = torch.Generator().manual_seed(args.seed)

    losses, generator_losses = [], []
    for step in range(args.steps):
        chosen = torch.randint(len(pictures), (args.batch_size,), generator=draws).to(device)
        noise = torch.randn(args.batch_size, args.latent, 1, 1, generator=draws).to(device)
        forged = generator(noise)

        discriminator.zero_grad()
        loss_real = criterion(discriminator(pictures[chosen]), real)
        loss_real.backward()
        loss_fake = criterion(discriminator(forged.detach()), fake)
        loss_fake.backward()
        discriminator_optimizer.step()

        generator.zero_grad()
        loss_generator = criterion(discriminator(forged), real)
        loss_generator.backward()
        generator_optimizer.step()

        losses.append((loss_real + loss_fake).item())
        generator_losses.append(loss_generator.item())
        if step % 50 == 0:
            print(f"step {step:4d}  discriminator {losses[-1]:.4f}  generator {generator_losses[-1]:.4f}")

    generator.eval()
    with torch.no_grad():
        drawn = generator(torch.randn(2, args.latent, 1, 1, generator=draws).to(device)).cpu()
    for picture in drawn[:, 0]:
        show(picture)
        print()
    if args.json:
        results = {"device": str(device), "mean_shade": drawn.mean().item()}
        results |= {"losses": losses, "generator_losses": generator_losses}
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
