"""The configuration file of a run: written when it starts, read when it is resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from onebox.cli.options.jobs import TrainConfig
from onebox.errors import UsageError
from onebox.files import read_regular

_NOT_STORED = ("run", "resume", "page", "page_port")
_MAY_CHANGE = (
    *("epochs", "pool", "threads", "memory", "plan", "sync", "update", "shares", "save_every", "stop_within", "every"),
    *("recover", "snapshot_every", "adaptive", "islands", "read", "process", "on_error"),
    *_NOT_STORED,
)
"""Options that may differ when a run is resumed: those of its length, place and display, not of its computation."""

_CONFIG_BYTES = 1 << 20


def to_stored(config: TrainConfig) -> dict[str, object]:
    """Return the content of a run's configuration file."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_STORED}


def read_config(folder: Path) -> TrainConfig:
    """Read the configuration file of a run.

    Args:
        folder: The run's folder.

    Raises:
        UsageError: There is no run, or its file is damaged or foreign.
    """
    file = folder / "config.json"
    try:
        values = msgspec.json.decode(read_regular(file, _CONFIG_BYTES), type=dict[str, object])
    except FileNotFoundError:
        raise UsageError(f"--resume {folder}: there is no run in it, as there is no {file}") from None
    except OSError as error:
        raise UsageError(f"--resume {folder}: {file} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is damaged, or no configuration of a run: {error}") from None
    if isinstance(steps := values.get("save_every"), int):  # as earlier versions wrote it
        values["save_every"] = str(steps)
    known = {field.name for field in dataclasses.fields(TrainConfig)} - set(_NOT_STORED)
    odd = sorted(set(values) ^ known)
    if odd:
        raise UsageError(f"{file} is no configuration of this onebox: {', '.join(odd)} unknown or missing")
    try:
        return msgspec.convert(values, TrainConfig)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{file} is damaged: {error}") from None


def changed_for_resume(stored: TrainConfig, given: TrainConfig) -> TrainConfig:
    """Return the options of a resumed run, after checking that they do not change its computation.

    Args:
        stored: Options from its configuration file.
        given: The same, overridden by the flags of this command line.

    Raises:
        UsageError: A flag would change the computation.
    """
    given = given.resolved()
    for field in dataclasses.fields(TrainConfig):
        before, now = getattr(stored, field.name), getattr(given, field.name)
        if before != now and field.name not in _MAY_CHANGE:
            flag = f"--{field.name.replace('_', '-')}"
            allowed = ", ".join(f"--{name.replace('_', '-')}" for name in _MAY_CHANGE[: -len(_NOT_STORED)])
            raise UsageError(f"{flag} {now}: the run to be resumed has {before}; only {allowed} may change")
    return given
