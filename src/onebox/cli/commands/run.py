"""``onebox run``: an ordinary script, with the devices of a pool as ``cuda:0 …``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from onebox.cli.exit_status import FAILED, INTERRUPTED, OK
from onebox.cli.options.pools import RunConfig
from onebox.cli.tracebacks import without_own_frames
from onebox.errors import UsageError
from onebox.vgpu import open_devices, set_synchronous
from onebox.vgpu.cuda_alias import alias_cuda
from onebox.vgpu.runtime.context import device_count

MODULE = "-m"
"""In place of a script: the next argument is the name of a module, as for Python itself."""


def run_script(config: RunConfig) -> int:
    """Open a pool and run a script on its devices, as ``python`` would.

    The pool is closed when the process ends, after the script's remaining threads and exit handlers.

    Returns:
        The exit status, as Python's: that of the script, 1 after an uncaught error, 130 after Ctrl-C. The traceback has
            been printed.

    Raises:
        UsageError: There is no such script or module.
        OneboxError: The pool cannot be opened; or an operator of the script whose result was never read has failed.
    """
    with _arguments(config.script) as run:
        open_devices(config.pool, threads=config.threads, memory=config.memory, plain_links=config.plain_links)
        alias_cuda()
        set_synchronous(config.synchronous)
        status = _status_of(run)
        for number in range(device_count() if status == OK else 0):  # none in a forked process that reaches this, too
            torch.cuda.synchronize(number)
        return status


@contextlib.contextmanager
def _arguments(words: tuple[str, ...]) -> Iterator[Callable[[], object]]:
    """Set ``sys.argv`` and ``sys.path`` for a script; yield a function that runs it.

    Args:
        words: The script and its arguments, or ``-m``, a module and its arguments.

    Raises:
        UsageError: There is no such script or module.
    """
    module = words[0] == MODULE
    name, *arguments = words[1:] if module else words
    if not module and not Path(name).exists():
        raise UsageError(f"there is no script {name}; a path is needed, or -m and the name of a module")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:  # python -P: neither the folder of the script nor the current one
        sys.path[0] = str(Path.cwd()) if module else str(Path(name).resolve().parent)
    try:
        if module:
            _check_module(name)
            yield lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            yield lambda: runpy.run_path(os.path.abspath(name), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _check_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"there is no module {name}")


def _status_of(run: Callable[[], object]) -> int:
    """Run a script and return its exit status; an uncaught error is printed as by Python."""
    try:
        with _own_interrupts():
            run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or OK
        print(end.code, file=sys.stderr)
        return FAILED
    except BaseException as error:
        shown = without_own_frames(error)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return OK


@contextlib.contextmanager
def _own_interrupts() -> Iterator[None]:
    """Make Ctrl-C act in a script as in Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
