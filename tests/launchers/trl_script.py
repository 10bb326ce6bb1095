"""Supervised fine-tuning of a small Llama with the ``SFTTrainer`` of trl, with a tokenizer of forty words."""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = 40


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pretrained", action="store_true", help="load the model from a folder, as trl's sft.py does")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    rows = [" ".join(f"w{n}" for n in torch.randint(WORDS, (10,), generator=generator)) for _ in range(64)]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    arguments = SFTConfig(
        output_dir="run",
        per_device_train_batch_size=options.batch,
        max_steps=5,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_length=16,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    texts = Dataset.from_dict({"text": rows})
    model: LlamaForCausalLM | str = LlamaForCausalLM(config)
    if options.pretrained:
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                model.save_pretrained("start")
        model, arguments.model_init_kwargs = "start", {"dtype": "float32"}
    trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if options.pretrained:
        trainer.save_model("tuned")
        trainer.accelerator.wait_for_everyone()
        tuned = LlamaForCausalLM.from_pretrained("tuned", dtype="float32").to(arguments.device)
        rest = SFTTrainer(tuned, arguments, train_dataset=texts, processing_class=tokenizer())
        rest.train()
        losses += [line["loss"] for line in rest.state.log_history if "loss" in line]
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses, "ranks": arguments.world_size}), flush=True)
