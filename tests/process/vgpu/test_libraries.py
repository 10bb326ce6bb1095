"""What libraries around PyTorch ask of tensors: addresses, storages, types of errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

DEVICES = 1
pytestmark = pytest.mark.usefixtures("pool")


def test_a_view_is_in_the_storage_of_its_base() -> None:
    base = torch.zeros(4, 5, device="vgpu:0")
    with torch.no_grad():
        views = [base.view(20), base.t(), base[1:], base[:, 2], base.detach()[3], nn.Parameter(base)[2:]]
    offsets = [0, 0, 20, 8, 60, 40]
    assert [view.data_ptr() - base.data_ptr() for view in views] == offsets
    for view in views:
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() == base.data_ptr()
        assert view.untyped_storage().nbytes() == 80
    assert base.clone().data_ptr() not in range(base.data_ptr(), base.data_ptr() + 80)
    assert torch.empty(0, device="vgpu:0").data_ptr() == 0


def test_files_of_the_older_format_are_loaded_with_their_elements(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to("vgpu:0")
    stored = {"model": model.state_dict(), "view": torch.arange(6.0, device="vgpu:0").view(2, 3).t()}
    torch.save(stored, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for place in ("vgpu:0", None, "cpu"):
        loaded = torch.load(tmp_path / "old.pt", map_location=place)
        assert loaded["view"].device.type == ("cpu" if place == "cpu" else "vgpu")
        assert loaded["view"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        for name, tensor in stored["model"].items():
            assert torch.equal(loaded["model"][name].cpu(), tensor.cpu())
    whole = tmp_path / "whole.pt"
    torch.save(model, whole, _use_new_zipfile_serialization=False)
    again = torch.load(whole, weights_only=False)
    assert again[0].weight.requires_grad and torch.equal(again[0].weight.cpu(), model[0].weight.cpu())


def test_numbers_of_tensors_make_a_tensor() -> None:
    numbers = [torch.tensor(float(number), device="vgpu:0") for number in range(3)]
    assert torch.tensor(numbers).tolist() == [0.0, 1.0, 2.0]
    made = torch.tensor([numbers, numbers], device="vgpu:0", dtype=torch.float64)
    assert made.device.type == "vgpu" and made.tolist() == [[0.0, 1.0, 2.0]] * 2


def test_safetensors_saves_tied_weights_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(7, 7))
    model[1].weight = model[0].weight
    model.to("vgpu:0")
    save_model(model, str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == {"0.weight", "2.weight", "2.bias"}
    assert torch.equal(stored["0.weight"], model[1].weight.cpu())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(("low", "high", "bins"), [(0, 7, 8), (0, 49, 49), (-3, 20, 5), (0, 0, 4)])
def test_integers_are_counted_as_on_a_gpu(dtype: torch.dtype, low: int, high: int, bins: int) -> None:
    numbers = torch.randint(0, 60, (200,), generator=torch.Generator().manual_seed(1)).to(dtype)
    first, last = (low, high) if high > low else (int(numbers.min()), int(numbers.max()))
    expected = [0] * bins
    for number in numbers.tolist():
        if first <= number <= last:
            expected[min((number - first) * bins // (last - first), bins - 1)] += 1
    counted = torch.histc(numbers.to("vgpu:0"), bins, min=low, max=high)
    assert counted.dtype == dtype and counted.tolist() == expected
    floats = torch.histc(numbers.float().to("vgpu:0"), bins, min=low, max=high)
    assert torch.equal(floats.cpu(), torch.histc(numbers.float(), bins, min=low, max=high))


def test_equal_integers_are_in_the_middle() -> None:
    assert torch.histc(torch.full((3,), 5, device="vgpu:0"), 3).tolist() == [0, 3, 0]
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(torch.ones(3, dtype=torch.int32, device="vgpu:0"), 3, min=2, max=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, None])
def test_layer_norm_in_half_precision(dtype: torch.dtype, weights: torch.dtype | None) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8, dtype=weights or dtype)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(device: str) -> list[torch.Tensor]:
        norm.to(device).zero_grad()
        given = rows.detach().to(device, copy=True).requires_grad_()
        made = norm(given)
        (made.float() ** 3).sum().backward()
        return [each.detach().cpu() for each in (made, given.grad, norm.weight.grad, norm.bias.grad)]

    torch.testing.assert_close(run("vgpu:0"), run("cpu"))


def test_a_singular_matrix_is_an_error_of_linear_algebra() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(2, 2, device="vgpu:0"))
