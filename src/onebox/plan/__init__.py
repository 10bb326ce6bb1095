"""Plans: which device computes what share."""

from onebox.plan.plan import MicroBatch, Plan, Sync
from onebox.plan.shares import apportion, shares_from_speeds

__all__ = ["MicroBatch", "Plan", "Sync", "apportion", "shares_from_speeds"]
