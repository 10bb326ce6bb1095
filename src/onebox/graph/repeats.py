"""Models without repeats: of stages with equal programs, the first and the last.

A model of many equal blocks costs a device as much as a shorter one per block, so that a few of its stages stand for
all. A value that a removed stage computes in forward is that of the first stage like it, and one of backward, which
goes from later stages to earlier ones, that of the last: both are there when they are read, and have the same shapes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import msgspec

from onebox.graph.capture.joint import Port
from onebox.graph.lower.phases import Phase, PhaseKind
from onebox.graph.programs import ModelPrograms, TracedModel

_KINDS: tuple[PhaseKind, ...] = ("F", "B", "I", "W")


def alike_stages(*models: ModelPrograms) -> tuple[tuple[int, ...], ...]:
    """Return the stages in groups of those that have equal programs, whatever their parameters and values are.

    Args:
        models: The programs of one or several variants of a model, divided into the same stages.
    """
    found: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for stage in range(models[0].stages):
        found[tuple(_digest(model, stage) for model in models)].append(stage)
    return tuple(map(tuple, found.values()))


def _digest(model: ModelPrograms, stage: int) -> bytes:
    """Return a hash of the programs of a stage, without names, and without positions of random operators."""
    digest = hashlib.blake2b(digest_size=16)
    for kind in _KINDS:
        named = model.phases.get(Phase(stage, kind))
        if named is not None:
            operators = (
                msgspec.structs.replace(each, position=min(each.position, 0)) for each in named.program.operators
            )
            program = msgspec.structs.replace(named.program, operators=tuple(operators))
            ends = [[port.kind for port in ports] for ports in (named.inputs, named.outputs)]
            digest.update(msgspec.msgpack.encode((kind, program, ends)))
    return digest.digest()


def without_repeats(model: ModelPrograms, alike: Iterable[Sequence[int]]) -> ModelPrograms:
    """Return a model with the first and the last stage of each group, numbered anew.

    Args:
        model: The programs of all stages.
        alike: Groups of stages with equal programs; see :func:`alike_stages`.
    """
    alike = list(alike)
    others: dict[Port, Port] = {}
    for stages in alike:
        for stage in stages[1:-1]:
            for kind in _KINDS:
                named = model.phases.get(Phase(stage, kind))
                if named is not None:
                    chosen = model.of(stages[0] if kind == "F" else stages[-1], kind)
                    others |= zip(named.outputs, chosen.outputs, strict=True)
    numbers = {stage: number for number, stage in enumerate(remaining(alike))}
    phases = {
        Phase(numbers[phase.stage], phase.kind): replace(
            named, inputs=tuple(others.get(port, port) if port.kind == "value" else port for port in named.inputs)
        )
        for phase, named in model.phases.items()
        if phase.stage in numbers
    }
    used = {port for named in phases.values() for port in (*named.inputs, *named.outputs)}
    return ModelPrograms(
        phases=phases,
        stages=len(numbers),
        updates={name: update for name, update in model.updates.items() if Port("update", name) in used},
        constants={name: tensor for name, tensor in model.constants.items() if Port("constant", name) in used},
    )


def remaining(alike: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the first and the last stage of each group, in order."""
    return tuple(sorted({stage for stages in alike for stage in (stages[0], stages[-1])}))


class ShortenedModel(TracedModel):
    """A traced model without repeats, to be divided into its segments.

    Args:
        whole: The model.
        alike: Groups of its segments with equal programs.
    """

    def __init__(self, whole: TracedModel, alike: Sequence[Sequence[int]]) -> None:
        vars(self).update(vars(whole))
        self._whole = whole
        self._alike = alike

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the segments that are left."""
        return tuple(self._whole.segments[number] for number in remaining(self._alike))

    def divide(
        self,
        stages: Sequence[Sequence[str]] | None = None,
        *,
        policies: Sequence[str] | None = None,
        blocks: Sequence[int] = (),
        narrow: Collection[int] = (),
    ) -> ModelPrograms:
        """Return the programs of its segments, each of which is a stage; with ``narrow``, all are in bfloat16."""
        assert stages is not None
        assert [list(names) for names in stages] == [[name] for name in self.segments]
        every = [[name] for name in self._whole.segments]
        return without_repeats(self._whole.divide(every, narrow=range(len(every)) if narrow else ()), self._alike)
