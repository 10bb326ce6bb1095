"""The files that commands write besides a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onebox.drawing import check_suffix
from onebox.errors import UsageError
from onebox.extras import import_extra
from onebox.files import put_file
from onebox.report.run.json_files import to_json


def check_target(flag: str, path: Path | None) -> None:
    """Require that an output file can be written.

    Raises:
        UsageError: It cannot.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"{flag} {path}: a file in an existing folder is needed")


def check_figure(path: Path | None) -> None:
    """Require that ``--figure`` can be drawn and written.

    Raises:
        UsageError: It cannot, or matplotlib is not installed.
    """
    check_target("--figure", path)
    if path is not None:
        check_suffix(path)
        import_extra("matplotlib", "--figure")


def give_json(data: Mapping[str, Any], *, printed: bool, path: Path | None) -> None:
    """Print JSON values, write them into a file, or both.

    Raises:
        UsageError: The file cannot be written.
    """
    content = to_json(data) + b"\n"
    if printed:
        print(content.decode(), end="")
    if path is not None:
        write_output("--report", path, content)


def write_output(flag: str, path: Path, content: bytes) -> None:
    """Write the file that a flag names.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        put_file(path, content, private=False)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from error
