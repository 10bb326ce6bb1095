"""Corrections of profiles by the first steps of runs, in the user's cache beside the profiles.

A correction belongs to the measured times that it corrects: once a model is measured again, it is not found any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from onebox.cost import key_of, load, store
from onebox.cost.model_profile import ModelProfile
from onebox.plan.replan.profile_correction import TimeFactors
from onebox.pool import DeviceInfo

LOAD_HOLDS_S = 3600.0
"""Seconds for which a load of other programs is expected to go on; then it is that of the profile again."""


class _KeptCorrection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction in the cache.

    Args:
        factors: The correction.
        at_s: Seconds since the epoch at which its load was measured.
    """

    factors: TimeFactors
    at_s: float


def correction_key(profile: ModelProfile, devices: Sequence[DeviceInfo]) -> str:
    """Return the cache key of the correction of a profile.

    Args:
        profile: The profile.
        devices: All devices of the pool; a correction is for them in this order.
    """
    found = [(d.kind, d.name, d.host, d.threads, d.speed) for d in devices]
    return key_of("correction of a profile", profile.bytes.graph, profile.times, found)


def kept_correction(key: str, *, now_s: float | None = None) -> TimeFactors:
    """Return the correction of a profile; one that changes nothing where there is none.

    Args:
        key: From :func:`correction_key`.
        now_s: Seconds since the epoch; now without it.
    """
    kept = load(key, _KeptCorrection)
    if kept is None:
        return TimeFactors()
    age_s = (time.time() if now_s is None else now_s) - kept.at_s
    return kept.factors if 0 <= age_s <= LOAD_HOLDS_S else replace(kept.factors, load={})


def keep_correction(key: str, factors: TimeFactors, *, now_s: float | None = None) -> None:
    """Store a further correction, of a problem to which the earlier ones are applied.

    Args:
        key: From :func:`correction_key`.
        factors: The further correction.
        now_s: Seconds since the epoch; now without it.
    """
    now_s = time.time() if now_s is None else now_s
    store(key, _KeptCorrection(factors=kept_correction(key, now_s=now_s).then(factors), at_s=now_s))
