"""Element-wise programs that engines need around a model's own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost import footprint
from onebox.graph import add_all, combine_all, scale_all, zeros
from onebox.wire import PROGRAM_TYPES, Program, TensorSpec, overload, spec_of
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)
factors = st.sampled_from([0.0, 0.5, 0.9, 1.0, -2.0])


def run(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return CompiledProgram(program, CPU).run(list(inputs), lambda position: None, WorkerProgress())


def tensors(sizes: list[tuple[int, ...]], start: float = 1.0) -> list[torch.Tensor]:
    return [torch.full(size, start + number, dtype=torch.float64) for number, size in enumerate(sizes)]


@given(shapes)
def test_sums(sizes: list[tuple[int, ...]]) -> None:
    left, right = tensors(sizes), tensors(sizes, 10.0)
    made = run(add_all([spec_of(tensor) for tensor in left]), [*left, *right])
    assert all(torch.equal(m, a + b) for m, a, b in zip(made, left, right, strict=True))


@given(shapes, st.data())
def test_weighted_sums(sizes: list[tuple[int, ...]], data: st.DataObject) -> None:
    scale = data.draw(st.lists(factors, min_size=len(sizes), max_size=len(sizes)))
    left, right = tensors(sizes), tensors(sizes, 10.0)
    made = run(combine_all([spec_of(tensor) for tensor in left], scale), [*left, *right])
    assert all(torch.equal(m, a * f + b) for m, a, b, f in zip(made, left, right, scale, strict=True))


@given(shapes, st.data())
def test_products(sizes: list[tuple[int, ...]], data: st.DataObject) -> None:
    scale = data.draw(st.lists(factors, min_size=len(sizes), max_size=len(sizes)))
    given_ = tensors(sizes)
    made = run(scale_all([spec_of(tensor) for tensor in given_], scale), given_)
    assert all(torch.equal(m, a * f) for m, a, f in zip(made, given_, scale, strict=True))


def test_a_factor_of_one_keeps_whole_numbers_whole() -> None:
    counts = [torch.tensor([3, 4])]
    (added,) = run(combine_all([spec_of(counts[0])], [1.0]), [*counts, *counts])
    (scaled,) = run(scale_all([spec_of(counts[0])], [1.0]), counts)
    assert added.tolist() == [6, 8]
    assert scaled.tolist() == [3, 4]
    assert added.dtype == scaled.dtype == torch.int64


@given(shapes, st.sampled_from(PROGRAM_TYPES))
def test_zeros(sizes: list[tuple[int, ...]], dtype: str) -> None:
    specs = [TensorSpec(dtype, size) for size in sizes]
    made = run(zeros(specs), [])
    assert [spec_of(tensor) for tensor in made] == specs
    assert not any(tensor.any() for tensor in made)


def test_a_sum_takes_no_more_memory_than_its_result_when_it_may_take_its_inputs() -> None:
    specs = [TensorSpec("float64", (100,))] * 3
    assert footprint(add_all(specs), takes=range(6)).peak_bytes == 800
    assert footprint(add_all(specs), takes=range(6)).net_bytes == -2400


def test_all_their_operators_are_there() -> None:
    specs = [TensorSpec("float32", (2,))]
    for program in (add_all(specs), combine_all(specs, [0.5]), scale_all(specs, [0.5]), zeros(specs)):
        assert [overload(operator.name) for operator in program.operators]
