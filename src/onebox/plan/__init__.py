"""Plans: which device computes what part of the model and of the batch, and in which order."""

from onebox.plan.picture import picture
from onebox.plan.plan import SCHEDULES, MicroBatch, Plan, Prediction, Stage, Sync, as_data
from onebox.plan.schedule import Action, Kind, Routes, Schedule
from onebox.plan.schedules import NAMED, named_schedule
from onebox.plan.shares import apportion, deal, shares_from_speeds
from onebox.plan.simulate import Simulation, Span, Transfer, Update, simulate
from onebox.plan.synthesis import auto_schedule
from onebox.plan.theory import theory
from onebox.plan.validate import validate
from onebox.plan.work import Edge, Links, StageWork, Work

__all__ = [
    "NAMED",
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
    "Simulation",
    "Span",
    "Stage",
    "StageWork",
    "Sync",
    "Transfer",
    "Update",
    "Work",
    "apportion",
    "as_data",
    "auto_schedule",
    "deal",
    "named_schedule",
    "picture",
    "shares_from_speeds",
    "simulate",
    "theory",
    "validate",
]
