"""Random number generators: each device has its own, which lives on its worker."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.metadata import dense
from onebox.vgpu.core.tensor import Handle, command_queue_of, handle_of, is_virtual, wrap
from onebox.vgpu.dispatch.copies import transfer, upload
from onebox.vgpu.dispatch.op_cache import sources
from onebox.vgpu.runtime.command_queue import FIRST_SEED, CommandQueue
from onebox.vgpu.runtime.context import queue_of, seeded_queues
from onebox.wire import GeneratorSpec, TensorSpec, to_frame
from onebox.wire.protocol.eager import KeepGenerator, SetGenerator
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Put

_plain: Any = torch._C.Generator


class _Either(type(_plain)):  # type: ignore[misc]
    """Metaclass that makes ``VirtualGenerator(device)`` return the device's class, and ``isinstance`` accept all of
    them."""

    def __call__(cls, device: Any = "cpu") -> Any:
        place = torch.device(device)
        if place.type != "vgpu":
            return _plain(place)
        made = _plain.__new__(cls)
        made._begin(queue_of(place))
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _plain)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _plain)


class VirtualGenerator(_plain, metaclass=_Either):
    """A random number generator, of a virtual device if requested.

    Args:
        device: Its device.
    """

    def _begin(self, queue: CommandQueue) -> None:
        self.queue = queue
        self.number = queue.pool.new_number()
        self._sign = secrets.randbits(63)  # identifies this generator in cached ops
        super().manual_seed(self._sign)
        sources[self._sign] = self.number
        self._seed = FIRST_SEED
        queue.before(Define(self.number, GeneratorSpec(self._seed)))
        queue.flush()

    def __del__(self) -> None:
        queue = getattr(self, "queue", None)
        if queue is not None:
            queue.ended.append(self.number)
            sources.pop(self._sign, None)

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.queue.device

    def manual_seed(self, seed: int) -> Any:
        """Set the seed."""
        self._seed = _checked(seed)
        self.queue.flush([SetGenerator(self.number, self._seed)])
        return self

    def seed(self) -> int:
        """Set a random seed, and return it."""
        self.manual_seed(_plain().seed())
        return self._seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._seed

    def get_state(self) -> Tensor:
        """Return the state, as bytes."""
        return read_state(self.queue, self.number)

    def set_state(self, state: Tensor) -> Any:
        """Set the state."""
        write_state(self.queue, self.number, state)
        return self

    def clone_state(self) -> Any:
        """Return another generator in the same state."""
        return VirtualGenerator(self.device).set_state(self.get_state())

    def __reduce__(self) -> Any:
        raise TypeError(f"a generator of {self.device} cannot be saved; save its get_state()")


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
    if not number and queue.unused:
        host, buffer = state.detach().cpu().clone(), queue.new_number()
        put = Put((buffer,), (TensorSpec("uint8", tuple(host.shape)),))
        steps = (put, [to_frame(host)]), (SetGenerator(0, None, buffer), ()), (Free((buffer,)), ())
        if queue.start_with(*steps):
            _kept[queue] = host
            return
    if not is_virtual(state):
        here = upload(state, queue)
    else:  # not by an operator: this may be called where PyTorch's dispatcher must ignore tensor subclasses
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
    return _plain("cpu").manual_seed(queue.seed).get_state()


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


__all__ = ["VirtualGenerator", "read_state", "seed_all", "seed_device", "write_state"]
