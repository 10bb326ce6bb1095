"""Checks of the device in C++, in a process of their own: PyTorch has room for one device of private use.

``python -m tests.unit.vgpu.native.checks`` runs those that are named, or all, and prints a line for each: its name and
what was wrong, if anything.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from tests.unit.vgpu.native.loopback import DEVICE, QUEUES, WORKER, begin, opened

MOST_RECORDS = 1 << 12

CHECKS: dict[str, Callable[[], None]] = {}

CPU = torch.device("cpu")
ONE, OTHER = torch.device("vgpu", 0), torch.device("vgpu", 1)


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator that adds a check."""
    CHECKS[function.__name__] = function
    return function


def raised(action: Callable[[], Any]) -> BaseException:
    """Return the error that an action raises."""
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def flushed(*devices: torch.device) -> int:
    """Run all that is recorded; return how many buffers are left."""
    gc.collect()
    for device in devices or (ONE, OTHER):
        WORKER.flush(device.index)
    return len(WORKER.storages)


# ---- numerics


class _Attention(nn.Module):
    """A block as in GPT: views, a product of batches, a mask, a norm and dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norm(x)).split(16, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~self.mask, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return x + functional.gelu(self.out(mixed.transpose(1, 2).flatten(2)))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def _gpt() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 16), _Attention(), _Attention(), nn.Linear(16, 10))


def _trained(model: nn.Module, device: torch.device, inputs: Callable[[], Tensor]) -> list[Tensor]:
    """Return losses and weights of a few steps."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)
    found = []
    for _ in range(3):
        x = inputs().to(device)
        target = torch.randint(0, 10, (x.shape[0],)).to(device)
        optimizer.zero_grad()
        values = model(x)
        loss = functional.cross_entropy(values.mean(1) if values.dim() == 3 else values, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach().cpu())
    return [*found, *(parameter.detach().cpu() for parameter in model.parameters())]


@check
def training_has_the_bits_of_the_host() -> None:
    for make, inputs in (
        (_cnn, lambda: torch.randn(4, 3, 8, 8, dtype=torch.float64)),
        (_gpt, lambda: torch.randint(0, 10, (4, 6))),
    ):
        torch.manual_seed(1)
        model = make()
        for device in (ONE, OTHER):
            for here, there in zip(_trained(model, CPU, inputs), _trained(model, device, inputs), strict=True):
                assert torch.equal(here, there)


def _operators() -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    every = int(os.environ.get("EVERY", "12"))
    for number, info in enumerate(op_db):
        comparable = info.name not in _OTHERWISE and not info.name.startswith("jiterator")
        if number % every == 0 and torch.float32 in info.dtypes and comparable:
            yield info


_OTHERWISE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),  # whatever was there
    "as_strided",  # of a sample with gaps, which a copy closes
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout"),  # seeded by themselves, for the host alone
}


@check
def operators_have_the_values_of_the_host() -> None:
    tried, wrong = 0, []
    for info in _operators():
        for sample in list(info.sample_inputs("cpu", torch.float32, requires_grad=False))[:4]:
            given = (sample.input, *sample.args)
            try:
                torch.manual_seed(0)
                want = info.op(*given, **sample.kwargs)
                args, kwargs = tree_map(_there, (given, sample.kwargs))
                torch.manual_seed(0)
                got = tree_map(_here, info.op(*args, **kwargs))
            except (NotImplementedError, RuntimeError, ValueError, TypeError):
                continue  # not on the host, either; or of the kinds that this worker does not do
            tried += 1
            try:
                torch.testing.assert_close(got, want, equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{info.name}: {error}")
    assert tried > 100, tried
    assert not wrong, "\n".join(wrong)


def _there(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(ONE)
    return ONE if isinstance(value, torch.device) or value == "cpu" else value


def _here(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


@check
def gradients_flow_through_views_and_writes() -> None:
    def run(device: torch.device) -> Tensor:
        x = torch.arange(12.0).to(device).requires_grad_()
        y = x * 2
        y.view(3, 4)[1].mul_(3)
        z = y.as_strided((2, 2), (5, 1), 1).sum() + y[::2].exp().sum() + y.view(3, 4).t().diagonal().sum().pow(2)
        (z + y.chunk(3)[2].cos().sum()).backward()
        assert x.grad is not None
        return x.grad.cpu()

    assert torch.equal(run(CPU), run(ONE))


@check
def lazy_conjugates_and_negatives_are_resolved() -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    assert torch.equal(x.to(ONE).conj().cpu(), x.conj())
    assert torch.equal((x.to(ONE).conj().imag * 2).cpu(), x.conj().imag * 2)
    assert torch.equal((x.to(ONE).mH @ x.to(ONE)).cpu(), x.mH @ x)


# ---- what is recorded


@check
def views_and_changes_of_layout_make_no_call() -> None:
    x = torch.ones(4, 6, device=ONE)
    flushed()
    before = QUEUES[0].calls
    for view in (x.view(24), x.t(), x[1:3, ::2], x.expand(2, 4, 6), x.unsqueeze(0), x.detach(), x.view(torch.int32)):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x.chunk(2), x.unbind(), x.unfold(0, 2, 1), x.movedim(0, 1), x.diagonal(), x.data
    x.t_().transpose_(0, 1).unsqueeze_(0).squeeze_(0)
    assert QUEUES[0].calls == before


@check
def a_structured_operator_is_one_call() -> None:
    x = torch.ones(3, device=ONE)
    x + x
    flushed()
    y = x + x
    assert QUEUES[0].calls == 1
    y.add_(x)
    assert QUEUES[0].calls == 2


@check
def a_loop_is_the_same_batch_again() -> None:
    x, w = torch.randn(4, 4, device=ONE), torch.randn(4, 4, device=ONE, requires_grad=True)
    seen = []
    for _ in range(4):
        (x @ w).relu().sum().backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
        flushed(ONE)
        seen.append(WORKER.batches[-1])
    assert len(set(seen[1:])) == 1


@check
def numbers_are_no_part_of_a_batch() -> None:
    x = torch.ones(3, device=ONE)
    seen = []
    for number in (0.5, 0.25, 0.125):
        y = (x * number).add_(x, alpha=number)
        flushed(ONE)
        assert torch.equal(y.cpu(), torch.full((3,), 2 * number))
        seen.append(WORKER.batches[-2])
    assert seen[1] == seen[2]
    assert [torch.arange(0.0, end, 0.5, device=ONE).numel() for end in (1.0, 2.0, 1.0)] == [2, 4, 2]


@check
def nothing_is_left() -> None:
    before = flushed()
    x = torch.randn(8, 8, device=ONE, requires_grad=True)
    for _ in range(3):
        (x @ x).tanh()[2:4].sum().backward()
    del x
    assert flushed() == before


@check
def only_so_many_records_are_kept() -> None:
    start = torch.ones(2, device=OTHER)
    for number in range(MOST_RECORDS + 100):
        start + number
        if number % 500 == 0:
            flushed(OTHER)
    assert QUEUES[1].records <= MOST_RECORDS
    assert torch.equal((start + 3).cpu(), torch.full((2,), 4.0))
    flushed()
    assert len(WORKER.kernels) <= QUEUES[0].records + QUEUES[1].records


@check
def an_allocation_that_was_not_used_is_taken_back() -> None:
    flushed()
    x = torch.empty(4, device=ONE)
    assert QUEUES[0].fresh(DEVICE.number(x))
    assert not QUEUES[0].fresh(DEVICE.number(x))
    assert QUEUES[0].calls == 0
    DEVICE.pass_on(x)
    y = torch.empty(4, device=ONE)
    y.fill_(1)
    assert not QUEUES[0].fresh(DEVICE.number(y))


@check
def threads_record_in_an_order_that_their_tensors_allow() -> None:
    failures = []

    def work(start: float) -> None:
        try:
            x = torch.full((3,), start, device=ONE, requires_grad=True)
            y = x
            for _ in range(300):
                y = y * 1.0 + 1.0
            y.sum().backward()
            assert y.detach().cpu()[0] == start + 300
            assert x.grad is not None and x.grad.cpu()[0] == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# ---- the device


@check
def devices_are_chosen_as_for_any_accelerator() -> None:
    assert torch.accelerator.device_count() == 2
    with torch.device("vgpu"):
        assert torch.zeros(2).device == ONE
    torch.accelerator.set_device_index(1)
    try:
        assert torch.zeros(2, device="vgpu").device == OTHER
        assert torch.zeros(2).to("vgpu").device == OTHER
        assert torch.tensor([1.0], device="vgpu").device == OTHER
    finally:
        torch.accelerator.set_device_index(0)
    x = torch.ones(2, device=OTHER)
    assert x.new_zeros(2).device == x.new(3).device == torch.zeros_like(x).device == OTHER
    assert type(x) is Tensor
    assert type(nn.Parameter(x)) is nn.Parameter


@check
def errors_come_at_their_line_and_with_their_type() -> None:
    x = torch.ones(2, 3, device=ONE)
    here = raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert type(raised(lambda: x @ x)) is type(here)
    assert "same device" in str(raised(lambda: x + x.to(OTHER)))
    assert "same device" in str(raised(lambda: x + torch.ones(3)))
    leaf = torch.ones(2, device=ONE, requires_grad=True)
    y = leaf.exp()
    y.add_(1)
    assert "modified by an inplace operation" in str(raised(lambda: y.sum().backward()))


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise KeyError(f"of mine, in {threading.current_thread().name != 'MainThread'}")


@check
def an_error_of_backward_comes_from_the_threads_of_the_device() -> None:
    error = raised(lambda: _Failing.apply(torch.ones(2, device=ONE, requires_grad=True)).sum().backward())
    assert isinstance(error, KeyError)
    assert "True" in str(error)


@check
def generators_draw_as_those_of_their_worker() -> None:
    made, host = torch.Generator(OTHER).manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(2):
        assert torch.equal(torch.randn(4, generator=made, device=OTHER).cpu(), torch.randn(4, generator=host))
    state = made.get_state()
    first = torch.rand(3, generator=made, device=OTHER).cpu()
    made.set_state(state)
    assert torch.equal(first, torch.rand(3, generator=made, device=OTHER).cpu())
    assert (made.device, made.initial_seed()) == (OTHER, 5)
    del made
    gc.collect()
    assert QUEUES[1].take_ended_generators()


@check
def storages_grow_shrink_and_are_copied() -> None:
    x = torch.arange(6.0, device=ONE)
    x.resize_(2, 5)
    assert torch.equal(x.flatten()[:6].cpu(), torch.arange(6.0))
    view, storage = x[0, :4], x.untyped_storage()
    twin = copy.deepcopy(storage)
    assert storage.nbytes() == 40 and twin.data_ptr() != storage.data_ptr()
    assert torch.equal(torch.empty(0, device=ONE).set_(twin, 0, (4,), (1,)).cpu(), view.cpu())
    storage.resize_(0)
    storage.resize_(40)
    x.fill_(2)
    assert torch.equal(view.cpu(), torch.full((4,), 2.0))
    assert torch.UntypedStorage(8, device=ONE).nbytes() == 8
    y = torch.empty(0, device=ONE).set_(view)
    assert y.data_ptr() == view.data_ptr()


@check
def copies_and_files_keep_values_and_ties() -> None:
    x = torch.randn(3, 4, device=ONE)
    tied = copy.deepcopy([x, x[1], x.t()])
    assert torch.equal(tied[0].cpu(), x.cpu())
    assert tied[1].untyped_storage().data_ptr() == tied[2].untyped_storage().data_ptr() == tied[0].data_ptr()
    file = io.BytesIO()
    torch.save({"x": x, "row": x[1]}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    assert torch.equal(loaded["x"], x.cpu())
    assert loaded["row"].data_ptr() == loaded["x"][1].data_ptr()


@check
def versions_rise_with_writes() -> None:
    x, y = torch.ones(2, device=ONE), torch.ones(2, device=ONE)
    before = x._version
    x.add_(1)
    x[0] = 3
    torch._foreach_add_([x, y], 1.0)
    assert (x._version, y._version) == (before + 3, 1)
    with torch.inference_mode():
        assert (x + 1).is_inference()


@check
def transformations_of_functions_work() -> None:
    x = torch.randn(3, 4)

    def f(value: Tensor) -> Tensor:
        return (value.sin() * value).sum()

    def both(function: Callable[[Tensor], Tensor]) -> None:
        assert torch.allclose(function(x.to(ONE)).cpu(), function(x))

    both(torch.func.grad(f))
    both(torch.func.vmap(lambda row: row.softmax(0)))
    both(torch.func.hessian(lambda value: value.pow(3).sum()))


@check
def a_forked_process_cannot_record() -> None:
    x = torch.ones(2, device=ONE)
    flushed()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        DEVICE.after_fork()
        os.write(writer, type(raised(lambda: x + 1)).__name__.encode())
        os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 100) == b"RuntimeError"
    os.close(reader)


@check
def a_closed_device_ends_its_tensors_quietly() -> None:
    DEVICE.set_device_count(3)
    opened(2, 1, 16)
    tensors = [torch.ones(2, device="vgpu:2")]
    QUEUES[2].close()
    assert isinstance(raised(lambda: tensors[0] + 1), RuntimeError)
    tensors.clear()
    opened(2, 1, 16)
    y = torch.ones(2, device="vgpu:2")
    assert QUEUES[2].calls == 1  # without the buffers of the one before
    WORKER.flush(2)
    assert torch.equal(y.cpu(), torch.ones(2))


def main() -> None:
    """Run the checks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin(2, MOST_RECORDS)
    for name in sys.argv[1:] or CHECKS:
        try:
            CHECKS[name]()
            print(f"{name}\t", flush=True)
        except BaseException:
            print(f"{name}\t{traceback.format_exc()!r}", flush=True)


left = []  # of tensors that are alive when the interpreter ends

if __name__ == "__main__":
    main()
    left.append(torch.ones(3, device=ONE).requires_grad_().exp())
