"""Programs of lossy gradient codecs, run by a worker's interpreter: bit for bit their plain definitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.graph import decode_bucket, encode_bucket, factor, project, recode_sum, restore
from onebox.plan_names import GradientCodec
from onebox.wire import DTYPES, Program, TensorSpec, check, spec_of, specs_by_slot
from onebox.wire.gradient_codecs import (
    BLOCK,
    RANK,
    SCALE_BYTES,
    encoded_bytes,
    encoded_spec,
    matrix_of,
    padded_elements,
)
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU

SHAPES = [(7, 31), (5,), (300,), (1, 2, 3)]
CODECS: list[GradientCodec] = ["bf16", "int8", "e3m0"]
POWERS = torch.tensor([0.0, *(2.0**exponent for exponent in range(-6, 1))], dtype=torch.float64)
"""Magnitudes of ``e3m0`` in parts of the scale, by exponent code."""
DTYPE_NAMES = ["float32", "float64"]


def gradients(dtype: str, seed: int) -> list[Tensor]:
    """Return gradients of very different sizes, with a whole block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(shape, generator=generator, dtype=DTYPES[dtype]) * 10.0 ** (3 * place - 6)
        for place, shape in enumerate(SHAPES)
    ]
    return [made[0].t().contiguous().t(), *made[1:2], torch.zeros(300, dtype=DTYPES[dtype]), made[3]]


def ran(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a program operator by operator, and require that its specs are true."""
    check(program)
    assert tuple(map(spec_of, inputs)) == program.inputs
    found = CompiledProgram(program, CPU).run(list(inputs), lambda position: None, WorkerProgress())
    specs = specs_by_slot(program)
    assert [spec_of(tensor) for tensor in found] == [specs[slot] for slot in program.outputs]
    return found


def plain_encoded(values: Tensor, codec: GradientCodec) -> tuple[Tensor, Tensor]:
    """Return what travels of values, and what it stands for."""
    blocks = values.view(-1, BLOCK)
    if codec == "bf16":
        encoded = blocks.float().bfloat16()
        return encoded, encoded.to(values.dtype).view(-1)
    if codec == "e3m0":
        scale = blocks.abs().max(1, keepdim=True).values.clamp_min(2.0**-126).float()
        parts = (blocks / scale.to(values.dtype)).float().double()
        distance = (parts.abs().unsqueeze(-1) - POWERS).abs()
        codes = 7 - distance.flip(-1).argmin(-1)  # of two as near as each other the larger
        nibbles = (codes + 8 * (parts < 0)).to(torch.uint8)
        encoded = torch.cat([scale.view(torch.uint8), nibbles[:, :128] | nibbles[:, 128:] << 4], 1)
        made = POWERS[codes].to(values.dtype) * torch.where(parts < 0, -1.0, 1.0).to(values.dtype)
        return encoded, (made * scale.to(values.dtype)).view(-1)
    scale = (blocks.abs().max(1, keepdim=True).values * (1 / 127)).clamp_min(2.0**-126).float()
    steps = torch.round(blocks / scale.to(values.dtype))
    encoded = torch.cat([scale.view(torch.int8), steps.to(torch.int8)], 1)
    return encoded, (steps * scale.to(values.dtype)).view(-1)


def flat(tensors: Sequence[Tensor], slices: int) -> Tensor:
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.nn.functional.pad(joined, (0, padded_elements(len(joined), slices) - len(joined)))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_a_bucket_is_encoded_with_what_was_lost_before(codec: GradientCodec, slices: int, dtype: str) -> None:
    given = gradients(dtype, 1)
    program = encode_bucket(codec, [spec_of(tensor) for tensor in given], slices)
    residual = torch.randn_like(flat(given, slices)) * 1e-3
    for _ in range(2):
        *parts, kept = ran(program, [*given, residual.view(-1, BLOCK)])
        wanted = flat(given, slices) + residual
        encoded, decoded = plain_encoded(wanted, codec)
        assert torch.equal(torch.cat(parts), encoded)
        assert len({part.shape for part in parts}) == 1 and len(parts) == slices
        residual = kept.view(-1)
        assert torch.equal(residual, wanted - decoded)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("codec", CODECS)
def test_slices_are_summed_in_order_and_encoded_again(codec: GradientCodec, dtype: str) -> None:
    values = [flat(gradients(dtype, seed), 1) for seed in (1, 2, 3)]
    encoded = [plain_encoded(value, codec) for value in values]
    residual = torch.randn_like(values[0]) * 1e-3
    program = recode_sum(codec, dtype, len(values[0]), 3)
    again, kept = ran(program, [*(each for each, _ in encoded), residual.view(-1, BLOCK)])
    wanted = (encoded[0][1] + encoded[1][1]) + encoded[2][1] + residual
    expected, decoded = plain_encoded(wanted, codec)
    assert torch.equal(again, expected)
    assert torch.equal(kept.view(-1), wanted - decoded)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_buckets_are_decoded(codec: GradientCodec, count: int) -> None:
    given = [gradients("float32", seed) for seed in range(count)]
    specs = [spec_of(tensor) for tensor in given[0]]
    encoded = [plain_encoded(flat(each, 2), codec) for each in given]
    found = ran(decode_bucket(codec, specs, 2, count), [each for each, _ in encoded])
    total = encoded[0][1]
    for _, decoded in encoded[1:]:
        total = total + decoded
    expected = total[: sum(tensor.numel() for tensor in given[0])].split([t.numel() for t in given[0]])
    for tensor, part in zip(found, expected, strict=True):
        assert torch.equal(tensor.reshape(-1), part)


@pytest.mark.parametrize("codec", CODECS)
def test_gathered_buckets_are_decoded_as_separate_ones(codec: GradientCodec) -> None:
    given = [gradients("float32", seed) for seed in range(3)]
    specs = [spec_of(tensor) for tensor in given[0]]
    encoded = [plain_encoded(flat(each, 1), codec)[0] for each in given]
    separate = ran(decode_bucket(codec, specs, 1, 3), encoded)
    for tensor, other in zip(
        ran(decode_bucket(codec, specs, 1, 3, joined=True), [torch.cat(encoded)]), separate, strict=True
    ):
        assert torch.equal(tensor, other)


@given(
    st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=BLOCK),
    st.floats(2.0**-60, 2.0**60, width=32),
    st.sampled_from(DTYPE_NAMES),
)
def test_four_bits_are_the_nearest_of_fifteen_values(parts: list[float], size: float, dtype: str) -> None:
    """And what is lost is what the sum of both says, in halves of the distance to the next value at most."""
    values = torch.zeros(BLOCK, dtype=DTYPES[dtype])
    values[: len(parts)] = torch.tensor(parts, dtype=DTYPES[dtype]) * size
    specs = [spec_of(values)]
    encoded, lost = ran(encode_bucket("e3m0", specs, 1), [values, torch.zeros(1, BLOCK, dtype=values.dtype)])
    assert encoded.nbytes == SCALE_BYTES + BLOCK // 2
    (found,) = ran(decode_bucket("e3m0", specs, 1), [encoded])
    scale = float(values.abs().max().clamp_min(2.0**-126).float())
    allowed = torch.cat([POWERS, -POWERS]) * scale
    nearest = (values.double().unsqueeze(-1) - allowed).abs().min(-1).values
    assert torch.isin(found.double(), allowed).all()
    assert ((values.double() - found.double()).abs() <= nearest + 1e-6 * scale).all()
    assert torch.equal(lost.view(-1), values - found)


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_not_a_number_stays_one(codec: GradientCodec) -> None:
    """In its whole block: a broken gradient must be seen, not rounded away."""
    values = torch.ones(2 * BLOCK)
    values[3] = float("nan")
    specs = [spec_of(values)]
    encoded, _ = ran(encode_bucket(codec, specs, 1), [values, torch.zeros(2, BLOCK)])
    (found,) = ran(decode_bucket(codec, specs, 1), [encoded])
    assert found[:BLOCK].isnan().all() and torch.equal(found[BLOCK:], torch.ones(BLOCK))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", [1, 256, 257, 100_000])
def test_bytes_are_those_that_travel(codec: GradientCodec, elements: int) -> None:
    spec = encoded_spec(codec, padded_elements(elements, 1))
    assert encoded_bytes(codec, 4 * elements) == spec.size_bytes
    assert encoded_bytes("none", 4 * elements) == 4 * elements


# ---- PowerSGD


def test_a_sum_of_low_rank_is_found_and_what_is_lost_is_kept() -> None:
    """One step after another on the same gradients, of a convolution and a matrix: the sums approach the exact ones."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(20, 6, 3, 3), (30, 25)]
    matrices = [(20, 54), (30, 25)]
    assert [matrix_of(shape) for shape in shapes] == matrices
    given = [
        (
            torch.randn(rows, RANK, generator=generator).double()
            @ torch.randn(RANK, columns, generator=generator).double()
        )
        for rows, columns in matrices
    ]
    gradients = [matrix.view(shape) for matrix, shape in zip(given, shapes, strict=True)]
    specs = [spec_of(gradient) for gradient in gradients]
    lost = [torch.zeros_like(matrix) for matrix in given]
    second = [torch.randn(matrix.shape[1], RANK, generator=generator).double() for matrix in given]
    left, right = gradients, [gradient * 0.5 for gradient in gradients]
    made = [ran(project(specs), [*own, *lost, *second]) for own in (left, right)]
    first = [a + b for a, b in zip(made[0][2:], made[1][2:], strict=True)]
    found = [ran(factor(specs), [*own[:2], *first]) for own in made]
    bases = found[0][:2]
    for basis, other in zip(bases, found[1][:2], strict=True):
        assert torch.equal(basis, other)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(RANK, dtype=torch.float64), rtol=0, atol=1e-5)
    sums = [a + b for a, b in zip(found[0][2:4], found[1][2:4], strict=True)]
    restored = ran(restore(specs), [*bases, *sums])
    for gradient, total, one, other in zip(gradients, restored, found[0][4:], found[1][4:], strict=True):
        assert total.shape == gradient.shape
        torch.testing.assert_close(total, 1.5 * gradient, rtol=0, atol=1e-5)
        lacking = (1.5 * gradient - total).reshape(one.shape)
        torch.testing.assert_close(one + other, lacking, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (300,), (8, 8), (1, 4000), (7, 1000)])
def test_small_matrices_and_vectors_are_summed_exactly(shape: tuple[int, ...]) -> None:
    assert matrix_of(shape) is None


def test_a_matrix_of_zeros_stays_one() -> None:
    specs = [TensorSpec("float32", (16, 16))]
    second = torch.ones(16, RANK)
    matrix, first = ran(project(specs), [torch.zeros(16, 16), torch.zeros(16, 16), second])
    basis, again, lost = ran(factor(specs), [matrix, first])
    (made,) = ran(restore(specs), [basis, again])
    assert not made.any() and not lost.any()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_matrix_of_less_rank_is_not_amplified(rank: int, dtype: str) -> None:
    """Where few rows are not zero, the basis is orthonormal and the sum the whole gradient, whatever rounding left."""
    generator = torch.Generator().manual_seed(rank)
    specs = [TensorSpec(dtype, (64, 48))]
    lost, second = (
        torch.zeros(64, 48, dtype=DTYPES[dtype]),
        torch.randn(48, RANK, generator=generator).to(DTYPES[dtype]),
    )
    row = torch.randn(3, 48, generator=generator)
    for _ in range(30):
        gradient = torch.zeros(64, 48, dtype=DTYPES[dtype])
        for place in range(rank):
            gradient[7 * place + 3] = row[place] * torch.randn(1, generator=generator)
        matrix, first = ran(project(specs), [gradient, lost, second])
        basis, second, lost = ran(factor(specs), [matrix, first])
        (made,) = ran(restore(specs), [basis, second])
        exact = torch.finfo(DTYPES[dtype]).eps * 100
        torch.testing.assert_close(basis.t() @ basis, torch.eye(RANK, dtype=DTYPES[dtype]), rtol=0, atol=exact)
        assert made.norm() <= matrix.norm() * (1 + exact)
        torch.testing.assert_close(made, gradient, rtol=0, atol=exact * float(gradient.norm() + 1e-30))


def test_a_sum_of_zeros_is_followed_by_others() -> None:
    """As of a layer behind one that begins with zeros, whose gradients are zeros in the first step."""
    generator = torch.Generator().manual_seed(1)
    specs, second = [TensorSpec("float64", (64, 48))], torch.randn(48, RANK, generator=generator).double()
    wanted = torch.randn(64, RANK, generator=generator).double() @ torch.randn(RANK, 48, generator=generator).double()
    lost, sums = torch.zeros(64, 48, dtype=torch.float64), torch.zeros(64, 48, dtype=torch.float64)
    for step in range(4):
        gradient = wanted if step else torch.zeros_like(wanted)
        matrix, first = ran(project(specs), [gradient, lost, second])
        basis, second, lost = ran(factor(specs), [matrix, first])
        sums += ran(restore(specs), [basis, second])[0]
    torch.testing.assert_close(sums, 3 * wanted, rtol=0, atol=1e-10)


def test_a_broken_gradient_breaks_the_sum() -> None:
    specs = [TensorSpec("float32", (64, 48))]
    gradient = torch.ones(64, 48)
    gradient[2, 5] = float("nan")
    matrix, first = ran(project(specs), [gradient, torch.zeros(64, 48), torch.ones(48, RANK)])
    basis, second, _ = ran(factor(specs), [matrix, first])
    assert ran(restore(specs), [basis, second])[0].isnan().any()
