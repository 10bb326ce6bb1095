"""Devices in a script's words and in PyTorch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.vgpu.cuda_alias import device_names
from onebox.vgpu.cuda_alias.device_names import number_of, to_cuda, to_vgpu, to_vgpu_type
from onebox.vgpu.registration import install


@pytest.fixture(autouse=True)
def third_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the third device be the current one."""
    install()
    monkeypatch.setattr(device_names, "current_device", lambda: 2)


@given(index=st.integers(0, 100), as_text=st.booleans())
def test_there_and_back(index: int, as_text: bool) -> None:
    place = torch.device("cuda", index)
    inside = to_vgpu(str(place) if as_text else place)
    assert inside == torch.device("vgpu", index)
    assert to_cuda(inside) == place


@pytest.mark.parametrize("place", ["cuda", torch.device("cuda")])
def test_without_a_number_it_is_the_current_device(place: object) -> None:
    assert to_vgpu(place) == torch.device("vgpu", 2)
    assert number_of(place) == 2


@given(
    st.sampled_from(["cpu", "meta", "vgpu:1", "cpu:0"]).map(torch.device)
    | st.sampled_from(["cpu", "meta", "vgpu", "no device"])
    | st.integers()
    | st.none()
    | st.booleans()
    | st.lists(st.integers())
)
def test_all_else_goes_in_as_it_came(place: object) -> None:
    assert to_vgpu(place) is place


def test_all_else_comes_out_as_it_is() -> None:
    for device in (torch.device("cpu"), torch.device("meta")):
        assert to_cuda(device) is device
    assert to_cuda(torch.device("vgpu")) == torch.device("cuda")


def test_numbers_of_devices() -> None:
    assert [number_of(place) for place in (None, -1, 0, 1, "cuda:1", torch.device("vgpu:1"))] == [2, 2, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        number_of("cpu")


def test_types_of_devices() -> None:
    assert [to_vgpu_type(kind) for kind in ("cuda", "cpu", None)] == ["vgpu", "cpu", None]
