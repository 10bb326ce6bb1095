"""The bottleneck of a script, and what would help: in a line or two, at its end and while it runs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

from onebox.sizes import size_text
from onebox.vgpu.runtime.script_lines import place_of, text_of
from onebox.vgpu.runtime.script_time import ScriptFigures

VERBOSE = "ONEBOX_VERBOSE"
"""Environment variable with which a process says what it is bound by while it runs, too, and however short it is."""

LEAST_S = 3.0
"""Of scripts whose devices have worked for less nothing is said without being asked, however long they take."""

_BUSY = 0.75
"""Share from which on a device is what a script is bound by, whoever waits for it."""

_LARGE = 0.25
"""Share from which on waits are worth a change of the script."""

_FIRST_S = 10.0
_LONGEST_S = 600.0
"""Time to the first line while a script runs, and the longest between two; each is half as long again as the one
before."""


def verdict(figures: ScriptFigures) -> str:
    """Return what a script is bound by, and what would help; empty without a figure."""
    if not figures.elapsed_s or not figures.devices:
        return ""
    whole = _seconds(figures.elapsed_s)
    reading, ahead, uploading, own = (
        figures.share(part_s) for part_s in (figures.reading_s, figures.ahead_s, figures.uploading_s, figures.own_s)
    )
    busiest = max(figures.devices, key=lambda each: each.busy_s)
    busy = "busy " + ", ".join(f"{each.name} {_percent(figures.share(each.busy_s))}" for each in figures.devices)
    if figures.share(busiest.busy_s) >= _BUSY or ahead > max(reading, uploading, own):
        idle = [each.name for each in figures.devices if each.busy_s < busiest.busy_s / 2]
        help_text = f"give {', '.join(idle)} more of the work" if idle else "faster devices, or more of them, help"
        return f"{whole}, bound by the device {busiest.name}; {busy}: {help_text}"
    held = max(figures.devices, key=lambda each: each.waited_s)
    if figures.share(held.waited_s) >= _LARGE and max(reading, ahead) >= _LARGE:
        share = _percent(figures.share(held.waited_s))
        return (
            f"{whole}, bound by devices that wait for each other, {held.name} {share}; {busy}: divide the work by "
            "their speed (ranks with --uneven), or batches into micro-batches"
        )
    if uploading >= max(reading, _LARGE):
        size = size_text(figures.upload_bytes)
        return (
            f"{whole}, bound by uploads: {size} took {_percent(uploading)}; {busy}: upload smaller types, such as "
            "images as uint8, keep on a device what is used again, or read values less often"
        )
    if reading >= _LARGE:
        return (
            f"{_percent(reading)} of {whole} waited for values{_most(figures)}; {busy}: read values less often, such "
            "as at each tenth step"
        )
    return (
        f"{whole}, bound by the script itself (Python {_percent(own)}, waiting for values {_percent(reading)}, "
        f'uploading {_percent(uploading)}); {busy}: larger batches, or torch.compile(model, backend="onebox")'
    )


def _most(figures: ScriptFigures) -> str:
    """Return the line that waited most, as text."""
    if not figures.lines:
        return ""
    line, _, waited_s = figures.lines[0]
    text = f"{place_of(line)} {text_of(line)}".rstrip()
    return f", most at {text} ({_percent(figures.share(waited_s))})"


def last_line(figures: ScriptFigures, least_s: float = LEAST_S) -> str:
    """Return the line with which a script ends; empty where uploads and the work of devices took less than a time."""
    worked_s = max((each.busy_s for each in figures.devices), default=0.0) + figures.uploading_s
    return verdict(figures) if worked_s >= least_s else ""


def say(line: str) -> None:
    """Print a line of this program, unless stderr is closed."""
    if line:
        with contextlib.suppress(OSError, ValueError):
            print(f"onebox: {line}", file=sys.stderr, flush=True)


class ProgressLines:
    """A thread that says what a script is bound by while it runs, each time of the time since the last line.

    Args:
        figures: Returns the figures until now.
        who: What precedes each line.
    """

    def __init__(self, figures: Callable[[], ScriptFigures], who: str = "") -> None:
        self._figures = figures
        self._who = who
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onebox-verbose", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        before, wait_s = self._figures(), _FIRST_S
        while not self._over.wait(wait_s):
            now = self._figures()
            if text := verdict(now.since(before)):
                say(f"{self._who}{text}")
            before, wait_s = now, min(1.5 * wait_s, _LONGEST_S)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s < 100 else f"{time_s:.0f} s"
