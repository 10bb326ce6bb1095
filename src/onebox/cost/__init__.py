"""What things cost: memory from buffer lifetimes."""

from onebox.cost.lifetimes import Footprint, footprint, owners

__all__ = ["Footprint", "footprint", "owners"]
