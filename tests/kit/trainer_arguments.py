"""Arguments of a trainer from the flat settings of a test's runs, which vary one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import onebox

_GROUPS: dict[str, tuple[Any, dict[str, str]]] = {
    "stale": (onebox.StaleGradients, {"delay": "correction"}),
    "recovery": (onebox.Recovery, {}),
    "staging": (onebox.Staging, {}),
    "engine": (onebox.Engine, {}),
}


def grouped(**settings: Any) -> dict[str, Any]:
    """Return settings with those of a group of options in the group.

    ``staleness`` is 0 or 1, ``delay`` the correction of stale gradients, and ``recover`` true, false, or ``None`` for
    what the pool suggests. A plan of ``None`` is data parallel training.

    Example:
        >>> grouped(seed=1, micro_batch=2, staleness=0)
        {'seed': 1, 'plan': DataParallel(micro_batch=2, shares='auto', sync='workers', update='device', \
shard_optimizer=False)}
    """
    rest = dict(settings)
    late, recover = rest.pop("staleness", 0), rest.pop("recover", None)
    if rest.get("plan", ...) is None:
        del rest["plan"]
    parallel = _taken(rest, onebox.DataParallel, {})
    if "plan" in rest:
        assert not any(parallel.values()), "a plan has its own micro-batches"
    elif parallel:
        rest["plan"] = onebox.DataParallel(**parallel)
    for name, (kind, other_names) in _GROUPS.items():
        found = _taken(rest, kind, other_names)
        if name == "stale":
            rest |= {name: kind(**found)} if late else {}
        elif name == "recovery" and recover is False:
            assert not any(found.values()), "without recovery there are no snapshots"
            rest[name] = None
        elif found or (name == "recovery" and recover):
            rest[name] = kind(**found)
    return rest


def _taken(settings: dict[str, Any], kind: Any, other_names: dict[str, str]) -> dict[str, Any]:
    """Remove the options of a group from settings, and return them."""
    fields = {field.name for field in dataclasses.fields(kind)}
    names = [name for name in settings if other_names.get(name, name) in fields]
    return {other_names.get(name, name): settings.pop(name) for name in names}
