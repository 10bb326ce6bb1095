"""Runs the programs of stages one after the other, as workers would, and compares them with those of one stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebox.graph import ModelPrograms, NamedProgram, Phase, PhaseKind, Port, TracedModel
from onebox.wire import check, spec_of
from tests.kit.captures import capture
from tests.kit.models import CASES, Case
from tests.unit.graph.ranks import run_tape

TOLERANCE = 1e-12
"""Of float64; sums of gradients may be made in another order."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced model with what its programs are given.

    Args:
        model: The traced model.
        given: Every input that no program makes, by its port.
    """

    model: TracedModel
    given: Mapping[Port, Tensor]

    def edges(self) -> set[tuple[int, int]]:
        """Return which segment gives forward values to which, by their numbers."""
        names = self.model.segments
        phases = self.model.divide([[name] for name in names]).phases
        makers = {port: phase.stage for phase, part in phases.items() for port in part.outputs if phase.kind == "F"}
        return {
            (makers[port], phase.stage)
            for phase, part in phases.items()
            for port in part.inputs
            if phase.kind == "F" and port.kind == "value" and makers[port] != phase.stage
        }


def trace(model: nn.Module, loss: Any, batch: tuple[Any, Any], *, backward: bool = True, halves: bool = True) -> Traced:
    """Trace a model."""
    captured = capture(model, loss, batch, mode="train" if backward else "evaluate")
    traced = TracedModel(captured, backward=backward, halves=halves)
    modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    given: dict[Port, Tensor] = {}
    for prefix, module in modules.items():
        given |= {Port("parameter", name): t.detach() for name, t in module.named_parameters(prefix=prefix)}
        given |= {Port("buffer", name): t.detach() for name, t in module.named_buffers(prefix=prefix)}
    given |= {Port("leaf", place): leaf for place, leaf in enumerate(tree_leaves(batch))}
    given |= {Port("constant", name): t for name, t in traced.divide().constants.items()}
    weight = torch.tensor(0.375, dtype=next(iter(model.parameters())).dtype)
    return Traced(model=traced, given={**given, Port("weight", 0): weight})


SIZE = 3
"""Samples of the micro-batch that cases are traced with."""


@functools.cache
def traced_case(name: str) -> Traced:
    """Return one of the models that all tests train, traced with both halves of backward."""
    case: Case = CASES[name]
    return trace(case.model(), case.loss, case.batches([SIZE])[0])


@dataclass
class Ran:
    """What phases have made.

    Args:
        made: Results, updates, and gradients, those of several stages added up.
        terms: How many stages made each gradient.
        crossed: Values that went from one stage to another.
    """

    made: dict[Port, Tensor] = field(default_factory=dict)
    terms: dict[Port, int] = field(default_factory=dict)
    crossed: set[Port] = field(default_factory=set)


def order_of(model: ModelPrograms, *, halves: bool) -> list[Phase]:
    """Return the phases in an order in which one worker could run them."""
    ahead = [Phase(stage, "F") for stage in range(model.stages)]
    kinds: Sequence[PhaseKind] = ("I", "W") if halves else ("B",)
    behind = [Phase(stage, kind) for kind in kinds for stage in reversed(range(model.stages))]
    return [*ahead, *(phase for phase in behind if phase in model.phases)]


def run(model: ModelPrograms, given: Mapping[Port, Tensor], order: Sequence[Phase]) -> Ran:
    """Run phases in an order; each value must be there before it is read.

    Buffers change with the phase that changes them. What goes from stage to stage arrives as a copy in the order of
    its dimensions, as a transfer would bring it.
    """
    state = dict(given)
    values: dict[Port, tuple[int, Tensor]] = {}
    ran = Ran()
    for phase in order:
        part = model.phases[phase]
        check(part.program)
        inputs = [_input(port, place, part, phase, values, state, ran) for place, port in enumerate(part.inputs)]
        made = dict(zip(part.outputs, run_tape(part.program, inputs), strict=True))
        assert len(made) == len(part.outputs), "a port that a phase gives out twice"
        for port, tensor in made.items():
            if port.kind == "value":
                assert port not in values, f"{port} is made twice"
                values[port] = (phase.stage, tensor)
            elif port.kind == "gradient":
                ran.terms[port] = ran.terms.get(port, 0) + 1
                ran.made[port] = ran.made[port] + tensor if port in ran.made else tensor
            else:
                assert port not in ran.made, f"{port} is made twice"
                ran.made[port] = tensor
        state |= {Port("buffer", port.name): tensor for port, tensor in made.items() if port.kind == "update"}
    return ran


def _input(
    port: Port,
    place: int,
    part: NamedProgram,
    phase: Phase,
    values: Mapping[Port, tuple[int, Tensor]],
    state: Mapping[Port, Tensor],
    ran: Ran,
) -> Tensor:
    if port.kind != "value":
        return state[port]
    assert port in values, f"{phase} reads {port} before it is made"
    stage, tensor = values[port]
    if stage != phase.stage:
        ran.crossed.add(port)
        tensor = tensor.contiguous().clone()
    assert spec_of(tensor) == part.program.inputs[place], f"{port} is not what {phase} expects"
    return tensor


def assert_alike(found: Ran, expected: Ran, tolerance: float = TOLERANCE) -> None:
    """Require that two runs have made the same."""
    assert found.made.keys() == expected.made.keys()
    for port, tensor in expected.made.items():
        torch.testing.assert_close(
            found.made[port], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, p=port: f"{p}: {text}"
        )


def whole(traced: Traced) -> Ran:
    """Return what the programs of one stage make."""
    model = traced.model.divide()
    return run(model, traced.given, order_of(model, halves=False))


def check_division(
    traced: Traced, stages: Sequence[Sequence[str]], expected: Ran, policies: Sequence[str] | None = None
) -> ModelPrograms:
    """Require that stages make what one stage makes, whole and in halves; return their programs."""
    model = traced.model.divide(stages, policies=policies)
    for halves in (False, True):
        assert_alike(run(model, traced.given, order_of(model, halves=halves)), expected)
    return model
