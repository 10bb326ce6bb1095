"""Scripts that train on two virtual devices, and print the bits of their weights: ``lost_workers_script.py NAME``.

Each prints a line before every step, so that a worker can be killed in a step.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 80
READ_EVERY = 4


def say(line: str) -> None:
    """Write a line at once, beside those of other ranks."""
    sys.stdout.flush()
    os.write(1, f"{line}\n".encode())


def steps() -> Iterator[int]:
    """Yield the numbers of the steps, and print each."""
    for number in range(STEPS):
        say(f"STEP {number}")
        yield number


def tell(tensors: Iterable[Tensor]) -> None:
    """Print a digest of tensors."""
    made = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    say(f"BITS {made.hexdigest()}")


def batch(generator: torch.Generator, samples: int = 32) -> tuple[Tensor, Tensor]:
    """Return samples [N, 64] and classes [N]."""
    return torch.randn(samples, 64, generator=generator), torch.randint(10, (samples,), generator=generator)


def two_stages() -> None:
    """Two parts of a model, moved to devices by hand, with dropout and batch norm."""
    first = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)).to("cuda:0")
    second = nn.Linear(256, 10).to("cuda:1")
    train([first, second], lambda x: second(first(x.to("cuda:0")).to("cuda:1")), "cuda:1")


def data_parallel() -> None:
    """``nn.DataParallel`` over both."""
    net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
    model = nn.DataParallel(nn.Sequential(net, nn.Linear(8 * 36, 10)).to("cuda:0"))
    train([model], lambda x: model(x.to("cuda:0")), "cuda:0")


def train(parts: Iterable[nn.Module], forward, device: str, rank: int = 0) -> None:
    """Train a classifier, and print its bits."""
    modules = nn.ModuleList(parts)
    optimizer = torch.optim.AdamW(modules.parameters(), 1e-3)
    generator, total = torch.Generator().manual_seed(rank), torch.zeros((), device=device)
    for number in steps():
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y.to(device))
        loss.backward()
        optimizer.step()
        if number % READ_EVERY == 0:
            total += loss.item()
    tell([total, *modules.state_dict().values()])


def ranks() -> None:
    """A rank of DistributedDataParallel, by torchrun."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = nn.parallel.DistributedDataParallel(net)
    train([model], lambda x: model(x.to(device)), str(device), dist.get_rank())
    dist.destroy_process_group()


def gan() -> None:
    """Two networks with an optimizer each, on a device each, and a generator of random numbers."""
    draw = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)).to("cuda:0")
    judge = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1)).to("cuda:1")
    drawing, judging = torch.optim.Adam(draw.parameters(), 1e-3), torch.optim.RMSprop(judge.parameters(), 1e-3)
    told, total = nn.BCEWithLogitsLoss(), 0.0
    one, zero = torch.ones(32, 1, device="cuda:1"), torch.zeros(32, 1, device="cuda:1")
    noise = torch.Generator("cuda:0").manual_seed(5)
    for number in steps():
        drawn = draw(torch.randn(32, 16, device="cuda:0", generator=noise)).to("cuda:1")
        judging.zero_grad()
        seen = told(judge(torch.randn(32, 32, device="cuda:1")), one) + told(judge(drawn.detach()), zero)
        seen.backward()
        judging.step()
        drawing.zero_grad()
        told(judge(drawn), one).backward()
        drawing.step()
        if number % READ_EVERY == 0:
            total += seen.item()
    tell([torch.tensor(total), *draw.state_dict().values(), *judge.state_dict().values()])


def gpt() -> None:
    """A small GPT with tied weights, gradients that are clipped, and autocast."""
    words, block = nn.Embedding(64, 32).to("cuda:0"), nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    block = block.to("cuda:0")
    optimizer = torch.optim.AdamW([*words.parameters(), *block.parameters()], 1e-3)
    generator, total = torch.Generator().manual_seed(1), 0.0
    mask = nn.Transformer.generate_square_subsequent_mask(16, device="cuda:0")
    for number in steps():
        tokens = torch.randint(64, (8, 17), generator=generator).to("cuda:0")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            scores = block(words(tokens[:, :-1]), mask, is_causal=True) @ words.weight.t()
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(words.parameters(), 1.0)
        optimizer.step()
        if number % READ_EVERY == 0:
            total += loss.item()
    tell([torch.tensor(total), *words.parameters(), *block.parameters()])


def lora() -> None:
    """The Trainer of transformers, with adapters of PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Told(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, arguments: object, state: object, control: object, **_: object) -> None:
            say(f"STEP {state.global_step}")  # type: ignore[attr-defined]

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], lora_dropout=0.1)
    model = get_peft_model(GPT2LMHeadModel(config), adapters)
    tokens = torch.randint(0, 64, (STEPS * 8, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": each, "labels": each} for each in tokens]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=READ_EVERY, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=model, args=options, train_dataset=data, callbacks=[Told()]).train()
    tell(model.state_dict().values())


SCRIPTS = {each.__name__: each for each in (two_stages, data_parallel, ranks, gan, gpt, lora)}

if __name__ == "__main__":
    torch.manual_seed(0)
    SCRIPTS[sys.argv[1]]()
