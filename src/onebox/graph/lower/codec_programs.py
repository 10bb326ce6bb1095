"""Programs of lossy gradient codecs: encode a bucket, sum encoded slices, decode; all with error feedback.

The forms of encoded values are those of :mod:`onebox.wire.gradient_codecs`. Arithmetic is that of the gradients' type,
float32 or float64, in a fixed order, so that the same input gives the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onebox.graph.lower.small_programs import extract
from onebox.plan_names import ActivationCodec, GradientCodec
from onebox.wire import (
    DType,
    Many,
    MemoryFormat,
    Operator,
    OwnDevice,
    Program,
    SlotArgument,
    TensorSpec,
    Value,
    with_deaths,
)
from onebox.wire.gradient_codecs import BLOCK, RANK, SCALE_BYTES, encoded_spec, matrix_of, padded_elements

_LEAST = 2.0**-126
"""Smallest scale, the smallest normal float32: a block of zeros is not divided by zero."""


_EXPONENTS = 7
"""Largest exponent code of ``e3m0``, that of 1; 0 stands for 0."""

_FLOAT32_MANTISSA = 23
"""Bits of a float32 after its exponent."""

_FLOAT32_BIAS = 127
"""Exponent code of 1 in float32."""

_DEPENDENT = {"float32": 1e-5, "float64": 1e-13}
"""Norm, relative to that before, below which what projection leaves of a column is rounding noise."""


def encode_bucket(codec: GradientCodec, specs: Sequence[TensorSpec], slices: int) -> Program:
    """Return a program that adds the residual to gradients and encodes them in slices.

    It maps inputs ``g0 … gn, residual`` to ``slice0 … slicek, residual``: the gradients are padded with zeros to whole
    blocks in each slice, and the new residual is what encoding has lost of the sum.

    Args:
        codec: ``bf16``, ``int8`` or ``e3m0``.
        specs: Specs of the gradients, of one element type.
        slices: Number of slices.
    """
    dtype, elements = specs[0].dtype, sum(prod(spec.shape) for spec in specs)
    padded = padded_elements(elements, slices)
    blocks = TensorSpec(dtype, (padded // BLOCK, BLOCK))
    tape = _Tape((*specs, blocks))
    flat = tape.concatenated([tape.viewed(place, (prod(spec.shape),)) for place, spec in enumerate(specs)])
    if padded > elements:
        padding = Many((0, padded - elements))
        flat = tape.add("constant_pad_nd.default", [flat, padding, 0.0], TensorSpec(dtype, (padded,)))
    values = tape.add("add.Tensor", [tape.viewed(flat, blocks.shape), len(specs)], blocks)
    encoded, residual = _encoded(tape, codec, values)
    rows = blocks.shape[0] // slices
    parts = [tape.rows(encoded, rows * index, rows * (index + 1)) for index in range(slices)]
    return tape.program([*parts, residual])


def encode_values(codec: ActivationCodec, spec: TensorSpec) -> Program:
    """Return a program that encodes a tensor, padded with zeros to whole blocks.

    Args:
        codec: ``bf16`` or ``int8``.
        spec: Spec of the tensor, of float32 or float64.
    """
    elements = prod(spec.shape)
    padded = padded_elements(elements, 1)
    tape = _Tape((spec,))
    flat = tape.viewed(0, (elements,))
    if padded > elements:
        padding = Many((0, padded - elements))
        flat = tape.add("constant_pad_nd.default", [flat, padding, 0.0], TensorSpec(spec.dtype, (padded,)))
    encoded, _ = _encoded(tape, codec, tape.viewed(flat, (padded // BLOCK, BLOCK)))
    return extract(tape.program([encoded]), [encoded])


def recode_sum(codec: GradientCodec, dtype: str, elements: int, count: int) -> Program:
    """Return a program that sums encoded slices, adds the residual and encodes the sum again.

    It maps inputs ``slice0 … slicen, residual`` to ``encoded, residual``; slices are added in their order.

    Args:
        codec: ``bf16``, ``int8`` or ``e3m0``.
        dtype: Element type of the gradients.
        elements: Values of a slice, a multiple of the block.
        count: Number of slices.
    """
    blocks = TensorSpec(dtype, (elements // BLOCK, BLOCK))
    tape = _Tape((*[encoded_spec(codec, elements)] * count, blocks))
    total = tape.add("add.Tensor", [_sum(tape, codec, dtype, range(count)), count], blocks)
    return tape.program(_encoded(tape, codec, total))


def decode_bucket(
    codec: GradientCodec, specs: Sequence[TensorSpec], slices: int, count: int = 1, *, joined: bool = False
) -> Program:
    """Return a program that decodes encoded buckets and sums them in their order.

    It maps inputs ``encoded0 … encodedn`` to ``g0 … gm``.

    Args:
        codec: ``bf16``, ``int8`` or ``e3m0``.
        specs: Specs of the gradients, of one element type.
        slices: Number of slices that the buckets are padded for.
        count: Number of encoded buckets.
        joined: Whether they are one input, one after the other.
    """
    dtype, sizes = specs[0].dtype, [prod(spec.shape) for spec in specs]
    padded = padded_elements(sum(sizes), slices)
    if joined:
        tape = _Tape([encoded_spec(codec, padded * count)])
        rows = padded // BLOCK
        encoded = [tape.rows(0, rows * place, rows * (place + 1)) for place in range(count)]
    else:
        tape = _Tape([encoded_spec(codec, padded)] * count)
        encoded = list(range(count))
    flat = tape.viewed(_sum(tape, codec, dtype, encoded), (padded,))
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    parts = [tape.rows(flat, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return tape.program([tape.viewed(part, spec.shape) for part, spec in zip(parts, specs, strict=True)])


def project(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that projects matrices onto thin ones, the first half of a PowerSGD step.

    It maps inputs ``g0 … gn, e0 … en, q0 … qn`` to ``m0 … mn, p0 … pn``: each gradient as a matrix plus its residual,
    and its product with ``q``.

    Args:
        specs: Specs of the gradients, of shapes that are compressed.
    """
    matrices, count = _matrices(specs), len(specs)
    tape = _Tape((*specs, *matrices, *(_thin(spec, 1) for spec in matrices)))
    made = [
        tape.add("add.Tensor", [tape.viewed(place, spec.shape), count + place], spec)
        for place, spec in enumerate(matrices)
    ]
    thin = [
        tape.add("mm.default", [made[place], 2 * count + place], _thin(spec, 0)) for place, spec in enumerate(matrices)
    ]
    return tape.program([*made, *thin])


def factor(specs: Sequence[TensorSpec]) -> Program:
    """Return a program with the second half of a PowerSGD step.

    It maps inputs ``m0 … mn, p0 … pn`` to ``p0 … pn, q0 … qn, e0 … en``: the sums ``p`` with orthonormal columns, the
    products of matrices with these, and what is lost of each matrix.

    Args:
        specs: Specs of the gradients.
    """
    matrices, count = _matrices(specs), len(specs)
    tape = _Tape((*matrices, *(_thin(spec, 0) for spec in matrices)))
    bases = [_orthonormal(tape, count + place) for place in range(count)]
    thin, lost = [], []
    for place, (spec, basis) in enumerate(zip(matrices, bases, strict=True)):
        thin.append(tape.add("mm.default", [tape.transposed(place), basis], _thin(spec, 1)))
        kept = tape.add("mm.default", [basis, tape.transposed(thin[-1])], spec)
        lost.append(tape.add("sub.Tensor", [place, kept], spec))
    return tape.program([*bases, *thin, *lost])


def restore(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that maps inputs ``p0 … pn, q0 … qn`` to the gradients ``p q'``.

    Args:
        specs: Specs of the gradients.
    """
    matrices, count = _matrices(specs), len(specs)
    tape = _Tape((*(_thin(spec, 0) for spec in matrices), *(_thin(spec, 1) for spec in matrices)))
    products = [
        tape.add("mm.default", [place, tape.transposed(count + place)], spec) for place, spec in enumerate(matrices)
    ]
    return tape.program([tape.viewed(slot, spec.shape) for slot, spec in zip(products, specs, strict=True)])


def _matrices(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    found = []
    for spec in specs:
        shape = matrix_of(spec.shape)
        assert shape is not None, "it is summed exactly"
        found.append(TensorSpec(spec.dtype, shape))
    return found


def _thin(matrix: TensorSpec, dim: int) -> TensorSpec:
    """Return the spec of the thin matrix with as many rows as a dimension of a matrix has."""
    return TensorSpec(matrix.dtype, (matrix.shape[dim], RANK))


def _orthonormal(tape: _Tape, slot: int) -> int:
    """Make the columns of a matrix orthonormal by the classical Gram-Schmidt process, with two projections a column.

    Two are enough for columns that are orthogonal to the last bits (Giraud, Langou, Rozložník and van den Eshof,
    Rounding error analysis of the classical Gram-Schmidt orthogonalization process, 2005). Where the first one leaves
    only rounding noise, as with a matrix of less rank, the column ``cos((k + 1) i)`` over rows ``i`` takes its place: a
    column of zeros would make one of the second thin matrix, and so stay for all later steps.
    """
    spec = tape.specs[slot]
    column, (rows, count) = TensorSpec(spec.dtype, (spec.shape[0], 1)), spec.shape
    here: dict[str, Value] = {"dtype": DType(spec.dtype), "device": OwnDevice()}
    places = tape.operator("arange.default", (rows,), TensorSpec(spec.dtype, (rows,)), here)
    places = tape.viewed(places, (rows, 1))
    columns: list[int] = []
    for place in range(count):
        given = tape.columns(slot, place, place + 1)
        left = _projected(tape, columns, given)
        spare = tape.add("cos.default", [tape.add("mul.Scalar", [places, place + 1.0], column)], column)
        chosen = tape.add("where.self", [_vanished(tape, given, left), spare, left], column)
        left = _projected(tape, columns, chosen)
        unit = tape.add("div.Tensor", [left, _norm(tape, left)], column)
        columns.append(tape.add("masked_fill.Scalar", [unit, _vanished(tape, chosen, left), 0.0], column))
    return tape.concatenated(columns, dim=1)


def _projected(tape: _Tape, columns: Sequence[int], slot: int) -> int:
    """Subtract from a column its projections onto orthonormal ones."""
    if not columns:
        return slot
    spec = tape.specs[slot]
    basis = tape.concatenated(columns, dim=1)
    along = tape.add("mm.default", [tape.transposed(basis), slot], TensorSpec(spec.dtype, (len(columns), 1)))
    return tape.add("sub.Tensor", [slot, tape.add("mm.default", [basis, along], spec)], spec)


def _vanished(tape: _Tape, before: int, after: int) -> int:
    """Return the slot of the answer whether projection has left nothing of a column but rounding noise."""
    dtype = tape.specs[before].dtype
    least = tape.add("mul.Scalar", [_norm(tape, before), _DEPENDENT[dtype]], TensorSpec(dtype, (1, 1)))
    return tape.add("le.Tensor", [_norm(tape, after), least], TensorSpec("bool", (1, 1)))


def _norm(tape: _Tape, column: int) -> int:
    """Return the slot of a column's 2-norm [1, 1]."""
    spec = tape.specs[column]
    one = TensorSpec(spec.dtype, (1, 1))
    square = tape.add("mul.Tensor", [column, column], spec)
    return tape.add("sqrt.default", [tape.add("sum.dim_IntList", [square, Many((0,)), True], one)], one)


def _sum(tape: _Tape, codec: GradientCodec, dtype: str, encoded: Sequence[int]) -> int:
    """Decode buckets and sum them in their order."""
    total = _decoded(tape, codec, dtype, encoded[0])
    for slot in encoded[1:]:
        total = tape.add("add.Tensor", [total, _decoded(tape, codec, dtype, slot)], tape.specs[total])
    return total


def _encoded(tape: _Tape, codec: GradientCodec, values: int) -> tuple[int, int]:
    """Encode blocks of values; return the slots of the encoded values and of what encoding has lost."""
    spec = tape.specs[values]
    if codec == "bf16":
        encoded = tape.converted(tape.converted(values, "float32"), "bfloat16")
    else:
        column = TensorSpec(spec.dtype, (spec.shape[0], 1))
        largest = tape.add("amax.default", [tape.add("abs.default", [values], spec), Many((1,)), True], column)
        if codec == "int8":
            largest = tape.add("mul.Scalar", [largest, 1 / 127], column)
        scale = tape.converted(tape.add("clamp.default", [largest, _LEAST], column), "float32")
        steps = tape.add("div.Tensor", [values, tape.converted(scale, spec.dtype)], spec)
        if codec == "int8":
            codes = tape.converted(tape.add("round.default", [steps], spec), "int8")
        else:
            codes = _packed(tape, _exponents(tape, steps))
        kind = tape.specs[codes].dtype
        prefix = tape.add("view.dtype", [scale, DType(kind)], TensorSpec(kind, (spec.shape[0], SCALE_BYTES)))
        encoded = tape.concatenated([prefix, codes], dim=1)
    return encoded, tape.add("sub.Tensor", [values, _decoded(tape, codec, spec.dtype, encoded)], spec)


def _exponents(tape: _Tape, steps: int) -> int:
    """Return the slot of the codes of ``e3m0`` of values between -1 and 1.

    Half the distance between two powers of two is the first bit of a mantissa: adding it to the bits of a float32
    rounds its exponent to the nearest power.
    """
    shape = tape.specs[steps].shape
    truth, whole, byte = (TensorSpec(kind, shape) for kind in ("bool", "int32", "uint8"))
    magnitude = tape.converted(tape.add("abs.default", [steps], tape.specs[steps]), "float32")
    bits = tape.add("view.dtype", [magnitude, DType("int32")], whole)
    bits = tape.operator("add.Scalar", (SlotArgument(bits), 1 << (_FLOAT32_MANTISSA - 1)), whole)
    exponent = tape.operator("bitwise_right_shift.Tensor_Scalar", (SlotArgument(bits), _FLOAT32_MANTISSA), whole)
    exponent = tape.operator("sub.Scalar", (SlotArgument(exponent), _FLOAT32_BIAS - _EXPONENTS), whole)
    exponent = tape.converted(tape.operator("clamp.default", (SlotArgument(exponent), 0, _EXPONENTS), whole), "uint8")
    # below the smallest power is 0, not half of that power
    least = tape.add("ge.Scalar", [magnitude, 0.5**_EXPONENTS], truth)
    exponent = tape.add("maximum.default", [exponent, tape.converted(least, "uint8")], byte)
    negative = tape.converted(tape.add("lt.Scalar", [steps, 0.0], truth), "uint8")
    return tape.add(
        "add.Tensor", [exponent, tape.operator("mul.Scalar", (SlotArgument(negative), _EXPONENTS + 1), byte)], byte
    )


def _packed(tape: _Tape, codes: int) -> int:
    """Return the slot of codes of four bits, two in a byte: the columns of the first half below those of the second."""
    width = tape.specs[codes].shape[1] // 2
    low, high = tape.columns(codes, 0, width), tape.columns(codes, width, 2 * width)
    high = tape.operator("mul.Scalar", (SlotArgument(high), 16), tape.specs[high])
    return tape.add("add.Tensor", [low, high], tape.specs[low])


def _unpacked(tape: _Tape, packed: int) -> int:
    """Return the slot of codes of four bits, one in a byte; see :func:`_packed`."""
    spec = tape.specs[packed]
    low = tape.operator("bitwise_and.Scalar", (SlotArgument(packed), 15), spec)
    high = tape.operator("bitwise_right_shift.Tensor_Scalar", (SlotArgument(packed), 4), spec)
    return tape.concatenated([low, high], dim=1)


def _powers(tape: _Tape, codes: int, dtype: str) -> int:
    """Return the slot of the values between -1 and 1 that codes of ``e3m0`` stand for."""
    byte = tape.specs[codes]
    made = TensorSpec(dtype, byte.shape)
    exponent = tape.operator("bitwise_and.Scalar", (SlotArgument(codes), _EXPONENTS), byte)
    power = tape.operator("bitwise_left_shift.Scalar_Tensor", (1, SlotArgument(exponent)), byte)
    power = tape.operator("bitwise_and.Scalar", (SlotArgument(power), 254), byte)  # that of 0 is 0
    negative = tape.operator("bitwise_right_shift.Tensor_Scalar", (SlotArgument(codes), 3), byte)
    sign = tape.add("mul.Scalar", [tape.converted(negative, dtype), -(2.0 ** (1 - _EXPONENTS))], made)
    sign = tape.add("add.Scalar", [sign, 2.0**-_EXPONENTS], made)
    return tape.add("mul.Tensor", [tape.converted(power, dtype), sign], made)


def _decoded(tape: _Tape, codec: GradientCodec, dtype: str, encoded: int) -> int:
    """Decode blocks of values."""
    rows, width = tape.specs[encoded].shape
    if codec == "bf16":
        return tape.converted(tape.converted(encoded, "float32"), dtype)
    prefix = tape.columns(encoded, 0, SCALE_BYTES)
    dense: dict[str, Value] = {"memory_format": MemoryFormat("contiguous_format")}
    prefix = tape.add("clone.default", [prefix], tape.specs[prefix], dense)
    scale = tape.add("view.dtype", [prefix, DType("float32")], TensorSpec("float32", (rows, 1)))
    codes = tape.columns(encoded, SCALE_BYTES, width)
    steps = tape.converted(codes, dtype) if codec == "int8" else _powers(tape, _unpacked(tape, codes), dtype)
    return tape.add("mul.Tensor", [steps, tape.converted(scale, dtype)], tape.specs[steps])


class _Tape:
    """A program under construction.

    Args:
        inputs: Specs of its inputs, which take the first slots.
    """

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self.specs = list(inputs)
        self._inputs = tuple(inputs)
        self._operators: list[Operator] = []

    def add(self, name: str, args: Sequence[Value], spec: TensorSpec, kwargs: dict[str, Value] | None = None) -> int:
        """Add an operator with one output and return its slot; a Python integer in ``args`` is a slot."""
        given = tuple(SlotArgument(value) if type(value) is int else value for value in args)
        return self.operator(name, given, spec, kwargs)

    def operator(
        self, name: str, args: tuple[Value, ...], spec: TensorSpec, kwargs: dict[str, Value] | None = None
    ) -> int:
        """Add an operator with one output and return its slot; integers in ``args`` are numbers."""
        self.specs.append(spec)
        self._operators.append(Operator(f"aten.{name}", args, kwargs or {}, (len(self.specs) - 1,), (spec,)))
        return len(self.specs) - 1

    def viewed(self, slot: int, shape: tuple[int, ...]) -> int:
        """Return the slot of a tensor in another shape."""
        return self.add("reshape.default", [slot, Many(shape)], TensorSpec(self.specs[slot].dtype, shape))

    def converted(self, slot: int, dtype: str) -> int:
        """Return the slot of a tensor in another element type; the same where it has that type."""
        spec = self.specs[slot]
        if spec.dtype == dtype:
            return slot
        return self.add("_to_copy.default", [slot], TensorSpec(dtype, spec.shape), {"dtype": DType(dtype)})

    def concatenated(self, slots: Sequence[int], dim: int = 0) -> int:
        """Return the slot of tensors joined along a dimension."""
        first = self.specs[slots[0]]
        joined = sum(self.specs[slot].shape[dim] for slot in slots)
        spec = TensorSpec(first.dtype, (*first.shape[:dim], joined, *first.shape[dim + 1 :]))
        return self.operator("cat.default", (Many(tuple(map(SlotArgument, slots))), dim), spec)

    def transposed(self, slot: int) -> int:
        """Return the slot of a transposed matrix."""
        spec = self.specs[slot]
        return self.add("t.default", [slot], TensorSpec(spec.dtype, (spec.shape[1], spec.shape[0])))

    def rows(self, slot: int, start: int, end: int) -> int:
        """Return the slot of some rows of a tensor."""
        spec = self.specs[slot]
        made = TensorSpec(spec.dtype, (end - start, *spec.shape[1:]))
        return self.operator("slice.Tensor", (SlotArgument(slot), 0, start, end), made)

    def columns(self, slot: int, start: int, end: int) -> int:
        """Return the slot of some columns of a matrix."""
        spec = self.specs[slot]
        made = TensorSpec(spec.dtype, (spec.shape[0], end - start))
        return self.operator("slice.Tensor", (SlotArgument(slot), 1, start, end), made)

    def program(self, outputs: Sequence[int]) -> Program:
        """Return the program with some slots as its outputs."""
        return with_deaths(Program(self._inputs, tuple(self._operators), tuple(outputs), len(self.specs)))
