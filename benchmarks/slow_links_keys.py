"""Cells that ``slow_links.py`` has measured: their file, and the figures that come of them. Pure but for the file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from slow_links_sides import FIXED, SIDES

Part = Literal["speed", "loss", "drop"]
Key = tuple[Part, int, int, str, int]

INFINITE = 0
"""The rate of links without limit and delay, in Mbit/s."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A side at one place of the table.

    Args:
        part: ``speed``, ``loss``, or ``drop``: the speed after a link has dropped to a rate.
        islands: Hosts, each with a device.
        rate: Of each host's link, Mbit/s, both ways; :data:`INFINITE` for no limit and no delay.
        side: A name of ``SIDES``.
        seed: Of parameters and batches.
        values: Seconds per token in each turn; of a loss it alone.
        bytes_per_token: Sent over the network.
        note: The plan, or what was decided.
        settings: All else that it was measured with; cells of other settings are not compared.
    """

    part: Part
    islands: int
    rate: int
    side: str
    seed: int = 0
    values: tuple[float, ...]
    bytes_per_token: float = 0.0
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Its place in the table."""
        return self.part, self.islands, self.rate, self.side, self.seed

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)


class Cells:
    """What has been measured, by place.

    Args:
        found: The cells.
        settings: Those with other ones are left out.
    """

    def __init__(self, found: Iterable[Cell], settings: Mapping[Part, Mapping[str, Any]]) -> None:
        self._settings = settings
        self._cells: dict[Key, Cell] = {}
        for cell in found:
            self.add(cell)

    def __contains__(self, key: Key) -> bool:
        return key in self._cells

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def add(self, cell: Cell) -> None:
        """Add a cell; one at its place gives way."""
        if cell.settings == self._settings[cell.part]:
            self._cells[cell.key] = cell

    def get(self, part: Part, islands: int, rate: int, side: str, seed: int = 0) -> Cell | None:
        """Return a cell, if it was measured."""
        return self._cells.get((part, islands, rate, side, seed))

    def ratio(self, part: Part, islands: int, over: tuple[int, str], under: tuple[int, str]) -> float | None:
        """Return the ratio of the medians of two (rate, side), if both were measured."""
        above, below = self.get(part, islands, *over), self.get(part, islands, *under)
        return above.value / below.value if above and below else None


def read(files: Iterable[Path]) -> list[Cell]:
    """Return the cells of files, each a line; files that are not there have none."""
    lines = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    return [Cell(**given | {"values": tuple(given["values"])}) for given in map(json.loads, lines)]


def append(file: Path, cell: Cell) -> None:
    """Write a cell at the end of a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as there:
        there.write(json.dumps(asdict(cell)) + "\n")


def _chosen(choose: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return round(choose(there), 4) if there else None


def figures(cells: Cells, rates: Sequence[int], islands: Sequence[int], seeds: int, cores: int) -> dict[str, Any]:
    """Return the figures of the benchmark; ``None`` for one whose cells were not measured.

    Args:
        cells: What was measured.
        rates: Of links, Mbit/s, from the fastest to the slowest.
        islands: How many there are in the cells.
        seeds: How many there are, from 0.
        cores: Of this machine: devices that share one have no speed of their own.
    """
    result: dict[str, Any] = {}
    for rate in sorted(rates):
        over = [cells.ratio("speed", n, (rate, "islands"), (INFINITE, "islands")) for n in islands]
        result[f"seconds_per_token_over_infinite_{rate}"] = _chosen(max, over)
    for n in islands:
        pairs = [
            (cells.get("loss", n, INFINITE, "islands", seed), cells.get("loss", min(islands), INFINITE, "sync", seed))
            for seed in range(seeds)
        ]
        both = [ours.value / theirs.value - 1 for ours, theirs in pairs if ours and theirs]
        result[f"loss_penalty_{n}"] = round(statistics.fmean(both), 4) if both else None
        result[f"loss_seeds_{n}"] = len(both)
    for rate in sorted(rates):
        faster = [cells.ratio("speed", n, (rate, "ddp"), (rate, "islands")) for n in islands]
        result[f"faster_than_ddp_{rate}"] = _chosen(min, faster)
    result["after_drop_over_best"] = _chosen(
        max, [_over_best(cells, "drop", n, rate, "adaptive", _static()) for n in islands for rate in rates]
    )
    result["default_over_best_single"] = _chosen(
        min,
        [cells.ratio("speed", n, (rate, "single"), (rate, "default")) for n in islands for rate in rates if n <= cores],
    )
    regrets = [_over_best(cells, "speed", n, rate, "gated", FIXED) for n in islands for rate in rates]
    result["gate_regret"] = _chosen(max, [regret - 1 for regret in regrets if regret is not None])
    result["bytes_saved"] = {
        side: {str(rate): _chosen(min, [_saved(cells, n, rate, side) for n in islands]) for rate in sorted(rates)}
        for side in ("gated", "islands")
    }
    return result


def _static() -> tuple[str, ...]:
    return tuple(name for name, side in SIDES.items() if side.static)


def _over_best(cells: Cells, part: Part, islands: int, rate: int, side: str, others: Sequence[str]) -> float | None:
    """Return the time of a side over the least of others; ``None`` where one of them was not measured."""
    own = cells.get(part, islands, rate, side)
    rivals = [cells.get(part, islands, rate, other) for other in others]
    there = [rival.value for rival in rivals if rival]
    return own.value / min(there) if own and len(there) == len(others) else None


def _saved(cells: Cells, islands: int, rate: int, side: str) -> float | None:
    """Return the part of the synchronous side's bytes that a side does not send."""
    own, sync = cells.get("speed", islands, rate, side), cells.get("speed", islands, rate, "sync")
    return 1 - own.bytes_per_token / sync.bytes_per_token if own and sync and sync.bytes_per_token else None
