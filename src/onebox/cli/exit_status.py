"""Exit statuses, and the exceptions whose message replaces a traceback."""

from __future__ import annotations

import signal

from onebox.stop_signals import exit_status

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


class Interrupted(KeyboardInterrupt):
    """Ends a command after a signal.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(interruption(number))
        self.number = number
        self.status = exit_status(number)


def interruption(number: int) -> str:
    """Return what a signal has done to a command, for a message."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
