"""Corrections of profiles by the first steps of runs, in the user's cache beside the profiles.

A correction belongs to the measured times that it corrects: once a model is measured again, it is not found any more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from onebox.cost import key_of, load, store
from onebox.cost.model_profile import ModelProfile
from onebox.plan.replan.profile_correction import TimeFactors
from onebox.pool import DeviceInfo

LOAD_HOLDS_S = 3600.0
"""Seconds for which a load of other programs is expected to go on; then it is that of the profile again."""

DEVICE_HOLDS_S = 86_400.0
"""Seconds for which a device is expected to stay slow or quick: a plan may avoid a slow one, so that no run would find
out that it no longer is."""

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True)
class AppliedCorrection:
    """The correction of a profile that a problem was made with.

    Args:
        key: Cache key of corrections of the profile, from :func:`correction_key`.
        factors: The correction.
        devices: What :func:`described_devices` returns for the pool.
    """

    key: str
    factors: TimeFactors
    devices: tuple[tuple[object, ...], ...] = ()


class _KeptCorrection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction in the cache.

    Args:
        factors: The correction.
        devices_at_s: By number of a device, seconds since the epoch at which its factor was measured.
        load_at_s: By name of a host, seconds since the epoch at which its load was measured.
    """

    factors: TimeFactors = TimeFactors()
    devices_at_s: dict[int, float] = {}
    load_at_s: dict[str, float] = {}


def described_devices(devices: Sequence[DeviceInfo]) -> tuple[tuple[object, ...], ...]:
    """Return what a correction depends on of each device of a pool."""
    return tuple((d.kind, d.name, d.host, d.threads, d.speed) for d in devices)


def correction_key(profile: ModelProfile, devices: Sequence[DeviceInfo]) -> str:
    """Return the cache key of the correction of a profile.

    Args:
        profile: The profile.
        devices: All devices of the pool; a correction is for them in this order.
    """
    return key_of("correction of a profile", profile.bytes.graph, profile.times, described_devices(devices))


def kept_correction(key: str, *, now_s: float | None = None) -> TimeFactors:
    """Return the correction of a profile; one that changes nothing where there is none.

    Args:
        key: From :func:`correction_key`.
        now_s: Seconds since the epoch; now without it.
    """
    kept, now_s = load(key, _KeptCorrection) or _KeptCorrection(), time.time() if now_s is None else now_s
    return TimeFactors(
        devices=_recent(kept.factors.devices, kept.devices_at_s, now_s, DEVICE_HOLDS_S),
        segments=kept.factors.segments,
        load=_recent(kept.factors.load, kept.load_at_s, now_s, LOAD_HOLDS_S),
    )


def keep_correction(applied: AppliedCorrection, factors: TimeFactors, *, now_s: float | None = None) -> None:
    """Store a further correction.

    Several runs of one plan, beside or after each other, correct the same problem: the last of them counts.

    Args:
        applied: The correction of the problem that the further one corrects.
        factors: The further correction.
        now_s: Seconds since the epoch; now without it.
    """
    kept, now_s = load(applied.key, _KeptCorrection) or _KeptCorrection(), time.time() if now_s is None else now_s
    new = applied.factors.then(factors)
    store(
        applied.key,
        _KeptCorrection(
            factors=TimeFactors(
                devices={**kept.factors.devices, **new.devices},
                segments=kept.factors.segments_with(new),
                load={**kept.factors.load, **factors.load},
            ),
            devices_at_s={**kept.devices_at_s, **dict.fromkeys(factors.devices, now_s)},
            load_at_s={**kept.load_at_s, **dict.fromkeys(factors.load, now_s)},
        ),
    )


def _recent(found: Mapping[_Key, float], at_s: Mapping[_Key, float], now_s: float, holds_s: float) -> dict[_Key, float]:
    """Return what was measured at most some seconds ago."""
    return {key: value for key, value in found.items() if 0 <= now_s - at_s.get(key, -holds_s) <= holds_s}
