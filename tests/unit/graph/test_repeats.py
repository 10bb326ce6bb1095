"""Models without repeats compute what shorter ones compute."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.graph import ModelPrograms, Port
from onebox.graph.repeats import ShortenedModel, alike_stages, remaining, without_repeats
from tests.unit.graph.staged import Traced, assert_alike, order_of, run, trace

WIDTH, BLOCKS = 6, 5


class Blocks(nn.Module):
    """A residual network of equal blocks, which all read one more value, and of which some may be left out."""

    def __init__(self, used: Sequence[int] = range(BLOCKS), *, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used = used
        self.begin, self.context = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.end = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h, context = self.begin(x), self.context(x)
        for number in self.used:
            h = h + functional.dropout(self.blocks[number](h * context), 0.1, self.training)
        return self.end(functional.silu(h))  # type: ignore[no-any-return]


def traced_blocks(model: nn.Module) -> Traced:
    return trace(model, functional.mse_loss, (torch.ones(3, 4).double(), torch.zeros(3, 2).double()))


def segmented(traced: Traced) -> ModelPrograms:
    return traced.model.divide([[name] for name in traced.model.segments])


def shortened(traced: Traced) -> ModelPrograms:
    model = ShortenedModel(traced.model, alike_stages(segmented(traced)))
    return model.divide([[name] for name in model.segments])


def test_blocks_are_alike_and_their_ends_are_left() -> None:
    traced = traced_blocks(Blocks())
    names, alike = traced.model.segments, alike_stages(segmented(traced))
    assert max(map(len, alike)) >= BLOCKS - 1
    for stages in alike:
        assert len({names[stage].removeprefix("model.blocks.")[1:] for stage in stages}) == 1, "the same part of blocks"
    left = ShortenedModel(traced.model, alike).segments
    assert len(left) == len(remaining(alike)) < len(names)
    assert left == tuple(name for name in names if name in left), "in order"


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("model", [Blocks(), Blocks(norm=nn.BatchNorm1d)], ids=["layer norm", "batch norm"])
def test_every_value_is_there_when_it_is_read(model: nn.Module, halves: bool) -> None:
    traced = traced_blocks(model)
    short = shortened(traced)
    made = run(short, traced.given, order_of(short, halves=halves)).made
    ports = {port for named in short.phases.values() for port in named.outputs}
    assert {port for port in ports if port.kind != "value"} == made.keys()
    assert {Port("update", name) for name in short.updates} == {port for port in made if port.kind == "update"}
    assert len(short.phases) < len(segmented(traced).phases)


class Chain(nn.Sequential):
    """A chain of equal layers."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        kept = [*layers[: count - 1], layers[-1]]
        super().__init__(nn.Linear(4, WIDTH), *kept, nn.Linear(WIDTH, 2))
        self.double()


@pytest.mark.parametrize("halves", [False, True])
def test_a_chain_computes_what_its_first_and_last_layers_compute(halves: bool) -> None:
    long, short = traced_blocks(Chain(BLOCKS)), traced_blocks(Chain(2))
    renamed = {f"model.{BLOCKS}.": "model.2.", f"model.{BLOCKS + 1}.": "model.3."}

    def own(port: Port) -> Port:
        name = str(port.name)
        return next(
            (Port(port.kind, new + name.removeprefix(old)) for old, new in renamed.items() if old in name), port
        )

    model = shortened(long)
    found = run(model, long.given, order_of(model, halves=halves))
    found.made = {own(port): tensor for port, tensor in found.made.items()}
    expected = short.model.divide([[name] for name in short.model.segments])
    assert_alike(found, run(expected, short.given, order_of(expected, halves=halves)))


def test_a_model_without_repeats_is_unchanged() -> None:
    traced = traced_blocks(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 2)).double())
    programs = segmented(traced)
    assert without_repeats(programs, alike_stages(programs)) == programs


def test_stages_that_differ_in_one_of_two_variants_are_not_alike() -> None:
    programs = segmented(traced_blocks(Chain(BLOCKS)))
    (layers,) = [stages for stages in alike_stages(programs) if len(stages) > 1]
    others = {phase: named for phase, named in programs.phases.items() if phase.stage != layers[0]}
    odd = ModelPrograms(phases=others, stages=programs.stages, updates={}, constants={})
    assert layers[1:] in alike_stages(programs, odd)
