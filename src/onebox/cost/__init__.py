"""Costs: memory from buffer lifetimes, and of optimizers on hosts; measured profiles of devices and links; a cache."""

from onebox.cost.all_reduce import AllReduceAlgorithm, TransferTime, all_reduce_algorithms, choose_all_reduce
from onebox.cost.cache import key_of, load, store
from onebox.cost.host_copies import RUN_BYTES, aligned_starts, host_copy_bytes, runs, staging_bytes
from onebox.cost.lifetimes import Footprint, alive_at, footprint, owners
from onebox.cost.links import CEILING_BPS, fit_link
from onebox.cost.pool_profile import ACCELERATOR_BPS, DeviceProfile, PoolProfile, Speeds, link_age_line
from onebox.cost.topology import DeviceGroups, near_groups, shortest_tree

__all__ = [
    "ACCELERATOR_BPS",
    "CEILING_BPS",
    "RUN_BYTES",
    "AllReduceAlgorithm",
    "DeviceGroups",
    "DeviceProfile",
    "Footprint",
    "PoolProfile",
    "Speeds",
    "TransferTime",
    "aligned_starts",
    "alive_at",
    "all_reduce_algorithms",
    "choose_all_reduce",
    "fit_link",
    "footprint",
    "host_copy_bytes",
    "key_of",
    "link_age_line",
    "load",
    "near_groups",
    "owners",
    "runs",
    "shortest_tree",
    "staging_bytes",
    "store",
]
