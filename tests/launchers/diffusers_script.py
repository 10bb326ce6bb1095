"""A denoising loop with a small UNet and a scheduler of diffusers, on accelerate."""

from __future__ import annotations

import json

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 100

if __name__ == "__main__":
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = DDPMScheduler(num_train_timesteps=STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = DataLoader(TensorDataset(torch.randn(32, 3, 16, 16)), batch_size=8)
    accelerator = Accelerator()
    model, optimizer, images = accelerator.prepare(model, optimizer, images)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for (clean,) in images:
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        times = torch.randint(STEPS, (len(clean),), generator=generator).to(clean.device)
        found = model(scheduler.add_noise(clean, noise, times), times, return_dict=False)[0]
        loss = nn.functional.mse_loss(found, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "ranks": accelerator.num_processes}), flush=True)
    accelerator.end_training()
