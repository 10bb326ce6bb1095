"""Sequences of different lengths, which stay on the host, give on a virtual device what they give on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

DEVICES = 1
pytestmark = pytest.mark.usefixtures("pool")


def padded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.feature("Virtual devices: Train on packed sequences and with sparse gradients")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_over_packed_sequences(kind: type[nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(1)
    net = kind(5, 6, num_layers=2, batch_first=batch_first, bidirectional=True, dtype=torch.float64)
    lengths = torch.tensor([2, 4, 1])
    inputs = padded(3, 4, 5) if batch_first else padded(4, 3, 5)

    def run(device: str) -> list[Tensor]:
        net.to(device).zero_grad()
        given = inputs.detach().to(device).requires_grad_()
        packed = pack_padded_sequence(given, lengths, batch_first=batch_first, enforce_sorted=False)
        assert packed.batch_sizes.device.type == "cpu"
        outputs, told = pad_packed_sequence(net(packed)[0], batch_first=batch_first, padding_value=-1.0)
        assert torch.equal(told, lengths)
        outputs.square().sum().backward()
        return [outputs, given.grad, *(weight.grad for weight in net.parameters())]

    expected = [each.detach().clone() for each in run("cpu")]
    for mine, right in zip(run("vgpu:0"), expected, strict=True):
        torch.testing.assert_close(mine.cpu(), right)


def test_lengths_on_the_device_are_refused_as_on_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="'lengths' argument should be a 1D CPU int64 tensor, but got 1D vgpu:0"):
        pack_padded_sequence(padded(4, 2, 3).to("vgpu:0"), torch.tensor([4, 1], device="vgpu:0"))
    with pytest.raises(RuntimeError, match="Expected `len\\(lengths\\)` to be equal to batch_size"):
        pack_padded_sequence(padded(4, 2, 3).to("vgpu:0"), torch.tensor([4, 1, 1]))


@pytest.mark.parametrize("device_of_lengths", ["cpu", "vgpu:0"])
def test_connectionist_temporal_classification(device_of_lengths: str) -> None:
    targets = torch.tensor([[1, 2, 3], [2, 2, 4]])
    given, lengths = torch.tensor([10, 9]), torch.tensor([3, 2])

    def run(device: str, place: str) -> tuple[Tensor, Tensor]:
        scores = padded(10, 2, 5).to(device).requires_grad_()
        loss = F.ctc_loss(scores.log_softmax(2), targets.to(device), given.to(place), lengths.to(place))
        loss.backward()
        assert scores.grad is not None
        return loss.detach().cpu(), scores.grad.cpu()

    torch.testing.assert_close(run("vgpu:0", device_of_lengths), run("cpu", "cpu"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which PyTorch uses on the CPU
def test_encoders_with_padding_in_eval_mode() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = encoder(padded(2, 5, 16), src_key_padding_mask=padding)[~padding]
        encoder.to("vgpu:0")
        mine = encoder(padded(2, 5, 16).to("vgpu:0"), src_key_padding_mask=padding.to("vgpu:0"))
    torch.testing.assert_close(mine.cpu()[~padding], expected)
