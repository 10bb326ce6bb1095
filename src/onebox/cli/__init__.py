"""The commands ``onebox train``, ``plan``, ``memory``, ``run``, ``devices``, ``profile``, ``env`` and
``completion``; ``serve``, ``pair``, ``status`` and ``logs`` for pools of several machines; and ``watch`` for a page in
a browser.

An error is one message on standard error and an exit status: 2 for invalid input (a flag, a folder, a damaged file), 1
for a failure during the command, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from onebox.cli.exit_status import BROKEN_PIPE, FAILED, INTERRUPTED, OK, USAGE, Exit, Interrupted
from onebox.errors import CheckpointError, DataError, OneboxError, UsageError
from onebox.portable import LINUX, require_linux
from onebox.sizes import size_text
from onebox.stop_signals import RECENT, handling

__all__ = ["main"]

_FULL = (errno.ENOSPC, errno.EDQUOT)

_NO_FOLDER = "No usable temporary directory"
"""Python's error where temporary files cannot be written anywhere."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Arguments of the command line, without the program's name; those of this process when ``None``.

    Returns:
        The exit status.
    """
    try:
        with _interruptible(ends=arguments is None):
            status = _run(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
    except Exit as error:
        return _tell(error.status, error)
    except (UsageError, DataError, CheckpointError) as error:
        return _tell(USAGE, error)
    except OneboxError as error:
        return _tell(FAILED, error)
    except Interrupted as error:
        return _tell(error.status, error)
    except KeyboardInterrupt:
        return _tell(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        _forget_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL and _NO_FOLDER not in str(error):
            raise
        return _tell(FAILED, _explain_full(error))
    except SystemExit as error:  # from --help
        return int(error.code or OK)
    return status


def _run(arguments: Sequence[str]) -> int:
    """Find the command, run it, and return the exit status."""
    from onebox.cli.parser import parse

    config = parse(arguments)
    _expect_workers(config)
    with _importing():
        command = _command(config)
    return command(config) or OK


def _expect_workers(config: object) -> None:
    """Start the zygote of a command's CPU workers of this machine, which imports PyTorch while this process does.

    An invalid pool is reported later, by the command.
    """
    from onebox.cli.options.estimates import MemoryConfig  # of the command that opens no pool

    pool, threads = getattr(config, "pool", ""), getattr(config, "threads", None)
    if LINUX and pool.startswith("cpu") and not isinstance(config, MemoryConfig):
        from onebox.pool.discovery import requested_devices
        from onebox.pool.launch.zygotes import OWN, worker_environment

        with contextlib.suppress(UsageError):
            OWN.expect(worker_environment(requested_devices(pool, threads)[0].threads))


def _command(config: object) -> Callable[[Any], int | None]:
    """Return the function of a configuration's command, whose module is imported now."""
    from onebox.cli.parser import COMMANDS

    command, name = next((command, name) for command, (kind, name) in COMMANDS.items() if kind is type(config))
    if command == "serve":
        require_linux("'onebox serve' runs", "run it where the devices are; 'onebox pair' lets this machine use them")
    module = importlib.import_module(f"onebox.cli.commands.{command.split()[0]}")
    function: Callable[[Any], int | None] = getattr(module, name)
    return function


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Disable garbage collection during imports, where it takes a tenth of the time and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _interruptible(*, ends: bool) -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP end the command, and ignore repetitions while it closes down.

    Args:
        ends: Whether the process ends with the command; then repetitions are also ignored during Python's own shutdown.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if not RECENT.note():
            raise Interrupted(number)

    RECENT.forget()
    with handling(interrupt) as handled:
        try:
            yield
        finally:
            if ends and RECENT.any:
                handled.update(dict.fromkeys(handled, signal.SIG_IGN))


def _explain_full(error: OSError) -> str:
    """Return a message about a disk that is full."""
    what = error.filename if error.filename and error.errno in _FULL else "a file"
    temporary = os.environ.get("TMPDIR") or os.environ.get("TEMP") or "/tmp"  # gettempdir() would try to write
    folders = {"temporary files": temporary, "this folder": str(Path.cwd())}
    free = ", ".join(f"{size_text(shutil.disk_usage(path).free)} in {path} ({name})" for name, path in folders.items())
    return (
        f"the disk is full: {what} could not be written ({error.strerror}). Free there is {free}. Make room, or write "
        "elsewhere: TMPDIR names the folder of temporary files, ONEBOX_CONFIG that of the keys, XDG_CACHE_HOME that of "
        "measurements, --run that of a run"
    )


def _tell(status: int, message: object) -> int:
    """Print a message, with terminal escapes made visible, as it may quote another machine."""
    from onebox.wire.clean_text import clean_text  # with a library of messages, which most commands do without

    text = clean_text(str(message), lines=True)
    with contextlib.suppress(OSError):
        print(f"onebox: {text}", file=sys.stderr, flush=True)
    return status


def _forget_output() -> None:
    """Redirect standard output to nothing, so that Python's final flush does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
