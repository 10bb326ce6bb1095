"""A client as macOS or Windows would run it, on Linux.

``python -m tests.other_system win32 SCRIPT ...``, or ``-m MODULE`` in place of the script. Modules of onebox, and no
others, see the other system: its ``sys.platform``, and of the standard library what it has by the stubs of typeshed,
which come with mypy. A module that is not there cannot be imported, an attribute that is not there raises
AttributeError. Beside that, and for all modules, ``os.fork`` and what makes descriptors of Linux alone are deleted.
What onebox opens in /proc or /sys is not there; it loads no C library, starts no process, and for Windows makes no Unix
socket. For Windows, ``msvcrt.locking`` is a lock of ``fcntl``, and a pair of sockets is one of TCP, as it is there.

Not emulated: paths with backslashes and drive letters, and files that cannot be replaced while they are open; the
speed and the limits of another kernel; and PyTorch, ZeroMQ and psutil, which are those of Linux.
"""

from __future__ import annotations

import ast
import builtins
import errno
import functools
import importlib
import os
import runpy
import socket
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mypy

SYSTEMS = ("darwin", "win32")

SOURCE = Path(__file__).resolve().parents[1] / "src" / "onebox"

_STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"

_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep

_LINUX_ALONE = (
    *("eventfd", "eventfd_read", "eventfd_write", "memfd_create", "pidfd_open", "fork", "forkpty"),
    *("sched_setaffinity", "sched_setscheduler", "unshare", "setns"),
)
"""What is deleted of ``os`` for all modules: others have no use for it, or look first."""

_IMPORTED = (
    *("torch", "torch._dynamo", "torch.export", "torch.distributed", "torch._functorch.aot_autograd", "numpy", "zmq"),
    *("zmq.utils.monitor", "msgspec", "psutil", "rich.progress", "rich.live", "safetensors.torch", "tyro", "asyncio"),
    *("concurrent.futures", "multiprocessing", "subprocess", "tempfile", "ssl", "getpass", "lzma", "bz2", "gzip"),
)
"""Imported before anything is taken away."""


# ---- what a system has, by typeshed


class _Names(NamedTuple):
    """The names of a module: those that its stub defines, and those that it imports."""

    defined: frozenset[str]
    imported: frozenset[str]


@functools.cache
def _names_of(module: str, platform: str) -> _Names:
    """Return the names that a module of the standard library has on a system; none where it has no such module."""
    path = _STUBS.joinpath(*module.split("."))
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    if not path.exists():
        return _Names(frozenset(), frozenset())
    defined, imported = set[str](), set[str]()
    waiting = [ast.parse(path.read_text(encoding="utf-8")).body]
    seen = types.SimpleNamespace(platform=platform, version_info=sys.version_info)
    while waiting:
        for statement in waiting.pop():
            match statement:
                case ast.If():
                    applies = eval(compile(ast.Expression(statement.test), module, "eval"), {"sys": seen})
                    waiting.append(statement.body if applies else statement.orelse)
                case ast.FunctionDef() | ast.ClassDef():
                    defined.add(statement.name)
                case ast.AnnAssign(target=ast.Name() as target):
                    defined.add(target.id)
                case ast.Assign():
                    defined |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
                case ast.ImportFrom(names=[ast.alias(name="*")], module=str() as origin):
                    imported |= set().union(*_names_of(origin, platform))
                case ast.ImportFrom() | ast.Import():
                    imported |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
                case _:
                    pass
    return _Names(frozenset(defined), frozenset(imported))


@functools.cache
def absent(module: str, platform: str) -> frozenset[str]:
    """Return the names of a module that Linux has and another system has not."""
    here, there = _names_of(module, "linux"), _names_of(module, platform)
    return (here.defined | here.imported) - (there.defined | there.imported)


def is_absent(module: str, platform: str) -> bool:
    """Return whether Linux has a module and another system has not."""
    return bool(_names_of(module, "linux").defined) and not _names_of(module, platform).defined


# ---- the other system


class _View:
    """A module of the standard library as another system has it.

    Args:
        real: The module.
        platform: The system.
        other: Attributes that it has in another way.
    """

    def __init__(self, real: types.ModuleType, platform: str, other: Mapping[str, object]) -> None:
        object.__setattr__(self, "_seen", (real, platform, other))

    def __getattr__(self, name: str) -> Any:
        real, platform, other = object.__getattribute__(self, "_seen")
        if name in other:
            return other[name]
        if name in absent(real.__name__, platform):
            raise AttributeError(f"module {real.__name__!r} has no attribute {name!r} on {platform}")
        return getattr(real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_seen")[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_seen")[0], name)


def _msvcrt() -> types.ModuleType:
    """Return a module with what onebox uses of Windows' ``msvcrt``."""
    import fcntl

    made = types.ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert mode == 2 and count == 1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    vars(made).update(locking=locking, LK_NBLCK=2)
    return made


def _pair(*_: int) -> tuple[socket.socket, socket.socket]:
    """Return connected sockets of TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Open a file as Windows would: no folder."""
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    return os.open(path, flags, mode, dir_fd=dir_fd)


_OWN: dict[str, dict[str, dict[str, object]]] = {
    "darwin": {"sys": {"platform": "darwin"}},
    "win32": {
        "sys": {"platform": "win32"},
        "os": {"name": "nt", "O_BINARY": 0, "open": _open},
        "socket": {"socketpair": _pair},
    },
}
"""What another system has in another way, by module."""


def install(platform: str) -> None:
    """Take away, for the rest of this process, what another system has not; before onebox is imported."""
    assert not any(name.partition(".")[0] == "onebox" for name in sys.modules), "onebox has been imported"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # it would import onebox
    for name in _IMPORTED:
        importlib.import_module(name)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    views: dict[str, Any] = {"msvcrt": _msvcrt()} if platform == "win32" else {}
    real_import = builtins.__import__

    def see(module: types.ModuleType) -> Any:
        name = module.__name__
        other = _OWN[platform].get(name, {})
        if not other and not absent(name, platform):
            return module
        if name not in views:
            views[name] = _View(module, platform, other)
        return views[name]

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if importer.partition(".")[0] != "onebox":
            return real_import(name, globals, locals, fromlist or (), level)
        if name in views:
            return views[name]
        if is_absent(name, platform):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return see(real_import(name, globals, locals, fromlist or (), level))

    for name in _LINUX_ALONE:
        if hasattr(os, name):
            delattr(os, name)
    builtins.__import__ = import_
    sys.addaudithook(functools.partial(_refuse, platform))


def _refuse(platform: str, event: str, arguments: tuple[object, ...]) -> None:
    """Refuse what onebox does and another system could not."""
    if event in ("open", "os.listdir", "os.scandir"):
        path = arguments[0]
        if isinstance(path, str) and path.startswith(("/proc", "/sys/")) and _ours():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "ctypes.dlopen") and _ours():
        raise OSError(errno.ENOSYS, f"{event} of a client on {platform}: {arguments!r:.200}")
    elif event == "socket.__new__" and platform == "win32" and arguments[1] == socket.AF_UNIX and _ours():
        raise OSError(errno.EAFNOSUPPORT, "no Unix sockets")


def _ours() -> bool:
    """Return whether the innermost code that is not of Python's own library is onebox's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_LIBRARY, "<frozen")) and not name.startswith(_PACKAGES)) and name != __file__:
            return name.startswith(str(SOURCE))
        frame = frame.f_back  # type: ignore[assignment]
    return False


def main(platform: str, name: str, *arguments: str) -> None:
    """Run a script or a module on the other system."""
    install(platform)
    if name == "-m":
        name, *arguments = arguments  # type: ignore[assignment]
    sys.argv = [name, *arguments]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
