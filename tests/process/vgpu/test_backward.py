"""Errors in a backward pass on a virtual device arrive as themselves, wherever in the pass they are raised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.vgpu import signals
from onebox.vgpu.dispatch import registry

pytestmark = pytest.mark.usefixtures("pool")


class Mine(Exception):
    """What the user's own code raises."""


def _fail(*_: Any) -> Any:
    raise Mine("on purpose")


class Failing(torch.autograd.Function):
    """A function whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return _fail()


def _tensor_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(_fail)
    return y


def _node_hook(x: Tensor) -> Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_hook(_fail)
    return y


def _node_prehook(x: Tensor) -> Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(_fail)
    return y


def _saved_tensor(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, _fail):
        return x * x


def _module_hook(x: Tensor) -> Tensor:
    module = torch.nn.Linear(3, 3).to(x.device)
    module.register_full_backward_hook(_fail)
    result: Tensor = module(x)
    return result


def _inner(x: Tensor) -> Tensor:
    """Return a tensor whose backward pass begins another one, which fails."""

    def begin(slope: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = Failing.apply(x).sum()
        return torch.autograd.grad(inner, x)[0]

    y = x * 2
    y.register_hook(begin)
    return y


WAYS = [Failing.apply, _tensor_hook, _node_hook, _node_prehook, _saved_tensor, _module_hook, _inner]


@pytest.mark.parametrize("device", ["vgpu:0", "vgpu:1"])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_user_is_raised_and_the_next_pass_works(way: Callable[[Tensor], Tensor], device: str) -> None:
    x = torch.ones(3, 3, device=device, requires_grad=True)
    with pytest.raises(Mine, match="on purpose"):
        way(x).sum().backward()
    x.grad = None
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.cpu().eq(2).all()


def test_an_error_arrives_though_python_has_looked_nothing_up_before() -> None:
    """Any lookup that misses Python's cache of attributes drops the pending error (``_PyType_Lookup``)."""

    def forget(*_: Any) -> Any:
        setattr(signals, f"unused_{number}", None)  # the specialised lookups in the module end
        sys._clear_type_cache()
        return _fail()

    for number in range(20):
        x = torch.ones(3, 3, device="vgpu:0", requires_grad=True)
        y = x * 2
        y.register_hook(forget)
        try:
            with pytest.raises(Mine, match="on purpose"):
                y.sum().backward()
        finally:
            delattr(signals, f"unused_{number}")


def test_an_operator_that_is_refused_in_a_backward_pass_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 3, device="vgpu:0", requires_grad=True)
    y = x.tanh()
    monkeypatch.setitem(registry.specials, "aten::tanh_backward", _fail)
    with pytest.raises(Mine, match="on purpose"):
        y.sum().backward()


AFTERWARDS = """
import torch
x = torch.ones(3, requires_grad=True)
x.square().sum().backward()  # at the first such pass PyTorch counts its devices
import onebox
from onebox.vgpu import attach
with onebox.open("cpu*2", threads=1) as pool:
    attach(pool)
    y = x.detach().to("vgpu:1").requires_grad_()
    (y * 3).sum().to("vgpu:0").backward()
    print(y.grad.tolist())
"""


@pytest.mark.long  # a process that imports PyTorch
def test_a_pass_before_there_was_a_virtual_device() -> None:
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[3.0, 3.0, 3.0]\n"
