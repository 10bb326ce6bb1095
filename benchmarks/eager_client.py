"""What the client does for an operator of a script on a virtual device: ten small operators, against PyTorch's own.

In turn in one process, one thread: a run of an operator on tensors of a virtual device that the script calls ``cuda``,
until all of it is recorded and sent, and the same run on tensors of the host, which computes it. The worker catches up
between the figures.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import onebox
from onebox.vgpu import alias_cuda
from onebox.vgpu.runtime.context import current_context

CALLS = 256
"""Operators of a run: four messages."""

REPEATS = 40

Operator = Callable[[Tensor, Tensor, Tensor], Tensor]

OPERATORS: dict[str, Operator] = {
    "add": lambda x, y, v: x + y,
    "mul by a number": lambda x, y, v: x * 0.5,
    "mm": lambda x, y, v: x @ y,
    "addmm": lambda x, y, v: torch.addmm(v, x, y),
    "relu": lambda x, y, v: torch.relu(x),
    "gelu": lambda x, y, v: F.gelu(x),
    "softmax": lambda x, y, v: torch.softmax(x, -1),
    "layer_norm": lambda x, y, v: F.layer_norm(x, (16,), v, v),
    "sum": lambda x, y, v: x.sum(),
    "cat": lambda x, y, v: torch.cat([x, y]),
}
"""Small operators, by name: of matrices [16, 16] and a vector [16], of float32."""


class Side:
    """The operators on one device.

    Args:
        device: The device.
        gradient: Whether autograd notes each operator.
    """

    def __init__(self, device: str, *, gradient: bool) -> None:
        shapes = ((16, 16), (16, 16), (16,))
        self.tensors = [torch.ones(shape, device=device, requires_grad=gradient) for shape in shapes]
        self.queue = current_context().queues[0] if device != "cpu" else None

    def wait(self) -> None:
        """Wait until a worker has nothing to do."""
        if self.queue is not None:
            self.queue.synchronize()

    def microseconds(self, operator: Operator) -> float:
        """Return the microseconds of one call, of many."""
        x, y, v = self.tensors
        self.wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            operator(x, y, v)
        if self.queue is not None:
            self.queue.flush()
        return (time.perf_counter() - begin) / CALLS * 1e6


def against_cpu(pool: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return, by operator, microseconds of a call on a virtual device and on the host, a pair for each repeat.

    Args:
        pool: The device of the worker.
    """
    found: dict[str, tuple[list[float], list[float]]] = {}
    with onebox.open(pool, threads=1), alias_cuda():
        for gradient in (False, True):
            sides = Side("cuda", gradient=gradient), Side("cpu", gradient=gradient)
            for name, operator in OPERATORS.items():
                times: tuple[list[float], list[float]] = [], []
                for repeat in range(REPEATS + 3):
                    for side, of_side in zip(sides, times, strict=True):
                        taken = side.microseconds(operator)
                        if repeat >= 3:
                            of_side.append(taken)
                found[f"{name}, with gradient" if gradient else name] = times
    return found


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


class Loop:
    """A loop of small operators of many kinds.

    Args:
        weights: A matrix [16, 16].
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.bias = torch.zeros(16, device=weights.device)

    def forward(self) -> Tensor:
        """Run seven operators 48 times."""
        weights = self.weights
        y = total = weights
        for _ in range(48):
            y = torch.addmm(self.bias, y, weights)
            y = torch.relu(y)
            y = y * 0.5
            y = y + weights
            y = y.view(256)
            y = y.view(16, 16).t()
            total = y.sum()
        return total

    def both(self) -> None:
        """Run them and their backward pass."""
        self.forward().backward()
        self.weights.grad = None


def in_loops(pool: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return microseconds of the client for each recorded operator: until it can go on, and of all its threads.

    Args:
        pool: The device of the worker.
    """
    with onebox.open(pool, threads=1):
        weights = torch.randn(16, 16, device="vgpu:0", requires_grad=True)
        return {
            "operators without autograd": per_operator(Loop(weights.detach().clone()).forward),
            "operators of forward and backward": per_operator(Loop(weights).both),
        }


def per_operator(run: Callable[[], object], repeats: int = 60) -> tuple[list[float], list[float]]:
    """Return microseconds for each recorded operator of a run."""
    queue = current_context().queues[0]
    for _ in range(3):
        run()
    wall, processor = [], []
    for _ in range(repeats):
        queue.synchronize()
        before, begin, used = queue.native.recorded, time.perf_counter(), time.process_time()
        run()
        queue.flush()
        operators = (queue.native.recorded - before) / 1e6
        wall.append((time.perf_counter() - begin) / operators)
        queue.synchronize()  # by then the other threads have sent it
        processor.append((time.process_time() - used) / operators)
    return wall, processor
