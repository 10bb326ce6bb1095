"""Random number generators of the device in C++, which live on workers; 0 is a device's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from onebox.vgpu.integration.generators import read_state, seed_device, write_state
from onebox.vgpu.runtime.command_queue import FIRST_SEED
from onebox.vgpu.runtime.context import current_context
from onebox.wire import GeneratorSpec
from onebox.wire.protocol.eager import SetGenerator
from onebox.wire.protocol.requests import Define

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
    """Generators by device and number."""

    def make(self, index: int) -> int:
        """Return the number of a new one."""
        if getattr(_this, "own", False):
            return 0
        queue = current_context().queues[index]
        number = queue.pool.new_number()
        queue.before(Define(number, GeneratorSpec(FIRST_SEED)))
        return number

    def seed(self, index: int, number: int, seed: int) -> None:
        """Seed one."""
        queue = current_context().queues[index]
        if number:
            queue.flush([SetGenerator(number, seed)])
        else:
            seed_device(queue, seed)

    def state(self, index: int, number: int) -> Tensor:
        """Return the state of one."""
        return read_state(current_context().queues[index], number).cpu()

    def set_state(self, index: int, number: int, state: Tensor) -> None:
        """Set the state of one."""
        write_state(current_context().queues[index], number, state)
