"""``nn.DataParallel`` over virtual devices of different speed: chunks in proportion, devices that do not pay left out.

The times are those at which replies come, in the first steps, in which a script stays a little ahead of its devices.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel.scatter_gather import scatter_kwargs

from onebox.vgpu.core.tensor import is_virtual
from onebox.vgpu.distributed.batch_division import BatchDivision, Trials, outcome
from onebox.vgpu.distributed.data_parallel import in_chunks
from onebox.vgpu.runtime import context
from onebox.vgpu.runtime.command_queue import CommandQueue

EQUAL_SHARES = "ONEBOX_EQUAL_SHARES"
"""Environment variable that keeps PyTorch's own equal chunks, with the value ``1``."""

AHEAD = 2
"""Steps by which a script may be ahead of its devices while they are measured: enough for them not to idle. One that
reads nothing would otherwise be ahead by so many that a division is found much later."""

_KEPT_EQUAL = (
    "nn.DataParallel keeps equal chunks on devices of different speed: the model returns what has no rows for samples, "
    "such as a mean loss, which other chunks would weight differently. Let it return rows, such as a loss for each "
    "sample, and take their mean outside"
)

_OWN_STEPS = ("forward", "scatter", "replicate", "parallel_apply", "gather")


class Mark:
    """The time at which a device has executed everything issued so far.

    Args:
        queue: Its command queue.

    Attributes:
        time_s: The time on the client's clock; 0.0 until it is known.
    """

    def __init__(self, queue: CommandQueue) -> None:
        self.time_s = 0.0
        queue.flush(pace=False)
        self._channel = queue.channel
        self._probe = queue.channel.probe()
        self._probe.future.add_done_callback(self._reached)

    def _reached(self, _: object) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has executed that."""
        if not self._probe.future.done():
            self._channel.settle(self._probe, math.inf)


class _Mode:
    """The state of one kind of forward passes, such as those of training.

    Args:
        count: Number of devices.
        samples: The batch size of the steps that are compared.

    Attributes:
        trials: The search for its division.
        rows: Whether what the model returns is known to have rows for its samples.
    """

    def __init__(self, count: int, samples: int) -> None:
        self.trials = Trials(count)
        self.samples = samples
        self.rows = False


class _Step(NamedTuple):
    """A step that is measured.

    Args:
        mode: Its mode.
        division: Its division.
        samples: Its batch size.
        begin: Marks of its devices, and of the one with the model, at its begin; those of the next step are its end.
        forward: By device, the samples of its chunk, and the marks before and after it.
    """

    mode: _Mode
    division: BatchDivision
    samples: int
    begin: list[Mark]
    forward: dict[int, tuple[int, Mark, Mark]]

    def begin_s(self) -> float:
        """Return the time at which all devices had begun; 0.0 until it is known."""
        times = [mark.time_s for mark in self.begin]
        return max(times) if all(times) else 0.0

    def speeds(self) -> dict[int, float]:
        """Return the samples per second of each device in its forward pass."""
        return {
            device: samples / max(end.time_s - begin.time_s, 1e-9)
            for device, (samples, begin, end) in self.forward.items()
        }


class UnevenForward:
    """The forward passes of one ``nn.DataParallel``.

    Args:
        parallel: The module.
        queues: The command queues of its devices.
        original: PyTorch's forward pass.
    """

    def __init__(
        self, parallel: nn.DataParallel[Any], queues: list[CommandQueue], original: Callable[..., Any]
    ) -> None:
        self.queues = queues
        self._original = original
        self._numbers = list(parallel.device_ids)
        self._modes: dict[tuple[object, ...], _Mode] = {}
        self._pending: list[_Step] = []
        self._kept_equal = False
        self._said = False

    def __call__(self, parallel: nn.DataParallel[Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass."""
        samples = batch_size((inputs, kwargs), parallel.dim)
        if self._kept_equal or samples < 2:
            return self._original(parallel, *inputs, **kwargs)
        key = (parallel.training, torch.is_grad_enabled(), len(inputs), *kwargs)
        mode = self._modes.get(key)
        if mode is None:
            mode = self._modes[key] = _Mode(len(self.queues), samples)
        self._note_steps(parallel)
        division = mode.trials.current
        least = 2 if parallel.training and has_batch_norm(parallel) else 1  # it refuses a single sample
        chunks = division.chunks(samples, least)
        step = None
        if not mode.trials.settled:
            for mark in self._pending[-AHEAD].begin if len(self._pending) >= AHEAD else ():
                mark.wait()
            begin = [Mark(self.queues[device]) for device in sorted({0, *chunks})]
            step = _Step(mode, division, samples, begin, {})
        outputs = self._outputs(parallel, inputs, kwargs, samples, chunks, step)
        if not have_rows(outputs, list(chunks.values()), parallel.dim):
            self._kept_equal = True
            _say(_KEPT_EQUAL)
            if division.speeds or len(division.used) < len(self.queues):
                return self._original(parallel, *inputs, **kwargs)
        mode.rows = mode.rows or min(chunks.values()) > 1
        if step is not None:
            self._pending.append(step)
        if [*chunks] == [0] and parallel.output_device == self._numbers[0]:
            return outputs[0]  # gathering would copy it, and end the device's batch of calls
        return parallel.gather(outputs, parallel.output_device)

    def _outputs(
        self,
        parallel: nn.DataParallel[Any],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        samples: int,
        chunks: dict[int, int],
        step: _Step | None,
    ) -> list[Any]:
        """Return what the replicas return for their chunks."""
        numbers = [self._numbers[device] for device in chunks]
        with in_chunks(samples, list(chunks.values())):
            scattered, keywords = scatter_kwargs(inputs, kwargs, numbers, parallel.dim)
        home = self._numbers[0]
        replicas = [parallel.module]
        if numbers != [home]:
            replicas = parallel.replicate(parallel.module, [home, *(each for each in numbers if each != home)])
            replicas = replicas[-len(numbers) :]
        begin = {device: self._arrived(device) for device in chunks} if step is not None else {}
        outputs: list[Any] = nn.parallel.parallel_apply(replicas, scattered, keywords, numbers)
        if step is not None:
            for device, size in chunks.items():
                step.forward[device] = (size, begin[device], Mark(self.queues[device]))
        if parallel.training and home not in numbers:
            _keep_buffers(parallel.module, replicas[0])
        return outputs

    def _arrived(self, device: int) -> Mark:
        """Return a mark that a device reaches when it has what others have sent it."""
        queue = self.queues[device]
        queue.read_on_worker(queue.native.take_watched())
        return Mark(queue)

    def _note_steps(self, parallel: nn.DataParallel[Any]) -> None:
        """Note the steps that all devices have executed."""
        while len(self._pending) > 1 and (end_s := self._pending[1].begin_s()):
            step = self._pending.pop(0)
            mode = step.mode
            if mode.rows and step.samples == mode.samples and not mode.trials.settled:
                mode.trials.note(step.division, end_s - step.begin_s(), step.speeds())
                if mode.trials.settled:
                    self._tell(parallel, mode.trials)

    def _tell(self, parallel: nn.DataParallel[Any], trials: Trials) -> None:
        names = [f"{context.called}:{number}" for number in self._numbers]
        line = outcome(trials, names, batch_norm=parallel.training and has_batch_norm(parallel))
        if line and not self._said:
            self._said = True
            _say(line)


def _say(line: str) -> None:
    print(f"onebox: {line}", file=sys.stderr, flush=True)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a module has a layer whose results depend on the other samples of a chunk."""
    return any(isinstance(each, _BatchNorm) for each in module.modules())


def _keep_buffers(module: nn.Module, replica: nn.Module) -> None:
    """Copy the buffers of the first replica to a module on a device that has no replica."""
    with torch.no_grad():
        for kept, made in zip(module.buffers(), replica.buffers(), strict=True):
            kept.copy_(made)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a value that PyTorch scatters or gathers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _size(tensor: Tensor, dim: int) -> int:
    """Return a size of a tensor; 0 where it lacks the dimension."""
    return tensor.size(dim) if -tensor.dim() <= dim < tensor.dim() else 0


def batch_size(arguments: Any, dim: int) -> int:
    """Return the number of samples of a module's arguments; 0 where their sizes do not say it."""
    sizes = [_size(tensor, dim) for tensor in _tensors(arguments)]
    least = min(sizes, default=0)
    return least if least and not any(size % least for size in sizes) else 0


def have_rows(outputs: list[Any], chunks: list[int], dim: int) -> bool:
    """Return whether all that replicas return has one row, or several, for each sample of their chunk."""
    by_replica = [[_size(tensor, dim) for tensor in _tensors(output)] for output in outputs]
    return all(
        all(sizes) and len({(size % chunk, size // chunk) for size, chunk in zip(sizes, chunks, strict=True)}) == 1
        and not sizes[0] % chunks[0]
        for sizes in zip(*by_replica, strict=False)
    )  # fmt: skip


_known: weakref.WeakKeyDictionary[nn.Module, UnevenForward | None] = weakref.WeakKeyDictionary()


def _uneven(parallel: nn.DataParallel[Any], original: Callable[..., Any]) -> UnevenForward | None:
    """Return the forward passes of a module over virtual devices of different speed; ``None`` for others."""
    first = next(iter(parallel.module.parameters()), None)
    own = all(getattr(type(parallel), name) is getattr(nn.DataParallel, name) for name in _OWN_STEPS)
    if first is None or not is_virtual(first) or not own or len(set(parallel.device_ids)) < 2:
        return None
    queues = [context.queue_of(torch.device("vgpu", number)) for number in parallel.device_ids]
    found = _known.get(parallel)
    if found is None or found.queues != queues:
        found = _known[parallel] = UnevenForward(parallel, queues, original) if differ(queues) else None
    return found


def differ(queues: Sequence[CommandQueue]) -> bool:
    """Return whether the devices are not all of one kind on one host."""
    devices = [queue.pool.devices[queue.worker] for queue in queues]
    return len({(each.host, each.name, each.threads, each.processors, each.speed) for each in devices}) > 1


def forward_by_speed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``nn.DataParallel`` divide batches by the measured speed of virtual devices."""

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or os.environ.get(EQUAL_SHARES) == "1":
            return original(self, *inputs, **kwargs)
        uneven = _uneven(self, original)
        return original(self, *inputs, **kwargs) if uneven is None else uneven(self, inputs, kwargs)

    return forward
