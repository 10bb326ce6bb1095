"""The training state: names, numbers and tensors of parameters and buffers, and the description of optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onebox.cost.estimate import TYPICAL_RATES
from onebox.engine.workload.parameter_groups import Optimizers, ParameterGroup, groups_of, remembered_of
from onebox.errors import UsageError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.instructions import GroupDelays, Options
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.wire.protocol.snapshots import StateEntry
from onebox.worker import REMEMBERS, for_each_group

OptimizerEntries = list[tuple[str, str, Tensor | bool | int | float | None]]
"""State of an optimizer: (parameter, key, value)."""


PASSES = 4
"""Approximate number of times that an optimizer's step reads or writes each byte of parameter, gradient and state."""


@dataclass(frozen=True, kw_only=True)
class NamedState:
    """Parameters and buffers of a model and its loss, each tensor under its first name.

    Args:
        tensors: By name; parameters first. Names begin with ``model.`` or ``loss.``.
        parameters: Names of the parameters.
        numbers: Buffer of each, the same on every worker.
    """

    tensors: dict[str, Tensor]
    parameters: frozenset[str]
    numbers: Mapping[str, int]

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor."""
        return spec_of(self.tensors[name])

    def name_of(self, identity: int) -> str:
        """Return the name of a tensor, given its identity."""
        known = (name for name, tensor in self.tensors.items() if id(tensor) == identity)
        return next(known, "a parameter that is not the model's")

    def replace(self, others: Mapping[str, Tensor]) -> None:
        """Replace some tensors by others of the same kind."""
        self.tensors.update(others)


def named_state(model: nn.Module, loss: Any, new_number: Callable[[], int]) -> NamedState:
    """Name every parameter and buffer of a model and of a loss module."""
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


def trained_names(state: NamedState, optimizer: Optimizers) -> tuple[str, ...]:
    """Return the names of the parameters that optimizers update, in the order of their groups.

    Raises:
        UsageError: An optimizer is not a plain one of ``torch.optim``, or has tensors outside the model, or two share a
            tensor.
    """
    names = {id(state.tensors[name]): name for name in state.parameters}
    found: list[str] = []
    kinds: dict[str, str] = {}
    for kind, parameters, _ in groups_of(optimizer):
        for parameter in parameters:
            name = names.get(id(parameter))
            if name is None:
                raise UsageError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is neither the model's nor "
                    "the loss's: make the optimizer after the model has its final parameters"
                )
            if name in kinds:
                raise UsageError(
                    f"{name} of shape {list(parameter.shape)} is in two optimizers, {kinds[name]} and {kind}; allowed "
                    "is one: leave it out of the other's parameters"
                )
            kinds[name] = kind
            if parameter.requires_grad:
                found.append(name)
    if not found:
        raise UsageError("the optimizer has no parameter that requires a gradient")
    return tuple(found)


def optimizer_definition(
    optimizer: Optimizers,
    state: NamedState,
    trained: tuple[str, ...],
    entries: tuple[StateEntry, ...],
    *,
    host: bool = False,
    delay: GroupDelays = "none",
    succeeds: bool = False,
) -> OptimizerSpec:
    """Return the definition of a worker's optimizer: a single one, whose groups may be of several classes.

    Args:
        optimizer: The user's optimizer, or several.
        state: Parameters and buffers.
        trained: The parameters that the worker updates.
        entries: Its state entries.
        host: Whether it runs in the host's memory.
        delay: The treatment of late gradients.
        succeeds: Whether it replaces the one with the same number.
    """
    position = {name: index for index, name in enumerate(trained)}
    names = {id(state.tensors[name]): name for name in state.parameters}
    groups = groups_of(optimizer)
    held = tuple(
        (tuple(position[name] for p in group.parameters if (name := names[id(p)]) in position), group.options)
        for group in groups
    )
    kinds, numbers = tuple(group.kind for group in groups), tuple(state.numbers[name] for name in trained)
    return OptimizerSpec(kinds, held, numbers, entries, host=host, delay=delay, succeeds=succeeds)


def local_optimizer_state(optimizer: Optimizers, state: NamedState) -> OptimizerEntries:
    """Return the present state of the user's optimizers, as (parameter, key, value)."""
    return [
        (name, key, value)
        for name in state.tensors
        for key, value in sorted(remembered_of(optimizer, state.tensors[name]).items())
    ]


def state_entries(
    remembered: OptimizerEntries, trained: tuple[str, ...]
) -> tuple[tuple[StateEntry, ...], list[Tensor]]:
    """Convert optimizer state to entries for a worker, with the tensors of those that have one."""
    position = {name: index for index, name in enumerate(trained)}
    known = [(name, key, value) for name, key, value in remembered if name in position]
    entries = tuple(
        StateEntry(position[name], key, spec_of(value) if isinstance(value, Tensor) else value)
        for name, key, value in known
    )
    return entries, [value for _, _, value in known if isinstance(value, Tensor)]


class OptimizerFootprint(NamedTuple):
    """Size of an optimizer's state for a parameter.

    Args:
        factor: Ratio of its bytes to those of the parameter.
        fixed_bytes: Additional bytes, independent of the parameter's size.
        corrected: Whether its updates are corrected when gradients are late, which needs the parameter's bytes again.
    """

    factor: float
    fixed_bytes: int
    corrected: bool = False

    def size_bytes(self, parameter_bytes: int, *, late: bool = False) -> int:
        """Return the bytes of the state of a parameter, with or without the needs of late gradients."""
        return int((self.factor + (late and self.corrected)) * parameter_bytes) + self.fixed_bytes


def footprints(optimizer: Optimizers, state: NamedState, delay: GroupDelays = "none") -> dict[str, OptimizerFootprint]:
    """Return the size of the optimizers' state for each parameter, by trying each kind of group on a small parameter.

    Args:
        optimizer: One or several.
        state: Parameters and buffers.
        delay: The treatment of late gradients.
    """
    names = {id(state.tensors[name]): name for name in state.parameters}
    groups = groups_of(optimizer)
    known: dict[tuple[object, ...], tuple[float, int]] = {}
    found = {}
    for group, treatment in zip(groups, for_each_group(delay, len(groups)), strict=True):
        key = (group.kind, *sorted((key, value) for key, value in group.options.items() if key != "lr"))
        if key not in known:
            known[key] = _tried(group)
        for parameter in group.parameters:
            factor, fixed_bytes = known[key]
            if group.kind == "Adafactor":
                factor = _factored(parameter.shape)
            found[names[id(parameter)]] = OptimizerFootprint(factor, fixed_bytes, treatment in REMEMBERS)
    return found


def update_bytes(optimizer: Optimizers, state: NamedState) -> dict[str, float]:
    """Return the cost of updating each parameter, in bytes of parameter and state that are read or written.

    Muon also multiplies matrices, which is converted to additional bytes: for a parameter of m rows and n columns,
    m <= n, each of its Newton-Schulz iterations takes 4 m² n + 2 m³ operations (Jordan 2024, "Muon").

    Args:
        optimizer: One or several.
        state: Parameters and buffers.
    """
    names = {id(state.tensors[name]): name for name in state.parameters}
    factors = {name: 2 + found.factor for name, found in footprints(optimizer, state).items()}
    found = {}
    for group in groups_of(optimizer):
        for parameter in group.parameters:
            name, flops = names[id(parameter)], 0.0
            if group.kind == "Muon":
                rows, columns = sorted(parameter.shape)
                iterations = group.options["ns_steps"]
                assert isinstance(iterations, int)
                flops = iterations * (4.0 * rows**2 * columns + 2.0 * rows**3)
            found[name] = (
                factors[name] * parameter.nbytes + flops / TYPICAL_RATES.flops * TYPICAL_RATES.bandwidth_bps / PASSES
            )
    return found


def _factored(shape: Sequence[int]) -> float:
    """Return the ratio of Adafactor's state to a parameter: means over rows and over columns.

    Shazeer and Stern, 2018 (arXiv:1804.04235); for tensors with fewer than two dimensions it is as large as the
    parameter.
    """
    return 1 / shape[-1] + 1 / shape[-2] if len(shape) > 1 else 1.0


def _tried(group: ParameterGroup) -> tuple[float, int]:
    """Return the ratio of the state's bytes to a parameter's, and the additional bytes."""
    parameter = nn.Parameter(torch.zeros(1 << 6, 1 << 6))  # Muon requires matrices
    kind = getattr(torch.optim, group.kind)
    known = set(inspect.signature(kind).parameters) - {"fused", "foreach"}
    tried = kind([parameter], **{key: value for key, value in group.options.items() if key in known})
    parameter.grad = torch.zeros_like(parameter)
    tried.step()
    state: Mapping[str, Any] = tried.state[parameter]
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    scalars = [value.to(torch.float32) if _fused(group.options) else value for value in tensors if not value.dim()]
    fixed = sum(value.nbytes for value in scalars)
    return sum(value.nbytes for value in tensors if value.dim()) / parameter.nbytes, fixed


def _fused(options: Options) -> bool:
    """Return whether workers use the fused kernel where it is exact, whose scalars are float32 in any case."""
    chosen = options.get("fused", False)
    plain = any(options.get(key) for key in ("foreach", "differentiable", "capturable"))
    return bool(chosen) or (chosen is None and not plain)
