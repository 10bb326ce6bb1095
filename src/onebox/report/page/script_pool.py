"""The page of a script of this process: its pool, and what it is bound by."""

from __future__ import annotations

import time
from collections.abc import Callable

from onebox.pool import Pool
from onebox.report.page.history import RunHistory
from onebox.report.page.pool_watch import PoolWatch
from onebox.report.page.state import Head, PageState, ScriptView, TimePart, WaitingLine
from onebox.report.run.status import RunState
from onebox.vgpu import ScriptFigures, place_of, text_of, verdict

_EVERY_S = 2.0
"""Least time between two looks at the figures."""

_LINES = 10
"""The most lines that are shown."""


class ScriptPool:
    """The pool of a script of this process, for the page.

    Args:
        name: The script.
        pool: The pool.
        figures: Returns where the time of the script has gone until now.
    """

    def __init__(self, name: str, pool: Pool, figures: Callable[[], ScriptFigures]) -> None:
        self._name = name
        self._pool = pool
        self._watch = PoolWatch(pool)
        self._figures = figures
        self._history = RunHistory()
        self._ended: tuple[RunState, str] | None = None
        self._looked_s = time.monotonic()
        self._busy_ns = self._all_busy_ns()
        self._busy: dict[int, float] = {}
        self._script: ScriptView | None = None

    def finish(self, state: RunState, text: str) -> None:
        """Record the end of the script; see :meth:`LiveRun.finish`."""
        self._ended = state, text

    def state(self) -> PageState:
        """Return the present state."""
        for event in self._watch.news():
            self._history.note(event.kind, event.text, at_s=event.at_s, severity=event.severity)
        now_s = time.monotonic()
        if now_s - self._looked_s >= _EVERY_S:
            self._look(now_s)
        state, text = self._ended or ("running", self._watch.recovering)
        return PageState(
            head=Head(kind="script", name=self._name, state=state, text=text),
            script=self._script,
            hosts=self._watch.hosts({}, {}, self._busy, {}),
            links=self._watch.uplinks(),
            events=self._history.events,
        )

    def trace(self) -> bytes | None:
        """Return ``None``: a script has no steps."""
        return None

    def close(self) -> None:
        """Do nothing: the pool belongs to others."""

    def _look(self, now_s: float) -> None:
        """Renew the figures, and the busy part of each device since they were last renewed."""
        took_ns, before_ns, now_ns = (now_s - self._looked_s) * 1e9, self._busy_ns, self._all_busy_ns()
        self._looked_s, self._busy_ns = now_s, now_ns
        self._busy = {
            worker: round(min(1.0, (now - before) / took_ns), 2)
            for worker, (before, now) in enumerate(zip(before_ns, now_ns, strict=True))
        }
        self._script = script_view(self._figures())

    def _all_busy_ns(self) -> list[int]:
        return [self._pool.busy_ns(worker) for worker in range(len(self._pool))]


def script_view(figures: ScriptFigures) -> ScriptView | None:
    """Return what the page shows of a script's time; ``None`` before it has used a device."""
    if not figures.devices:
        return None
    parts = (
        ("waiting for values", figures.reading_s),
        ("uploading", figures.uploading_s),
        ("too far ahead of devices", figures.ahead_s),
        ("the script itself", figures.own_s),
    )
    return ScriptView(
        bound=verdict(figures),
        parts=tuple(TimePart(name=name, share=round(figures.share(part_s), 3)) for name, part_s in parts),
        lines=tuple(
            WaitingLine(place=place_of(line), text=text_of(line), waits=count, share=round(figures.share(waited_s), 3))
            for line, count, waited_s in figures.lines[:_LINES]
        ),
    )
