"""A trainer's options that depend on its pool, and checks of those outside the groups of ``trainer_options``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec
import torch
from torch import nn

from onebox.errors import UsageError
from onebox.graph import Precision
from onebox.pool import Pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.trainer_options import MatmulPrecision, Numerics, Outer, Recovery, require_bool
from onebox.wire.protocol.requests import SetNumerics

_SHORT_STEP_S = 0.01
_MOST_STEPS = 8
"""Most steps in flight."""


def check_objects(model: object, loss: object, pool: object, metrics: object, on_device: object) -> None:
    """Refuse arguments of a trainer that are no such objects, as a class in place of what it makes.

    Raises:
        UsageError: What came, and what is allowed.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={_shown(model)}; allowed is a torch.nn.Module{_made(model)}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"model: {name} of a lazy layer has no shape yet; call the model once, with a batch, before"
            )
    functions = {"loss": loss, "on_device": on_device}
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics={_shown(metrics)}; allowed is a dict from names to functions of (outputs, targets)")
    functions |= {f"metrics[{name!r}]": metric for name, metric in (metrics or {}).items()}
    for name, function in functions.items():
        if function is None and name == "on_device":
            continue
        if isinstance(function, type) or not callable(function):
            takes = "the inputs" if name == "on_device" else "(outputs, targets)"
            raise UsageError(
                f"{name}={_shown(function)}; allowed are a function of {takes}, and a module that is one"
                f"{_made(function)}"
            )
    if not isinstance(pool, Pool):
        spec = f", as by onebox.open({pool!r})" if isinstance(pool, str) else ", by onebox.open()"
        raise UsageError(f"pool={_shown(pool)}; allowed is a pool that has been opened{spec}")


def _shown(value: object) -> str:
    """Return what came as a user would know it."""
    if isinstance(value, type):
        return f"{value.__name__}, a class"
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _made(value: object) -> str:
    """Return the advice to make an object of a class."""
    return f": make one, {value.__name__}(...)" if isinstance(value, type) else ""


def check_numerics(seed: int, precision: str, clip_grad_norm: float | None, guards: bool) -> None:
    """Refuse invalid numerical options of a trainer.

    Raises:
        UsageError: An option is invalid; the message names it and the allowed values.
    """
    if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise UsageError(f"seed={seed!r}: allowed are whole numbers of 64 bits")
    check_precision(precision)
    require_bool("guards", guards)
    number = isinstance(clip_grad_norm, int | float) and not isinstance(clip_grad_norm, bool)
    if clip_grad_norm is not None and not (number and clip_grad_norm > 0):
        raise UsageError(f"clip_grad_norm={clip_grad_norm!r}: it must be positive; leave it out for no clipping")


def check_precision(precision: str) -> None:
    """Refuse what is no precision.

    Raises:
        UsageError: What is allowed.
    """
    if precision not in get_args(Precision):
        raise UsageError(f"precision={precision!r}: allowed are 'fp32', 'bf16' and 'auto'")


def resolved_numerics(asked: Numerics) -> Numerics:
    """Return precision and determinism with each open value as it is set in this process.

    Example:
        >>> resolved_numerics(Numerics(matmul="high")).matmul
        'high'
    """
    cudnn = torch.backends.cudnn
    here = Numerics(
        matmul=_matmul_precision(),
        tf32_convolutions=_tf32_convolutions(),
        cudnn_benchmark=cudnn.benchmark,
        cudnn_deterministic=cudnn.deterministic,
        deterministic=(False, "warn", True)[torch.get_deterministic_debug_mode()],
    )
    given = {name: value for name, value in dataclasses.asdict(asked).items() if value is not None}
    return dataclasses.replace(here, **given)


def _matmul_precision() -> MatmulPrecision:
    try:
        return torch.get_float32_matmul_precision()  # type: ignore[return-value]
    except RuntimeError:  # set for each library by itself
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def _tf32_convolutions() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set for convolutions and recurrent layers by themselves
        return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


def numeric_instructions(numerics: Numerics) -> tuple[SetNumerics, ...]:
    """Return the instructions that set precision and determinism for the runs that follow them in a message.

    Args:
        numerics: The values; open ones are those of PyTorch's defaults.

    Returns:
        One instruction, or none for PyTorch's defaults.

    Example:
        >>> numeric_instructions(Numerics(cudnn_benchmark=False))
        ()
    """
    given = {name: value for name, value in dataclasses.asdict(numerics).items() if value is not None}
    if (deterministic := given.get("deterministic")) is not None:
        given["deterministic"] = "warn" if deterministic == "warn" else "yes" if deterministic else "no"
    found = SetNumerics(**given)
    return () if found == SetNumerics() else (found,)


def with_check_for_nan(numerics: Sequence[SetNumerics]) -> tuple[SetNumerics, ...]:
    """Return numeric settings with which a gradient that is not a number is an error."""
    return tuple(msgspec.structs.replace(each, check_nan=True) for each in numerics or [SetNumerics()])


def steps_in_flight(round_trip_s: float, step_s: float = 0.0) -> int:
    """Return the number of steps in flight.

    With one more step than fits into a round trip, the next one is always at the workers when a step ends; on a LAN
    that is two. Steps are assumed to last at least 10 ms: each one in flight costs the memory of its batch.

    Args:
        round_trip_s: Round trip to the most distant worker.
        step_s: Seconds of a step; 0 where unknown.

    Example:
        >>> [steps_in_flight(seconds) for seconds in (0.0, 0.001, 0.03, 1.0)]
        [2, 2, 5, 8]
        >>> steps_in_flight(0.03, step_s=0.02), steps_in_flight(0.03, step_s=12.0)
        (3, 2)
    """
    return min(2 + int(round_trip_s / max(step_s, _SHORT_STEP_S)), _MOST_STEPS)


def island_steps_in_flight(round_trip_s: float, every: int) -> int:
    """Return the number of steps in flight of each island: more than elsewhere, so that an island that is slower for a
    while does not hold up the others between two outer steps.

    Args:
        round_trip_s: Round trip to the most distant worker.
        every: Steps between two outer steps.

    Example:
        >>> [island_steps_in_flight(0.0, every) for every in (1, 4, 100)]
        [2, 4, 8]
    """
    return max(steps_in_flight(round_trip_s), min(every, _MOST_STEPS))


def chosen_recovery(pool: Pool, recovery: Recovery | Literal["auto"] | None) -> Recovery | None:
    """Return the recovery of a run from losses; ``None`` if it does not recover.

    Args:
        pool: The pool.
        recovery: The user's choice; ``auto`` for recovery if an agent or a Ray cluster runs some of the workers.

    Raises:
        UsageError: The choice is invalid, or impossible with the devices.
    """
    emulated = any(device.kind == "sim" for device in pool.devices)
    if recovery == "auto":
        far = any(device.host != LOCAL_HOST for device in pool.devices)
        return Recovery() if far and not emulated else None
    if recovery is not None and not isinstance(recovery, Recovery):
        raise UsageError(f"recovery={recovery!r}: allowed are 'auto', onebox.Recovery(...), and None for no recovery")
    if recovery is not None and emulated:
        raise UsageError(f"recovery={recovery}: sim devices have no values to keep; leave it out")
    return recovery


def island_recovery(pool: Pool, recovery: Recovery | Literal["auto"] | None, outer: Outer) -> Recovery | None:
    """Return the recovery of a run of islands from losses; see :func:`chosen_recovery`.

    Raises:
        UsageError: Also if there is none and a quorum of islands needs it.
    """
    found = chosen_recovery(pool, recovery)
    if outer.quorum is not None and found is None:
        raise UsageError(
            f"Outer(quorum={outer.quorum}) and recovery={recovery!r}, which is none here: islands that go on without "
            "a late one also go on without a lost one; give recovery=onebox.Recovery()"
        )
    return found


def check_islands(*, stale: object, recovery: object, adaptive: object, overlap: bool) -> None:
    """Refuse options of a trainer that do not go together with islands.

    Args:
        stale: Stale gradients, or ``None``.
        recovery: Recovery.
        adaptive: Whether plans adapt to devices.
        overlap: Whether exact steps overlap.

    Raises:
        UsageError: One of them is given.
    """
    given = {
        f"stale={stale}": stale is not None,
        f"recovery={recovery}": isinstance(recovery, Recovery) and recovery.snapshot_every is not None,
        f"adaptive={adaptive!r}": adaptive is not False,
        "Engine(overlap=True)": overlap,
    }
    for what, there in given.items():
        if there:
            raise UsageError(
                f"islands and {what}: these do not go together; leave one of them out (each island has the global "
                "parameters, so that recovery=onebox.Recovery() needs no snapshots)"
            )
