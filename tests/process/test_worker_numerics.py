"""Precision and determinism of operators travel with a run: as the client's PyTorch is set, or as the trainer says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import OperatorError

X, Y = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)), torch.ones(4, 256)


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu", threads=1, virtual_devices=False) as made:
        yield made


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def product() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(256, 256, bias=False)


def sensitive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss in which the last bits of outputs matter."""
    return (1e5 * (outputs - targets).double()).cos().mean()


def plain_loss(matmul: str) -> float:
    """Return the loss in this process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul)
    try:
        return sensitive(product()(X), Y).item()
    finally:
        torch.set_float32_matmul_precision(before)


def trained(pool: onebox.Pool, model: nn.Module, engine: onebox.Engine) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(model, sensitive, optimizer, pool=pool, engine=engine) as trainer:
        evaluated = trainer.evaluate([(X, Y)]).loss
        assert trainer.step(X, Y).item() == evaluated
        return evaluated


@pytest.mark.feature("Precision: Set the precision of products for a run")
@pytest.mark.skipif(
    plain_loss("medium") == plain_loss("highest"), reason="this processor has one precision of float32 products"
)
@pytest.mark.usefixtures("defaults")
def test_products_have_the_precision_of_the_run_and_of_no_other(pool: onebox.Pool) -> None:
    exact, coarse = (onebox.Engine(numerics=onebox.Numerics(matmul=each)) for each in ("highest", "medium"))
    loss, coarse_loss = trained(pool, product(), onebox.Engine()), trained(pool, product(), coarse)
    assert coarse_loss != loss
    assert trained(pool, product(), onebox.Engine()) == loss
    torch.set_float32_matmul_precision("medium")
    assert trained(pool, product(), onebox.Engine()) == coarse_loss
    assert trained(pool, product(), exact) == loss


class Unpooled(nn.Module):
    """A model whose unpooling PyTorch has no deterministic implementation of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = nn.functional.max_pool2d(self.scale * x.view(-1, 1, 16, 16), 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, places, 2).view(-1, 256)


@pytest.mark.feature("Precision: Repeat a run to the last bit")
@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("by_client", [False, True])
def test_an_operator_that_cannot_be_deterministic_is_one_error(*, by_client: bool) -> None:
    numerics = onebox.Numerics(deterministic=None if by_client else True)
    torch.use_deterministic_algorithms(by_client)
    with onebox.open("cpu", threads=1, virtual_devices=False) as pool:
        with pytest.raises(OperatorError, match="does not have a deterministic implementation") as caught:
            trained(pool, Unpooled(), onebox.Engine(numerics=numerics))
        assert "deterministic='warn' or False" in str(caught.value)
        assert "error of onebox" not in str(caught.value)
        allowed = onebox.Engine(numerics=onebox.Numerics(deterministic=False))
        assert trained(pool, Unpooled(), allowed) != 0


@pytest.mark.usefixtures("defaults")
def test_a_resumed_run_keeps_what_it_began_with(pool: onebox.Pool, tmp_path: Path) -> None:
    def arguments() -> tuple[nn.Module, type[nn.MSELoss] | nn.Module, torch.optim.Optimizer]:
        model = product()
        return model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)

    torch.set_float32_matmul_precision("medium")
    with onebox.Trainer(*arguments(), pool=pool) as trainer:
        trainer.step(X, Y)
        trainer.save(tmp_path)
        following = trainer.step(X, Y).item()
        known = trainer.engine.numerics
    assert known == onebox.Numerics(
        matmul="medium",
        tf32_convolutions=True,
        cudnn_benchmark=False,
        cudnn_deterministic=False,
        deterministic=False,
    )
    torch.set_float32_matmul_precision("highest")
    with onebox.Trainer.resume(tmp_path, *arguments(), pool=pool) as trainer:
        assert trainer.engine.numerics == known
        assert trainer.step(X, Y).item() == following
