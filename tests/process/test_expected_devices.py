"""What is said of devices without starting them is what their workers say."""

from __future__ import annotations

import pytest

import onebox
from onebox.errors import UsageError
from onebox.pool.expected_devices import expected_devices


@pytest.mark.parametrize("memory_bytes", [None, 32 << 30])
def test_workers_say_what_was_expected(memory_bytes: int | None) -> None:
    spec = "cpu@0.5,sim@2,cpu"
    expected = expected_devices(spec, memory=memory_bytes)
    with onebox.open(spec, memory=memory_bytes) as pool:
        assert pool.devices == expected


def test_devices_of_other_machines_would_have_to_be_asked() -> None:
    with pytest.raises(UsageError, match="sim\\*2 with a memory of 24GiB"):
        expected_devices("cpu,lab1/cuda:0")
