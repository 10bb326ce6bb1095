"""Exit statuses and messages of the commands, where no worker is started."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from onebox import cli
from onebox.cli import main
from onebox.cli.exit_status import Exit
from onebox.errors import CaptureError, CheckpointError, DataError, PoolError, UsageError, WorkerDied


def failing(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command that says something on standard error alone, and return its exit status and that."""
    status = main(line.split())
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("onebox: ") and said.err.count("\n") == 1, said.err
    return status, said.err


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("train --colour red", "--colour"),
        ("train --model vgg", "vgg"),
        ("train --batch 0", "--batch 0"),
        ("train --data imagenet", "imagenet"),
        ("train --data mnist", "mnist:FOLDER"),
        ("train --data mnist:nowhere", "nowhere is not a folder"),
        ("train --data cifar10:.", "cifar10-train.tar is missing"),
        ("train --resume nowhere", "nowhere"),
        ("train --pool gpu", "'gpu' (perhaps 'cuda'?)"),
        ("devices --pool cpu:2", "'cpu:2' (perhaps 'cpu*2'?)"),
        ("trian", "'trian' (perhaps train?)"),
        ("train --pool cuda:99", "cuda:99"),
        ("devices --pool cpu*0", "cpu*0"),
    ],
)
def test_what_was_asked_for_is_wrong(line: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = failing(line, capsys)
    assert status == 2
    assert part in text


def test_nothing_is_left_of_a_run_that_did_not_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing("train --pool gpu --run there", capsys)
    assert not (tmp_path / "there").exists()


def test_a_run_folder_that_is_in_use_or_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert failing("train --run full", capsys)[0] == 2
    status, text = failing("train --run full/file/below", capsys)
    assert status == 2 and "cannot be made" in text
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_a_damaged_data_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(b"\x00\x00\x08\x03")
    status, text = failing("train --data mnist:.", capsys)
    assert status == 2 and "t10k-images-idx3-ubyte is damaged" in text


@pytest.mark.feature("Errors: Tell errors apart by class and exit status")
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("said"), 2),
        (DataError("said"), 2),
        (CheckpointError("said"), 2),
        (CaptureError("said"), 1),
        (PoolError("said"), 1),
        (WorkerDied("said"), 1),
        (Exit(1, "said"), 1),
        (Exit(130, "said"), 130),
    ],
    ids=repr,
)
def test_every_error_has_its_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_arguments: Sequence[str]) -> NoReturn:
        raise error

    monkeypatch.setattr(cli, "_run", run)
    assert main([]) == status
    assert capsys.readouterr().err == "onebox: said\n"


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_arguments: Sequence[str]) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", run)
    with pytest.raises(ZeroDivisionError):
        main([])


def test_an_interrupt_is_one_line_and_a_second_one_does_not_disturb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def run(_arguments: Sequence[str]) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(cli, "_run", run)
    assert main([]) == 130
    assert closed
    assert capsys.readouterr().err == "onebox: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_help_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    assert "--save-every" in capsys.readouterr().out


@pytest.mark.feature("Command line: Show the environment")
def test_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("versions", "torch", "devices", "cpu:", "missing"))


@pytest.mark.feature("Command line: Show the environment")
def test_the_environment_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "devices", "instruction sets", "workers", "missing"}
    assert {"ATen", "oneDNN", "MKL", "processor", "limited by"} == set(found["instruction sets"])
    assert {"onebox", "python", "torch", "pyzmq"} <= set(found["versions"])
    assert {"Landlock", "files", "system calls", "capabilities"} <= set(found["workers"])
    off = [part for part, what in found["workers"].items() if what.startswith("off: ")]
    assert all(any(line.startswith(f"workers, {part}: ") for line in found["missing"]) for part in off)


@pytest.mark.parametrize(("line", "part"), [("--version", "onebox 0.1.0"), ("--help", "\n  serve "), ("-h", "status")])
def test_what_there_is(line: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([line]) == 0
    assert part in capsys.readouterr().out
