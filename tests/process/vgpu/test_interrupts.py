"""Ctrl-C at any line of what records and sends: the tensors that a script holds stay right, and it can go on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from onebox.vgpu import signals
from onebox.vgpu.runtime import batcher, request_channel
from onebox.vgpu.runtime import command_queue as stream_module
from onebox.vgpu.runtime.context import current_context

FILES = {stream_module.__file__, request_channel.__file__, batcher.__file__}
CALLS = 5
HANDLED_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[onebox.Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "CALLS", CALLS)
        with onebox.open("cpu", threads=1) as opened:
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
            yield opened
            signal.signal(signal.SIGINT, before)


class Interrupt:
    """Sends SIGINT at a line of what records and sends; leaving the context waits until its handler has run.

    Args:
        line: The how many-th line that is reached; none for a large number.
    """

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *exit_info: object) -> None:
        sys.settrace(None)
        end_s = time.monotonic() + HANDLED_S
        while signals._waiting and time.monotonic() < end_s:
            pass

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._reached if frame.f_code.co_filename in FILES else None

    def _reached(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._reached


def work(x: Tensor, made: list[Tensor]) -> None:
    """Do what a script does; what it has made is noted as soon as it holds it."""
    for number in range(4):
        made.append(x * 2.0)
        made.append(made[-1] + torch.full((3,), float(number), dtype=torch.float64).to(x.device))
        made.append(torch.cat([made[-1], x]))
        made.append(made[-1].view(2, 3).sum(dim=0) * 0.5)
        if number == 2:
            made.append(torch.tensor([made[-1].sum().item()], dtype=torch.float64, device=x.device))


def lines() -> int:
    """Return how many lines are reached without an interrupt."""
    counting = Interrupt(1 << 30)
    with counting:
        work(torch.ones(3, dtype=torch.float64, device="vgpu:0"), [])
    return (1 << 30) - counting.left


def test_ctrl_c_at_any_line() -> None:
    start = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    expected: list[Tensor] = []
    work(start, expected)
    x = start.to("vgpu:0")
    for _ in range(4):
        work(x, [])  # by now there are tapes
    stream = current_context().queues[0]
    interrupted = 0
    for line in range(1, lines(), 7):
        made: list[Tensor] = []
        try:
            with Interrupt(line):
                work(x, made)
        except KeyboardInterrupt:
            interrupted += 1
        more: list[Tensor] = []
        work(x, more)
        for ours, theirs in zip([*made, *more], [*expected[: len(made)], *expected], strict=True):
            assert ours.tolist() == theirs.tolist(), f"interrupted at line {line}"
        assert not stream.native.calls
    assert interrupted > 20
