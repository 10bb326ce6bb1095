"""Models on the meta device whose weights are in files: they train as models in this process do, and this process has
a few of their tensors in memory at a time."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.engine.state.weight_files import write_weights
from onebox.engine.workload.batch import as_batch
from onebox.errors import CheckpointError, UsageError
from onebox.plan import Plan, Stage
from onebox.wire import spec_of
from tests.kit.pools import Pools
from tests.kit.reference import AGREE, train
from tests.process.test_client_memory import RETURNED

STEPS = 4
SPLIT = Plan(
    stages=(
        Stage(segments=("model.table", "model.first"), replicas=((0,),), shares=(1.0,)),
        Stage(segments=("model.second", "model.head"), replicas=((1,),), shares=(1.0,)),
    ),
    micro_batch=4,
)


class Net(nn.Module):
    """A model with a tied embedding, and with buffers that no file has or that training changes."""

    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("rates", torch.linspace(0.5, 1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.table(x) * self.rates).tanh())
        found: Tensor = self.head(self.second(hidden).tanh())
        return found


def ordinary() -> Net:
    torch.manual_seed(0)
    return Net().double()


def on_meta() -> Net:
    with onebox.meta_parameters():
        return Net().double()


def written(path: Path, model: nn.Module, *, shard_bytes: int = 600) -> Path:
    """Write the weights of a model as on a hub."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    write_weights(path, specs, lambda names: [tensors[name] for name in names], shard_bytes=shard_bytes)
    return path


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randint(11, (8,), generator=made), torch.randint(11, (8,), generator=made)) for _ in range(STEPS)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)


def in_fours(samples: int) -> Sequence[int]:
    return [4] * (samples // 4)


loss = nn.functional.cross_entropy


@pytest.mark.feature("Memory: Train a model larger than the client")
@pytest.mark.parametrize("plan", [SPLIT, onebox.DataParallel(micro_batch=4)], ids=["stages", "replicas"])
def test_it_trains_as_a_model_in_this_process_and_goes_on(
    pools: Pools, tmp_path: Path, plan: Plan | onebox.DataParallel
) -> None:
    reference = ordinary()
    path = written(tmp_path / "hub", reference)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    expected = train(reference, loss, adam(reference), batches(), in_fours)
    model = on_meta()
    with onebox.Trainer(
        model, loss, adam(model), pool=pools(2), plan=plan, loss_reduction="mean", weights=path
    ) as first:
        losses = [first.step(*batch).item() for batch in batches()[:2]]
        with pytest.raises(UsageError, match=r"model.table.weight and 6 more: on the meta device here, .*save_weights"):
            first.pull()
        first.save(tmp_path / "run")
    model = on_meta()
    with onebox.Trainer.resume(tmp_path / "run", model, loss, adam(model), pool=pools(2)) as second:
        losses += [second.step(*batch).item() for batch in batches()[2:]]
        found = second.tensors()
        second.save_weights(tmp_path / "result", shard="1KB")
        with pytest.raises(UsageError, match="has weights already"):
            second.save_weights(tmp_path / "result")
    assert losses == pytest.approx(expected.losses, abs=AGREE)
    for name, tensor in expected.tensors.items():
        if f"model.{name}" in found:
            assert torch.allclose(found[f"model.{name}"], tensor, rtol=0, atol=AGREE)
    again = ordinary()
    state = onebox.Trainer(
        again, loss, adam(again), pool=pools(2), weights=tmp_path / "result"
    )  # writes into the model
    state.close()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, found[f"model.{'table.weight' if name == 'head.weight' else name}"])


def test_what_is_not_trained_stays_on_the_meta_device(pools: Pools, tmp_path: Path) -> None:
    """Of a frozen model with parts of its own, these are pulled; they are changed by hand, and shared."""

    def frozen(made: Net) -> Net:
        for part in (made.table, made.first, made.norm):
            part.requires_grad_(False)
        made.norm.eval()
        return made

    reference = frozen(ordinary())
    path = written(tmp_path / "hub", reference)
    expected = train(reference, loss, adam(reference), batches(), in_fours)
    model = frozen(on_meta())
    model.second.to_empty(device="cpu")
    with onebox.Trainer(model, loss, adam(model), pool=pools(2), plan=SPLIT, loss_reduction="mean", weights=path) as it:
        losses = [it.step(*batch).item() for batch in batches()]
        it.pull()
        assert model.table.weight.is_meta and model.norm.weight.is_meta
        assert torch.allclose(model.second.weight, reference.second.weight, rtol=0, atol=AGREE)
        it.push()
        with torch.no_grad():
            model.second.weight.zero_()
            model.second.bias.zero_()
        assert it.evaluate([batches()[0]]).loss == pytest.approx(math.log(11), abs=AGREE)
        with torch.no_grad():
            model.table.weight.zero_()
        with pytest.raises(UsageError, match=r"model.table.weight: on the meta device here"):
            it.step(*batches()[0])
        it.step(*batches()[0]).item()
    assert losses == pytest.approx(expected.losses, abs=AGREE)


def test_weights_come_again_after_a_loss_and_planning_needs_none(tmp_path: Path) -> None:
    path = written(tmp_path / "hub", ordinary())
    model = on_meta()
    with onebox.open("cpu*2", threads=1) as pool:
        planned = onebox.make_plan(model, loss, adam(model), *batches()[0], pool=pool, micro_batches=[4], budget_s=0.5)
        recovery = onebox.Recovery(snapshot_every=100)
        with onebox.Trainer(
            model, loss, adam(model), pool=pool, plan=SPLIT, loss_reduction="mean", weights=path, recovery=recovery
        ) as trainer:
            losses = [trainer.step(*batch).item() for batch in batches()[:2]]
            os.kill(pool.process_ids[1], signal.SIGKILL)
            losses += [trainer.step(*batch).item() for batch in batches()[2:]]
            assert trainer.recoveries
    reference = ordinary()
    assert losses == pytest.approx(train(reference, loss, adam(reference), batches(), in_fours).losses, abs=AGREE)
    assert planned.plan.stages


def test_a_file_that_is_away_for_a_while(pools: Pools, tmp_path: Path) -> None:
    path = written(tmp_path / "hub", ordinary())
    (last,) = path.glob("model-00003-*")
    model = on_meta()
    with onebox.Trainer(
        model, loss, adam(model), pool=pools(2), plan=SPLIT, loss_reduction="mean", weights=path
    ) as trainer:
        last.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"model-00003-.* cannot be read any more"):
                trainer.step(*batches()[0])
        (tmp_path / "away").rename(last)
        losses = [trainer.step(*batch).item() for batch in batches()]
    reference = ordinary()
    assert losses == pytest.approx(train(reference, loss, adam(reference), batches(), in_fours).losses, abs=AGREE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model, pool, path: onebox.Trainer(model, loss, adam(model), pool=pool),
            "without values: give the folder",
        ),
        (
            lambda model, pool, path: onebox.Trainer(
                model, loss, adam(model), pool=pool, weights=path, islands=[[0], [1]]
            ),
            "islands= need a model with values in this process",
        ),
    ],
    ids=["no weights", "islands"],
)
def test_refusals(pools: Pools, tmp_path: Path, make: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(on_meta(), pools(2), written(tmp_path / "hub", ordinary()))


SHARD_BYTES = 64 << 20
MODEL_BYTES = 6 * SHARD_BYTES

SCRIPT = f"""
import sys
import torch
from torch import nn
from safetensors.torch import save_file
import json
from pathlib import Path
import onebox
from onebox.plan import Plan, Stage

LAYERS = {MODEL_BYTES >> 24}  # of 16 MiB


def mark(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def extra(action):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before = mark("VmRSS")
    action()
    return mark("VmHWM") - before


class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


torch.set_num_threads(1)
folder = Path(sys.argv[1])
names = [f"layers.{{n}}.weight" for n in range(LAYERS)]
places = {{}}
for start in range(0, LAYERS, 4):
    file = f"model-{{start // 4 + 1:05d}}-of-{{LAYERS // 4:05d}}.safetensors"
    save_file({{name: torch.randn(2048, 2048) for name in names[start : start + 4]}}, folder / file)
    places |= dict.fromkeys(names[start : start + 4], file)
(folder / "model.safetensors.index.json").write_text(json.dumps({{"weight_map": places}}))


def trainer(size, pool, **more):
    with onebox.meta_parameters():
        model = Model(size)
    if not more:
        model.to_empty(device="cpu")
    half = LAYERS // 2
    stages = tuple(
        Stage(
            segments=tuple(f"model.layers.{{n}}" for n in part),
            replicas=((device,),),
            shares=(1.0,),
        )
        for device, part in enumerate([range(half), range(half, LAYERS)])
    )
    return onebox.Trainer(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool,
        plan=Plan(stages=stages, micro_batch=2), recovery=None, **more
    )


def step(trainer, size):
    trainer.step(torch.ones(2, size), torch.zeros(2, size))
    trainer.wait()


with onebox.open("cpu*2", threads=1) as pool:
    with trainer(8, pool) as first:
        step(first, 8)  # what the first step imports and allocates
    second = trainer(2048, pool, weights=folder)
    print(extra(lambda: step(second, 2048)))
    print(extra(lambda: second.save_weights(folder / "result", shard="64MiB")))
    second._close(keep=False)
"""


def test_loading_and_writing_take_less_than_two_files(tmp_path: Path) -> None:
    """Of six files of 64 MiB, a few tensors of 16 MiB are in memory: mapped, and as they are sent."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | RETURNED,
    )
    assert done.returncode == 0, done.stderr
    loaded, saved = map(int, done.stdout.split())
    assert loaded < 2 * SHARD_BYTES, loaded
    assert saved < 2 * SHARD_BYTES, saved


# ---- transformers and PEFT


SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OWN_SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0},
    "Bloom": {"n_layer": 2, "n_head": 2},
    "Gemma2": {"head_dim": 8},
    "Phi3": {"resid_pdrop": 0.0},
}
"""Settings by other names, and dropout off."""


def config_of(family: str, **settings: Any) -> Any:
    import transformers  # takes seconds

    return getattr(transformers, f"{family}Config")(**SIZES | OWN_SIZES.get(family, {}) | settings)


def token_batches() -> list[tuple[dict[str, Tensor], Tensor]]:
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(32, (8, 6), generator=made) for _ in range(STEPS)]
    return [({"input_ids": row[:, :-1]}, row[:, 1:]) for row in rows]


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def halves(trainer: onebox.Trainer, batch: tuple[Any, Tensor]) -> Plan:
    """Return a plan of two stages on two devices."""
    names = trainer.captures.segments(as_batch(*batch), 4)
    half = len(names) // 2
    parts = names[:half], names[half:]
    stages = (Stage(segments=own, replicas=((device,),), shares=(1.0,)) for device, own in enumerate(parts))
    return Plan(stages=tuple(stages), micro_batch=4)


def segments_of(model: nn.Module, pool: onebox.Pool, path: Path) -> Plan:
    with onebox.Trainer(model, token_loss, adam(model), pool=pool, weights=path) as trainer:
        return halves(trainer, token_batches()[0])


@pytest.mark.feature("Checkpoints: Read and write weights in the layout of a hub")
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("Llama", True),
        ("Llama", False),
        *((name, True) for name in ("GPT2", "Qwen2", "Mistral", "Gemma2", "OPT", "Bloom")),
        ("Phi3", False),
    ],
)
def test_a_folder_that_transformers_has_written(pools: Pools, tmp_path: Path, family: str, tied: bool) -> None:
    import transformers

    config = config_of(family, tie_word_embeddings=tied)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    reference.save_pretrained(tmp_path / "hub", max_shard_size="8KB")
    with onebox.meta_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    plan = segments_of(model, pools(2), tmp_path / "hub")
    expected = train(reference, token_loss, adam(reference), token_batches(), in_fours)
    with onebox.Trainer(
        model, token_loss, adam(model), pool=pools(2), plan=plan, loss_reduction="mean", weights=tmp_path / "hub"
    ) as trainer:
        losses = [trainer.step(*batch).item() for batch in token_batches()]
        trainer.save_weights(tmp_path / "result", shard="8KB")
    assert losses == pytest.approx(expected.losses, abs=AGREE)
    config.save_pretrained(tmp_path / "result")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result", dtype=torch.float64)
    for name, tensor in read.state_dict().items():
        assert torch.allclose(tensor, reference.state_dict()[name], rtol=0, atol=AGREE), name


@pytest.mark.feature("Memory: Fine-tune adapters of PEFT")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it of transformers' models
def test_adapters_of_peft_are_trained_pulled_and_read_by_it(pools: Pools, tmp_path: Path) -> None:
    import peft
    import transformers

    config = config_of("Llama")
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    base.save_pretrained(tmp_path / "hub", max_shard_size="8KB")
    with onebox.meta_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(
        CheckpointError, match=r"has nothing for 'model.base_model.model.* in the model, without values"
    ):
        onebox.Trainer(model, token_loss, adam(model), pool=pools(2), weights=tmp_path / "hub")
    give_values(model)
    adapters = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    assert adapters and all("lora_" in name for name in adapters)

    reference = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    reference.load_state_dict(adapters, strict=False)
    plan = segments_of(model, pools(2), tmp_path / "hub")
    expected = train(reference, token_loss, adam(reference), token_batches(), in_fours)
    with onebox.Trainer(
        model, token_loss, adam(model), pool=pools(2), plan=plan, loss_reduction="mean", weights=tmp_path / "hub"
    ) as trainer:
        losses = [trainer.step(*batch).item() for batch in token_batches()]
        trainer.pull()
    assert losses == pytest.approx(expected.losses, abs=AGREE)
    model.save_pretrained(tmp_path / "adapters")
    assert {file.name for file in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float64)
    read = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    for (inputs, _), other in zip(token_batches(), token_batches(), strict=True):
        found, wanted = read(**inputs).logits, reference(**other[0]).logits
        assert torch.allclose(found, wanted, rtol=0, atol=AGREE)


def give_values(model: nn.Module) -> None:
    """Give the adapters of a model on the meta device the values that PEFT begins with."""
    import peft

    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
            module.reset_lora_parameters("default", init_lora_weights=True)


@pytest.mark.feature("Memory: Quantise frozen weights")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it of transformers' models
@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_frozen_weights_are_quantised_as_they_are_read(tmp_path: Path, stored: Any) -> None:
    import peft
    import transformers

    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config_of("Llama"), dtype=torch.float64)
    base.save_pretrained(tmp_path / "hub", max_shard_size="8KB")
    with onebox.meta_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config_of("Llama"), dtype=torch.float64)
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model, reference = peft.get_peft_model(model, adapters), peft.get_peft_model(base, adapters)
    changed = [onebox.quantize_frozen(each, stored, group=8) for each in (model, reference)]
    assert changed[0] == changed[1]
    assert len(changed[0]) == 2 * 7
    give_values(model)
    trained = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    reference.load_state_dict(trained, strict=False)
    expected = train(reference, token_loss, adam(reference), token_batches(), in_fours)
    with onebox.open("cpu*2", threads=1) as pool:
        arguments: dict[str, Any] = {"plan": segments_of(model, pool, tmp_path / "hub"), "recovery": onebox.Recovery()}
        arguments |= {"loss_reduction": "mean", "weights": tmp_path / "hub"}
        trainer = onebox.Trainer(model, token_loss, adam(model), pool=pool, **arguments)
        losses = [trainer.step(*batch).item() for batch in token_batches()]
        os.kill(pool.process_ids[1], signal.SIGKILL)
        assert trainer.step(*token_batches()[0]).item() < losses[0]  # what it had is read, and quantised, again
        assert len(trainer.recoveries) == 1
        trainer.close()
    assert losses == pytest.approx(expected.losses, abs=AGREE)
