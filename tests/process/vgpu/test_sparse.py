"""Sparse gradients on a virtual device, and what else there is of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.filterwarnings("ignore:Sparse (invariant|CSR)"), pytest.mark.usefixtures("pool")]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": torch.optim.SparseAdam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
}


def _trained(device: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[Tensor, Tensor]:
    """Return the weights of an embedding after some steps with sparse gradients of two backward passes each."""
    torch.manual_seed(0)
    words = nn.Embedding(10, 4, sparse=True, dtype=torch.float64).to(device)
    steps = optimizer(words.parameters())
    for step in range(4):
        seen = torch.tensor([1, 3, 3, step], device=device)
        steps.zero_grad()
        (words(seen) ** 2).sum().backward()
        (words(seen[:2]) ** 2).sum().backward()
        steps.step()
    assert words.weight.grad is not None
    assert words.weight.grad.is_sparse
    return words.weight.detach().cpu(), words.weight.grad.cpu().to_dense()


@pytest.mark.feature("Virtual devices: Train on packed sequences and with sparse gradients")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients_train_as_on_the_cpu(name: str) -> None:
    expected = _trained("cpu", OPTIMIZERS[name])
    torch.testing.assert_close(_trained("vgpu:1", OPTIMIZERS[name]), expected, rtol=1e-12, atol=1e-12)


def _scattered() -> Tensor:
    indices = torch.tensor([[2, 0, 2, 1], [1, 3, 1, 0]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 4), check_invariants=True)


def test_a_sparse_tensor_goes_to_a_device_and_back() -> None:
    there = _scattered().to("vgpu:0")
    assert (there.device.type, there.is_sparse, there._nnz(), there.is_coalesced()) == ("vgpu", True, 4, False)
    assert (there.sparse_dim(), there.dense_dim(), there.shape) == (2, 0, (3, 4))
    torch.testing.assert_close(there.cpu().to_dense(), _scattered().to_dense())
    torch.testing.assert_close(there.to("vgpu:1").to_dense().cpu(), _scattered().to_dense())
    assert repr(there).startswith("tensor(indices=tensor([[2, 0, 2, 1]")


def test_coalescing_sorts_and_adds() -> None:
    ours, theirs = _scattered().to("vgpu:0").coalesce(), _scattered().coalesce()
    assert ours.is_coalesced()
    torch.testing.assert_close(ours.indices().cpu(), theirs.indices())
    torch.testing.assert_close(ours.values().cpu(), theirs.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s + s,
        lambda s: s * 2.0,
        lambda s: s / 4.0,
        lambda s: -s,
        lambda s: torch.ones(3, 4, device=s.device) + s,
        lambda s: torch.ones(3, 4, device=s.device).add_(s, alpha=-0.5),
        lambda s: s.clone().mul_(3.0),
        lambda s: s.double(),
        lambda s: torch.arange(12.0, device=s.device).view(3, 4).sparse_mask(s.coalesce()),
        lambda s: s.to_dense().to_sparse(),
        lambda s: torch.eye(3, 4, device=s.device).unsqueeze(-1).expand(3, 4, 2).to_sparse(sparse_dim=2),
    ],
)
def test_arithmetic_is_that_of_the_cpu(function: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = function(_scattered().to("vgpu:0")), function(_scattered())
    assert (ours.layout, ours.dtype) == (theirs.layout, theirs.dtype)
    torch.testing.assert_close(ours.to_dense().cpu(), theirs.to_dense())


def _matrix(device: str) -> Tensor:
    places = torch.tensor([[0, 1, 1, 2, 1], [2, 0, 2, 1, 0]])
    return torch.sparse_coo_tensor(places, torch.tensor([3.0, 4, 5, 6, -1]), (3, 3)).to(device)


def _convolved(device: str) -> list[Tensor]:
    """Return what a layer of a graph network gives, and its gradients."""
    features = torch.arange(12.0).reshape(3, 4).sin().to(device).requires_grad_()
    weights = torch.arange(8.0).reshape(4, 2).cos().to(device).requires_grad_()
    made = torch.spmm(_matrix(device), features @ weights)
    made.sin().sum().backward()
    assert features.grad is not None
    assert weights.grad is not None
    return [made.detach(), features.grad, weights.grad]


def _of_values(device: str) -> Tensor:
    values = torch.tensor([1.0, 2, 3], device=device, requires_grad=True)
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 1, 0]], device=device), values, (3, 3))
    (matrix @ torch.ones(3, 2, device=device)).sin().sum().backward()
    assert values.grad is not None
    return values.grad


@pytest.mark.feature("Virtual devices: Multiply sparse matrices by dense ones")
@pytest.mark.parametrize(
    "function",
    [
        lambda device: torch.sparse.mm(_matrix(device), torch.ones(3, 2, device=device)),
        lambda device: _matrix(device).t() @ torch.ones(3, 2, device=device),
        lambda device: _matrix(device) @ torch.arange(3.0, device=device),
        lambda device: _matrix(device).coalesce() @ torch.arange(6.0, device=device).reshape(2, 3).t(),
        lambda device: torch.sparse.addmm(
            torch.ones(3, 2, device=device), _matrix(device), torch.ones(3, 2, device=device), beta=2, alpha=0.5
        ),
        _convolved,
        _of_values,
    ],
)
def test_products_with_dense_matrices_are_those_of_the_cpu(function: Callable[[str], Any]) -> None:
    mine, plain = function("vgpu:0"), function("cpu")
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_what_there_is_not_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"not supported on virtual devices; make it dense with \.to_dense"):
        torch.sparse.softmax(_scattered().to("vgpu:0"), 1)
    with pytest.raises(NotImplementedError, match="product of two sparse matrices is not supported on virtual devices"):
        _matrix("vgpu:0") @ _matrix("vgpu:0")
    with pytest.raises(NotImplementedError, match=r"with \.to_dense"):
        torch.sparse.mm(torch.eye(3).to_sparse_csr().to("vgpu:0"), torch.ones(3, 2, device="vgpu:0"), "sum")
