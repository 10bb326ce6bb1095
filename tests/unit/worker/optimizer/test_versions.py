"""Versions of parameters on a worker: names that change, delays that are measured, bytes that are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.emulator.device import EmulatedDevice
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.wire.protocol.instructions import Branch, Call, Evict, Free, Offload, OptimizerStep, Prefetch, Rename, Step
from onebox.wire.protocol.requests import Define, OptimizerSpec, Routine, Run
from onebox.wire.protocol.responses import Delays, OptimizerState
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.optimizer import delay_compensation
from tests.unit.machines import Rig, define, elementwise
from tests.unit.programs import HOST

F64 = TensorSpec("float64", (2, 2))
RELU = elementwise("aten.relu.default", F64)
MM = elementwise("aten.mm.default", F64, 2)
W, OLD, AHEAD, GRAD, X = 1, 11, 21, 31, 41
START = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
SECOND = START.flip(0)
BYTES = START.nbytes


def gradient(step: int) -> Tensor:
    return torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def rig_with(kind: str = "SGD", delay: Any = "none", options: dict[str, Any] | None = None, **spec: Any) -> Rig:
    """A machine with two parameters, in buffers 1 and 2, an optimizer of them (7), and relu (100) and mm (101)."""
    rig = Rig()
    rig.put(b1=START, b2=SECOND)
    rig.do(define(100, RELU), define(101, MM))
    rig.do(Define(7, OptimizerSpec(kind, (((0, 1), options or {"lr": 0.1}),), (1, 2), delay=delay, **spec)))
    assert rig.failures == []
    return rig


def run(rig: Rig, step: int, *steps: Step, options: Any = (), **more: Any) -> list[Any]:
    """Run a routine once."""
    return rig.do(Define(900, Routine(steps, 0)), Run(900, step=step, options=options, **more), Free((), (900,)))


def branch(ahead: bool = False, behind: int = 0) -> Branch:
    return Branch(7, (11, 12), (21, 22) if ahead else (), behind)


def update(step: int, *, ahead: bool = False, members: tuple[int, ...] = (), age: int = 1) -> OptimizerStep:
    chosen = members or (0, 1)
    return OptimizerStep(
        7,
        tuple(31 + index for index in chosen),
        members=members,
        previous=tuple(11 + index for index in chosen),
        ahead=tuple(21 + index for index in chosen) if ahead else (),
        age=age,
    )


def put_gradients(rig: Rig, step: int) -> None:
    rig.put(b31=gradient(step), b32=gradient(step + 100))


class Reference:
    """Torch's own optimizer, and the versions that there should be."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.weights = [torch.nn.Parameter(START.clone()), torch.nn.Parameter(SECOND.clone())]
        self.optimizer = getattr(torch.optim, kind)(self.weights, **options)

    def values(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    def step(self, step: int) -> None:
        for index, weight in enumerate(self.weights):
            weight.grad = gradient(step + 100 * index)
        self.optimizer.step()


def assert_values(rig: Rig, numbers: tuple[int, ...], expected: list[Tensor]) -> None:
    for number, value in zip(numbers, expected, strict=True):
        torch.testing.assert_close(rig.get(number), value, rtol=0, atol=1e-12)


# ---- names that change


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Muon", "Adagrad"])
def test_previous_is_what_the_parameter_was(kind: str) -> None:
    rig, reference = rig_with(kind), Reference(kind, lr=0.1)
    rig.do(branch())
    for step in range(4):
        put_gradients(rig, step)
        was = reference.values()
        reference.step(step)
        run(rig, step + 1, update(step))
        assert_values(rig, (1, 2), reference.values())
        assert_values(rig, (11, 12), was)
    assert rig.failures == []


def test_views_of_what_the_parameter_was_stay_as_they_are() -> None:
    """Also a buffer that is the very tensor of the parameter, as a program hands on what it saves for backward."""
    same = with_deaths(Program((F64,), (), (0,), 1))
    turned = with_deaths(Program((F64,), (Operator("aten.t.default", (SlotArgument(0),), {}, (1,), (F64,)),), (1,), 2))
    rig = rig_with()
    rig.do(define(102, same), define(103, turned), branch())
    rig.do(Call(102, (1,), (50,)), Call(103, (1,), (51,)))
    put_gradients(rig, 0)
    run(rig, 1, update(0))
    assert rig.failures == []
    assert torch.equal(rig.get(50), START)
    assert torch.equal(rig.get(51), START.t())
    assert not torch.equal(rig.get(1), START)


def test_bytes_are_counted_to_the_last() -> None:
    rig = rig_with("SGD", options={"lr": 0.1, "momentum": 0.9})
    put_gradients(rig, 0)
    assert rig.used == 4 * BYTES
    rig.do(branch())
    assert rig.used == 6 * BYTES
    for step in range(3):
        run(rig, step + 1, update(step))
        assert rig.used == 8 * BYTES, "parameters, versions, gradients, momentum"
    rig.do(Free((1, 2, 11, 12, 31, 32), (7,)))
    assert rig.used == 0
    assert rig.failures == []


@pytest.mark.parametrize("delay", ["feedback", "lookahead"])
def test_what_a_treatment_remembers_is_counted_and_told(delay: str) -> None:
    rig = rig_with("SGD", delay, {"lr": 0.1, "momentum": 0.9})
    rig.do(branch())
    put_gradients(rig, 0)
    run(rig, 1, update(0))
    assert rig.used == 10 * BYTES, "as without, and the last update of each parameter"
    from onebox.wire.protocol.instructions import Ask

    (state,) = rig.do(Ask("optimizer", (7,)))
    assert isinstance(state, OptimizerState)
    assert [(entry.parameter, entry.key) for entry in state.entries] == [
        (index, key) for index in (0, 1) for key in ("late_update", "momentum_buffer")
    ]


def test_quota_has_no_room_for_versions() -> None:
    rig = Rig(quota_bytes=3 * BYTES)
    rig.put(b1=START, b2=SECOND)
    rig.do(Define(7, OptimizerSpec("SGD", (((0, 1), {"lr": 0.1}),), (1, 2))), branch())
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert rig.used == 2 * BYTES
    with pytest.raises(Poisoned):
        rig.get(11)


@pytest.mark.parametrize("options", [(), ({"lr": 0.5},)], ids=str)
def test_what_is_expected_at_first_is_by_the_options_that_come_with_it(options: Any) -> None:
    rig, reference = rig_with("SGD", "predict", {"lr": 0.1, "momentum": 0.9}), Reference("SGD", lr=0.1, momentum=0.9)
    put_gradients(rig, 0)
    reference.step(0)
    run(rig, 1, OptimizerStep(7, (31, 32)))
    rig.do(Branch(7, (11, 12), (21, 22), options=options))
    rate = options[0]["lr"] if options else 0.1
    momentum = [reference.optimizer.state[weight]["momentum_buffer"] for weight in reference.weights]
    now = reference.values()
    assert_values(rig, (11, 12), now)
    assert_values(rig, (21, 22), [weight - rate * each for weight, each in zip(now, momentum, strict=True)])
    assert rig.failures == []


# ---- members


def test_members_are_updated_and_no_others() -> None:
    rig, reference = rig_with("AdamW"), Reference("AdamW", lr=0.1)
    rig.do(branch())
    for step in range(3):
        put_gradients(rig, step)
        was = reference.values()
        reference.step(step)
        run(rig, step + 1, update(step, members=(1,)))
        if step == 0:
            assert_values(rig, (1, 11), [START, START])
        run(rig, step + 1, update(step, members=(0,)))
        assert_values(rig, (1, 2, 11, 12), [*reference.values(), *was])
    assert rig.used == 6 * BYTES + 4 * BYTES + 2 * 4, "two moments of each, and its counter"
    assert rig.failures == []


@pytest.mark.parametrize(
    ("members", "gradients"), [((0, 0), 2), ((2,), 1), ((-1,), 1), ((0,), 2), ((0, 1, 0), 3), ((1,), 0), ((), 1)]
)
def test_members_that_are_none(members: tuple[int, ...], gradients: int) -> None:
    rig = rig_with()
    put_gradients(rig, 0)
    rig.do(OptimizerStep(7, (31, 32, 31)[:gradients], members=members))
    assert [failure.kind for failure in rig.failures] == ["protocol"]
    with pytest.raises(Poisoned):
        rig.get(1)


def test_members_with_clipping_of_a_norm_that_is_given() -> None:
    rig = rig_with("SGD", options={"lr": 1.0})
    rig.put(b31=torch.ones(2, 2, dtype=torch.float64), b60=torch.tensor(64.0, dtype=torch.float64))
    rig.do(OptimizerStep(7, (31,), max_norm=2.0, square_norm=60, members=(0,)))
    torch.testing.assert_close(rig.get(1), START - 2.0 / (8.0 + 1e-6), rtol=0, atol=1e-12)
    assert torch.equal(rig.get(2), SECOND)


# ---- treatments through the machine


def test_feedback_adds_the_difference_of_updates() -> None:
    rig = rig_with("SGD", "feedback", {"lr": 0.5})
    rig.do(branch())
    expected, last = [START, SECOND], None
    for step in range(4):
        put_gradients(rig, step)
        updates = [-0.5 * gradient(step), -0.5 * gradient(step + 100)]
        extra = [u - v for u, v in zip(updates, last, strict=True)] if last else [0 * u for u in updates]
        expected = [w + u + e for w, u, e in zip(expected, updates, extra, strict=True)]
        last = updates
        run(rig, step + 1, update(step))
        assert_values(rig, (1, 2), expected)
    assert rig.failures == []


def test_steps_that_are_not_late_are_not_treated() -> None:
    rig, reference = rig_with("SGD", "feedback"), Reference("SGD", lr=0.1)
    for step in range(3):
        put_gradients(rig, step)
        reference.step(step)
        rig.do(OptimizerStep(7, (31, 32)))
        assert_values(rig, (1, 2), reference.values())


@pytest.mark.parametrize(
    ("kind", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.1}), ("Muon", {"lr": 0.1})]
)
def test_predict_keeps_the_master_and_moves_what_is_ahead(kind: str, options: dict[str, Any]) -> None:
    from onebox.worker.optimizer.delay_compensation import expected_update

    rig, reference = rig_with(kind, "predict", options), Reference(kind, **options)
    put_gradients(rig, 0)
    rig.do(OptimizerStep(7, (31, 32)))  # warm-up, so that there is momentum
    reference.step(0)

    def expected() -> list[Tensor]:
        group = reference.optimizer.param_groups[0]
        found = []
        for weight in reference.weights:
            update = expected_update(kind, group, reference.optimizer.state[weight], weight.detach())
            assert update is not None
            found.append(weight.detach() + update)
        return found

    rig.do(branch(ahead=True))
    assert_values(rig, (1, 2, 11, 12), [*reference.values(), *reference.values()])
    was = expected()
    assert_values(rig, (21, 22), was)
    for step in range(1, 4):
        put_gradients(rig, step)
        reference.step(step)
        run(rig, step + 1, update(step, ahead=True))
        assert_values(rig, (1, 2), reference.values())
        assert_values(rig, (11, 12), was)
        was = expected()
        assert_values(rig, (21, 22), was)
    assert rig.failures == []


@pytest.mark.parametrize(("kind", "delay"), [("Adagrad", "predict"), ("Adagrad", "lookahead"), ("RMSprop", "predict")])
def test_a_treatment_that_an_optimizer_cannot_have(kind: str, delay: Any) -> None:
    rig = Rig()
    rig.put(b1=START)
    rig.do(Define(7, OptimizerSpec(kind, (((0,), {"lr": 0.1}),), (1,), delay=delay)))
    assert [failure.kind for failure in rig.failures] == ["protocol"]
    assert kind in rig.failures[0].message


# ---- delays that are measured


def test_delays_are_what_the_calls_read() -> None:
    """A fill window, two steady ones and a drain, as a schedule would have them."""
    rig = rig_with()
    for number in (31, 32):
        rig.put(**{f"b{number}": gradient(number)})
    head, tail = Call(100, (11,), (50,)), Call(101, (11, 11), (51,), age=1)
    both = Call(101, (11, 12), (52,))
    assert run(rig, 5, branch(), both) == []
    early = Call(101, (1, 2), (52,))  # reads the newest before the update makes that the one before
    assert run(rig, 6, early, tail, update(5), head, both) == [Delays(((0, 2),))]
    assert run(rig, 7, early, tail, update(6), head, both) == [Delays(((1, 2),))]
    assert run(rig, 7, update(7, age=0)) == [Delays(((1, 2),))]
    assert run(rig, 8, both) == []
    assert run(rig, 9, update(8)) == [Delays(((1, 2),))]
    assert rig.failures == []


def test_a_schedule_that_breaks_its_rule_is_found_out() -> None:
    rig = rig_with()
    rig.do(branch())
    put_gradients(rig, 0)
    run(rig, 0, Call(100, (11,), (50,)))
    run(rig, 1, update(0))
    run(rig, 1, Call(100, (1,), (50,)), Call(100, (11,), (50,)))  # forward reads the newest, backward another one
    assert run(rig, 2, update(1)) == [Delays(((1, 1),), mixed=1, unread=1)]
    run(rig, 2, Call(101, (1, 2), (50,)))
    assert run(rig, 3, update(2)) == [Delays(((0, 2),))], "gradients of the newest weights are not late"
    run(rig, 3, Call(101, (11, 12), (50,)))
    put_gradients(rig, 1)
    run(rig, 3, update(9, age=0))
    assert run(rig, 4, Call(101, (11, 12), (50,)), update(9), update(9, age=0)) == [
        Delays((), unread=2),
        Delays(((2, 2),)),
    ]


def test_what_is_written_over_a_version_is_none() -> None:
    rig = rig_with()
    rig.do(branch())
    put_gradients(rig, 0)
    rig.put(b11=SECOND)
    run(rig, 0, Call(100, (11,), (50,)))
    run(rig, 1, update(0))
    assert "holds something else" in rig.failures[0].message


def test_without_versions_nothing_is_answered() -> None:
    rig = rig_with()
    put_gradients(rig, 0)
    assert run(rig, 0, Call(100, (1,), (50,)), OptimizerStep(7, (31, 32))) == []


def test_only_the_last_steps_are_remembered() -> None:
    rig = rig_with()
    rig.do(branch())
    put_gradients(rig, 0)
    for step in range(10):
        run(rig, step, Call(100, (11,), (50,)))
    assert run(rig, 9, update(9, age=0)) == [Delays(((0, 1),), unread=1)]
    assert run(rig, 1, update(1, age=0)) == [Delays((), unread=2)]


def test_versions_that_are_there_already_go_on() -> None:
    rig = rig_with()
    rig.put(b11=SECOND, b12=START)
    rig.do(branch(behind=1))
    assert_values(rig, (11, 12), [SECOND, START])
    put_gradients(rig, 0)
    run(rig, 3, Call(101, (11, 12), (50,)))
    assert run(rig, 4, update(3)) == [Delays(((1, 2),))]
    assert_values(rig, (11, 12), [START, SECOND])
    assert rig.failures == []


# ---- instructions that are wrong


@pytest.mark.parametrize(
    "wrong",
    [
        Branch(8, (11, 12)),
        Branch(7, (11,)),
        Branch(7, (11, 12), (21, 22)),
        Branch(7, (11, 11)),
        Branch(7, (1, 12)),
        Branch(7, (11, 12), behind=-1),
        Branch(7, (11, 12), behind=1),
        Branch(100, (11, 12)),
    ],
)
def test_a_branch_that_cannot_be(wrong: Branch) -> None:
    rig = rig_with()
    rig.do(wrong)
    assert len(rig.failures) == 1
    assert rig.failures[0].kind == "protocol"
    rig.do(branch())
    assert len(rig.failures) == 1, "nothing of it is left"


@pytest.mark.parametrize(
    "wrong",
    [
        {"previous": (11,)},
        {"previous": (12, 11)},
        {"previous": (11, 11)},
        {"previous": (1, 2)},
        {"previous": (11, 60)},
        {"previous": (11, 12), "ahead": (21, 22)},
        {"ahead": (21, 22)},
        {"previous": (11, 12), "age": -1},
        {"age": -1},
    ],
)
def test_an_update_of_versions_that_cannot_be(wrong: dict[str, Any]) -> None:
    rig = rig_with()
    rig.put(b60=START)
    rig.do(branch())
    put_gradients(rig, 0)
    rig.do(OptimizerStep(7, (31, 32), **wrong))
    assert len(rig.failures) == 1
    assert rig.failures[0].kind == "protocol"
    with pytest.raises(Poisoned):
        rig.get(1)


def test_an_update_before_versions_began() -> None:
    rig = rig_with()
    put_gradients(rig, 0)
    rig.put(b11=START, b12=START)
    rig.do(update(0))
    assert "begin with 'branch'" in rig.failures[0].message


def test_a_void_gradient_voids_parameters_and_versions() -> None:
    rig = rig_with()
    rig.do(branch(), Call(100, (99,), (31,)), Call(100, (1,), (32,)), update(0))
    assert len(rig.failures) == 1
    for number in (1, 2, 11, 12):
        with pytest.raises(Poisoned):
            rig.get(number)


def test_a_negative_age_of_a_call() -> None:
    rig = rig_with()
    rig.do(Call(100, (1,), (50,), age=-1))
    assert "age" in rig.failures[0].message


def test_an_age_is_the_seed_of_an_earlier_step() -> None:
    rand = Operator("aten.rand_like.default", (SlotArgument(0),), {}, (1,), (F64,), (), 0)
    rig = rig_with()
    rig.do(define(102, with_deaths(Program((F64,), (rand,), (1,), 2))))
    run(rig, 4, Call(102, (1,), (50,), micro_batch=3), seed=9)
    run(rig, 5, Call(102, (1,), (51,), micro_batch=3, age=1), Call(102, (1,), (52,), micro_batch=3), seed=9)
    assert torch.equal(rig.get(50), rig.get(51))
    assert not torch.equal(rig.get(50), rig.get(52))


# ---- options


def test_gradients_are_applied_with_the_options_of_their_step() -> None:
    rig = rig_with("SGD", options={"lr": 1.0})
    rig.do(branch())
    rig.put(b31=torch.ones(2, 2, dtype=torch.float64), b32=torch.zeros(2, 2, dtype=torch.float64))
    expected = START
    run(rig, 0, Call(100, (11,), (50,)), options=({"lr": 0.5},), optimizer=7)
    for step, lr in ((1, 0.25), (2, 0.125), (3, 0.0625)):
        run(rig, step, update(step - 1), options=({"lr": lr},))
        expected = expected - 2 * lr
        assert_values(rig, (1,), [expected])
    run(rig, 3, update(3, age=0))
    assert_values(rig, (1,), [expected - 0.0625])


def test_options_for_what_is_no_optimizer_are_passed_over() -> None:
    rig = rig_with()
    run(rig, 0, options=({"lr": 0.5},), optimizer=12345)
    rig.do(Free((), (7,)))
    assert rig.failures == []


# ---- renaming


def test_renaming_is_all_at_once() -> None:
    rig = Rig()
    rig.put(b1=START, b2=SECOND, b3=START + 1, b4=START + 2)
    rig.do(Rename((1, 2, 3), (2, 1, 4)))
    assert_values(rig, (1, 2, 4), [SECOND, START, START + 1])
    assert rig.used == 3 * BYTES
    with pytest.raises(Poisoned, match="no buffer 3"):
        rig.get(3)


@pytest.mark.parametrize(
    "wrong", [Rename((1, 2), (5,)), Rename((1, 1), (5, 6)), Rename((1, 2), (5, 5)), Rename((9,), (5,))]
)
def test_a_renaming_that_cannot_be(wrong: Rename) -> None:
    rig = Rig()
    rig.put(b1=START, b2=SECOND)
    rig.do(wrong)
    assert [failure.kind for failure in rig.failures] == ["protocol"]
    assert_values(rig, (1, 2), [START, SECOND])
    with pytest.raises(Poisoned):
        rig.get(5)


@pytest.mark.parametrize("wrong", [Rename((1,), (60,)), Rename((60,), (11,)), Rename((11,), (1,))])
def test_versions_are_not_renamed(wrong: Rename) -> None:
    rig = rig_with()
    rig.put(b60=START)
    rig.do(branch(), wrong)
    assert "version of a parameter" in rig.failures[0].message


def test_what_is_void_stays_so_under_its_new_name() -> None:
    rig = Rig()
    rig.do(define(100, RELU), Call(100, (9,), (1,)), Rename((1,), (2,)))
    assert len(rig.failures) == 1
    with pytest.raises(Poisoned) as caught:
        rig.get(2)
    assert caught.value.failure == rig.failures[0]


@pytest.mark.parametrize("when", ["offloaded", "evicted", "coming back"])
def test_what_is_in_the_hosts_memory_is_renamed_there(when: str) -> None:
    rig = Rig()
    rig.put(b1=START, b2=SECOND)
    rig.do(Offload((1, 2)))
    if when != "offloaded":
        rig.do(Evict((1, 2)))
    if when == "coming back":
        rig.do(Prefetch((1, 2)))
    rig.do(Rename((1, 2), (2, 3)), Rename((2,), (1,)))
    if when == "offloaded":
        rig.do(Evict((1, 3)))
    if when != "coming back":
        rig.do(Prefetch((3, 1)))
    assert rig.failures == []
    assert_values(rig, (1, 3), [START, SECOND])
    rig.do(Free((1, 3)))
    assert rig.used == 0
    assert rig.machine.host.used_bytes == 0
    rig.machine.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_renaming_any_buffers_keeps_every_byte(data: st.DataObject) -> None:
    rig = Rig()
    held = {number: torch.full((number,), float(number)) for number in range(1, 7)}
    rig.put(**{f"b{number}": tensor for number, tensor in held.items()})
    for _ in range(3):
        numbers = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True, min_size=1) if held else st.just([]))
        into = data.draw(st.permutations(range(1, 9)))[: len(numbers)]
        rig.do(Rename(tuple(numbers), tuple(into)))
        moved = {new: held[old] for old, new in zip(numbers, into, strict=True)}
        held = {n: t for n, t in held.items() if n not in numbers and n not in into} | moved
        assert rig.used == sum(tensor.nbytes for tensor in held.values())
        assert len(rig.machine.store) == len(held)
        for number, tensor in held.items():
            assert torch.equal(rig.get(number), tensor)
    assert rig.failures == []


# ---- other devices


@pytest.mark.parametrize("delay", ["none", "predict", "extrapolate", "lookahead", "both", "feedback"])
@pytest.mark.parametrize(("kind", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {}), ("Muon", {})])
def test_a_sim_device_takes_the_same_bytes(kind: str, options: dict[str, Any], delay: Any) -> None:
    ahead = delay in delay_compensation.AHEAD
    used = []
    for device in (None, EmulatedDevice(1.0)):
        rig = Rig(device=device)
        rig.put(b1=START, b2=SECOND, b31=START, b32=START)
        rig.do(Define(7, OptimizerSpec(kind, (((0, 1), options),), (1, 2), delay=delay)), branch(ahead))
        for step in range(2):
            answers = run(
                rig, step + 1, update(step, ahead=ahead, members=(1,)), update(step, ahead=ahead, members=(0,))
            )
            assert answers == [Delays((), unread=1)] * 2
        assert rig.failures == []
        used.append((rig.used, rig.machine.store.peak_bytes))
    assert used[0] == used[1]


@pytest.mark.parametrize("delay", ["none", "predict", "extrapolate", "lookahead", "both", "feedback"])
def test_an_optimizer_on_the_host_does_the_same(delay: Any) -> None:
    ahead = delay in delay_compensation.AHEAD
    found = []
    for host in (False, True):
        rig = rig_with("AdamW", delay, host=host)
        rig.do(branch(ahead))
        for step in range(3):
            put_gradients(rig, step)
            run(rig, step + 1, update(step, ahead=ahead))
        assert rig.failures == []
        found.append([rig.get(number) for number in (1, 2, 11, 12)])
        assert (rig.machine.host.used_bytes > 0) is host
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("delay", ["none", "lookahead", "feedback"])
def test_copies_of_a_gpus_parameters_are_stepped_where_these_come_to_lie(
    delay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose optimizer is on the host, but for the GPU."""
    from onebox.worker.optimizer.host_parameters import HostParameters
    from onebox.worker.optimizer.native import NativeOptimizer

    plain = rig_with("AdamW", delay)
    monkeypatch.setattr(
        NativeOptimizer,
        "_copies",
        lambda optimizer, parameters: HostParameters(parameters, HOST, run_bytes=BYTES),
    )
    copied = rig_with("AdamW", delay, host=True)
    for rig in (plain, copied):
        rig.do(branch())
        for step in range(3):
            put_gradients(rig, step)
            run(rig, step + 1, update(step, members=(1,)), update(step, members=(0,)))
        assert rig.failures == []
    for number in (1, 2, 11, 12):
        assert torch.equal(plain.get(number), copied.get(number))


def test_a_state_of_many_outputs_is_not_mistaken_for_a_version() -> None:
    """A program that gives out a parameter's version under its own number voids nothing, and is no version."""
    twice = with_deaths(
        Program((F64,), (Operator("aten.add.Tensor", (SlotArgument(0), SlotArgument(0)), {}, (1,), (F64,)),), (1,), 2)
    )
    rig = rig_with()
    rig.do(define(102, twice), branch(), Call(102, (11,), (11,)))
    put_gradients(rig, 0)
    run(rig, 1, update(0))
    assert "holds something else" in rig.failures[0].message
