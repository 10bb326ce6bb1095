"""Optimizers whose parameters may be split: those that look at each element by itself."""

from __future__ import annotations

from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.parameter_groups import groups_of
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard

_BY_ELEMENT = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"}
)
"""Optimizers that treat every element of a parameter by itself, so that shares of it are stepped as the whole is."""


def check_elements(remote: RemoteState, holdings: ShardingSpec) -> None:
    """Refuse to split a parameter whose optimizer looks at it as a whole.

    Raises:
        UsageError: Which one is split, and by what optimizers that may be.
    """
    names = {id(remote.named.tensors[name]): name for name in remote.wanted}
    for group in groups_of(remote.optimizer):
        own = (names[id(parameter)] for parameter in group.parameters if id(parameter) in names)
        split = [name for name in own if isinstance(holdings.placement(name), Shard)]
        if split and group.kind not in _BY_ELEMENT:
            raise UsageError(
                f"the plan splits {split[0]}, but {group.kind} looks at a parameter as a whole; split layers with one "
                f"of {', '.join(sorted(_BY_ELEMENT))}"
            )
