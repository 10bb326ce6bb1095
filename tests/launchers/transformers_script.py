"""A small GPT-2, or a small BERT that classifies, with the ``Trainer`` of transformers, stopped and resumed."""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


class Texts(Dataset):
    def __init__(self, *, classes: bool) -> None:
        self.tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
        self.labels = self.tokens[:, 0] % 2 if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def language_model(layers: int, *, spread: bool) -> nn.Module:
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    if spread and torch.cuda.is_available():
        model.save_pretrained("start")
        model = GPT2LMHeadModel.from_pretrained("start", device_map="auto")
        assert set(model.hf_device_map.values()) == {0, 1}, model.hf_device_map
    return model


def classifier() -> nn.Module:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return BertForSequenceClassification(config)


def with_adapters(model: nn.Module, *, dora: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["c_attn", "c_fc"]
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, use_dora=dora))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], help="flags of TrainingArguments to turn on")
    parser.add_argument("--device-map", action="store_true")
    parser.add_argument("--classifier", action="store_true")
    parser.add_argument("--pretrained", action="store_true", help="load the model from a folder, after a collective")
    parser.add_argument("--adapters", choices=["lora", "dora"])
    options = parser.parse_args()
    torch.manual_seed(0)
    model = classifier() if options.classifier else language_model(options.layers, spread=options.device_map)
    if options.adapters:
        model = with_adapters(model, dora=options.adapters == "dora")
    arguments = TrainingArguments(
        output_dir="run",
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
    if options.pretrained:
        with arguments.main_process_first():
            if arguments.process_index == 0:
                model.save_pretrained("start")
        model = type(model).from_pretrained("start")
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(classes=options.classifier))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    trainer.train(resume_from_checkpoint="run/checkpoint-3")
    losses += [line["loss"] for line in trainer.state.log_history if "loss" in line][3:]
    if trainer.is_world_process_zero():
        used = sorted({str(parameter.device) for parameter in model.parameters()})
        print(json.dumps({"losses": losses, "ranks": arguments.world_size, "devices": used}), flush=True)
