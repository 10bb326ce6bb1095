"""By which interface NCCL is to talk."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onebox.worker.system import network_interfaces
from onebox.worker.system.network_interfaces import interface_of
from tests.kit.fresh import fresh


def test_an_address_is_that_of_its_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found = interface_of(each.address)
                assert found is not None and (found == name or each.address.startswith("fe80"))


VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_IB_DISABLE", "NCCL_IB_HCA")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, which has set nothing yet."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    yield fresh(network_interfaces)
    for variable in VARIABLES:
        os.environ.pop(variable, None)


@pytest.mark.parametrize("address", ["192.0.2.77", "lab.example.org", "", "2001:db8::77"])
def test_an_address_of_somewhere_else_has_none(network: Any, address: str) -> None:
    network.bind_nccl(address)
    assert interface_of(address) is None and "NCCL_SOCKET_IFNAME" not in os.environ


def test_nccl_is_told_one_interface_unless_its_owner_has_said_more(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "wg")
    network.bind_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "wg"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    network.bind_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface_of('127.0.0.1')}"
    assert os.environ["NCCL_SOCKET_FAMILY"] == "AF_INET"


def test_the_interface_of_an_earlier_group_does_not_stay(network: Any) -> None:
    network.bind_nccl("127.0.0.1")
    network.bind_nccl("192.0.2.77")
    assert "NCCL_SOCKET_IFNAME" not in os.environ and "NCCL_SOCKET_FAMILY" not in os.environ


def test_only_the_interface_of_the_pool_may_use_rdma(
    network: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network.bind_nccl("127.0.0.1")
    assert os.environ["NCCL_IB_DISABLE"] == "1" and "NCCL_IB_HCA" not in os.environ
    name = interface_of("127.0.0.1")
    assert name is not None
    (tmp_path / name / "device" / "infiniband" / "mlx5_1").mkdir(parents=True)
    monkeypatch.setattr(network, "_NET", tmp_path)
    network.bind_nccl("127.0.0.1")
    assert "NCCL_IB_DISABLE" not in os.environ and os.environ["NCCL_IB_HCA"] == "=mlx5_1"
