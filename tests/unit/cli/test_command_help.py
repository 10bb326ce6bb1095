"""Help on a command: everyday options first, all of them on request, within 100 columns."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from onebox.cli.parser import OPTIONS, parse


def shown(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(line.split())
    assert not caught.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", ["", "pair", *OPTIONS])
def test_help_fits_100_columns(
    command: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = shown(f"{command} {flag}", capsys).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line.endswith("│") for line in lines if line.startswith("│"))


@pytest.mark.parametrize("command", OPTIONS)
def test_everyday_options_are_first_and_the_others_on_request(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = OPTIONS[command]
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options)]
    everyday = [f"--{name.replace('_', '-')}" for name in getattr(options, "EVERYDAY", ())] or flags
    said, full = (
        re.findall(r"^[│|]? {0,4}(--[a-z][\w-]+)", shown(f"{command} {flag}", capsys), re.M)
        for flag in ("-h", "--help-all")
    )
    assert said == [flag for flag in everyday if flag in full]
    assert full[: len(said)] == said
    hidden = {"--host", "--client", "--script", "--shell", "--target"}  # given without a flag
    assert set(full) == set(flags) - hidden


@pytest.mark.parametrize("command", OPTIONS)
def test_examples_are_valid_command_lines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(f"{command} --help", capsys)
    for example in getattr(OPTIONS[command], "EXAMPLES", ()):
        assert f"\n  {example}\n" in text
        program, *words = shlex.split(example.partition(" > ")[0])
        assert program == "onebox" and words[: len(command.split())] == command.split()
        if "--resume" not in words:  # which reads the run's folder
            assert isinstance(parse(words), OPTIONS[command])


def test_every_command_has_an_example() -> None:
    """But those that take nothing, or a name."""
    without = {command for command, kind in OPTIONS.items() if not getattr(kind, "EXAMPLES", ())}
    assert without == {"pair list", "pair remove", "pair forget", "env"}


def test_an_option_is_explained_in_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"[│\s]+", " ", shown("train --help-all", capsys))
    assert "A file and auto determine --micro-batch, --sync, --update and --shares. Without it" in text
    assert "onebox train --help-all shows" in shown("train --help", capsys)
