"""``onebox memory``: memory of a model on some devices, and changes that would make it fit; nothing is run."""

from __future__ import annotations

import importlib
import math
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.cli.console import OutputConsole
from onebox.cli.exit_status import FAILED, OK
from onebox.cli.options.estimates import MemoryConfig
from onebox.cli.options.jobs import DATA_PARALLEL
from onebox.cli.output_files import check_target, give_json
from onebox.cli.planning import job_of, write_plan
from onebox.cli.training.run_setup import load_data, make_optimizer
from onebox.cost.estimate import DeviceRates
from onebox.engine.planning.memory_fit import FitReport, estimate_memory
from onebox.engine.state.weight_files import meta_parameters
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.frozen_weights import quantize_frozen
from onebox.graph import Loss
from onebox.report.tables.memory import curve_lines, peak_table, residents_table
from onebox.report.tables.memory_estimate import estimate_data, largest_line, verdict_line, ways_table
from onebox.report.tables.plan import stage_table

_WIDTH = 60
_OPERATOR_S = 5e-6

_FAULTY = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, OSError, RuntimeError, TypeError, ValueError),
)
"""Errors of transformers and PEFT at configurations that no model can be made of."""

_TOKENS = 512
"""Tokens of a sample of a language model."""


def show_memory_estimate(config: MemoryConfig) -> int:
    """Estimate the memory, and show the result.

    Returns:
        0 if it fits, 1 if it does not.

    Raises:
        UsageError: An option does not fit, or a file cannot be read or written.
        CaptureError: The model cannot be captured.
    """
    check_target("--out", config.out)
    check_target("--report", config.report)
    job = config.resolved()
    if job.config is None:
        title, asked = config.model, job_of(job, load_data(job))
    else:
        title, asked = _language_job(job, job.config)
    found = estimate_memory(
        *asked,
        memory=config.memory,
        pool=config.pool,
        threads=config.threads,
        plan=config.data_parallel if config.plan_asked == DATA_PARALLEL else config.plan_asked,
        precision=config.precision,
        clip_grad_norm=config.clip_grad_norm,
        rates=_rates(config),
    )
    console = OutputConsole(highlight=False, quiet=config.json)
    _print(found, f"{title}, batch {found.batch}, {config.optimizer}", console)
    if config.json or config.report is not None:
        give_json(estimate_data(found), printed=config.json, path=config.report)
    if config.out is not None:
        _write(config.out, found, console)
    return OK if found.fits else FAILED


def _rates(config: MemoryConfig) -> DeviceRates | None:
    if config.gflops is None or config.bandwidth is None:
        return None
    return DeviceRates(flops=config.gflops * 1e9, bandwidth_bps=config.bandwidth * 1e9, operator_s=_OPERATOR_S)


def _language_job(config: MemoryConfig, path: Path) -> tuple[str, tuple[nn.Module, Loss, Optimizers, Any, Any]]:
    """Return a title, and the language model of a configuration of Hugging Face, without values, with its loss, an
    optimizer, and a batch.

    Raises:
        UsageError: A package is missing, or the configuration cannot be read, or is of no language model.
    """
    transformers = _imported("transformers", f"--config {path}")
    if not path.exists():
        raise UsageError(f"--config {path}: there is no such file or folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what these packages call of each other
        try:
            found = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            dtype = torch.bfloat16 if config.frozen else getattr(found, "dtype", None) or torch.float32
            found.use_cache = False
            with meta_parameters():
                model = transformers.AutoModelForCausalLM.from_config(found, dtype=dtype, trust_remote_code=False)
        except _FAULTY as error:
            said = " ".join(str(error).split())
            raise UsageError(f"--config {path}: no language model can be made of it: {said}") from None
        if config.lora is not None:
            peft = _imported("peft", f"--lora {config.lora}")
            try:
                model = peft.get_peft_model(model, peft.LoraConfig(r=config.lora, target_modules="all-linear"))
            except _FAULTY as error:
                said = " ".join(str(error).split())
                raise UsageError(f"--lora {config.lora}: PEFT has no adapters for {found.model_type}: {said}") from None
    count, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    title = f"{found.model_type} of {count:,} parameters in {path}"
    if config.lora is not None:
        title += f", {trained:,} of them trained, the others in {config.frozen or str(dtype).removeprefix('torch.')}"
    if config.frozen in ("int8", "int4"):
        try:
            quantize_frozen(model, config.frozen)
        except UsageError as error:
            raise UsageError(f"--frozen {config.frozen}: {error}") from None
    most = getattr(found, "max_position_embeddings", None) or math.inf
    if config.tokens is not None and config.tokens > most:
        raise UsageError(f"--tokens {config.tokens}: the model in {path} takes at most {most}")
    tokens = torch.zeros(config.batch, config.tokens or int(min(_TOKENS, most)), dtype=torch.int64)
    job = model.train(), _next_token_loss, make_optimizer(config, model), {"input_ids": tokens}, tokens
    return f"{title}, samples of {tokens.shape[1]} tokens", job


def _next_token_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each token but the first, given those before it."""
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits, targets[:, 1:].flatten())


def _imported(name: str, user: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{user} needs {name}, which cannot be imported ({error}): pip install {name}") from None


def _print(found: FitReport, title: str, console: OutputConsole) -> None:
    """Print the estimate: whether it fits, the peak and its contents, the largest batch, and possible remedies."""
    budgets: dict[int, int | None] = dict(found.budgets)
    emulated = [device.number for device in found.devices if device.emulated]
    worst = max(found.peaks.values(), key=lambda peak: peak.size_bytes / found.budgets[peak.device])
    tables = [peak_table(found.curves, budgets, emulated=emulated), residents_table(worst)]
    split = None
    if found.plan.predicted is not None and len(found.plan.stages) > 1 and len(found.plan.devices) > 1:
        split = stage_table(found.plan, found.segments, emulated)
    if found.ways:
        tables.append(ways_table(found.ways, found.step_s or 0.0))
    console.widen([*tables, *([split] if split else [])])
    console.write_line(f"{title}: {found.plan.describe()}")
    console.write_line(verdict_line(found))
    if split is not None:
        console.print(split)
    console.print(tables[0])
    for line in curve_lines(found.curves, budgets, _WIDTH):
        console.write_line(line)
    during = f", {worst.operator}" if worst.operator else ""
    console.write_line(f"\nat the peak of device {worst.device}, in {worst.name}{during}")
    console.print(tables[1])
    console.write_line(largest_line(found))
    if found.ways:
        console.write_line(f"\nwhat would make it fit; times are {found.basis}")
        console.print(tables[2])
    if found.refusal:
        console.write_line(found.refusal)


def _write(path: Path, found: FitReport, console: OutputConsole) -> None:
    """Write the plan that fits, if there is one."""
    plans = [found.plan] if found.fits else [way.plan for way in found.ways if way.fits]
    if plans:
        write_plan(path, plans[0])
        console.write_line(f"plan {path}: {plans[0].describe()}")
