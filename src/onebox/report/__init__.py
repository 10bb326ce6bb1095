"""The record and display of a run: folder, metrics, progress, timeline, tables.

Nothing here starts a thread or touches a global logger. Public names are imported at first use: the tables of agents
need no PyTorch, whose import takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.report.figures.chrome_trace import Span, Timeline
    from onebox.report.figures.worker_timeline import timeline_of
    from onebox.report.run.folder import RunFolder
    from onebox.report.run.metrics import MetricsLog, rewind_metrics
    from onebox.report.run.progress import Progress
    from onebox.report.run.status import RunState, RunStatus
    from onebox.report.tables.agents import HostState, OfferRow, offer_table, printable, status_lines, status_table
    from onebox.report.tables.comparison import (
        DeviceComparison,
        IslandsComparison,
        PlanComparison,
        PredictedMeasured,
        StageComparison,
        compare,
        compare_islands,
        typical_step,
    )
    from onebox.report.tables.memory import MemoryComparison, compare_memory
    from onebox.report.tables.model_profile import segment_tables
    from onebox.report.tables.plan import (
        candidate_table,
        comparison_tables,
        islands_table,
        mode_table,
        plan_device_table,
        stage_table,
        summary_line,
    )
    from onebox.report.tables.pool_profile import profile_tables
    from onebox.report.tables.text import DeviceRow, device_table, epoch_line

__all__ = [
    "DeviceComparison",
    "DeviceRow",
    "HostState",
    "IslandsComparison",
    "MemoryComparison",
    "MetricsLog",
    "OfferRow",
    "PlanComparison",
    "PredictedMeasured",
    "Progress",
    "RunFolder",
    "RunState",
    "RunStatus",
    "Span",
    "StageComparison",
    "Timeline",
    "candidate_table",
    "compare",
    "compare_islands",
    "compare_memory",
    "comparison_tables",
    "device_table",
    "epoch_line",
    "islands_table",
    "mode_table",
    "offer_table",
    "plan_device_table",
    "printable",
    "profile_tables",
    "rewind_metrics",
    "segment_tables",
    "stage_table",
    "status_lines",
    "status_table",
    "summary_line",
    "timeline_of",
    "typical_step",
]

_HOMES = {
    "DeviceComparison": "onebox.report.tables.comparison",
    "DeviceRow": "onebox.report.tables.text",
    "HostState": "onebox.report.tables.agents",
    "IslandsComparison": "onebox.report.tables.comparison",
    "MemoryComparison": "onebox.report.tables.memory",
    "MetricsLog": "onebox.report.run.metrics",
    "OfferRow": "onebox.report.tables.agents",
    "PlanComparison": "onebox.report.tables.comparison",
    "PredictedMeasured": "onebox.report.tables.comparison",
    "Progress": "onebox.report.run.progress",
    "RunFolder": "onebox.report.run.folder",
    "RunState": "onebox.report.run.status",
    "RunStatus": "onebox.report.run.status",
    "Span": "onebox.report.figures.chrome_trace",
    "StageComparison": "onebox.report.tables.comparison",
    "Timeline": "onebox.report.figures.chrome_trace",
    "candidate_table": "onebox.report.tables.plan",
    "compare": "onebox.report.tables.comparison",
    "compare_islands": "onebox.report.tables.comparison",
    "compare_memory": "onebox.report.tables.memory",
    "comparison_tables": "onebox.report.tables.plan",
    "device_table": "onebox.report.tables.text",
    "epoch_line": "onebox.report.tables.text",
    "islands_table": "onebox.report.tables.plan",
    "mode_table": "onebox.report.tables.plan",
    "offer_table": "onebox.report.tables.agents",
    "plan_device_table": "onebox.report.tables.plan",
    "printable": "onebox.report.tables.agents",
    "profile_tables": "onebox.report.tables.pool_profile",
    "rewind_metrics": "onebox.report.run.metrics",
    "segment_tables": "onebox.report.tables.model_profile",
    "stage_table": "onebox.report.tables.plan",
    "status_lines": "onebox.report.tables.agents",
    "status_table": "onebox.report.tables.agents",
    "summary_line": "onebox.report.tables.plan",
    "timeline_of": "onebox.report.figures.worker_timeline",
    "typical_step": "onebox.report.tables.comparison",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'onebox.report' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
