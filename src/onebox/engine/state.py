"""The training state: names, numbers and tensors of parameters and buffers, and the optimizer's description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebox.errors import UsageError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.messages import Delay, Optimizer, Options
from onebox.wire.state import StateEntry
from onebox.worker import OPTIMIZERS

OptimizerEntries = list[tuple[str, str, Tensor | bool | int | float | None]]
"""What an optimizer remembers: (parameter, key, value)."""


@dataclass(frozen=True, kw_only=True)
class NamedState:
    """Parameters and buffers of a model and its loss, each tensor under its first name.

    Args:
        tensors: By name; parameters first. Names begin with ``model.`` or ``loss.``.
        parameters: Which of them are parameters.
        numbers: The buffer that each is in, the same on every worker.
    """

    tensors: Mapping[str, Tensor]
    parameters: frozenset[str]
    numbers: Mapping[str, int]

    def spec(self, name: str) -> TensorSpec:
        """Return what a tensor is."""
        return spec_of(self.tensors[name])


def named_state(model: nn.Module, loss: Any, new_number: Callable[[], int]) -> NamedState:
    """Name every parameter and buffer of a model and of a loss that is a module."""
    modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    parameters: set[str] = set()
    for kind in ("parameters", "buffers"):
        for prefix, module in modules.items():
            for name, tensor in getattr(module, f"named_{kind}")(prefix=prefix):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[name] = tensor
                    parameters |= {name} if kind == "parameters" else set()
    return NamedState(
        tensors=tensors,
        parameters=frozenset(parameters),
        numbers={name: new_number() for name in tensors},
    )


def trained_names(state: NamedState, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the parameters that an optimizer updates, in the order of its groups.

    Raises:
        UsageError: The optimizer is not a plain one of ``torch.optim``, or holds tensors that are not the model's.
    """
    kind = type(optimizer)
    if kind.__name__ not in OPTIMIZERS or kind is not getattr(torch.optim, kind.__name__, None):
        raise UsageError(
            f"{kind.__module__}.{kind.__qualname__} is no optimizer that workers run; they know these classes of "
            f"torch.optim: {', '.join(OPTIMIZERS)}"
        )
    names = {id(state.tensors[name]): name for name in state.parameters}
    found: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is neither the model's nor "
                    "the loss's: make the optimizer after the model has its final parameters"
                )
            if parameter.requires_grad:
                found.append(names[id(parameter)])
    if not found:
        raise UsageError("the optimizer has no parameter that requires a gradient")
    return tuple(found)


def options_of(optimizer: torch.optim.Optimizer) -> tuple[Options, ...]:
    """Return the options of each parameter group, as they are now."""
    return tuple(
        {key: _plain(key, group[key]) for key in optimizer.defaults if key in group} for group in optimizer.param_groups
    )


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(None if item is None else float(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"option {key!r} of the optimizer is a {type(value).__name__}; allowed are numbers and strings")


def optimizer_definition(
    optimizer: torch.optim.Optimizer,
    state: NamedState,
    trained: tuple[str, ...],
    entries: tuple[StateEntry, ...],
    *,
    host: bool = False,
    delay: Delay = "none",
    succeeds: bool = False,
) -> Optimizer:
    """Describe an optimizer for a worker.

    Args:
        optimizer: The user's optimizer.
        state: Parameters and buffers.
        trained: The parameters that the worker steps.
        entries: What it remembers of them.
        host: Whether it is to step in the host's memory.
        delay: What is done about gradients that are late.
        succeeds: Whether it takes the place of the one that has its number.
    """
    position = {name: index for index, name in enumerate(trained)}
    names = {id(state.tensors[name]): name for name in state.parameters}
    groups = []
    for group, options in zip(optimizer.param_groups, options_of(optimizer), strict=True):
        members = tuple(position[name] for p in group["params"] if (name := names[id(p)]) in position)
        groups.append((members, options))
    numbers = tuple(state.numbers[name] for name in trained)
    return Optimizer(
        type(optimizer).__name__, tuple(groups), numbers, entries, host=host, delay=delay, succeeds=succeeds
    )


def local_optimizer_state(optimizer: torch.optim.Optimizer, state: NamedState) -> OptimizerEntries:
    """Return what an optimizer that has stepped before remembers, as (parameter, key, value)."""
    return [
        (name, key, value)
        for name in state.tensors
        for key, value in sorted(optimizer.state.get(state.tensors[name], {}).items())
    ]


def state_entries(
    remembered: OptimizerEntries, trained: tuple[str, ...]
) -> tuple[tuple[StateEntry, ...], list[Tensor]]:
    """Turn what an optimizer remembers into entries for a worker and the tensors of those that have one."""
    position = {name: index for index, name in enumerate(trained)}
    known = [(name, key, value) for name, key, value in remembered if name in position]
    entries = tuple(
        StateEntry(position[name], key, spec_of(value) if isinstance(value, Tensor) else value)
        for name, key, value in known
    )
    return entries, [value for _, _, value in known if isinstance(value, Tensor)]


def optimizer_factor(optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """Return what an optimizer's state takes, by trying it on a parameter.

    Returns:
        Its bytes as a multiple of those of its parameters, and the bytes that each parameter adds whatever its size.
    """
    parameter = nn.Parameter(torch.zeros(1 << 6, 1 << 6))  # Muon wants matrices
    group = optimizer.param_groups[0]
    known = set(inspect.signature(type(optimizer)).parameters) - {"fused", "foreach"}
    options = {key: group[key] for key in optimizer.defaults if key in group and key in known}
    tried = type(optimizer)([parameter], **options)
    parameter.grad = torch.zeros_like(parameter)
    tried.step()
    state: Mapping[str, Any] = tried.state[parameter]
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    fixed = sum(value.nbytes for value in tensors if not value.dim())
    return sum(value.nbytes for value in tensors if value.dim()) / parameter.nbytes, fixed
