"""Isolation of faults: a failing part of the agent's work ends the session that it served, and no other."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from onebox.agent.leases import Client
from onebox.agent.log_rate_limit import Reporter

_NOBODY = "the agent itself"


class SessionFaultIsolator:
    """Runs parts of the work, each isolated from the others.

    Args:
        report: Sink of failures: the part, its client, and the place in the code.
        part_with: Function that ends a session, with a reason for its client.
    """

    def __init__(self, report: Reporter, part_with: Callable[[Client, str, float], None]) -> None:
        self._report = report
        self._part_with = part_with
        self._parting = False

    def __call__(self, part: str, client: Client | None, do: Callable[[], object], now_s: float) -> bool:
        """Run a part of the work.

        Args:
            part: Its name in the journal.
            client: The session that it serves; None for no particular one.
            do: The work.
            now_s: The time.

        Returns:
            Whether it succeeded; a failure has been reported.
        """
        try:
            do()
        except Exception as error:  # a bug must not end the leases of other clients
            why = f"{type(error).__name__}: {error}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = _NOBODY if client is None else client.name
            where = f"{Path(place.filename).name}:{place.lineno}"
            self._report.refusal("failed", name, now_s, client=name, part=part, reason=why, where=where)
        else:
            return True
        if client is not None and not self._parting:  # unless it is the session's end that fails
            self._parting = True
            try:
                end = partial(self._part_with, client, f"the agent failed at something of this client's: {why}", now_s)
                self(part, client, end, now_s)
            finally:
                self._parting = False
        return False


__all__ = ["SessionFaultIsolator"]
