"""Elementwise optimizers, whose parameters may be sharded."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.engine.workload.named_state import NamedState
from onebox.engine.workload.parameter_groups import Optimizers, groups_of
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard

_BY_ELEMENT = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"}
)
"""Optimizers that treat each element of a parameter independently, so that shards can be updated separately."""


def by_element(optimizers: Optimizers) -> bool:
    """Return whether optimizers treat each element of a parameter by itself, so that layers may be split."""
    return all(group.kind in _BY_ELEMENT for group in groups_of(optimizers))


def check_elements(optimizers: Optimizers, state: NamedState, wanted: Sequence[str], holdings: ShardingSpec) -> None:
    """Refuse to split a parameter whose optimizer looks at it as a whole.

    Args:
        optimizers: The optimizers.
        state: Parameters and buffers.
        wanted: Names of the parameters that they update.
        holdings: Who holds what.

    Raises:
        UsageError: Such a parameter is sharded; the message names it, and the optimizers that allow it.
    """
    names = {id(state.tensors[name]): name for name in wanted}
    for group in groups_of(optimizers):
        own = (names[id(parameter)] for parameter in group.parameters if id(parameter) in names)
        split = [name for name in own if isinstance(holdings.placement(name), Shard)]
        if split and group.kind not in _BY_ELEMENT:
            raise UsageError(
                f"the plan splits {split[0]}, but {group.kind} looks at a parameter as a whole; split layers with one "
                f"of {', '.join(sorted(_BY_ELEMENT))}"
            )
