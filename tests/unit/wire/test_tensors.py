"""Tensors as frames: any type and shape arrives bit for bit, anything else is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, copy_of, dtype_name, from_frame, spec_of, to_frame
from onebox.wire.program import ITEM_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bytes, as a tensor of any type and shape, dense or not."""
    name, shape = draw(st.sampled_from(sorted(DTYPES))), draw(shapes)
    size = math.prod(shape) * ITEM_BYTES[name]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    content = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8, generator=generator)
    tensor = content.view(DTYPES[name]).view(shape) if size else torch.empty(shape, dtype=DTYPES[name])
    if tensor.dim() >= 2 and draw(st.booleans()):
        return tensor.transpose(0, 1)
    return tensor[1:] if tensor.dim() and draw(st.booleans()) else tensor


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@given(tensors())
def test_a_tensor_arrives_bit_for_bit(tensor: Tensor) -> None:
    spec, frame = spec_of(tensor), to_frame(tensor)
    assert len(frame) == frame.nbytes == spec.size_bytes
    made = from_frame(spec, frame)
    assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
    assert made.is_contiguous()
    assert bits(made) == bits(tensor)


@given(tensors())
def test_what_arrives_is_a_copy(tensor: Tensor) -> None:
    frame = bytearray(to_frame(tensor))
    made = from_frame(spec_of(tensor), memoryview(frame))
    before = bits(made)
    frame[:] = bytes(byte ^ 1 for byte in frame)
    assert bits(made) == before


@given(tensors())
def test_a_copy_is_dense_and_shares_memory_with_its_elements_only(tensor: Tensor) -> None:
    before = bits(tensor)
    copy, spec, elements = copy_of(tensor)
    assert (copy.dtype, copy.shape, spec) == (tensor.dtype, tensor.shape, spec_of(tensor))
    assert copy.is_contiguous()
    assert bits(copy) == bytes(elements) == before
    if before:
        elements[:] = bytes(byte ^ 1 for byte in before)
        assert bits(tensor) == before
        assert copy.view(-1).view(torch.uint8).tolist() == list(elements)


def test_a_copy_has_what_lazy_conjugation_and_gradients_leave() -> None:
    copy, _, elements = copy_of(torch.tensor([1 + 2j], requires_grad=True).conj())
    assert not copy.requires_grad
    assert copy.tolist() == [1 - 2j]
    assert bytes(elements) == bits(torch.tensor([1 - 2j]))


def test_a_tensor_that_needs_a_gradient_travels_too() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    assert from_frame(spec_of(parameter), to_frame(parameter)).tolist() == [0.0, 1.0, 2.0]


def test_what_has_arrived_or_was_sent_can_still_grow() -> None:
    sent = torch.arange(3.0)
    made = from_frame(spec_of(sent), bytes(to_frame(sent)))
    assert made.resize_(5)[:3].tolist() == sent.resize_(5)[:3].tolist() == [0.0, 1.0, 2.0]


def test_elements_that_are_still_to_be_conjugated_or_negated_travel_as_they_are_read() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (values.conj(), values.conj().imag, values.conj().resolve_conj(), values.imag):
        assert torch.equal(from_frame(spec_of(lazy), bytes(to_frame(lazy))), lazy.clone())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_types_that_do_not_travel_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match=str(dtype)):
        dtype_name(dtype)


def test_names_and_sizes_are_those_of_torch() -> None:
    assert all(dtype.itemsize == ITEM_BYTES[name] for name, dtype in DTYPES.items())
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())


@given(tensors(), st.integers(-9, 9).filter(bool))
def test_a_frame_of_another_size_is_refused(tensor: Tensor, difference: int) -> None:
    frame = bytes(to_frame(tensor))
    other = frame + bytes(difference) if difference > 0 else frame[:difference]
    if len(other) != len(frame):
        with pytest.raises(WireError, match="bytes"):
            from_frame(spec_of(tensor), other)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float8_e5m2", (1,)),
        TensorSpec("nn", (1,)),
        TensorSpec("", ()),
        TensorSpec("float32", (-1,)),
        TensorSpec("float32", (-1, -1)),
        TensorSpec("float32", (2**40,)),
        TensorSpec("float32", (2**62, 2**62)),
        TensorSpec("float32", (0, 2**62, 2**62)),
        TensorSpec("float32", (0, 2**63)),
        TensorSpec("uint8", (0, 2**64 - 1)),
    ],
    ids=str,
)
def test_specifications_that_are_none_are_refused_before_memory_is_taken(spec: TensorSpec) -> None:
    with pytest.raises(WireError):
        from_frame(spec, b"")


@given(st.sampled_from(sorted(DTYPES)), shapes)
def test_a_specification_knows_its_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    assert TensorSpec(dtype, shape).size_bytes == torch.empty(shape, dtype=DTYPES[dtype]).nbytes


def test_a_specification_reads_well() -> None:
    assert str(TensorSpec("float32", (2, 3))) == "float32[2, 3]"
    assert str(TensorSpec("int64", ())) == "int64[]"
