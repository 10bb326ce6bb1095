"""Operators in place, views and aliases on a virtual device: autograd minds them as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from tests.process.vgpu.beside import Case, beside, fails_beside, listed, normal

WORKING: list[Case] = []
FAILING: list[Case] = []
works, fails = listed(WORKING), listed(FAILING)


pytestmark = pytest.mark.usefixtures("pool")


def leaf(*shape: int, device: str) -> Tensor:
    return normal(*shape, device=device, requires_grad=True)


# ---- operators in place, views, aliases


@works
def views_written_to(device: str) -> Any:
    x = leaf(4, 3, device=device)
    y = x * 2
    y[1] *= 3
    y[:, 0].add_(1)
    flat = y.view(12)
    flat[3:5] = 0
    y.pow(2).sum().backward()
    return x.grad, y, flat, y._version, flat._version


@works
def version_counters(device: str) -> Any:
    x = normal(3, device=device)
    seen = [x._version]
    alias, plain, view = x.detach(), x.data, x.view(3)
    for step in (lambda: x.add_(1), lambda: alias.mul_(2), lambda: plain.mul_(2), view.zero_):
        step()
        seen += [x._version, alias._version, plain._version, view._version]
    torch.add(x, x, out=x)
    return [*seen, x._version], x


@works
def detached_tensors_share_elements(device: str) -> Any:
    x = normal(4, device=device)
    alias, plain = x.detach(), x.data
    alias[1] = 5
    plain[2:] = 7
    alias.view(2, 2)[0, 0] = -1
    x += 1
    return x, alias, plain


@works
def data_changed_behind_autograds_back(device: str) -> Any:
    x = leaf(4, device=device)
    y = x * x
    x.data.mul_(2)
    y.sum().backward()
    return x.grad, x


@works
def the_tensor_written_to_is_returned(device: str) -> Any:
    made = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            a, b = normal(4, device=device) * 1, normal(4, device=device) * 3
            a.mul_(a)
            made += [torch.ops.aten.mul_(a, b) is a, torch.add(a, a, out=a) is a, torch.add(a, b, out=a) is a, a, b]
    return made


@works
def parts_written_to_without_gradients(device: str) -> Any:
    weight = leaf(3, 2, device=device)
    with torch.no_grad():
        weight[0].add_(1)
        for part in weight.unbind()[1:]:
            part.zero_()
        for part in weight.chunk(3):
            part.sub_(0.5)
    (weight**2).sum().backward()
    return weight.grad, weight._version


@fails
def saved_result_written_to(device: str) -> Any:
    x = leaf(3, device=device)
    y = x.exp()
    y.add_(1)
    y.sum().backward()


@fails
def saved_view_of_a_base_written_to(device: str) -> Any:
    y = leaf(4, device=device) * 1
    squared = y[:2] * y[:2]
    y.mul_(2)
    squared.sum().backward()


@fails
def alias_of_a_saved_tensor_written_to(device: str) -> Any:
    x = leaf(4, device=device)
    y = x * x
    x.detach().mul_(2)
    y.sum().backward()


@fails
def leaf_written_to(device: str) -> Any:
    leaf(3, device=device).add_(1)


@fails
def view_of_a_leaf_written_to(device: str) -> Any:
    leaf(3, device=device)[0] = 1


@fails
def one_of_several_views_written_to(device: str) -> Any:
    leaf(4, device=device).clone().split(2)[0].mul_(2)


@fails
def view_made_without_gradients_written_to(device: str) -> Any:
    y = leaf(3, 2, device=device) * 1
    with torch.no_grad():
        view = y[0]
    view.add_(1)


@fails
def inference_tensor_written_to(device: str) -> Any:
    with torch.inference_mode():
        made = normal(4, device=device) * 1
    made.add_(1)


@fails
def inference_tensor_saved_for_backward(device: str) -> Any:
    with torch.inference_mode():
        made = normal(4, device=device) * 1
    return leaf(4, device=device) * made


@works
def views_in_inference_mode(device: str) -> Any:
    x = normal(4, 4, device=device)
    with torch.inference_mode():
        views = [x.view(16), x[0], x.t(), x.detach(), x.view(1, 1, 4, 4).expand(1, 2, -1, -1), *x.split(3)]
        made = x * 2
        part = made[1:]
        part.add_(1)
        x[0] = 7
    return [view.is_inference() for view in views], views, made.is_inference(), part.is_inference(), made


@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_and_gradients_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_mistakes_are_told_as_on_the_cpu(case: Case) -> None:
    fails_beside(case)


def test_what_could_not_be_written_to_a_view_is_not_taken_for_its_base() -> None:
    x = torch.zeros(6, device="vgpu:1")
    x[1:].copy_(x[:-1])
    with pytest.raises(onebox.OneboxError, match="refer to a single memory location"):
        x.sum().item()


def test_a_failure_is_told_beside_a_view_that_pytorch_cannot_explain_any_more() -> None:
    """It is among the objects that are searched for gradients."""
    x = torch.ones(2, 3, device="vgpu:0", requires_grad=True) * 1
    views = x.unbind(0)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="Unbind"):
        views[0].is_leaf  # noqa: B018
    test_what_could_not_be_written_to_a_view_is_not_taken_for_its_base()


@pytest.mark.parametrize("by_set", [False, True])
def test_a_view_of_a_tensor_with_other_memory_has_the_gradient_of_the_cpu(by_set: bool) -> None:
    def run(place: str) -> list[Any]:
        x = torch.arange(3.0, device=place).requires_grad_()
        view, memory = x.permute(0), torch.arange(6.0, device=place)[2:5]
        with torch.no_grad():
            x.mul_(2)
            if by_set:
                x.set_(memory)
            else:
                x.data = memory
        (view * torch.tensor([1.0, 10.0, 100.0], device=place)).sum().backward()
        assert x.grad is not None
        return [x.tolist(), view.tolist(), x.grad.tolist()]

    assert run("vgpu:0") == run("cpu")
