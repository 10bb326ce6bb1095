"""Windows as tables: their parts, the steps that they stand for, and their limits; see
:mod:`onebox.plan.schedules.async_window` for the window of ``async-1f1b``. Pure."""

from __future__ import annotations

from onebox.errors import UsageError
from onebox.plan.model.schedule import Action, Kind, Routes, Schedule


def fill_of(window: Schedule) -> Schedule:
    """Return the window of a first step: the same without the backwards of the step before."""
    return Schedule(rows={d: tuple(one for one in row if one.micro_batch >= 0) for d, row in window.rows.items()})


def drain_of(window: Schedule) -> Schedule:
    """Return the rest of a last step: the actions with negative numbers alone."""
    return Schedule(rows={d: tuple(one for one in row if one.micro_batch < 0) for d, row in window.rows.items()})


def unrolled(window: Schedule, count: int, steps: int) -> Schedule:
    """Return the schedule of consecutive windows, as one of many micro-batches.

    Args:
        window: The steady window.
        count: Micro-batches of a step.
        steps: Number of steps; their micro-batches are numbered consecutively.

    Example:
        >>> unrolled(Schedule.parse(["0: 0F0 0B-1"]), 1, 3).lines()
        ('0: 0F0 0F1 0B0 0F2 0B1 0B2',)
    """
    every = range(steps * count)
    rows = {
        device: tuple(
            Action(kind, stage, shift + micro_batch)
            for shift in range(0, (steps + 1) * count, count)
            for kind, stage, micro_batch in row
            if shift + micro_batch in every
        )
        for device, row in window.rows.items()
    }
    return Schedule(rows=rows)


def in_flight_of(window: Schedule, stages: int) -> tuple[int, ...]:
    """Return the maximum number of micro-batches in flight of each stage on any device.

    Args:
        window: A steady window.
        stages: Number of stages.

    Example:
        >>> rows = ["0: 0F0 0B-2 0F1 0B-1 0F2 0B0 0F3 0B1", "1: 1F0 1B-1 1F1 1B0 1F2 1B1 1F3 1B2"]
        >>> in_flight_of(Schedule.parse(rows), 2)
        (3, 2)
    """
    most = [0] * stages
    for row in window.rows.values():
        held = [0] * stages
        for kind, stage, micro_batch in row:
            held[stage] += micro_batch < 0 and kind in ("B", "I")
        for kind, stage, _ in row:
            held[stage] += {"F": 1, "W": 0}.get(kind, -1)
            most[stage] = max(most[stage], held[stage])
    return tuple(most)


def repeated_routes(routes: Routes, steps: int) -> Routes:
    """Return the routes of steps whose micro-batches are numbered consecutively."""
    return tuple(row * steps for row in routes)


def check_window(window: Schedule, count: int) -> None:
    """Check that a table is a window: all forwards, ascending, and each backward once, of this step or the one before.

    Deadlocks are checked by :func:`~onebox.plan.simulate.validate`, on the steps that it stands for.

    Args:
        window: The table.
        count: Micro-batches of a step.

    Raises:
        UsageError: It is not a window.
    """
    for device, row in window.rows.items():
        seen: dict[tuple[Kind, int, int], Action] = {}
        for action in row:
            kind, stage, micro_batch = action
            if not (0 if kind == "F" else -count) <= micro_batch < count:
                raise UsageError(
                    f"{action} on device {device}: a window has forwards of the micro-batches 0 to {count - 1}, and "
                    f"backwards of these and, as -{count} to -1, of those of the step before"
                )
            other = seen.setdefault((kind, stage, micro_batch % count), action)
            if other is not action:
                raise UsageError(f"{other} and {action} are both on device {device}; a window has one of them")
