"""Training of a script of the grammar, as plain PyTorch and by a trainer and on a virtual device; for reproductions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.vgpu import attach
from tests.kit.trainer_arguments import grouped

Ran = tuple[list[float], dict[str, Tensor]]
"""Losses and evaluations in their order, and parameters and buffers at the end."""


def plain(script: Any, device: str = "cpu", disturbed: float = 0.0) -> Ran:
    """Train as anybody would.

    Args:
        script: Of the grammar.
        device: Of the model.
        disturbed: By which part parameters are changed before the first step.
    """
    model = script.build()
    if device != "cpu":
        model = model.to(device)
    if disturbed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + disturbed * torch.randn_like(parameter))
    made, loss = script.optimizers(model), script.loss_of(model)
    after, values = script.schedule(made), []
    for step, (all_inputs, all_targets) in enumerate(script.batches()):
        inputs, targets = all_inputs.to(device), all_targets.to(device)
        script.change(step, model, made, lambda: None)
        for optimizer in made:
            optimizer.zero_grad()
        total, samples = 0.0, len(inputs)
        size = samples if "no mean" in script.TOPICS else script.MICRO_BATCH
        for start in range(0, samples, size):
            x, y = inputs[start : start + size], targets[start : start + size]
            value = loss(model(x), y)
            if script.OPTIONS.get("loss_reduction") != "sum":
                value = value * (len(x) / samples)
            value.backward()
            total += float(value.detach())
        if script.CLIP is not None:
            every = [p for optimizer in made for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(every, script.CLIP)
        for optimizer in made:
            optimizer.step()
        after()
        values.append(total)
        if script.EVALUATE:
            values.append(evaluated(model, loss, inputs, targets))
    return values, {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def evaluated(model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor) -> float:
    """Return the loss of a batch in eval mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        value = float(loss(model(inputs), targets))
    for module, mode in modes.items():
        module.training = mode
    return value


def trained(script: Any, pool: onebox.Pool) -> Ran:
    """Train by a trainer."""
    model = script.build()
    made, loss = script.optimizers(model), script.loss_of(model)
    after, values = script.schedule(made), []
    batches = script.batches()
    options = {"clip_grad_norm": script.CLIP, "micro_batch": script.MICRO_BATCH, **script.OPTIONS}
    plan = two_stages(script, batches[0]) if script.STAGES else None
    if plan is not None:
        options = {**options, "plan": plan}
        del options["micro_batch"]  # which the plan says
    with onebox.Trainer(model, loss, made if len(made) > 1 else made[0], **grouped(pool=pool, **options)) as trainer:
        for step, (x, y) in enumerate(batches):
            script.change(step, model, made, trainer.pull)
            values.append(trainer.step(x, y))
            after()
            if script.EVALUATE:
                values.append(trainer.evaluate([(x, y)]).loss)
        values = [float(value) for value in values]
        trainer.pull()
    return values, {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def two_stages(script: Any, batch: tuple[Tensor, Tensor]) -> Plan | None:
    """Return a plan of two stages, each on a device; ``None`` for a model of one segment."""
    model, size = copy.deepcopy(script.build()), script.MICRO_BATCH
    part = batch[0][:size], batch[1][:size]
    names = TracedModel(capture(model, script.loss_of(model), part), backward=True).segments
    cut = len(names) // 2
    if not cut:
        return None
    stages = [
        Stage(segments=own, replicas=((device,),), shares=(1.0,))
        for device, own in enumerate((names[:cut], names[cut:]))
    ]
    return Plan(stages=tuple(stages), micro_batch=size, schedule=script.STAGES)


def largest(found: Ran, expected: Ran) -> tuple[float, str]:
    """Return the largest difference of two runs, and where it is; infinite where one is no number."""
    gaps = {f"value {n}": apart(a, b) for n, (a, b) in enumerate(zip(found[0], expected[0], strict=True))}
    gaps |= {name: apart(found[1][name], tensor) for name, tensor in expected[1].items()}
    where = max(gaps, key=lambda name: gaps[name])
    return gaps[where], where


def apart(left: Tensor | float, right: Tensor | float) -> float:
    """Return the largest difference of two tensors or numbers."""
    a, b = (torch.as_tensor(each, dtype=torch.float64) for each in (left, right))
    gaps = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(gaps.nan_to_num(nan=float("inf")).max()) if gaps.numel() else 0.0


def compare(script: Any, pool: onebox.Pool) -> tuple[float, str]:
    """Run a script all ways and return the largest difference from plain PyTorch, and where it is.

    A run that magnifies rounding, as Adam does where gradients are zero but for it, is allowed what a disturbance of
    the last bit does to plain PyTorch, a few times over.
    """
    torch.set_default_dtype(torch.float64)
    attach(pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = plain(script)
        found = {"trainer": trained(script, pool), "vgpu": plain(script, "vgpu:0")}
        gaps = {way: largest(each, expected) for way, each in found.items()}
        way = max(gaps, key=lambda way: gaps[way][0])
        difference, where = gaps[way]
        if difference > 1e-10:
            magnified = max(largest(plain(script, disturbed=2e-16), expected)[0] for _ in range(3))
            difference = max(0.0, difference - 10 * magnified) if magnified > 1e-12 else difference
    return difference, f"{where} of the {way}"
