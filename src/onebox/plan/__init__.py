"""Plans: which device computes what part of the model and of the batch, and in which order."""

from onebox.plan.plan import SCHEDULES, MicroBatch, Plan, Prediction, Stage, Sync
from onebox.plan.schedule import Action, Kind, Routes, Schedule
from onebox.plan.shares import apportion, deal, shares_from_speeds
from onebox.plan.work import Edge, Links, StageWork, Work

__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "Kind",
    "Links",
    "MicroBatch",
    "Plan",
    "Prediction",
    "Routes",
    "Schedule",
    "Stage",
    "StageWork",
    "Sync",
    "Work",
    "apportion",
    "deal",
    "shares_from_speeds",
]
