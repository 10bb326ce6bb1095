"""A small GPT-2 with the ``Trainer`` of transformers."""

from __future__ import annotations

import argparse
import json
import os
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], help="flags of TrainingArguments to turn on")
    parser.add_argument("--device-map", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config)
    if options.device_map and torch.cuda.is_available():
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            model = GPT2LMHeadModel.from_pretrained(saved, device_map="auto")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=6,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            disable_tqdm=True,
            dataloader_drop_last=True,
            use_cpu=not torch.cuda.is_available(),
            **dict.fromkeys(options.set, True),
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
        trainer.train()
        trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-3"))
        if trainer.is_world_process_zero():
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            used = sorted({str(parameter.device) for parameter in model.parameters()})
            print(json.dumps({"losses": losses, "ranks": arguments.world_size, "devices": used}), flush=True)
