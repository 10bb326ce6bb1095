"""Completion scripts: they name all commands and options, and real shells offer the right ones."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from onebox.cli.commands.completion import Shell, print_completion
from onebox.cli.options.pools import CompletionConfig
from onebox.cli.parser import OPTIONS, parse
from onebox.errors import UsageError

BASH = """
source ./script
COMP_WORDS=(onebox {words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
files=yes
compopt() {{ files=no; }}  # the builtin works while a person completes, alone
_onebox
[[ ${{#COMPREPLY[@]}} -gt 0 ]] && printf '%s\\n' "${{COMPREPLY[@]}}"
[[ ${{#COMPREPLY[@]}} == 0 && $files == yes ]] && compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"
true
"""

CASES = {
    "tr": "train",
    "tor": "torchrun",
    "pair ''": "accept connect list remove forget",
    "pair accept --pai": "--pairing-port",
    "train --optim": "--optimizer",
    "train --optimizer ad": "adamw adam",
    "train --pool cpu --model ''": "mlp cnn resnet gpt",
    "train --lr 1": "",
    "train --help": "--help --help-all",
    "plan --sho": "--show-memory",
    "plan --check pla": "plan.json",
    "train --plan au": "auto",
    "train --plan pla": "plan.json",
    "run tra": "train.py",
    "run --synchronous --pool cpu tra": "train.py",
    "run --pool cpu other.py tra": "train.py",
    "run --sy": "--synchronous",
    "completion ''": "bash zsh fish",
}


def script(shell: Shell, capsys: pytest.CaptureFixture[str]) -> str:
    print_completion(CompletionConfig(shell=shell))
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "plan.json").touch()
    return tmp_path


def offered(shell: Shell, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return what a shell offers in place of the last word, but for flags where this is empty."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (folder / "script").write_text(script(shell, capsys))
    if shell == "bash":
        command = ["bash", "--norc", "-c", BASH.format(words=words)]
    else:
        line = "onebox " + words.removesuffix("''")
        command = ["fish", "--no-config", "-c", f'source ./script; complete -C "{line}"']
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert not done.stderr, done.stderr
    found = {line.partition("\t")[0] for line in done.stdout.splitlines() if line}
    return {word for word in found if not word.startswith("-")} if words.endswith("''") else found


@pytest.mark.feature("Command line: Complete command lines")
@pytest.mark.parametrize("words", CASES)
def test_bash_offers_commands_options_values_and_files(
    words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered("bash", words, folder, capsys) == set(CASES[words].split())


@pytest.mark.parametrize("words", CASES)
def test_fish_offers_the_same(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offered("fish", words, folder, capsys) == set(CASES[words].split())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("train --optimizer ad", "--optimizer[*]:value:(adamw adam sgd muon)"),
        ("pair accept --pai", "--pairing-port[*]:value: "),
        ("run tra", "*::script:_files"),
        ("completion fi", "1:value:(bash zsh fish)"),
    ],
)
def test_zsh_is_told_the_options_of_the_command(
    words: str, wanted: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its own functions get, which work in a terminal alone."""
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    (folder / "_onebox").write_text(script("zsh", capsys))
    line = f"compdef() {{ }}; source ./_onebox; _arguments() {{ print -rl -- $@ }}; words=(onebox {words})"
    command = ["zsh", "-f", "-c", f"{line}; CURRENT=$#words; _onebox; print -r -- $CURRENT"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    *specs, current = done.stdout.splitlines()
    assert not done.stderr and int(current) == 2 + words.startswith("train")
    parts = wanted.split("[*]")
    assert [spec for spec in specs if spec.startswith(parts[0]) and spec.endswith(parts[-1])]


def test_scripts_of_all_shells_are_well_formed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        (folder / "script").write_text(script(shell, capsys))
        if shutil.which(shell) is not None:
            command = [shell, "-n", "script"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
            assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_a_script(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for name, options in OPTIONS.items():
        assert all(re.search(rf"\b{word}\b", text) for word in name.split())
        for field in dataclasses.fields(options):
            if field.name not in ("host", "client", "script", "shell", "target"):
                flag = f"--{field.name.replace('_', '-')}"
                assert (f" -l {flag[2:]} " if shell == "fish" else flag) in text


def test_the_shell_is_one_of_three() -> None:
    assert parse(["completion", "fish"]) == CompletionConfig(shell="fish")
    with pytest.raises(UsageError, match="'bash', 'zsh', 'fish'"):
        parse(["completion", "tcsh"])
    with pytest.raises(UsageError, match="onebox completion"):
        parse(["completion"])
