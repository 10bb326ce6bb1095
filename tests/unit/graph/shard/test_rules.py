"""Rules of splitting: every operator, with every argument split along every dimension, computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.graph import NamedProgram, Port
from onebox.graph.shard.placements import REPLICATE, Placement, Shard, even_parts
from onebox.graph.shard.search import AllGather, AllReduce, Sharded, shard_tapes
from onebox.wire import Many, SlotArgument, TensorSpec, Value
from tests.unit.graph.ranks import compare
from tests.unit.programs import Maker, samples

GENERATOR = torch.Generator()


def randn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=GENERATOR.manual_seed(sum(sizes)))


@dataclass(frozen=True)
class Example:
    """An operator and its arguments; tensors among them are its inputs.

    Args:
        name: Which.
        args: Positional arguments.
        local: For some inputs, the dimensions along which splitting them needs no communication before the operator,
            if all other arguments may be split as it takes.
        kwargs: Keyword arguments.
    """

    name: str
    args: tuple[object, ...]
    local: dict[int, Sequence[int]]
    kwargs: dict[str, Value] | None = None

    def make(self) -> tuple[Maker, NamedProgram]:
        """Return the program of the operator alone."""
        tensors: list[torch.Tensor] = []

        def value(argument: object) -> Value:
            if isinstance(argument, torch.Tensor):
                tensors.append(argument)
                return SlotArgument(len(tensors) - 1)
            if isinstance(argument, list):
                return Many(tuple(value(item) for item in argument))  # type: ignore[arg-type]
            return argument  # type: ignore[return-value]

        args = tuple(value(argument) for argument in self.args)
        maker = Maker(tensors)
        outputs = maker.add(f"aten.{self.name}", *args, **(self.kwargs or {}))
        ports = tuple(Port("parameter", number) for number in range(maker.count))
        program = maker.program(outputs)
        return maker, NamedProgram(
            program=program, inputs=ports, outputs=tuple(Port("result", number) for number in range(len(outputs)))
        )


IMAGE, KERNEL = (2, 4, 6, 6), (6, 4, 3, 3)
SAME = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
HEADS = (2, 4, 3, 5)

EXAMPLES = [
    Example("mm.default", (randn(4, 6), randn(6, 5)), {0: [0], 1: [1]}),
    Example("addmm.default", (randn(5), randn(4, 6), randn(6, 5)), {0: [0], 1: [0], 2: [1]}),
    Example("addmm.default", (randn(4, 5), randn(4, 6), randn(6, 5)), {0: [0, 1], 1: [0], 2: [1]}),
    Example("bmm.default", (randn(3, 4, 6), randn(3, 6, 5)), {0: [0, 1], 1: [0, 2]}),
    Example("baddbmm.default", (randn(3, 4, 5), randn(3, 4, 6), randn(3, 6, 5)), {1: [0, 1], 2: [0, 2]}),
    Example("baddbmm.default", (randn(4, 5), randn(3, 4, 6), randn(3, 6, 5)), {1: [0, 1], 2: [0, 2]}, {"beta": 0.5}),
    Example("convolution.default", (randn(*IMAGE), randn(*KERNEL), randn(6), *SAME), {0: [0], 1: [0], 2: [0]}),
    Example("convolution.default", (randn(*IMAGE), randn(*KERNEL), None, *SAME), {0: [0], 1: [0]}),
    Example(
        "convolution.default",
        (randn(2, 4, 6, 6), randn(4, 6, 3, 3), randn(6), [1, 1], [1, 1], [1, 1], True, [0, 0], 1),
        {0: [0], 1: [1], 2: [0]},
    ),
    Example(
        "convolution.default",
        (randn(2, 4, 6, 6), randn(4, 1, 3, 3), randn(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
        {0: [0, 1], 1: [0], 2: [0]},
    ),
    Example(
        "convolution.default",
        (randn(2, 4, 6, 6), randn(6, 2, 3, 3), randn(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
        {},
    ),
    Example(
        "convolution_backward.default",
        (randn(2, 6, 6, 6), randn(*IMAGE), randn(*KERNEL), [6], *SAME, [True, True, True]),
        {0: [0, 1], 1: [0, 1], 2: [0, 1]},
    ),
    Example(
        "convolution_backward.default",
        (randn(2, 4, 6, 6), randn(2, 4, 6, 6), randn(4, 1, 3, 3), [4],
         [1, 1], [1, 1], [1, 1], False, [0, 0], 4, [True, True, True]),
        {0: [0, 1], 1: [0, 1], 2: [0]},
    ),
    Example(
        "_native_batch_norm_legit_functional.default",
        (randn(*IMAGE), randn(4), randn(4), randn(4), randn(4).square(), True, 0.1, 1e-5),
        {0: [1], 1: [0], 2: [0], 3: [0], 4: [0]},
    ),
    Example(
        "_native_batch_norm_legit_no_training.default",
        (randn(*IMAGE), randn(4), randn(4), randn(4), randn(4).square(), 0.1, 1e-5),
        {0: [1], 1: [0], 2: [0], 3: [0], 4: [0]},
    ),
    Example(
        "native_batch_norm_backward.default",
        (randn(*IMAGE), randn(2, 4, 6, 6), randn(4), None, None, randn(4), randn(4).square(), True, 1e-5,
         [True, True, True]),
        {0: [1], 1: [1], 2: [0]},
    ),
    Example("native_layer_norm.default", (randn(4, 3, 6), [6], randn(6), randn(6), 1e-5), {0: [0, 1]}),
    Example(
        "native_layer_norm_backward.default",
        (randn(4, 6), randn(4, 6), [6], randn(4, 1), randn(4, 1).square(), randn(6), randn(6), [True, True, True]),
        {0: [0], 1: [0]},
    ),
    Example("native_group_norm.default", (randn(2, 8, 3, 3), randn(8), randn(8), 2, 8, 9, 4, 1e-5), {0: [1]}),
    Example("native_group_norm.default", (randn(2, 6, 3, 3), None, None, 2, 6, 9, 2, 1e-5), {0: [1]}),
    Example(
        "native_group_norm_backward.default",
        (randn(2, 8, 3, 3), randn(2, 8, 3, 3), randn(2, 4), randn(2, 4), randn(8), 2, 8, 9, 4, [True, True, True]),
        {1: [1]},
    ),
    Example("max_pool2d_with_indices.default", (randn(*IMAGE), [2, 2], [2, 2]), {0: [0, 1]}),
    Example("avg_pool2d.default", (randn(*IMAGE), [2, 2]), {0: [0, 1]}),
    Example("avg_pool2d_backward.default",
            (randn(2, 4, 3, 3), randn(*IMAGE), [2, 2], [2, 2], [0, 0], False, True, None), {0: [0, 1]}),
    Example("_adaptive_avg_pool2d.default", (randn(*IMAGE), [2, 3]), {0: [0, 1]}),
    Example("_adaptive_avg_pool2d_backward.default", (randn(2, 4, 2, 3), randn(*IMAGE)), {0: [0, 1]}),
    Example("upsample_nearest2d.default", (randn(*IMAGE), [12, 12]), {0: [0, 1]}),
    Example("upsample_nearest2d_backward.default", (randn(2, 4, 12, 12), [12, 12], [2, 4, 6, 6]), {0: [0, 1]}),
    Example("upsample_bilinear2d.default", (randn(*IMAGE), [9, 9], False), {0: [0, 1]}),
    Example("upsample_bilinear2d_backward.default", (randn(2, 4, 9, 9), [9, 9], [2, 4, 6, 6], False), {0: [0, 1]}),
    Example("constant_pad_nd.default", (randn(2, 4, 3), [1, 0]), {0: [0, 1]}),
    Example("embedding.default", (randn(7, 4), torch.tensor([[1, 2, 6], [0, 3, 3]])), {0: [1], 1: [0, 1]}),
    Example("embedding_dense_backward.default",
            (randn(2, 3, 4), torch.tensor([[1, 2, 6], [0, 3, 3]]), 7, -1, False), {0: [0, 1, 2]}),
    Example("_softmax.default", (randn(4, 6), -1, False), {0: [0]}),
    Example("_log_softmax_backward_data.default", (randn(4, 6), randn(4, 6), 0), {0: [1], 1: [1]},
            {"input_dtype": torch.float64}),  # type: ignore[dict-item]
    Example("cumsum.default", (randn(4, 6), 0), {0: [1]}),
    Example("flip.default", (randn(4, 6), [1]), {0: [0]}),
    Example("sum.dim_IntList", (randn(4, 3, 6), [0, 2], True), {0: [0, 1, 2]}),
    Example("sum.dim_IntList", (randn(4, 3, 6), [-1]), {0: [0, 1, 2]}),
    Example("sum.default", (randn(4, 6),), {0: [0, 1]}),
    Example("mean.dim", (randn(4, 3, 6), [1]), {0: [0, 2]}),
    Example("amax.default", (randn(4, 6), [0]), {0: [1]}),
    Example("max.dim", (randn(4, 6), 1), {0: [0]}),
    Example("expand.default", (randn(4, 1), [3, -1, 5]), {0: [0]}),
    Example("select.int", (randn(4, 6), 0, 1), {0: [1]}),
    Example("unbind.int", (randn(2, 6), 0), {0: [1]}),
    Example("select_backward.default", (randn(4, 6), [4, 3, 6], 1, 2), {0: [0, 1]}),
    Example("slice.Tensor", (randn(4, 6), 1, 1, 5), {0: [0]}),
    Example("slice.Tensor", (randn(4, 6), -1, -4), {0: [0]}),
    Example("slice_backward.default", (randn(4, 3), [4, 6], 1, 2, 5, 1), {0: [0]}),
    Example("split.Tensor", (randn(4, 6), 2, 1), {0: [0]}),
    Example("split_with_sizes.default", (randn(4, 6), [1, 5], 1), {0: [0]}),
    Example("cat.default", ([randn(4, 6), randn(4, 6)], 1), {0: [0, 1], 1: [0, 1]}),
    Example("cat.default", ([randn(4, 6), randn(3, 6)],), {0: [1], 1: [1]}),
    Example("stack.default", ([randn(4, 6), randn(4, 6)], 1), {0: [0, 1], 1: [0, 1]}),
    Example("add.Tensor", (randn(4, 6), randn(6)), {0: [0, 1], 1: [0]}),
    Example("mul.Tensor", (randn(4, 1, 6), randn(5, 1)), {0: [0, 2], 1: [0]}),
    Example("where.self", (randn(4, 1) > 0, randn(4, 6), randn(6)), {1: [0, 1]}),
    Example("gelu_backward.default", (randn(4, 6), randn(4, 6)), {0: [0, 1], 1: [0, 1]}),
    Example("hardtanh_backward.default", (randn(4, 6), randn(4, 6), -1.0, 1.0), {0: [0, 1]}),
    Example("zeros_like.default", (randn(4, 6),), {0: [0, 1]}),
    Example("new_zeros.default", (randn(4, 6), [3, 3]), {0: [0, 1]}),
    Example("t.default", (randn(4, 6),), {0: [0, 1]}),
    Example("transpose.int", (randn(4, 3, 6), 0, -1), {0: [0, 1, 2]}),
    Example("permute.default", (randn(4, 3, 6), [2, 0, -2]), {0: [0, 1, 2]}),
    Example("view.default", (randn(4, 3, 6), [12, 6]), {0: [0, 1, 2]}),
    Example("view.default", (randn(4, 6), [4, -1, 3]), {0: [0]}),
    Example("unsqueeze.default", (randn(4, 6), 1), {0: [0, 1]}),
    Example("squeeze.dim", (randn(4, 1, 6), 1), {0: [0, 2]}),
    Example("squeeze.default", (randn(2, 1, 6),), {}),
    Example("var.correction", (randn(4, 6), [0]), {}),
    Example("_scaled_dot_product_flash_attention_for_cpu.default",
            (randn(*HEADS), randn(*HEADS), randn(*HEADS)), {0: [0, 1], 1: [0, 1], 2: [0, 1]}),
]  # fmt: skip


def name_of(example: Example) -> str:
    return example.name.split(".")[0]


def collectives(sharded: Sharded) -> list[type]:
    return [type(step) for step in sharded.tapes[0][0].steps if isinstance(step, AllReduce | AllGather)]


def splits(shape: Sequence[int]) -> list[Shard]:
    """Return splits of every dimension: two and three ranks, uneven, in blocks."""
    found = []
    for dim, size in enumerate(shape):
        for ranks in (2, 3):
            sizes = even_parts(size, ranks)
            found += [Shard(dim, sizes)] if sizes else []
            found += [Shard(dim, sizes[::-1])] if sizes and sizes != sizes[::-1] else []
        if size % 2 == 0 and size >= 4:
            sizes = even_parts(size // 2, 2)
            found += [Shard(dim, sizes, blocks=2)] if sizes else []
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_operator_computes_the_same_however_an_argument_is_split(example: Example) -> None:
    maker, tape = example.make()
    inputs = {port: maker.values[number] for number, port in enumerate(tape.inputs)}
    for port, tensor in inputs.items():
        for shard in splits(tensor.shape):
            others: dict[Port, Placement] = dict.fromkeys(inputs, REPLICATE)
            ranks = len(shard.sizes)
            compare([tape], shard_tapes([tape], ranks, placements={**others, port: shard}), inputs)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_operator_runs_on_shares_where_it_can(example: Example) -> None:
    """The rest may be split as the operator likes: then nothing is sent before it, only its results are made whole."""
    maker, tape = example.make()
    inputs = {port: maker.values[number] for number, port in enumerate(tape.inputs)}
    for number, dims in example.local.items():
        for dim in dims:
            sizes = even_parts(maker.values[number].shape[dim], 2)
            assert sizes is not None
            placed = {tape.inputs[number]: Shard(dim, sizes)}
            sharded = shard_tapes([tape], 2, placements=placed, held=0.0, flops_per_byte=1e-3, trials=0)
            first = sharded.tapes[0][0].steps[0]
            assert not isinstance(first, AllReduce | AllGather), (example.name, number, dim)
            compare([tape], sharded, inputs)


PRODUCTS = [
    (EXAMPLES[0], {0: 1, 1: 0}),
    (EXAMPLES[1], {1: 1, 2: 0}),
    (EXAMPLES[2], {1: 1, 2: 0}),
    (EXAMPLES[3], {0: 2, 1: 1}),
    (EXAMPLES[4], {1: 2, 2: 1}),
    (EXAMPLES[6], {0: 1, 1: 1}),
    (EXAMPLES[7], {0: 1, 1: 1}),
    (EXAMPLES[8], {0: 1, 1: 0}),
]
"""Products, and the dimensions of their factors that they sum over."""


@pytest.mark.parametrize(("example", "dims"), PRODUCTS, ids=[name_of(example) for example, _ in PRODUCTS])
def test_a_product_of_shares_of_what_is_summed_over_is_one_sum(example: Example, dims: dict[int, int]) -> None:
    maker, tape = example.make()
    inputs = {port: maker.values[number] for number, port in enumerate(tape.inputs)}
    placed: dict[Port, Placement] = {}
    for number, dim in dims.items():
        sizes = even_parts(maker.values[number].shape[dim], 2)
        assert sizes is not None
        placed[tape.inputs[number]] = Shard(dim, sizes)
    sharded = shard_tapes([tape], 2, placements=placed, flops_per_byte=1e-3)  # computing costs nearly all
    assert collectives(sharded) == [AllReduce]
    compare([tape], sharded, inputs)


PLACED = st.sampled_from(["parameter", "leaf"])


@given(samples(), st.data())
def test_random_programs_with_parameters_split_at_random(sample, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    program = sample.program
    ports = tuple(Port(data.draw(PLACED), number) for number in range(len(program.inputs)))  # type: ignore[arg-type]
    outputs = tuple(Port("result", number) for number in range(len(program.outputs)))
    tape = NamedProgram(program=program, inputs=ports, outputs=outputs)
    ranks = data.draw(st.integers(2, 3))
    placements: dict[Port, Placement] = {}
    for port, spec in zip(ports, program.inputs, strict=True):
        fitting = [shard for shard in splits(spec.shape) if len(shard.sizes) == ranks]
        if port.kind == "parameter" and fitting and data.draw(st.booleans()):
            placements[port] = data.draw(st.sampled_from(fitting))
    sharded = shard_tapes([tape], ranks, placements=placements, trials=2)
    compare([tape], sharded, dict(zip(ports, sample.inputs, strict=True)))


Grow = Callable[[st.DrawFn, Maker, int], object]


@st.composite
def networks(draw: st.DrawFn) -> tuple[Maker, list[int], NamedProgram]:
    """Programs of layers: products with parameters, views that split and merge dimensions, sums, softmax, joins."""
    rows, features = draw(st.sampled_from([(4, 6), (3, 8), (2, 12)]))
    weights = [randn(features, features) for _ in range(3)]
    maker = Maker([randn(rows, features), *weights, randn(features)])
    current, made = 0, [0]
    for _ in range(draw(st.integers(1, 7))):
        current = draw(st.sampled_from(LAYERS))(draw, maker, current)
        made.append(current)
    kept = sorted(set(draw(st.lists(st.sampled_from(made[1:]), min_size=1, max_size=3))))
    ports = (Port("leaf", 0), *(Port("parameter", number) for number in range(1, 5)))
    tape = NamedProgram(
        program=maker.program(kept), inputs=ports, outputs=tuple(Port("result", number) for number in kept)
    )
    return maker, kept, tape


def _weight(draw: st.DrawFn) -> int:
    return draw(st.integers(1, 3))


def _linear(draw: st.DrawFn, maker: Maker, x: int) -> int:
    (turned,) = maker.add("aten.t.default", SlotArgument(_weight(draw)))
    return maker.add("aten.addmm.default", SlotArgument(4), SlotArgument(x), SlotArgument(turned))[0]


def _matrix(draw: st.DrawFn, maker: Maker, x: int) -> int:
    return maker.add("aten.mm.default", SlotArgument(x), SlotArgument(_weight(draw)))[0]


def _heads(draw: st.DrawFn, maker: Maker, x: int) -> int:
    rows, features = maker.values[x].shape
    count = draw(st.sampled_from([n for n in range(1, features + 1) if features % n == 0]))
    (apart,) = maker.add("aten.view.default", SlotArgument(x), Many((rows, count, features // count)))
    (heads,) = maker.add("aten.transpose.int", SlotArgument(apart), 0, 1)
    (other,) = maker.add("aten.transpose.int", SlotArgument(heads), 1, 2)
    (scores,) = maker.add("aten.bmm.default", SlotArgument(heads), SlotArgument(other))
    (weights,) = maker.add("aten._softmax.default", SlotArgument(scores), -1, False)
    (mixed,) = maker.add("aten.bmm.default", SlotArgument(weights), SlotArgument(heads))
    (back,) = maker.add("aten.transpose.int", SlotArgument(mixed), 0, 1)
    (dense,) = maker.add("aten.clone.default", SlotArgument(back), memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    return maker.add("aten.view.default", SlotArgument(dense), Many((rows, features)))[0]


def _packed(draw: st.DrawFn, maker: Maker, x: int) -> int:
    features = maker.values[x].shape[1]
    parts = maker.add("aten.split.Tensor", SlotArgument(x), features // 2, 1)
    (product,) = maker.add("aten.mul.Tensor", SlotArgument(parts[0]), SlotArgument(parts[1]))
    return maker.add(
        "aten.cat.default", Many((SlotArgument(product), SlotArgument(parts[draw(st.integers(0, 1))]))), 1
    )[0]


def _norm(draw: st.DrawFn, maker: Maker, x: int) -> int:
    (mean,) = maker.add("aten.mean.dim", SlotArgument(x), Many((1,)), True)
    (centred,) = maker.add("aten.sub.Tensor", SlotArgument(x), SlotArgument(mean))
    (total,) = maker.add("aten.sum.dim_IntList", SlotArgument(centred), Many((0,)), True)
    return maker.add("aten.add.Tensor", SlotArgument(centred), SlotArgument(total))[0]


def _point(draw: st.DrawFn, maker: Maker, x: int) -> int:
    match draw(st.sampled_from(["tanh", "bias", "residual", "neg"])):
        case "bias":
            return maker.add("aten.mul.Tensor", SlotArgument(x), SlotArgument(4))[0]
        case "residual":
            return maker.add("aten.add.Tensor", SlotArgument(x), SlotArgument(0))[0]
        case name:
            return maker.add(f"aten.{name}.default", SlotArgument(x))[0]


LAYERS: list[Callable[[st.DrawFn, Maker, int], int]] = [_linear, _matrix, _heads, _packed, _norm, _point]


@given(networks(), st.integers(2, 4), st.floats(0.1, 50.0), st.integers(0, 4))
def test_random_networks(made: tuple[Maker, list[int], NamedProgram], ranks: int, held: float, trials: int) -> None:
    maker, _, tape = made
    inputs = {port: maker.values[number] for number, port in enumerate(tape.inputs)}
    compare([tape], shard_tapes([tape], ranks, held=held, trials=trials), inputs)


@given(networks(), st.data())
def test_random_networks_with_weights_split_at_random(
    made: tuple[Maker, list[int], NamedProgram], data: st.DataObject
) -> None:
    maker, _, tape = made
    inputs = {port: maker.values[number] for number, port in enumerate(tape.inputs)}
    ranks = data.draw(st.integers(2, 3))
    placements: dict[Port, Placement] = {}
    for port, spec in zip(tape.inputs[1:], tape.program.inputs[1:], strict=True):
        fitting = [shard for shard in splits(spec.shape) if len(shard.sizes) == ranks]
        placements[port] = data.draw(st.sampled_from([REPLICATE, *fitting]))
    compare([tape], shard_tapes([tape], ranks, placements=placements), inputs)


def test_a_parameter_that_comes_in_twice_is_placed_once() -> None:
    maker = Maker([randn(4, 6), randn(6, 6), randn(6, 6)])
    maker.values[2] = maker.values[1]
    (a,) = maker.add("aten.mm.default", SlotArgument(0), SlotArgument(1))
    (turned,) = maker.add("aten.t.default", SlotArgument(2))
    (out,) = maker.add("aten.mm.default", SlotArgument(a), SlotArgument(turned))
    ports = (Port("leaf", 0), Port("parameter", "w"), Port("parameter", "w"))
    tape = NamedProgram(program=maker.program([out]), inputs=ports, outputs=(Port("result", 0),))
    sharded = shard_tapes([tape], 2)
    assert isinstance(sharded.placements[ports[1]], Shard)
    assert sharded.tapes[0][0].inputs[1] == sharded.tapes[0][0].inputs[2]
    assert sharded.whole_bytes == 6 * 6 * 8
    assert collectives(sharded) == [AllReduce]
    compare([tape], sharded, dict(zip(ports, maker.values[:3], strict=True)))


def test_an_unknown_operator_runs_on_whole_arguments() -> None:
    maker = Maker([randn(4, 6)])
    (out,) = maker.add("aten.cumprod.default", SlotArgument(0), 0)
    tape = NamedProgram(program=maker.program([out]), inputs=(Port("parameter", "x"),), outputs=(Port("result", 0),))
    sharded = shard_tapes([tape], 2, placements={Port("parameter", "x"): Shard(1, (3, 3))})
    assert collectives(sharded) == [AllGather]
    compare([tape], sharded, {Port("parameter", "x"): maker.values[0]})


def test_terms_are_added_before_they_are_summed_over_ranks() -> None:
    maker = Maker([randn(4, 6), randn(6, 5), randn(6, 5)])
    (a,) = maker.add("aten.mm.default", SlotArgument(0), SlotArgument(1))
    (b,) = maker.add("aten.mm.default", SlotArgument(0), SlotArgument(2))
    (total,) = maker.add("aten.add.Tensor", SlotArgument(a), SlotArgument(b))
    (half,) = maker.add("aten.mul.Scalar", SlotArgument(total), 0.5)
    (out,) = maker.add("aten.tanh.default", SlotArgument(half))
    ports = tuple(Port("parameter", number) for number in range(3))
    tape = NamedProgram(program=maker.program([out]), inputs=ports, outputs=(Port("result", 0),))
    shards = (Shard(1, (2, 4)), Shard(0, (2, 4)), Shard(0, (2, 4)))
    sharded = shard_tapes([tape], 2, placements=dict(zip(ports, shards, strict=True)))
    assert collectives(sharded) == [AllReduce]
    compare([tape], sharded, dict(zip(ports, maker.values[:3], strict=True)))


def test_what_is_there_twice_is_sent_once() -> None:
    maker = Maker([randn(4, 6)])
    (a,) = maker.add("aten.cumprod.default", SlotArgument(0), 1)
    (b,) = maker.add("aten.cumprod.default", SlotArgument(0), 0)
    tape = NamedProgram(
        program=maker.program([a, b]), inputs=(Port("parameter", "x"),), outputs=(Port("result", 0), Port("result", 1))
    )
    sharded = shard_tapes([tape], 2, placements={Port("parameter", "x"): Shard(1, (3, 3))})
    assert collectives(sharded) == [AllGather]
    assert sharded.tapes[0][0].specs == (TensorSpec("float64", (4, 6)),) * 2


def test_views_of_what_a_collective_has_laid_out_anew() -> None:
    """A tensor that lies in another order than its dimensions has views that it would not have in order."""
    maker = Maker([randn(4, 6)])
    (turned,) = maker.add("aten.t.default", SlotArgument(0))
    (same,) = maker.add("aten.squeeze.default", SlotArgument(turned))  # has no rule: wants the whole
    (back,) = maker.add("aten.t.default", SlotArgument(same))
    (flat,) = maker.add("aten.view.default", SlotArgument(back), Many((24,)))
    port = Port("parameter", "x")
    tape = NamedProgram(program=maker.program([flat]), inputs=(port,), outputs=(Port("result", 0),))
    for dim, sizes in ((0, (2, 2)), (1, (4, 2))):
        sharded = shard_tapes([tape], 2, placements={port: Shard(dim, sizes)})
        assert collectives(sharded) == [AllGather]
        compare([tape], sharded, {port: maker.values[0]})
