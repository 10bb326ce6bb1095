"""Plans: which device computes what part of the model and of the batch, and in which order."""

from onebox.plan.blocks import block_numbers, block_schedule
from onebox.plan.costs import stage_work
from onebox.plan.endless import simulate_endless
from onebox.plan.follow import Follower
from onebox.plan.follow_types import Decision, FollowOptions, Outcome
from onebox.plan.inputs import DeviceSpec, Problem, Segment, Tie, Time, Value
from onebox.plan.misfit import Shortfall
from onebox.plan.picture import picture
from onebox.plan.plan import ASYNC, SCHEDULES, MicroBatch, Plan, Prediction, as_data
from onebox.plan.predict import predict
from onebox.plan.prices import FATES, ChainFate
from onebox.plan.results import Candidate, SearchResult
from onebox.plan.schedule import Action, Kind, Routes, Schedule
from onebox.plan.schedules import NAMED, named_schedule
from onebox.plan.search import search
from onebox.plan.seen import Carried, Seen, Task, Took
from onebox.plan.shares import apportion, deal, shares_from_speeds
from onebox.plan.simulate import Simulation, Span, Transfer, Update, simulate
from onebox.plan.stage import Fate, OptimizerState, Stage, Sync, UpdateAt
from onebox.plan.synthesis import auto_schedule
from onebox.plan.theory import theory
from onebox.plan.trivial import even_plan
from onebox.plan.validate import validate
from onebox.plan.why import Reason, reasons
from onebox.plan.windows import check_window, drain_of, endless, fill_of, in_flight_of, steady_window, unrolled
from onebox.plan.work import Edge, Links, StageWork, Work

__all__ = [
    "ASYNC",
    "FATES",
    "NAMED",
    "SCHEDULES",
    "Action",
    "Candidate",
    "Carried",
    "ChainFate",
    "Decision",
    "DeviceSpec",
    "Edge",
    "Fate",
    "FollowOptions",
    "Follower",
    "Kind",
    "Links",
    "MicroBatch",
    "OptimizerState",
    "Outcome",
    "Plan",
    "Prediction",
    "Problem",
    "Reason",
    "Routes",
    "Schedule",
    "SearchResult",
    "Seen",
    "Segment",
    "Shortfall",
    "Simulation",
    "Span",
    "Stage",
    "StageWork",
    "Sync",
    "Task",
    "Tie",
    "Time",
    "Took",
    "Transfer",
    "Update",
    "UpdateAt",
    "Value",
    "Work",
    "apportion",
    "as_data",
    "auto_schedule",
    "block_numbers",
    "block_schedule",
    "check_window",
    "deal",
    "drain_of",
    "endless",
    "even_plan",
    "fill_of",
    "in_flight_of",
    "named_schedule",
    "picture",
    "predict",
    "reasons",
    "search",
    "shares_from_speeds",
    "simulate",
    "simulate_endless",
    "stage_work",
    "steady_window",
    "theory",
    "unrolled",
    "validate",
]
