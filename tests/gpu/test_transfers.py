"""Transfers between a GPU and a CPU: through memory that their workers share, and they end where they belong."""

from __future__ import annotations

import pytest
import torch

import onebox
from onebox.pool import raise_first
from onebox.wire import TensorSpec, from_frame, to_frame
from onebox.wire.protocol.instructions import Gather, Get, Receive, Reduce, Send
from onebox.wire.protocol.requests import Put
from onebox.worker.comm.shm.segment import supported
from tests.process.test_ways import SHAPES, maps, swap, used_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_tensors_go_between_a_gpu_and_a_cpu(shared: bool, device: str) -> None:
    own, whole = TensorSpec("float32", (2,)), TensorSpec("float32", (4,))
    with onebox.open(f"{device},cpu", threads=1) as pool:
        pool.shared = shared
        group = pool.form_group((0, 1), "workers")
        if shared and supported():
            assert min(maps(pool)) >= 2
        answers = raise_first(
            [
                pool.post(
                    worker,
                    [
                        Put((1,), (own,)),
                        Send(1, group, 1 - worker),
                        Receive(2, own, group, 1 - worker),
                        Gather(1, 3, whole, group, (2, 2)),
                        Reduce((1,), group),
                        Get((1, 2, 3)),
                    ],
                    [bytes(to_frame(torch.tensor([1.0, float(worker)])))],
                    answer=True,
                )
                for worker in range(2)
            ]
        )
        pool.leave_group(group, (0, 1))
    for worker, answer in enumerate(answers):
        assert from_frame(own, answer.frames[0]).tolist() == [2.0, 1.0]
        assert from_frame(own, answer.frames[1]).tolist() == [1.0, 1.0 - worker]
        assert from_frame(whole, answer.frames[2]).tolist() == [1.0, 0.0, 1.0, 1.0]


def test_tensors_of_all_sizes_go_both_ways_at_once_while_both_compute(device: str) -> None:
    with onebox.open(f"{device},cpu", threads=1) as pool:
        group = pool.form_group((0, 1), "workers")
        for _ in range(4):
            one, other = swap(pool, group, SHAPES * 2)
            count = len(SHAPES) * 2
            assert one[:count] == other[count:]
            assert other[:count] == one[count:]
        pool.leave_group(group, (0, 1))
        assert maps(pool) == [0, 0]
        assert used_bytes(pool) == [0, 0]
