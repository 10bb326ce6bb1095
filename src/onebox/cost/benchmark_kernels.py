"""The fixed set of kernels for the comparison of devices, as programs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from onebox.cost.lifetimes import footprint
from onebox.graph import encode_bucket, extract
from onebox.plan_names import GradientCodec
from onebox.wire import DType, Many, Operator, OwnDevice, Program, SlotArgument, TensorSpec, Value, with_deaths

SMALL_OPERATORS = 64
LEAST_BYTES = 1 << 20
"""Bytes that the smallest kernels need."""

_SMALL = TensorSpec("float32", (1,))
_CHANNELS = 64


@dataclass(frozen=True, kw_only=True)
class BenchmarkKernel:
    """A program whose speed is measured.

    Args:
        name: Its field of :class:`~onebox.cost.Speeds`.
        program: The program.
        work: Work of one run: floating-point operations, bytes, or operators.
        away: Whether a run copies the inputs to the host's memory and back; the program reads them in the end.
    """

    name: str
    program: Program
    work: float
    away: bool = False

    @property
    def need_bytes(self) -> int:
        """Memory of its inputs and of a run, while the output of the run before still exists."""
        need = footprint(self.program)
        return sum(spec.size_bytes for spec in self.program.inputs) + need.peak_bytes + need.net_bytes

    def figure(self, seconds: float) -> float:
        """Return its figure for a run's seconds: a rate, or seconds of each operator where the name ends in ``_s``."""
        return seconds / self.work if self.name.endswith("_s") else self.work / seconds


def kernels(kind: str, room_bytes: int, *, bf16: bool) -> tuple[BenchmarkKernel, ...]:
    """Return the kernels for a device.

    Args:
        kind: ``cpu``, ``cuda`` or ``sim``; the last has only the call of a program, with any contents.
        room_bytes: Memory that they may need, at least :data:`LEAST_BYTES`; kernels are halved until they fit.
        bf16: Whether it has instructions for bf16: without them a single kernel may take seconds.
    """
    call = BenchmarkKernel(name="call_s", program=_chain(1), work=1)
    if kind == "sim":
        return (call,)
    large = kind == "cuda"
    products = (_fitting(partial(_matmul, dtype="bfloat16"), 4096 if large else 512, room_bytes),) if bf16 else ()
    return (
        call,
        *products,
        BenchmarkKernel(name="operator_s", program=_chain(SMALL_OPERATORS), work=SMALL_OPERATORS),
        _fitting(_matmul, 4096 if large else 512, room_bytes),
        _fitting(_convolution, 256 if large else 8, room_bytes),
        _fitting(_pointwise, 1 << (26 if large else 22), room_bytes),
        _fitting(_norm, 1024 if large else 64, room_bytes),
        *(_fitting(partial(_coding, codec), 1 << (23 if large else 18), room_bytes) for codec in ("bf16", "int8")),
        _fitting(_host_copy, 1 << (26 if large else 24), room_bytes),  # a CPU's caches are a part of it at most
    )


def randoms(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that makes tensors of random numbers: constant ones would let some devices save power."""
    operators = tuple(
        Operator(
            "aten.randn.default",
            (Many(spec.shape),),
            {"dtype": DType(spec.dtype), "device": OwnDevice()},
            (slot,),
            (spec,),
            position=slot,
        )
        for slot, spec in enumerate(specs)
    )
    return with_deaths(Program((), operators, tuple(range(len(specs))), len(specs)))


def filled(spec: TensorSpec) -> Program:
    """Return a program that makes a tensor with each element written; zeros might be untouched pages."""
    keywords: dict[str, Value] = {"dtype": DType(spec.dtype), "device": OwnDevice()}
    fill = Operator("aten.full.default", (Many(spec.shape), 1.0), keywords, (0,), (spec,))
    return with_deaths(Program((), (fill,), (0,), 1))


def first_element(spec: TensorSpec) -> Program:
    """Return a program that gives a view of the first element of a tensor of one dimension."""
    take = Operator("aten.slice.Tensor", (SlotArgument(0), 0, 0, 1), {}, (1,), (TensorSpec(spec.dtype, (1,)),))
    return with_deaths(Program((spec,), (take,), (1,), 2))


def _fitting(maker: Callable[[int], BenchmarkKernel], size: int, room_bytes: int) -> BenchmarkKernel:
    kernel = maker(size)
    while kernel.need_bytes > room_bytes and size > 1:
        size //= 2
        kernel = maker(size)
    return kernel


def _chain(count: int) -> Program:
    """Return a program of small operators, each of which reads the output of the one before."""
    operators = tuple(
        Operator("aten.add.Tensor", (SlotArgument(slot), 1.0), {}, (slot + 1,), (_SMALL,)) for slot in range(count)
    )
    return with_deaths(Program((_SMALL,), operators, (count,), count + 1))


def _matmul(side: int, *, dtype: str = "float32") -> BenchmarkKernel:
    square = TensorSpec(dtype, (side, side))
    return BenchmarkKernel(
        name="matmul_flops" if dtype == "float32" else "bf16_flops",
        program=_single((square, square), "aten.mm.default", (SlotArgument(0), SlotArgument(1)), (square,)),
        work=2.0 * side**3,
    )


def _convolution(batch: int) -> BenchmarkKernel:
    maps, weight = (
        TensorSpec("float32", (batch, _CHANNELS, 28, 28)),
        TensorSpec("float32", (_CHANNELS, _CHANNELS, 3, 3)),
    )
    ones, none = Many((1, 1)), Many((0, 0))
    arguments: tuple[Value, ...] = (SlotArgument(0), SlotArgument(1), None, ones, ones, ones, False, none, 1)
    return BenchmarkKernel(
        name="convolution_flops",
        program=_single((maps, weight), "aten.convolution.default", arguments, (maps,)),
        work=2.0 * batch * 28 * 28 * _CHANNELS * _CHANNELS * 9,
    )


def _pointwise(elements: int) -> BenchmarkKernel:
    flat = TensorSpec("float32", (elements,))
    program = _single((flat,), "aten.relu.default", (SlotArgument(0),), (flat,))
    return BenchmarkKernel(name="pointwise_bps", program=program, work=2.0 * flat.size_bytes)


def _host_copy(elements: int) -> BenchmarkKernel:
    flat = TensorSpec("float32", (elements,))
    return BenchmarkKernel(name="host_copy_bps", program=first_element(flat), work=2.0 * flat.size_bytes, away=True)


def _coding(codec: GradientCodec, elements: int) -> BenchmarkKernel:
    """Return the encoding of a bucket with its residual, of about the size that training has."""
    whole = encode_bucket(codec, (TensorSpec("float32", (elements,)),), 1)
    work = float(whole.inputs[0].size_bytes)
    return BenchmarkKernel(name=f"{codec}_coding_bps", program=extract(whole, whole.outputs[-1:]), work=work)


def _norm(batch: int) -> BenchmarkKernel:
    maps, features = TensorSpec("float32", (batch, _CHANNELS, 32, 32)), TensorSpec("float32", (_CHANNELS,))
    arguments: tuple[Value, ...] = (SlotArgument(0), None, None, True, 0.1, 1e-5)
    program = _single((maps,), "aten._native_batch_norm_legit.no_stats", arguments, (maps, features, features))
    return BenchmarkKernel(name="norm_bps", program=program, work=2.0 * maps.size_bytes)


def _single(
    inputs: tuple[TensorSpec, ...], operator: str, arguments: tuple[Value, ...], specs: tuple[TensorSpec, ...]
) -> Program:
    """Return a program of one operator, with its first output."""
    outs = (len(inputs), *(None for _ in specs[1:]))
    return with_deaths(
        Program(inputs, (Operator(operator, arguments, {}, outs, specs),), (len(inputs),), len(inputs) + 1)
    )
