"""Fused optimizer kernels, and the check that they agree with the plain ones.

A fused kernel updates all parameters of a group at once. Some are wrong: in PyTorch 2.13 ``_fused_sgd_`` on CPUs does
not change float16 and bfloat16 elements in whole vectors. So each is compared with the plain kernel, once per process,
before it is used; one that differs is not used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.worker.optimizer.optimizer_patch import without_compiler

_ADAM: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.25, "amsgrad": True},
    {"weight_decay": 0.25, "maximize": True},
    {"amsgrad": True, "maximize": True, "betas": (0.5, 0.75), "eps": 1e-3},
]

_PROBES: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"maximize": True, "weight_decay": 0.25},
        {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.25},
        {"momentum": 0.5, "nesterov": True, "maximize": True},
    ],
    "Adagrad": [{}, {"lr_decay": 0.25, "weight_decay": 0.25, "maximize": True, "initial_accumulator_value": 0.5}],
    "Adam": _ADAM,
    "AdamW": _ADAM,
}
"""Options with which each class is compared: every code path of its kernels."""

_LENGTHS = (101, 3, 64)
"""Lengths of the tensors in a comparison: whole vectors of any processor and a remainder, a remainder alone, vectors
alone."""

_STEPS = 4

_LR = 0.25
"""Large, so that an unchanged element is far from the correct value in any type."""

_ULPS = 8
"""Tolerance of a fused kernel in roundings, beyond twice the error of the plain one."""


@functools.cache
def is_exact(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a fused kernel agrees with the plain one, within the rounding of its type.

    Both are compared with the same steps in float64; the error of the fused one may be twice that of the plain one plus
    a few roundings. Kernels of ``meta`` compute nothing and pass.

    Args:
        name: A class of ``torch.optim``.
        dtype: Type of the parameters.
        device: Device of the parameters.
    """
    if device.type == "meta":
        return True
    if name not in _PROBES or not dtype.is_floating_point:
        return False
    for options in _PROBES[name]:
        exact = _stepped(name, options, torch.float64, torch.device("cpu"), fused=False)
        plain = _off(_stepped(name, options, dtype, device, fused=False), exact)
        try:
            fused = _off(_stepped(name, options, dtype, device, fused=True), exact)
        except RuntimeError:  # none for this type or device; includes NotImplementedError
            return False
        # not <=, which is false for NaN
        if not fused < 2 * plain + _ULPS * torch.finfo(dtype).eps:
            return False
    return True


def _stepped(
    name: str, options: dict[str, Any], dtype: torch.dtype, device: torch.device, *, fused: bool
) -> list[Tensor]:
    """Return parameters after a few steps, in float64."""
    parameters = [_values(length, number).to(device, dtype) for number, length in enumerate(_LENGTHS)]
    optimizer = without_compiler(name)(parameters, lr=_LR, foreach=False, fused=False, **options)
    if fused:
        _to_fused(optimizer)
    for step in range(_STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = _values(parameter.numel(), number + step % 2).to(device, dtype)
        optimizer.step()
    return [parameter.double().cpu() for parameter in parameters]


def _to_fused(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer use the fused kernel, as if requested by the user, without its device checks."""
    for group in optimizer.param_groups:
        group["fused"] = True
    for parameter, state in optimizer.state.items():  # Adagrad has state before its first step
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


def _values(length: int, shift: int) -> Tensor:
    """Return numbers between 0.5 and 1 and their negatives, exact in every type."""
    places = torch.arange(length) + shift
    return (0.5 + (places % 7) / 16).double() * (1 - 2 * (places % 3 % 2))


def _off(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error of elements."""
    return max(float((mine - right).abs().max()) for mine, right in zip(found, exact, strict=True))


# ---- fused kernels called by users

_CLASS_OF = {f"aten::_fused_{name.lower()}": name for name in _PROBES}

_WIDER = (torch.float32, torch.float64)


def exactly(call: OpOverload) -> Callable[..., Any]:
    """Return the operator itself, or for an inexact fused kernel a wrapper that widens its type.

    A fused kernel that is not exact for a type runs in the next wider exact type, and its results are rounded, which
    matches its specification.

    Args:
        call: An operator.
    """
    name = _CLASS_OF.get(call._schema.name.removesuffix("_"))
    return call if name is None else functools.partial(_exactly, call, name)


def _exactly(call: OpOverload, name: str, *args: Any, **keywords: Any) -> Any:
    parameters: Sequence[Tensor] = args[0]
    if not parameters or is_exact(name, parameters[0].dtype, parameters[0].device):
        return call(*args, **keywords)
    own, device = parameters[0].dtype, parameters[0].device
    wider = next((one for one in _WIDER if torch.promote_types(one, own) is one and is_exact(name, one, device)), None)
    if wider is None:
        raise WireError(f"{call} is wrong for {own} on {device} in this PyTorch; use fused=False")

    def widened(value: Any) -> Any:
        many = isinstance(value, list | tuple)
        return [each.to(wider) if each.dtype is own else each for each in value] if many else value

    wide, named = [widened(value) for value in args], {key: widened(value) for key, value in keywords.items()}
    made = call(*wide, **named)
    for argument, before, after in _written(call, args, keywords, wide, named):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for old, new in zip(before, after, strict=True):
                if old is not new:
                    old.copy_(new)
    if not call._schema.returns or made is None:
        return made
    return tuple([each.to(own) if each.dtype is wider else each for each in result] for result in made)


def _written(
    call: OpOverload, args: Sequence[Any], keywords: dict[str, Any], wide: Sequence[Any], named: dict[str, Any]
) -> list[tuple[Any, Any, Any]]:
    """Return the list arguments: schema entry, old value and new value of each."""
    arguments = call._schema.arguments
    positional = list(zip(arguments, args, wide, strict=False))
    by_name = {argument.name: argument for argument in arguments}
    others = [(by_name[key], value, named[key]) for key, value in keywords.items()]
    return [found for found in itertools.chain(positional, others) if isinstance(found[1], list | tuple)]
