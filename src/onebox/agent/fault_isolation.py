"""A part of an agent's work that fails costs the session that it was for, and nobody else anything."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from onebox.agent.leases import Client
from onebox.agent.log_rate_limit import Reporter

_NOBODY = "the agent itself"


class SessionFaultIsolator:
    """Does parts of the work, each by itself.

    Args:
        report: Told of what failed: which part, for whom, and where in the code.
        part_with: Ends a session, for a reason that its client can read.
    """

    def __init__(self, report: Reporter, part_with: Callable[[Client, str, float], None]) -> None:
        self._report = report
        self._part_with = part_with
        self._parting = False

    def __call__(self, part: str, client: Client | None, do: Callable[[], object], now_s: float) -> bool:
        """Do a part of the work.

        Args:
            part: What it is called in the journal.
            client: Whom it is for; None for nobody in particular.
            do: Does it.
            now_s: The time.

        Returns:
            Whether it was done; if not, that has been told.
        """
        try:
            do()
        except Exception as error:  # a mistake here, or below: whoever provokes it is not to end the leases of others
            why = f"{type(error).__name__}: {error}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = _NOBODY if client is None else client.name
            where = f"{Path(place.filename).name}:{place.lineno}"
            self._report.refusal("failed", name, now_s, client=name, part=part, reason=why, where=where)
        else:
            return True
        if client is not None and not self._parting:  # or it is its end that fails
            self._parting = True
            try:
                end = partial(self._part_with, client, f"the agent failed at something of this client's: {why}", now_s)
                self(part, client, end, now_s)
            finally:
                self._parting = False
        return False


__all__ = ["SessionFaultIsolator"]
