"""Devices as a table, an epoch as a line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from onebox.sizes import size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """A row of :func:`device_table`.

    Args:
        device: Its name in the pool, such as ``vgpu:0``.
        kind: ``cpu``, ``cuda`` or ``sim``.
        name: Model name of the hardware, and its host where it is not this one.
        threads: CPU threads of its worker; None where not meaningful.
        memory_bytes: Memory that the worker may use; None where unlimited or unknown.
        emulated: Whether times on it are emulated, by slowing it down or by sleeping instead of computing.
        speed: Its emulated speed; 1 for full speed.
    """

    device: str
    kind: str
    name: str
    threads: int | None = None
    memory_bytes: int | None = None
    emulated: bool = False
    speed: float = 1.0


def device_table(rows: Iterable[DeviceRow]) -> Table:
    """Make the table of devices that ``console.print`` shows.

    Args:
        rows: The devices, in the order of the table.

    Returns:
        A table with the columns device, kind, name, threads and memory.

    Example:
        >>> from rich.console import Console
        >>> row = DeviceRow(device="vgpu:0", kind="cpu", name="this machine", threads=2, memory_bytes=2**30)
        >>> Console().print(device_table([row]))  # doctest: +SKIP
    """
    table = Table("device", "kind", "name")
    table.add_column("threads", justify="right")
    table.add_column("memory", justify="right")
    for row in rows:
        threads = "-" if row.threads is None else str(row.threads)
        memory = "-" if row.memory_bytes is None else size_text(row.memory_bytes)
        # Text, because rich reads a plain string's square brackets as markup.
        kind = f"{row.kind}, emulated, speed {row.speed:g}" if row.emulated else row.kind
        table.add_row(*(Text(cell) for cell in (row.device, kind, row.name, threads, memory)))
    return table


def epoch_line(
    *,
    epoch: int,
    epochs: int,
    loss: float,
    test_loss: float | None = None,
    test_accuracy: float | None = None,
    samples_per_s: float | None = None,
) -> str:
    """Describe the results of an epoch in one line.

    Args:
        epoch: Its number, from 1.
        epochs: Number of epochs.
        loss: Mean training loss.
        test_loss: Mean loss on the test set; None leaves it out, as for all below.
        test_accuracy: Accuracy on the test set, 0 to 1.
        samples_per_s: Training samples per second.

    Returns:
        The line, without a newline.

    Example:
        >>> epoch_line(epoch=3, epochs=10, loss=0.12341, test_accuracy=0.978, samples_per_s=12345)
        'epoch 3/10  loss 0.1234  test accuracy 97.8 %  12,345 samples/s'
    """
    parts = [f"epoch {epoch}/{epochs}", f"loss {loss_text(loss)}"]
    if test_loss is not None:
        parts.append(f"test loss {loss_text(test_loss)}")
    if test_accuracy is not None:
        parts.append(f"test accuracy {100 * test_accuracy:.1f} %")
    if samples_per_s is not None:
        parts.append(rate_text(samples_per_s))
    return "  ".join(parts)


def marked(device: int, emulated: Collection[int]) -> str:
    """Return a device's number, with a star if it is emulated."""
    return f"{device}*" if device in emulated else str(device)


def emulated_caption(devices: Iterable[int], emulated: Collection[int]) -> str | None:
    """Return the caption of a table of devices, which explains the stars of :func:`marked`, if there are any."""
    return "* emulated" if set(devices) & set(emulated) else None


def share_text(part: int, whole: int | None) -> str:
    """Return memory as a share of a limit, if there is one."""
    return "-" if not whole else f"{part / whole:.1%}" + (" too much" if part > whole else "")


def loss_text(value: float) -> str:
    """Format a loss: four decimals, or an exponent where four decimals do not suit."""
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value):
        return f"{value:.4f}"
    return f"{value:.3e}"


def rate_text(samples_per_s: float) -> str:
    """Format a rate; one decimal below 10 samples/s."""
    return f"{samples_per_s:,.{1 if samples_per_s < 10 else 0}f} samples/s"
