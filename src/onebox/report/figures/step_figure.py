"""Files of figures of steps: predicted, measured, or both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from onebox.drawing import check_suffix, save, step_figure
from onebox.engine import TraceEvent
from onebox.engine.steps.step_chart import measured_chart
from onebox.plan import Simulation, simulated_chart


def draw_simulation(
    simulation: Simulation, path: Path | str, *, title: str = "", emulated: Collection[int] = ()
) -> None:
    """Draw the predicted step of a plan.

    Args:
        simulation: A step, with its details.
        path: The file, a ``.png``, ``.svg`` or ``.pdf``; one that exists is replaced.
        title: Title above the figure, such as the plan in a line.
        emulated: Numbers of emulated devices, which are marked.

    Raises:
        UsageError: The suffix is another one, the simulation has no details, or the file cannot be written.
    """
    check_suffix(path)
    save(step_figure([simulated_chart(simulation)], title=title, emulated=emulated), path)


def draw_measured(
    events: Sequence[TraceEvent],
    path: Path | str,
    step: int,
    *,
    title: str = "",
    emulated: Collection[int] = (),
    simulation: Simulation | None = None,
) -> None:
    """Draw a measured step, below the predicted one where that is given.

    Args:
        events: The workers' events, from :meth:`~onebox.engine.Trainer.events`.
        path: The file, a ``.png``, ``.svg`` or ``.pdf``; one that exists is replaced.
        step: The training step.
        title: Title above the figure, such as the plan in a line.
        emulated: Numbers of emulated devices, which are marked.
        simulation: The predicted step, with its details.

    Raises:
        UsageError: The suffix is another one, there are no events of the step, or the file cannot be written.
    """
    check_suffix(path)
    expected = [simulated_chart(simulation)] if simulation is not None else []
    save(step_figure([*expected, measured_chart(events, step)], title=title, emulated=emulated), path)
