"""Costs: memory from buffer lifetimes; measured profiles of devices and links, and their cache."""

from onebox.cost.cache import key_of, load, store
from onebox.cost.collectives import AllReduceAlgorithm, all_reduce_algorithms, choose_all_reduce
from onebox.cost.lifetimes import Footprint, alive_at, footprint, owners
from onebox.cost.links import CEILING_BPS, fit_link
from onebox.cost.pool_profile import ACCELERATOR_BPS, DeviceProfile, PoolProfile, Speeds
from onebox.cost.topology import DeviceGroups, near_groups, shortest_tree

__all__ = [
    "ACCELERATOR_BPS",
    "CEILING_BPS",
    "AllReduceAlgorithm",
    "DeviceGroups",
    "DeviceProfile",
    "Footprint",
    "PoolProfile",
    "Speeds",
    "alive_at",
    "all_reduce_algorithms",
    "choose_all_reduce",
    "fit_link",
    "footprint",
    "key_of",
    "load",
    "near_groups",
    "owners",
    "shortest_tree",
    "store",
]
