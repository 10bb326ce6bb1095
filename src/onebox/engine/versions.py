"""Versions of weights, beside those that a worker's optimizer steps: buffers like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onebox.wire.messages import Delay


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The buffers of versions, the same numbers on every worker.

    Args:
        previous: Of trained parameters as they were before the newest update, by name; none where steps are exact.
        ahead: Of what they are expected to be after the next one; none where nothing is expected.
        delay: What is done about gradients that are late.
    """

    previous: Mapping[str, int] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    delay: Delay = "none"

    def of(self, name: str) -> dict[int, str]:
        """Return the buffers that a parameter has beside its own, and what each is called."""
        found = {self.previous[name]: f"previous.{name}"} if name in self.previous else {}
        return found | ({self.ahead[name]: f"ahead.{name}"} if name in self.ahead else {})
