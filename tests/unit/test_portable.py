"""What a client uses of its operating system: nothing that Linux has and macOS or Windows has not.

In the source: no module that a client imports uses such a thing when it is imported, and no function does, but in the
modules of workers, agents, and what starts them. ``sys.platform`` is looked at in one module.
"""

from __future__ import annotations

import ast
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onebox.portable import END_SIGNALS, Wakeup, access_of_others, lock_file, open_to_read, read_at, usable_cores
from tests.other_system import SOURCE, SYSTEMS, absent, is_absent

LINUX = (
    "onebox.agent",
    "onebox.cluster.actor",
    "onebox.cli.commands.serve",
    "onebox.emulator",
    "onebox.feed.pipeline.fork_server",
    "onebox.feed.pipeline.ipc",
    "onebox.forking",
    "onebox.pool.backends.local",
    "onebox.pool.launch.cpu_affinity",
    "onebox.pool.launch.stderr_tail",
    "onebox.pool.launch.worker_process",
    "onebox.pool.launch.worker_user",
    "onebox.pool.launch.zygotes",
    "onebox.reaping",
    "onebox.worker",
)
"""Modules and packages whose functions run on Linux alone; clients may import those that import nothing of it."""

CHECKED = {
    "onebox.engine.state.partial_saves": {"/proc/"},  # another name where it is not there
    "onebox.feed.sources.formats.row_groups": {
        "os.WIFSIGNALED",
        "os.WTERMSIG",
        "resource",
        "resource.RLIMIT_CORE",
        "resource.setrlimit",
        "signal.SIGKILL",
    },
    "onebox.pool.launch.socket_folder": {"os.O_DIRECTORY", "os.O_NOFOLLOW", "os.geteuid"},  # not without UNIX_SOCKETS
    "onebox.pool.sharing.attached_pool": {"socket.AF_UNIX"},  # not called without UNIX_SOCKETS
    "onebox.pool.sharing.pool_server": {"socket.AF_UNIX"},
    "onebox.wire.receive_watch": {"ctypes.CDLL", "select.EPOLLIN", "select.EPOLLET", "socket.TCP_INFO"},
}
"""Uses that come behind a look at what the system has, in another function or in an earlier statement."""

GUARDS = {"LINUX", "UNIX_SOCKETS"}


@dataclass(frozen=True)
class Use:
    """A use of something that one of the systems has not."""

    what: str
    line: int
    at_import: bool


@dataclass
class Uses(ast.NodeVisitor):
    """Collects the uses in a module, but those under a condition that looks at the system."""

    found: list[Use] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    inside: int = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = alias.name
            if any(is_absent(alias.name, system) for system in SYSTEMS):
                self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if any(is_absent(module, system) for system in SYSTEMS):
            self._add(module, node)
            return
        for alias in node.names:
            self._look(module, alias.name, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in self.names:
            self._look(self.names[node.value.id], node.attr, node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        for folder in "/proc/", "/sys/":
            if isinstance(node.value, str) and node.value.startswith(folder):
                self._add(folder, node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if not _looks_at_system(node.test):
            self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        given = [*getattr(node, "decorator_list", ()), *node.args.defaults, *filter(None, node.args.kw_defaults)]
        for each in given:  # of the import; annotations are not evaluated
            self.visit(each)
        self.inside += 1
        for each in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(each)
        self.inside -= 1

    visit_Lambda = visit_FunctionDef

    def _look(self, module: str, name: str, node: ast.AST) -> None:
        unlike = any(name in absent(module, system) for system in SYSTEMS)
        if unlike or (module, name) == ("ctypes", "CDLL"):
            self._add(f"{module}.{name}", node)

    def _add(self, what: str, node: ast.AST) -> None:
        self.found.append(Use(what, getattr(node, "lineno", 0), not self.inside))


def _looks_at_system(test: ast.expr) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id in {*GUARDS, "hasattr"})
        or (isinstance(node, ast.Attribute) and node.attr == "platform")
        for node in ast.walk(test)
    )


def uses(tree: ast.AST) -> list[Use]:
    """Return the uses in a module."""
    visitor = Uses()
    visitor.visit(tree)
    return visitor.found


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports when it is imported, with the packages above; functions and types apart."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


@dataclass(frozen=True)
class Module:
    """A module of onebox: its uses, and the modules that it imports."""

    uses: list[Use]
    imports: set[str]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """All modules of onebox, by name."""
    paths = {
        ".".join(("onebox", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    found = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = Module(uses(tree), {*imports(tree), name.rpartition(".")[0]} & paths.keys())
    return found


def of_linux(name: str) -> bool:
    """Return whether a module runs on Linux alone."""
    return any(f"{name}.".startswith(f"{each}.") for each in LINUX)


def test_clients_import_nothing_that_one_of_the_systems_lacks(modules: dict[str, Module]) -> None:
    waiting = [name for name in modules if not of_linux(name)]
    # what onebox.worker gives at first use, of which clients take all but its processes
    waiting += ["onebox.worker.faults", "onebox.worker.optimizer.native", "onebox.worker.process.config"]
    reached: dict[str, str] = dict.fromkeys(waiting, "a client")
    for name in waiting:
        for other in modules[name].imports - reached.keys():
            reached[other] = name
            waiting.append(other)
    wrong = [
        f"{name}, line {use.line}: {use.what}; imported by {by}"
        for name, by in reached.items()
        for use in modules[name].uses
        if use.at_import and not use.what.startswith("/")
    ]
    assert not wrong


def test_functions_of_clients_use_nothing_that_one_of_the_systems_lacks(modules: dict[str, Module]) -> None:
    wrong = [
        f"{name}, line {use.line}: {use.what}"
        for name, module in modules.items()
        for use in module.uses
        if not of_linux(name) and use.what not in CHECKED.get(name, set())
    ]
    assert not wrong


def test_the_lists_hold_what_is_there(modules: dict[str, Module]) -> None:
    for name in LINUX:
        inside = [module for each, module in modules.items() if f"{each}.".startswith(f"{name}.")]
        assert any(module.uses or any(map(of_linux, module.imports)) for module in inside), name
    for name, whats in CHECKED.items():
        assert whats <= {use.what for use in modules[name].uses}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import fcntl", [("fcntl", True)]),
        ("from fcntl import flock", [("fcntl", True)]),
        ("import os\nbell = os.eventfd(0)", [("os.eventfd", True)]),
        ("import os\ndef ring():\n    os.eventfd(0)", [("os.eventfd", False)]),
        ("from os import sched_getaffinity", [("os.sched_getaffinity", True)]),
        ("import socket as sockets\nmake = lambda: sockets.AF_UNIX", [("socket.AF_UNIX", False)]),
        ("import signal\ndef end(number=signal.SIGKILL): ...", [("signal.SIGKILL", True)]),
        ("import select\nclass Loop:\n    poll = select.epoll()", [("select.epoll", True)]),
        ("import ctypes\nlibc = ctypes.CDLL(None)", [("ctypes.CDLL", True)]),
        ("from pathlib import Path\ndef boot():\n    return Path('/proc/stat')", [("/proc/", False)]),
        ("import os\nif hasattr(os, 'register_at_fork'):\n    os.register_at_fork()", []),
        ("import os, sys\nuser = 0 if sys.platform == 'win32' else os.geteuid()", []),
        ("import os, signal\nos.getpid(), signal.SIGINT", []),
    ],
)
def test_the_check_sees_uses(text: str, found: list[tuple[str, bool]]) -> None:
    assert [(use.what, use.at_import) for use in uses(ast.parse(text))] == found


# ---- the module itself


@pytest.fixture(params=["eventfd", "sockets"])
def wakeup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wakeup]:
    """One of each kind."""
    if request.param == "sockets":
        monkeypatch.delattr(os, "eventfd")
    made = Wakeup()
    yield made
    made.close()


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_wakeup_is_readable_from_when_it_is_set_until_it_is_cleared(wakeup: Wakeup) -> None:
    assert not _readable(wakeup.descriptor)
    wakeup.clear()
    for count in 1, 2, 10_000:  # more often than its sockets hold
        for _ in range(count):
            wakeup.set()
        assert _readable(wakeup.descriptor)
        wakeup.clear()
        assert not _readable(wakeup.descriptor)


def test_a_closed_wakeup_leaves_no_descriptor(wakeup: Wakeup) -> None:
    before = set(os.listdir("/proc/self/fd"))
    another = Wakeup()
    another.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_locked_file_is_locked_for_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        lock_file(first)
        with pytest.raises(BlockingIOError):
            lock_file(second)
        os.close(first)
        first = -1
        lock_file(second)
    finally:
        for each in first, second:
            if each >= 0:
                os.close(each)


def test_parts_of_files_are_read_at_their_places(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(100)))
    descriptor = open_to_read(tmp_path / "data")
    try:
        assert read_at(descriptor, 5, 90) == bytes(range(90, 95))
        assert read_at(descriptor, 50, 95) == bytes(range(95, 100))
        assert read_at(descriptor, 1, 100) == b""
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("mode", "readable", "writable"), [(0o600, False, False), (0o640, True, False), (0o620, True, True)]
)
def test_rights_of_others_are_those_of_the_mode(tmp_path: Path, mode: int, readable: bool, writable: bool) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    assert access_of_others(path.stat()) == (False, readable, writable)


def test_cores_and_signals_are_those_of_linux() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))
    assert [each.name for each in END_SIGNALS] == ["SIGINT", "SIGTERM", "SIGHUP"]
