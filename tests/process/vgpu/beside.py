"""The same function on a virtual device and on the CPU, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.vgpu.runtime.context import current_context

Case = Callable[[str], Any]
"""From the name of a device to what is computed there: any nest of tensors, numbers and the like."""

HERE = "vgpu:1"


def normal(*shape: int, device: str, requires_grad: bool = False) -> Tensor:
    """Return normal random numbers in float64 that are the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    made = torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)
    return made.requires_grad_(requires_grad)


def fill(module: torch.nn.Module) -> Any:
    """Give a module parameters in float64 that are the same whenever it is made."""
    module.double()
    with torch.no_grad():
        for number, leaf in enumerate(module.parameters()):
            leaf.copy_((torch.arange(leaf.numel()).view(leaf.shape) * (number + 1.3)).sin() * 0.5)
    return module


def beside(case: Case) -> None:
    """Require that a function gives on a virtual device what it gives on the CPU: in float64 to 1e-12."""
    same(_on_host(case(HERE)), _on_host(case("cpu")))


def fails_beside(case: Case, late: bool = False) -> None:
    """Require that a function fails on a virtual device, with the message that it has on the CPU.

    Args:
        case: The function.
        late: Whether it is a worker that finds out, so that the message has more words around.
    """
    with pytest.raises(Exception) as plain:
        case("cpu")
    with pytest.raises(Exception) as mine:
        case(HERE)
    said = str(plain.value).splitlines()[0]
    if late:
        assert said in str(mine.value)
    else:
        assert type(mine.value) is type(plain.value)
        assert str(mine.value)[:60] == said[:60]


def same(mine: Any, plain: Any) -> None:
    """Require that two nests are the same."""
    if isinstance(plain, Tensor):
        assert (mine.dtype, mine.shape) == (plain.dtype, plain.shape)
        tolerance = 1e-12 if plain.dtype in (torch.float64, torch.complex128) else 1e-5
        exact = not (plain.is_floating_point() or plain.is_complex())
        torch.testing.assert_close(
            mine, plain, rtol=0 if exact else tolerance, atol=0 if exact else tolerance, equal_nan=True
        )
    elif isinstance(plain, list):
        assert len(mine) == len(plain)
        for one, other in zip(mine, plain, strict=True):
            same(one, other)
    elif isinstance(plain, float):
        assert mine == pytest.approx(plain, rel=1e-12, nan_ok=True)
    else:
        assert mine == plain


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().resolve_conj().resolve_neg()
    if isinstance(value, dict):
        return [[key, _on_host(item)] for key, item in value.items()]
    return [_on_host(item) for item in value] if isinstance(value, list | tuple) else value


def waits() -> int:
    """Return how often the client has waited for a worker."""
    return sum(stream.channel.waits for stream in current_context().queues)


def listed(cases: list[Case]) -> Callable[[Case], Case]:
    """Return a decorator that adds a function to a list of cases."""

    def add(case: Case) -> Case:
        cases.append(case)
        return case

    return add
