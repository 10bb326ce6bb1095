"""Exit statuses, and the exception whose message replaces a traceback."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as in a shell
BROKEN_PIPE = 141  # 128 + SIGPIPE, likewise


class Exit(Exception):
    """Ends a command with a message.

    Args:
        status: Exit status.
        message: The error and its remedy.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
