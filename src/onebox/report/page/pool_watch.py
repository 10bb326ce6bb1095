"""Changes in a pool, for the page."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import psutil

from onebox.pool import Pool
from onebox.pool.discovery import HERE, LOCAL_HOST
from onebox.report.page.state import DeviceState, DeviceView, EventView, HostView, LinkView
from onebox.report.page.temperatures import device_temperatures

_TEMPERATURE_S = 5.0

_RECENT_S = 2.0
"""Longest time between two looks at a pool after which its changes happened just now."""


class PoolWatch:
    """Changes in a pool: devices, losses, and the bytes that this process has sent.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._away: frozenset[int] = frozenset()
        self._told: set[int] = set()
        self._recoveries = pool.recoveries
        self._looked_s = time.monotonic()
        self._carried = time.monotonic(), _carried(pool)
        self._rates_bps: dict[tuple[str, str], float] = {}
        self._temperatures: tuple[float, dict[str, float]] = (-_TEMPERATURE_S, {})

    @property
    def recovering(self) -> str:
        """A line about lost workers; empty if there are none."""
        lost = self._pool.lost - self._pool.gone
        return f"recovering from the loss of {_devices_text(lost)}" if lost else ""

    def news(self) -> list[EventView]:
        """Return the losses and returns of devices since the last call; without a time if that was long ago."""
        pool, recoveries = self._pool, self._pool.recoveries
        before_s, self._looked_s = self._looked_s, time.monotonic()
        at_s = time.time() if self._looked_s - before_s <= _RECENT_S else None
        away = pool.lost | pool.gone
        over = pool.losses(self._recoveries)  # those of recoveries that have been quicker than this is called
        found = []
        for device in sorted((away | over.keys()) - self._told):
            info = pool.devices[device]
            text = f"the worker of device {device} ({info.device} on {info.host}) is lost"
            found.append(EventView(at_s=at_s, step=None, kind="loss", severity="failure", text=text))
        back = (self._away | over.keys()) - away
        if back:
            text = f"{_devices_text(back)} back, with {'a new worker' if len(back) == 1 else 'new workers'}"
            found.append(EventView(at_s=at_s, step=None, kind="return", severity="good", text=text))
        self._away, self._told = away, set(away)
        if not pool.broken:
            self._recoveries = recoveries
        return found

    def hosts(
        self,
        used_bytes: Mapping[int, int],
        peak_bytes: Mapping[int, int],
        busy: Mapping[int, float],
        budgets: Mapping[int, int],
    ) -> tuple[HostView, ...]:
        """Return the pool by hosts.

        Args:
            used_bytes: Used memory of each device, as far as known.
            peak_bytes: Its peak.
            busy: Busy part of its time.
            budgets: Limit of its memory.
        """
        lost, gone = self._pool.lost, self._pool.gone
        temperatures = self._temperatures_c()
        found: dict[str, list[DeviceView]] = {}
        for device in self._pool.devices:
            number = device.number
            state: DeviceState = "gone" if number in gone else "lost" if number in lost else "present"
            here = device.host == LOCAL_HOST
            found.setdefault(device.host, []).append(
                DeviceView(
                    number=number,
                    device=device.device,
                    name=device.name,
                    state=state,
                    threads=device.threads,
                    memory_bytes=device.memory_bytes,
                    budget_bytes=budgets.get(number) or device.memory_bytes,
                    used_bytes=used_bytes.get(number),
                    peak_bytes=peak_bytes.get(number),
                    busy=busy.get(number) if state == "present" else 0.0,
                    temperature_c=temperatures.get(device.device) if here else None,
                    emulated=device.emulated,
                )
            )
        load = self._load()
        return tuple(
            HostView(name=host, devices=tuple(own), load=load if host == LOCAL_HOST else None)
            for host, own in found.items()
        )

    def uplinks(self) -> tuple[LinkView, ...]:
        """Return what this process sends to each host, and receives from it."""
        (then_s, before), now_s, now = self._carried, time.monotonic(), _carried(self._pool)
        if now_s - then_s > 0.5:
            self._carried = now_s, now
            self._rates_bps = {
                way: float(f"{(size - before.get(way, 0)) / (now_s - then_s):.4g}") for way, size in now.items()
            }
        return tuple(
            LinkView(source=source, target=target, now_bps=self._rates_bps.get((source, target)), total_bytes=total)
            for (source, target), total in now.items()
        )

    def _load(self) -> float:
        return round(psutil.getloadavg()[0] / (psutil.cpu_count() or 1), 2)

    def _temperatures_c(self) -> dict[str, float]:
        """Return the temperature of the devices of this machine that have a sensor."""
        then_s, found = self._temperatures
        if time.monotonic() - then_s >= _TEMPERATURE_S:
            kinds = {device.device for device in self._pool.devices if device.host == LOCAL_HOST}
            found = device_temperatures(kinds)
            self._temperatures = time.monotonic(), found
        return found


def _carried(pool: Pool) -> dict[tuple[str, str], int]:
    """Return the bytes of tensors that this process has sent to each host, and received from it."""
    found: dict[tuple[str, str], int] = {}
    for device, sent, received in zip(pool.devices, pool.sent_bytes, pool.received_bytes, strict=True):
        for way, size_bytes in (((HERE, device.host), sent), ((device.host, HERE), received)):
            found[way] = found.get(way, 0) + size_bytes
    return found


def _devices_text(devices: Collection[int]) -> str:
    return f"device{'s' * (len(devices) != 1)} {', '.join(map(str, sorted(devices)))}"
