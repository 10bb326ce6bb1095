"""``onebox run``: an ordinary script, with the devices of a pool as ``cuda:0 …``, also in processes that it starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch

from onebox.cli.exit_status import FAILED, INTERRUPTED, OK, interruption
from onebox.cli.options.pools import RunConfig
from onebox.cli.output_files import check_target
from onebox.cli.tracebacks import without_own_frames
from onebox.errors import UsageError
from onebox.pool import Pool
from onebox.pool.devices import DeviceInfo
from onebox.pool.sharing import ADDRESS, UNSHARED, PoolServer
from onebox.portable import UNIX_SOCKETS
from onebox.stop_signals import RECENT, exit_status, handling
from onebox.vgpu import (
    EQUAL_SHARES,
    MEMORY_POLICY,
    PROFILE,
    SHARES,
    VERBOSE,
    current_context,
    open_devices,
    say,
    set_synchronous,
    tell_last,
    used_devices,
)
from onebox.vgpu.cuda_alias import alias_cuda

MODULE = "-m"
"""In place of a script: the next argument is the name of a module, as for Python itself."""


def run_script(config: RunConfig) -> int:
    """Open a pool and run a script on its devices, as ``python`` would.

    The pool is closed when the process ends, after the script's remaining threads and exit handlers.

    Returns:
        The exit status, as Python's: that of the script, 1 after an uncaught error, 130 after Ctrl-C. The traceback has
            been printed. 143 and 129 after SIGTERM and SIGHUP, which end the script by ``SystemExit``.

    Raises:
        UsageError: There is no such script or module.
        OneboxError: The pool cannot be opened; or an operator of the script whose result was never read has failed.
    """
    check_target("--profile", config.profile)
    with _arguments(config.script) as run:
        pool = open_devices(
            config.pool,
            threads=config.threads,
            memory=config.memory,
            plain_links=config.plain_links,
            recover=config.recovers,
            recover_memory=config.recover_memory,
            memory_policy=None if config.memory_policy == "auto" else config.memory_policy,
        )
        hosts = devices_by_host(pool.devices)
        if hosts.count(";"):
            print(f"onebox: {hosts}", file=sys.stderr, flush=True)
        alias_cuda()
        set_synchronous(config.synchronous)
        os.environ |= {name: value for name, value in _settings(config, pool).items() if value}
        tell = tell_last(current_context())
        server = _share(pool, synchronous=config.synchronous)
        finish = _show(pool, config) if config.page else None
        write_profile = _profile(config.profile, server)
        own = os.getpid()
        with _end_signals(pool, config.stop_within):
            status = _status_of(run)
            if os.getpid() != own:  # a forked process, which has nothing to wait for
                return status
            if status == OK and server is not None:
                status = _status_of(server.wait)  # a rank 0 may end before the others
        shown = FAILED
        try:
            if status == OK:
                for number in range(len(pool)):
                    torch.cuda.synchronize(number)
            shown = status
        finally:
            if finish is not None:
                finish(shown)
            write_profile()
        if status == OK:  # told when the pool is closed: exit handlers and other threads still use devices
            pool.closing[:0] = [lambda: _tell_unused(pool, server), tell]
        return status


def _settings(config: RunConfig, pool: Pool) -> dict[str, str]:
    """Return the environment variables that tell processes of the script what holds for it; empty ones do not."""
    return {
        MEMORY_POLICY: "" if config.memory_policy == "auto" else config.memory_policy,
        EQUAL_SHARES: "1" if config.equal_shares else "",
        SHARES: _shares(pool) if config.uneven else "",
        VERBOSE: "1" if config.verbose else "",
    }


def _profile(path: Path | None, server: PoolServer | None) -> Callable[[], None]:
    """Begin the timeline of a script, where there is to be one; return what writes it.

    A script that leaves the devices to processes that it starts, such as ranks, has none: each of them writes its own.
    """
    if path is None:
        return lambda: None
    os.environ[PROFILE] = os.path.abspath(path)
    events = current_context().record_events()

    def write() -> None:
        from onebox.cli.script_timelines import write_timeline

        if events.has_lines or server is None or not server.used:
            write_timeline(path, events)

    return write


def _shares(pool: Pool) -> str:
    """Measure the devices, print their shares, and return them as ranks read them."""
    speeds = [device.speeds.matmul_flops or device.speed for device in pool.profile().devices]
    parts = [f"rank {rank} {100 * speed / sum(speeds):.0f} %" for rank, speed in enumerate(speeds)]
    print(f"onebox: batches by the speed of the devices: {', '.join(parts)}", file=sys.stderr, flush=True)
    return ",".join(f"{speed / max(speeds):.4g}" for speed in speeds)


def _tell_unused(pool: Pool, server: PoolServer | None) -> None:
    """Print which devices of a pool no process of the script has used, if there are used ones as well.

    A script with a trainer is left out: its plan says which devices it takes.
    """
    used = used_devices(pool) | (set() if server is None else server.used)
    say("" if "onebox.engine.trainer" in sys.modules else unused_line(len(pool), used))


def unused_line(count: int, used: Collection[int]) -> str:
    """Return the line about devices that a script has not used; empty where it has used all of them, or none.

    Args:
        count: Number of devices.
        used: The numbers of those that have been used.

    Example:
        >>> unused_line(2, {0, 1}), unused_line(2, ())
        ('', '')
    """
    idle = [f"cuda:{number}" for number in range(count) if number not in used]
    if not idle or len(idle) == count:
        return ""
    used_count = count - len(idle)
    return (
        f"{used_count} of {count} devices {'was' if used_count == 1 else 'were'} used; {', '.join(idle)} had no work: "
        f"move some there with .to('{idle[0]}'), start a rank for each device with onebox torchrun, divide the "
        "training with onebox.Trainer, or open fewer devices with --pool"
    )


def _show(pool: Pool, config: RunConfig) -> Callable[[int], None]:
    """Show a pool on a page until it is closed, and print the address.

    Returns:
        A function that records the exit status of the script on the page.

    Raises:
        UsageError: The port is taken.
    """
    from onebox.report.page import serve_page
    from onebox.report.page.script_pool import ScriptPool

    name = config.script[config.script[0] == MODULE]  # without its arguments, which may be secret
    source = ScriptPool(name, pool, current_context().figures)
    page = serve_page(source, port=config.page_port)
    pool.closing.append(page.close)
    print(f"onebox: page at {page.url}", file=sys.stderr, flush=True)

    def finish(status: int) -> None:
        source.finish("ended" if status == OK else "failed", f"the script has ended with status {status}")

    return finish


def _share(pool: Pool, *, synchronous: bool) -> PoolServer | None:
    """Share a pool with the processes that the script starts, until it is closed; ``None`` where this system has no
    sockets for it, so that they get an error when they use a device."""
    server = PoolServer(pool, synchronous=synchronous) if UNIX_SOCKETS else None
    os.environ[ADDRESS] = UNSHARED if server is None else server.address

    def end() -> None:
        os.environ.pop(ADDRESS, None)
        if server is not None:
            server.close()

    pool.closing.append(end)
    return server


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
        name = _installed(name)
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


def _installed(name: str) -> str:
    """Return the path of a command that is a Python script, such as ``torchrun`` or ``accelerate``: one on the search
    path, or else one that is installed beside this one.

    Raises:
        UsageError: There is none of this name.
    """
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which(name, path=places) if Path(name).name == name else None
    if found is not None:
        with open(found, "rb") as file:
            if b"python" in file.readline(4096):
                return found
    raise UsageError(
        f"there is no script {name}; a path is needed, a command in Python, or -m and the name of a module"
    )


def devices_by_host(devices: Sequence[DeviceInfo]) -> str:
    """Return the devices of a pool by host, in the numbers that a script uses: those of one host come together."""
    hosts: dict[str, list[str]] = {}
    for device in devices:
        hosts.setdefault(device.host, []).append(f"cuda:{device.number}")
    return "; ".join(f"{', '.join(numbers)} on {host}" for host, numbers in hosts.items())


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
    except _Ended as end:
        print(f"onebox: {end}", file=sys.stderr)
        return end.status
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


class _Ended(SystemExit):
    """Ends a script after a signal, so that its devices are released."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_status(number))
        self.status = exit_status(number)
        self.number = number

    def __str__(self) -> str:
        return f"{interruption(self.number)}; its devices are released, and what the script had not saved is lost"


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


@contextlib.contextmanager
def _end_signals(pool: Pool, within_s: float) -> Iterator[None]:
    """Make SIGTERM and SIGHUP end a script.

    Args:
        pool: The pool, which is closed with the process; at the latest when the time has passed.
        within_s: Seconds after which a script that goes on nevertheless is ended with its process.
    """
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if not ended:
            RECENT.note()  # further ones must not interrupt the end
            ended.append(number)
            timer = threading.Timer(within_s, _end_process, (pool, number))
            timer.daemon = True
            timer.start()
            raise _Ended(number)

    with handling(end):
        yield


def _end_process(pool: Pool, number: int) -> None:
    try:
        say(f"{_Ended(number)}: it did not end by itself")
        pool.close()
    finally:
        os._exit(exit_status(number))
