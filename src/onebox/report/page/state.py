"""The state of the page: all that it shows, as frozen values. Pure.

Each field of :class:`PageState` is a section, which is sent to a browser only if it has changed. Quantities have their
units in their names; ``None`` stands for what is not known.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from onebox.report.run.status import RunState

Severity = Literal["info", "good", "warning", "failure"]
"""Importance of an event."""

DeviceState = Literal["present", "lost", "gone", "free", "leased", "unknown"]
"""State of a device: of a run that uses it, whose worker is lost until a recovery, without which the run goes on; or of
an agent that offers it."""


class PagePart(Struct, frozen=True, kw_only=True):
    """Base of the parts of the page."""


class Head(PagePart, frozen=True):
    """The head of the page.

    Args:
        kind: Kind of the source: a training run, the pool of a script, or machines with agents.
        name: Its name: a model and its data, a script, or the addresses of the agents.
        state: Its state.
        text: A line about the state, such as the error that ended a run.
        folder: Folder of the run; empty for none.
        trace: Whether a trace of the last steps can be saved.
    """

    kind: Literal["run", "script", "agents"]
    name: str
    state: RunState
    text: str = ""
    folder: str = ""
    trace: bool = False


class TestResult(PagePart, frozen=True):
    """The result of an epoch.

    Args:
        step: Steps at its end.
        epoch: Its number, from 1.
        test_loss: Mean loss on the test set.
        test_accuracy: Accuracy on it, 0 to 1.
    """

    step: int
    epoch: int
    test_loss: float | None
    test_accuracy: float | None


class Island(PagePart, frozen=True):
    """An island of a run.

    Args:
        number: Its number.
        devices: Its devices, as text.
        state: Whether it takes part.
        age_steps: Steps since the last outer steps were due.
        every_steps: Steps between two outer steps.
    """

    number: int
    devices: str
    state: DeviceState
    age_steps: int
    every_steps: int


class RunNumbers(PagePart, frozen=True):
    """The numbers of a training run.

    Args:
        step: Steps done.
        total_steps: Steps of the whole run.
        epoch: The epoch, from 1.
        epochs: Epochs of the whole run.
        loss: Loss of the newest step.
        samples_per_s: Training samples per second of wall time, over the last steps.
        eta_s: Expected remaining seconds.
        interval_s: Seconds from the end of a step to that of the next.
        predicted_s: Predicted seconds of a step.
        step_s: Measured seconds of the newest step, from its first computation to the end of its last.
        predicted_bubble: Predicted idle part of the devices' time, 0 to 1.
        bubble: The measured one, of the newest step.
        bound: The largest share of wall time, with its cause.
        account: All shares of wall time.
        feed: The report on the feed of the last epoch.
        staleness: Delay of the gradients, and its correction.
        result: Result of the last epoch.
        islands: The islands, if there are any.
    """

    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    epochs: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    interval_s: float | None = None
    predicted_s: float | None = None
    step_s: float | None = None
    predicted_bubble: float | None = None
    bubble: float | None = None
    bound: str = ""
    account: str = ""
    feed: str = ""
    staleness: str = "exact steps"
    result: TestResult | None = None
    islands: tuple[Island, ...] = ()


class TimePart(PagePart, frozen=True):
    """A part of a script's time.

    Args:
        name: What it went to.
        share: Its share, 0 to 1.
    """

    name: str
    share: float


class WaitingLine(PagePart, frozen=True):
    """A line of a script that has waited for values.

    Args:
        place: Its file and number.
        text: Its text.
        waits: Number of its waits.
        share: Their share of the script's time, 0 to 1.
    """

    place: str
    text: str
    waits: int
    share: float


class ScriptView(PagePart, frozen=True):
    """The time of a script since its first use of a device, by its parts.

    Args:
        bound: What it is bound by, and what would help.
        parts: The parts of the time.
        lines: The lines that have waited, the longest first.
    """

    bound: str
    parts: tuple[TimePart, ...]
    lines: tuple[WaitingLine, ...]


class Curves(PagePart, frozen=True):
    """The curves of a run, thinned out to a bounded number of points.

    Args:
        steps: The last step of each point.
        loss: Mean loss of its steps.
        samples_per_s: Rate at its end, over the last seconds.
        tests: Results of the epochs.
    """

    steps: tuple[int, ...]
    loss: tuple[float | None, ...]
    samples_per_s: tuple[float | None, ...]
    tests: tuple[TestResult, ...]


class HolderView(PagePart, frozen=True):
    """A client that has leased a device, or a part of one.

    Args:
        client: Its name.
        memory_bytes: Leased memory.
        since_s: Age of the lease in seconds.
        silent_s: Seconds since the client was heard.
    """

    client: str
    memory_bytes: int
    since_s: int
    silent_s: int


class DeviceView(PagePart, frozen=True):
    """A device.

    Args:
        number: Its number in the pool; ``None`` for an agent's.
        device: ``cpu``, ``cuda:k`` or ``sim``.
        name: Product name.
        state: Its state.
        threads: Its cores.
        free_threads: Those that are not leased.
        memory_bytes: Its memory.
        budget_bytes: Limit of the memory that a run may use.
        used_bytes: Memory in use, or leased.
        peak_bytes: Peak in the newest step.
        busy: Busy part of recent time, 0 to 1.
        temperature_c: Temperature in degrees Celsius.
        emulated: Whether its times are emulated.
        holders: Clients that have leased it.
    """

    number: int | None
    device: str
    name: str
    state: DeviceState
    threads: int = 0
    free_threads: int | None = None
    memory_bytes: int | None = None
    budget_bytes: int | None = None
    used_bytes: int | None = None
    peak_bytes: int | None = None
    busy: float | None = None
    temperature_c: float | None = None
    emulated: bool = False
    holders: tuple[HolderView, ...] = ()


class HostView(PagePart, frozen=True):
    """A host.

    Args:
        name: Its name.
        devices: Its devices.
        load: Runnable processes per core.
        waiting: Clients that wait for devices.
        problem: The reason for which it cannot be seen; empty if it can.
    """

    name: str
    devices: tuple[DeviceView, ...] = ()
    load: float | None = None
    waiting: tuple[str, ...] = ()
    problem: str = ""


class LinkView(PagePart, frozen=True):
    """A link from one host to another.

    Args:
        source: The host that sends.
        target: The host that receives.
        measured_bps: Bytes per second while it was busy.
        now_bps: Bytes per second at present.
        step_bytes: Bytes of the newest step.
        total_bytes: Bytes so far.
    """

    source: str
    target: str
    measured_bps: float | None = None
    now_bps: float | None = None
    step_bytes: int | None = None
    total_bytes: int | None = None


class PhaseTime(PagePart, frozen=True):
    """Time of a kind of action of a stage.

    Args:
        kind: ``forward``, ``backward``, ``input gradient`` or ``weight gradient``.
        predicted_s: The predicted seconds for a micro-batch.
        measured_s: The measured ones.
    """

    kind: str
    predicted_s: float | None
    measured_s: float | None


class StageView(PagePart, frozen=True):
    """A replica of a stage of the plan.

    Args:
        stage: Number of the stage.
        devices: Its devices, as text.
        segments: Its part of the model, as text.
        share: Its share of the batch, 0 to 1.
        settings: Activation policy, precision and the like, as text.
        times: Its times.
    """

    stage: int
    devices: str
    segments: str
    share: float
    settings: str = ""
    times: tuple[PhaseTime, ...] = ()


class PlanView(PagePart, frozen=True):
    """The plan.

    Args:
        text: The plan in one line.
        schedule: Name of its schedule.
        stages: Each replica of each stage.
    """

    text: str
    schedule: str
    stages: tuple[StageView, ...]


class ScheduleRow(PagePart, frozen=True):
    """A row of the schedule.

    Args:
        process: The device, or the links.
        track: ``compute``, ``wait``, ``transfer``, ``other``, or a link; with a number if spans overlap.
    """

    process: str
    track: str


class ScheduleView(PagePart, frozen=True):
    """The spans of each device in a step.

    Args:
        step: The step, from 1.
        length_us: Length in microseconds.
        rows: The rows, in order.
        kinds: Kinds of spans, each with a colour.
        names: Names of spans.
        spans: For each span row, kind, beginning and length in microseconds, and name, all by number.
        aligned: Whether the rows of each host begin with its own first span, as the hosts have clocks of their own.
        left_out: Number of spans that are not shown.
    """

    step: int
    length_us: float
    rows: tuple[ScheduleRow, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int, float, float, int], ...]
    aligned: bool = False
    left_out: int = 0


class EventView(PagePart, frozen=True):
    """An event.

    Args:
        at_s: Its time, in seconds since 1970.
        step: The step after which it happened.
        kind: Its kind, such as ``recovery``.
        severity: Its importance.
        text: Its description, as on the terminal.
    """

    at_s: float | None
    step: int | None
    kind: str
    severity: Severity
    text: str


class PageState(PagePart, frozen=True):
    """All that the page shows; each field is a section.

    Args:
        head: The head.
        run: Numbers of the run.
        curves: Curves of the run.
        script: Where the time of a script goes.
        hosts: The pool, by hosts.
        links: The links between hosts, and from the client.
        plan: The plan.
        schedule: The newest step.
        events: The newest events, the newest last.
    """

    head: Head
    run: RunNumbers | None = None
    curves: Curves | None = None
    script: ScriptView | None = None
    hosts: tuple[HostView, ...] = ()
    links: tuple[LinkView, ...] = ()
    plan: PlanView | None = None
    schedule: ScheduleView | None = None
    events: tuple[EventView, ...] = ()
