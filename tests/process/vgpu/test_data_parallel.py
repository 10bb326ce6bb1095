"""``nn.DataParallel`` over virtual devices gives what the plain module gives on one, in float64."""

from __future__ import annotations

import copy
import io
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from onebox.vgpu.runtime.context import current_context

EXACT = {"rtol": 0.0, "atol": 1e-12}
DEVICES = 3


pytestmark = pytest.mark.usefixtures("pool")


class Net(nn.Module):
    """Layers, a buffer that training leaves alone, and a weight that is used twice."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 6 * 6, 5)
        self.square = nn.Linear(5, 5)
        self.square.weight = nn.Parameter(self.square.weight.t().contiguous().t())  # not contiguous
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))
        hidden = self.head(hidden.flatten(1)) + self.offset
        return self.square(torch.tanh(self.square(hidden)))


def trained(model: nn.Module, batches: list[tuple[Tensor, Tensor]], device: str) -> list[float]:
    """Train a model and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    expected = one.state_dict()
    assert list(other.state_dict()) == list(expected)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name], **EXACT)


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, 3, 6, 6), torch.randint(5, (size,))) for size in sizes]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.feature("Virtual devices: Train with nn.DataParallel")
@pytest.mark.parametrize("device_ids", [None, [0, 1], ["vgpu:2", "vgpu:0"], [1]])
def test_training_is_that_of_one_device(device_ids: Any) -> None:
    """The last batches are uneven: 10 in chunks of 4, 4 and 2, then fewer samples than devices."""
    data = batches([12, 10, 2, 1])
    plain = Net()
    parallel = copy.deepcopy(plain)
    first = (
        torch.device("vgpu", 0) if device_ids is None else torch.device(torch._utils._get_device_index(device_ids[0]))
    )
    parallel = nn.DataParallel(parallel.to(first), device_ids)
    assert trained(parallel, data, str(first)) == pytest.approx(trained(plain, data, "cpu"), rel=1e-12)
    assert parallel.module.conv.weight.device == first
    assert_same_state(plain, parallel.module)


def test_a_step_waits_for_nothing() -> None:
    parallel = nn.DataParallel(Net().to("vgpu"))
    waited = []
    for data in batches([6] * 5):
        x, y = data
        nn.functional.cross_entropy(parallel(x), y.to("vgpu")).backward()
        waited.append(sum(stream.channel.waits for stream in current_context().queues))
    assert waited[-1] == waited[1], "all operators are known"


def test_inputs_of_the_host_are_scattered_from_there() -> None:
    plain = Net()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    x = torch.randn(7, 3, 6, 6).to(memory_format=torch.channels_last)
    out = parallel(x)
    assert out.device == torch.device("vgpu", 0)
    torch.testing.assert_close(out.cpu(), plain(x), **EXACT)


def test_replicas_have_batch_norm_statistics_of_their_own() -> None:
    """As on GPUs: each replica normalises its chunk, and those of the first device stay in the module."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    x = torch.randn(9, 4)
    chunks = x.chunk(DEVICES)
    first = plain(chunks[0])
    expected = torch.cat([first, *(copy.deepcopy(plain)(chunk) for chunk in chunks[1:])])
    torch.testing.assert_close(parallel(x).cpu(), expected, **EXACT)
    assert_same_state(plain, parallel.module)
    parallel.eval()
    torch.testing.assert_close(parallel(x).cpu(), plain.eval()(x), **EXACT)


Pair = namedtuple("Pair", "twice count")


class Nested(nn.Module):
    """Takes a dictionary, and returns one with all that can be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        values, mask = x["values"]
        return {
            "pair": Pair(values * 2, mask.sum(1)),
            "tuple": (values * scale, (values * self.weight, mask)),
            "none": None,
            "loss": (values * self.weight).abs().sum(),
        }


def flat(result: dict[str, Any]) -> list[Tensor]:
    return [*result["pair"], result["tuple"][0], *result["tuple"][1]]


def test_nested_inputs_and_outputs() -> None:
    plain = Nested()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    x = {"values": (torch.randn(5, 3), torch.rand(5, 3) > 0.5)}
    scale = torch.randn(5, 1)
    expected = plain(x, scale=scale)
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        result = parallel(x, scale=scale)
    assert list(result) == list(expected)
    assert type(result["pair"]) is Pair
    assert result["none"] is None
    for value, known in zip(flat(result), flat(expected), strict=True):
        torch.testing.assert_close(value.cpu(), known, **EXACT)
    assert result["loss"].shape == (DEVICES,)
    (result["loss"].sum() + result["tuple"][0].sum()).backward()
    expected["loss"].backward()
    torch.testing.assert_close(parallel.module.weight.grad.cpu(), plain.weight.grad, **EXACT)


def test_a_state_is_saved_and_loaded_under_its_names() -> None:
    plain = Net()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    file = io.BytesIO()
    torch.save(parallel.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cpu")
    assert list(state) == [f"module.{name}" for name in plain.state_dict()]
    other = nn.DataParallel(Net().to("vgpu"))
    other.load_state_dict(state)
    assert_same_state(plain, other.module)


class Placed(nn.Module):
    """Tells where it runs, and in which modes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(1, device="vgpu")
        assert made.device == x.device == self.layer.weight.device
        assert torch.vgpu.current_device() == torch.accelerator.current_device_index() == x.get_device()
        grads = float(self.layer(x).requires_grad and torch.is_grad_enabled())
        half = float(self.layer(x.float()).dtype == torch.float16)
        return torch.tensor([[float(x.get_device()), grads, half]], device="vgpu")


def test_replicas_run_on_their_devices_in_the_modes_of_the_caller() -> None:
    parallel = nn.DataParallel(Placed().float().to("vgpu"))
    x = torch.randn(3, 2, dtype=torch.float32)
    assert parallel(x).tolist() == [[0, 1, 0], [1, 1, 0], [2, 1, 0]]
    with torch.no_grad():
        assert parallel(x).tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    with torch.autocast("vgpu", dtype=torch.float16):
        assert parallel(x).tolist() == [[0, 1, 1], [1, 1, 1], [2, 1, 1]]
    assert torch.vgpu.current_device() == 0


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.get_device() == 1:
            raise ValueError("not here")
        return self.layer(x)


def test_errors_are_those_of_pytorch() -> None:
    parallel = nn.DataParallel(Failing().to("vgpu"))
    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in replica 1 on device 1.*not here"):
        parallel(torch.randn(3, 2))
    elsewhere = nn.DataParallel(nn.Linear(2, 2).to("vgpu:1"))
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device vgpu:0"):
        elsewhere(torch.randn(3, 2))


def test_the_functional_form() -> None:
    plain = nn.Bilinear(3, 4, 2)
    module = copy.deepcopy(plain).to("vgpu:1")
    x, y = torch.randn(4, 3), torch.randn(4, 4)
    out = nn.parallel.data_parallel(module, x.to("vgpu:1"), [1, 0, 2], output_device=2, module_kwargs={"input2": y})
    assert out.device == torch.device("vgpu", 2)
    torch.testing.assert_close(out.cpu(), plain(x, y), **EXACT)
    out.square().sum().backward()
    plain(x, y).square().sum().backward()
    torch.testing.assert_close(module.weight.grad.cpu(), plain.weight.grad, **EXACT)


# ---- the functions below


@pytest.mark.parametrize("source", ["cpu", "vgpu:1"])
@pytest.mark.parametrize(("sizes", "dim"), [(None, 0), ((1, 0, 4), 0), ((2, 3, 1), -1)])
def test_scatter_and_gather(source: str, sizes: tuple[int, ...] | None, dim: int) -> None:
    x = torch.arange(30.0).view(5, 6).to(source).requires_grad_()
    chunks = comm.scatter(x, [0, 1, 2], sizes, dim)
    assert [chunk.get_device() for chunk in chunks] == [0, 1, 2]
    assert [chunk.size(dim) for chunk in chunks] == list(sizes or (2, 2, 1))
    for destination in ("cpu", torch.device("vgpu", 1), 2, None):
        whole = comm.gather(chunks, dim, destination)
        expected = destination if isinstance(destination, int) else torch.device(destination or "vgpu:0").index
        assert whole.get_device() == (-1 if expected is None else expected)
        torch.testing.assert_close(whole.cpu(), x.cpu(), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(comm.gather([2 * chunk for chunk in chunks], dim, "cpu").sum(), x)
    assert grad.device == x.device
    assert grad.eq(2).all()


def test_scatter_and_gather_into_tensors() -> None:
    x = torch.arange(12.0).view(6, 2)
    out = [torch.empty(size, 2, device=f"vgpu:{number}") for number, size in enumerate((1, 3, 2))]
    assert comm.scatter(x, out=out) == tuple(out)
    assert [part.tolist() for part in out] == [part.tolist() for part in x.split([1, 3, 2])]
    for place in ("vgpu:2", "cpu"):
        whole = torch.empty(6, 2, device=place)
        assert comm.gather(out, out=whole) is whole
        assert whole.tolist() == x.tolist()


def test_broadcast_and_sum() -> None:
    x, mask = torch.randn(3, 4).t(), torch.rand(5) > 0.5
    copies = comm.broadcast(x.to("vgpu:1"), [1, 0, 2])
    assert [each.get_device() for each in copies] == [1, 0, 2]
    assert all(each.stride() == x.stride() and each.tolist() == x.tolist() for each in copies)
    out = [torch.empty(4, 3, device=f"vgpu:{number}") for number in range(DEVICES)]
    comm.broadcast(x, out=out)
    assert all(each.tolist() == x.tolist() for each in out)
    pair = [x.to("vgpu:2"), mask.to("vgpu:2")]
    many = comm.broadcast_coalesced(pair, [2, 0])
    assert many[0] == pair
    assert [each.get_device() for each in many[1]] == [0, 0]
    assert [each.tolist() for each in many[1]] == [x.tolist(), mask.tolist()]
    total = comm.reduce_add(copies, destination=2)
    assert total.get_device() == 2
    torch.testing.assert_close(total.cpu(), 3 * x, **EXACT)
    sums = comm.reduce_add_coalesced([(each, each[0]) for each in copies], destination=0, buffer_size=64)
    for value, expected in zip(sums, (3 * x, 3 * x[0]), strict=True):
        torch.testing.assert_close(value.cpu(), expected, **EXACT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: comm.scatter(x, [0, 1], [1, 2, 2]), "devices and chunk_sizes to be of same length"),
        (lambda x: comm.scatter(x, [0, 1], [1, 2]), "split_with_sizes expects split_sizes to sum exactly to 5"),
        (lambda x: comm.scatter(x, []), "at least one device to scatter to"),
        (lambda x: comm.scatter(x, out=[x[:3]]), "Total size for output tensors"),
        (lambda x: comm.scatter(x, out=[x[:3], x[:2, :1]]), "Output tensor at index 1 has incorrect shape"),
        (lambda x: comm.gather([]), "at least one tensor to gather from"),
        (lambda x: comm.gather([x, x.cpu()]), "tensor at index 1 has device cpu"),
        (lambda x: comm.gather([x, x[0]]), "same number of dimensions"),
        (lambda x: comm.gather([x, x[:, :2]]), "tensor at index 1 has invalid shape"),
        (lambda x: comm.gather([x, x], out=x), "Expected out tensor to have shape"),
        (lambda x: comm.broadcast(x, [0, -1]), "Expected non-negative device index"),
        (lambda x: comm.broadcast(x, out=[x[0]]), "output tensor at index 0 has shape"),
        (lambda x: comm.broadcast_coalesced([x], [1, 0]), "All tensors must be on devices"),
        (lambda x: comm.broadcast(x, [0, 7]), "there is no device vgpu:7"),
    ],
)
def test_wrong_arguments(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(torch.zeros(5, 3, device="vgpu"))


def test_nothing_is_said_of_nccl() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.reduce_add([torch.ones(2, device=f"vgpu:{number}") for number in range(2)], 0)
    assert not caught
