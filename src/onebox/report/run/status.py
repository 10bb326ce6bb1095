"""The status of a run, in its folder: its process, its pool and its plan while it goes on, and the way it ended."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from msgspec import Struct

from onebox.files import put_file, read_regular
from onebox.plan import Plan
from onebox.pool import DeviceInfo

RunState = Literal["waiting", "running", "ended", "failed", "unknown"]
"""State of a run: not begun, going on, ended regularly, ended by an error, or not known."""

_LARGEST_BYTES = 16 << 20

_SAME_S = 2.0
"""Largest difference of two measurements of the same time: that of the boot is known to a second."""


class RunDevice(Struct, frozen=True, kw_only=True):
    """A device of a run, as its pool was opened.

    Args:
        number: Its number in the pool.
        host: Its host.
        device: ``cpu``, ``cuda:k`` or ``sim``.
        name: Product name.
        threads: Its cores.
        memory_bytes: Its memory.
        emulated: Whether its times are emulated.
    """

    number: int
    host: str
    device: str
    name: str
    threads: int
    memory_bytes: int
    emulated: bool = False


class RunStatus(Struct, frozen=True, kw_only=True):
    """The status of a run.

    Args:
        name: Its model and data.
        state: Its state.
        text: A line about the state, such as the error that ended the run.
        process: Id of its process.
        process_after_boot_s: Time from the start of its host to that of the process, as another one may get the same
            id; ``None`` if it is not known. The time since 1970 would change with the clock.
        client: Name of the host of that process.
        total_steps: Steps of the whole run.
        epochs: Epochs of the whole run.
        devices: The devices of its pool.
        plan: The plan; ``None`` before the first step.
    """

    name: str
    state: RunState
    text: str = ""
    process: int = 0
    process_after_boot_s: float | None = None
    client: str = ""
    total_steps: int | None = None
    epochs: int | None = None
    devices: tuple[RunDevice, ...] = ()
    plan: Plan | None = None

    @classmethod
    def of_this_process(cls, name: str, *, total_steps: int, epochs: int, devices: Iterable[DeviceInfo]) -> RunStatus:
        """Return the status of a run of this process that begins."""
        return cls(
            name=name,
            state="running",
            process=os.getpid(),
            process_after_boot_s=_after_boot_s(os.getpid()),
            client=platform.node(),
            total_steps=total_steps,
            epochs=epochs,
            devices=tuple(
                RunDevice(
                    number=device.number,
                    host=device.host,
                    device=device.device,
                    name=device.name,
                    threads=device.threads,
                    memory_bytes=device.memory_bytes,
                    emulated=device.emulated,
                )
                for device in devices
            ),
        )

    @classmethod
    def read(cls, path: Path) -> RunStatus | None:
        """Return the status in a file; ``None`` if there is none, or if it is not readable."""
        try:
            return msgspec.json.decode(read_regular(path, _LARGEST_BYTES), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
            return None

    def write(self, path: Path) -> None:
        """Write it into a file, atomically.

        Raises:
            OSError: It cannot be written.
        """
        put_file(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n", private=False)

    @property
    def present(self) -> RunState:
        """The present state: a run whose process has ended without a word has failed; that of another host is as it
        was written."""
        if self.state != "running" or self.client != platform.node():
            return self.state
        then_s, now_s = self.process_after_boot_s, _after_boot_s(self.process)
        same = then_s is None or now_s is None or abs(now_s - then_s) < _SAME_S
        try:
            return "running" if same and psutil.Process(self.process).status() != psutil.STATUS_ZOMBIE else "failed"
        except psutil.Error:
            return "failed"


def _after_boot_s(process: int) -> float | None:
    """Return the time from the start of the host to that of a process; ``None`` if it is not known."""
    try:
        boot_s = psutil.boot_time()  # before the process: both must be read from the same clock
        return psutil.Process(process).create_time() - boot_s
    except (psutil.Error, OSError, RuntimeError):  # in some containers /proc/stat lacks the time of the boot
        return None
