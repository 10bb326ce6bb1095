"""``torch.compile(model, backend="onebox")`` gives what eager operators on the device give, in float64."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import onebox
from onebox.errors import OneboxError
from onebox.vgpu import VirtualTensor
from onebox.vgpu.stream import Stream
from onebox.wire.messages import Define, StoredProgram
from tests.models import CASES
from tests.reference import call

HERE = "vgpu:0"
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu*2", threads=1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles for itself, in float64."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Fill in (device, program) of each program that is called."""
    called: list[tuple[int, int]] = []
    plain = Stream.call

    def counted(self: Stream, program: int, handles: Any, outputs: int) -> int:
        called.append((self.worker, program))
        return plain(self, program, handles, outputs)

    monkeypatch.setattr(Stream, "call", counted)
    return called


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="onebox", **options)


def moved(values: Any, device: Any = HERE) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def close(left: Any, right: Any) -> None:
    torch.testing.assert_close(moved(left, "cpu"), moved(right, "cpu"), **EXACT)


def trained(name: str, device: Any, wrap: Callable[[nn.Module], Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train a model for three steps; the last batch has another shape."""
    case = CASES[name]
    model = case.model().to(device)
    function = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)
    losses = []
    for inputs, targets in case.batches([4, 4, 3]):
        optimizer.zero_grad()
        loss = case.loss(call(function, moved(inputs, device)), moved(targets, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    return [loss.cpu() for loss in losses], state


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "branches", "tied", "unet", "late", "prompted"])
def test_training_gives_what_eager_operators_give(name: str, programs: list[Any]) -> None:
    eager = trained(name, HERE, lambda model: model)
    assert not programs
    made = trained(name, HERE, compiled)
    assert len(programs) >= 6, "forward and backward of each step are programs"
    assert len(set(programs)) >= 4, "a batch of another size has programs of its own"
    torch.testing.assert_close(made, eager, rtol=0, atol=1e-15)
    torch.testing.assert_close(made, trained(name, "cpu", lambda model: model), **EXACT)


def test_dropout_draws_what_eager_operators_draw() -> None:
    eager = trained("dropping", HERE, lambda model: model)
    torch.testing.assert_close(trained("dropping", HERE, compiled), eager, rtol=0, atol=0)


def test_each_call_has_a_mask_of_its_own_and_backward_has_the_same() -> None:
    function = compiled(lambda x: functional.dropout(x, 0.3))
    x = torch.ones(4000, device=HERE, requires_grad=True)
    masks = []
    for _ in range(3):
        y = function(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient.cpu(), y.detach().cpu())
        masks.append(y.detach().cpu() > 0)
        assert 0.65 < masks[-1].double().mean().item() < 0.75
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_random_numbers_go_on_behind_a_compiled_call() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x + torch.rand_like(x), torch.randn(3, device=x.device), torch.randperm(5, device=x.device)

    x = torch.zeros(2, 3, device=HERE)
    torch.manual_seed(5)
    eager = [function(x), function(x), torch.rand(2, device=HERE)]
    torch.manual_seed(5)
    step = compiled(function)
    torch.testing.assert_close(moved([step(x), step(x), torch.rand(2, device=HERE)], "cpu"), moved(eager, "cpu"))


# ---- functions of every kind: the same results, and the same written to the arguments


def _writes(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y[0] = x.sum()
    return x * 2


def _writes_by_a_view(x: Tensor, y: Tensor) -> Tensor:
    part = x[1:]
    part.mul_(y[1:])
    return part + 1


def _views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x * y
    return x.view(-1), x, x.t(), x + 1, z, z.view(-1), z[1:]


def _several(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    values, places = x.max(0)
    low, high = x.split([1, 1])
    return values, places, low - high, torch.unbind(y)[1], y.topk(2), {"nested": [x.sum()]}


def _strides(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x.t() * 2).contiguous().t()
    return z.as_strided((3, 2), (1, 3)), x.as_strided((2, 2), (2, 1)), z, y.expand(4, 2, 3)


def _constants(x: Tensor, y: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0], device=x.device) * torch.tensor(2.0) + torch.arange(3, device=x.device)


def _host(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    there = (x * 2).cpu() + 1
    return there, there.to(x.device) * y


def _breaks(x: Tensor, y: Tensor) -> Tensor:
    z = x.sin()
    return (z * 2 if z.sum().item() > y.sum().item() else z.cos()) + 1


def _complex(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    spectrum = torch.fft.fft(x * 2) * torch.view_as_complex(torch.stack([y, x], -1)).conj()
    return spectrum.abs() + 1, spectrum, spectrum.imag * 2, torch.fft.ifft(spectrum).real


def _branches(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > y.sum(), lambda x: x.sin() + y, lambda x: x.cos() - y, (x,)) * 2


def _selects(x: Tensor, y: Tensor) -> Tensor:
    return x[x > 0] * 2


@pytest.mark.parametrize(
    "function",
    [_writes, _writes_by_a_view, _views, _several, _strides, _constants, _host, _breaks, _complex, _branches, _selects],
    ids=lambda function: function.__name__.strip("_"),
)
def test_a_function_does_what_it_does_on_the_host(function: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(2, 3, generator=generator) for _ in range(2)]
    here = moved(values)
    step = compiled(function)
    for _ in range(2):
        close(step(*here), function(*values))
        close(here, values)


def test_what_a_function_gives_out_may_be_written_to() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x.clone(), y, y.clone(), y.clone().view(-1), x.view(-1)

    host = torch.arange(6.0).view(2, 3)
    x = host.to(HERE)
    first, second, third, fourth, fifth = compiled(function)(x)
    first.add_(1)
    close([x, first], [host, host + 1])
    second.add_(1)
    close([second, third, fourth], [host * 2 + 1, host * 2, (host * 2).view(-1)])
    third.zero_()
    close(fourth, (host * 2).view(-1))
    fifth.mul_(3)
    close(x, host * 3)


def test_sizes_and_numbers_that_change() -> None:
    def function(x: Tensor, rows: int, factor: float) -> Tensor:
        return x.view(rows, -1).sum(1) * rows * factor

    step = compiled(function)
    for size, rows, factor in [(24, 2, 0.5), (24, 3, 0.25), (12, 4, 0.125), (24, 2, 0.75)]:
        x = torch.arange(float(size))
        close(step(x.to(HERE), rows, factor), function(x, rows, factor))


def test_a_size_that_is_marked_as_dynamic_runs_operator_by_operator() -> None:
    x = torch.randn(2, 3, device=HERE)
    torch._dynamo.mark_dynamic(x, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(compiled(lambda x: x * 2)(x), x * 2)
    assert any("fixed shapes" in str(warning.message) for warning in caught)


def test_numbers_and_tensors_of_the_host_among_the_arguments() -> None:
    def function(x: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
        return (x * factor) @ weight.to(x.device)

    x, factor, weight = torch.randn(2, 3), torch.tensor(3.0), torch.randn(3, 2)
    close(compiled(function)(x.to(HERE), factor, weight), function(x, factor, weight))


def test_a_model_of_the_host_stays_there() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    made = compiled(model)(x)
    assert type(made) is Tensor
    close(made, model(x))


# ---- modes


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model on the host, and the same on the device."""
    torch.manual_seed(1)
    model = build()
    return model, copy.deepcopy(model).to(HERE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [True, False])
def test_inference_and_running_statistics(mode: Any, training: bool) -> None:
    host, here = pair(Norm)
    host.train(training)
    here.train(training)
    x = torch.randn(3, 2, 5, 5)
    step = compiled(here, fullgraph=True)
    with mode():
        for _ in range(2):
            left, right = step(x.to(HERE)), host(x)
            close(left, right)
    if mode is torch.enable_grad:
        left.sum().backward()
        right.sum().backward()
        close([p.grad for p in here.parameters()], [p.grad for p in host.parameters()])
    close(dict(here.named_buffers()), dict(host.named_buffers()))


def test_channels_last_keeps_its_strides() -> None:
    host, here = pair(lambda: Norm().to(memory_format=torch.channels_last))
    x = torch.randn(3, 2, 6, 6).to(memory_format=torch.channels_last)
    step = compiled(lambda x: (here(x), here.conv(x).flatten(1)))
    made, flat = step(x.to(HERE))
    expected = here(x.to(HERE))
    assert made.stride() == expected.stride()
    close([made, flat], [host(x), host.conv(x).flatten(1)])
    close(made.as_strided((4,), (1,)), expected.as_strided((4,), (1,)))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # PyTorch's own, from loading Inductor
def test_the_default_backend_and_others(programs: list[Any]) -> None:
    host, here = pair(lambda: Norm().eval())
    for size in (2, 5, 4):
        x = torch.randn(size, 2, 5, 5)
        close(torch.compile(here, mode="reduce-overhead")(x.to(HERE)), host(x))
    assert len(programs) == 3
    close(torch.compile(here, backend="aot_eager")(x.to(HERE)), host(x))
    assert len(programs) == 3, "another backend runs it operator by operator"
    here.compile()
    close(here(x.to(HERE)), host(x))
    assert len(programs) == 4
    shaped = torch.compile(lambda x, rows: x.reshape(rows, -1).sum(1) * rows)
    for rows in (2, 5, 10):
        close(shaped(x.to(HERE), rows), x.reshape(rows, -1).sum(1) * rows)
    assert len(programs) == 7


def test_autocast() -> None:
    _, here = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).float())
    x = torch.randn(5, 3).float().to(HERE)
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        made, eager = compiled(here)(x), here(x)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made.cpu(), eager.cpu())
    made.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in here.parameters())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.25}, {"masked": True}, {"scale": 0.5}])
def test_attention_is_the_kernel_of_eager_operators(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    plain = Stream.before

    def noted(self: Stream, instruction: Any, frames: Any = ()) -> None:
        if isinstance(instruction, Define) and isinstance(instruction.what, StoredProgram):
            names.extend(each.name for each in instruction.what.program.operators)
        plain(self, instruction, frames)

    monkeypatch.setattr(Stream, "before", noted)
    generator = torch.Generator().manual_seed(6)
    host = [torch.randn(2, 2, 5, 4, generator=generator) for _ in range(3)]
    mask = (torch.rand(5, 5, generator=generator) > 0.3) | torch.eye(5, dtype=torch.bool)
    options = {**options, "attn_mask": mask.to(HERE)} if options.pop("masked", False) else options
    ends = []
    for wrap in (lambda function: function, compiled):
        values = [value.to(HERE).requires_grad_() for value in host]
        torch.manual_seed(1)
        made = wrap(functional.scaled_dot_product_attention)(*values, **options)
        made.square().sum().backward()
        ends.append(moved([made.detach(), *(value.grad for value in values)], "cpu"))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-15)
    fused = [name for name in names if "flash_attention" in name]
    assert len(fused) == (0 if "dropout_p" in options else 2)


def test_checkpointing_hooks_and_a_second_backward() -> None:
    host, here = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh()))
    here[0].weight.register_hook(lambda gradient: gradient * 2)
    host[0].weight.register_hook(lambda gradient: gradient * 2)
    x = torch.randn(2, 3)
    for model, step, given in (host, lambda f: f, x), (here, compiled, x.to(HERE)):
        loss = step(lambda model, x: checkpoint(model, x, use_reentrant=False).square().sum())(model, given)
        loss.backward(retain_graph=True)
        loss.backward()
    close([p.grad for p in here.parameters()], [p.grad for p in host.parameters()])


# ---- devices


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.second(x.to(self.second.weight.device))
        return x.to(self.first.weight.device) + self.first.bias.sum()


def test_a_graph_over_two_devices_is_programs_on_both(programs: list[Any]) -> None:
    host = TwoDevices()
    here = copy.deepcopy(host)
    here.first.to("vgpu:0")
    here.second.to("vgpu:1")
    x = torch.randn(2, 4)
    left, right = compiled(here, fullgraph=True)(x.to(HERE)), host(x)
    close(left, right)
    assert str(left.device) == HERE
    left.sum().backward()
    right.sum().backward()
    close([p.grad for p in here.parameters()], [p.grad for p in host.parameters()])
    assert {worker for worker, _ in programs} == {0, 1}


def test_threads_with_a_device_each() -> None:
    models = [pair(lambda: nn.Linear(4, 3))[0].to(f"vgpu:{index}") for index in range(2)]
    steps = [compiled(model) for model in models]
    x = torch.randn(2, 4)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(5):
                steps[index](x.to(f"vgpu:{index}")).sum().backward()
        except BaseException as error:
            errors.append(error)

    for index in range(2):
        work(index)  # in torch 2.11 only one thread at a time can compile
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    for model in models:
        close(model.weight.grad, (10 * x.sum(0)).expand(3, 4))


def test_buffers_and_programs_end(pool: onebox.Pool) -> None:
    _, here = pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    step = compiled(here)
    x = torch.randn(64, 64, device=HERE)
    used = []
    for _ in range(4):
        step(x).sum().backward()
        for parameter in here.parameters():
            parameter.grad = None
        torch.vgpu.synchronize(0)  # type: ignore[attr-defined]
        used.append(torch.vgpu.memory_allocated(0))  # type: ignore[attr-defined]
    assert used[-1] == used[1]


def test_a_program_that_fails_is_named_where_its_result_is_read() -> None:
    table = torch.randn(3, 2, device=HERE)
    step = compiled(lambda table, places: functional.embedding(places, table) * 2)
    made = step(table, torch.tensor([7], device=HERE))
    assert isinstance(made, VirtualTensor)
    with pytest.raises((IndexError, OneboxError), match="index out of range"):
        made.cpu()


def test_the_layers_of_a_step_are_two_calls(programs: list[Any]) -> None:
    _, here = pair(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(40))))
    step = compiled(here)
    x = torch.randn(2, 8, device=HERE)
    stream = tree_leaves(x)[0]._handle.stream
    counts = []
    for _ in range(3):
        here.zero_grad()
        step(x).sum().backward()
        counts.append((stream.records, stream.waits, len(programs)))
    records, waits, calls = (now - then for now, then in zip(counts[2], counts[1], strict=True))
    assert (waits, calls) == (0, 2)
    assert records < 8, "what is left is the sum and its gradient"
