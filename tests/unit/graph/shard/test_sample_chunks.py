"""The tail of a program, computed chunk by chunk: it computes what the whole computes, and is as long as it can be."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from onebox.graph import NamedProgram, Port, TracedModel
from onebox.graph.shard.sample_chunks import Tail, find_tail, in_chunks, put_together, samples_of
from onebox.wire import check, specs_by_slot
from tests.kit.captures import capture
from tests.kit.models import Case
from tests.unit.graph.ranks import run_tape
from tests.unit.graph.shard.test_search import given
from tests.unit.graph.shard_models import ALL

SAMPLES = 5
TOLERANCE = 1e-12


@functools.cache
def phases(name: str) -> list[tuple[NamedProgram, list[Tensor], list[Tensor]]]:
    """Return the programs of a model in two stages, each with what goes in and comes out."""
    case: Case = ALL[name]
    model, (batch,) = case.model(), case.batches([SAMPLES])
    traced = TracedModel(capture(model, case.loss, batch), backward=True)
    names = traced.segments
    programs = traced.divide([names[: len(names) // 2], names[len(names) // 2 :]])
    values: dict[Port, Tensor] = dict(given(programs, model, batch))
    found = []
    for stage, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B")):
        part = programs.of(stage, kind)  # type: ignore[arg-type]
        inputs = [values[port] for port in part.inputs]
        outputs = run_tape(part.program, inputs)
        values |= {port: made for port, made in zip(part.outputs, outputs, strict=True) if port.kind == "value"}
        found.append((part, inputs, outputs))
    return found


def tails(part: NamedProgram, limit: int = 2) -> list[Tail]:
    """Return the tails of some of the values that a program makes, the last ones first."""
    slots = [slot for operator in part.program.operators for slot in operator.outs if slot is not None]
    found = (find_tail(part.program, slot, SAMPLES) for slot in reversed(slots))
    return [tail for tail in found if tail is not None][:limit]


@pytest.mark.parametrize("name", ["alexnet", "attention", "block", "depthwise", "gpt2", "unet"])
def test_chunks_of_any_tail_compute_what_the_whole_computes(name: str) -> None:
    for part, inputs, expected in phases(name):
        outputs = part.program.outputs
        for tail in tails(part):
            whole = dict(zip(outputs, expected, strict=True))
            for length, chunks, keep in (
                (len(tail.operators), samples_of(SAMPLES, 2), False),
                (1 + len(tail.operators) // 2, (1, 3, 1), tail.slot in outputs),
            ):
                made = in_chunks(tail, length, chunks, keep=keep)
                check(made.program)
                values = run_tape(made.program, inputs)
                kept = [slot for slot in outputs if keep or slot != tail.slot]
                for slot, value in zip(kept, values, strict=False):
                    torch.testing.assert_close(value, whole[slot], rtol=TOLERANCE, atol=TOLERANCE)
                together = torch.cat(values[len(kept) :])
                assert tuple(len(value) for value in values[len(kept) :]) == made.rows
                if tail.slot in whole:
                    torch.testing.assert_close(together, whole[tail.slot], rtol=TOLERANCE, atol=TOLERANCE)


def forward_of(model: nn.Module, cut: int, batch: int = 6) -> NamedProgram:
    """Return forward of the first segments of a model; if negative, of all but so many."""
    inputs = torch.randn(batch, 8, dtype=torch.float64)
    with torch.no_grad():
        targets = torch.zeros_like(model(inputs))
    traced = TracedModel(capture(model, nn.functional.mse_loss, (inputs, targets)), backward=True)
    programs = traced.divide([traced.segments[:cut], traced.segments[cut:]])
    return programs.of(0, "F")


def names(tail: Tail) -> list[str]:
    return [tail.program.operators[number].name.split(".")[1] for number in tail.operators]


def test_linear_layers_are_in_the_tail_and_what_backward_reads_is_put_together() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4)).double()
    forward = forward_of(layers, 2)
    slot = forward.program.outputs[-1]
    tail = find_tail(forward.program, slot, 6)
    assert tail is not None
    assert [name for name in names(tail) if name not in ("t", "permute")] == ["addmm", "tanh", "addmm"]
    tanh = tail.program.operators[tail.operators[names(tail).index("tanh")]].outs[0]
    whole = put_together(tail, len(tail.operators), keep=False)
    assert whole == {tanh: True}
    assert put_together(tail, 1, keep=False) == {}
    made = in_chunks(tail, 1, (3, 3), keep=False)
    assert [o.name for o in made.program.operators].count("aten.cat.default") == 0
    assert [o.name for o in made.program.operators].count("aten.addmm.default") == 3


class Dropping(nn.Module):
    """Dropout ahead of the last layer."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.between = nn.BatchNorm1d(8) if norm else nn.Dropout(0.5)
        self.last = nn.Linear(8, 8)

    def forward(self, x_BC: Tensor) -> Tensor:
        """Return features."""
        return self.last(self.between(self.first(x_BC)))


@pytest.mark.parametrize("norm", [False, True])
def test_what_draws_random_numbers_or_needs_all_samples_ends_the_tail(norm: bool) -> None:
    model = nn.Sequential(Dropping(norm), nn.Linear(8, 2)).double()
    forward = forward_of(model, -1)
    products = [n for n, o in enumerate(forward.program.operators) if o.name == "aten.addmm.default"]
    slot = forward.program.operators[products[-1]].outs[0]
    assert slot is not None
    tail = find_tail(forward.program, slot, 6)
    assert tail is not None
    assert names(tail) == ["addmm"]
    assert all(forward.program.operators[number].position < 0 for number in tail.operators)


def test_a_value_that_is_given_or_has_no_samples_has_no_tail() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).double()
    forward = forward_of(layers, 1)
    specs = specs_by_slot(forward.program)
    leaf = next(slot for slot, port in enumerate(forward.inputs) if port.kind == "leaf")
    assert find_tail(forward.program, leaf, 6) is None
    slot = next(slot for slot in forward.program.outputs if specs[slot].shape == (6, 16))
    assert find_tail(forward.program, slot, 4) is None, "6 rows are not 4 samples'"
    assert find_tail(forward.program, slot, 1) is None


def test_samples_are_dealt_evenly() -> None:
    assert samples_of(8, 2) == (4, 4)
    assert samples_of(7, 3) == (3, 2, 2)
