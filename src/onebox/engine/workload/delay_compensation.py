"""Default treatments of late gradients. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch

from onebox.engine.workload.parameter_groups import Optimizers, optimizers_in
from onebox.errors import UsageError
from onebox.wire.protocol.instructions import Delay, GroupDelays
from onebox.worker import AHEAD, PREDICTS, REMEMBERS, momentum_of

DELAYS: tuple[str, ...] = ("auto", *get_args(Delay))
"""Allowed corrections."""


ADAM_FAMILY = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
"""Optimizers of the Adam family."""


WARM_UP = 100
"""Default number of exact steps at the beginning: with 10 of them the loss of a small GPT was 7.9 % above that of exact
steps, with 80 of them 2.0 % (docs/concepts/staleness.md)."""


class CompensationChoice(NamedTuple):
    """Chosen treatment of gradients that are one step late.

    Args:
        delay: The treatment.
        why: The reason, for the user.
        warning: A known risk that remains; ``None`` for none.
    """

    delay: Delay
    why: str
    warning: str | None


def choose_delay(optimizer: torch.optim.Optimizer, asked: str = "auto") -> CompensationChoice:
    """Return the treatment of gradients that are one step late.

    Args:
        optimizer: Of ``torch.optim``; its class and its options decide.
        asked: The user's choice; ``auto`` chooses by optimizer.

    Raises:
        UsageError: The treatment is unknown, or the optimizer does not support it.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(2, 2))
        >>> choose_delay(torch.optim.AdamW([parameter], lr=0.1)).delay
        'both'
    """
    name = type(optimizer).__name__
    if asked == "auto":
        return _auto(name, optimizer.param_groups)
    if asked not in DELAYS:
        raise UsageError(f"correction={asked!r}; allowed: {', '.join(DELAYS)}")
    if asked in AHEAD and name not in PREDICTS:
        raise UsageError(
            f"correction={asked!r} needs an optimizer whose momentum says what it does next ({', '.join(PREDICTS)}), "
            f"and this is {name}; allowed for it are 'none' and 'feedback'"
        )
    if asked in ("lookahead", "both") and any(momentum_of(name, group) is None for group in optimizer.param_groups):
        raise UsageError(
            f"correction={asked!r} needs an optimizer with momentum, and {name} has none; allowed: 'feedback'"
        )
    delay: Delay = next(known for known in get_args(Delay) if known == asked)
    return CompensationChoice(delay, "asked for", _fears(name, delay, optimizer.param_groups))


def choose_delays(optimizers: Optimizers, asked: str = "auto") -> list[tuple[CompensationChoice, int]]:
    """Return the treatment of late gradients for each optimizer, with its number of parameter groups.

    Raises:
        UsageError: The treatment is unknown, or an optimizer does not support it.
    """
    return [(choose_delay(each, asked), len(each.param_groups)) for each in optimizers_in(optimizers)]


def delays_of(optimizers: Optimizers, asked: str = "auto") -> GroupDelays:
    """Return the treatment of late gradients in each parameter group.

    Raises:
        UsageError: The treatment is unknown, or an optimizer does not support it.
    """
    return tuple(choice.delay for choice, groups in choose_delays(optimizers, asked) for _ in range(groups))


def predicts(delay: GroupDelays) -> bool:
    """Return whether predicted weights are kept; they are kept for all parameters if any group uses them."""
    return any(each in AHEAD for each in (delay if isinstance(delay, tuple) else (delay,)))


def extra_copies(delay: GroupDelays) -> int:
    """Return the number of additional copies of the trained parameters that treatments need at most, besides the
    previous version.

    Args:
        delay: The treatment: predictions keep predicted weights, most others an update.
    """
    return predicts(delay) + any(each in REMEMBERS for each in (delay if isinstance(delay, tuple) else (delay,)))


def _auto(name: str, groups: list[dict[str, Any]]) -> CompensationChoice:
    """Return the treatment that was best in benchmarks/staleness.py for this or a similar optimizer."""
    if name in PREDICTS and all(momentum_of(name, group) for group in groups):
        if name == "SGD":
            why = "the momentum of SGD and how it changes say where the weights will be, at large rates, too"
            return CompensationChoice("extrapolate", why, _fears(name, "extrapolate", groups))
        why = f"the momentum of {name} says well where the weights will be, and looking further along it helps besides"
        return CompensationChoice("both", why, _fears(name, "both", groups))
    why = f"{name} has no momentum that would say where the weights will be"
    return CompensationChoice("feedback", why, _fears(name, "feedback", groups))


def _fears(name: str, delay: Delay, groups: list[dict[str, Any]]) -> str | None:
    """Return the known risk of a treatment, if any."""
    if delay in AHEAD and not all(momentum_of(name, group) for group in groups):
        return f"{name} has no momentum in some of its groups: nothing is predicted for them"
    if name in ADAM_FAMILY and delay == "none":
        return f"{name} loses accuracy by gradients that are a step late; 'both' makes up for most of it"
    if name == "SGD" and any(momentum_of(name, group) for group in groups):
        return (
            "SGD with momentum diverges by late gradients at rates that are well below what exact steps allow, however "
            "they are treated: compare with exact steps, and if the loss is higher, lower the rate, or let more steps "
            "be exact (warm_up)"
        )
    return None
