"""What things cost: memory from buffer lifetimes."""

from onebox.cost.lifetimes import Footprint, footprint

__all__ = ["Footprint", "footprint"]
