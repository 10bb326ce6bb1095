"""A script of a rank, which trains, stops at some steps until it is told to go on, and says what has come of it."""

from __future__ import annotations


def rank_script(*stops: int) -> str:
    """Return the script.

    Args:
        stops: The steps after which rank 0 prints ``STEP`` and reads a line.
    """
    return f"""
import hashlib, os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
generator = torch.Generator().manual_seed(rank)
for step in range(12):
    x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
    if step in {stops} and rank == 0:
        print("STEP", flush=True)
        input()
bits = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
said = f"BITS {{hashlib.sha256(bits).hexdigest()}}\\nPLACE {{rank}} {{torch.cuda.get_device_name(device)}}\\n"
os.write(1, said.encode())  # at once: lines of two ranks do not mix
dist.destroy_process_group()
"""
