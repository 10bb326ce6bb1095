"""Eager operators on a worker: the same as plain PyTorch, to the last bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.emulator.device import EmulatedDevice
from onebox.wire import (
    FREE,
    Complex,
    GeneratorArgument,
    GeneratorSpec,
    KernelSpec,
    Many,
    OwnDevice,
    SlotArgument,
    Strided,
    TapeSpec,
)
from onebox.wire.protocol.eager import KeepGenerator, Perform, Replay, SetGenerator
from onebox.wire.protocol.instructions import Free, Get
from onebox.wire.protocol.requests import Define
from onebox.wire.protocol.responses import OperatorResult
from onebox.worker.memory.buffers import Poisoned
from tests.unit.machines import Batch, Rig
from tests.unit.worker.scripts import ADD, MUL_, ONES, Ref, Script, X, bytes_held, on_a_worker, small_rig

aten = torch.ops.aten


@pytest.fixture
def rig() -> Rig:
    return small_rig()


def test_views_share_memory_and_operators_in_place_write_through_them() -> None:
    script = Script(X, torch.tensor([3, 0]), torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    (column,) = script.run(aten.select.int, Ref(1), 1, 2)
    (flat,) = script.run(aten.view.default, Ref(1), [12])
    script.run(aten.mul_.Scalar, Ref(column), 2.5)
    script.run(aten.add_.Tensor, Ref(flat), Ref(flat), alpha=0.5)
    script.run(aten.index_put_.default, Ref(1), [None, Ref(2)], Ref(3))
    (diagonal,) = script.run(aten.as_strided.default, Ref(1), [3], [5], 0)
    script.run(aten.zero_.default, Ref(diagonal))
    rig = on_a_worker(script)
    script.check(rig)
    assert rig.used == X.nbytes + 16 + 16


def viewed(rig: Rig, name: str, args: tuple[Any, ...], buffers: tuple[int, ...], *views: Strided | None) -> None:
    """Run an operator that sees some of its buffers as views, and makes nothing."""
    rig.do(Define(60, KernelSpec(name, args, {}, len(buffers), 0, (None,) * (name != FOREACH), views)))
    rig.do(Batch((60, *buffers)))
    rig.do(Free((), (60,)))


FOREACH = "aten._foreach_add_.List"


def test_an_operator_sees_a_buffer_as_a_view_and_writes_through_it() -> None:
    rig, whole = Rig(), torch.arange(12, dtype=torch.float64).view(3, 4)
    rig.put(b1=whole, b2=torch.ones(2, dtype=torch.float64), b3=whole.clone()[1:])
    column, corner = Strided("float64", (3,), (4,), 1), Strided("float64", (2, 2), (1, 4), 2)
    viewed(rig, "aten.mul_.Scalar", (SlotArgument(0), 10), (1,), column)
    viewed(
        rig, "aten.add_.Tensor", (SlotArgument(0), SlotArgument(1)), (1, 2), corner, Strided("float64", (2, 2), (0, 1))
    )
    lists = (Many((SlotArgument(0), SlotArgument(1))), Many((SlotArgument(2), SlotArgument(2))))
    viewed(rig, FOREACH, lists, (1, 3, 2), column, None, Strided("float64", (1,), (1,), 1))
    same = whole.clone()
    same[:, 1] *= 10
    same[:2, 2:] += 1
    same[:, 1] += 1
    assert torch.equal(rig.get(1), same)
    assert torch.equal(rig.get(3), whole[1:] + 1)
    assert rig.failures == []


def test_an_operator_sees_a_buffer_as_a_view_of_another_type() -> None:
    rig, numbers = Rig(), torch.randn(3, 2, dtype=torch.complex128)
    rig.put(b1=numbers, b2=torch.zeros(2, dtype=torch.complex128))
    viewed(rig, "aten.zero_.default", (SlotArgument(0),), (1,), Strided("float64", (3,), (4,), 1))
    conjugate = Strided("complex128", (2,), (2,), 2, conjugate=True)
    viewed(rig, "aten.copy_.default", (SlotArgument(0), SlotArgument(1)), (2, 1), None, conjugate)
    numbers.imag[:, 0] = 0
    assert torch.equal(rig.get(1), numbers)
    assert torch.equal(rig.get(2), numbers.view(-1)[2::2].conj())
    assert rig.failures == []


def test_an_operator_may_have_lists_of_tensors_and_write_to_them() -> None:
    script = Script(X, X + 1, X * 2)
    script.run(aten._foreach_add_.List, [Ref(1), Ref(2)], [Ref(3), Ref(3)], alpha=2.0)
    script.run(aten._foreach_mul_.ScalarList, [Ref(1), Ref(2)], [0.5, 2.0])
    sums = script.run(aten._foreach_add.ScalarList, [Ref(1), Ref(3)], [1.0, 2])
    script.run(aten.cat.default, [Ref(number) for number in sums], 1)
    script.run(aten.split.Tensor, Ref(1), 2, 1)
    script.check(on_a_worker(script))
    assert len(script.tensors) == 3 + 2 + 1 + 2


def test_an_optimizer_step_in_one_operator() -> None:
    script = Script(X, X / 3, torch.zeros_like(X), torch.zeros_like(X), torch.zeros(()))
    for _ in range(2):
        script.run(aten._foreach_add_.Scalar, [Ref(5)], 1)
        script.run(
            aten._fused_adam_.default, [Ref(1)], [Ref(2)], [Ref(3)], [Ref(4)], [], [Ref(5)], lr=1e-3, beta1=0.9,
            beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    script.check(on_a_worker(script))
    assert not torch.equal(script.tensors[1], X)


def test_an_operator_writes_where_out_says() -> None:
    script = Script(X, X, torch.empty(3, 4, dtype=torch.float64), torch.empty(0, dtype=torch.float64))
    script.run(aten.add.out, Ref(1), Ref(2), alpha=3.0, out=Ref(3))
    script.run(aten.mul.out, Ref(1), Ref(2), out=Ref(4))
    rig = on_a_worker(script)
    script.check(rig)
    assert rig.used == 4 * X.nbytes, "what out= has made grow is counted"


def test_masks_leave_out_gradients_of_a_convolution() -> None:
    x, w = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    script = Script(x, w, torch.randn(2, 4, 3, 3, dtype=torch.float64))
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for mask in ([True, True, True], [False, True, False], [True, False, True]):
        script.run(aten.convolution_backward.default, Ref(3), Ref(1), Ref(2), [4], *geometry, mask)
    script.check(on_a_worker(script))
    assert len(script.tensors) == 3 + 3 + 1 + 2


def test_running_statistics_are_written_whatever_the_schema_says() -> None:
    x = torch.randn(4, 3, 2)
    script = Script(x, torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3))
    script.run(aten.native_batch_norm.default, Ref(1), Ref(4), Ref(5), Ref(2), Ref(3), True, 0.1, 1e-5)
    script.check(on_a_worker(script))
    assert script.tensors[2].any()


def test_storages_grow_shrink_and_are_exchanged() -> None:
    script = Script(X, torch.zeros(2, dtype=torch.float64), torch.empty(0, dtype=torch.float64))
    (view,) = script.run(aten.view.default, Ref(2), [2, 1])
    script.run(aten.resize_.default, Ref(2), [5, 5])
    script.run(aten.fill_.Scalar, Ref(2), 3)
    script.run(aten.set_.source_Tensor, Ref(3), Ref(1))
    script.run(aten.set_.source_Tensor_storage_offset, Ref(view), Ref(1), 2, [2, 2], [1, 2])
    script.run(aten.mul_.Scalar, Ref(3), 2.0)
    script.run(aten.t_.default, Ref(1))
    rig = on_a_worker(script)
    script.check(rig)
    assert rig.used == bytes_held(script) == X.nbytes + 25 * 8
    script.free(2)
    rig.do(Batch((FREE, 2)))
    assert rig.used == X.nbytes
    rig.do(Free((1, 3, view)))
    assert rig.used == 0


def test_complex_numbers_and_lazy_conjugates() -> None:
    z = torch.randn(3, 2, dtype=torch.complex128)
    script = Script(z)
    (conjugate,) = script.run(aten._conj.default, Ref(1))
    script.run(aten.mul.Scalar, Ref(conjugate), 1 + 2j)
    script.run(aten.view_as_real.default, Ref(1))
    script.run(aten.mul_.Scalar, Ref(1), 0.5j)
    script.check(on_a_worker(script))
    assert script.tensors[conjugate].is_conj()


def test_a_new_tensor_is_laid_out_as_the_client_expects_it() -> None:
    """The client finds layouts out on meta tensors, and some operators lay their results out otherwise there."""
    rig = Rig()
    rig.put(b1=X)
    other = KernelSpec("aten.relu.default", (SlotArgument(0),), {}, 1, 0, (Strided("float64", (3, 4), (1, 3)),))
    rig.do(Define(5, other), Batch((5, 1, 2)))
    rig.do(
        Define(
            6,
            KernelSpec("aten.as_strided.default", (SlotArgument(0), Many((12,)), Many((1,))), {}, 1, 0, (flat(12),)),
        )
    )
    rig.do(Batch((6, 2, 3)))
    assert torch.equal(rig.get(2), X.relu())
    assert torch.equal(rig.get(3), X.relu().t().reshape(-1))
    assert rig.failures == []


def flat(size: int) -> Strided:
    return Strided("float64", (size,), (1,))


def perform(
    rig: Rig, name: str, *args: Any, inputs: tuple[int, ...] = (1,), first: int = 50, **kwargs: Any
) -> OperatorResult:
    (made,) = rig.do(Perform(KernelSpec(name, args, kwargs, len(inputs), 0), inputs, (), first))
    assert isinstance(made, OperatorResult)
    return made


def test_shapes_that_depend_on_data_are_told() -> None:
    rig = Rig()
    rig.put(b1=X)
    made = perform(rig, "aten.nonzero.default", SlotArgument(0))
    (told,) = made.results
    assert isinstance(told, Strided)
    assert told.shape == (11, 2)
    assert made.inputs == (Strided("float64", (3, 4), (4, 1), 0, 96),)
    assert torch.equal(rig.get(50), X.nonzero())


def test_returns_are_numbered_whatever_they_are() -> None:
    rig = Rig()
    rig.put(b1=torch.randn(1, 2, 3, 3), b2=torch.randn(2, 2, 1, 1), b3=torch.randn(1, 2, 3, 3))
    geometry = (Many((1, 1)), Many((0, 0)), Many((1, 1)), False, Many((0, 0)), 1, Many((False, True, True)))
    kernel = KernelSpec(
        "aten.convolution_backward.default",
        (SlotArgument(0), SlotArgument(1), SlotArgument(2), Many((2,)), *geometry),
        {},
        3,
        0,
    )
    (made,) = rig.do(Perform(kernel, (3, 1, 2), (), 70))
    assert isinstance(made, OperatorResult)
    nothing, weight, bias = made.results
    assert nothing is None
    assert isinstance(weight, Strided)
    assert isinstance(bias, Strided)
    assert rig.get(71).shape == weight.shape == (2, 2, 1, 1)
    assert rig.get(72).shape == bias.shape == (2,)
    with pytest.raises(Poisoned, match="no buffer 70"):
        rig.get(70)


def test_numbers_are_values() -> None:
    rig = Rig()
    rig.put(
        b1=X, b2=X.clone(), b3=torch.tensor(7), b4=torch.tensor(True), b5=torch.tensor(1 - 2j), b6=torch.tensor(0.5)
    )
    assert perform(rig, "aten.equal.default", SlotArgument(0), SlotArgument(1), inputs=(1, 2)).results == (True,)
    for number, value in ((3, 7), (4, True), (5, Complex(1.0, -2.0)), (6, 0.5)):
        (told,) = perform(rig, "aten._local_scalar_dense.default", SlotArgument(0), inputs=(number,)).results
        assert repr(told) == repr(value)


def test_what_inputs_have_become_is_told() -> None:
    rig = Rig()
    rig.put(b1=X, b2=torch.empty(0, dtype=torch.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = perform(rig, "aten.nonzero.out", SlotArgument(0), inputs=(1, 2), out=SlotArgument(1))
    assert made.inputs[1].shape == (11, 2)
    assert torch.equal(rig.get(2), X.nonzero())
    assert rig.used == X.nbytes + 11 * 2 * 8


def test_a_failed_question_leaves_arguments_as_they_are() -> None:
    rig = Rig()
    rig.put(b1=X, b2=torch.ones(7, dtype=torch.float64))
    with pytest.raises(Poisoned):
        perform(rig, "aten.add_.Tensor", SlotArgument(0), SlotArgument(1), inputs=(1, 2))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator, failure.cause) == ("operator", "aten.add_.Tensor", "RuntimeError")
    assert "must match the size" in failure.message
    assert torch.equal(rig.get(1), X)


def test_an_answer_is_as_of_its_place_in_the_stream(rig: Rig) -> None:
    rig.put(b12=ONES * 2)
    rig.do(Define(9, TapeSpec((2, -1, -2), 2)), Replay(9, (13, 11), ()))
    rig.do(Get((11,)), Batch((2, 11, 12)), Get((11,)), Replay(9, (11, 12), ()), Get((11,)))
    values = [torch.frombuffer(bytearray(frame), dtype=torch.float64)[0].item() for frame in rig.frames_out]
    assert values == [1.0, 2.0, 4.0]


def normal(source: int, number: int) -> Define:
    keywords = {"generator": GeneratorArgument(source), "dtype": None, "device": OwnDevice()}
    told = Strided("float32", (5,), (1,))
    return Define(number, KernelSpec("aten.randn.generator", (Many((5,)),), keywords, 0, 0, (told,)))


def drawn(rig: Rig, kernel: int) -> Tensor:
    rig.do(Batch((kernel, 90)))
    return rig.get(90)


@pytest.mark.parametrize("number", [0, 7])
def test_a_generator_repeats_and_its_state_goes_there_and_back(number: int) -> None:
    rig = Rig()
    rig.do(Define(7, GeneratorSpec(3)), normal(number, 8), SetGenerator(number, 3))
    first = drawn(rig, 8)
    assert torch.equal(first, torch.randn(5, generator=torch.Generator().manual_seed(3)))
    rig.do(KeepGenerator(number, 70))
    second = drawn(rig, 8)
    assert not torch.equal(first, second)
    rig.do(SetGenerator(number, None, 70))
    assert torch.equal(drawn(rig, 8), second)
    rig.do(SetGenerator(number, 3))
    assert torch.equal(drawn(rig, 8), first)
    assert rig.failures == []


def test_generators_are_apart_and_tapes_draw_anew() -> None:
    rig = Rig()
    rig.do(
        Define(6, GeneratorSpec(1)),
        Define(7, GeneratorSpec(1)),
        normal(6, 8),
        normal(7, 9),
        Define(10, TapeSpec((8,), 0)),
    )
    mine = torch.Generator().manual_seed(1)
    for _ in range(3):
        rig.do(Replay(10, (), (91,)))
        assert torch.equal(rig.get(91), torch.randn(5, generator=mine))
    assert torch.equal(drawn(rig, 9), torch.randn(5, generator=torch.Generator().manual_seed(1)))


def test_a_sim_device_has_shapes_and_no_values() -> None:
    rig = Rig(device=EmulatedDevice())
    rig.do(
        Define(1, ADD),
        Define(2, MUL_),
        Define(9, TapeSpec((1, -1, -2, 2, 0, -1), 2, 1)),
        Define(7, GeneratorSpec(1)),
    )
    rig.do(normal(7, 8))
    rig.put(b11=ONES, b12=ONES)
    rig.do(
        Batch((1, 11, 12, 20, 8, 22), (1.0,)), Replay(9, (11, 20), (21,), (1.0,)), Replay(9, (11, 20), (23,), (1.0,))
    )
    assert rig.failures == []
    assert rig.used == 5 * 32 + 20
    for ask in (
        Get((21,)),
        Perform(KernelSpec("aten.equal.default", (SlotArgument(0), SlotArgument(1)), {}, 2, 0), (11, 12), (), 50),
        Perform(KernelSpec("aten._local_scalar_dense.default", (SlotArgument(0),), {}, 1, 0), (11,), (), 50),
        Perform(KernelSpec("aten.nonzero.default", (SlotArgument(0),), {}, 1, 0), (11,), (), 50),
    ):
        with pytest.raises(Poisoned, match="no values") as caught:
            rig.do(ask)
        assert caught.value.failure.kind == "values"
    (made,) = rig.do(Perform(KernelSpec("aten.neg.default", (SlotArgument(0),), {}, 1, 0), (11,), (), 50))
    assert made == OperatorResult((Strided("float64", (4,), (1,), 0, 32),), (Strided("float64", (4,), (1,), 0, 32),))
