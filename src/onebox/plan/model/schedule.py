"""Schedules: for each device, its actions in order. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from onebox.errors import UsageError

Kind = Literal["F", "I", "W", "B"]
"""Forward; input gradient; weight gradient; and both gradients at once."""

Routes = tuple[tuple[tuple[int, ...], ...], ...]
"""``routes[stage][micro_batch]``: the devices of the replica that computes it; several split its layers."""

_ACTION = re.compile(r"(\d+)([FIWB])(-?\d+)")


class Action(NamedTuple):
    """One action of a device; ``2F0`` is the forward of stage 2 on micro-batch 0.

    Args:
        kind: Forward or gradients.
        stage: The stage.
        micro_batch: The micro-batch; in a window a negative one belongs to the step before, -1 is its last.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action.

        Raises:
            UsageError: The text is not an action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is no action; allowed is STAGE, one of F I W B, MICRO-BATCH, such as 2F0")
        return cls(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A table of actions.

    Args:
        rows: For each device, by its number, its actions in order.
    """

    rows: Mapping[int, tuple[Action, ...]]

    def lines(self) -> tuple[str, ...]:
        """Return the table as text, one line a device: ``0: 0F0 0F1 0B0 0B1``."""
        return tuple(f"{device}: {' '.join(map(str, row))}" for device, row in sorted(self.rows.items()))

    @classmethod
    def parse(cls, lines: tuple[str, ...] | list[str]) -> Schedule:
        """Read a table; empty lines and lines that begin with ``#`` are ignored.

        Raises:
            UsageError: It is not a valid table.
        """
        rows: dict[int, tuple[Action, ...]] = {}
        for line in lines:
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            device, colon, actions = text.partition(":")
            if not colon or not device.strip().isdigit() or int(device) in rows:
                raise UsageError(f"{line!r} is no row of a schedule; allowed is 'DEVICE: 0F0 0F1 …', once a device")
            rows[int(device)] = tuple(Action.parse(part) for part in actions.split())
        return cls(rows=rows)
