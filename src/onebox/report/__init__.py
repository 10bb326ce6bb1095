"""What a run leaves behind and shows on the way: folder, metrics, progress, timeline, tables.

Nothing here starts a thread or touches a global logger.
"""

from onebox.report.comparison import Comparison, DeviceComparison, Pair, StageComparison, compare, typical_step
from onebox.report.folder import RunFolder
from onebox.report.machines import HostState, OfferRow, offer_table, printable, status_lines, status_table
from onebox.report.memory import MemoryComparison, compare_memory
from onebox.report.metrics import MetricsLog, rewind_metrics
from onebox.report.plan_tables import (
    candidate_table,
    comparison_tables,
    plan_device_table,
    stage_table,
    summary_line,
)
from onebox.report.progress import Progress
from onebox.report.segments import segment_tables
from onebox.report.speeds import profile_tables
from onebox.report.tables import DeviceRow, device_table, epoch_line
from onebox.report.timeline import Span, Timeline
from onebox.report.trace import timeline_of

__all__ = [
    "Comparison",
    "DeviceComparison",
    "DeviceRow",
    "HostState",
    "MemoryComparison",
    "MetricsLog",
    "OfferRow",
    "Pair",
    "Progress",
    "RunFolder",
    "Span",
    "StageComparison",
    "Timeline",
    "candidate_table",
    "compare",
    "compare_memory",
    "comparison_tables",
    "device_table",
    "epoch_line",
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
