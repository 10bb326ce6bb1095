"""Eager operators on a worker: the same as plain PyTorch, one by one and in blocks; failures void what they should."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.wire import (
    FREE,
    Block,
    Complex,
    Generator,
    Hole,
    Items,
    Kernel,
    OwnDevice,
    Slot,
    Source,
    Strided,
)
from onebox.wire.messages import Ask, Define, Free, Get, Operate, Perform, Replay, SetGenerator
from onebox.wire.sayings import Failure, Made, Memory, Tensors
from onebox.worker.faults import Fault
from onebox.worker.sim import SimDevice
from onebox.worker.store import Poisoned
from tests.unit.machines import Rig
from tests.unit.worker.scripts import Ref, Script

aten = torch.ops.aten
X = torch.arange(12, dtype=torch.float64).reshape(3, 4) - 5.0
FOUR = Strided("float64", (4,), (1,))
ADD = Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {"alpha": Hole(0)}, 2, 1, (FOUR,))
MUL_ = Kernel("aten.mul_.Tensor", (Slot(0), Slot(1)), {}, 2, 0)
MM = Kernel("aten.mm.default", (Slot(0), Slot(1)), {}, 2, 0, (FOUR,))
ONES = torch.ones(4, dtype=torch.float64)


@pytest.fixture
def rig() -> Rig:
    """A machine with kernels 1 (add), 2 (mul_) and 3 (mm, which fails), and ones in buffers 11 to 13."""
    rig = Rig()
    rig.do(Define(1, ADD), Define(2, MUL_), Define(3, MM))
    rig.put(b11=ONES, b12=ONES, b13=ONES)
    return rig


def failure_of(rig: Rig, number: int) -> Failure:
    with pytest.raises(Poisoned) as caught:
        rig.get(number)
    return caught.value.failure


def on_a_worker(script: Script) -> Rig:
    """Run a script on a new worker."""
    rig = Rig()
    script.put(rig)
    rig.do(*script.definitions(), script.operate())
    return rig


def bytes_held(script: Script) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in script.tensors.values()}.values())


# ---- the same as plain PyTorch


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
    rig.do(Operate((FREE, 2)))
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
    other = Kernel("aten.relu.default", (Slot(0),), {}, 1, 0, (Strided("float64", (3, 4), (1, 3)),))
    rig.do(Define(5, other), Operate((5, 1, 2)))
    rig.do(Define(6, Kernel("aten.as_strided.default", (Slot(0), Items((12,)), Items((1,))), {}, 1, 0, (flat(12),))))
    rig.do(Operate((6, 2, 3)))
    assert torch.equal(rig.get(2), X.relu())
    assert torch.equal(rig.get(3), X.relu().t().reshape(-1))
    assert rig.failures == []


def flat(size: int) -> Strided:
    return Strided("float64", (size,), (1,))


# ---- one operator whose results the client does not know


def perform(rig: Rig, name: str, *args: Any, inputs: tuple[int, ...] = (1,), first: int = 50, **kwargs: Any) -> Made:
    (made,) = rig.do(Perform(Kernel(name, args, kwargs, len(inputs), 0), inputs, (), first))
    assert isinstance(made, Made)
    return made


def test_shapes_that_depend_on_data_are_told() -> None:
    rig = Rig()
    rig.put(b1=X)
    made = perform(rig, "aten.nonzero.default", Slot(0))
    (told,) = made.results
    assert isinstance(told, Strided)
    assert told.shape == (11, 2)
    assert made.inputs == (Strided("float64", (3, 4), (4, 1), 0, 96),)
    assert torch.equal(rig.get(50), X.nonzero())


def test_returns_are_numbered_whatever_they_are() -> None:
    rig = Rig()
    rig.put(b1=torch.randn(1, 2, 3, 3), b2=torch.randn(2, 2, 1, 1), b3=torch.randn(1, 2, 3, 3))
    geometry = (Items((1, 1)), Items((0, 0)), Items((1, 1)), False, Items((0, 0)), 1, Items((False, True, True)))
    kernel = Kernel("aten.convolution_backward.default", (Slot(0), Slot(1), Slot(2), Items((2,)), *geometry), {}, 3, 0)
    (made,) = rig.do(Perform(kernel, (3, 1, 2), (), 70))
    assert isinstance(made, Made)
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
    assert perform(rig, "aten.equal.default", Slot(0), Slot(1), inputs=(1, 2)).results == (True,)
    for number, value in ((3, 7), (4, True), (5, Complex(1.0, -2.0)), (6, 0.5)):
        (told,) = perform(rig, "aten._local_scalar_dense.default", Slot(0), inputs=(number,)).results
        assert repr(told) == repr(value)


def test_what_inputs_have_become_is_told() -> None:
    rig = Rig()
    rig.put(b1=X, b2=torch.empty(0, dtype=torch.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = perform(rig, "aten.nonzero.out", Slot(0), inputs=(1, 2), out=Slot(1))
    assert made.inputs[1].shape == (11, 2)
    assert torch.equal(rig.get(2), X.nonzero())
    assert rig.used == X.nbytes + 11 * 2 * 8


def test_a_failed_question_leaves_arguments_as_they_are() -> None:
    rig = Rig()
    rig.put(b1=X, b2=torch.ones(7, dtype=torch.float64))
    with pytest.raises(Poisoned):
        perform(rig, "aten.add_.Tensor", Slot(0), Slot(1), inputs=(1, 2))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator, failure.cause) == ("operator", "aten.add_.Tensor", "RuntimeError")
    assert "must match the size" in failure.message
    assert torch.equal(rig.get(1), X)


# ---- failures


def test_a_failed_operator_voids_its_outputs_and_the_rest_goes_on(rig: Rig) -> None:
    rig.do(Operate((3, 11, 12, 20, 1, 20, 11, 21, 1, 11, 12, 22), (1.0, 2.0)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator, failure.shapes) == ("operator", "aten.mm.default", "float64[4], float64[4]")
    assert failure_of(rig, 20) == failure_of(rig, 21) == failure
    assert torch.equal(rig.get(22), ONES * 3)


def test_what_a_failed_operator_may_have_written_is_void(rig: Rig) -> None:
    rig.put(b14=torch.ones(3, dtype=torch.float64))
    rig.do(Operate((2, 11, 14, 1, 11, 12, 20, 2, 12, 20), (1.0,)))
    (failure,) = rig.failures
    assert failure.operator == "aten.mul_.Tensor"
    assert failure_of(rig, 11) == failure_of(rig, 20) == failure_of(rig, 12) == failure
    assert torch.equal(rig.get(13), ONES)
    rig.put(b11=ONES)
    assert torch.equal(rig.get(11), ONES)


def test_a_kernel_that_is_not_allowed_voids_what_it_would_have_written(rig: Rig) -> None:
    rig.do(
        Define(5, Kernel("aten.set_.source_Storage", (Slot(0), Slot(1)), {}, 2, 0)),
        Define(6, Kernel("aten.save.default", (Slot(0), "/tmp/x"), {}, 1, 0, (FOUR,))),
        Operate((5, 11, 12, 6, 13, 30, 1, 11, 12, 20, 1, 12, 12, 21), (1.0, 1.0)),
    )
    assert all("allow-list" in failure.message for failure in rig.failures)
    assert failure_of(rig, 11) == failure_of(rig, 20) == rig.failures[0]
    assert failure_of(rig, 30) == rig.failures[1]
    assert torch.equal(rig.get(21), ONES * 2)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (Strided("float64", (5,), (1,)), r"returned torch.float64 \[4\] where torch.float64 \[5\]"),
        (Strided("float32", (4,), (1,)), r"where torch.float32 \[4\]"),
        (Strided("float64", (2, 2), (2, 1)), r"where torch.float64 \[2, 2\]"),
    ],
)
def test_another_result_than_was_told_is_a_failure(rig: Rig, told: Strided, problem: str) -> None:
    rig.do(Define(5, Kernel("aten.neg.default", (Slot(0),), {}, 1, 0, (told,))), Operate((5, 11, 20)))
    assert failure_of(rig, 20).kind == "operator"
    with pytest.raises(Poisoned, match=problem):
        rig.get(20)


def test_a_view_is_never_laid_out_anew(rig: Rig) -> None:
    told = Strided("float64", (2, 2), (1, 2))
    rig.do(Define(5, Kernel("aten.view.default", (Slot(0), Items((2, 2))), {}, 1, 0, (told,))), Operate((5, 11, 20)))
    assert "view with strides [2, 1]" in failure_of(rig, 20).message


@pytest.mark.parametrize(
    "instruction",
    [
        Operate((99, 1)), Operate((1,)), Operate((1, 11)), Operate((1, 11, 12), (1.0,)), Operate((1, 11, 12, 20)),
        Operate((FREE,)), Operate((1, 11, 12, 20), (1.0, 2.0)), Operate((-1, 11, 12)), Operate((), (1.0,)),
        Operate((1, 98, 12, 20), (1.0,)), Operate((50, 11, 20)),
        Replay(1, (), ()), Replay(99, (), ()), Replay(51, (11,), (20,), (1.0,)), Replay(51, (11, 12), (20,)),
        Replay(51, (11, 12), (), (1.0,)), Replay(51, (11, 12), (20,), (1.0, 2.0)), Replay(51, (11, 11), (20,), (1.0,)),
        Replay(51, (11, 98), (20,), (1.0,)),
        Define(60, Kernel("aten.add.Tensor", (Slot(2), Slot(1)), {}, 2, 0)),
        Define(60, Kernel("aten.add.Tensor", (Slot(-1), Slot(1)), {}, 2, 0)),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {"alpha": Hole(0)}, 2, 0)),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {"alpha": Hole(-1)}, 2, 1)),
        Define(60, Kernel("aten.cat.default", (Items((Slot(0), Slot(7))),), {}, 1, 0)),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {}, -1, 0)),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {}, 2, 0, (FOUR, FOUR))),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {}, 2, 0, (Strided("float64", (4,), ()),))),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {}, 2, 0, (Strided("object", (4,), (1,)),))),
        Define(60, Kernel("aten.add.Tensor", (Slot(0), Slot(1)), {}, 2, 0, (Strided("float64", (-4,), (1,)),))),
        Define(60, Kernel("aten.randn.generator", (Items((4,)),), {"generator": Source(99)}, 0, 0)),
        Define(60, Kernel("aten.randn.generator", (Items((4,)),), {"generator": Source(1)}, 0, 0)),
        Define(60, Kernel("aten.nothing.default", (), {}, 0, 0)), Define(60, Kernel("", (), {}, 10**12, 10**12)),
        Define(FREE, ADD), Define(60, Generator(2**63 - 1)), Define(60, Block((99, 0, 1), 1, (), 0)),
        Define(60, Block((1, 0, 1), 2, (), 1)), Define(60, Block((1, 0, 1, 3), 2, (), 1)),
        Define(60, Block((1, 0, 1, 0), 2, (), 1)), Define(60, Block((1, 0, 2, 2), 2, (), 1)),
        Define(60, Block((1, 0, -1, 2), 2, (), 1)), Define(60, Block((1, 0, 1, 2), 2, (), 0)),
        Define(60, Block((1, 0, 1, 2), 2, (), 2)), Define(60, Block((1, 0, 1, 2), 2, (3,), 1)),
        Define(60, Block((1, 0, 1, 2, FREE, 2), 2, (2,), 1)), Define(60, Block((FREE, 0, 1, 0, 1, 2), 2, (2,), 1)),
        Define(60, Block((1, 0, 1, 2, FREE), 2, (2,), 1)), Define(60, Block((FREE, 0, FREE, 0), 2, (), 0)),
        Define(60, Block((), -1, (), 0)), Define(60, Block((), 10**15, (), 0)), Define(60, Block((), 0, (-1,), 0)),
        Define(60, Block((), 0, (), -3)), Define(60, Block((51,), 0, (), 0)),
        Perform(ADD, (11, 12), (1.0,), 30), Perform(MUL_, (11,), (), 30), Perform(MUL_, (11, 98), (), 30),
        Perform(Kernel("aten.save.default", (Slot(0), "x"), {}, 1, 0), (11,), (), 30),
        SetGenerator(98, 1), SetGenerator(1, 1), SetGenerator(0, None), SetGenerator(98, None),
        Ask("generator", (98,)), Ask("generator", (1,)),
    ],
)  # fmt: skip
def test_a_wrong_instruction_is_a_failure_and_the_machine_goes_on(rig: Rig, instruction: Any) -> None:
    rig.do(Define(51, Block((1, 0, 1, 2), 2, (2,), 1)))
    before = rig.machine.store.used_bytes
    try:
        rig.do(instruction, frames=[b"123"] if isinstance(instruction, SetGenerator) else [])
    except Poisoned:
        assert isinstance(instruction, Perform | Ask)
    if instruction == Define(60, Generator(2**63 - 1)):
        assert rig.failures == []
        return
    assert rig.failures
    assert rig.failures[0].message
    assert rig.machine.store.used_bytes <= before
    rig.failures.clear()
    rig.put(b61=ONES)
    rig.do(Operate((1, 61, 61, 62), (1.0,)))
    assert torch.equal(rig.get(62), ONES * 2)
    assert rig.failures == []


def test_arguments_of_other_kinds_are_the_operators_own_business(rig: Rig) -> None:
    for number, kernel in enumerate(
        (
            Kernel("aten.neg.default", ("text",), {}, 0, 0, (FOUR,)),
            Kernel("aten.neg.default", (), {"nothing": 3}, 0, 0, (FOUR,)),
            Kernel("aten.neg.default", (Items((Slot(0),)),), {}, 1, 0, (FOUR,)),
            Kernel("aten.add.Tensor", (Slot(0), Complex(1.0, 2.0)), {}, 1, 0, (FOUR,)),
        ),
        70,
    ):
        rig.do(Define(number, kernel), Operate((number, *(11,) * kernel.inputs, 100 + number)))
        assert failure_of(rig, 100 + number).kind == "operator"


def test_a_fault_voids_what_all_calls_would_have_written() -> None:
    rig = Rig(faults=(Fault("error", "operate", 1), Fault("memory", "replay", 1)))
    rig.do(Define(1, ADD), Define(2, MUL_), Define(9, Block((2, 0, 1, 1, 0, 1, 2, FREE, 1), 2, (2,), 1)))
    rig.put(b11=ONES, b12=ONES, b13=ONES, b14=ONES)
    rig.do(Operate((2, 11, 12, 1, 12, 12, 20, FREE, 12), (1.0,)))
    assert failure_of(rig, 11) == failure_of(rig, 20) == rig.failures[0]
    assert "no buffer 12" in failure_of(rig, 12).message
    rig.failures.clear()
    rig.do(Replay(9, (13, 14), (21,), (1.0,)))
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert failure_of(rig, 13) == failure_of(rig, 21) == rig.failures[0]
    assert "no buffer 14" in failure_of(rig, 14).message


# ---- memory


def test_the_quota_names_the_operator() -> None:
    rig = Rig(quota_bytes=3 * 32)
    rig.do(Define(1, ADD))
    rig.put(b11=ONES, b12=ONES)
    rig.do(Operate((1, 11, 12, 20, 1, 11, 12, 21), (1.0, 1.0)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("memory", "aten.add.Tensor")
    assert "quota" in failure.message
    assert torch.equal(rig.get(20), ONES * 2)
    assert failure_of(rig, 21) == failure
    rig.do(Operate((FREE, 20, 1, 11, 12, 21), (1.0,)))
    assert torch.equal(rig.get(21), ONES * 2)


def test_what_grows_counts_against_the_quota() -> None:
    rig = Rig(quota_bytes=100)
    rig.put(b1=ONES)
    rig.do(Define(1, Kernel("aten.resize_.default", (Slot(0), Items((20,))), {}, 1, 0)), Operate((1, 1)))
    assert [(failure.kind, failure.operator) for failure in rig.failures] == [("memory", "aten.resize_.default")]
    assert rig.used == 0


@pytest.mark.parametrize("replays", [0, 1, 2], ids=["first", "second", "third"])
def test_a_block_that_does_not_fit_fails_at_the_operator_that_does_not(replays: int) -> None:
    calls = (1, 0, 0, 1, FREE, 1, 1, 0, 0, 2, 1, 2, 0, 3, FREE, 2)
    rig = Rig()
    rig.do(Define(1, ADD), Define(9, Block(calls, 1, (3,), 3)))
    rig.put(b1=ONES)
    for _ in range(replays):
        rig.do(Replay(9, (1,), (2,), (1.0, 1.0, 1.0)), Free((2,)))
    rig.machine.store.quota_bytes = 2 * 32
    rig.do(Replay(9, (1,), (2,), (1.0, 1.0, 1.0)))
    assert [(failure.kind, failure.operator) for failure in rig.failures] == [("memory", "aten.add.Tensor")]
    assert failure_of(rig, 2) == rig.failures[0]
    assert rig.used == 32
    rig.machine.store.quota_bytes = 3 * 32
    rig.failures.clear()
    rig.do(Replay(9, (1,), (2,), (1.0, 1.0, 1.0)))
    assert torch.equal(rig.get(2), ONES * 3)
    assert rig.failures == []


def test_the_peak_of_a_block_is_that_of_its_operators() -> None:
    rig = Rig()
    rig.do(Define(1, ADD), Define(9, Block((1, 0, 0, 1, 1, 1, 0, 2, FREE, 1, FREE, 0), 1, (2,), 2)))
    for _ in range(3):
        rig.put(b1=ONES)
        rig.do(Ask("peak"), Replay(9, (1,), (2,), (1.0, 1.0)))
        (told,) = rig.do(Ask("memory"))
        assert told == Memory(32, 3 * 32, 0)
        rig.do(Free((2,)))


# ---- blocks


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Views, operators in place and others over a few buffers of 3 x 4, some of which end."""
    script = Script(X, X * 0.5 - 1, X.flip(0))
    squares = [1, 2, 3]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.integers(0, 9))
        a, b = (Ref(draw(st.sampled_from(squares))) for _ in range(2))
        if kind == 0:
            squares += script.run(aten.add.Tensor, a, b, alpha=draw(st.sampled_from([0.5, -1.0])))
        elif kind == 1:
            squares += script.run(aten.view.default, a, [3, 4])
        elif kind == 2:
            script.run(aten.mul_.Scalar, a, draw(st.sampled_from([0.5, 2.0])))
        elif kind == 3:
            (part,) = script.run(aten.slice.Tensor, a, 1, 0, 2)
            script.run(aten.sub_.Tensor, Ref(part), Ref(part), alpha=0.25)
        elif kind == 4:
            script.run(aten.copy_.default, a, b)
        elif kind == 5:
            (joined,) = script.run(aten.cat.default, [a, b], 0)
            squares += script.run(aten.split.Tensor, Ref(joined), 3)
        elif kind == 6 and a != b:
            script.run(aten._foreach_lerp_.Scalar, [a], [b], 0.5)
        elif kind == 7:
            squares.append(script.run(aten.max.dim, a, 0, True)[0] and script.run(aten.relu.default, b)[0])
        elif kind == 8 and len(squares) > 1:
            squares.remove(a.number)
            script.free(a.number)
        elif kind == 9:
            script.run(aten.add.out, a, b, out=Ref(draw(st.sampled_from(squares))))
    return script


@given(scripts(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_block_does_what_its_calls_do(script: Script, again: bool) -> None:
    single = on_a_worker(script)
    script.check(single)
    assert single.used == bytes_held(script)
    rig = Rig()
    rig.do(*script.definitions(), Define(9, script.block()))
    for _ in range(3 if again else 2):
        script.put(rig)
        rig.do(script.replay(9))
        script.check(rig)
        assert rig.used == bytes_held(script)
        assert rig.machine.store.peak_bytes == single.machine.store.peak_bytes
        rig.do(Free(tuple(script.tensors)))
        assert rig.used == 0
        rig.do(Ask("peak"))


@pytest.mark.parametrize("replays", [0, 1, 2], ids=["first", "second", "third"])
def test_a_failure_in_a_block_voids_what_depends_on_it(replays: int) -> None:
    """The operator in place fails where its second argument has three elements."""
    rig = Rig()
    rig.do(Define(1, ADD), Define(2, MUL_))
    calls = (1, 0, 1, 4, 2, 0, 2, 1, 0, 1, 5, 1, 1, 1, 6, 1, 5, 6, 7, FREE, 5, FREE, 3)
    rig.do(Define(9, Block(calls, 4, (4, 6, 7), 4)))
    inputs, outputs, floats = (11, 12, 13, 14), (21, 22, 23), (1.0,) * 4
    for _ in range(replays):
        rig.put(b11=ONES, b12=ONES, b13=ONES, b14=ONES)
        rig.do(Replay(9, inputs, outputs, floats))
        assert torch.equal(rig.get(23), ONES * 4)
        assert "no buffer 14" in failure_of(rig, 14).message
        rig.failures.clear()
    rig.put(b11=ONES, b12=ONES, b13=torch.ones(3, dtype=torch.float64), b14=ONES)
    rig.do(Replay(9, inputs, outputs, floats))
    (failure,) = rig.failures
    assert (failure.operator, failure.shapes) == ("aten.mul_.Tensor", "float64[4], float64[3]")
    assert failure_of(rig, 11) == failure_of(rig, 23) == failure
    assert torch.equal(rig.get(21), ONES * 2)
    assert torch.equal(rig.get(22), ONES * 2)
    assert torch.equal(rig.get(12), ONES)
    rig.failures.clear()
    assert "no buffer 14" in failure_of(rig, 14).message
    rig.failures.clear()
    rig.put(b11=ONES, b13=ONES, b14=ONES)
    rig.do(Replay(9, inputs, outputs, floats))
    assert torch.equal(rig.get(23), ONES * 4)
    assert rig.failures == []


@pytest.mark.parametrize("replays", [0, 2])
def test_a_void_input_voids_what_is_made_of_it(rig: Rig, replays: int) -> None:
    rig.do(Define(9, Block((1, 0, 0, 2, 1, 1, 1, 3, 2, 1, 2), 2, (2, 3), 2)))
    for _ in range(replays):
        rig.do(Replay(9, (11, 12), (21, 22), (1.0, 1.0)))
        rig.put(b12=ONES)
    rig.do(Operate((3, 11, 12, 31)), Replay(9, (31, 12), (21, 22), (1.0, 1.0)))
    (failure,) = rig.failures
    assert failure.operator == "aten.mm.default"
    assert failure_of(rig, 21) == failure_of(rig, 12) == failure
    assert torch.equal(rig.get(22), ONES * 2)


def test_a_block_that_could_not_be_defined_voids_all_that_it_might_have_written(rig: Rig) -> None:
    rig.do(Define(9, Block((1, 0, 1, 2), 2, (5,), 1)), Replay(9, (11, 12), (20,), (1.0,)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("protocol", "define")
    assert failure_of(rig, 11) == failure_of(rig, 12) == failure_of(rig, 20) == failure
    assert torch.equal(rig.get(13), ONES)


def test_a_block_keeps_its_kernels(rig: Rig) -> None:
    rig.do(Define(9, Block((1, 0, 1, 2), 2, (2,), 1)), Free((), (1,)))
    for _ in range(2):
        rig.do(Replay(9, (11, 12), (20,), (2.0,)))
        assert torch.equal(rig.get(20), ONES * 3)
    assert rig.failures == []


def test_storages_that_grow_in_a_block_are_counted() -> None:
    script = Script(torch.zeros(2), torch.zeros(3))
    (view,) = script.run(aten.view.default, Ref(2), [3])
    script.run(aten.resize_.default, Ref(1), [40])
    script.run(aten.fill_.Scalar, Ref(1), 1)
    script.run(aten.resize_.default, Ref(view), [20])
    script.run(aten.fill_.Scalar, Ref(view), 2)
    rig = Rig()
    rig.do(*script.definitions(), Define(9, script.block()))
    for _ in range(3):
        script.put(rig)
        rig.do(script.replay(9))
        script.check(rig)
        assert rig.used == bytes_held(script) == 4 * 60
    rig.do(Free(tuple(script.tensors)))
    assert rig.used == 0


def test_every_operator_counts_as_progress(rig: Rig) -> None:
    rig.do(Define(9, Block((1, 0, 1, 2, FREE, 2, 2, 0, 1), 2, (), 1)))
    for instruction, count in (
        (Operate((1, 11, 12, 20, FREE, 20, 2, 11, 12), (1.0,)), 3),
        (Replay(9, (11, 12), (), (1.0,)), 3),
    ):
        for _ in range(2):
            before = rig.machine.progress.executed
            rig.do(instruction)
            assert rig.machine.progress.executed - before == count
            assert rig.machine.progress.doing == "aten.mul_.Tensor"


def test_an_answer_is_as_of_its_place_in_the_stream(rig: Rig) -> None:
    rig.put(b12=ONES * 2)
    rig.do(Define(9, Block((2, 0, 1), 2, (), 0)), Replay(9, (13, 11), ()))
    rig.do(Get((11,)), Operate((2, 11, 12)), Get((11,)), Replay(9, (11, 12), ()), Get((11,)))
    values = [torch.frombuffer(bytearray(frame), dtype=torch.float64)[0].item() for frame in rig.machine.frames_out]
    assert values == [1.0, 2.0, 4.0]


# ---- random numbers


def normal(source: int, number: int) -> Define:
    keywords = {"generator": Source(source), "dtype": None, "device": OwnDevice()}
    told = Strided("float32", (5,), (1,))
    return Define(number, Kernel("aten.randn.generator", (Items((5,)),), keywords, 0, 0, (told,)))


def drawn(rig: Rig, kernel: int) -> Tensor:
    rig.do(Operate((kernel, 90)))
    return rig.get(90)


@pytest.mark.parametrize("number", [0, 7])
def test_a_generator_repeats_and_its_state_goes_there_and_back(number: int) -> None:
    rig = Rig()
    rig.do(Define(7, Generator(3)), normal(number, 8), SetGenerator(number, 3))
    first = drawn(rig, 8)
    assert torch.equal(first, torch.randn(5, generator=torch.Generator().manual_seed(3)))
    (told,) = rig.do(Ask("generator", (number,) if number else ()))
    assert isinstance(told, Tensors)
    state = bytes(rig.machine.frames_out[0])
    assert len(state) == told.specs[0].size_bytes
    second = drawn(rig, 8)
    assert not torch.equal(first, second)
    rig.do(SetGenerator(number, None), frames=[state])
    assert torch.equal(drawn(rig, 8), second)
    rig.do(SetGenerator(number, 3))
    assert torch.equal(drawn(rig, 8), first)
    assert rig.failures == []


def test_generators_are_apart_and_blocks_draw_anew() -> None:
    rig = Rig()
    rig.do(
        Define(6, Generator(1)),
        Define(7, Generator(1)),
        normal(6, 8),
        normal(7, 9),
        Define(10, Block((8, 0), 0, (0,), 0)),
    )
    mine = torch.Generator().manual_seed(1)
    for _ in range(3):
        rig.do(Replay(10, (), (91,)))
        assert torch.equal(rig.get(91), torch.randn(5, generator=mine))
    assert torch.equal(drawn(rig, 9), torch.randn(5, generator=torch.Generator().manual_seed(1)))


# ---- devices without values


def test_a_sim_device_has_shapes_and_no_values() -> None:
    rig = Rig(device=SimDevice())
    rig.do(
        Define(1, ADD), Define(2, MUL_), Define(9, Block((1, 0, 1, 2, 2, 2, 0), 2, (2,), 1)), Define(7, Generator(1))
    )
    rig.do(normal(7, 8))
    rig.put(b11=ONES, b12=ONES)
    rig.do(
        Operate((1, 11, 12, 20, 8, 22), (1.0,)), Replay(9, (11, 20), (21,), (1.0,)), Replay(9, (11, 20), (23,), (1.0,))
    )
    assert rig.failures == []
    assert rig.used == 5 * 32 + 20
    for ask in (
        Get((21,)),
        Perform(Kernel("aten.equal.default", (Slot(0), Slot(1)), {}, 2, 0), (11, 12), (), 50),
        Perform(Kernel("aten._local_scalar_dense.default", (Slot(0),), {}, 1, 0), (11,), (), 50),
        Perform(Kernel("aten.nonzero.default", (Slot(0),), {}, 1, 0), (11,), (), 50),
    ):
        with pytest.raises(Poisoned, match="no values") as caught:
            rig.do(ask)
        assert caught.value.failure.kind == "values"
    (made,) = rig.do(Perform(Kernel("aten.neg.default", (Slot(0),), {}, 1, 0), (11,), (), 50))
    assert made == Made((Strided("float64", (4,), (1,), 0, 32),), (Strided("float64", (4,), (1,), 0, 32),))
