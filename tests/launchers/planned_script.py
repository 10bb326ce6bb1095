"""A GPT-2 with the ``Trainer`` of transformers, on the devices that it finds, or with planned steps on a pool."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LENGTH, WORDS = 32, 256


class Texts(Dataset):
    """So many texts of random words."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Times(TrainerCallback):
    """The time of each log, which has waited for its step."""

    def __init__(self) -> None:
        self.logs_s: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.logs_s.append(time.monotonic())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool", help="of planned steps; else the script's own devices are used")
    parser.add_argument("--batch", type=int, default=16, help="of all devices together")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    small = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    shape = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": options.width, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**shape, **small))
    devices = 1 if options.pool else max(1, torch.cuda.device_count())
    arguments = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=options.batch // devices,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=devices == 1,
    )
    kind, more = Trainer, {}
    if options.pool:
        from onebox.integrations.transformers import PlannedTrainer

        kind, more = PlannedTrainer, {"pool": options.pool}
    times = Times()
    data = Texts(options.batch * options.steps)
    trainer = kind(model, arguments, train_dataset=data, callbacks=[times], **more)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    steps_s = [after - before for before, after in zip(times.logs_s, times.logs_s[1:], strict=False)]
    print(json.dumps({"losses": losses, "ranks": 1, "steps_s": steps_s}), flush=True)
