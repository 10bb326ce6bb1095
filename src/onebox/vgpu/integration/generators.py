"""Random number generators, which live on workers; each device has its own, by number 0."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.metadata import dense
from onebox.vgpu.core.tensor import Handle, command_queue_of, handle_of, is_virtual, wrap
from onebox.vgpu.dispatch.copies import transfer, upload
from onebox.vgpu.runtime.command_queue import FIRST_SEED, CommandQueue
from onebox.vgpu.runtime.context import seeded_queues
from onebox.vgpu.signals import shielded
from onebox.wire import GeneratorSpec, TensorSpec, from_frame, to_frame
from onebox.wire.protocol.eager import KeepGenerator, SetGenerator
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Put

_this = threading.local()


@contextmanager
def making_own() -> Iterator[None]:
    """Let generators that are made meanwhile in this thread be the devices' own."""
    _this.own = True
    try:
        yield
    finally:
        _this.own = False


class Generators:
    """The generators that C++ knows, by a device's queue there and a number."""

    def make(self, device: Any) -> int:
        """Return the number of a new one."""
        if getattr(_this, "own", False):
            return 0
        queue: CommandQueue = device.owner
        number = queue.pool.new_number()
        queue.before(Define(number, GeneratorSpec(FIRST_SEED)))
        return number

    @shielded
    def seed(self, device: Any, number: int, seed: int) -> None:
        """Seed one."""
        if number:
            device.owner.flush([SetGenerator(number, seed)])
        else:
            seed_device(device.owner, seed)

    @shielded
    def state(self, device: Any, number: int) -> Tensor:
        """Return the state of one."""
        return read_state(device.owner, number).cpu()

    @shielded
    def set_state(self, device: Any, number: int, state: Tensor) -> None:
        """Set the state of one."""
        write_state(device.owner, number, state)


def _checked(seed: int) -> int:
    """Return a seed in the range that generators take.

    Raises:
        RuntimeError: It has more than 64 bits.
    """
    number = int(seed)
    if not -(1 << 63) <= number < 1 << 64:
        raise RuntimeError(f"Overflow when unpacking long: {seed} is no seed of 64 bits")
    return number % (1 << 64)


def read_state(queue: CommandQueue, number: int) -> Tensor:
    """Return the state of a device's generator, as bytes on that device, so that nothing waits for it.

    Args:
        queue: Command queue of the device.
        number: The generator; 0 is the device's own.
    """
    if not number and queue.unused:
        return _state_of_unused(queue)
    if not queue.begun:  # there may be nothing to make a tensor of the device with; a Trainer does without
        buffer = queue.pool.new_number()
        queue.flush([KeepGenerator(number, buffer)])
        state = from_frame(*queue.read(buffer))
        queue.flush([Free((buffer,))])
        return state
    buffer = queue.new_number()
    queue.flush([KeepGenerator(number, buffer)])
    return wrap(Handle(queue, buffer), dense(torch.uint8, (queue.state_bytes,)))


def write_state(queue: CommandQueue, number: int, state: Tensor) -> None:
    """Set the state of a generator of a device.

    Args:
        queue: Command queue of the device.
        number: The generator; 0 is the device's own.
        state: The state, on any device.
    """
    if not number and (queue.unused or not queue.begun):
        host, buffer = state.detach().cpu().clone(), queue.pool.new_number()
        put = Put((buffer,), (TensorSpec("uint8", tuple(host.shape)),))
        steps = (put, [to_frame(host)]), (SetGenerator(0, None, buffer), ()), (Free((buffer,)), ())
        if queue.start_with(*steps):
            _kept[queue] = host
            return
        queue.flush([step for step, _ in steps], [to_frame(host)])
        return
    if not is_virtual(state):
        here = upload(state, queue)
    else:
        here = state if command_queue_of(state) is queue else transfer(state, queue)
    handle = handle_of(here)
    queue.flush([SetGenerator(number, None, handle.number)])


_kept: weakref.WeakKeyDictionary[CommandQueue, Tensor] = weakref.WeakKeyDictionary()
"""States that were set for unused devices."""


def _state_of_unused(queue: CommandQueue) -> Tensor:
    """Return the state with which the first use of a device will begin, on the host."""
    if queue in _kept:
        return _kept[queue].clone()
    if queue.pool.devices[queue.worker].kind == "cuda":  # seed and offset
        return torch.tensor([queue.seed - (queue.seed >> 63 << 64), 0], dtype=torch.int64).view(torch.uint8)
    return torch.Generator().manual_seed(queue.seed).get_state()


def seed_device(queue: CommandQueue, seed: int) -> None:
    """Seed the generator of a device."""
    queue.seed = _checked(seed)
    _kept.pop(queue, None)
    if not queue.start_with((SetGenerator(0, queue.seed), ())):
        queue.flush([SetGenerator(0, queue.seed)])


def seed_all(seed: int) -> None:
    """Seed the generators of all devices, or, in the thread of a rank, that of its own."""
    for queue in seeded_queues():
        seed_device(queue, seed)


__all__ = ["Generators", "making_own", "read_state", "seed_all", "seed_device", "write_state"]
