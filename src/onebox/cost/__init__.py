"""What things cost: memory from buffer lifetimes; devices and links as they were measured, and a cache for that."""

from onebox.cost.cache import key_of, load, store
from onebox.cost.fit import CEILING_BPS, fit_link
from onebox.cost.lifetimes import Footprint, alive_at, footprint, owners
from onebox.cost.profile import ACCELERATOR_BPS, DeviceProfile, PoolProfile, Speeds
from onebox.cost.sums import Way, way_to_sum, ways_to_sum
from onebox.cost.topology import Groups, near_groups, shortest_tree

__all__ = [
    "ACCELERATOR_BPS",
    "CEILING_BPS",
    "DeviceProfile",
    "Footprint",
    "Groups",
    "PoolProfile",
    "Speeds",
    "Way",
    "alive_at",
    "fit_link",
    "footprint",
    "key_of",
    "load",
    "near_groups",
    "owners",
    "shortest_tree",
    "store",
    "way_to_sum",
    "ways_to_sum",
]
