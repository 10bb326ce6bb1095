"""What a run leaves behind and shows on the way: folder, metrics, progress, timeline, tables.

Nothing here starts a thread or touches a global logger.
"""

from onebox.report.folder import RunFolder
from onebox.report.metrics import MetricsLog, rewind_metrics
from onebox.report.progress import Progress
from onebox.report.speeds import profile_tables
from onebox.report.tables import DeviceRow, device_table, epoch_line
from onebox.report.timeline import Span, Timeline

__all__ = [
    "DeviceRow",
    "MetricsLog",
    "Progress",
    "RunFolder",
    "Span",
    "Timeline",
    "device_table",
    "epoch_line",
    "profile_tables",
    "rewind_metrics",
]
