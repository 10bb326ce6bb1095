"""What libraries around PyTorch ask of tensors: addresses, storages, types of errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import onebox


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu", threads=1) as pool:
        yield pool


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


def test_safetensors_saves_tied_weights_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(7, 7))
    model[1].weight = model[0].weight
    model.to("vgpu:0")
    save_model(model, str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == {"0.weight", "2.weight", "2.bias"}
    assert torch.equal(stored["0.weight"], model[1].weight.cpu())


def test_a_singular_matrix_is_an_error_of_linear_algebra() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(2, 2, device="vgpu:0"))
