"""Elementwise optimizers, whose parameters may be sharded."""

from __future__ import annotations

from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.parameter_groups import groups_of
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard

_BY_ELEMENT = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"}
)
"""Optimizers that treat each element of a parameter independently, so that shards can be updated separately."""


def check_elements(remote: RemoteState, holdings: ShardingSpec) -> None:
    """Refuse to shard a parameter whose optimizer is not elementwise.

    Raises:
        UsageError: Such a parameter is sharded; the message names it, and the optimizers that allow it.
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
