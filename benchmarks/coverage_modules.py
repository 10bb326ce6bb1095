"""PyTorch's own databases of modules and optimizers as trials."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from coverage_judge import Mover, Trial, quiet, seed_all
from coverage_ops import gradients
from torch import Tensor
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

STEPS = 4
"""Steps of an optimizer: those with averages and warm-ups have left their first branch."""


# ---- modules


def module_names() -> list[str]:
    """Return the formatted names of the modules."""
    return sorted({info.formatted_name for info in module_db})


def module_trials(name: str, dtype: torch.dtype, seed: int) -> Iterator[Trial]:
    """Return every input of a module, in training, and in evaluation where that differs.

    Args:
        name: The module's formatted name.
        dtype: Element type of its parameters.
        seed: Of inputs and parameters.
    """
    for info in module_db:
        if info.formatted_name != name or dtype not in info.supported_dtypes("cpu"):
            continue
        for training in (True, False) if info.train_and_eval_differ else (True,):
            own = (seed * 1_000_003 + zlib.crc32(f"{name} {dtype} {training}".encode())) % 2**31
            seed_all(own)
            with quiet():
                inputs = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
            for number, given in enumerate(inputs):
                run = functools.partial(_run_module, info, given, dtype, training, own + number)
                mode = "training" if training else "evaluation"
                yield Trial(name=f"{number} {mode} {given.desc}".strip(), run=run, seed=own + number)


def _run_module(
    info: Any, given: Any, dtype: torch.dtype, training: bool, seed: int, device: torch.device
) -> dict[str, Any]:
    """Build a module on the CPU, move it, run it; return output, gradients and what its state is afterwards."""
    built = deepcopy((given.constructor_input.args, given.constructor_input.kwargs))
    module = info.module_cls(*built[0], **built[1]).to(dtype).train(training)
    module = module.to(device)  # parameters of lazy ones take shape there, with the first input
    seed_all(seed)
    mover = Mover(device)
    args, kwargs = mover(given.forward_input.args), mover(given.forward_input.kwargs)
    output = module(*args, **kwargs)
    sources = [*mover.tensors, *module.parameters()]
    return {"output": output, **gradients(output, sources, seed), "state": dict(module.named_buffers())}


# ---- optimizers


def optimizer_names() -> list[str]:
    """Return the names of the optimizers."""
    return sorted({info.name for info in optim_db})


def optimizer_trials(name: str, dtype: torch.dtype, seed: int) -> Iterator[Trial]:
    """Return every input of an optimizer: plain, and with each of the implementations that it has.

    Args:
        name: Its class.
        dtype: Element type of the parameters.
        seed: Of parameters and gradients.
    """
    for info in optim_db:
        if info.name != name:
            continue
        for given in info.optim_inputs_func("cuda"):  # those of the CPU, and the capturable ones
            for implementation in (None, *info.supported_impls):
                if implementation == "fused" and "cpu" not in info.supports_fused_on:
                    continue
                if implementation == "differentiable" and given.kwargs.get("capturable"):
                    continue  # PyTorch's tests do not combine them
                kwargs = dict(given.kwargs) | ({implementation: True} if implementation else {})
                if implementation == "differentiable" and "foreach" in info.supported_impls:
                    kwargs["foreach"] = (
                        False  # PyTorch's SGD takes it where a device has it, and cannot differentiate it
                    )
                run = functools.partial(_run_optimizer, info, kwargs, dtype, seed)
                yield Trial(name=f"{given.desc} {implementation or ''}".strip(), run=run, seed=seed)


def _run_optimizer(info: Any, kwargs: dict[str, Any], dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """Take some steps; return parameters, the optimizer's state, and gradients through the steps where it has them."""
    kwargs = deepcopy(kwargs)
    if device.type == "cpu" and kwargs.pop("capturable", False):  # computes the same, and exists off the CPU only
        kwargs = {key: _plain(value) for key, value in kwargs.items()}
    generator = torch.Generator().manual_seed(seed)
    shapes = ((6, 4), (3, 6)) if info.name in ("Muon", "SparseAdam") else ((6, 4), (6,), (3, 6), ())
    start = [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
    slopes = [[torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes] for _ in range(STEPS)]
    leaves = [tensor.to(device).requires_grad_() for tensor in start]
    pushes = [[tensor.to(device) for tensor in step] for step in slopes]
    if kwargs.get("differentiable"):
        return _through_steps(info, kwargs, leaves, pushes)
    optimizer = info.optim_cls(leaves, **kwargs)
    for step in pushes:
        _step(info, optimizer, leaves, step)
    return {"parameters": leaves, "state": _flat(optimizer.state_dict()["state"])}


def _step(info: Any, optimizer: Any, leaves: list[Tensor], push: list[Tensor]) -> None:
    if info.step_requires_closure:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum(((leaf - target) ** 2).sum() for leaf, target in zip(leaves, push, strict=True))
            loss.backward()
            return loss

        optimizer.step(closure)
        return
    for leaf, slope in zip(leaves, push, strict=True):
        leaf.grad = slope.to_sparse() if info.only_supports_sparse_grads else slope.clone()
    optimizer.step()


def _through_steps(info: Any, kwargs: dict[str, Any], leaves: list[Tensor], pushes: list[list[Tensor]]) -> Any:
    copies = [leaf.clone() for leaf in leaves]
    slopes = [slope.requires_grad_() for slope in pushes[0]]
    optimizer = info.optim_cls(copies, **kwargs)
    for copy, slope in zip(copies, slopes, strict=True):
        copy.grad = slope.clone()
    optimizer.step()
    total = torch.stack([(copy**2).sum() for copy in copies]).sum()
    found = torch.autograd.grad(total, [*leaves, *slopes], allow_unused=True)
    return {"parameters": copies, "gradients": list(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def _flat(state: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state by name; numbers, such as counted steps, live on either side."""
    flat = {f"{number} {key}": value for number, entry in state.items() for key, value in entry.items()}
    return {
        key: _plain(value) if isinstance(value, Tensor) and value.dim() == 0 else value for key, value in flat.items()
    }
