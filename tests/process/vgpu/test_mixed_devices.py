"""Operators on several devices at once are refused, in PyTorch's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DEVICES = 3


pytestmark = pytest.mark.usefixtures("pool", "in_float64")


START = "Expected all tensors to be on the same device, but found at least two devices, "
"""How PyTorch's own message begins; what follows names the two, in either order."""


def on(place: str, *shape: int) -> Tensor:
    return torch.ones(*shape, device=place)


@pytest.mark.parametrize("pair", [("vgpu:0", "vgpu:1"), ("vgpu:1", "cpu"), ("cpu", "vgpu:2")])
@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: on(a, 3) + on(b, 3),
        lambda a, b: on(a, 3).add_(on(b, 3)),
        lambda a, b: on(a, 3, 3) @ on(b, 3, 3),
        lambda a, b: torch.cat([on(a, 2), on(b, 2)]),
        lambda a, b: torch.stack([on(a, 2), on(b, 2)]),
        lambda a, b: torch.where(on(a, 2) > 0, on(b, 2), on(a, 2)),
        lambda a, b: torch.addmm(on(a, 2), on(a, 2, 2), on(b, 2, 2)),
        lambda a, b: torch.einsum("ij,jk->ik", on(a, 2, 2), on(b, 2, 2)),
        lambda a, b: nn.Linear(3, 2).to(a)(on(b, 4, 3)),
        lambda a, b: nn.Conv2d(1, 2, 3).to(a)(on(b, 1, 1, 4, 4)),
        lambda a, b: nn.Embedding(4, 2).to(a)(torch.zeros(2, dtype=torch.int64, device=b)),
        lambda a, b: nn.BatchNorm1d(3).to(a)(on(b, 4, 3)),
        lambda a, b: nn.functional.mse_loss(on(a, 3), on(b, 3)),
        lambda a, b: nn.functional.cross_entropy(on(a, 2, 3), torch.zeros(2, dtype=torch.int64, device=b)),
        lambda a, b: torch.gather(on(a, 2, 2), 0, torch.zeros(1, 2, dtype=torch.int64, device=b)),
        lambda a, b: torch.add(on(a, 3), on(a, 3), out=on(b, 3)),
        lambda a, b: torch.clip_(on(a, 3), on(b, 3), on(b, 3)),
        lambda a, b: on(a, 3).index_add_(0, torch.zeros(1, dtype=torch.int64, device=a), on(b, 1)),
        lambda a, b: torch._foreach_add([on(a, 3)], [on(b, 3)]),
    ],
)
def test_mixed_devices_are_refused(call: Callable[[str, str], Any], pair: tuple[str, str]) -> None:
    with pytest.raises(RuntimeError, match=START) as raised:
        call(*pair)
    text = str(raised.value)
    assert pair[0] in text
    assert pair[1] in text


def test_modules_that_look_themselves_say_so_in_their_own_words() -> None:
    with pytest.raises(
        RuntimeError, match="Input and parameter tensors are not at the same device, found input tensor"
    ):
        nn.LSTM(3, 2).to("vgpu:0")(on("vgpu:1", 4, 1, 3))
    with pytest.raises(RuntimeError, match="Expected query, key, and value to have the same device type"):
        query, other = on("vgpu:0", 1, 2, 4), on("vgpu:1", 1, 2, 4)
        nn.functional.scaled_dot_product_attention(query, other, other)


def test_mixed_devices_are_refused_in_backward_passes() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * torch.ones(grad.shape, device="vgpu:1")

    x = torch.ones(3, device="vgpu:0", requires_grad=True)
    with pytest.raises(RuntimeError, match=START):
        Wrong.apply(x).sum().backward()
    with pytest.raises(RuntimeError, match="device"):
        x.grad = torch.ones(3, device="vgpu:1")
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    x.sum().backward()
    optimizer.step()
    optimizer.state[x]["momentum_buffer"] = torch.ones(3, device="vgpu:1")
    with pytest.raises(RuntimeError, match="must be on the same device"):
        optimizer.step()


def test_single_numbers_of_the_host_are_allowed() -> None:
    x = torch.ones(2, 2, device="vgpu:1")
    number = torch.tensor(3.0)
    assert (x * number).tolist() == (number * x).tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert torch.where(x > 0, number, x).tolist() == [[3.0, 3.0], [3.0, 3.0]]
    x[torch.tensor([0]), torch.tensor([1])] = number  # indices of the host
    x.add_(number)
    assert x.tolist() == [[4.0, 6.0], [4.0, 4.0]]
    with pytest.raises(RuntimeError, match=START):
        x + torch.tensor(3.0, device="vgpu:0")
