"""The sides of ``gpu_steps.py``: plain PyTorch in this process (eager, compiled, as a CUDA graph), and a worker.

All upload each batch from the host: plain PyTorch from pinned memory, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from gpu_models import Case
from torch import Tensor

import onebox
from onebox.report import timeline_of

BATCHES = 4
"""Different batches that are used in turn."""

_WARM_UP = 3
"""Steps before a CUDA graph is captured, as PyTorch's documentation asks for."""


class Side(Protocol):
    """A way of training a model."""

    def run(self, steps: int) -> None:
        """Run steps, and wait for the device."""

    def loss(self) -> float:
        """Return the loss of the last step."""

    def timeline(self, path: Path) -> None:
        """Write the timeline of a few steps as a Chrome trace."""

    def close(self) -> None:
        """Give up the device's memory."""


class Local:
    """Plain PyTorch in this process.

    Args:
        case: What is trained.
        precision: ``fp32``, or ``bf16`` for autocast.
        device: Where.
        backend: Of ``torch.compile``; eager if not given.
        capturable: Whether a CUDA graph is to hold the optimizer's step.
    """

    def __init__(
        self, case: Case, precision: str, device: torch.device, *, backend: str | None = None, capturable: bool = False
    ) -> None:
        self._device, self._loss_function = device, case.loss
        self._bf16 = precision == "bf16"
        model = case.model().to(device)
        self._optimizer = case.optimizer(model, capturable)
        self._forward: Callable[[Tensor], Tensor] = model if backend is None else torch.compile(model, backend=backend)
        cuda = device.type == "cuda"
        self._batches = [
            tuple(tensor.pin_memory() if cuda else tensor for tensor in batch) for batch in case.batches(BATCHES)
        ]
        self._count = 0
        self._loss = torch.zeros(())

    def run(self, steps: int) -> None:
        """Run steps, and wait for the device."""
        for _ in range(steps):
            inputs, targets = self._batches[self._count % BATCHES]
            self._count += 1
            self._loss = self._step(
                inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
            )
        self._wait()

    def loss(self) -> float:
        """Return the loss of the last step."""
        return float(self._loss)

    def timeline(self, path: Path) -> None:
        """Write the operators and kernels of two steps."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.run(2)
        profile.export_chrome_trace(str(path))

    def close(self) -> None:
        """Give up the device's memory."""
        self.__dict__.clear()

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            loss = self._loss_function(self._forward(inputs), targets)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Graph(Local):
    """Plain PyTorch whose whole step is one CUDA graph; inputs are copied into its own.

    Args:
        case: What is trained.
        precision: ``fp32`` or ``bf16``.
        device: A GPU.
    """

    def __init__(self, case: Case, precision: str, device: torch.device) -> None:
        super().__init__(case, precision, device, capturable=True)
        inputs, targets = self._batches[0]
        self._inputs, self._targets = inputs.to(device), targets.to(device)
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                super()._step(self._inputs, self._targets)
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._made = super()._step(self._inputs, self._targets)

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._made


class Remote:
    """A worker over loopback.

    Args:
        case: What is trained.
        precision: ``fp32`` or ``bf16``.
        pool: Its first device is used.
    """

    def __init__(self, case: Case, precision: str, pool: onebox.Pool) -> None:
        self._pool = pool
        self._batches = case.batches(BATCHES)
        self._count = 0
        self._case, self._precision = case, precision
        self._trainer = self._made(trace=False)
        self._loss: onebox.StepLoss | None = None

    def _made(self, *, trace: bool) -> onebox.Trainer:
        model = self._case.model()
        return onebox.Trainer(
            model,
            self._case.loss,
            self._case.optimizer(model, False),
            pool=self._pool,
            precision=self._precision,
            engine=onebox.Engine(trace=trace),
        )

    def run(self, steps: int) -> None:
        """Run steps, and wait for the worker."""
        for _ in range(steps):
            self._loss = self._trainer.step(*self._batches[self._count % BATCHES])
            self._count += 1
        self._trainer.wait()

    def loss(self) -> float:
        """Return the loss of the last step."""
        assert self._loss is not None
        return float(self._loss)

    def timeline(self, path: Path) -> None:
        """Write the instructions of five steps of a new trainer; what records kernels would have to be in the worker,
        which writes no files.
        """
        self._trainer.close()
        self._trainer = self._made(trace=True)
        self.run(5)
        timeline_of(self._trainer.events(), {0: self._pool.devices[0].device}).write(path)

    def close(self) -> None:
        """Give up the worker's memory."""
        self._trainer.close()


def sides(
    case: Case, precision: str, device: torch.device, pool: onebox.Pool, chosen: Sequence[str], backend: str
) -> dict[str, Callable[[], Side]]:
    """Return what makes each chosen side."""
    made: dict[str, Callable[[], Side]] = {
        "eager": lambda: Local(case, precision, device),
        "remote": lambda: Remote(case, precision, pool),
        "compile": lambda: Local(case, precision, device, backend=backend),
        "graph": lambda: Graph(case, precision, device),
    }
    return {name: make for name, make in made.items() if name in chosen}
