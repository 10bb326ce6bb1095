"""Ten ways in which scripts go on after a lack of memory, as libraries and people write them.

Each script begins with more than its device has room for, finds out, and trains with what fits; it compares its losses
with those of the same batches on the CPU, and prints ``found`` last.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

MEMORY = "8MiB"

WITHIN_S = 240.0

COMMON = """
import gc, torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 64)
    def forward(self, x, labels=None):
        out = self.last(torch.relu(self.middle(torch.relu(self.first(x)))))
        return {"loss": out.square().mean(), "logits": out}
torch.manual_seed(1)
DATA = torch.randn(8192, 64)
def trained(place, batch, steps=3, lr=0.1):
    model = Model().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(DATA[:batch].to(place))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
def same(losses, batch):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(trained("cpu", batch)), rtol=1e-4, atol=1e-6)
"""

ACCELERATE = """
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
tried = []
@find_executable_batch_size(starting_batch_size=8192)
def train(batch_size):
    tried.append(batch_size)
    return trained("cuda", batch_size)
same(train(), tried[-1])
assert len(tried) > 1
try:
    torch.ones(1 << 22, device="cuda").sum().item()
except torch.cuda.OutOfMemoryError as error:
    assert isinstance(error, torch.OutOfMemoryError) and isinstance(error, RuntimeError)
    assert str(error).startswith("CUDA out of memory. Tried to allocate 16 MiB."), error
    assert should_reduce_batch_size(error)
    from lightning.pytorch.utilities.memory import is_cuda_out_of_memory, is_oom_error
    assert is_cuda_out_of_memory(error) and is_oom_error(error)
print("found", tried)
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
data = [{"x": DATA[number], "labels": torch.zeros(64)} for number in range(2048)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2048, max_steps=4, auto_find_batch_size=True, report_to=[], logging_steps=1,
    save_strategy="no", disable_tqdm=True, dataloader_drop_last=True,
)
trainer = Trainer(Model(), arguments, train_dataset=data)
loss = trainer.train().training_loss
assert 0 < loss < 1 and trainer._train_batch_size < 2048
print("found", trainer._train_batch_size)
"""

LIGHTNING = """
import lightning
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.net = 128, Model()
    def training_step(self, batch, index):
        return self.net(batch[0])["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA), batch_size=self.batch_size)
module = Module()
before = module.net.first.weight.tolist()
trainer = lightning.Trainer(
    accelerator="cuda", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
found = Tuner(trainer).scale_batch_size(module, mode="MODE", init_val=128, max_trials=6, steps_per_trial=2)
assert 128 <= found < 4096, found
assert module.net.first.weight.tolist() == before  # of the checkpoint from before the search
print("found", found)
"""

HALVED = """
batch = 8192
while True:
    try:
        losses = trained("cuda", batch)
        break
    except torch.OutOfMemoryError:
        batch //= 2
assert batch < 8192
same(losses, batch)
print("found", batch)
"""

BY_WORDS = """
batch, losses = 8192, None
while losses is None:
    try:
        losses = trained("cuda", batch)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        batch //= 2
    gc.collect()
    torch.cuda.empty_cache()
assert batch < 8192
same(losses, batch)
print("found", batch)
"""

SKIPPED = """
model, twin = Model().cuda(), Model()
optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin))
skipped = []
for step, size in enumerate((256, 8192, 128, 8192, 256)):
    try:
        optimizer.zero_grad()
        loss = model(DATA[:size].cuda())["loss"]
        loss.backward()
        optimizer.step()
        loss.item()
    except torch.cuda.OutOfMemoryError:
        skipped.append(step)
        del loss
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        continue
    other.zero_grad()
    twin(DATA[:size])["loss"].backward()
    other.step()
assert skipped == [1, 3], skipped
for mine, own in zip(model.parameters(), twin.parameters()):
    torch.testing.assert_close(mine.cpu(), own, rtol=1e-4, atol=1e-6)
print("found", skipped)
"""

ACCUMULATED = """
def step(model, optimizer, batch, parts):
    optimizer.zero_grad()
    total = 0.0
    for part in batch.chunk(parts):
        loss = model(part.cuda())["loss"] * (len(part) / len(batch))
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
parts, losses = 1, []
while len(losses) < 3:
    try:
        losses.append(step(model, optimizer, DATA[:4096], parts))
    except torch.OutOfMemoryError:
        parts *= 2
assert parts > 1
same(losses, 4096)
print("found", parts)
"""

GROWN = """
def fits(batch):
    try:
        trained("cuda", batch, steps=2)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
batch = 64
free, total = torch.cuda.mem_get_info()
assert free == total == 8 << 20 and torch.cuda.memory_allocated() == 0
while fits(2 * batch):
    batch *= 2
    assert torch.cuda.max_memory_allocated() <= total
    assert torch.cuda.memory_allocated() == 0
assert 64 < batch < 8192
same(trained("cuda", batch), batch)
print("found", batch)
"""

RECOMPUTED = """
from torch.utils.checkpoint import checkpoint
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
                                    for _ in range(8))
    def forward(self, x, recompute):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x.square().mean()
def run(place, recompute):
    model = Deep().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(DATA[:2048].to(place), recompute)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
recompute, losses = False, None
while losses is None:
    try:
        losses = run("cuda", recompute)
    except torch.OutOfMemoryError:
        assert not recompute
        recompute = True
assert recompute
torch.testing.assert_close(torch.tensor(losses), torch.tensor(run("cpu", False)), rtol=1e-4, atol=1e-6)
print("found", recompute)
"""

WAYS = {
    "accelerate find_executable_batch_size": ACCELERATE,
    "transformers auto_find_batch_size": TRANSFORMERS,
    "Lightning BatchSizeFinder, power": LIGHTNING.replace("MODE", "power"),
    "Lightning BatchSizeFinder, binsearch": LIGHTNING.replace("MODE", "binsearch"),
    "halved, by the class of the error": HALVED,
    "halved, by its words": BY_WORDS,
    "the batch is skipped": SKIPPED,
    "gradients are accumulated": ACCUMULATED,
    "grown until it does not fit": GROWN,
    "activations are recomputed": RECOMPUTED,
}
"""The ways, by what tables call them."""


def arguments(way: str, folder: Path, *flags: str) -> list[str]:
    """Write a script that goes on after a lack of memory, and return the arguments of ``onebox`` that run it.

    Args:
        way: One of :data:`WAYS`.
        folder: Where it is written.
        flags: Further ones of the command.
    """
    (folder / "script.py").write_text(COMMON + WAYS[way])
    return ["run", "--pool", "cpu", "--threads", "1", "--memory", MEMORY, *flags, "script.py"]


def goes_on(way: str, *flags: str) -> bool:
    """Run such a script, and return whether it has ended as it should."""
    with tempfile.TemporaryDirectory() as name:
        line = [sys.executable, "-m", "onebox", *arguments(way, Path(name), *flags)]
        done = subprocess.run(line, cwd=name, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
        return done.returncode == 0 and "found" in done.stdout
