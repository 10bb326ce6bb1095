"""The plan, its stages and their times, for the page. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onebox.plan import Kind, Plan, Stage
from onebox.report.page.state import PhaseTime, PlanView, StageView
from onebox.report.tables.comparison import StageComparison
from onebox.report.tables.plan import segments_text
from onebox.report.tables.text import marked

PHASES: Mapping[Kind, str] = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}

_STAGES = 128
"""The most stages, with their replicas, that are shown."""


def plan_view(plan: Plan, measured: Sequence[StageComparison] = (), emulated: Collection[int] = ()) -> PlanView:
    """Return a plan for the page.

    Args:
        plan: The plan.
        measured: Its times, measured and predicted; those that are predicted alone where empty.
        emulated: Numbers of the emulated devices.
    """
    times = {(row.stage, row.devices): row for row in measured}
    names = [name for stage in plan.stages for name in stage.segments]
    stages = []
    for number, stage in enumerate(plan.stages):
        total = sum(stage.shares)
        for place, (devices, share) in enumerate(zip(stage.replicas, stage.shares, strict=True)):
            row = times.get((number, devices))
            stages.append(
                StageView(
                    stage=number,
                    devices=" + ".join(marked(device, emulated) for device in devices),
                    segments=segments_text(stage, names) if stage.segments else "the whole model",
                    share=round(share / total, 4),
                    settings=_settings(stage),
                    times=_measured(row) if row is not None else _predicted(plan, number, place),
                )
            )
    schedule = plan.schedule if len(plan.stages) > 1 else "one stage"
    return PlanView(text=plan.describe(), schedule=schedule, stages=tuple(stages[:_STAGES]))


def _measured(row: StageComparison) -> tuple[PhaseTime, ...]:
    return tuple(
        PhaseTime(kind=PHASES[kind], predicted_s=pair.predicted, measured_s=pair.measured)
        for kind, pair in row.seconds.items()
    )


def _predicted(plan: Plan, stage: int, place: int) -> tuple[PhaseTime, ...]:
    found = plan.predicted
    if found is None:
        return ()
    try:
        seconds = found.replicas_s[stage][place] if found.replicas_s else found.stages_s[stage]
    except IndexError:  # a plan that others have written may predict less
        return ()
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    return tuple(
        PhaseTime(kind=PHASES[kind], predicted_s=each, measured_s=None)
        for kind, each in zip(kinds, seconds, strict=True)
    )


def _settings(stage: Stage) -> str:
    said: list[str] = [stage.policy] if stage.policy != "keep" else []
    said += stage.formats
    said += [f"gradients as {stage.gradients}"] if stage.gradients != "none" else []
    said += [f"activations as {stage.activations}"] if stage.activations != "none" else []
    return ", ".join(said)
