"""The page of a run's folder: of a run that has ended, or that another process goes on writing."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from onebox.errors import UsageError
from onebox.files import open_regular, read_regular
from onebox.plan import Kind, Plan
from onebox.report.figures.chrome_trace import Timeline
from onebox.report.page.history import RunHistory
from onebox.report.page.plan_view import PHASES, plan_view
from onebox.report.page.schedule import newest_step, schedule_view
from onebox.report.page.state import (
    DeviceView,
    Head,
    HostView,
    PageState,
    PhaseTime,
    PlanView,
    ScheduleView,
)
from onebox.report.run.folder import RunFolder
from onebox.report.run.status import RunDevice, RunState, RunStatus

_READ_BYTES = 4 << 20
"""Most bytes of the metrics that are read at once, and most bytes of a line."""

_FILE_BYTES = 256 << 20
"""Largest file that is read as a whole."""

_OBJECT_BYTES = 16 << 20
"""Largest file that becomes Python's objects, which take many times its size."""


T = TypeVar("T")


class _Pair(msgspec.Struct):
    """A predicted and a measured number of a summary."""

    predicted: float | None = None
    measured: float | None = None


class _Stage(msgspec.Struct):
    """The times of a replica of a stage in a summary."""

    stage: int
    devices: tuple[int, ...]
    seconds: dict[Kind, _Pair]


class _Comparison(msgspec.Struct):
    """The part of the comparison in a summary that the page shows."""

    step_s: _Pair | None = None
    bubble: _Pair | None = None
    stages: tuple[_Stage, ...] = ()


class _Peak(msgspec.Struct):
    """The part of a device in a summary that the page shows, beside :class:`RunDevice`."""

    number: int
    peak_bytes: int | None = None


class RecordedRun:
    """The folder of a run, for the page; files that appear, grow or change later are read then.

    Args:
        path: The folder.

    Raises:
        UsageError: It is no folder of a run.

    Example:
        >>> RecordedRun("runs/20260102T030405Z-cnn").state().head.state  # doctest: +SKIP
        'ended'
    """

    def __init__(self, path: Path | str) -> None:
        self._folder = RunFolder.resume(path)
        if not self._folder.config.is_file():
            raise UsageError(
                f"{path} is no folder of a run, as there is no config.json in it; give one that onebox train has made"
            )
        config = _json(self._folder.config) or {}
        self._name = f"{config.get('model', 'a model')} on {config.get('data', 'data')}"
        epochs = config.get("epochs")
        self._history = RunHistory(epochs=epochs if isinstance(epochs, int) else None)
        self._metrics = GrowingFile(self._folder.metrics)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._status: RunStatus | None = None
        self._summary: Mapping[str, Any] = {}
        self._plan: Plan | None = None
        self._schedule: ScheduleView | None = None
        self._noted = ""

    def state(self) -> PageState:
        """Return the present state."""
        self._renew()
        status = self._status
        state, text = self._present()
        if state in ("ended", "failed") and self._noted != text + state:
            self._noted = text + state
            self._history.end(state, text, at_s=None)
        plan = status.plan if status is not None and status.plan is not None else self._plan
        found = _known(self._summary.get("comparison"), _Comparison, _Comparison())
        step_s, bubble = found.step_s or _Pair(), found.bubble or _Pair()
        predicted = plan.predicted if plan is not None else None
        numbers = msgspec.structs.replace(
            self._history.numbers,
            predicted_s=step_s.predicted or (predicted.step_s if predicted else None),
            step_s=step_s.measured,
            predicted_bubble=bubble.predicted if step_s.predicted else predicted.bubble if predicted else None,
            bubble=bubble.measured,
            bound=self._history.numbers.bound or _bound(self._history.numbers.feed),
            staleness=_staleness(self._summary),
        )
        if state != "running":
            numbers = msgspec.structs.replace(numbers, eta_s=None)
        return PageState(
            head=Head(
                kind="run",
                name=status.name if status is not None else self._name,
                state=state,
                text=text,
                folder=str(self._folder.path),
                trace=self._schedule is not None,
            ),
            run=numbers,
            curves=self._history.curves,
            hosts=self._hosts(),
            plan=None if plan is None else _with_measured(plan_view(plan), found),
            schedule=self._schedule,
            events=self._history.events,
        )

    def trace(self) -> bytes | None:
        """Return the Chrome trace in the folder; ``None`` if there is none."""
        return _content(self._folder.timeline)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _renew(self) -> None:
        """Read what has changed in the folder."""
        self._metrics.read(self._begin, self._add)
        if self._changed(self._folder.status):
            self._status = RunStatus.read(self._folder.status)
            if self._status is not None:
                self._history.total_steps, self._history.epochs = self._status.total_steps, self._status.epochs
        if self._changed(self._folder.summary):
            self._summary = _json(self._folder.summary) or {}
        if self._changed(self._folder.plan):
            self._plan = _plan(self._folder.plan)
        if self._changed(self._folder.timeline):
            self._schedule = self._read_schedule()

    def _begin(self) -> None:
        """Begin the history anew: a run that was resumed has dropped its last records."""
        self._history = RunHistory(self._history.total_steps, self._history.epochs)
        self._noted = ""

    def _add(self, record: Mapping[str, Any]) -> None:
        self._history.add(record)

    def _changed(self, path: Path) -> bool:
        """Return whether a file is another one than at the last call."""
        try:
            about = path.stat()
        except OSError:
            return False
        seen = about.st_mtime_ns, about.st_size
        changed, self._seen[path] = self._seen.get(path) != seen, seen
        return changed

    def _present(self) -> tuple[RunState, str]:
        """Return the state of the run, and a line about it."""
        status = self._status
        if status is None:
            done = bool(self._summary)
            return ("ended", "the run has ended") if done else ("unknown", "it is not known if the run goes on")
        state = status.present
        if state != status.state:
            text = f"its process has ended without a word; onebox train --resume {self._folder.path} goes on"
            return state, text
        if state == "running" and status.client != platform.node():
            return state, f"as far as is known: it runs on {status.client}"
        return state, status.text

    def _hosts(self) -> tuple[HostView, ...]:
        """Return the pool as it was opened, with peaks of memory once they are known."""
        recorded = self._summary.get("devices")
        peaks = {each.number: each.peak_bytes for each in _known(recorded, tuple[_Peak, ...], ())}
        devices = self._status.devices if self._status is not None else _known(recorded, tuple[RunDevice, ...], ())
        found: dict[str, list[DeviceView]] = {}
        for device in devices:
            view = DeviceView(
                number=device.number,
                device=device.device,
                name=device.name,
                state="unknown",
                threads=device.threads,
                memory_bytes=device.memory_bytes,
                budget_bytes=device.memory_bytes,
                peak_bytes=peaks.get(device.number),
                emulated=device.emulated,
            )
            found.setdefault(device.host, []).append(view)
        return tuple(HostView(name=host, devices=tuple(own)) for host, own in found.items())

    def _read_schedule(self) -> ScheduleView | None:
        content = _content(self._folder.timeline)
        if content is None:
            return None
        try:
            timeline = Timeline.from_json(content)
        except UsageError:
            return None
        step = newest_step(timeline)
        hosts = {
            process: host.name
            for host in self._hosts()
            for device in host.devices
            for process in timeline.processes
            if process.startswith(f"worker {device.number} ")
        }
        return None if step is None else schedule_view(timeline, step, hosts)


class GrowingFile:
    """A file of JSON lines that may grow, or be replaced by one with fewer lines.

    Args:
        path: The file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._file: tuple[int, int] | None = None
        self._rest = b""

    def read(self, begin: Callable[[], None], add: Callable[[dict[str, Any]], None]) -> None:
        """Read the complete lines since the last call; what is no JSON object is left out.

        Args:
            begin: Called first if the file is another one, or has become shorter: its first line comes next.
            add: Called with each record.
        """
        try:
            with open(open_regular(self._path), "rb") as file:
                about = os.fstat(file.fileno())
                same = (about.st_dev, about.st_ino) == self._file and about.st_size >= self._place
                if not same:
                    self._file, self._place, self._rest = (about.st_dev, about.st_ino), 0, b""
                    begin()
                file.seek(self._place)
                while chunk := file.read(_READ_BYTES):
                    self._place += len(chunk)
                    self._add(chunk, add)
        except OSError:
            return  # it is tried again with the next call

    def _add(self, chunk: bytes, add: Callable[[dict[str, Any]], None]) -> None:
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest if len(rest) <= _READ_BYTES else b""
        for line in lines:
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            add(record)


def newest_run(root: Path | str = "runs") -> Path:
    """Return the folder of the newest run.

    Args:
        root: Folder of the runs.

    Raises:
        UsageError: There is none.
    """
    folders = [path.parent for path in Path(root).glob("*/config.json")]
    if not folders:
        raise UsageError(
            f"there is no run in {Path(root).absolute()}; give the folder of a run, or the host of an agent: onebox "
            "watch HOST"
        )
    return max(folders, key=lambda folder: (folder / "config.json").stat().st_mtime_ns)


def _content(path: Path, most_bytes: int = _FILE_BYTES) -> bytes | None:
    try:
        return read_regular(path, most_bytes)
    except OSError:
        return None


def _json(path: Path) -> Mapping[str, Any] | None:
    content = _content(path, _OBJECT_BYTES)
    try:
        return None if content is None else msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _plan(path: Path) -> Plan | None:
    try:
        return Plan.read(path)
    except UsageError:
        return None


def _known(found: object, kind: type[T], otherwise: T) -> T:
    """Return a value of a file as what it should be; something else where it is not that."""
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError):
        return otherwise


def _with_measured(view: PlanView, found: _Comparison) -> PlanView:
    """Return a plan with the times in the comparison of a summary."""
    times: dict[tuple[int, str], tuple[PhaseTime, ...]] = {}
    for row in found.stages:
        times[row.stage, " + ".join(map(str, row.devices))] = tuple(
            PhaseTime(kind=PHASES[kind], predicted_s=pair.predicted, measured_s=pair.measured)
            for kind, pair in row.seconds.items()
        )
    stages = tuple(
        msgspec.structs.replace(stage, times=times.get((stage.stage, stage.devices), stage.times))
        for stage in view.stages
    )
    return msgspec.structs.replace(view, stages=stages)


def _bound(feed: str) -> str:
    """Return the bottleneck that a run without an account reported with its feed."""
    return feed.removeprefix("bound by ").partition(";")[0]


def _staleness(summary: Mapping[str, Any]) -> str:
    delays = _known(summary.get("delays"), dict[str, int | float], {})
    said = [f"{steps} steps late by {late}" for late, steps in delays.items() if late != "0"]
    return ", ".join(said) or "exact steps"
