"""After a failure nothing later in a device's stream takes effect until the script has been told; then it goes on."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onebox
from onebox.errors import OperatorError
from onebox.vgpu import set_synchronous, spawn

QUOTA = 64 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu*2", threads=1, memory=QUOTA) as opened:
        yield opened


def sync(number: int) -> None:
    torch.vgpu.synchronize(number)  # type: ignore[attr-defined]


def fail(number: int = 0) -> Tensor:
    """Issue an operator that fails on a device, without waiting."""
    place = f"vgpu:{number}"
    return nn.functional.embedding(torch.tensor([9], device=place), torch.ones(4, 3, device=place))


def exhaust(number: int = 0) -> Tensor:
    return torch.empty(QUOTA // 4 + 1, device=f"vgpu:{number}")


def told(call: Callable[[], Any], match: str = "embedding") -> None:
    with pytest.raises((OperatorError, torch.OutOfMemoryError), match=match):
        call()


# ---- one device


def _read(x: Tensor) -> object:
    return x.tolist()


def _backward_hook(x: Tensor) -> None:
    leaf = torch.ones(1, device=x.device, requires_grad=True)
    out = leaf * 2
    out.register_hook(lambda gradient: print(gradient.item()))
    out.sum().backward()


READS: dict[str, Callable[[Tensor], object]] = {
    "tolist": _read,
    "item": lambda x: x[0].item(),
    "print": print,
    "if": lambda x: bool(x[0] > 0),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.cpu().numpy(),
    "to the host, not waiting": lambda x: x.to("cpu", non_blocking=True),
    "copy_ to the host": lambda x: torch.zeros(4).copy_(x, non_blocking=True),
    "synchronize": lambda x: sync(0),
    "stream": lambda x: torch.vgpu.current_stream(0).synchronize(),  # type: ignore[attr-defined]
    "event": lambda x: torch.vgpu.current_stream(0).record_event().synchronize(),  # type: ignore[attr-defined]
    "nonzero": lambda x: x.nonzero(),
    "backward": _backward_hook,
    "first step": lambda x: torch.optim.SGD([nn.Parameter(x)], lr=0.1).step(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize(
    ("failing", "match"), [(fail, "embedding"), (exhaust, "out of memory")], ids=["value", "memory"]
)
def test_the_next_read_of_the_device_is_told_once(
    pool: onebox.Pool, read: Callable[[Tensor], object], failing: Callable[[], Tensor], match: str
) -> None:
    x = torch.ones(4, device="vgpu:0")
    sync(0)
    failing()
    x.add_(1)
    told(lambda: read(x), match)
    read(x)
    sync(0)
    assert x.tolist() == [1] * 4
    x.add_(1)
    assert x.tolist() == [2] * 4


def test_what_exists_keeps_its_values_and_what_is_made_later_is_void(pool: onebox.Pool) -> None:
    x, rows, generator = torch.ones(4, device="vgpu:0"), torch.zeros(2, 3, device="vgpu:0"), torch.Generator("vgpu:0")
    generator.manual_seed(3)
    state, own = generator.get_state().cpu(), torch.vgpu.get_rng_state(0).cpu()  # type: ignore[attr-defined]
    gc.collect()
    used = torch.vgpu.memory_allocated(0)  # type: ignore[attr-defined]
    fail()
    x.mul_(2)
    torch._foreach_add_([x, rows], 1.0)
    x.copy_(torch.full((4,), 7.0))
    x[1:3] = 9
    rows.copy_(torch.ones(2, 3, device="vgpu:1"))
    rows.view(-1).fill_(3)
    torch.add(x, 1, out=x)
    rows.resize_(1, 3)
    rows.t_()
    torch.rand(3, device="vgpu:0", generator=generator)
    torch.rand(3, device="vgpu:0")
    generator.manual_seed(4)
    torch.vgpu.manual_seed(4)  # type: ignore[attr-defined]
    void = [x + 1, torch.ones(2, device="vgpu:0"), torch.ones(2).to("vgpu:0"), torch.rand(2, device="vgpu:0")]
    told(lambda: sync(0))
    assert x.tolist() == [1] * 4
    assert rows.tolist() == [[0], [0], [0]]
    assert torch.equal(generator.get_state().cpu(), state)
    assert torch.equal(torch.vgpu.get_rng_state(0).cpu(), own)  # type: ignore[attr-defined]
    for tensor in void:
        told(tensor.tolist)
    assert x.tolist() == [1] * 4
    del void, tensor
    gc.collect()
    assert torch.vgpu.memory_allocated(0) == used  # type: ignore[attr-defined]


def test_the_use_of_a_void_tensor_is_told_and_stops_the_stream_again(pool: onebox.Pool) -> None:
    x = torch.ones(2, device="vgpu:0")
    void = fail()
    told(lambda: sync(0))
    y = void + 1
    x.add_(1)
    told(lambda: sync(0))
    x.add_(void.sum())
    x.add_(1)
    told(x.tolist)
    x.add_(1)
    assert x.tolist() == [2, 2]
    del y


def test_a_batch_that_is_replayed_by_number(pool: onebox.Pool) -> None:
    table = torch.ones(4, 3, device="vgpu:0")
    x, plain = torch.zeros(3, device="vgpu:0"), torch.zeros(3)
    for step in range(12):
        index = 9 if step in (5, 6, 9) else 1
        x.add_(1)
        x.add_(nn.functional.embedding(torch.tensor([index], device="vgpu:0"), table)[0])
        x.mul_(2).sub_(1)
        x.add_(3)
        plain += 1
        if index == 9:
            told(x.tolist)
        else:
            plain = (plain + 1) * 2 - 1 + 3
        assert x.tolist() == plain.tolist()


def test_an_error_at_its_own_line_stops_nothing(pool: onebox.Pool) -> None:
    x = torch.ones(2, device="vgpu:0")
    set_synchronous(True)
    try:
        with pytest.raises(IndexError):
            fail()
        x.add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            exhaust()
        x.add_(1)
    finally:
        set_synchronous(False)
    sync(0)
    assert x.tolist() == [3, 3]


def test_a_failure_that_nobody_reads_is_told_at_the_end() -> None:
    with onebox.open("cpu", threads=1):
        fail()
        told(lambda: sync(0))


# ---- training


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def state_of(model: nn.Module) -> list[list[float]]:
    return [tensor.detach().cpu().flatten().tolist() for tensor in model.state_dict().values()]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.AdamW, lr=0.01),
}


@pytest.mark.feature("Virtual devices: Go on after a step that failed")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("zero", ["first", "last", "in place"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_step_that_fails_is_left_out(
    pool: onebox.Pool, optimizer: Callable[..., torch.optim.Optimizer], zero: str, bad: int
) -> None:
    """A batch too large, or the first, then training as if there had been none."""
    near, far = small(), small().to("vgpu:0")
    ours, theirs = optimizer(near.parameters()), optimizer(far.parameters())

    def step(model: nn.Module, steps: torch.optim.Optimizer, x: Tensor) -> float:
        if zero != "last":
            steps.zero_grad(set_to_none=zero == "first")
        loss = model(x).square().mean()
        loss.backward()
        value = loss.item()  # before the step, so that counters of Python stay as they are
        steps.step()
        if zero == "last":
            steps.zero_grad()
        return value

    for number in range(5):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        if number == bad:
            before = state_of(far)
            with pytest.raises(torch.OutOfMemoryError):
                step(far, theirs, x.to("vgpu:0").repeat(QUOTA // 200, 1))
            assert state_of(far) == before
        assert step(far, theirs, x.to("vgpu:0")) == pytest.approx(step(near, ours, x), rel=1e-13)
    torch.testing.assert_close(state_of(far), state_of(near), rtol=1e-12, atol=1e-13)


def test_gradients_of_a_step_that_failed_are_dropped_and_others_stay(pool: onebox.Pool) -> None:
    model = small().to("vgpu:0")
    first, last = model[0], model[2]
    last(torch.ones(1, 8, dtype=torch.float64, device="vgpu:0")).sum().backward()
    there = last.bias.grad
    values = there.tolist()
    (fail()[0, 0] * model(torch.ones(2, 6, dtype=torch.float64, device="vgpu:0"))).sum().backward()
    told(lambda: sync(0))
    assert first.weight.grad is None
    assert last.bias.grad is there
    assert there.tolist() == values


def test_gradients_scaled_for_the_first_time_after_a_failure(pool: onebox.Pool) -> None:
    model = small().to("vgpu:0")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("vgpu")  # type: ignore[attr-defined]
    x = torch.ones(2, 6, dtype=torch.float64, device="vgpu:0")

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(torch.OutOfMemoryError):
        step(x.repeat(QUOTA // 100, 1))
    before = state_of(model)
    step(x)
    assert state_of(model) != before


def test_programs_of_torch_compile(pool: onebox.Pool) -> None:
    near, far = small(), small().to("vgpu:0")
    compiled = torch.compile(far, backend="onebox")
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (near, far))
    x = torch.ones(4, 6, dtype=torch.float64)
    for number in range(4):
        for model, optimizer in ((near, ours), (compiled, theirs)):
            optimizer.zero_grad()
            batch = x.to("vgpu:0") if model is compiled else x
            if model is compiled and number == 2:
                before = state_of(far)
                fail()
                compiled(batch).sum().backward()
                told(optimizer.step)
                assert state_of(far) == before
                optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(state_of(far), state_of(near), rtol=1e-12, atol=1e-13)


# ---- several devices


def test_devices_that_do_not_depend_on_it_go_on(pool: onebox.Pool) -> None:
    here, there = torch.ones(2, device="vgpu:0"), torch.ones(2, device="vgpu:1")
    fail(0)
    here.add_(1)
    there.add_(1)
    here.copy_(there)  # it sends, and needs nothing of the other
    there.add_(1)
    sync(1)
    assert there.tolist() == [3, 3]
    told(lambda: sync(0))
    assert here.tolist() == [1, 1]
    here.copy_(there)
    there.copy_(here * 2)
    assert (here.tolist(), there.tolist()) == ([3, 3], [6, 6])


@pytest.mark.parametrize("first", [0, 1])
def test_devices_that_depend_on_it_stop(pool: onebox.Pool, first: int) -> None:
    """One failure is one error, whichever device is read first; then both go on."""
    here, there = torch.ones(2, device="vgpu:0"), torch.ones(2, device="vgpu:1")
    sync(0), sync(1)
    fail(0)
    there.add_((here * 2).to("vgpu:1"))
    there.add_(1)
    made = there + 1
    told(lambda: sync(first))
    assert (here.tolist(), there.tolist()) == ([1, 1], [1, 1])
    sync(0), sync(1)
    there.add_((here * 2).to("vgpu:1"))
    here.add_(there.to("vgpu:0"))
    assert (here.tolist(), there.tolist()) == ([4, 4], [3, 3])
    with pytest.raises(onebox.OneboxError):
        made.tolist()
    assert there.tolist() == [3, 3]


def test_two_devices_fail_by_themselves(pool: onebox.Pool) -> None:
    here, there = torch.ones(2, device="vgpu:0"), torch.ones(2, device="vgpu:1")
    fail(0)
    exhaust(1)
    here.add_(1), there.add_(1)
    told(lambda: sync(1), "out of memory")
    here.add_(1), there.add_(1)
    told(lambda: sync(0), "embedding")
    here.add_(1), there.add_(1)
    assert (here.tolist(), there.tolist()) == ([2, 2], [3, 3])


def test_data_parallel(pool: onebox.Pool) -> None:
    near, far = small(), small().to("vgpu:0")
    parallel = nn.DataParallel(far, device_ids=[0, 1])
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (near, far))
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for number in range(5):
        if number in (1, 3):
            theirs.zero_grad()
            before = state_of(far)
            fail(number // 2)  # of either device
            parallel(x.to("vgpu:0")).square().sum().backward()
            told(lambda: (theirs.step(), sync(0), sync(1)))
            if number == 1:
                assert state_of(far) == before
        for model, optimizer, batch in ((near, ours, x), (parallel, theirs, x.to("vgpu:0"))):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(state_of(far), state_of(near), rtol=1e-12, atol=1e-13)


# ---- ranks

_said: dict[int, list[Any]] = {}
"""Results of ranks, which are threads."""

_making = threading.Lock()
"""Held while a model draws the random numbers that all threads share."""


def _collectives(rank: int) -> None:
    said: list[str] = []
    dist.init_process_group("onebox", rank=rank, world_size=2)
    x = torch.full((2,), 1.0 + rank, device=f"vgpu:{rank}")
    for step in range(4):
        if step == 1 and rank == 0:
            fail(rank)
        try:
            dist.all_reduce(x)
            said.append(str(x.tolist()))
        except OperatorError as error:
            said.append(error.operator)
    _said[rank] = said
    dist.barrier()
    dist.destroy_process_group()


def test_collectives_go_on_in_another_group_once_all_ranks_have_been_told(pool: onebox.Pool) -> None:
    spawn(_collectives, nprocs=2)
    expected = ["[3.0, 3.0]", "aten.embedding.default", "[6.0, 6.0]", "[12.0, 12.0]"]
    assert (_said.pop(0), _said.pop(1)) == (expected, expected)


def _replicas(rank: int, failing: int) -> None:
    dist.init_process_group("onebox", rank=rank, world_size=2)
    place = f"vgpu:{rank}"
    with _making:
        model = small().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x = torch.full((3, 6), 1.0 + step, dtype=torch.float64) + rank
        for bad in (True, False) if step in (0, 3) else (False,):
            if bad and rank == failing:
                fail(rank)
            try:
                optimizer.zero_grad()
                model(x.to(place)).square().mean().backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
                sync(rank)
                optimizer.step()
            except OperatorError:
                assert bad
    _said[rank] = state_of(model)
    dist.destroy_process_group()


@pytest.mark.parametrize("failing", [0, 1])
def test_gradients_summed_by_ranks(pool: onebox.Pool, failing: int) -> None:
    spawn(_replicas, (failing,), nprocs=2)
    made = _said.pop(0), _said.pop(1)
    plain = small()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.full((3, 6), 1.0 + step, dtype=torch.float64)
        (plain(x).square().mean() / 2 + plain(x + 1).square().mean() / 2).backward()
        optimizer.step()
    assert made[0] == made[1]
    torch.testing.assert_close(made[0], state_of(plain), rtol=1e-12, atol=1e-13)


def _one_goes_on(rank: int) -> None:
    dist.init_process_group("onebox", rank=rank, world_size=2)
    x = torch.ones(2, device=f"vgpu:{rank}")
    if rank == 0:
        fail(rank)
    try:
        dist.all_reduce(x)
        x.tolist()
    except OperatorError:
        if rank == 0:
            raise
        dist.all_reduce(x)
        x.tolist()


def test_a_rank_that_goes_on_does_not_wait_for_one_that_has_ended(pool: onebox.Pool) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="embedding"):
        spawn(_one_goes_on, nprocs=2)


# ---- random programs

Program = list[tuple[str, int, int, int]]
"""Operators: name, device, tensor, another tensor of any device."""

TENSORS = 4
"""On each device."""


def random_program(draw: random.Random, length: int) -> Program:
    kinds = ["add_", "mul_", "replace", "view", "send", "foreach", "host", "rand", "free"]
    return [
        (draw.choice(kinds), draw.randrange(2), draw.randrange(TENSORS), draw.randrange(TENSORS)) for _ in range(length)
    ]


class Machine:
    """Devices on which a program runs.

    Args:
        places: Their names.
    """

    def __init__(self, *places: str) -> None:
        self.places = places
        self.tensors = [
            [torch.full((4,), 1.0 + number, dtype=torch.float64, device=place) for number in range(TENSORS)]
            for place in places
        ]
        self.received: list[set[int]] = [set(), set()]

    def run(self, program: Program) -> None:
        for kind, device, one, other in program:
            own = self.tensors[device]
            match kind:
                case "add_":
                    own[one].add_(own[other], alpha=0.5)
                case "mul_":
                    own[one][1:3].mul_(0.5)
                case "replace":
                    own[one] = own[one] * 0.5 + own[other].sum() * 0.25
                case "view":
                    own[one].view(2, 2).t().add_(0.25)
                case "send":
                    own[one].add_(self.tensors[1 - device][other].to(self.places[device]), alpha=0.25)
                case "foreach":
                    torch._foreach_lerp_(own[:2], own[2:], 0.25)
                case "host":
                    own[one].copy_(torch.full((4,), float(other), dtype=torch.float64))
                case "rand":
                    own[one].add_((own[one] > own[other]).double().cumsum(0))
                case "free":
                    own[one] = own[one].clone()

    def values(self) -> list[list[list[float]]]:
        return [[tensor.tolist() for tensor in own] for own in self.tensors]


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_of_which_an_operator_fails(pool: onebox.Pool, seed: int) -> None:
    """Tensors from before the failure are as plain PyTorch has them at that line, and the program goes on."""
    draw = random.Random(seed)
    before, after, rest = (random_program(draw, draw.randrange(4, 90)) for _ in range(3))
    bad, way = draw.randrange(2), draw.choice([fail, exhaust])
    near, far = Machine("cpu", "cpu"), Machine("vgpu:0", "vgpu:1")
    near.run(before)
    far.run(before)
    kept = [list(own) for own in far.tensors]
    way(bad)
    after = [each for each in after if each[0] != "send"]  # the other device goes on, by itself
    far.run(after)
    plain = [list(own) for own in near.tensors]
    near.run([each for each in after if each[1] != bad])
    told(lambda: sync(bad), "embedding|out of memory")
    sync(1 - bad)
    far.tensors[bad] = kept[bad]  # names that were given to other tensors meanwhile are the script's own matter
    near.tensors[bad] = plain[bad]
    assert far.values() == near.values()
    far.run(rest)
    near.run(rest)
    assert far.values() == near.values()


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_that_stops_both_devices(pool: onebox.Pool, seed: int) -> None:
    """The other device stops where it first uses what it would have received."""
    draw = random.Random(1000 + seed)
    before, after, rest = (random_program(draw, draw.randrange(4, 90)) for _ in range(3))
    bad, way, read = draw.randrange(2), draw.choice([fail, exhaust]), draw.randrange(2)
    near, far = Machine("cpu", "cpu"), Machine("vgpu:0", "vgpu:1")
    near.run(before)
    far.run(before)
    kept = [list(own) for own in far.tensors]
    way(bad)
    stops = next((at for at, each in enumerate(after) if each[0] == "send" and each[1] != bad), None)
    far.run(after)
    plain = [list(own) for own in near.tensors]
    other = [each for each in (after if stops is None else after[:stops]) if each[1] != bad]
    near.run(other)
    told(lambda: sync(bad if stops is None else read), "embedding|out of memory")
    sync(0), sync(1)
    far.tensors, near.tensors = kept, plain
    assert far.values() == near.values()
    far.run(rest)
    near.run(rest)
    assert far.values() == near.values()
