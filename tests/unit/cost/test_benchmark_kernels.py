"""The fixed kernels: they are what they say, run on any worker, and fit into the memory that there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost.benchmark_kernels import (
    LEAST_BYTES,
    SMALL_OPERATORS,
    BenchmarkKernel,
    filled,
    first_element,
    kernels,
    randoms,
)
from onebox.cost.pool_profile import Speeds
from onebox.wire import TensorSpec, check
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU, Meter

KINDS = ("cpu", "cuda", "sim")
ROOMY = 1 << 40


def run(kernel: BenchmarkKernel) -> list[torch.Tensor]:
    """Run a kernel as a worker does."""
    inputs = CompiledProgram(randoms(kernel.program.inputs), CPU).run([], lambda position: None, WorkerProgress())
    return CompiledProgram(kernel.program, CPU).run(inputs, lambda position: None, WorkerProgress())


@pytest.mark.parametrize("kind", KINDS)
def test_each_kernel_is_for_a_figure_of_its_own(kind: str) -> None:
    names = [kernel.name for kernel in kernels(kind, ROOMY, bf16=True)]
    assert names == list(dict.fromkeys(names))
    assert set(names) == ({"call_s"} if kind == "sim" else set(Speeds.__struct_fields__))


def test_bf16_is_not_tried_where_it_would_take_seconds() -> None:
    assert {kernel.name for kernel in kernels("cpu", ROOMY, bf16=True)} - {
        kernel.name for kernel in kernels("cpu", ROOMY, bf16=False)
    } == {"bf16_flops"}


@given(st.sampled_from(KINDS), st.integers(LEAST_BYTES, 1 << 34))
def test_kernels_fit_into_the_room(kind: str, room: int) -> None:
    for kernel in kernels(kind, room, bf16=True):
        check(kernel.program)
        assert kernel.need_bytes <= room
        assert kernel.work > 0


def test_the_smallest_kernels_run_and_take_no_more_than_they_say() -> None:
    for kernel in kernels("cpu", LEAST_BYTES, bf16=False):
        inputs = CompiledProgram(randoms(kernel.program.inputs), CPU).run([], lambda position: None, WorkerProgress())
        program = CompiledProgram(kernel.program, CPU)  # tries its operators, once in a process
        with Meter(inputs) as meter:
            (made,) = program.run(list(inputs), lambda position: None, WorkerProgress())
        before_bytes = 0 if kernel.away else made.nbytes  # of the run before; a view of the input is no memory
        assert meter.peak_bytes + before_bytes <= kernel.need_bytes, kernel.name


def test_the_work_is_counted_as_it_is_done() -> None:
    found = {kernel.name: kernel for kernel in kernels("cpu", ROOMY, bf16=True)}
    (square, _) = found["matmul_flops"].program.inputs
    assert (square.shape, found["matmul_flops"].work) == ((512, 512), 2 * 512**3)
    (half, _) = found["bf16_flops"].program.inputs
    assert (half, found["bf16_flops"].work) == (TensorSpec("bfloat16", (512, 512)), 2 * 512**3)
    (maps, _) = found["convolution_flops"].program.inputs
    outputs = run(found["convolution_flops"])[0]
    assert outputs.shape == maps.shape
    assert found["convolution_flops"].work == 2 * outputs.numel() * 64 * 9
    for name in ("pointwise_bps", "norm_bps"):
        (spec,) = found[name].program.inputs
        assert spec.size_bytes == 16 << 20
        assert found[name].work == 2 * spec.size_bytes
    (flat,) = found["host_copy_bps"].program.inputs
    assert (flat.size_bytes, found["host_copy_bps"].work) == (64 << 20, 2 * flat.size_bytes)
    assert [name for name, kernel in found.items() if kernel.away] == ["host_copy_bps"]
    assert len(found["operator_s"].program.operators) == found["operator_s"].work == SMALL_OPERATORS
    assert len(found["call_s"].program.operators) == found["call_s"].work == 1


def test_figures() -> None:
    program = first_element(TensorSpec("float32", (2,)))
    assert BenchmarkKernel(name="matmul_flops", program=program, work=1e9).figure(0.5) == 2e9
    assert BenchmarkKernel(name="operator_s", program=program, work=64).figure(64e-6) == pytest.approx(1e-6)


def test_messages_are_filled_and_answered_by_their_first_element() -> None:
    spec = TensorSpec("float32", (5,))
    (message,) = CompiledProgram(filled(spec), CPU).run([], lambda position: None, WorkerProgress())
    assert message.tolist() == [1.0] * 5
    (first,) = CompiledProgram(first_element(spec), CPU).run([message], lambda position: None, WorkerProgress())
    assert first.tolist() == [1.0]
    assert first.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
