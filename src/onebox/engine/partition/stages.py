"""The stages of a plan: the captured model, divided for each micro-batch size."""

from __future__ import annotations

from collections.abc import Hashable

from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import UsageError
from onebox.graph import Mode
from onebox.graph.memory_format import with_channels_last
from onebox.graph.shard.placements import Placement
from onebox.plan import Links, Plan, block_numbers


class StageCutter:
    """Divides a captured model into the stages of a plan, once for each micro-batch size.

    Args:
        links: How fast the links between its devices are, as far as that is known.
        plan: The plan.
        captures: The captured model.
    """

    def __init__(self, plan: Plan, captures: Captures, links: Links | None) -> None:
        self._plan = plan
        self._captures = captures
        self._links = links
        self._models: dict[Hashable, PhasePrograms] = {}
        self._settled: dict[str, Placement] = {}

    def check(self, batch: Batch, size: int) -> None:
        """Refuse a plan for another model.

        Args:
            batch: A batch of the same kind.
            size: Samples of a micro-batch.

        Raises:
            CaptureError: The model cannot be captured.
            UsageError: The plan's stages do not match this model.
        """
        known = self._captures.traced(batch, size, train=True, halves=self._plan.halves).segments
        if len(self._plan.stages) == 1:
            return
        named = [name for stage in self._plan.stages for name in stage.segments]
        strangers = [name for name in named if name not in known]
        missing = [name for name in known if name not in named]
        if strangers or missing:
            what = f"names segment {strangers[0]!r}, which it has not" if strangers else f"leaves out {missing[0]!r}"
            raise UsageError(f"the plan is for another model: it {what}; the segments are {', '.join(known)}")

    def parts(self, batch: Batch, size: int, *, train: bool, probe: Mode | None = None) -> PhasePrograms:
        """Return the parts of the stages for micro-batches of a size.

        Args:
            batch: A batch of the same kind.
            size: Samples of a micro-batch.
            train: Whether gradients are needed.
            probe: The mode of a comparison; see :meth:`~onebox.engine.workload.captures.Captures.traced`.

        Raises:
            CaptureError: The model cannot be captured.
            UsageError: The stages' precisions conflict with a model that uses bf16 as a whole.
        """
        key = (batch.signature(size), train, probe)
        if key not in self._models:
            halves = train and self._plan.halves and not probe
            traced = self._captures.traced(batch, size, train=train, halves=halves, probe=probe)
            stages = None if len(self._plan.stages) == 1 else [stage.segments for stage in self._plan.stages]
            policies = [stage.policy for stage in self._plan.stages]
            blocks = block_numbers(self._plan.stages)
            programs = traced.divide(stages, policies=policies, blocks=blocks, narrow=self._narrow)
            programs = with_channels_last(programs, self._plan.channels_last)
            self._models[key] = PhasePrograms(
                programs, self._plan, halves=() if probe else self._halved, settled=self._settled, links=self._links
            )
            self._settled = self._settled or self._models[key].placements
        return self._models[key]

    @property
    def _narrow(self) -> frozenset[int]:
        """Stages whose products are rounded here; with autocast the captures contain the rounding."""
        whole = self._captures.recipe.precision == "bf16"
        if whole and any(stage.precision == "fp32" for stage in self._plan.stages):
            raise UsageError(
                "precision='bf16' runs the whole model in bf16, but a stage of the plan is of precision 'fp32'; "
                "precision='auto' leaves that to the plan"
            )
        return frozenset() if whole else self._plan.narrow

    @property
    def _halved(self) -> range:
        """Split stages whose backward is divided into input and weight gradients."""
        return range(len(self._plan.stages)) if self._plan.halves else range(0)
