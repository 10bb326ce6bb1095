"""How ``onebox run`` runs a script: arguments and exit statuses; without devices."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.cli.commands.run import _arguments, _status_of, _tell_unused
from onebox.errors import UsageError


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SystemExit(7), 7, ""),
        (SystemExit(), 0, ""),
        (SystemExit(True), 1, ""),
        (SystemExit("enough"), 1, "enough\n"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt\n"),
        (ValueError("wrong"), 1, "ValueError: wrong\n"),
        (UsageError("also wrong"), 1, "onebox.errors.UsageError: also wrong\n"),
    ],
    ids=repr,
)
def test_a_script_ends_as_under_python(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status_of(raising(error)) == status
    printed = capsys.readouterr().err
    assert printed.endswith(said) and bool(printed) == bool(said)
    assert "onebox/cli" not in printed


def test_a_script_that_ends_by_itself_is_fine() -> None:
    assert _status_of(lambda: 3) == 0


def test_a_hook_of_the_script_sees_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    error = ValueError("wrong")
    assert _status_of(raising(error)) == 1
    assert seen == [error]


@pytest.mark.parametrize("closed", [False, True])
def test_devices_without_work_are_named_where_stderr_is_open(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "onebox.engine.trainer", raising=False)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    if closed:
        stderr.close()
    pool: Any = range(2)
    server: Any = SimpleNamespace(used={0})
    _tell_unused(pool, server)
    assert closed or "cuda:1 had no work" in stderr.getvalue()


def test_ctrl_c_is_pythons_own_while_a_script_runs() -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers = []
    assert _status_of(lambda: handlers.append(signal.getsignal(signal.SIGINT))) == 0
    assert handlers == [signal.default_int_handler]
    assert signal.getsignal(signal.SIGINT) is before


def test_arguments_and_folders_are_the_scripts_and_then_as_before(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, beside\nbeside.seen += [__name__, __file__, sys.argv[1:]]\n")
    (tmp_path / "beside.py").write_text("seen = []\n")
    argv, path = list(sys.argv), list(sys.path)
    try:
        with _arguments((str(tmp_path / "script.py"), "--lr", "-m")) as run:
            assert sys.path == [str(tmp_path), *path[1:]]
            run()
            import beside  # type: ignore[import-not-found]
    finally:
        sys.modules.pop("beside", None)
    assert beside.seen == ["__main__", str(tmp_path / "script.py"), ["--lr", "-m"]]
    assert (sys.argv, sys.path) == (argv, path)


def test_modules_are_looked_for_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__main__.py").write_text("import sys\nsys.exit(len(sys.argv))\n")
    with _arguments(("-m", "part", "a", "b")) as run:
        assert _status_of(run) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.py",), "there is no script missing.py; a path is needed, a command in Python, or -m and"),
        (("-m", "missing"), "there is no module missing"),
        (("-m", "missing.inner"), "there is no module missing.inner"),
        (("-m", "..odd"), r"there is no module \.\.odd"),
    ],
)
def test_what_is_not_there_is_said_before_a_pool_is_opened(words: tuple[str, ...], said: str) -> None:
    argv, path = list(sys.argv), list(sys.path)
    with pytest.raises(UsageError, match=said), _arguments(words):
        raise AssertionError("it went on")
    assert (sys.argv, sys.path) == (argv, path)
