"""Fused kernels of optimizers: those that differ from the plain ones are found, and are not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.wire import KernelSpec, Many, SlotArgument
from onebox.worker.optimizer.fused_kernels import exactly, is_exact
from onebox.worker.programs.kernels import CompiledKernel

aten = torch.ops.aten

CPU = torch.device("cpu")

HALVES = [torch.bfloat16, torch.float16]

CLASSES = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {"weight_decay": 0.1},
    "Adam": {"amsgrad": True, "eps": 1e-3},
    "AdamW": {"weight_decay": 0.1, "eps": 1e-3},
}


@pytest.mark.parametrize("name", CLASSES)
def test_wide_types_are_fused(name: str) -> None:
    assert is_exact(name, torch.float32, CPU)
    assert is_exact(name, torch.float64, CPU)


def test_what_has_no_fused_kernel_is_not_exact() -> None:
    assert not is_exact("RMSprop", torch.float32, CPU)
    assert not is_exact("SGD", torch.complex64, CPU)


@pytest.mark.parametrize("fault", ["does nothing", "leaves vectors alone", "forgets maximize", "makes NaN"])
def test_kernels_that_differ_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch._fused_sgd_

    def wrong(parameters: list[Tensor], gradients: list[Tensor], *args: Any, **options: Any) -> None:
        before = [parameter.clone() for parameter in parameters]
        if fault == "forgets maximize":
            options["maximize"] = False
        right(parameters, gradients, *args, **options)
        for parameter, old in zip(parameters, before, strict=True):
            if fault == "does nothing":
                parameter.copy_(old)
            elif fault == "leaves vectors alone":
                whole = parameter.numel() // 16 * 16
                parameter[:whole] = old[:whole]
            elif fault == "makes NaN":
                parameter[0] = torch.nan

    monkeypatch.setattr(torch, "_fused_sgd_", wrong)
    assert not is_exact.__wrapped__("SGD", torch.float32, CPU)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_a_users_fused_kernel_moves_every_element(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own optimizer with fused=True, whose operator is what workers call: against the plain kernel."""
    start = torch.linspace(-1, 1, 101).to(dtype)
    plain, fused = (torch.nn.Parameter(start.clone()) for _ in range(2))
    made = getattr(torch.optim, name)
    slow, quick = made([plain], lr=0.1, **CLASSES[name]), made([fused], lr=0.1, fused=True, **CLASSES[name])
    operator = f"_fused_{name.lower()}_"
    is_exact(name, dtype, CPU)  # of PyTorch's own kernel, before another takes its place
    monkeypatch.setattr(torch, operator, exactly(getattr(aten, operator).default))
    for step in range(3):
        plain.grad = (start + 2 + step / 4) / 2
        fused.grad = plain.grad.clone()
        slow.step()
        quick.step()
    torch.testing.assert_close(fused, plain, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert (fused - start).abs().min() > 0.05


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_kernels_of_virtual_devices_and_functional_forms(dtype: torch.dtype) -> None:
    start, gradient = torch.ones(40, dtype=dtype), torch.full((40,), 0.25, dtype=dtype)
    options: dict[str, Any] = {
        "weight_decay": 0.0, "momentum": 0.0, "lr": 1.0, "dampening": 0.0, "nesterov": False, "maximize": False,
        "is_first_step": True,
    }  # fmt: skip
    moved, _, _ = exactly(aten._fused_sgd.default)([start], [gradient], [], **options)
    assert moved[0].dtype is dtype
    assert moved[0].unique().tolist() == [0.75]
    assert start.unique().tolist() == [1.0]
    lists = (Many((SlotArgument(0),)), Many((SlotArgument(1),)), Many(()))
    kernel = KernelSpec("aten._fused_sgd_.default", lists, dict(options), 2, 0, ())
    compiled = CompiledKernel(kernel, CPU, lambda number: torch.Generator())
    compiled.run(*compiled.pick([start, gradient, *compiled.constants]))
    assert start.unique().tolist() == [0.75]
