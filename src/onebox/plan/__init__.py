"""Plans: the device and the time of every computation of a step."""

from onebox.plan.evaluate.infeasibility import Shortfall
from onebox.plan.evaluate.predict import predict
from onebox.plan.model.cost_model import stage_work
from onebox.plan.model.plan import MicroBatch, Plan, Prediction, as_data
from onebox.plan.model.problem import ComputeTime, DeviceSpec, Problem, Segment, SegmentValue, Tie
from onebox.plan.model.schedule import Action, Kind, Routes, Schedule
from onebox.plan.model.shares import apportion, deal, shares_from_speeds
from onebox.plan.model.stage import ActivationPolicy, OptimizerStateLayout, Stage
from onebox.plan.model.window import check_window, drain_of, fill_of, in_flight_of, repeated_routes, unrolled
from onebox.plan.model.work import Edge, Links, PlanWork, StageWork
from onebox.plan.policies.explain import PolicyReason, explain_policies
from onebox.plan.replan.controller import ReplanController
from onebox.plan.replan.decisions import ReplanDecision, ReplanOptions, ReplanOutcome
from onebox.plan.replan.measurements import CarriedBytes, LinkTime, StepMeasurement, TaskTime, TimedTask
from onebox.plan.schedules.async_window import steady_window
from onebox.plan.schedules.blocks import block_numbers, block_schedule
from onebox.plan.schedules.named import ideal_step_time, named_schedule
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.search.baselines import even_plan
from onebox.plan.search.result import PlanCandidate, SearchResult
from onebox.plan.search.search import search
from onebox.plan.simulate.steady_state import simulate_steady_state
from onebox.plan.simulate.step import ActionSpan, Simulation, Transfer, UpdateSpan, simulate
from onebox.plan.simulate.step_chart import simulated_chart
from onebox.plan.simulate.text_timeline import draw_timeline
from onebox.plan.simulate.validate import validate
from onebox.plan_names import ACTIVATION_POLICIES, ASYNC, NAMED, SCHEDULES, ChainPolicy, Sync, UpdateAt

__all__ = [
    "ACTIVATION_POLICIES",
    "ASYNC",
    "NAMED",
    "SCHEDULES",
    "Action",
    "ActionSpan",
    "ActivationPolicy",
    "CarriedBytes",
    "ChainPolicy",
    "ComputeTime",
    "DeviceSpec",
    "Edge",
    "Kind",
    "LinkTime",
    "Links",
    "MicroBatch",
    "OptimizerStateLayout",
    "Plan",
    "PlanCandidate",
    "PlanWork",
    "PolicyReason",
    "Prediction",
    "Problem",
    "ReplanController",
    "ReplanDecision",
    "ReplanOptions",
    "ReplanOutcome",
    "Routes",
    "Schedule",
    "SearchResult",
    "Segment",
    "SegmentValue",
    "Shortfall",
    "Simulation",
    "Stage",
    "StageWork",
    "StepMeasurement",
    "Sync",
    "TaskTime",
    "Tie",
    "TimedTask",
    "Transfer",
    "UpdateAt",
    "UpdateSpan",
    "apportion",
    "as_data",
    "auto_schedule",
    "block_numbers",
    "block_schedule",
    "check_window",
    "deal",
    "drain_of",
    "draw_timeline",
    "even_plan",
    "explain_policies",
    "fill_of",
    "ideal_step_time",
    "in_flight_of",
    "named_schedule",
    "predict",
    "repeated_routes",
    "search",
    "shares_from_speeds",
    "simulate",
    "simulate_steady_state",
    "simulated_chart",
    "stage_work",
    "steady_window",
    "unrolled",
    "validate",
]
