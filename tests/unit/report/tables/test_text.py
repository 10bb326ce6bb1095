"""The table of devices and the line of an epoch."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from onebox.report import DeviceRow, device_table, epoch_line


def test_an_epoch_with_everything() -> None:
    line = epoch_line(epoch=3, epochs=10, loss=0.12341, test_loss=0.1012, test_accuracy=0.978, samples_per_s=12345.4)
    assert line == "epoch 3/10  loss 0.1234  test loss 0.1012  test accuracy 97.8 %  12,345 samples/s"


def test_what_is_not_known_is_left_out() -> None:
    assert epoch_line(epoch=1, epochs=1, loss=2.0) == "epoch 1/1  loss 2.0000"


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.0, "0.0000"),
        (-1.5, "-1.5000"),
        (0.00001234, "1.234e-05"),
        (123456.0, "1.235e+05"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_losses_of_any_size(loss: float, text: str) -> None:
    assert epoch_line(epoch=1, epochs=1, loss=loss) == f"epoch 1/1  loss {text}"


def test_a_slow_rate_keeps_a_decimal() -> None:
    assert epoch_line(epoch=1, epochs=1, loss=1, samples_per_s=0.25).endswith("  0.2 samples/s")


def test_the_device_table() -> None:
    stream = io.StringIO()
    rows = [
        DeviceRow(device="vgpu:0", kind="cpu", name="[bold] chip", threads=2, memory_bytes=3 * 2**29),
        DeviceRow(device="vgpu:1", kind="sim", name="emulated", memory_bytes=2**20),
        DeviceRow(device="vgpu:2", kind="cuda", name="card"),
    ]
    Console(file=stream, width=100).print(device_table(rows))
    text = stream.getvalue()
    header, *body = [line.split() for line in text.splitlines() if any(c.isalnum() for c in line)]
    assert [word for word in header if word.isalpha()] == ["device", "kind", "name", "threads", "memory"]
    assert len(body) == 3
    assert "[bold] chip" in text
    assert "1.5 GiB" in text
    assert "1 MiB" in text
    assert body[2][-2:] == ["-", "│"]


def test_emulated_devices_are_labelled() -> None:
    rows = [
        DeviceRow(device="0", kind="cpu", name="a processor"),
        DeviceRow(device="1", kind="cpu", name="a processor", emulated=True, speed=0.25),
        DeviceRow(device="2", kind="sim", name="computes nothing", emulated=True),
    ]
    text = io.StringIO()
    Console(file=text, width=120).print(device_table(rows))
    lines = [line for line in text.getvalue().splitlines() if "processor" in line or "nothing" in line]
    assert ["emulated" in line for line in lines] == [False, True, True]
    assert "cpu, emulated, speed 0.25" in lines[1]
    assert "sim, emulated, speed 1" in lines[2]
