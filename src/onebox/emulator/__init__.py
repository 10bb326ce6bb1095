"""The program of an emulated ``sim`` device, which computes nothing: what it does takes modelled times.

It speaks the worker's protocol and has the worker's checks, buffers, counts of memory, failures and votes: it is the
worker's executor over tensors without elements, whose programs, optimizers, copies and groups take time on a clock of
the device (:mod:`onebox.emulator.clock`) instead of the machine's. Nothing sleeps but the replies to the client, which
are sent when the device would have sent them. Emulated links between such devices are here, too.

A worker's process runs this program where its configuration names such a device; nothing of it runs where a device
computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names

if TYPE_CHECKING:
    from onebox.emulator.device import MEMORY_BYTES, PRODUCT

__all__ = ["MEMORY_BYTES", "PRODUCT"]

__getattr__ = lazy_names("onebox.emulator", {"onebox.emulator.device": ("MEMORY_BYTES", "PRODUCT")})
