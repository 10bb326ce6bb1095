"""Libraries that halve batches until they fit decide by the class and the text of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.cli.commands import command

POOL = ("--pool", "cpu", "--threads", "1", "--memory", "8MiB")

MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 64)
    def forward(self, x, labels=None):
        out = self.last(torch.relu(self.first(x)))
        return {"loss": out.square().mean(), "logits": out}
"""

ACCELERATE = """
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
tried = []
@find_executable_batch_size(starting_batch_size=8192)
def train(batch_size):
    tried.append(batch_size)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(64.0, device="cuda").repeat(batch_size, 1).sin())["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
losses = train()
assert losses == sorted(losses, reverse=True), losses
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
data = [{"x": torch.arange(64.0).add(number).sin(), "labels": torch.zeros(64)} for number in range(2048)]
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
        self.batch_size, self.net = 256, Model()
    def training_step(self, batch, index):
        return self.net(batch[0])["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(20000, 64)), batch_size=self.batch_size)
module = Module()
before = module.net.first.weight.tolist()
trainer = lightning.Trainer(
    accelerator="cuda", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
found = Tuner(trainer).scale_batch_size(module, mode="power", init_val=256, max_trials=6, steps_per_trial=2)
assert 256 <= found < 8192, found
assert module.net.first.weight.tolist() == before  # of the checkpoint from before the search
print("found", found)
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(ACCELERATE, id="accelerate"),
        pytest.param(TRANSFORMERS, id="transformers"),
        pytest.param(LIGHTNING, id="lightning"),
    ],
)
def test_a_batch_size_that_fits_is_found(tmp_path: Path, script: str) -> None:
    (tmp_path / "script.py").write_text(MODEL + script)
    done = command(["run", *POOL, "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "found" in done.stdout
