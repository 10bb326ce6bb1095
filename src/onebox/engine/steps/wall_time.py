"""Recording of wall time: what the client's thread does, and the steps of each device, for the account."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onebox.engine.steps.account import (
    CLIENT,
    UNSAMPLED,
    Account,
    ClientInterval,
    DeviceInterval,
    DeviceTime,
    Exchanges,
    Launch,
    device_intervals,
    exchanges_of,
    joined,
    make_account,
)
from onebox.engine.steps.launch import LaunchedStep
from onebox.engine.steps.observer import StepObserver
from onebox.engine.steps.results import StepTrace
from onebox.pool import DeviceInfo
from onebox.pool.discovery import LOCAL_HOST

_SHARE = 0.01
"""Part of the client's time that looking at instructions may take: where it takes long, fewer steps are looked at."""

_FOLDED_STEPS = 256
"""Steps of a device after which the account so far is summed up, so that a long epoch takes no more memory."""


@dataclass
class _Line:
    """The steps of a device that are not in the account yet."""

    launches: list[Launch] = field(default_factory=list)
    intervals: list[DeviceInterval] = field(default_factory=list)
    sent_ns: dict[int, int] = field(default_factory=dict)
    end_ns: int = 0


class WallTime(StepObserver):
    """The wall time of a run since its beginning, or since the last :meth:`take`.

    The first thread that counts time is the one whose time it is; others may read.

    Args:
        devices: The devices of the pool.
        clock: The monotonic clock in nanoseconds, for tests.
    """

    def __init__(self, devices: Sequence[DeviceInfo], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._hosts = [device.host for device in devices]
        self._clock = clock
        self._thread: int | None = None
        self._lock = threading.Lock()
        self._doing: list[str] = [CLIENT]
        self._spans: list[ClientInterval] = []
        self._lines: dict[int, _Line] = defaultdict(_Line)
        self._before: Exchanges = {}
        self._account = Account(seconds=0.0)
        self._settled_ns = self._since_ns = clock()
        self._next_ns = 0

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Count the time of the context as spent on something; what is counted inside of it is its own."""
        if self._thread is None:
            self._thread = threading.get_ident()
        if threading.get_ident() != self._thread:
            yield
            return
        self._turn()
        self._doing.append(doing)
        try:
            yield
        finally:
            self._turn()
            self._doing.pop()

    def _turn(self) -> None:
        """End the present span."""
        now_ns = self._clock()
        doing = self._doing[-1]
        if doing != CLIENT and now_ns > self._since_ns:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.doing == doing and last.end_ns == self._since_ns:
                self._spans[-1] = last._replace(end_ns=now_ns)
            else:
                self._spans.append(ClientInterval(doing, self._since_ns, now_ns))
        self._since_ns = now_ns

    def began(self, step: LaunchedStep) -> None:
        """Record when a step was sent."""
        now_ns = self._clock()
        for worker in step.answers:
            self._lines[worker].sent_ns[step.work.number] = now_ns

    def add(self, trace: StepTrace) -> None:
        """Add what devices did in a step."""
        now_ns = self._clock()
        sampled = now_ns >= self._next_ns
        begun = exchanges_of(trace) if sampled else {}
        with self._lock:
            for worker, (labels, times_ns, _) in trace.workers.items():
                if not times_ns:
                    continue
                line = self._lines[worker]
                ends = [end for label, end in zip(labels, times_ns[1::2], strict=True) if label.track != "transfer"]
                start_ns = min(times_ns)
                end_ns = max(ends, default=max(times_ns))
                sent_ns = line.sent_ns.pop(trace.step, start_ns)
                late = start_ns < line.end_ns  # an outer step, whose times come after those of later steps
                line.launches.append(Launch(min(sent_ns, start_ns), start_ns, end_ns))
                if sampled:
                    known = {**self._before, **begun}
                    line.intervals += device_intervals(worker, labels, times_ns, known, self._hosts, trace.traffic)
                else:
                    line.intervals.append(DeviceInterval(start_ns, end_ns, UNSAMPLED))
                if late:
                    line.launches.sort(key=lambda each: each.start_ns)
                    line.intervals.sort()
                line.end_ns = max(line.end_ns, end_ns)
            self._before = begun
            if sampled:
                self._next_ns = now_ns + int((self._clock() - now_ns) / _SHARE)
            if any(len(line.launches) > _FOLDED_STEPS for line in self._lines.values()):
                self._fold(min(line.end_ns for line in self._lines.values() if line.launches))

    def reset(self) -> None:
        """Forget what was sent: it is sent again."""
        for line in self._lines.values():
            line.sent_ns.clear()

    def present(self) -> Account:
        """Return the account up to the last step that all devices have ended; callable from any thread."""
        with self._lock:
            ends_ns = [line.end_ns for line in self._lines.values() if line.launches]
            return joined([self._account, self._until(min(ends_ns, default=self._settled_ns))])

    def take(self) -> Account:
        """Return the account up to now, once no step is in flight, and begin the next one."""
        self._turn()
        with self._lock:
            self._fold(self._since_ns)
            account, self._account = self._account, Account(seconds=0.0)
            self._next_ns = 0
            for worker in [worker for worker, line in self._lines.items() if not (line.launches or line.sent_ns)]:
                del self._lines[worker]
            return account

    def _until(self, end_ns: int) -> Account:
        """Return the account from where it was summed up to a time."""
        devices = {
            worker: DeviceTime(
                host="" if self._hosts[worker] == LOCAL_HOST else self._hosts[worker],
                launches=line.launches,
                intervals=line.intervals,
            )
            for worker, line in self._lines.items()
            if line.launches or line.end_ns > self._settled_ns
        }
        spans, doing = tuple(self._spans), self._doing[-1]
        if doing != CLIENT:  # not ended yet
            spans += (ClientInterval(doing, self._since_ns, max(self._since_ns, self._clock())),)
        return make_account(self._settled_ns, end_ns, spans, devices)

    def _fold(self, end_ns: int) -> None:
        """Sum up the account to a time, and drop what it was made of."""
        self._account = joined([self._account, self._until(end_ns)])
        self._settled_ns = max(end_ns, self._settled_ns)
        self._spans = [span for span in self._spans if span.end_ns > end_ns]
        for line in self._lines.values():
            line.launches = [each for each in line.launches if each.end_ns > end_ns]
            line.intervals = [each for each in line.intervals if each.end_ns > end_ns]
