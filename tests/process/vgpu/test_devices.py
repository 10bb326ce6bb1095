"""Several virtual devices in one script: copies between them, models spread over them, threads, mixed operators."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.vgpu.runtime.context import current_context

DEVICES = 3
EXACT = {"rtol": 0.0, "atol": 1e-12}


pytestmark = pytest.mark.usefixtures("pool", "in_float64")


class Traffic:
    """What passes the client on its way to workers and back."""

    def __init__(self, pool: onebox.Pool, patch: pytest.MonkeyPatch) -> None:
        self.sent_bytes = self.came_bytes = self.messages = 0
        self._post = pool.post
        patch.setattr(pool, "post", self.post)

    def post(self, worker: int, instructions: Sequence[Any], frames: Sequence[Any] = (), **rest: Any) -> Any:
        self.messages += 1
        self.sent_bytes += sum(len(frame) for frame in frames)
        future = self._post(worker, instructions, frames, **rest)
        future.add_done_callback(self._came)
        return future

    def _came(self, future: Any) -> None:
        if future.exception() is None:
            self.came_bytes += sum(len(frame) for frame in future.result().frames)


@pytest.fixture
def traffic(pool: onebox.Pool, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(pool, monkeypatch)


def waits() -> int:
    return sum(stream.channel.waits for stream in current_context().queues)


# ---- copies


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Return tensors made of one of four dimensions, laid out in different ways."""
    return {
        "contiguous": x,
        "transposed": x.transpose(0, 2),
        "channels_last": x.to(memory_format=torch.channels_last),
        "every other": x[:, ::2],
        "expanded": x[:, :1].expand_as(x),
        "part": x[1:, 1:2],
        "one": x[0, 0, 0, 0],
        "empty": x[:0],
        "empty within": x[:, :0].transpose(1, 2),
    }


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_copies_keep_what_a_tensor_is(dtype: torch.dtype) -> None:
    x = torch.arange(2 * 3 * 4 * 2).view(2, 3, 4, 2).remainder(7).to(dtype)
    for name, here in layouts(x).items():
        there = layouts(x.to("vgpu:0"))[name]
        moved = there.to("vgpu:1").to("vgpu:2")
        expected = here.clone()
        assert (moved.get_device(), moved.dtype, moved.shape) == (2, dtype, here.shape), name
        if here.numel() and name not in ("every other", "expanded"):
            steps = zip(here.shape, moved.stride(), expected.stride(), strict=True)
            assert all(size < 2 or step == known for size, step, known in steps), name
        assert torch.equal(moved.cpu(), here), name


def test_copies_into_parts_and_other_types() -> None:
    x = torch.randn(4, 6)
    target = torch.zeros(4, 6, dtype=torch.float32, device="vgpu:1")
    target[1:3, ::2].copy_(x.to("vgpu:0")[:2, 3:])
    target[:, 5] = x.to("vgpu:2")[:, 0]
    expected = torch.zeros(4, 6, dtype=torch.float32)
    expected[1:3, ::2].copy_(x[:2, 3:])
    expected[:, 5] = x[:, 0]
    assert torch.equal(target.cpu(), expected)
    lazy = torch.randn(3, dtype=torch.complex128)
    assert torch.equal(lazy.to("vgpu:0").conj().to("vgpu:1").cpu(), lazy.conj())
    half = x.to("vgpu:0").to("vgpu:1", torch.float16, copy=True)
    assert torch.equal(half.cpu(), x.to(torch.float16))
    same = x.to("vgpu:1")
    assert same.to("vgpu:1") is same
    assert same.to("vgpu:1", copy=True) is not same
    host = torch.empty(4, 6)
    host.copy_(same)
    assert torch.equal(host, x)


@pytest.mark.feature("Virtual devices: Spread a model over several devices")
def test_copies_do_not_pass_the_client(traffic: Traffic) -> None:
    x = torch.randint(9, (64, 64)).double()
    there = x.to("vgpu:0")
    current_context().queues[0].flush()
    current_context().group()  # is formed once
    waits0 = waits()
    assert traffic.sent_bytes == x.nbytes
    for lap in range(3):
        for number in (1, 2, 0):
            there = (there + lap).to(f"vgpu:{number}", non_blocking=True)
    assert (traffic.sent_bytes, traffic.came_bytes, waits()) == (x.nbytes, 0, waits0)
    assert torch.equal(there.cpu(), x + 9)
    assert (traffic.sent_bytes, traffic.came_bytes) == (x.nbytes, x.nbytes)


def test_copies_in_many_threads_arrive_where_they_belong() -> None:
    """Each thread sends on its own way; those of two devices in both directions cross."""

    def walk(number: int) -> bool:
        x = torch.full((7,), float(number), device=f"vgpu:{number % DEVICES}")
        for step in range(20):
            x = (x + 1).to(f"vgpu:{(number * (step % 2 + 1) + step) % DEVICES}")
        return x.tolist() == [number + 20.0] * 7

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(walk, range(24)))


def test_a_copy_of_what_failed_fails_and_later_ones_do_not() -> None:
    """An operator that fails unseen voids what is made of it, also on other devices, and no more."""
    for _ in range(2):
        table = torch.ones(3, 2, device="vgpu:0")
        void = nn.functional.embedding(torch.tensor([5], device="vgpu:0"), table).to("vgpu:1")
        with pytest.raises((onebox.OneboxError, RuntimeError, IndexError), match="index out of range"):
            (void + 1).cpu()
        for number in (1, 2):
            assert table.to(f"vgpu:{number}").sum().item() == 6.0
            assert torch.ones(2, device=f"vgpu:{number}").to("vgpu:0").tolist() == [1.0, 1.0]


def test_a_group_that_is_formed_after_a_failure_is_kept() -> None:
    """The failure of the worker that waited for the tensor becomes known later, and is not one of the new group."""
    for _ in range(3):
        table = torch.ones(3, 2, device="vgpu:0")
        void = nn.functional.embedding(torch.tensor([5], device="vgpu:0"), table)
        away = void.to("vgpu:1")
        with pytest.raises(onebox.OneboxError, match="index out of range"):
            void.cpu()
        assert table.to("vgpu:2").sum().item() == 6.0
        formed = current_context().group()
        with pytest.raises(onebox.OneboxError):
            away.cpu()
        assert current_context().group() == formed


class Interposed:
    """A lock that runs an action when it is released for the first time, as another thread may do.

    Args:
        lock: The lock.
        action: The action.
    """

    def __init__(self, lock: Any, action: Callable[[], object]) -> None:
        self._lock = lock
        self._actions = [action]
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exit_info: object) -> None:
        self._depth -= 1
        self._lock.release()
        if not self._depth and self._actions:
            self._actions.pop()()


def test_a_group_that_another_thread_forms_anew_during_a_copy(
    pool: onebox.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = current_context()
    x = torch.arange(4.0, device="vgpu:0")
    torch.vgpu.synchronize(0)  # type: ignore[attr-defined]
    formed = context.group()

    def form_anew() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "is_whole", lambda group: False)
            assert context.group() != formed

    monkeypatch.setattr(context, "transfers", Interposed(context.transfers, form_anew))
    assert x.to("vgpu:1").tolist() == [0.0, 1.0, 2.0, 3.0]


# ---- a model over devices


class Block(nn.Module):
    def __init__(self, channels: int, p: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Spread(nn.Module):
    """A network whose parts may be on several devices; what goes between them is of all kinds.

    Args:
        places: The devices of its three parts.
    """

    def __init__(self, places: Sequence[str] = ("cpu",) * 3, p: float = 0.0) -> None:
        super().__init__()
        self.places = tuple(places)
        self.embed = nn.Embedding(11, 4)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Block(4, p))
        self.second = nn.Sequential(Block(4, p), nn.Conv2d(4, 6, 2, stride=2))
        self.last = nn.Linear(6 + 4, 5)

    def place(self) -> Spread:
        self.embed.to(self.places[0])
        self.first.to(self.places[0])
        self.second.to(self.places[1])
        self.last.to(self.places[2])
        return self

    def forward(self, words: Tensor, images: Tensor, mask: Tensor) -> Tensor:
        a, b, c = self.places
        said = self.embed(words.to(a)).mean(1)
        seen = self.first(images.to(a).to(memory_format=torch.channels_last))
        seen = self.second(seen.to(b)).transpose(1, 3)  # not contiguous
        kept = seen.to(c).flatten(1, 2) * mask.to(a).to(c).unsqueeze(-1)
        nothing = said[:0].to(b).sum().to(c)
        return self.last(torch.cat([kept.mean(1), said.to(c)], 1)) + nothing


def sample(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    words = torch.randint(11, (4, 3), generator=source)
    images = torch.randn(4, 1, 6, 6, generator=source)
    mask = torch.rand(4, 9, generator=source) > 0.3
    return words, images, mask, torch.randint(5, (4,), generator=source)


def trained(model: Spread, steps: int, seen: Callable[[], None] | None = None) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        words, images, mask, target = sample(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words, images, mask), target.to(model.places[2]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if seen is not None:
            seen()
    return losses


@pytest.mark.feature("Virtual devices: Spread a model over several devices")
@pytest.mark.parametrize(
    "places", [("vgpu:0", "vgpu:1", "vgpu:2"), ("vgpu:2", "vgpu:0", "vgpu:2"), ("vgpu:1", "cpu", "vgpu:0")]
)
def test_a_model_over_devices_trains_as_on_one(places: tuple[str, ...], traffic: Traffic) -> None:
    plain = Spread()
    spread = copy.deepcopy(plain)
    spread.places = places
    spread.place()
    expected = trained(plain, 5)
    for stream in current_context().queues:
        stream.flush()
    uploads, waited = traffic.sent_bytes, []
    losses = trained(spread, 5, lambda: waited.append(waits()))
    if "cpu" not in places:
        assert waited[-1] == waited[1], "a step that reads no value waits for none, once its operators are known"
        for stream in current_context().queues:
            stream.flush()
        inputs = sum(each.nbytes for step in range(5) for each in sample(step))
        assert (traffic.sent_bytes - uploads, traffic.came_bytes) == (inputs, 0), "nothing passes the client but inputs"
    for value, known in zip(losses, expected, strict=True):
        torch.testing.assert_close(value.cpu(), known, **EXACT)
    known_state = plain.state_dict()
    for name, value in spread.state_dict().items():
        torch.testing.assert_close(value.cpu(), known_state[name], rtol=0, atol=1e-10)
    assert {str(value.device) for value in spread.parameters()} == set(places)


def test_gradients_cross_devices() -> None:
    """Also second ones, and where one tensor is used on several devices."""
    x = torch.randn(3, 2, requires_grad=True)
    there = x.detach().to("vgpu:0").requires_grad_()

    def twice(x: Tensor, places: Sequence[str]) -> tuple[Tensor, Tensor]:
        a, b, c = places
        y = (x.to(b) ** 3).sum().to(c) + (x.to(c).sin() * x.to(c)).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad((first.to(b) ** 2).sum().to(a), x)
        return first.detach(), second

    for value, known in zip(twice(there, ("vgpu:0", "vgpu:1", "vgpu:2")), twice(x, ("cpu",) * 3), strict=True):
        assert value.device == there.device
        torch.testing.assert_close(value.cpu(), known.detach(), **EXACT)


# ---- data parallel by hand


def shares(step: int, parts: Sequence[int]) -> list[tuple[Tensor, ...]]:
    source = torch.Generator().manual_seed(step)
    x, y = torch.randn(sum(parts), 6, generator=source), torch.randint(3, (sum(parts),), generator=source)
    return list(zip(x.split(list(parts)), y.split(list(parts)), strict=True))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("average_on", ["cpu", "vgpu:0"])
def test_one_thread_for_each_device(average_on: str) -> None:
    """Shares of unequal size, as for devices of unequal speed; gradients weighted by them."""
    parts = (5, 2, 3)
    plain = net()
    replicas = [copy.deepcopy(plain).to(f"vgpu:{number}") for number in range(DEVICES)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.2, momentum=0.9) for replica in replicas]
    meeting = threading.Barrier(DEVICES, timeout=60)
    averages: list[Tensor] = []

    def work(number: int) -> None:
        torch.vgpu.set_device(number)  # type: ignore[attr-defined]
        for step in range(4):
            x, y = shares(step, parts)[number]
            optimizers[number].zero_grad()
            loss = nn.functional.cross_entropy(replicas[number](x.to("vgpu")), y.to("vgpu"), reduction="sum")
            (loss / sum(parts)).backward()
            meeting.wait()
            if number == 0:
                pairs = zip(*(replica.parameters() for replica in replicas), strict=True)
                averages[:] = [sum(each.grad.to(average_on) for each in pair) for pair in pairs]
            meeting.wait()
            for parameter, gradient in zip(replicas[number].parameters(), averages, strict=True):
                parameter.grad.copy_(gradient)
            meeting.wait()
            optimizers[number].step()

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(DEVICES) as threads:
        list(threads.map(guarded, range(DEVICES)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for step in range(4):
        x, y = (torch.cat(column) for column in zip(*shares(step, parts), strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for replica in replicas:
        for value, known in zip(replica.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(value.detach().cpu(), known.detach(), **EXACT)


def test_many_threads_on_few_devices() -> None:
    """The current device, grad mode and what is recorded are each thread's own."""

    def work(number: int) -> tuple[float, list[Any]]:
        place = number % DEVICES
        with torch.vgpu.device(place):  # type: ignore[attr-defined]
            torch.set_grad_enabled(number % 2 == 0)
            x = torch.full((3,), float(number), device="vgpu", requires_grad=number % 2 == 0)
            for _ in range(15):
                y = (x * 2).sum()
            if number % 2 == 0:
                y.backward()
                assert x.grad.tolist() == [2.0] * 3
            return y.item(), [y.get_device(), y.requires_grad]

    with ThreadPoolExecutor(6) as threads:
        for number, result in enumerate(threads.map(work, range(18))):
            assert result == (6.0 * number, [number % DEVICES, number % 2 == 0])


# ---- which device


def test_a_device_without_a_number_is_the_current_one() -> None:
    host, other = torch.ones(2), torch.ones(2, device="vgpu:2")
    with torch.vgpu.device(1):  # type: ignore[attr-defined]
        made = [
            host.to("vgpu"),
            host.to(torch.device("vgpu")),
            other.to(device="vgpu"),
            host.vgpu(),  # type: ignore[attr-defined]
            torch.ones(2, device="vgpu"),
            torch.tensor([1.0], device="vgpu"),
            torch.as_tensor(host, device="vgpu"),
            host.new_tensor([1.0], device="vgpu"),
            torch.zeros_like(other, device="vgpu"),
            nn.Linear(2, 2).to("vgpu").weight,
            nn.Linear(2, 2, device="vgpu").weight,
        ]
        assert [each.get_device() for each in made] == [1] * len(made)
        assert torch.Generator("vgpu").device == torch.device("vgpu", 1)
    assert host.to("vgpu").get_device() == 0


def test_there_are_so_many_devices_and_no_more() -> None:
    assert torch.vgpu.device_count() == torch.accelerator.device_count() == DEVICES  # type: ignore[attr-defined]
    assert torch._utils._get_all_device_indices() == list(range(DEVICES))
    assert torch._utils._get_available_device_type() == "vgpu"
    assert torch._utils._get_device_index("vgpu:2") == 2
    assert torch._utils._get_device_index(torch.device("vgpu"), optional=True) == 0
    assert [each.name for each in torch._utils._get_devices_properties([0, 2])][1].endswith("(cpu on localhost)")
    for call in (lambda: torch.ones(2, device="vgpu:7"), lambda: torch.ones(2).to("vgpu:3")):
        with pytest.raises(ValueError, match="there is no device vgpu:"):
            call()
