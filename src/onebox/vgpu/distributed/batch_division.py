"""Division of batches among devices of different speed, found by trial. Pure: measurements in, chunk sizes out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

ALIKE = 1.15
"""Factor of speeds within which devices count as equally fast: the noise of a short measurement."""

WARM = 2
"""Steps of a trial that are not counted: new sizes of chunks are new kinds of operators to the devices."""

MEASURED = 3
"""Steps of a trial that count: the fastest one, since what else happens only makes a step slower; of the speeds the
median, since a reply may be noticed late at the begin of a pass as well as at its end."""

_GAIN = 0.98
"""Part of a step's time to which more devices have to reduce it."""


def chunk_sizes(total: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Return sizes of chunks of a batch that all devices have computed as early as possible.

    Each device gets at least so many samples as asked for; where the batch does not allow it, the slowest get none.

    Args:
        total: Samples.
        speeds: Samples per second of each device.
        least: Samples of each chunk, if possible.

    Example:
        >>> chunk_sizes(32, [1.0, 0.25]), chunk_sizes(4, [1.0, 0.01]), chunk_sizes(1, [1.0, 2.0])
        ([26, 6], [3, 1], [0, 1])
    """
    least = max(1, min(least, total))
    used = sorted(range(len(speeds)), key=lambda index: (-speeds[index], index))[: total // least]
    power = sum(speeds[index] for index in used)
    sizes = [0] * len(speeds)
    for index in used:
        sizes[index] = max(least, int(total * speeds[index] / power))
    while sum(sizes) > total:
        longest = max((each for each in used if sizes[each] > least), key=lambda each: sizes[each] / speeds[each])
        sizes[longest] -= 1
    while sum(sizes) < total:
        sizes[min(used, key=lambda each: (sizes[each] + 1) / speeds[each])] += 1
    return sizes


class BatchDivision(NamedTuple):
    """A division of batches.

    Args:
        used: The devices that take part, in order.
        speeds: The speed of each, for chunks in proportion; empty for equal chunks, as PyTorch makes them.
    """

    used: tuple[int, ...]
    speeds: tuple[float, ...] = ()

    def chunks(self, total: int, least: int = 1) -> dict[int, int]:
        """Return the size of each device's chunk, of those that get one."""
        if self.speeds:
            sizes = chunk_sizes(total, self.speeds, least)
        else:
            whole, rest = divmod(total, size := -(-total // len(self.used)))
            sizes = [size] * whole + [rest]
        return {device: size for device, size in zip(self.used, sizes, strict=False) if size}


def divided_by(speeds: dict[int, float]) -> BatchDivision:
    """Return the division among devices of these speeds: equal chunks where they are alike."""
    used = tuple(sorted(speeds))
    if max(speeds.values()) < ALIKE * min(speeds.values()):
        return BatchDivision(used)
    return BatchDivision(used, tuple(speeds[device] for device in used))


def candidates(speeds: Sequence[float]) -> list[BatchDivision]:
    """Return the divisions that may be the fastest: without the slowest devices, those of one speed together; the last
    one is the fastest device alone.

    Args:
        speeds: The speed of each device; the first one has the model, so it precedes others that are alike.
    """
    order = sorted(range(len(speeds)), key=lambda index: (-speeds[index] * (1 if index else ALIKE), index))
    cuts = [at for at in range(1, len(order)) if speeds[order[at - 1]] >= ALIKE * speeds[order[at]]]
    counts = sorted({1, *cuts, len(order)}, reverse=True)
    return [divided_by({index: speeds[index] for index in order[:count]}) for count in counts]


class Trials:
    """A search for the fastest division: each candidate is used for a few steps.

    Args:
        count: Number of devices.

    Attributes:
        current: The division to use now.
        settled: Whether it is final.
    """

    def __init__(self, count: int) -> None:
        self.current = BatchDivision(tuple(range(count)))
        self.settled = False
        self._waiting: list[BatchDivision] | None = None
        self._steps: list[tuple[float, dict[int, float]]] = []
        self._seconds: dict[BatchDivision, float] = {}
        self._corrected = False

    def note(self, division: BatchDivision, seconds: float, speeds: dict[int, float]) -> None:
        """Note a step.

        Args:
            division: Its division; one that is not the current one any more is ignored.
            seconds: Its duration.
            speeds: Samples per second of each device that took part, in its forward pass.
        """
        if self.settled or division != self.current:
            return
        self._steps.append((seconds, speeds))
        if len(self._steps) < WARM + MEASURED:
            return
        measured = self._steps[WARM:]
        self._steps = []
        self._seconds[division] = min(each for each, _ in measured)
        found = {device: statistics.median(known[device] for _, known in measured) for device in measured[0][1]}
        if self._waiting is None:
            self._waiting = self._untried(found)
        elif not self._corrected and division.speeds:
            # A device may be slower with few samples than with many; the first division by speed shows it.
            self._corrected = True
            changes = [found.get(device, speed) / speed for device, speed in _by_device(division).items()]
            if len(found) == len(self._all) and max(changes) >= ALIKE * min(changes):
                self._waiting = self._untried(found)
        if self._waiting:
            self.current = self._waiting.pop(0)
        else:
            self._settle()

    @property
    def _all(self) -> tuple[int, ...]:
        return next(iter(self._seconds)).used

    def _untried(self, speeds: dict[int, float]) -> list[BatchDivision]:
        made = candidates([speeds.get(device, min(speeds.values())) for device in self._all])
        return [each for each in made if each not in self._seconds]

    def _settle(self) -> None:
        best = min(self._seconds.values())
        good = [division for division, seconds in self._seconds.items() if seconds * _GAIN <= best]
        self.current = min(good, key=lambda division: (len(division.used), self._seconds[division]))
        self.settled = True

    def cost_of_all(self) -> tuple[float, float]:
        """Return the seconds of a step with the final division, and of the fastest with all devices."""
        whole = [seconds for division, seconds in self._seconds.items() if division.used == self._all]
        return self._seconds[self.current], min(whole)


def _by_device(division: BatchDivision) -> dict[int, float]:
    return dict(zip(division.used, division.speeds, strict=True))


def outcome(trials: Trials, names: Sequence[str], *, batch_norm: bool) -> str:
    """Return the line that says how batches are divided; empty where they are as by PyTorch.

    Args:
        trials: A search that is settled.
        names: The devices' names.
        batch_norm: Whether the model has batch norm, whose results depend on the chunks.
    """
    division = trials.current
    left_out = [name for device, name in enumerate(names) if device not in division.used]
    if not left_out and not division.speeds:
        return ""
    total, parts = sum(division.speeds), list[str]()
    for device, speed in zip(division.used, division.speeds or [1.0] * len(division.used), strict=True):
        parts.append(f"{names[device]} {100 * speed / (total or len(division.used)):.0f} %")
    line = f"nn.DataParallel divides batches by the speed of the devices: {', '.join(parts)}"
    if left_out:
        seconds, whole = (f"{1000 * each:.3g} ms" for each in trials.cost_of_all())
        line += f"; it leaves out {', '.join(left_out)}, as a step takes {seconds}, and {whole} with all"
    speeds = _by_device(division) if division.speeds else dict.fromkeys(division.used, 1.0)
    fastest = max(division.used, key=speeds.__getitem__)
    if speeds.get(0, 0.0) * ALIKE <= speeds[fastest]:
        line += f"; it may be faster with the model on {names[fastest]}, and that first in device_ids"
    if batch_norm:
        line += "; batch norm normalises these chunks, not equal ones"
    return f"{line} (--equal-shares: equal chunks on all)"
