"""Parsing of a command line into a command's options, with errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from onebox import __version__
from onebox.cli.command_help import HELP, HELP_ALL, print_help
from onebox.cli.options.agents import LogsConfig, ServeConfig, StatusConfig, WatchConfig
from onebox.cli.options.common import nearest
from onebox.cli.options.estimates import MemoryConfig
from onebox.cli.options.jobs import PlanConfig, TrainConfig
from onebox.cli.options.pairing import (
    PairAcceptConfig,
    PairConfig,
    PairConnectConfig,
    PairForgetConfig,
    PairListConfig,
    PairRemoveConfig,
)
from onebox.cli.options.pools import CompletionConfig, DevicesConfig, EnvConfig, ProfileConfig, RunConfig
from onebox.cli.options.run_config import changed_for_resume, read_config
from onebox.errors import UsageError

Config = (
    TrainConfig
    | PlanConfig
    | MemoryConfig
    | RunConfig
    | DevicesConfig
    | ProfileConfig
    | EnvConfig
    | ServeConfig
    | PairConfig
    | StatusConfig
    | WatchConfig
    | LogsConfig
    | CompletionConfig
)

COMMANDS: dict[str, tuple[type[Config], str]] = {
    "train": (TrainConfig, "train"),
    "plan": (PlanConfig, "show_plan"),
    "memory": (MemoryConfig, "show_memory_estimate"),
    "run": (RunConfig, "run_script"),
    "devices": (DevicesConfig, "show_devices"),
    "profile": (ProfileConfig, "show_profile"),
    "serve": (ServeConfig, "serve"),
    "pair accept": (PairAcceptConfig, "pair"),
    "pair connect": (PairConnectConfig, "pair"),
    "pair list": (PairListConfig, "pair"),
    "pair remove": (PairRemoveConfig, "pair"),
    "pair forget": (PairForgetConfig, "pair"),
    "status": (StatusConfig, "show_status"),
    "watch": (WatchConfig, "watch"),
    "logs": (LogsConfig, "show_log"),
    "env": (EnvConfig, "show_environment"),
    "completion": (CompletionConfig, "print_completion"),
}
"""The options of each command, of one word or two, and the name of its function, in the module of
:mod:`onebox.cli.commands` that has the name of the first word."""

OPTIONS: dict[str, type[Config]] = {command: kind for command, (kind, _) in COMMANDS.items()}

_FIRST_WORDS = tuple(dict.fromkeys(command.split()[0] for command in OPTIONS))

_PAIR_OVERVIEW = """usage: onebox pair COMMAND

Pair a client with an agent; an agent accepts only clients that were paired with it.

on the agent's machine:
  accept        print a code that works once, for ten minutes, and wait for a client
  remove NAME   stop accepting a client

on the client's machine:
  connect HOST  ask for the code, and pair with the agent
  forget HOST   delete the key of an agent

on both:
  list          the clients and agents that are paired, with their fingerprints

onebox pair COMMAND --help says more of each.
"""

_TORCHRUN = "torchrun"
_TORCHRUN_HELP = """usage: onebox torchrun [flags of onebox run] [flags of torchrun] SCRIPT [ARGUMENTS]

The same as onebox run [flags] torchrun [flags] SCRIPT [ARGUMENTS], with a rank for each device of
the pool unless --nproc-per-node says otherwise.

examples:
  onebox torchrun --pool cpu*2 train.py
  onebox torchrun --pool lab1,lab2 --nproc-per-node 4 train.py --epochs 1
"""

_BARE = (
    *HELP,
    HELP_ALL,
    *(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(RunConfig) if field.default is False),
)
"""Flags of ``onebox run`` that take no value."""

_OPTIONAL: dict[str, tuple[str, Callable[[str], bool]]] = {
    "--recover": ("on", lambda word: word in ("auto", "on", "off")),
    "--profile": ("onebox-trace.json", lambda word: word.endswith(".json")),
}
"""The flags whose value may be left out: what it is then, and whether a word is one."""

_DESCRIPTION = "Every GPU that you can reach, as one box for training PyTorch models."

_OVERVIEW = f"""onebox {__version__}: {_DESCRIPTION[0].lower()}{_DESCRIPTION[1:]}

on a pool of devices, of this machine or of others:
  run      an ordinary PyTorch script; what it calls cuda:0, cuda:1 … are the pool's devices
  torchrun a distributed script, with a rank for each device
  train    a model, yours or one of onebox's; a run has a folder, from which it can be resumed
  plan     which device should compute what, and when
  memory   whether a model fits, and what would make it fit; nothing is run
  devices  what a pool has, and who has leased it
  profile  how fast devices and links are

several machines:
  pair     make a client and an agent known to each other
  serve    offer this machine's devices, as an agent
  status   who has what, who waits, how busy it is
  logs     the newest lines of an agent's log

in a browser:
  watch    a run, or agents; train, run and serve with --page show what they do

onebox itself:
  env        versions, what this machine has, and what is missing
  completion the script with which bash, zsh or fish completes command lines

onebox COMMAND --help shows the usual options of each, --help-all the rest.

Without a GPU and without another machine:
  onebox train --pool cpu*2 --data digits --model cnn --epochs 3
"""


def parse(arguments: Sequence[str]) -> Config:
    """Return the options of the command in the arguments.

    A resumed run uses the settings in its configuration file, which explicit flags override.

    Args:
        arguments: Arguments of the command line, without the program's name.

    Raises:
        UsageError: They are invalid; the message has one line.
        SystemExit: Help or the version was requested and has been printed.
    """
    if not arguments:
        raise UsageError(f"a command is needed: {', '.join(_FIRST_WORDS)}; see onebox --help")
    if arguments[0] in (*HELP, HELP_ALL, "--version"):
        print(f"onebox {__version__}" if arguments[0] == "--version" else _OVERVIEW.rstrip())
        raise SystemExit(0)
    if arguments[0] == _TORCHRUN:
        arguments = _as_run(arguments[1:])
    command = _command(arguments)
    own, script = _without_script(arguments)
    own = _with_values(own[len(command.split()) :])
    if HELP_ALL in own or any(word in own for word in HELP):
        print_help(OPTIONS[command], f"onebox {command}", full=HELP_ALL in own)
    config: Config = _tyro(OPTIONS[command], own, prog=f"onebox {command}")
    if isinstance(config, RunConfig):
        return dataclasses.replace(config, script=_checked(script))
    if not isinstance(config, TrainConfig) or config.resume is None:
        return config
    stored = read_config(config.resume)
    given: TrainConfig = _tyro(TrainConfig, own, prog="onebox train", default=stored)
    return changed_for_resume(stored, given)


def _command(arguments: Sequence[str]) -> str:
    """Return the command in the arguments, which is one of :data:`OPTIONS`.

    Raises:
        UsageError: There is none.
        SystemExit: Help on ``onebox pair`` was requested and has been printed.
    """
    first, second = arguments[0], arguments[1] if len(arguments) > 1 else ""
    if first not in _FIRST_WORDS:
        words = (*_FIRST_WORDS, _TORCHRUN)
        raise UsageError(f"there is no command {first!r}{nearest(first, words)}; the commands are {', '.join(words)}")
    seconds = [command.split()[1] for command in OPTIONS if command.startswith(f"{first} ")]
    if not seconds:
        return first
    if second in (*HELP, HELP_ALL):
        print(_PAIR_OVERVIEW.rstrip())
        raise SystemExit(0)
    if second not in seconds:
        what = f"has no command {second!r}{nearest(second, seconds)}" if second else "needs a command"
        raise UsageError(
            f"onebox {first} {what}: on the agent's machine it is onebox pair accept, on the client's onebox pair "
            "connect HOST; list, remove and forget are the others"
        )
    return f"{first} {second}"


def _with_values(words: Sequence[str]) -> list[str]:
    """Return arguments in which the flags whose value may be left out have one."""
    pairs = itertools.pairwise([*words, ""])
    return [f"{pair[0]}={_OPTIONAL[pair[0]][0]}" if _is_bare(*pair) else pair[0] for pair in pairs]


def _is_bare(word: str, following: str) -> bool:
    return word in _OPTIONAL and not _OPTIONAL[word][1](following)


def _width(words: Sequence[str], position: int) -> int:
    """Return whether a flag of ``onebox run`` is one argument, or two with its value."""
    word, following = words[position], words[position + 1] if position + 1 < len(words) else ""
    return 1 if "=" in word or word in _BARE or _is_bare(word, following) else 2


def _without_script(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the arguments into those of ``onebox`` and, for ``onebox run``, the script with its own."""
    words = list(arguments)
    if words[:1] != ["run"]:
        return words, ()
    position = 1
    while position < len(words):
        word = words[position]
        if word == "--":
            return words[:position], tuple(words[position + 1 :])
        if word == "-m" or not word.startswith("-"):
            return words[:position], tuple(words[position:])
        position += _width(words, position)
    return words, ()


def _as_run(words: Sequence[str]) -> list[str]:
    """Return the arguments of ``onebox torchrun`` as those of ``onebox run``.

    Raises:
        UsageError: There is no script.
        SystemExit: Help was requested and has been printed.
    """
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(RunConfig)}
    position = 0
    while position < len(words) and words[position].partition("=")[0].replace("_", "-") in flags:
        position += _width(words, position)
    own, rest = list(words[:position]), list(words[position:])
    if rest and rest[0] in (*HELP, HELP_ALL):
        print(_TORCHRUN_HELP.rstrip())
        raise SystemExit(0)
    if not rest:
        raise UsageError(
            "a script is needed: onebox torchrun [flags] script.py [arguments]; see onebox torchrun --help"
        )
    if not any(word.partition("=")[0].replace("_", "-") == "--nproc-per-node" for word in rest):
        rest = ["--nproc-per-node", "gpu", *rest]
    return ["run", *own, "-m", "torch.distributed.run", *rest]


def _checked(script: tuple[str, ...]) -> tuple[str, ...]:
    if not script or script == ("-m",):
        what = "-m needs the name of a module" if script else "a script is needed"
        raise UsageError(
            f"{what}: onebox run [flags] script.py [arguments], or onebox run [flags] -m module [arguments]"
        )
    return script


def _tyro(kind: Any, arguments: Sequence[str], **options: Any) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=arguments, **options)
    except SystemExit as error:
        if not error.code:
            raise
        raise UsageError(_own_message(error) or _one_line(said.getvalue())) from None


def _own_message(error: BaseException | None) -> str | None:
    """Return the message of our own validation, if that ended the parsing."""
    while error is not None:
        if isinstance(error, UsageError):
            return str(error)
        error = error.__context__
    return None


def _one_line(box: str) -> str:
    """Convert one of tyro's boxes (a title, an error, a rule, hints) into a line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [" ".join(part.split()) for part in re.split(r"[─-]{5,}", " ".join(lines))]
    if "╭" not in text:  # without such characters, the title is above a separate rule
        sections = sections[1:]
    what, rest = _plain(sections[0].rstrip(".")), " ".join(sections[1:])
    for pattern, template in (
        (r"Perhaps you meant: (--[\w-]+)", "; perhaps {}?"),
        (r"For full helptext, (?:run|see) (onebox.*? --help)", "; see {}"),
    ):
        match = re.search(pattern, rest)
        what += template.format(match[1]) if match else ""
    return what


def _plain(text: str) -> str:
    """Reword messages of Python's own conversions."""
    text = re.sub(r"no type matching .* Got errors: .*<class '\w+'>: ", "", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is not a whole number", text)
    text = re.sub(r"could not convert string to float: ('.*')", r"\1 is not a number", text)
    text = re.sub(r"^Missing from (onebox [\w ]+): (\S+) (.*?)\.? \(required\)$", r"\1 needs \2: \3", text)
    text = re.sub(r"^Missing value for argument '(--[\w-]+)'\. Expected 1 values?", r"\1 needs a value", text)
    return text.removeprefix("Error parsing ")
