"""Transfers between a GPU and a CPU: their elements pass through the CPU's memory, and end where they belong."""

from __future__ import annotations

import pytest
import torch

import onebox
from onebox.pool import raise_first
from onebox.wire import TensorSpec, from_frame, to_frame
from onebox.wire.messages import Gather, Get, Put, Receive, Send

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_tensors_go_between_a_gpu_and_a_cpu() -> None:
    own, whole = TensorSpec("float32", (2,)), TensorSpec("float32", (4,))
    with onebox.open("cuda:0,cpu", threads=1) as pool:
        group = pool.form_group((0, 1), "workers")
        answers = raise_first(
            [
                pool.post(
                    worker,
                    [
                        Put((1,), (own,)),
                        Send(1, group, 1 - worker),
                        Receive(2, own, group, 1 - worker),
                        Gather(1, 3, whole, group),
                        Get((2, 3)),
                    ],
                    [bytes(to_frame(torch.tensor([1.0, float(worker)])))],
                    answer=True,
                )
                for worker in range(2)
            ]
        )
    for worker, answer in enumerate(answers):
        assert from_frame(own, answer.frames[0]).tolist() == [1.0, 1.0 - worker]
        assert from_frame(whole, answer.frames[1]).tolist() == [1.0, 0.0, 1.0, 1.0]
