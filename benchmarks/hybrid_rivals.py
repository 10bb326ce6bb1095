"""What PyTorch itself has for training with less memory, for ``hybrid.py``, in a process of its own.

``hybrid_rivals.py MODEL DEVICE DATA [--width N] [--quick]``, with a folder for DATA. Reads commands from standard
input, one a line, and answers each with a number on a line of its own:

- ``SIDE STEPS``: runs training steps; how many seconds they took;
- ``SIDE peak``: the most bytes that a step had in use on the device;
- ``SIDE loss``: the loss of the first step.

A side is ``plain``; ``checkpoint``, which is ``torch.utils.checkpoint`` around each block of the model; or
``save_on_cpu``, with a copy of each activation as it makes with ``pin_memory=True`` (without, it does nothing to what
is on a CPU already).

The peak on a GPU is PyTorch's ``max_memory_allocated``. On a CPU PyTorch does not count it: it is counted as a worker
of onebox counts, each storage once as long as any tensor shows it, looked at after every operator. What operators use
inside is in neither figure. What ``save_on_cpu`` puts aside counts as host memory, and what it brings back, which on a
CPU is the very same tensor, as a copy on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hybrid_models import sgd, workload
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

SIDES = ("plain", "checkpoint", "save_on_cpu")


class Accounting(TorchDispatchMode):
    """Counts the bytes of all storages that tensors hold, from the operators that make them to their end.

    Args:
        tensors: What is there already.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._used_bytes = 0
        self._live: set[int] = set()
        self._aside = False
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and count what has come."""
        made = func(*args, **(kwargs or {}))
        if not self._aside:
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    self._count(tensor)
        return made

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what is made within: it is on the host."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live.add(key)
            self._used_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
            weakref.finalize(storage, self._end, key, storage.nbytes())

    def _end(self, key: int, size_bytes: int) -> None:
        self._live.discard(key)
        self._used_bytes -= size_bytes


class Side:
    """A model that is trained in one of the ways.

    Args:
        way: One of :data:`SIDES`.
        model: A sequence of blocks.
        data: A batch.
        micro_batch: Samples of a micro-batch.
    """

    def __init__(self, way: str, model: nn.Sequential, data: tuple[Tensor, Tensor], micro_batch: int) -> None:
        self._way = way
        self._model = model
        self._optimizer = sgd(model)
        self._data = data
        self._parts = list(zip(*(tensor.split(micro_batch) for tensor in data), strict=True))
        self._accounting: Accounting | None = None

    def step(self) -> float:
        """Run a step; return its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._data[0].device)
        for inputs, targets in self._parts:
            with self._saving():
                outputs = self._forward(inputs)
                loss = nn.functional.cross_entropy(outputs, targets) * (len(inputs) / len(self._data[0]))
            loss.backward()
            total += loss.detach()
            del outputs, loss
        self._optimizer.step()
        return float(total)

    def peak_bytes(self) -> int:
        """Run a step; return the most bytes that it had in use."""
        self.step()
        if self._data[0].device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        self._optimizer.zero_grad(set_to_none=True)
        state = [value for entry in self._optimizer.state.values() for value in entry.values()]
        held = [*self._model.parameters(), *self._model.buffers(), *self._data, *state]
        with Accounting([tensor for tensor in held if isinstance(tensor, Tensor)]) as self._accounting:
            self.step()
        found, self._accounting = self._accounting.peak_bytes, None
        return found

    def _forward(self, value: Tensor) -> Tensor:
        if self._way != "checkpoint":
            return self._model(value)
        for block in self._model:
            value = checkpoint(block, value, use_reentrant=False)
        return value

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        if self._way != "save_on_cpu":
            return contextlib.nullcontext()
        saving = save_on_cpu(pin_memory=True)
        accounting = self._accounting
        if accounting is None:
            return saving
        pack, unpack = saving.pack_hook, saving.unpack_hook

        def put_aside(tensor: Tensor) -> Any:
            with accounting.aside():
                return pack(tensor)

        return torch.autograd.graph.saved_tensors_hooks(put_aside, lambda packed: unpack(packed).clone())


def answer(command: str, make: Callable[[str], Side], made: dict[str, Side]) -> float:
    """Do what a command says."""
    name, what = command.split()
    if what in ("loss", "peak"):
        fresh = make(name)
        return fresh.step() if what == "loss" else fresh.peak_bytes()
    side = made[name] if name in made else made.setdefault(name, make(name))
    begin = time.perf_counter()
    for _ in range(int(what)):
        side.step()
    return time.perf_counter() - begin


def main() -> None:
    """Serve commands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("device")
    parser.add_argument("data", type=Path)
    parser.add_argument("--width", type=int)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = workload(options.model, width=options.width, quick=options.quick)
    data = tuple(tensor.to(options.device) for tensor in case.data(options.data))

    def make(name: str) -> Side:
        return Side(name, case.model().to(options.device), data, case.micro_batch)

    made: dict[str, Side] = {}
    for line in sys.stdin:
        print(answer(line, make, made), flush=True)


if __name__ == "__main__":
    main()
