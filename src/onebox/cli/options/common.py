"""Common parts of the commands' options: their types on the command line, and shared checks."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from onebox.errors import UsageError
from onebox.sizes import Budgets, parse_budgets
from onebox.trainer_options import DataParallel, Engine, Recovery, StaleGradients

_Group = TypeVar("_Group", DataParallel, StaleGradients, Recovery, Engine)

BUILT_IN_MODELS = ("mlp", "cnn", "resnet", "gpt")

PoolSpec = Annotated[str, tyro.conf.arg(metavar="SPEC")]
DataSpec = Annotated[str, tyro.conf.arg(metavar="NAME[:PATH]")]
Model = Annotated[str, tyro.conf.arg(metavar="NAME")]
OwnFunction = Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION", help_behavior_hint="")]

Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Float = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Seconds = Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="")]
Duration = Annotated[float, tyro.conf.arg(metavar="SECONDS")]
IpAddress = Annotated[str, tyro.conf.arg(metavar="ADDRESS")]
Concurrency = Annotated[str, tyro.conf.arg(metavar="INT|auto")]
SaveEvery = Annotated[str | None, tyro.conf.arg(metavar="STEPS|TIME", help_behavior_hint="")]
Shares = Annotated[str, tyro.conf.arg(metavar="auto|equal|measured|FLOAT,...")]
Bytes = Annotated[str | None, tyro.conf.arg(metavar="BYTES", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
PlanFile = Annotated[str | None, tyro.conf.arg(metavar="FILE|auto|data-parallel", help_behavior_hint="")]
Ints = Annotated[str | None, tyro.conf.arg(metavar="INT,INT,...", help_behavior_hint="")]
Names = Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME,...", help_behavior_hint="")]
IslandList = Annotated[str | None, tyro.conf.arg(metavar="auto|INT,.../INT,...", help_behavior_hint="")]
Frozen = Annotated[
    Literal["bf16", "int8", "int4"] | None, tyro.conf.arg(metavar="{bf16,int8,int4}", help_behavior_hint="")
]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
Text = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
Address = Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")]
Ids = Annotated[str, tyro.conf.arg(metavar="FIRST-LAST")]
PortRange = Annotated[str | None, tyro.conf.arg(metavar="FIRST-LAST", help_behavior_hint="")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The common options of all commands that open a pool.

    Args:
        pool: Devices: auto, or a list such as cuda:0,cuda:1 or cpu*2; of other machines, where onebox serve runs, such
            as lab1,lab2/cuda:0; a Ray cluster, ray; or a file NAME.toml. Emulated ones: cpu@0.5 is a CPU worker at
            half of its speed, sim*4@2 are four devices that compute nothing and only sleep, for half of the time that
            a core of this machine would take.
        threads: CPU threads of each worker; without it an equal share of the cores.
        memory: Limit of the memory of each device's buffers, such as 2GiB; one for each device with 2GiB,4GiB, or for
            some with 0:2GiB; without it there is no limit.
        plain_links: Send tensors between hosts without encryption, and by NCCL between their GPUs: for hosts that reach
            each other through a tunnel, or by a network that nobody else reaches.

    Raises:
        UsageError: A value is out of range.
    """

    pool: PoolSpec = "auto"
    threads: Int = None
    memory: Bytes = None
    plain_links: Flag = False

    def __post_init__(self) -> None:
        at_least(1, threads=self.threads)
        _ = self.budgets

    @property
    def budgets(self) -> Budgets:
        """``memory`` in bytes, for each device."""
        return parse_budgets("--memory", self.memory)


def group_of(kind: type[_Group], options: object, **given: Any) -> _Group:
    """Return a group of a trainer's options from the command line's options of the same names.

    Args:
        kind: The group.
        options: The command line's options.
        given: Options that have another form there.

    Raises:
        UsageError: A value is not allowed; the message names the flag.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    values = {name: getattr(options, name) for name in names if hasattr(options, name)}
    try:
        return kind(**{**values, **given})
    except UsageError as error:
        text = str(error)
        for name in values:
            text = re.sub(rf"\b{name}=('[^']*'|[^:;,\s]+)", lambda match: _as_flag(match[0]), text)
        raise UsageError(text) from None


def _as_flag(argument: str) -> str:
    """Return an argument of Python, such as ``sync='client'``, in the command line's form."""
    name, _, value = argument.partition("=")
    return _flag(name) if value == "True" else f"{_flag(name)} {value.strip(chr(39))}"


def not_negative(**values: float) -> None:
    """Require finite numbers of at least 0; see :func:`at_least`."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"{_flag(name)} {value}: allowed are 0 and more")


def at_least(least: int, **values: int | None) -> None:
    """Require numbers of at least a minimum.

    Args:
        least: The minimum.
        values: The options, by the names of their fields.

    Raises:
        UsageError: A number is below it.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise UsageError(f"{_flag(name)} {value}: allowed are {least} and more")


def positive(**values: float | None) -> None:
    """Require finite numbers above 0.

    Args:
        values: The options, by the names of their fields.

    Raises:
        UsageError: A number is not.
    """
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{_flag(name)} {value}: allowed are numbers above 0")


def check_model(name: str | None, loss: str | None) -> None:
    """Require the name of a model that comes with onebox, or references to a model and a loss of the user's own.

    Nothing is imported.

    Args:
        name: The model.
        loss: The loss; ``None`` for cross-entropy.

    Raises:
        UsageError: One is neither.
    """
    if name is not None and name not in BUILT_IN_MODELS and ":" not in name:
        raise UsageError(
            f"--model {name}: allowed are {', '.join(BUILT_IN_MODELS)}{nearest(name, BUILT_IN_MODELS)}, and for your "
            "own model package.module:function, a function that returns it"
        )
    for flag, reference in (("--model", name), ("--loss", loss)):
        if reference is None or (reference in BUILT_IN_MODELS and flag == "--model"):
            continue
        module, colon, path = reference.partition(":")
        if module.endswith(".py") or "/" in module or "\\" in reference:
            raise UsageError(
                f"{flag} {reference}: a module is named as in an import, without .py and with dots between folders"
            )
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
            raise UsageError(f"{flag} {reference}: allowed is package.module:function, such as my_models:make")


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the most similar name, in the form of a parenthesis; empty if none is similar."""
    near = difflib.get_close_matches(word.lower().lstrip("-"), names, n=1)
    return f" (perhaps {near[0]}?)" if near else ""


def read_sizes(text: str, most: int, what: str) -> tuple[int, ...]:
    """Parse sizes of micro-batches.

    Args:
        text: Whole numbers, separated by commas.
        most: The maximum.
        what: Description of the maximum, for the message.

    Raises:
        UsageError: An item is not a number, or out of range.
    """
    parts = [part.strip() for part in text.split(",")]
    sizes = tuple(int(part) for part in parts if part.isdecimal())
    if len(sizes) < len(parts) or not all(1 <= size <= most for size in sizes):
        raise UsageError(f"--micro-batches {text}: allowed are whole numbers from 1 to {most}, {what}, such as 4,8,16")
    return sizes


def check_port(name: str, port: int | None, *, least: int) -> None:
    """Require a valid port.

    Args:
        name: The option's field.
        port: The port.
        least: 0 where 0 may stand for any free port, else 1.

    Raises:
        UsageError: The port is invalid.
    """
    if port is not None and not least <= port <= 65535:
        free = ", and 0 for any that is free" if least == 0 else ""
        raise UsageError(f"{_flag(name)} {port}: allowed are 1 to 65535{free}")


def check_page(*, page: bool, port: int) -> None:
    """Require a valid port of a page, if there is one.

    Args:
        page: Whether there is a page.
        port: Its port; 0 for any free one.

    Raises:
        UsageError: The port is invalid, or given without a page.
    """
    check_port("page-port", port, least=0)
    if port and not page:
        raise UsageError(f"--page-port {port} is for a page; it needs --page")


def check_ip(name: str, address: str) -> None:
    """Require a valid IP address.

    Args:
        name: The option's field.
        address: The address.

    Raises:
        UsageError: The address is invalid.
    """
    try:
        ip_address(address)
    except ValueError:
        raise UsageError(
            f"{_flag(name)} {address}: allowed are IP addresses of this machine, such as 127.0.0.1, and 0.0.0.0 for all"
        ) from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
