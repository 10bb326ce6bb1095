"""Splitting within layers: the ranks together compute what one device does, and each holds its part."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebox.errors import UsageError
from onebox.graph import ModelPrograms, NamedProgram, Phase, Port, TracedModel, model_programs
from onebox.graph.shard.placements import PARTIAL, REPLICATE, Placement, Shard
from onebox.graph.shard.search import AllGather, AllReduce, Sharded, shard_parts, shard_tapes
from tests.kit.captures import capture
from tests.kit.models import Case, features
from tests.unit.graph.ranks import compare, run_tape
from tests.unit.graph.shard_models import ALL

SAMPLES = 4


@functools.cache
def traced(name: str) -> tuple[ModelPrograms, dict[Port, Tensor]]:
    """Return the programs of a model and what goes in."""
    return trace(ALL[name])


def trace(case: Case) -> tuple[ModelPrograms, dict[Port, Tensor]]:
    model, (batch,) = case.model(), case.batches([SAMPLES])
    programs = model_programs(capture(model, case.loss, batch), backward=True)
    return programs, given(programs, model, batch)


def given(programs: ModelPrograms, model: nn.Module, batch: object) -> dict[Port, Tensor]:
    """Return every input that no program of the first stage makes."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found: dict[Port, Tensor] = {Port("weight", 0): torch.tensor(0.5, dtype=torch.float64)}
    found |= {Port("leaf", number): leaf for number, leaf in enumerate(tree_leaves(batch))}
    found |= {Port("constant", name): tensor for name, tensor in programs.constants.items()}
    for name, tensor in state.items():
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        found[Port(kind, f"model.{name}")] = tensor.detach()  # type: ignore[arg-type]
    return found


def tapes_of(programs: ModelPrograms) -> tuple[NamedProgram, NamedProgram]:
    assert programs.backward is not None
    return programs.forward, programs.backward


def split_parameters(sharded: Sharded) -> dict[str, Shard]:
    return {
        str(port.name): placement
        for port, placement in sharded.placements.items()
        if port.kind == "parameter" and isinstance(placement, Shard)
    }


def collectives(sharded: Sharded, tape: int) -> list[str]:
    return [type(s).__name__ for s in sharded.tapes[tape][0].steps if isinstance(s, AllReduce | AllGather)]


@pytest.mark.parametrize("name", sorted(ALL))
def test_ranks_compute_what_one_device_does(name: str) -> None:
    programs, inputs = traced(name)
    tapes = tapes_of(programs)
    sharded = shard_tapes(tapes, 2, trials=0)
    assert split_parameters(sharded)
    compare(tapes, sharded, inputs)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "attention", "dropping", "tied", "vgg-bn", "unet", "depthwise", "block"]
)
def test_more_ranks_need_not_divide_evenly(name: str, ranks: int) -> None:
    programs, inputs = traced(name)
    tapes = tapes_of(programs)
    compare(tapes, shard_tapes(tapes, ranks, trials=0), inputs)


@pytest.mark.parametrize("name", ["mlp", "alexnet", "attention", "unet", "tied"])
def test_whatever_was_searched_for_is_as_exact(name: str) -> None:
    programs, inputs = traced(name)
    tapes = tapes_of(programs)
    for held in (0.5, 20.0):
        compare(tapes, shard_tapes(tapes, 2, held=held, trials=20), inputs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["alexnet", "vgg", "vgg-bn", "resnet"])
def test_convolutional_nets_divide_nearly_all_that_is_held(name: str, ranks: int) -> None:
    sharded = shard_tapes(tapes_of(traced(name)[0]), ranks, trials=0)
    assert sharded.held_bytes <= 1.1 / ranks * sharded.whole_bytes


@pytest.mark.parametrize(("name", "most"), [("gpt2", 0.6), ("vit", 0.62), ("cnn", 0.52), ("mlp", 0.6)])
def test_two_ranks_hold_little_more_than_half(name: str, most: float) -> None:
    sharded = shard_tapes(tapes_of(traced(name)[0]), 2, trials=10)
    assert sharded.held_bytes <= most * sharded.whole_bytes


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "branches", "depthwise"])
def test_bytes_held_are_those_of_the_first_rank(name: str) -> None:
    tapes = tapes_of(traced(name)[0])
    sharded = shard_tapes(tapes, 3, trials=5)
    for held, rank in ((sharded.held_bytes, 0), (None, 1), (None, 2)):
        found: dict[Port, int] = {}
        for tape, ranks in zip(tapes, sharded.tapes, strict=True):
            for port, spec in zip(tape.inputs, ranks[rank].inputs, strict=True):
                found[port] = spec.size_bytes
        mine = sum(size for port, size in found.items() if port.kind in ("parameter", "buffer", "value"))
        assert mine == held if held is not None else mine <= sharded.held_bytes


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2", "tied", "unet", "dropping"])
def test_parts_are_split_as_the_whole_is(name: str) -> None:
    model, (batch,) = ALL[name].model(), ALL[name].batches([SAMPLES])
    model_of_batch = TracedModel(capture(model, ALL[name].loss, batch), backward=True)
    whole, parts = model_of_batch.divide(None), model_of_batch.divide([[one] for one in model_of_batch.segments])
    every = range(len(model_of_batch.segments))
    phases = [*(Phase(n, "F") for n in every), *(Phase(n, "B") for n in reversed(every))]
    tapes = [parts.phases[phase] for phase in phases if phase in parts.phases]
    inputs = given(whole, model, batch) | given(parts, model, batch)
    one = shard_tapes([whole.of(0, "F"), whole.of(0, "B")], 2)
    found = shard_parts([whole.of(0, "F"), whole.of(0, "B")], tapes, 2)
    assert split_parameters(found) == split_parameters(one)
    assert found.wire_bytes == pytest.approx(one.wire_bytes, rel=0.15)
    compare(tapes, found, inputs)


def test_pairs_of_columns_and_rows_need_one_sum_each_way() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(10, 32), nn.Linear(32, 10)
            self.head = nn.Linear(10, 5)

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.head(torch.tanh(x_BD + self.down(torch.tanh(self.up(torch.sin(x_BD))))))

    programs, inputs = trace(Case(build=Pair, data=features))
    tapes = tapes_of(programs)
    sharded = shard_tapes(tapes, 2, held=1.0, minimum_bytes=1000)
    assert split_parameters(sharded) == {
        "model.up.weight": Shard(0, (16, 16)), "model.up.bias": Shard(0, (16, 16)),
        "model.down.weight": Shard(1, (16, 16)),
    }  # fmt: skip
    assert collectives(sharded, 0) == ["AllReduce"]
    assert collectives(sharded, 1) == []  # nobody wants the gradient of the input
    compare(tapes, sharded, inputs)


def test_a_transformer_block_needs_two_sums_each_way() -> None:
    """As in Megatron-LM: attention and the perceptron each are a pair of columns and rows."""
    programs, _ = traced("gpt2")
    sharded = shard_tapes(tapes_of(programs), 2, held=1.0, trials=30)
    layers = 2
    assert collectives(sharded, 0) == ["AllReduce"] * 2 * layers
    assert collectives(sharded, 1) == ["AllReduce"] * 2 * layers
    placed = split_parameters(sharded)
    for layer in range(layers):
        name = f"model.transformer.h.{layer}."
        assert placed[name + "attn.c_attn.weight"] == Shard(1, (8, 8), blocks=3), "queries, keys and values by heads"
        assert placed[name + "attn.c_attn.bias"] == Shard(0, (8, 8), blocks=3)
        assert placed[name + "attn.c_proj.weight"] == Shard(0, (8, 8))
        assert placed[name + "mlp.c_fc.weight"] == Shard(1, (32, 32))
        assert placed[name + "mlp.c_proj.weight"] == Shard(0, (32, 32))


def test_heads_stay_whole_where_they_do_not_divide_evenly() -> None:
    placed = split_parameters(shard_tapes(tapes_of(traced("attention")[0]), 2, held=1.5, trials=30))
    shard = placed["model.attend.in_proj_weight"]
    assert shard == Shard(0, (8, 4), blocks=3), "three heads of four features for two ranks"


def test_statistics_of_batch_norm_are_split_with_their_channels() -> None:
    sharded = shard_tapes(tapes_of(traced("cnn")[0]), 2)
    for layer in (1, 5):
        shard = sharded.placements[Port("parameter", f"model.{layer}.weight")]
        assert isinstance(shard, Shard)
        for name in ("running_mean", "running_var"):
            assert sharded.placements[Port("buffer", f"model.{layer}.{name}")] == shard
            assert sharded.placements[Port("update", f"model.{layer}.{name}")] == shard


def test_gradients_are_placed_as_their_parameters_and_ends_are_whole() -> None:
    tapes = tapes_of(traced("block")[0])
    sharded = shard_tapes(tapes, 2, trials=5)
    for port, placement in sharded.placements.items():
        if port.kind == "gradient":
            assert placement == sharded.placements[Port("parameter", port.name)]
        if port.kind in ("result", "leaf", "weight", "constant"):
            assert placement == REPLICATE


def test_small_weights_stay_whole() -> None:
    tapes = tapes_of(traced("mlp")[0])
    sharded = shard_tapes(tapes, 2, minimum_bytes=16 * 16 * 8)
    assert {name for name in split_parameters(sharded) if name.endswith("weight")} == {"model.2.weight"}
    whole = shard_tapes(tapes, 2, minimum_bytes=1 << 20)
    assert split_parameters(whole) == {}
    assert whole.wire_bytes == 0
    assert whole.held_bytes == whole.whole_bytes
    compare(tapes, whole, traced("mlp")[1])


def test_values_that_others_read_are_whole() -> None:
    programs, inputs = traced("vgg")
    tapes = tapes_of(programs)
    carried = [port for port in tapes[0].outputs if port.kind == "value"]
    free = shard_tapes(tapes, 2, trials=0)
    assert any(isinstance(free.placements[port], Shard) for port in carried)
    bound = shard_tapes(tapes, 2, trials=0, whole=frozenset(carried))
    assert all(bound.placements[port] == REPLICATE for port in carried)
    compare(tapes, bound, inputs)


@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_backward_whole_and_in_halves(name: str) -> None:
    case = ALL[name]
    model, (batch,) = case.model(), case.batches([SAMPLES])
    programs = TracedModel(capture(model, case.loss, batch), backward=True, halves=True).divide()
    tapes = [programs.of(0, "F"), programs.of(0, "B"), programs.of(0, "I"), programs.of(0, "W")]
    sharded = shard_tapes(tapes, 2, trials=3)  # together, so that either kind of backward takes what forward saved
    compare(tapes, sharded, given(programs, model, batch))
    assert split_parameters(sharded)


@pytest.mark.parametrize("name", ["cnn", "dropping"])
def test_evaluation_with_the_placements_of_training(name: str) -> None:
    case = ALL[name]
    training = shard_tapes(tapes_of(traced(name)[0]), 2, trials=0)
    model, (batch,) = case.model(), case.batches([SAMPLES])
    programs = model_programs(capture(model, case.loss, batch, mode="evaluate"), backward=False)
    sharded = shard_tapes([programs.forward], 2, placements=training.placements)
    compare([programs.forward], sharded, given(programs, model, batch))
    for port in programs.forward.inputs:
        if port in training.placements:
            assert sharded.placements[port] == training.placements[port]


@pytest.mark.parametrize(
    "placement", [Shard(0, (8, 8, 0)), Shard(0, (8, 9)), Shard(2, (8, 8)), Shard(0, (8, 8), blocks=2), PARTIAL]
)
def test_a_placement_that_does_not_fit_is_refused(placement: Placement) -> None:
    with pytest.raises(UsageError, match=r"model.0.weight .*cannot be placed"):
        shard_tapes(tapes_of(traced("mlp")[0]), 2, placements={Port("parameter", "model.0.weight"): placement})


def test_all_ranks_run_the_same_steps() -> None:
    sharded = shard_tapes(tapes_of(traced("vgg-bn")[0]), 3, trials=0)
    for ranks in sharded.tapes:
        kinds = [[_outline(step) for step in tape.steps] for tape in ranks]
        assert kinds[0] == kinds[1] == kinds[2]
        assert len({tape.outputs for tape in ranks}) == 1


def _outline(step: object) -> object:
    if isinstance(step, AllReduce):
        return ("reduce", step.source, step.target, step.spec)
    if isinstance(step, AllGather):
        return ("gather", step.source, step.target, step.dim, step.parts, step.spec)
    names = [operator.name for operator in step.program.operators]  # type: ignore[attr-defined]
    return names, step.inputs, step.outputs  # type: ignore[attr-defined]


def test_what_is_sent_is_counted() -> None:
    sharded = shard_tapes(tapes_of(traced("cnn")[0]), 4, trials=5)
    sent = 0.0
    for ranks in sharded.tapes:
        for step in ranks[0].steps:
            if isinstance(step, AllReduce):
                sent += step.spec.size_bytes * 2 * 3 / 4
            elif isinstance(step, AllGather):
                sent += step.spec.size_bytes * 3 / 4
    assert sent == pytest.approx(sharded.wire_bytes)


def test_a_search_finds_nothing_worse() -> None:
    tapes = tapes_of(traced("attention")[0])

    def price(found: Sharded) -> float:
        names: Mapping[Port, object] = found.placements
        parameters = {p: s for t in tapes for p, s in zip(t.inputs, t.program.inputs, strict=True) if p in names}
        held = found.held_bytes
        for port, spec in parameters.items():
            shard = found.placements[port]
            if port.kind == "parameter":
                held += spec.size_bytes // (2 if isinstance(shard, Shard) else 1)
        return found.wire_bytes + 4.0 * held

    flops = 1e12  # operations cost nothing
    first = shard_tapes(tapes, 2, trials=0, flops_per_byte=flops)
    assert price(shard_tapes(tapes, 2, trials=30, flops_per_byte=flops)) <= price(first) * 1.0001


@pytest.mark.parametrize("ranks", [2, 4])
def test_work_is_shared_too(ranks: int) -> None:
    for name in ("alexnet", "vgg"):
        shared = shard_tapes(tapes_of(traced(name)[0]), ranks, trials=0)
        assert 1 / ranks <= shared.work_share < 1.02 / ranks
    alone = shard_tapes(tapes_of(traced("vgg")[0]), ranks, minimum_bytes=1 << 30)
    assert alone.work_share == 1.0


@pytest.mark.parametrize("name", ["resnet", "attention"])
def test_stages_are_split_each_by_itself(name: str) -> None:
    """Values that go from stage to stage are whole, so that stages need not have as many ranks as their neighbours."""
    case = ALL[name]
    model, (batch,) = case.model(), case.batches([SAMPLES])
    traced_model = TracedModel(capture(model, case.loss, batch), backward=True)
    half = len(traced_model.segments) // 2
    programs = traced_model.divide([traced_model.segments[:half], traced_model.segments[half:]])
    inputs = given(programs, model, batch)
    known = dict(inputs)
    for stage, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B")):
        tape = programs.of(stage, kind)  # type: ignore[arg-type]
        made = run_tape(tape.program, [known[port] for port in tape.inputs])
        known |= dict(zip(tape.outputs, made, strict=True))
    for stage in (0, 1):
        tapes = [programs.of(stage, "F"), programs.of(stage, "B")]
        others = [programs.of(1 - stage, "F"), programs.of(1 - stage, "B")]
        crossing = frozenset(port for tape in others for port in (*tape.inputs, *tape.outputs) if port.kind == "value")
        sharded = shard_tapes(tapes, 2 + stage, trials=0, whole=crossing)
        assert all(sharded.placements.get(port, REPLICATE) == REPLICATE for port in crossing)
        assert split_parameters(sharded)
        own = {port for tape in tapes for port in tape.outputs if port.kind == "value"} - crossing
        compare(tapes, sharded, {port: tensor for port, tensor in known.items() if port not in own})


def test_one_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        shard_tapes(tapes_of(traced("mlp")[0]), 1)
