"""``onebox memory``: yes or no by its exit status, where the peak is, and what would make it fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.cli import main
from onebox.plan import Plan

JOB = ("--model", "mlp", "--data", "digits", "--pool", "cpu", "--threads", "1")


@pytest.mark.feature("Memory: Ask whether a model fits")
def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *JOB, "--memory", "2MiB"]) == 0
    said = capsys.readouterr().out
    assert "mlp, batch 64, adamw: 1 stage on device 0, one micro-batch each" in said
    assert "it fits" in said
    assert "at the peak of device 0, in backward 0, aten." in said
    for sort in ("optimizer state", "parameters", "gradients", "activations"):
        assert sort in said
    assert "largest batch: " in said and "does not" in said
    assert "what would make it fit" not in said


@pytest.mark.feature("Memory: Learn what would fit, and the largest batch")
def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    speeds = ("--gflops", "20", "--bandwidth", "5")
    files = ("--out", str(tmp_path / "plan.json"), "--json")
    assert main(["memory", *JOB, "--batch", "256", "--memory", "1400KiB", *speeds, *files]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"]
    assert report["batch"] == 256
    (device,) = report["devices"]
    assert device["peak_bytes"] > device["budget_bytes"] == 1400 * 1024
    assert sum(device["sorts"].values()) == device["peak_bytes"]
    assert report["largest_batch"] < 256 and report["too_large_batch"] == report["largest_batch"] + 1
    assert report["times"] == "estimated for 20 GFLOP/s and 5 GB/s, as was said"
    best = report["ways"][0]
    assert best["fits"] and best["peak_bytes"]["0"] <= device["budget_bytes"] and not best["rejection_reason"]
    assert Plan.read(tmp_path / "plan.json").describe() == best["text"]


def test_what_is_wrong_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["memory", *JOB[:4], "--pool", "lab1"]) == 2
    assert "would have to be asked" in capsys.readouterr().err
    assert main(["memory", *JOB, "--memory", "much"]) == 2
    assert main(["memory", *JOB, "--plan", str(tmp_path / "none.json")]) == 2
    assert main(["memory", *JOB, "--report", str(tmp_path / "no" / "report.json")]) == 2


# ---- configurations of Hugging Face

TOKENS, SAMPLES = 32, 8
SAYING = "ignore:`is_gradient_checkpointing`:FutureWarning"  # what PEFT calls of transformers


def config_of(path: Path, **settings: Any) -> Path:
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(**sizes, **heads, **settings).save_pretrained(path)  # type: ignore[arg-type]
    return path / "config.json"


def trained_peaks(path: Path, plan: Plan, *, lora: bool, frozen: str | None) -> list[int]:
    """Return the peaks of devices that really train the model with a plan."""
    import peft
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, use_cache=False)
    dtype = torch.bfloat16 if frozen else torch.float32
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    if frozen == "int4":
        onebox.quantize_frozen(model, "int4")

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())

    rows = torch.randint(256, (SAMPLES, TOKENS))
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan, loss_reduction="mean") as trainer,
    ):
        for _ in range(3):
            assert trainer.step({"input_ids": rows}, rows).item() > 0
        return [memory.peak_bytes for memory in trainer.memory()]


@pytest.mark.feature("Memory: Ask by the config of a language model")
@pytest.mark.filterwarnings(SAYING)
@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ((), "6MiB,5MiB"),
        (("--lora", "4"), "4MiB,2200KiB"),
        (("--lora", "4", "--frozen", "bf16"), "2MiB,1500KiB"),
        (("--lora", "4", "--frozen", "int4"), "1500KiB,1200KiB"),
    ],
    ids=["all weights", "lora", "bf16", "int4"],
)
def test_what_a_config_says_is_what_training_takes(
    flags: tuple[str, ...], memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = config_of(tmp_path / "llama", dtype="float32"), tmp_path / "plan.json"
    line = ["--tokens", str(TOKENS), "--batch", str(SAMPLES), "--pool", "cpu*2", "--threads", "1", "--memory", memory]
    assert main(["memory", "--config", str(path), *flags, *line, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] and report["largest_batch"] >= SAMPLES
    plan = Plan.read(out)
    assert len(plan.devices) == 2, "neither device has room for all of it"
    frozen = flags[-1] if "--frozen" in flags else None
    peaks = trained_peaks(path, plan, lora=bool(flags), frozen=frozen)
    for device in report["devices"]:
        assert device["peak_bytes"] <= device["budget_bytes"]
        assert peaks[device["device"]] == device["peak_bytes"]


@pytest.mark.filterwarnings(SAYING)
def test_a_config_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_of(tmp_path / "llama").parent
    line = ["memory", "--config", str(path), "--tokens", "16", "--batch", "2", "--pool", "sim*2"]
    assert main([*line, "--memory", "1MiB,700KiB", "--lora", "2", "--frozen", "int4"]) == 0
    said = capsys.readouterr().out
    assert "llama of 5" in said and "of them trained, the others in int4, samples of 16 tokens, batch 2, adamw" in said
    assert "it fits" in said and "largest batch:" in said and "segments" in said
    assert main([*line, "--memory", "50KiB"]) == 1
    said = capsys.readouterr().out
    assert ("it does not fit" in said and "no plan fits" in said) or "would need" in said


@pytest.mark.filterwarnings(SAYING)
def test_configs_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*flags: str) -> str:
        assert main(["memory", "--pool", "sim", "--config", *flags]) == 2
        text = capsys.readouterr().err
        assert text.startswith("onebox: --") and text.count("\n") == 1
        return text

    assert "there is no such file or folder" in refusal(str(tmp_path / "none.json"))
    broken = tmp_path / "config.json"
    for text in ("{", "[]", "{}", '{"model_type": "nothing"}', '{"model_type": "vit"}'):
        broken.write_text(text)
        assert "no language model can be made of it" in refusal(str(broken))
    broken.write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.M"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('foreign code has run')\n")
    assert "no language model can be made of it" in refusal(str(broken))
    path = config_of(tmp_path / "llama", max_position_embeddings=16)
    assert f"--tokens 17: the model in {path} takes at most 16" in refusal(str(path), "--tokens", "17")
    odd = config_of(tmp_path / "odd", head_dim=8)
    text = refusal(str(odd), "--lora", "2", "--frozen", "int8")
    assert "--frozen int8: group=64" in text and "has 32 inputs" in text
    import transformers

    transformers.MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    text = refusal(str(tmp_path / "mamba"), "--lora", "2")
    assert text.startswith("onebox: --lora 2: PEFT has no adapters for mamba: ")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(str(broken)).endswith("pip install transformers\n")
