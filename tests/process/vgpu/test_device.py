"""``vgpu`` as a device of PyTorch: what a script does with any device does here what it does there."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import onebox
from onebox.errors import OperatorError
from onebox.vgpu import attach
from onebox.vgpu.core.tensor import is_virtual
from onebox.vgpu.runtime.context import current_context
from tests.kit.waiting import until

VGPU: Any = torch  # whose attribute ``vgpu`` no type checker knows


pytestmark = pytest.mark.usefixtures("pool")


@pytest.fixture(autouse=True)
def first_device() -> Iterator[None]:
    VGPU.vgpu.set_device(0)
    yield
    VGPU.vgpu.set_device(0)


def waits() -> int:
    return sum(stream.channel.waits for stream in current_context().queues)


# ---- factories, copies, reads


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
def test_factories_make_tensors_of_the_device(text: bool, name: str) -> None:
    device = "vgpu:1" if text else torch.device("vgpu", 1)
    made = getattr(torch, name)(2, 3, device=device, dtype=torch.float64)
    assert (made.device, made.dtype, made.shape) == (torch.device("vgpu:1"), torch.float64, (2, 3))
    assert is_virtual(made)


def test_a_device_without_a_number_is_the_current_one() -> None:
    assert torch.ones(2, device="vgpu").device.index == 0
    VGPU.vgpu.set_device(1)
    assert torch.ones(2, device="vgpu").device.index == 1
    with VGPU.vgpu.device(0):
        assert torch.ones(2, device="vgpu").device.index == 0
    with torch.device("vgpu:0"):
        assert torch.ones(2).device == torch.device("vgpu:0")
    assert torch.accelerator.current_device_index() == VGPU.vgpu.current_device() == 1
    assert torch.accelerator.device_count() == VGPU.vgpu.device_count() == 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4, 5)])
def test_a_tensor_goes_there_and_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert torch.equal(tensor.to("vgpu:1").to("vgpu:0").cpu(), tensor)


def test_strides_are_kept_on_the_way() -> None:
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    there = tensor.to("vgpu:0")
    assert there.stride() == tensor.stride() == there.to("vgpu:1").stride() == there.cpu().stride()
    assert torch.equal(there.cpu(), tensor)
    part = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    assert torch.equal(part.to("vgpu:0").cpu(), part)
    assert torch.equal(part.expand(2, 3, 2).to("vgpu:0").to("vgpu:1").cpu(), part.expand(2, 3, 2))


def test_what_is_copied_may_be_written_to_at_once() -> None:
    tensor = torch.zeros(1000)
    there = tensor.to("vgpu:0", non_blocking=True)
    tensor += 1
    assert there.sum().item() == 0


def test_values_are_read_as_from_any_device() -> None:
    tensor = torch.tensor([[1.5, -2.0]], device="vgpu:0")
    assert tensor.tolist() == [[1.5, -2.0]]
    assert tensor[0, 1].item() == -2.0
    assert bool(tensor[0, 0] > 1)
    assert f"{tensor[0, 0]:.2f}" == "1.50"
    assert int(torch.tensor(2**60 + 1, device="vgpu:0")) == 2**60 + 1
    with pytest.raises(TypeError, match="can't convert vgpu:0 device type tensor to numpy"):
        tensor.numpy()
    assert np.array_equal(tensor.numpy(force=True), np.array([[1.5, -2.0]], dtype=np.float32))


def test_tensors_print_like_those_of_a_gpu() -> None:
    assert repr(torch.tensor([1.0, 2.0], device="vgpu:1")) == "tensor([1., 2.], device='vgpu:1')"
    assert repr(torch.tensor([1], dtype=torch.int32, device="vgpu:0")) == (
        "tensor([1], device='vgpu:0', dtype=torch.int32)"
    )
    leaf = nn.Parameter(torch.ones(1, device="vgpu:0"))
    assert repr(leaf) == "Parameter containing:\ntensor([1.], device='vgpu:0', requires_grad=True)"
    assert repr(leaf * 2) == "tensor([2.], device='vgpu:0', grad_fn=<MulBackward0>)"


def test_the_same_looks_elsewhere() -> None:
    there = torch.ones(2, 3, device="vgpu:0")
    assert torch.zeros_like(there, device="cpu").device.type == "cpu"
    assert there.new_ones(4, device="vgpu:1").device.index == 1
    assert torch.equal(torch.full_like(there, 3, device="vgpu:1").cpu(), torch.full((2, 3), 3.0))


def test_two_devices_in_one_operator_are_refused_and_a_number_of_the_host_is_not() -> None:
    there = torch.ones(2, device="vgpu:0")
    for other in (torch.ones(2, device="vgpu:1"), torch.ones(2)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
            there + other
    assert (there * torch.tensor(3.0)).tolist() == [3, 3]
    assert there[torch.tensor([True, False])].tolist() == [1]


# ---- modules, optimizers, files


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_a_plain_loop_gives_what_it_gives_on_the_host(name: str) -> None:
    def train(device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = _model().to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(4):
            rows = torch.randn(5, 1, 8, 8, dtype=torch.float64, generator=generator).to(device)
            loss = nn.functional.cross_entropy(model(rows), torch.tensor([0, 1, 2, 1, 0], device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {key: value.cpu() for key, value in model.state_dict().items()}

    (mine, state), (plain, expected) = train("vgpu:1"), train("cpu")
    assert mine == pytest.approx(plain, rel=1e-12)  # not equal: here optimizers take all parameters at once
    for key, value in expected.items():
        assert torch.allclose(state[key].double(), value.double(), rtol=1e-10, atol=1e-12), key


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model = Tied().to("vgpu:1")
    assert model.a.weight is model.b.weight
    twin = copy.deepcopy(model)
    assert twin.a.weight is twin.b.weight
    assert twin.a.weight is not model.a.weight
    assert isinstance(twin.a.weight, nn.Parameter)
    with torch.no_grad():
        twin.a.weight.zero_()
    assert twin.b.weight.abs().sum().item() == 0
    assert model.b.weight.abs().sum().item() > 0


def test_copies_of_tensors_have_what_they_have_and_of_parameters_only_the_elements() -> None:
    whole = nn.Parameter(torch.ones(2, device="vgpu:0"))
    (whole * 2).sum().backward()
    alone = copy.deepcopy(whole)
    assert isinstance(alone, nn.Parameter)
    assert alone.grad is None
    leaf = torch.ones(2, device="vgpu:0", requires_grad=True)
    leaf.group = "slow"  # type: ignore[attr-defined]
    (leaf * 2).sum().backward()
    twin = copy.deepcopy(leaf)
    assert twin.group == "slow"  # type: ignore[attr-defined]
    assert twin.grad is not None
    assert twin.grad is not leaf.grad
    assert twin.grad.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="created explicitly by the user"):
        copy.deepcopy(leaf * 2)


def test_data_is_set_and_read() -> None:
    leaf = nn.Parameter(torch.ones(2, device="vgpu:0"))
    leaf.data = leaf.data - 0.5
    leaf.data.mul_(4)
    assert leaf.tolist() == [2, 2]
    leaf.data = torch.zeros(3, device="vgpu:0")
    assert leaf.shape == (3,)
    assert leaf.requires_grad


@pytest.mark.parametrize("weights_only", [True, False])
def test_files_are_read_where_they_are_wanted(weights_only: bool, tmp_path: Path) -> None:
    state = _model().to("vgpu:1").state_dict()
    torch.save({"model": state, "step": 3}, tmp_path / "file.pt")
    for location, device in ((None, "vgpu:1"), ("cpu", "cpu"), ("vgpu:0", "vgpu:0"), ({"vgpu:1": "vgpu:0"}, "vgpu:0")):
        loaded = torch.load(tmp_path / "file.pt", map_location=location, weights_only=weights_only)
        assert loaded["step"] == 3
        for key, value in loaded["model"].items():
            assert str(value.device) == device
            assert torch.equal(value.cpu(), state[key].cpu())
    plain = _model()
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    there = torch.load(tmp_path / "plain.pt", map_location="vgpu:0", weights_only=weights_only)
    assert {str(value.device) for value in there.values()} == {"vgpu:0"}


def test_whole_modules_are_saved_with_their_device() -> None:
    file = io.BytesIO()
    torch.save(_model().to("vgpu:1"), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert {str(value.device) for value in loaded.state_dict().values()} == {"vgpu:1"}
    assert all(isinstance(leaf, nn.Parameter) for leaf in loaded.parameters())


def test_pickled_tensors_come_back_with_their_values() -> None:
    there = torch.arange(3.0, device="vgpu:1")
    assert pickle.loads(pickle.dumps(there)).tolist() == [0, 1, 2]


# ---- random numbers


def test_the_same_seed_gives_the_same_numbers() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append([torch.rand(3, device="vgpu:0").tolist(), torch.randn(2, device="vgpu:1").tolist()])
    assert draws[0] == draws[1]
    torch.manual_seed(8)
    assert torch.rand(3, device="vgpu:0").tolist() != draws[0][0]


def test_generators_are_apart() -> None:
    first = torch.Generator(device="vgpu:0").manual_seed(3)
    second = torch.Generator(device="vgpu:0").manual_seed(3)
    drawn = torch.randn(4, device="vgpu:0", generator=first)
    torch.rand(4, device="vgpu:0")
    assert torch.equal(torch.randn(4, device="vgpu:0", generator=second), drawn)
    state = first.get_state()
    again = torch.randn(4, device="vgpu:0", generator=first)
    assert torch.equal(torch.randn(4, device="vgpu:0", generator=first.set_state(state)), again)
    assert torch.randperm(5, device="vgpu:0", generator=first).sort().values.tolist() == [0, 1, 2, 3, 4]
    assert isinstance(first, torch.Generator)
    assert first.initial_seed() == 3
    with pytest.raises(RuntimeError, match="Expected a 'vgpu' device type for generator but found 'cpu'"):
        torch.randn(4, device="vgpu:0", generator=torch.Generator())
    with pytest.raises(RuntimeError, match=r"Expected a generator of vgpu:0, but found one of vgpu:1"):
        torch.randn(4, device="vgpu:0", generator=torch.Generator("vgpu:1"))


def test_a_generator_that_outlives_its_pool_leaves_that_of_another_alone(pool: onebox.Pool) -> None:
    with onebox.open("cpu", threads=1):
        theirs = torch.Generator(device="vgpu:0")
    attach(pool)
    ours = torch.ones(3, device="vgpu:0") * 2
    del theirs
    for _ in range(3):
        ours = ours + 1
        assert ours.tolist()
    with onebox.open("cpu*2", threads=1):
        VGPU.vgpu.set_device(1)
        assert torch.ones(1, device="vgpu").device.index == 1
    with onebox.open("cpu", threads=1):
        assert torch.ones(1, device="vgpu").device.index == 0
    VGPU.vgpu.set_device(0)
    attach(pool)


def test_a_device_without_a_number_is_the_current_one_in_each_call() -> None:
    x = torch.ones(2, device="vgpu:0")
    for number in (0, 1, 0, 1):
        with VGPU.vgpu.device(number):
            assert torch.zeros_like(x, device="vgpu").device.index == number
            assert x.new_empty(3, device="vgpu").device.index == number


def test_streams_and_events_of_pytorch_wait() -> None:
    x = torch.ones(3, device="vgpu:1")
    stream, event = torch.Stream(device="vgpu:1"), torch.Event(device="vgpu:1")
    x.add_(1)
    stream.record_event(event)
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_an_exchange_of_memory_without_elements() -> None:
    x = torch.arange(3.0, device="vgpu:0")
    again = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert (again + 1).tolist() == [1, 2, 3]
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(x[:2])).add_(5)
    assert x.tolist() == [5, 6, 2]
    with pytest.raises(BufferError, match=r"begin where its memory does; use clone\(\)"):
        torch.utils.dlpack.to_dlpack(x[1:])
    with pytest.raises(ValueError, match="Unknown device type vgpu for Dlpack"):
        torch.from_dlpack(x)


@pytest.mark.feature("Virtual devices: See the times of workers in torch.profiler")
def test_a_profiler_shows_operators_with_the_times_of_the_worker() -> None:
    x, small = torch.randn(700, 700, device="vgpu:1"), torch.ones(3, device="vgpu:0")
    (x @ x).sum(), small + 1
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
    with torch.profiler.profile(activities=activities) as seen:
        with torch.profiler.record_function("step"):
            made = (x @ x).sum()
            small + 1
        made.item()
    times = {event.key: event.device_time_total for event in seen.key_averages()}
    assert times["aten::mm"] > 0
    assert times["aten::add"] > 0
    assert times["step"] >= times["aten::mm"] + times["aten::sum"] + times["aten::add"]
    assert "VGPU" in seen.key_averages().table()
    with torch.profiler.profile(activities=activities[:1]) as seen:
        (x @ x).sum()
    assert sum(event.device_time_total for event in seen.key_averages()) == 0


def test_a_profiler_stays_whole_where_an_operator_fails() -> None:
    x = torch.ones(3, device="vgpu:0")
    with torch.profiler.profile() as seen:
        nn.functional.embedding(torch.tensor([5], device="vgpu:0"), torch.ones(3, 4, device="vgpu:0"))
        with pytest.raises(OperatorError, match="index out of range"):
            x.tolist()
        assert (x + 1).tolist() == [2, 2, 2]
    assert "aten::add" in {event.key for event in seen.key_averages()}


def test_operators_that_are_special_repeat_as_the_same_batch(pool: onebox.Pool) -> None:
    queue = current_context().queues[0]
    x, host = torch.zeros(2, 3, dtype=torch.complex128, device="vgpu:0"), torch.ones(2, 3, dtype=torch.complex128)
    numbers = []
    for _ in range(6):
        x.copy_(host)
        x[0] = host[0]
        x.mul_(1j)
        torch.histc(torch.arange(4, device="vgpu:0"), 4)
        queue.synchronize()
        numbers.append(queue.pool.new_number())
    assert numbers[-1] - numbers[-2] == 1, "no kernel and no tape is defined any more"


def test_attention_without_autograd_is_the_kernel_of_the_worker() -> None:
    q = torch.randn(1, 2, 8, 16, device="vgpu:0")
    with torch.inference_mode():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)  # of which the worker tells the shape
        before = current_context().queues[0].native.recorded
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert current_context().queues[0].native.recorded - before == 1
        with pytest.raises(OperatorError, match="Class values must be smaller than num_classes"):
            torch.nn.functional.one_hot(torch.tensor([5], device="vgpu:0"), 3).tolist()


def test_threads_that_seed_and_read_one_generator_do_not_wait_for_ever() -> None:
    generator = torch.Generator(device="vgpu:0")

    def work(seeds: bool) -> None:
        for number in range(20):
            generator.manual_seed(number) if seeds else generator.get_state()

    threads = [threading.Thread(target=work, args=(seeds,), daemon=True) for seeds in (True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_draws_the_same_numbers_again_without_a_wait(reentrant: bool) -> None:
    leaf = torch.ones(1000, device="vgpu:1", requires_grad=True)
    before = waits()
    made = checkpoint(lambda x: nn.functional.dropout(x, 0.5), leaf, use_reentrant=reentrant)
    made.sum().backward()
    assert waits() == before
    assert leaf.grad is not None
    assert torch.equal(made.detach(), leaf.grad)


def test_random_states_of_all_devices_are_kept_by_a_fork_of_them() -> None:
    with torch.random.fork_rng(devices=[0, 1], device_type="vgpu"):
        inside = torch.rand(3, device="vgpu:1")
    assert torch.equal(torch.rand(3, device="vgpu:1"), inside)


# ---- modes


def test_autocast_runs_products_in_half_precision_and_sums_in_full() -> None:
    layer = nn.Linear(4, 4).to("vgpu:0")
    rows = torch.randn(2, 4, device="vgpu:0")
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        made = layer(rows)
        assert made.dtype == torch.bfloat16
        assert made.exp().dtype == torch.float32
        loss = nn.functional.mse_loss(made, rows)
        assert loss.dtype == torch.float32
    assert layer(rows).dtype == torch.float32
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_inference_mode_gives_what_the_plain_mode_gives() -> None:
    model = _model().to("vgpu:0").eval()
    rows = torch.randn(2, 1, 8, 8, dtype=torch.float64, device="vgpu:0")
    with torch.inference_mode():
        made = model(rows)
    assert torch.equal(made, model(rows).detach())


def test_a_step_that_reads_nothing_waits_for_nothing() -> None:
    model = _model().to("vgpu:0")
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        rows = torch.randn(5, 1, 8, 8, dtype=torch.float64).to("vgpu:0")
        loss = nn.functional.cross_entropy(model(rows), torch.zeros(5, dtype=torch.int64).to("vgpu:0"))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    step()  # an optimizer waits after operators on new shapes, its own of the first step among them
    before = waits()
    for _ in range(3):
        step()
    assert waits() == before


# ---- streams, memory, other processes


def test_streams_and_events_keep_the_order() -> None:
    module = VGPU.vgpu
    side = module.Stream(1)
    event = module.Event(enable_timing=True)
    with module.stream(side):
        made = torch.ones(3, device="vgpu") + 1
        assert made.device.index == 1
        event.record(side)
    module.current_stream(1).wait_event(event)
    assert (made * 2).tolist() == [4, 4, 4]
    later = module.Event(enable_timing=True)
    later.record(side)
    assert event.elapsed_time(later) >= 0
    later.synchronize()
    assert later.query()
    torch.accelerator.synchronize()


def test_an_event_after_a_failure_is_reached_and_waiting_for_it_raises_the_failure() -> None:
    module = VGPU.vgpu
    large = torch.ones(3, 4, device="vgpu:1")
    event, side = module.Event(), module.Stream(1)
    torch.nn.functional.embedding(torch.tensor([5], device="vgpu:1"), large)
    large.mul_(2)
    event.record(side)
    until(event.query)
    assert side.query()
    with pytest.raises(onebox.OneboxError, match="index out of range"):
        event.synchronize()
    event.synchronize()
    assert large.sum().item() == 12


def test_memory_is_that_of_the_workers_buffers() -> None:
    module = VGPU.vgpu
    before = module.memory_allocated(1)
    held = torch.zeros(1 << 18, device="vgpu:1")
    assert module.memory_allocated(1) == before + (1 << 20)
    del held
    assert module.memory_allocated(1) == before
    assert module.max_memory_allocated(1) >= before + (1 << 20)
    module.reset_peak_memory_stats(1)
    assert module.max_memory_allocated(1) == before
    free, total = module.mem_get_info(1)
    assert 0 < free <= total
    assert torch.accelerator.memory_allocated(1) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_beside_virtual_devices(workers: int) -> None:
    rows = torch.arange(20.0).reshape(10, 2)
    loader = DataLoader(TensorDataset(rows), batch_size=3, num_workers=workers, pin_memory=True)
    total = torch.zeros((), device="vgpu:1")
    for (batch,) in loader:
        total += batch.to("vgpu:1", non_blocking=True).sum()
    assert total.item() == rows.sum().item()


def test_a_forked_process_is_told_that_the_devices_are_not_its_own() -> None:
    held = torch.ones(2, device="vgpu:0")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            held.cpu()
        except onebox.OneboxError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    assert "forked process" in said
    assert held.tolist() == [1, 1]


def test_workers_follow_the_default_element_type() -> None:
    whole = torch.arange(1, 4, device="vgpu:1")
    assert (whole / 3).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal((whole / 3).cpu(), torch.arange(1, 4) / 3)
        assert torch.ones(2, device="vgpu:1").cpu().dtype == torch.float64
        assert whole.sqrt().cpu().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal((whole / 3).cpu(), torch.arange(1, 4) / 3)


def test_workers_of_all_open_pools_follow_the_default_element_type() -> None:
    whole = torch.arange(1, 4, device="vgpu:1")
    with onebox.open("cpu", threads=1):  # its devices are vgpu:0 … now
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal((whole / 3).cpu(), torch.arange(1, 4) / 3)
        finally:
            torch.set_default_dtype(torch.float32)
