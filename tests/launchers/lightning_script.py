"""A Lightning module and its trainer."""

from __future__ import annotations

import json
import logging
import sys
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        samples, labels = batch
        loss = nn.functional.cross_entropy(self.net(samples), labels)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.found.append(trainer.callback_metrics["loss"].item())


if __name__ == "__main__":
    devices, strategy = int(sys.argv[1]), sys.argv[2]
    logging.getLogger("lightning").setLevel(logging.ERROR)
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(64, 16, dtype=torch.float64), torch.randint(0, 4, (64,)))
    with tempfile.TemporaryDirectory() as folder:
        losses = Losses()
        trainer = lightning.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=devices,
            strategy=strategy,
            max_epochs=2,
            callbacks=[losses, ModelCheckpoint(dirpath=folder, every_n_epochs=1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), DataLoader(data, batch_size=8))
        if trainer.is_global_zero:
            last = trainer.callback_metrics["loss"].item()  # all that processes of ddp_spawn and ddp_fork send back
            print(json.dumps({"losses": [*losses.found, last], "ranks": trainer.world_size}), flush=True)
