"""Mixtures of element types that tracing takes and kernels refuse: found before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.errors import CaptureError
from onebox.graph import TracedModel
from tests.kit.captures import capture

LABELS = torch.zeros(6, dtype=torch.int64)


def traced(model: nn.Module, inputs: Any, targets: Tensor = LABELS, loss: Any = functional.cross_entropy) -> None:
    TracedModel(capture(model, loss, (inputs, targets)), backward=True)


def test_a_batch_of_another_type_than_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    with pytest.raises(CaptureError) as caught:
        traced(model, torch.zeros(6, 8))
    text = str(caught.value)
    assert caught.value.unfit
    for part in (
        "float32 [6, 8] (of the batch)",
        "(parameter 0.weight)",
        "plain PyTorch refuses that, too",
        "x.to(torch.float64)",
        "model.to(torch.float32)",
    ):
        assert part in text
    traced(model, torch.zeros(6, 8, dtype=torch.float64))


def test_convolutions_and_mixtures_inside_a_model() -> None:
    with pytest.raises(CaptureError, match=r"for this batch[^$]*\(double\) and bias type \(float\)"):
        traced(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten()), torch.zeros(6, 2, 8, dtype=torch.float64))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(8, 4)

        def forward(self, x_BD: Tensor) -> Tensor:
            h_BK = self.enter(x_BD)
            return h_BK @ h_BK.double().mT @ h_BK

    with pytest.raises(
        CaptureError, match=r"test_element_types.py:\d+: return h_BK @ h_BK.double\(\)[^$]*a product"
    ) as caught:
        traced(Mixed(), torch.zeros(6, 8))
    assert caught.value.where is not None


def test_classes_of_a_type_that_losses_refuse() -> None:
    with pytest.raises(CaptureError, match=r"got targets of int\d+ \[6\] .* Convert the targets with .long\(\)"):
        traced(nn.Linear(8, 4), torch.zeros(6, 8), LABELS.int())


@pytest.mark.parametrize(
    ("targets", "loss", "words"),
    [
        (LABELS.double(), nn.CrossEntropyLoss(), "cross_entropy of float32 [6, 4], float64 [6]: expected "),
        (LABELS.float()[:, None], nn.CrossEntropyLoss(), "cross_entropy of float32 [6, 4], float32 [6, 1]: 0D or 1D"),
        (LABELS[:, None], functional.cross_entropy, "targets are int64, in the shape of the scores without classes"),
        (LABELS[:, None].expand(6, 4), functional.cross_entropy, "or probabilities of classes"),
        (LABELS.float(), functional.nll_loss, "nll_loss of float32 [6, 4], float32 [6]"),
        (
            torch.zeros(6, 3),
            functional.mse_loss,
            "mse_loss of float32 [6, 4], float32 [6, 3]: The size of tensor a (4)",
        ),
        (torch.zeros(6), functional.binary_cross_entropy_with_logits, "must be the same as input size"),
        (LABELS.float(), functional.multi_margin_loss, "multi_margin_loss of float32 [6, 4], float32 [6]"),
        (LABELS, functional.kl_div, "Integral inputs not supported"),
    ],
)
def test_targets_that_plain_pytorch_refuses_in_its_words(targets: Tensor, loss: Any, words: str) -> None:
    model, state = nn.Linear(8, 4), torch.get_rng_state()
    with pytest.raises(CaptureError) as caught:
        traced(model, torch.zeros(6, 8), targets, loss)
    assert words in str(caught.value)
    assert caught.value.unfit and "PyTorch itself refuses it" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_that_refuse_their_inputs() -> None:
    with pytest.raises(CaptureError, match=r"expected 2D or 3D input \(got 4D input\)") as caught:
        traced(nn.Sequential(nn.BatchNorm1d(8), nn.Flatten()), torch.zeros(6, 8, 1, 1))
    assert caught.value.unfit


def test_what_plain_pytorch_may_compute_is_no_fault_of_the_batch() -> None:
    class Own(nn.Linear):
        def forward(self, x_BD: Tensor) -> Tensor:
            try:
                return super().forward(x_BD) @ torch.zeros(3, 3)
            except RuntimeError:
                raise ValueError("the model's own words") from None

    with pytest.raises(CaptureError, match=r"cannot be captured as a graph[^$]*the model's own words") as caught:
        traced(Own(8, 4), torch.zeros(6, 8))
    assert not caught.value.unfit


def test_autocast_and_mixtures_that_kernels_take() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    TracedModel(capture(model, functional.cross_entropy, (torch.zeros(6, 8), LABELS), precision="bf16"), backward=True)
    traced(nn.Linear(8, 4), torch.zeros(6, 8), torch.zeros(6, 4, dtype=torch.float64), functional.mse_loss)


def test_shapes_that_plain_torch_refuses() -> None:
    with pytest.raises(CaptureError, match="cannot be computed for this batch") as caught:
        traced(nn.Linear(8, 4), torch.zeros(6, 7))
    assert caught.value.unfit
    assert "virtual device" not in str(caught.value)
