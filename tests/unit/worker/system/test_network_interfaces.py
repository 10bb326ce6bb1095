"""By which interface NCCL is to talk."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from onebox.worker.system.network_interfaces import bind_nccl, interface_of


def test_an_address_is_that_of_its_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found = interface_of(each.address)
                assert found is not None and (found == name or each.address.startswith("fe80"))


@pytest.mark.parametrize("address", ["192.0.2.77", "lab.example.org", "", "2001:db8::77"])
def test_an_address_of_somewhere_else_has_none(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    bind_nccl(address)
    assert interface_of(address) is None and "NCCL_SOCKET_IFNAME" not in os.environ


def test_nccl_is_told_one_interface_unless_its_owner_has_said_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "wg")
    bind_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "wg"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    bind_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface_of('127.0.0.1')}"
