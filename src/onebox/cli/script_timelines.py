"""The timelines of ``onebox run --profile``: one of the script, and one of each process of it that uses its devices."""

from __future__ import annotations

import os
from pathlib import Path

from onebox.cli.output_files import write_output
from onebox.errors import UsageError
from onebox.report.figures.script_timeline import script_timeline
from onebox.vgpu import ScriptEvents, say


def write_timeline(path: Path, events: ScriptEvents) -> None:
    """Write the timeline of a script, and say where it is.

    Raises:
        UsageError: It cannot be written.
    """
    write_output("--profile", path, script_timeline(events, lambda worker: f"cuda:{worker}").to_json())
    left_out = f"; {events.left_out} further events did not fit" if events.left_out else ""
    say(f"the timeline is in {path}, for ui.perfetto.dev or chrome://tracing{left_out}")


def write_of_process(path: Path, events: ScriptEvents) -> None:
    """Write the timeline of a process that the script has started beside that of the script, as it ends: with its rank
    in the name of the file, or else its number."""
    rank = os.environ.get("RANK", "")
    name = f"rank-{rank}" if rank.isdecimal() else f"process-{os.getpid()}"
    if events.has_lines:
        try:
            write_timeline(path.with_name(f"{path.stem}-{name}{path.suffix}"), events)
        except UsageError as error:
            say(str(error))
