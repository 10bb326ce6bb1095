"""Waits of groups over Gloo end with the connection, also in the middle of a tensor."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm import torch_dist
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.torch_dist import GlooGroup, while_moving
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.tcp_connections import ConnectionState, GroupSockets
from tests.kit.waiting import until

HERE = "127.0.0.1"
NUMEL = 1 << 26

_SENDER = """
import sys, time, torch, torch.distributed as dist
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm.torch_dist import GlooGroup
from onebox.worker.progress import WorkerProgress
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False)
form = FormGroup(1, 1, 2, "gloo", "127.0.0.1", 60.0)
group = GlooGroup(form, store, accelerator_for("cpu"), WorkerProgress(), "127.0.0.1")
group.send(torch.ones(int(sys.argv[2])), 0, 0)
time.sleep(60)
"""


class Transfer:
    """A transfer that moves for some looks and ends after others; time passes by looks alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, moves: int, ends: int, closed: bool = True) -> None:
        self.looks, self.moves, self.ends, self.closed = 0, moves, ends, closed
        monkeypatch.setattr(torch_dist.time, "monotonic", lambda: 0.5 * self.looks)

    def state(self) -> ConnectionState:
        return ConnectionState(self.closed, min(self.looks, self.moves))

    def end(self, timeout_s: float) -> bool:
        self.looks += 1
        return self.looks >= self.ends


def test_a_wait_lasts_as_long_as_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Transfer(monkeypatch, moves=1000, ends=1000)
    assert while_moving(long.end, long.state)
    stuck = Transfer(monkeypatch, moves=7, ends=1000)
    assert not while_moving(stuck.end, stuck.state)
    assert stuck.looks == 7 + 2 * torch_dist.CLOSE_S


def test_a_wait_over_open_connections_has_no_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Transfer(monkeypatch, moves=0, ends=1000, closed=False)
    assert while_moving(silent.end, silent.state, even_if_open=True)
    ended = Transfer(monkeypatch, moves=0, ends=1000)
    assert not while_moving(ended.end, ended.state, even_if_open=True)


@pytest.mark.short
def test_the_wait_for_a_tensor_ends_when_its_sender_is_killed_in_the_middle() -> None:
    store = dist.TCPStore(HERE, 0, 2, True, wait_for_workers=False, timeout=timedelta(seconds=60))
    sockets, port = GroupSockets(), str(store.port)
    before = threading.enumerate()  # other tests leave such threads, too
    with subprocess.Popen([sys.executable, "-c", _SENDER, port, str(NUMEL)]) as sender:
        try:
            with sockets.making(1):
                form = FormGroup(1, 0, 2, "gloo", HERE, 60.0)
                group = GlooGroup(
                    form,
                    store,
                    accelerator_for("cpu"),
                    WorkerProgress(),
                    HERE,
                    connections=lambda: sockets.state(1),
                )
            made: list[torch.Tensor] = []
            empty = torch.empty

            def noted(*args: object, **options: object) -> torch.Tensor:
                made.append(empty(*args, **options).zero_())  # type: ignore[call-overload]
                return made[-1]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty", noted)
                finish = group.receive(TensorSpec("float32", (NUMEL,)), 1, 0)
            until(lambda: bool(made[0][0]))
        finally:
            sender.kill()
    assert not made[0][-1], "only a part has come"
    with pytest.raises(RankLost, match="ended"):
        finish()
    group.close()
    left = [each for each in threading.enumerate() if each.name == "onebox-received" and each not in before]
    assert len(left) <= 1, "the one that nothing ends"
