"""One or several optimizers of ``torch.optim`` as one list of parameter groups. Pure."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from onebox.engine.readers import ReadingHook
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
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            came = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
            kind = each.__name__ if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) else "SGD"
            raise UsageError(
                f"the optimizer is {came}; allowed are optimizers that have been made, such as "
                f"torch.optim.{kind}(model.parameters(), lr=0.1), or several in a list"
            )
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
        UsageError: An option is no plain value, or of another kind than the optimizer's own.
    """
    return [
        ParameterGroup(type(each).__name__, group["params"], options)
        for each in optimizers_in(optimizers)
        for group, options in zip(each.param_groups, _options(each), strict=True)
    ]


def options_of(optimizers: Optimizers) -> tuple[Options, ...]:
    """Return the present options of each parameter group."""
    return tuple(options for each in optimizers_in(optimizers) for options in _options(each))


def notes_of(optimizers: Optimizers) -> list[Options]:
    """Return what each parameter group has beside its options, as schedulers keep there, such as ``initial_lr``."""
    found = []
    for each in optimizers_in(optimizers):
        for group in each.param_groups:
            own = {key: value for key, value in group.items() if key not in ("params", *each.defaults)}
            found.append({key: _plain(key, value, None) for key, value in own.items() if _is_plain(value)})
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, int | float) for item in value)
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, Tensor) and value.numel() == 1)
    )


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
    groups, own = optimizer.param_groups, optimizer.defaults
    return [{key: _plain(key, group[key], default) for key, default in own.items() if key in group} for group in groups]


def _plain(key: str, value: Any, default: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple) and all(
        item is None or isinstance(item, int | float | Tensor) for item in value
    ):
        return tuple(None if item is None else float(item) for item in value)
    if isinstance(value, str) and isinstance(default, int | float | Tensor):
        raise UsageError(f"option {key!r} of the optimizer is {value!r}, a string; allowed are numbers")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"option {key!r} of the optimizer is a {type(value).__name__}; allowed are numbers and strings")


def training_of(optimizers: Sequence[torch.optim.Optimizer]) -> TrainedFlags:
    """Return the parameters of each parameter group, and whether they require gradients."""
    groups = (group for each in optimizers for group in each.param_groups)
    return [[(id(parameter), parameter.requires_grad) for parameter in group["params"]] for group in groups]


def require_training(
    optimizers: Sequence[torch.optim.Optimizer], before: TrainedFlags, name_of: Callable[[int], str]
) -> None:
    """Require that optimizers train the same parameters as before, by a step that is PyTorch's.

    Args:
        optimizers: The optimizers.
        before: From :func:`training_of`, when the trainer was made.
        name_of: Returns the name of a parameter, given its identity.

    Raises:
        UsageError: They have other parameters or groups, a parameter's ``requires_grad`` has changed, or they have
            hooks, or another step.
    """
    for each in optimizers:
        _require_own_step(each)
    now = training_of(optimizers)
    if now != before:
        raise UsageError(
            f"{_difference(before, now, name_of)} since this trainer was made, and workers train what it had then: "
            "pull() the weights, close this trainer and make another one; nothing was done of this step"
        )


def _difference(before: TrainedFlags, now: TrainedFlags, name_of: Callable[[int], str]) -> str:
    """Return the change of what is trained, as the beginning of a sentence."""
    had, has = ({identity: wanted for group in flags for identity, wanted in group} for flags in (before, now))
    added, removed = [name_of(each) for each in has if each not in had], [name_of(e) for e in had if e not in has]
    for names, what in ((added, "added to"), (removed, "removed from")):
        if names:
            groups = f" ({len(now)} groups, {len(before)} before)" if len(now) != len(before) else ""
            return f"{_listed(names)} been {what} the optimizer's parameters{groups}"
    changed = [name_of(each) for each in has if has[each] != had[each]]
    if changed:
        wanted = has[next(each for each in has if has[each] != had[each])]
        freeze = "" if wanted else " (a group with lr=0 and weight_decay=0 stays as it is, without another trainer)"
        return f"requires_grad has become {wanted} for {', '.join(changed[:3])}{_and_more(changed, 3)}{freeze}"
    if len(now) != len(before):
        return f"the optimizer's parameters have come into {len(now)} groups, from {len(before)},"
    moved = [name_of(a[0]) for x, y in zip(now, before, strict=True) for a, b in zip(x, y, strict=False) if a != b]
    return (
        f"the optimizer's parameters have been put in another order, {moved[0] if moved else 'in their groups'} first,"
    )


def _listed(names: Sequence[str]) -> str:
    """Return names with a verb."""
    return f"{names[0]}{_and_more(names, 1)} {'has' if len(names) == 1 else 'have'}"


def _and_more(names: Sequence[str], shown: int) -> str:
    return f" and {len(names) - shown} more" if len(names) > shown else ""


_PLAIN_STEPS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions that are known to be PyTorch's own steps."""

_TORCH, _ONEBOX = Path(torch.__file__).parent, Path(__file__).parents[2]


def _require_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks of an optimizer's step, and another step than its class's, of which workers know nothing.

    Schedulers wrap ``step`` to count calls, and PyTorch itself to profile them.
    """
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    others = [hook for hook in hooks if not isinstance(hook, ReadingHook)]
    kind = type(optimizer)
    if others:
        raise UsageError(
            f"{kind.__name__} has a hook of register_step_pre_hook or register_step_post_hook, which workers "
            "cannot call: remove it, and do what it does after trainer.step(), or run on virtual devices (vgpu)"
        )
    for hook in (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()):
        if not (getattr(hook, "__module__", None) or "").startswith(("onebox.", "torch.")):
            raise UsageError(
                f"{getattr(hook, '__qualname__', hook)} is a hook for the steps of all optimizers "
                "(register_optimizer_step_pre_hook or _post_hook), which workers cannot call: remove it, and do what "
                "it does after trainer.step(), or run on virtual devices (vgpu)"
            )
    own = vars(optimizer).get("step")
    for step, owner in ((own, f"this {kind.__name__}"), (kind.step, kind.__name__)):
        if step is None or getattr(step, "__func__", step) in _PLAIN_STEPS:
            continue
        place = _foreign_code(step)
        if place is not None:
            raise UsageError(
                f"{owner}.step has been replaced by a function of {place}, which workers do not call: they run "
                f"torch.optim's own {kind.__name__}.step. Put it back, and have what it does to gradients done by a "
                "hook on the parameters (Tensor.register_hook), which is traced, or run on virtual devices (vgpu)"
            )
        _PLAIN_STEPS.add(getattr(step, "__func__", step))


def _foreign_code(step: Any) -> str | None:
    """Return the place of the first function that is not PyTorch's among a step and those that it wraps."""
    while step is not None:
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None)
        if code is None:
            return type(step).__name__
        if not any(Path(code.co_filename).is_relative_to(folder) for folder in (_TORCH, _ONEBOX)):
            return f"{code.co_filename}:{code.co_firstlineno}"
        step = getattr(function, "__wrapped__", None)
    return None


def mark_stepped(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let learning rate schedulers know that optimizers have stepped, which workers do; else they warn."""
    for each in optimizers:
        each._opt_called = True  # type: ignore[attr-defined]
