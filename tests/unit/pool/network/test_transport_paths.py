"""Which ways tensors take: what a variable says, and what workers say when they have joined a group."""

from __future__ import annotations

import pytest

from onebox.errors import UsageError
from onebox.pool import WorkerReply
from onebox.pool.devices import DeviceInfo
from onebox.pool.network.transport_paths import explain_unshared, shares_memory
from onebox.wire.protocol.responses import Joined


@pytest.mark.parametrize(("said", "shares"), [(None, True), ("1", True), ("0", False)])
def test_what_the_variable_says(said: str | None, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEBOX_SHARED_MEMORY", raising=False)
    if said is not None:
        monkeypatch.setenv("ONEBOX_SHARED_MEMORY", said)
    assert shares_memory() == shares


@pytest.mark.parametrize("said", ["", "true", "2"])
def test_what_the_variable_may_not_say(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBOX_SHARED_MEMORY", said)
    with pytest.raises(UsageError, match=f"is '{said}'; allowed are 1, and 0"):
        shares_memory()


def test_who_does_not_share_memory_is_named() -> None:
    devices = [
        DeviceInfo(number=4 + rank, host=host, device=device, name="", threads=1, memory_bytes=1)
        for rank, (host, device) in enumerate([("one", "cpu"), ("two", "cuda:1"), ("three", "cpu")])
    ]
    said = [Joined((0, 2)), Joined((1,), ((0, "its memory did not come"), (9, "nobody"))), Joined()]
    lines = explain_unshared(devices, [WorkerReply((joined,), (), ()) for joined in said])
    assert lines == [
        "device 5 (cuda:1 on two) does not share memory with device 4 (cpu on one), which is on the same machine: "
        "its memory did not come; what goes between them goes through sockets"
    ]
