"""Exit statuses, and the one message that stands in for a traceback."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
BROKEN_PIPE = 141  # 128 + SIGPIPE, likewise


class Exit(Exception):
    """Ends a command with a message for a person.

    Args:
        status: Exit status.
        message: What happened and what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
