"""``onebox completion``: the script that completes command lines in a shell, made from the commands' options.

A script is static: completing starts no process.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from onebox.cli.command_help import HELP, HELP_ALL, documentation
from onebox.cli.options.common import BUILT_IN_MODELS, DataSpec, Folder, Model, PlanFile, PoolSpec
from onebox.cli.options.pools import CompletionConfig
from onebox.cli.parser import OPTIONS

Shell = Literal["bash", "zsh", "fish"]

Takes = Literal["nothing", "value", "file", "folder"]

_ALIASES: tuple[tuple[Any, tuple[Takes, tuple[str, ...]]], ...] = (
    (Model, ("value", BUILT_IN_MODELS)),
    (PlanFile, ("file", ("auto", "data-parallel"))),
    (PoolSpec, ("file", ("auto",))),
    (DataSpec, ("file", ("digits",))),
    (Folder, ("folder", ())),
)
"""Types of options whose values are not known from the type alone."""

_PROGRAM = "onebox"
_LONGEST_HELP = 70


@dataclass(frozen=True, kw_only=True)
class CompletedOption:
    """An option of a command.

    Args:
        flag: Its flag.
        help: Its explanation in a few words.
        takes: The kind of its value.
        words: Values to choose from, besides files if it takes these.
    """

    flag: str
    help: str
    takes: Takes = "value"
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompletedCommand:
    """A command of one word or two.

    Args:
        name: Its words.
        help: Its explanation in a few words.
        options: Its options.
        script: Whether a script and its own arguments follow the options.
        words: What may follow instead of options.
    """

    name: str
    help: str
    options: tuple[CompletedOption, ...]
    script: bool = False
    words: tuple[str, ...] = ()


def print_completion(config: CompletionConfig) -> None:
    """Print the script for a shell."""
    commands = [completed_command(name, kind, script=name == "run") for name, kind in OPTIONS.items()]
    commands.append(completed_command("torchrun", OPTIONS["run"], script=True))
    print(completion_script(config.shell, commands), end="")


def completed_command(name: str, kind: type[Any], *, script: bool = False) -> CompletedCommand:
    """Return the command that a class of options is of.

    Args:
        name: Its words.
        kind: The class of its options.
        script: Whether a script and its own arguments follow the options.
    """
    told = dict(re.findall(r"^ {4}(\w+): (.*)$", documentation(kind), re.MULTILINE))
    options: list[CompletedOption] = []
    words: tuple[str, ...] = ()
    hints = get_type_hints(kind, include_extras=True)
    for name_of_field in (field.name for field in dataclasses.fields(kind)):
        markers = getattr(hints[name_of_field], "__metadata__", ())
        if tyro.conf.Suppress in markers:
            continue
        takes, choices = _values(hints[name_of_field])
        if tyro.conf.Positional in markers:
            words = choices
            continue
        flag, text = f"--{name_of_field.replace('_', '-')}", _few_words(told.get(name_of_field, ""))
        options.append(CompletedOption(flag=flag, help=text, takes=takes, words=choices))
    options += [
        CompletedOption(flag=HELP[0], help="Show the usual options.", takes="nothing"),
        CompletedOption(flag=HELP_ALL, help="Show all options.", takes="nothing"),
    ]
    summary = _few_words((kind.__doc__ or "").partition("\n\n")[0])
    return CompletedCommand(name=name, help=summary, options=tuple(options), script=script, words=words)


def completion_script(shell: Shell, commands: Iterable[CompletedCommand]) -> str:
    """Return the script that completes command lines in a shell.

    Args:
        shell: The shell.
        commands: All commands.
    """
    found = {command.name: command for command in commands}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](found)


def _values(hint: Any) -> tuple[Takes, tuple[str, ...]]:
    """Return the kind of an option's values, and those to choose from."""
    for alias, found in _ALIASES:
        if hint == alias:
            return found
    base = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    alternatives = get_args(base) if get_origin(base) in (Union, types.UnionType) else (base,)
    if bool in alternatives:
        return "nothing", ()
    if Path in alternatives:
        return "file", ()
    literals = [each for each in alternatives if get_origin(each) is Literal]
    return "value", tuple(str(word) for each in literals for word in get_args(each))


def _few_words(text: str) -> str:
    """Return the beginning of an explanation, up to the end of its first sentence, without what shells interpret."""
    plain = re.sub(r"[`\"\[\]\\$]", "", " ".join(text.split())).replace("'", "’")
    sentence = re.split(r"(?<=\w)[.;:](?:\s|$)", plain, maxsplit=1)[0]
    return sentence if len(sentence) <= _LONGEST_HELP else sentence[:_LONGEST_HELP].rsplit(" ", 1)[0].rstrip(",") + " …"


def _first_words(commands: Mapping[str, CompletedCommand]) -> dict[str, str]:
    """Return the first words of all commands with their explanation: of a group of commands, their names."""
    seconds = _second_words(commands)
    return {
        first: ", ".join(seconds[first]) if first in seconds else command.help
        for first, command in ((name.partition(" ")[0], command) for name, command in commands.items())
    }


def _second_words(commands: Mapping[str, CompletedCommand]) -> dict[str, dict[str, str]]:
    """Return for each first word of commands of two words the second ones with their explanation."""
    found: dict[str, dict[str, str]] = {}
    for name, command in commands.items():
        first, _, second = name.partition(" ")
        if second:
            found.setdefault(first, {})[second] = command.help
    return found


# ---- bash


def _bash(commands: Mapping[str, CompletedCommand]) -> str:
    seconds = _second_words(commands)
    first = " ".join([*_first_words(commands), "--help", "--help-all", "--version"])
    lines = [
        f"# bash completion of {_PROGRAM}",
        f"_{_PROGRAM}() {{",
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}",
        "    local command=${COMP_WORDS[1]} next=2 words=",
        f'    case $command in {"|".join(seconds)}) command="$command ${{COMP_WORDS[2]}}" next=3 ;; esac',
        "    COMPREPLY=()  # where it stays empty, bash completes names of files",
        "    if ((COMP_CWORD == 1)); then",
        f"        words='{first}'",
        "    elif ((COMP_CWORD < next)); then",
        "        case ${COMP_WORDS[1]} in",
        *(f"            {word}) words='{' '.join([*own, '--help'])}' ;;" for word, own in seconds.items()),
        "        esac",
        "    else",
        "        case $command in",
    ]
    for command in commands.values():
        options = (f"                {line}" for line in _bash_options(command))
        lines += [f"            '{command.name}')", *options, "                ;;"]
    lines += [
        "        esac",
        "    fi",
        '    COMPREPLY+=($(compgen -W "$words" -- "$current"))',
        "    [[ ${#COMPREPLY[@]} -gt 0 ]] || compopt +o default",
        "}",
        f"complete -o default -F _{_PROGRAM} {_PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def _bash_options(command: CompletedCommand) -> Iterator[str]:
    """Yield the lines that complete what follows a command."""
    bare = [option.flag for option in command.options if option.takes == "nothing"]
    if command.script:
        yield "while ((next < COMP_CWORD)); do"
        yield "    case ${COMP_WORDS[next]} in"
        yield f"        {'|'.join(bare)}) ((next += 1)) ;;"
        yield "        -m|[!-]*) return ;;  # the script, which has arguments of its own"
        yield "        *) ((next += 2)) ;;"
        yield "    esac"
        yield "done"
    yield "case $previous in"
    for option in command.options:
        if option.words:
            files = '; COMPREPLY=($(compgen -f -- "$current"))' if option.takes == "file" else ""
            yield f"    {option.flag}) words='{' '.join(option.words)}'{files} ;;"
    taken = {takes: [o.flag for o in command.options if o.takes == takes and not o.words] for takes in get_args(Takes)}
    if taken["file"] or taken["folder"]:
        yield f"    {' | '.join([*taken['file'], *taken['folder']])}) return ;;"
    if taken["value"]:
        yield f"    {' | '.join(taken['value'])}) ;;"
    flags = " ".join([*command.words, *(option.flag for option in command.options)])
    if command.script:
        yield "    *) [[ $current == -* ]] || return"
        yield f"       words='{flags}' ;;"
    else:
        yield f"    *) words='{flags}' ;;"
    yield "esac"


# ---- zsh


def _zsh(commands: Mapping[str, CompletedCommand]) -> str:
    lines = [
        f"#compdef {_PROGRAM}",
        f"_{_PROGRAM}() {{",
        "    local command=$words[2]",
        "    local -a found",
        "    if (( CURRENT == 2 )); then",
        f"        found=({_zsh_described(_first_words(commands))})",
        "        _describe command found",
        "        return",
        "    fi",
        "    shift words; (( CURRENT-- ))",
    ]
    for first, own in _second_words(commands).items():
        lines += [
            f"    if [[ $command == {first} ]]; then",
            "        if (( CURRENT == 2 )); then",
            f"            found=({_zsh_described(own)})",
            "            _describe command found",
            "            return",
            "        fi",
            '        command="$command $words[2]"',
            "        shift words; (( CURRENT-- ))",
            "    fi",
        ]
    lines.append("    case $command in")
    for command in commands.values():
        specs = [_zsh_option(option) for option in command.options]
        specs += ["'*::script:_files'"] if command.script else []
        specs += [f"'1:value:({' '.join(command.words)})'"] if command.words else []
        lines += [f"        '{command.name}')", "            _arguments \\"]
        lines += [
            *(f"                {spec} \\" for spec in specs[:-1]),
            f"                {specs[-1]}",
            "            ;;",
        ]
    lines += [
        "    esac",
        "}",
        f'if [[ $funcstack[1] == _{_PROGRAM} ]]; then _{_PROGRAM} "$@"; else compdef _{_PROGRAM} {_PROGRAM}; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_described(words: Mapping[str, str]) -> str:
    return " ".join(f"'{word}:{text.replace(':', ' ')}'" for word, text in words.items())


def _zsh_option(option: CompletedOption) -> str:
    action = {"nothing": "", "value": ":value: ", "file": ":file:_files", "folder": ":folder:_files -/"}[option.takes]
    if option.words and option.takes == "file":
        action = f':value:_alternative "files:file:_files" "words:word:({" ".join(option.words)})"'
    elif option.words:
        action = f":value:({' '.join(option.words)})"
    return f"'{option.flag}[{option.help.replace(':', ' ')}]{action}'"


# ---- fish


def _fish(commands: Mapping[str, CompletedCommand]) -> str:
    here = f"__{_PROGRAM}_command"
    lines = [
        f"# fish completion of {_PROGRAM}",
        f"function {here}",
        "    set -l words (commandline -opc)",
        "    set -l last (math 1 + (count $argv))",
        '    test "$words[2..$last]" = "$argv"',
        "end",
        f"complete -c {_PROGRAM} -f",
    ]
    for word, text in _first_words(commands).items():
        lines.append(f"complete -c {_PROGRAM} -n 'test (count (commandline -opc)) = 1' -a {word} -d '{text}'")
    for first, own in _second_words(commands).items():
        lines += [
            f"complete -c {_PROGRAM} -n '{here} {first}; and test (count (commandline -opc)) = 2' -a {word} -d '{text}'"
            for word, text in own.items()
        ]
    for command in commands.values():
        start = f"complete -c {_PROGRAM} -n '{here} {command.name}'"
        if command.script:
            lines.append(f"{start} -F")
        if command.words:
            lines.append(f"{start} -a '{' '.join(command.words)}'")
        for option in command.options:
            how = {"nothing": "", "value": " -x", "file": " -r -F", "folder": " -r -F"}[option.takes]
            words = f" -a '{' '.join(option.words)}'" if option.words else ""
            lines.append(f"{start} -l {option.flag[2:]}{how}{words} -d '{option.help}'")
    return "\n".join(lines) + "\n"
