"""The record and display of a run: folder, metrics, progress, timeline, tables.

Nothing here starts a thread or touches a global logger. Public names are imported at first use: the tables of agents
need no PyTorch, whose import takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names

if TYPE_CHECKING:
    from onebox.report.figures.chrome_trace import Span, Timeline
    from onebox.report.figures.worker_timeline import timeline_of
    from onebox.report.run.folder import RunFolder
    from onebox.report.run.metrics import MetricsLog, rewind_metrics
    from onebox.report.run.progress import Progress
    from onebox.report.run.status import RunState, RunStatus
    from onebox.report.tables.agents import HostState, OfferRow, offer_table, status_lines, status_table
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

__getattr__ = lazy_names(
    "onebox.report",
    {
        "onebox.report.figures.chrome_trace": ("Span", "Timeline"),
        "onebox.report.figures.worker_timeline": ("timeline_of",),
        "onebox.report.run.folder": ("RunFolder",),
        "onebox.report.run.metrics": ("MetricsLog", "rewind_metrics"),
        "onebox.report.run.progress": ("Progress",),
        "onebox.report.run.status": ("RunState", "RunStatus"),
        "onebox.report.tables.agents": (
            "HostState",
            "OfferRow",
            "offer_table",
            "status_lines",
            "status_table",
        ),
        "onebox.report.tables.comparison": (
            "DeviceComparison",
            "IslandsComparison",
            "PlanComparison",
            "PredictedMeasured",
            "StageComparison",
            "compare",
            "compare_islands",
            "typical_step",
        ),
        "onebox.report.tables.memory": ("MemoryComparison", "compare_memory"),
        "onebox.report.tables.model_profile": ("segment_tables",),
        "onebox.report.tables.plan": (
            "candidate_table",
            "comparison_tables",
            "islands_table",
            "mode_table",
            "plan_device_table",
            "stage_table",
            "summary_line",
        ),
        "onebox.report.tables.pool_profile": ("profile_tables",),
        "onebox.report.tables.text": ("DeviceRow", "device_table", "epoch_line"),
    },
)
