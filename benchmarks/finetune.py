"""Can a model be fine-tuned on devices that are each too small for it, with adapters on frozen weights of 4 bits?

A model like Llama (random weights, 0.65 billion parameters, in files as on a hub, made one by one) is fine-tuned by
LoRA over CPU workers with budgets that none of them could hold its frozen weights in, though they are stored in 4 bits.
A process of its own is the client. Reported are the most memory that workers used against their budgets and against the
forecast, and the client's against one file of the weights. A small model in float64 is trained beside it in one
process with the same frozen weights: the losses are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import commit, finish, machine, show
from safetensors.torch import save_file
from torch import Tensor, nn

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.sizes import size_text

FILES = "model-{:05d}-of-{:05d}.safetensors"
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
"""Settings of glibc by which freed memory is the system's again."""


class Size(NamedTuple):
    """Sizes of a model and of its training.

    Args:
        hidden: Width.
        layers: Number of layers.
        inner: Width of the feed-forward layers.
        heads: Attention heads.
        shared: Heads of keys and values.
        words: Size of the vocabulary.
        file_mib: Most MiB of a file.
        rank: Of adapters.
        group: Inputs that share a scale.
        batch: Sequences of a step.
        micro_batch: Sequences that are computed at once.
        context: Tokens of a sequence.
    """

    hidden: int
    layers: int
    inner: int
    heads: int
    shared: int
    words: int
    file_mib: int
    rank: int = 8
    group: int = 64
    batch: int = 2
    micro_batch: int = 1
    context: int = 32


SIZES = {
    "full": Size(hidden=1536, layers=24, inner=4096, heads=12, shared=4, words=32_000, file_mib=256),
    "small": Size(hidden=512, layers=8, inner=1536, heads=4, shared=2, words=4096, file_mib=8, rank=2, context=32),
    "tiny": Size(hidden=32, layers=3, inner=64, heads=4, shared=2, words=64, file_mib=1, group=16, context=16),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument(
        "--size", default="full", choices=[name for name in SIZES if name != "tiny"], help="of the model"
    )
    parser.add_argument("--workers", type=int, default=2, choices=[2, 3])
    parser.add_argument(
        "--budget", type=float, default=0.95, help="of a worker, as a part of the frozen weights' bytes"
    )
    parser.add_argument("--stored", default="int4", choices=["int8", "int4"], help="how frozen weights are stored")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        print(json.dumps(client(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        parameters, file_bytes = write_files(SIZES[options.size], Path(folder))
        arguments = [sys.executable, __file__, *sys.argv[1:], "--client", folder]
        environment = os.environ | RETURNED
        done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, env=environment, timeout=3600)
    found = json.loads(done.stdout.splitlines()[-1])
    error = loss_error(options.stored)
    show(
        f"{parameters / 1e6:.0f} million parameters, frozen ones in {options.stored}; {options.workers} CPU workers",
        ["device", "budget", "forecast", "peak"],
        [
            [str(place), *(size_text(found[key][place]) for key in ("budgets", "forecast", "peaks"))]
            for place in range(options.workers)
        ],
    )
    result = {
        "parameters": parameters,
        "peak_over_budget": round(max(map(_ratio, found["peaks"], found["budgets"])), 4),
        "client_peak_over_shard": round(found["client_bytes"] / file_bytes, 4),
        "memory_error": round(
            max(abs(_ratio(a, b) - 1) for a, b in zip(found["forecast"], found["peaks"], strict=True)), 4
        ),
        "loss_error": error,
        "frozen_over_budget": round(found["frozen_bytes"] / max(found["budgets"]), 4),
        "step_s": round(found["step_s"], 3),
        "begin_s": round(found["begin_s"], 1),
        "plan_s": round(found["plan_s"], 1),
        "losses": found["losses"],
        "plan": found["plan"],
        "machine": machine(),
        "commit": commit(),
    }
    finish(result, as_json=options.json)


def _ratio(one: float, other: float) -> float:
    return one / other


# ---- the weights


def configuration(size: Size) -> Any:
    """Return the configuration of a model like Llama."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.shared,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        use_cache=False,
    )


def made(size: Size, dtype: torch.dtype) -> nn.Module:
    """Return the model without values."""
    import transformers

    with onebox.meta_parameters():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(configuration(size), dtype=dtype)
    return model


def write_files(size: Size, folder: Path) -> tuple[int, int]:
    """Write random weights into files, one after the other; return the number of parameters and the largest file's
    bytes."""
    specs = {name: each.shape for name, each in made(size, torch.bfloat16).named_parameters()}
    files: list[list[str]] = [[]]
    left = size.file_mib << 20
    for name, shape in specs.items():
        if files[-1] and 2 * shape.numel() > left:
            files.append([])
            left = size.file_mib << 20
        files[-1].append(name)
        left -= 2 * shape.numel()
    places = {}
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(files, start=1):
        file = FILES.format(number, len(files))
        tensors = {name: _drawn(name, specs[name], generator) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    return sum(shape.numel() for shape in specs.values()), largest


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


# ---- training


def adapted(model: nn.Module, stored: Any, size: Size) -> nn.Module:
    """Return a model with adapters, whose frozen linear layers are stored as integers."""
    import peft

    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=size.rank, target_modules="all-linear"))
    onebox.quantize_frozen(found, stored, group=size.group)
    torch.manual_seed(1)
    for module in found.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
            module.reset_lora_parameters("default", init_lora_weights=True)
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over the adapters."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def batches(size: Size) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield batches of random tokens."""
    generator = torch.Generator().manual_seed(2)
    while True:
        tokens = torch.randint(size.words, (size.batch, size.context + 1), generator=generator)
        yield {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def loss_in_float64(outputs: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in the type of the outputs."""
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def client(options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune, and return what was used of this process's memory, of the workers' and of time."""
    torch.set_num_threads(1)
    size, folder = SIZES[options.size], options.client
    with onebox.open("cpu*2", threads=1) as pool:  # what the first step imports and allocates
        small = adapted(made(SIZES["tiny"], torch.float32), options.stored, SIZES["tiny"])
        with tempfile.TemporaryDirectory() as other:
            write_files(SIZES["tiny"], Path(other))
            small = small.to(torch.bfloat16)
            with onebox.Trainer(
                small, loss_of, optimizer_of(small), pool=pool, plan="auto", weights=other, recovery=None
            ) as trainer:
                trainer.step(*next(batches(SIZES["tiny"])))
                trainer.wait()
    model = adapted(made(size, torch.bfloat16), options.stored, size)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    frozen_bytes = sum(each.nbytes for each in frozen)
    budget = int(options.budget * frozen_bytes)
    found: dict[str, Any] = {"frozen_bytes": frozen_bytes}

    def opened() -> onebox.Pool:
        return onebox.open(f"cpu*{options.workers}", threads=1, memory=f"{budget >> 10}KiB")

    def train() -> None:
        rows = batches(size)
        first, begin_s = next(rows), time.monotonic()
        with opened() as pool:  # of its own, for measuring takes memory, too
            plan = onebox.make_plan(model, loss_of, optimizer_of(model), *first, pool=pool).plan
        found["plan_s"], found["plan"] = time.monotonic() - begin_s, plan.describe()
        with (
            opened() as pool,
            onebox.Trainer(
                model, loss_of, optimizer_of(model), pool=pool, plan=plan, weights=folder, loss_reduction="mean"
            ) as trainer,
        ):
            begin_s = time.monotonic()
            losses = [trainer.step(*first).item()]
            found["begin_s"], begin_s = time.monotonic() - begin_s, time.monotonic()
            losses += [trainer.step(*next(rows)).item() for _ in range(options.steps - 1)]
            found["step_s"] = (time.monotonic() - begin_s) / max(1, options.steps - 1)
            found["losses"] = [round(loss, 4) for loss in losses]
            found["peaks"] = [each.peak_bytes for each in trainer.memory()]
            forecast = trainer.predicted_memory(*first)
            found["forecast"] = [forecast[place] for place in range(options.workers)]
            found["budgets"] = [device.memory_bytes for device in pool.devices]

    found["client_bytes"] = extra(train)
    return found


def extra(action: Callable[[], None]) -> int:
    """Return the bytes by which this process grew at most in an action."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before = _mark("VmRSS")
    action()
    return _mark("VmHWM") - before


def _mark(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def loss_error(stored: Any) -> float:
    """Return the largest difference of a loss of the tiny model in float64 from one process with the same weights."""
    size = SIZES["tiny"]
    torch.manual_seed(0)
    ours = adapted(made(size, torch.float64), stored, size).double()
    for name, parameter in ours.named_parameters():
        if parameter.is_meta:
            shape = parameter.shape
            value = torch.randn(shape, dtype=torch.float64) * 0.1 if parameter.is_floating_point() else None
            made_of = torch.randint(-8, 8, shape, dtype=torch.int8) if value is None else value.to(parameter.dtype)
            owner, _, last = name.rpartition(".")
            setattr(ours.get_submodule(owner), last, nn.Parameter(made_of, requires_grad=parameter.requires_grad))
    ours.tie_weights()
    rows = batches(size)
    steps = [next(rows) for _ in range(6)]
    alone = copy.deepcopy(ours)
    optimizer, expected = optimizer_of(alone), []
    for inputs, targets in steps:
        loss = loss_in_float64(alone(**inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    names = TracedModel(capture(ours, loss_in_float64, steps[0]), backward=True).segments
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    stages = tuple(Stage(segments=own, replicas=((place,),), shares=(1.0,)) for place, own in enumerate(halves))
    plan = Plan(stages=stages, micro_batch=size.micro_batch)
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(
            ours, loss_in_float64, optimizer_of(ours), pool=pool, plan=plan, loss_reduction="mean"
        ) as trainer,
    ):
        losses = [trainer.step(*batch).item() for batch in steps]
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


if __name__ == "__main__":
    main()
