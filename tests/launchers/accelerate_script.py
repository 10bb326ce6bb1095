"""A training loop with accelerate: accumulated gradients, gathered losses, saved and restored state."""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", default="no")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, mixed_precision=options.mixed_precision)
    torch.manual_seed(0)
    kind = torch.float64 if options.mixed_precision == "no" else torch.float32
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(64, 16, dtype=torch.float64).to(kind), torch.randint(0, 4, (64,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    losses = []
    for epoch in range(2):
        for samples, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(samples), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if epoch == 0:
            accelerator.save_state("state")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.wait_for_everyone()
            accelerator.load_state("state")
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "ranks": accelerator.num_processes}), flush=True)
    accelerator.end_training()
