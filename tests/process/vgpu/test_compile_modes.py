"""Compiled models in the modes that scripts use: inference, autocast, checkpointing, other backends, devices."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import onebox
from onebox.errors import OneboxError
from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.wire.protocol.requests import Define, StoredProgram
from tests.process.vgpu.compiling import HERE, close, compiled, fresh, moved, programs

__all__ = ["fresh", "programs"]


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


@pytest.mark.feature("Virtual devices: Compile a model with torch.compile")
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
    plain = CommandQueue.before

    def noted(self: CommandQueue, instruction: Any, frames: Any = ()) -> None:
        if isinstance(instruction, Define) and isinstance(instruction.what, StoredProgram):
            names.extend(each.name for each in instruction.what.program.operators)
        plain(self, instruction, frames)

    monkeypatch.setattr(CommandQueue, "before", noted)
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
    assert is_virtual(made)
    with pytest.raises((IndexError, OneboxError), match="index out of range"):
        made.cpu()


def test_the_layers_of_a_step_are_two_calls(programs: list[Any]) -> None:
    _, here = pair(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(40))))
    step = compiled(here)
    x = torch.randn(2, 8, device=HERE)
    stream = command_queue_of(tree_leaves(x)[0])
    counts = []
    for _ in range(3):
        here.zero_grad()
        step(x).sum().backward()
        counts.append((stream.native.recorded, stream.channel.waits, len(programs)))
    records, waits, calls = (now - then for now, then in zip(counts[2], counts[1], strict=True))
    assert (waits, calls) == (0, 2)
    assert records < 8, "what is left is the sum and its gradient"
