"""Corrections of profiles by the first steps of runs, in the user's cache beside the profiles.

A correction belongs to the measured times that it corrects: once a model is measured again, it is not found any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from onebox.cost import key_of, load, store
from onebox.cost.model_profile import ModelProfile
from onebox.plan.replan.profile_correction import TimeFactors
from onebox.pool import DeviceInfo


def correction_key(profile: ModelProfile, devices: Sequence[DeviceInfo]) -> str:
    """Return the cache key of the correction of a profile.

    Args:
        profile: The profile.
        devices: All devices of the pool; a correction is for them in this order.
    """
    found = [(d.kind, d.name, d.host, d.threads, d.speed) for d in devices]
    return key_of("correction of a profile", profile.bytes.graph, profile.times, found)


def kept_correction(key: str) -> TimeFactors:
    """Return the correction of a profile; one that changes nothing where there is none."""
    return load(key, TimeFactors) or TimeFactors()


def keep_correction(key: str, factors: TimeFactors) -> None:
    """Store a further correction, of a problem to which the earlier ones are applied."""
    store(key, kept_correction(key).then(factors))
