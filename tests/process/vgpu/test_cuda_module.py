"""``torch.cuda`` on virtual devices, and what trains there: figures, random numbers, streams, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import onebox

CUDA = torch.device("cuda")
ZERO = torch.device("cuda:0")
ONE = torch.device("cuda:1")
CPU = torch.device("cpu")
LEGACY: Any = torch.cuda
"""With names that no type checker knows."""


pytestmark = pytest.mark.usefixtures("aliased")


# ---- torch.cuda


@pytest.mark.feature("Virtual devices: Use devices by the names and functions of torch.cuda")
def test_what_there_is(pool: onebox.Pool) -> None:
    assert torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name("cuda:1") == torch.cuda.get_device_properties(1).name
    assert pool.devices[0].name in torch.cuda.get_device_name()
    assert torch.cuda.get_device_capability() == (0, 0)  # a CPU is no GPU
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_tf32_supported()
    assert torch.cuda.can_device_access_peer(0, 1) and not torch.cuda.can_device_access_peer(0, 0)
    assert torch.cuda.get_arch_list() == []
    torch.cuda.init()
    torch.cuda.ipc_collect()
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.feature("Virtual devices: Use devices by the names and functions of torch.cuda")
def test_memory() -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.ones(1 << 18, device="cuda")
    assert torch.cuda.memory_allocated() - before == torch.cuda.memory_reserved("cuda:0") - before == 1 << 20
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 1 << 20
    torch.cuda.reset_peak_memory_stats(0)
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() == before
    free, total = torch.cuda.mem_get_info("cuda:0")
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == before
    assert "memory of cuda:1" in torch.cuda.memory_summary("cuda:1")


def test_an_upload_finds_the_room_of_what_has_gone() -> None:
    with onebox.open("cpu", threads=1, memory=20 << 20) as small:
        x = torch.ones(2 << 20)
        for _ in range(4):
            y = x.cuda()
            y = y.mul_(2)
            assert torch.cuda.memory_allocated() == 8 << 20
            del y
            y = torch.ones(3 << 20).cuda()
            assert torch.cuda.memory_allocated() == 12 << 20
            del y
        y = torch.empty(3 << 20, device="cuda")
        torch.cuda.synchronize()  # the room is on the worker now, and may be all that there is
        y.copy_(torch.ones(3 << 20))
        assert y.sum().item() == 3 << 20
        del y
        with pytest.raises(torch.cuda.OutOfMemoryError, match="quota"):
            torch.ones(6 << 20, device="cuda").sum().item()
        assert torch.ones(4 << 20).cuda().sum().item() == 4 << 20
        assert len(small) == 1


@pytest.mark.parametrize("sent", [False, True])
def test_an_upload_into_new_room_leaves_its_other_elements_and_names(sent: bool) -> None:
    x = torch.empty(4, device="cuda")
    if sent:
        torch.cuda.synchronize()
    other = x.detach()
    other.copy_(torch.arange(4.0))
    assert x.tolist() == other.tolist() == [0, 1, 2, 3]
    x = torch.zeros(4, device="cuda")
    x[:2].copy_(torch.ones(2))
    assert x.tolist() == [1, 1, 0, 0]
    x = torch.empty(4, device="cuda")
    if sent:
        torch.cuda.synchronize()
    row = x.view(2, 2)
    x.copy_(torch.arange(4.0))
    row.add_(1)
    assert x.tolist() == [1, 2, 3, 4] and row.tolist() == [[1, 2], [3, 4]]


def draw(*, device: str = "cuda", generator: Any = None) -> list[float]:
    return torch.rand(3, device=device, generator=generator).tolist()  # type: ignore[no-any-return]


def test_random_numbers_repeat() -> None:
    torch.manual_seed(3)
    first, second = draw(), draw()
    assert first != second
    torch.manual_seed(3)
    assert draw() == first
    state = torch.cuda.get_rng_state()
    assert draw() == second
    torch.cuda.set_rng_state(state)
    assert draw() == second
    torch.cuda.manual_seed(3)
    assert torch.cuda.initial_seed() == 3 and draw() == first
    torch.cuda.manual_seed_all(3)
    assert draw(device="cuda:1") == first
    states = torch.cuda.get_rng_state_all()
    rest = draw(device="cuda:1")
    torch.cuda.set_rng_state_all(states)
    assert draw(device="cuda:1") == rest and len(states) == 2
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(3)
        assert draw() == first
    assert draw() == first


def test_generators() -> None:
    made = torch.Generator(device="cuda:1").manual_seed(7)
    assert made.device == ONE and isinstance(made, torch.Generator)
    first = draw(device="cuda:1", generator=made)
    assert draw(device="cuda:1", generator=torch.Generator(ONE).manual_seed(7)) == first
    defaults = torch.cuda.default_generators
    assert len(defaults) == 2 and [each.device for each in defaults] == [ZERO, ONE]
    defaults[1].manual_seed(7)
    assert draw(device="cuda:1") == first
    defaults[1].manual_seed(7)
    assert draw(device="cuda:1", generator=defaults[1]) == first
    assert defaults[1].initial_seed() == 7 and defaults[0].initial_seed() != 7


def test_streams_and_events() -> None:
    side = torch.cuda.Stream(device="cuda:1")
    assert side.device == ONE and "cuda:1" in repr(side)
    with torch.cuda.stream(side):
        assert torch.cuda.current_device() == 1
        x = torch.ones(2, device="cuda") * 2
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream("cuda:1"))
    done = side.record_event()
    done.synchronize()
    assert done.query() and isinstance(done, torch.cuda.Event) and x.tolist() == [2, 2]
    torch.cuda.default_stream().wait_event(done)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    with torch.cuda.stream(None):  # type: ignore[arg-type]
        assert torch.cuda.current_device() == 0


def test_streams_and_events_of_any_device() -> None:
    stream = torch.Stream(device="cuda:1")
    assert isinstance(stream, torch.cuda.Stream) and isinstance(stream, torch.Stream) and stream.device == ONE
    assert isinstance(torch.cuda.current_stream(), torch.Stream)
    event = torch.Event(device="cuda", enable_timing=True)
    event.record()
    event.synchronize()
    assert isinstance(event, torch.cuda.Event) and isinstance(event, torch.Event) and event.query()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_a_profiler_of_cuda_shows_the_times_of_workers(capfd: pytest.CaptureFixture[str]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        torch.ones(2, device="cuda").sum().item()
    assert any(event.key == "aten::sum" and event.device_time_total > 0 for event in seen.key_averages())
    assert "Failed to record" not in capfd.readouterr().err


def test_compiled_functions_see_devices_as_the_script_calls_them() -> None:
    @torch.compile(backend="onebox", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        if x.device.type == "cuda" and x.is_cuda:
            x = x + torch.ones(2, device=x.device)
        return (torch.zeros(2, device="cuda:1") + x + torch.ones(2).to("cuda:1")).cuda(1)

    x = torch.ones(2, device="cuda:1", requires_grad=True)
    made = run(x)
    assert made.tolist() == [3, 3] and made.device == ONE
    made.sum().backward()
    assert x.grad is not None and x.grad.device == ONE


def test_fake_tensors_of_virtual_ones_are_no_cuda_tensors_of_pytorch() -> None:
    x = torch.ones(2, 2, device="cuda:1", requires_grad=True)
    with FakeTensorMode() as mode:  # with cuda, this would end the process
        made = mode.from_tensor(x).t() * torch.zeros(2, device="cuda:1")
    assert made.device == torch.device("vgpu:1") and made.requires_grad


def test_accelerators_are_called_cuda() -> None:
    assert torch.accelerator.current_accelerator() == CUDA
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    torch.accelerator.set_device_index("cuda:1")
    assert torch.accelerator.current_device_index() == torch.cuda.current_device() == 1
    torch.accelerator.synchronize()
    assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda


def test_what_has_no_counterpart_says_so() -> None:
    for name, use in (
        ("CUDAGraph", torch.cuda.CUDAGraph),
        ("nccl.all_reduce", lambda: torch.cuda.nccl.all_reduce([torch.ones(1)])),
        ("set_sync_debug_mode", lambda: torch.cuda.set_sync_debug_mode("warn")),
        (r"Event\(external=True\)", lambda: torch.cuda.Event(external=True)),
    ):
        with pytest.raises(
            NotImplementedError, match=rf"torch\.cuda\.{name} has no counterpart on the virtual devices"
        ):
            use()
    torch.cuda.set_sync_debug_mode("default")


# ---- what trains


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        assert (x @ x).dtype == dtype and functional.softmax(x @ x, 0).dtype == torch.float32
        assert (
            torch.is_autocast_enabled()
            and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") == dtype
        )
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert not torch.is_autocast_enabled() and torch.amp.is_autocast_available("cuda")


@pytest.mark.feature("Virtual devices: Train in mixed precision with a gradient scaler")
@pytest.mark.filterwarnings("ignore:.torch.cuda.amp:FutureWarning")
@pytest.mark.parametrize("old", [True, False])
def test_gradient_scaler(old: bool) -> None:
    model = nn.Linear(4, 2).cuda()
    before = model.weight.tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler: Any = torch.cuda.amp.GradScaler(8.0) if old else torch.amp.GradScaler("cuda", 8.0)
    x = torch.ones(3, 4, device="cuda")
    for scale in (1.0, float("inf")):
        optimizer.zero_grad()
        with torch.cuda.amp.autocast() if old else torch.autocast("cuda"):
            loss = model(x).pow(2).mean()
        scaler.scale(loss * scale).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8 if scale == 1 else 4)
        assert model.weight.tolist() != before and torch.isfinite(model.weight).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_draws_the_same_numbers_twice(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)).cuda()
    x = torch.ones(4, 3, device="cuda", requires_grad=True)

    def gradients(run: Callable[[], Tensor]) -> list[list[float]]:
        torch.manual_seed(1)
        model.zero_grad()
        run().sum().backward()
        return [parameter.grad.flatten().tolist() for parameter in model.parameters() if parameter.grad is not None]

    assert gradients(lambda: checkpoint(model, x, use_reentrant=reentrant)) == gradients(lambda: model(x))


def test_recurrent_networks_take_no_library_for_granted() -> None:
    model = nn.LSTM(3, 4, num_layers=2).cuda()
    made, _ = model(torch.ones(2, 1, 3, device="cuda"))
    made.sum().backward()
    want, _ = copy.deepcopy(model).cpu()(torch.ones(2, 1, 3))
    assert torch.allclose(made.cpu(), want, atol=1e-6)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 3), [2, 1], batch_first=True).cuda()
    assert packed.is_cuda and packed.data.device == ZERO


@pytest.mark.feature("Virtual devices: Load data by processes and pinned memory")
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders_with_pinned_memory(workers: int) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(6, 2))
    loader = DataLoader(data, batch_size=2, num_workers=workers, pin_memory=True)
    assert sum(x.cuda(non_blocking=True).sum().item() for (x,) in loader) == 66
    assert torch.empty(2, pin_memory=True).pin_memory().cuda().device == ZERO


@pytest.mark.parametrize("fused", [{}, {"foreach": True}, {"fused": True}])
def test_optimizers(fused: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).cuda()
    twin = copy.deepcopy(model).cpu()
    for each in (model, twin):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1, **fused)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            each(torch.ones(2, 3, device=each.weight.device)).pow(2).sum().backward()
            optimizer.step()
    assert torch.allclose(model.weight.cpu(), twin.weight, atol=1e-6)
