"""``onebox devices``: what a pool of this machine has."""

from __future__ import annotations

import msgspec

from onebox.cli.config import DevicesConfig
from onebox.cli.console import OutputConsole
from onebox.pool import DeviceInfo, Pool, open_pool
from onebox.report import DeviceRow, device_table


def show_devices(config: DevicesConfig) -> None:
    """Open a pool and print its devices, as a table or as a JSON list.

    Raises:
        OneboxError: The pool cannot be opened.
    """
    with open_pool(config.pool, threads=config.threads, memory_bytes=config.memory_bytes) as pool:
        if config.json:
            print(msgspec.json.encode(pool.devices).decode())
        else:
            print_devices(pool, OutputConsole())


def print_devices(pool: Pool, console: OutputConsole) -> None:
    """Print the table of a pool's devices."""
    console.print(device_table(_row(device) for device in pool.devices))


def _row(device: DeviceInfo) -> DeviceRow:
    host = "" if device.host == "localhost" else f" on {device.host}"
    return DeviceRow(
        device=str(device.number),
        kind=device.device,
        name=device.name + host,
        threads=device.threads,
        memory_bytes=device.memory_bytes,
        emulated=device.emulated,
        speed=device.speed,
    )
