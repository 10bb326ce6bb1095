"""One or several optimizers of ``torch.optim`` as one list of parameter groups. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.errors import UsageError
from onebox.wire.protocol.instructions import Options
from onebox.worker import OPTIMIZERS

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, or several over disjoint parameters."""

TrainedFlags = list[list[tuple[int, bool]]]
"""For each parameter group, the identity of each parameter, and whether it requires gradients."""


class ParameterGroup(NamedTuple):
    """A parameter group.

    Args:
        kind: Class name in ``torch.optim``.
        parameters: Its parameters.
        options: Its present options; see :func:`options_of`.
    """

    kind: str
    parameters: Sequence[Tensor]
    options: Options


def optimizers_in(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers as a tuple.

    Raises:
        UsageError: There is none, or one is not a supported plain optimizer of ``torch.optim``.
    """
    given = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
    if not given:
        raise UsageError("no optimizer was given; allowed are one of torch.optim, or several in a list")
    for each in given:
        kind = type(each)
        if kind.__name__ not in OPTIMIZERS or kind is not getattr(torch.optim, kind.__name__, None):
            raise UsageError(
                f"{kind.__module__}.{kind.__qualname__} is no optimizer that workers run; they know these classes of "
                f"torch.optim: {', '.join(OPTIMIZERS)}"
            )
    return given


def groups_of(optimizers: Optimizers) -> list[ParameterGroup]:
    """Return the parameter groups of all optimizers, concatenated.

    Raises:
        UsageError: An option is not a plain value.
    """
    return [
        ParameterGroup(type(each).__name__, group["params"], options)
        for each in optimizers_in(optimizers)
        for group, options in zip(each.param_groups, _options(each), strict=True)
    ]


def options_of(optimizers: Optimizers) -> tuple[Options, ...]:
    """Return the present options of each parameter group."""
    return tuple(options for each in optimizers_in(optimizers) for options in _options(each))


def elements_of(optimizers: Optimizers) -> list[tuple[str, int]]:
    """Return the number of elements that each optimizer class updates, which determines its time."""
    found: Counter[str] = Counter()
    for kind, parameters, _ in groups_of(optimizers):
        found[kind] += sum(parameter.numel() for parameter in parameters)
    return sorted(found.items())


def remembered_of(optimizers: Optimizers, parameter: Tensor) -> Mapping[str, Any]:
    """Return the optimizer state of a parameter."""
    return next((each.state[parameter] for each in optimizers_in(optimizers) if parameter in each.state), {})


def _options(optimizer: torch.optim.Optimizer) -> list[Options]:
    groups = optimizer.param_groups
    return [{key: _plain(key, group[key]) for key in optimizer.defaults if key in group} for group in groups]


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(None if item is None else float(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"option {key!r} of the optimizer is a {type(value).__name__}; allowed are numbers and strings")


def training_of(optimizers: Sequence[torch.optim.Optimizer]) -> TrainedFlags:
    """Return the parameters of each parameter group, and whether they require gradients."""
    groups = (group for each in optimizers for group in each.param_groups)
    return [[(id(parameter), parameter.requires_grad) for parameter in group["params"]] for group in groups]


def require_training(optimizers: Sequence[torch.optim.Optimizer], before: TrainedFlags) -> None:
    """Require that optimizers train the same parameters as before, in a way that workers support.

    Raises:
        UsageError: They have other parameters, a parameter's ``requires_grad`` has changed, or they have hooks.
    """
    for each in optimizers:
        if each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks:
            raise UsageError(
                f"{type(each).__name__} has a hook of register_step_pre_hook or register_step_post_hook, which workers "
                "cannot call: remove it, and do what it does after trainer.step(), or run on virtual devices (vgpu)"
            )
    now = training_of(optimizers)
    if now != before:
        groups, parameters = len(now), sum(wanted for group in now for _, wanted in group)
        had_groups, had = len(before), sum(wanted for group in before for _, wanted in group)
        raise UsageError(
            f"the optimizer trains {parameters} parameters in {groups} groups; when this trainer was made it trained "
            f"{had} in {had_groups}, and these have to be the same ones: pull() the weights, close this trainer and "
            "make another one; nothing was done of this step"
        )


def mark_stepped(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let learning rate schedulers know that optimizers have stepped, which workers do; else they warn."""
    for each in optimizers:
        each._opt_called = True  # type: ignore[attr-defined]
