"""The object of the virtual device: found in the package, found in the user's cache, or compiled into it.

A process of another user or a broken compiler must not harm: the cache is the user's own, an object gets its name when
it is complete, and whoever finds another process compiling waits for it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from onebox.cost.cache import cache_folder, keep_private
from onebox.errors import PoolError
from onebox.portable import lock_file

NAME = "_native"
SOURCES = ("device.cpp", "module.cpp", "queue.cpp", "recorder.cpp", "sparse.cpp")
HEADERS = ("queue.h", "recorder.h")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")

WITHIN_S = 900.0
"""How long the compiler may take, and how long another process is waited for that runs it."""

_LOOK_S = 0.1
_SAID = 2_000
"""Most characters of a compiler's words in an error."""


def load() -> ModuleType:
    """Return the module, which is compiled at its first use on this machine.

    Raises:
        PoolError: There is no object for this PyTorch, and none can be made.
    """
    if NAME in _loaded:
        return _loaded[NAME]
    path = packaged()
    if not path.exists():
        path = compiled()
    spec = importlib.util.spec_from_file_location(f"{__package__}.{NAME}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _loaded.setdefault(NAME, module)


_loaded: dict[str, ModuleType] = {}


def packaged() -> Path:
    """Return where a wheel has the object for this minor version of PyTorch."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return _here() / "built" / f"torch-{minor}{_suffix()}"


def compiled() -> Path:
    """Return the object in the user's cache, and compile it where it is not there.

    Raises:
        PoolError: It cannot be made: there is no compiler, the compiler fails, or the folder cannot be written to.
    """
    try:
        folder = cache_folder("device")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(folder)
        compiler = shutil.which(os.environ.get("CXX") or "g++")
        if compiler is None:
            return _made_before(folder)
        path = folder / f"{_key()}-{_digest(os.path.realpath(compiler), os.stat(compiler).st_mtime_ns)}{_suffix()}"
        if not path.exists():
            with _alone(folder / f"{path.name}.lock"):
                if not path.exists():
                    _compile(compiler, path)
        return path
    except (OSError, RuntimeError) as error:  # the second where the user has no home
        raise PoolError(
            f"the virtual device cannot be built, as its folder cannot be used: {error}; XDG_CACHE_HOME names another"
        ) from None


def _made_before(folder: Path) -> Path:
    """Return an object that a compiler made that is gone by now.

    Raises:
        PoolError: There is none.
    """
    for path in sorted(folder.glob(f"{_key()}-*{_suffix()}")):
        return path
    raise PoolError(
        f"virtual devices need a C++ compiler once, and there is no {os.environ.get('CXX') or 'g++'}: install it, such "
        "as by apt install g++, or name another by CXX; a Trainer, agents and workers need none"
    )


def _here() -> Path:
    return Path(__file__).parent


def _suffix() -> str:
    """The end of the names of extension modules of this interpreter."""
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def _key() -> str:
    """Return the first part of an object's name: another one for other sources, another PyTorch or interpreter."""
    sources = [(_here() / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    return _digest(*sources, torch.__version__, torch.compiled_with_cxx11_abi(), sys.version, FLAGS)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock among processes; wait for whoever has it.

    Raises:
        PoolError: It is held for longer than a compilation may take.
    """
    with path.open("ab") as file:
        end_s = time.monotonic() + 2 * WITHIN_S
        while True:
            try:
                lock_file(file.fileno())
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise PoolError(f"another process builds the virtual device and does not end: see {path}") from None
                time.sleep(_LOOK_S)
        yield


def _compile(compiler: str, path: Path) -> None:
    """Compile the sources, all at a time, and put the object in its place.

    Raises:
        PoolError: The compiler fails, or takes too long.
    """
    about = f"the virtual device for PyTorch {torch.__version__}"
    print(f"onebox: building {about}, once; this takes about a minute", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        made = Path(name)
        include = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        flags += [part for folder in include for part in ("-isystem", folder)]
        objects = {one: str(made / f"{one}.o") for one in SOURCES}
        commands = [[compiler, *flags, "-c", str(_here() / one), "-o", part] for one, part in objects.items()]
        _run(commands, about)
        libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()] + [f"-l{one}" for one in LIBRARIES]
        _run([[compiler, "-shared", "-o", str(made / path.name), *objects.values(), *libraries]], about)
        os.replace(made / path.name, path)


def _run(commands: Sequence[Sequence[str]], about: str) -> None:
    """Run commands of a compiler at a time; end all of them when one fails.

    Raises:
        PoolError: One fails, or takes too long.
    """
    end_s = time.monotonic() + WITHIN_S
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        running = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words) for command in commands
        ]
        try:
            failed = any(process.wait(max(0.0, end_s - time.monotonic())) for process in running)
        except subprocess.TimeoutExpired:
            raise PoolError(f"{commands[0][0]} has not built {about} within {WITHIN_S:.0f} s") from None
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if failed:
            words.seek(0)
            raise PoolError(f"{commands[0][0]} could not build {about}; it said:\n{words.read(_SAID).strip()}")
