"""Under --uneven, accelerate, Lightning and transformers train as with equal batches, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onebox.vgpu import SHARES
from tests.process.vgpu.two_ranks import launched

pytestmark = pytest.mark.long

ACCELERATE = """
import json, sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
samples = TensorDataset(torch.randn(22, 3), torch.randn(22, 2))
model = torch.nn.Linear(3, 2)
accelerator = Accelerator(SETTINGS)
loader = DataLoader(samples, batch_size=8 if accelerator.dataloader_config.split_batches else 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
sizes = []
for epoch in range(2):
    for x, y in loader:
        sizes.append(len(x))
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
weight = accelerator.unwrap_model(model).weight.cpu().tolist()
with open(f"{sys.argv[1]}{accelerator.process_index}", "w") as file:
    json.dump([sizes, weight], file)
accelerator.end_training()
"""

LIGHTNING = """
import json, sys
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.sizes = torch.nn.Linear(3, 2), []

    def training_step(self, batch):
        x, y = batch
        self.sizes.append(len(x))
        return torch.nn.functional.mse_loss(self.net(x), y)

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


L.seed_everything(0)
samples = TensorDataset(torch.randn(22, 3), torch.randn(22, 2))
net = Net()
trainer = L.Trainer(
    accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=2, strategy="ddp", max_epochs=2, precision=64,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(net, DataLoader(samples, batch_size=4, shuffle=True))
with open(f"{sys.argv[1]}{trainer.global_rank}", "w") as file:
    json.dump([net.sizes, net.net.weight.cpu().tolist()], file)
"""

TRANSFORMERS = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0)
model = GPT2LMHeadModel(config).double()
source, sizes = torch.Generator().manual_seed(1), []
rows = [torch.randint(11, (8,), generator=source) for _ in range(22)]
samples = [{"input_ids": row, "labels": torch.where(torch.arange(8) < 3 + number % 5, row, -100)}
           for number, row in enumerate(rows)]  # of unequal numbers of tokens
model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
trainer = Trainer(
    model,
    TrainingArguments(sys.argv[1] + "-run", per_device_train_batch_size=4, num_train_epochs=2, learning_rate=0.1,
                      optim="sgd", save_strategy="no", report_to=[], disable_tqdm=True, SETTINGS),
    train_dataset=samples,
)
trainer.train()
with open(f"{sys.argv[1]}{trainer.args.process_index}", "w") as file:
    json.dump([sizes, model.transformer.wte.weight.tolist()], file)
"""

CASES = {
    "accelerate": (ACCELERATE, ""),
    "accelerate, whole batches divided": (
        "from accelerate.utils import DataLoaderConfiguration" + ACCELERATE,
        "dataloader_config=DataLoaderConfiguration(split_batches=True)",
    ),
    "lightning": (LIGHTNING, ""),
    "transformers": (TRANSFORMERS, ""),
    "transformers, accumulating": (TRANSFORMERS, "gradient_accumulation_steps=2"),
    "transformers, means of ranks": (TRANSFORMERS, "average_tokens_across_devices=not torch.cuda.is_available()"),
}
"""In the last one, equal batches would count alike whatever their tokens; unequal ones are weighted by these."""


@pytest.mark.feature("Launchers: Give ranks batches by the speed of their devices")
@pytest.mark.parametrize("name", CASES)
def test_a_framework_trains_on_all_samples(name: str, tmp_path: Path) -> None:
    script, settings = CASES[name]
    script = script.replace("SETTINGS", settings)
    run = ["onebox", "run", "--pool", "cpu*2", "--threads", "1", "torchrun"]
    ours = launched(run, script, tmp_path / "ours", **{SHARES: "1,0.25"})
    theirs = launched(["torch.distributed.run"], script, tmp_path / "theirs", ACCELERATE_USE_CPU="true")
    assert [sizes for sizes, _ in theirs] == [[4, 4, theirs[0][0][2]] * 2] * 2
    assert [sizes[:2] for sizes, _ in ours] == [[7, 7], [1, 1]]
    assert [sum(sizes) for sizes in zip(*(sizes for sizes, _ in ours), strict=True)] == [
        sum(sizes) for sizes in zip(*(sizes for sizes, _ in theirs), strict=True)
    ]
    tolerance = 1e-8 if "means" in name else 1e-12  # this loss is in float32, and divided where the other is not
    for _, weight in ours:
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(theirs[0][1]), rtol=0, atol=tolerance)
