"""The line of a script that a thread is in, and how it is shown."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path

import torch

from onebox.vgpu.runtime.script_time import ScriptLine
from onebox.wire.clean_text import clean_text

_ONEBOX = os.path.join(Path(os.path.abspath(__file__)).parents[2], "")
_COMMAND = os.path.join(_ONEBOX, "cli", "")
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = (
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
)

_TEXT = 60
"""The longest text of a line that is shown."""

_theirs: dict[str, bool] = {}


def current_line() -> ScriptLine | None:
    """Return the innermost line of this thread's frames that is neither of onebox nor of PyTorch or Python's library;
    ``None`` if there is none, as where a script has ended."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        found = _theirs.get(file)
        if found is None:
            found = _theirs[file] = _is_of_script(file)
        if found:
            return ScriptLine(file, frame.f_lineno)
        if file.startswith(_COMMAND):  # what has called it is no script
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_of_script(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    if file.startswith(_ONEBOX) or file.startswith(_LIBRARIES[0]):
        return False
    return not file.startswith(_LIBRARIES[1:]) or any(f"{os.sep}{name}{os.sep}" in file for name in _PACKAGES)


def place_of(line: ScriptLine) -> str:
    """Return the place of a line, such as ``train.py:88``: as seen from the current folder, or in its package."""
    path = Path(line.file)
    for name in _PACKAGES:
        if name in path.parts:
            at = len(path.parts) - path.parts[::-1].index(name)
            return clean_text(f"{Path(*path.parts[at:])}:{line.number}")
    try:
        path = path.relative_to(Path.cwd())
    except (ValueError, OSError):
        path = Path(path.name)
    return clean_text(f"{path}:{line.number}")


def text_of(line: ScriptLine) -> str:
    """Return the text of a line, cut where it is long; empty where its file is not there."""
    text = clean_text(linecache.getline(line.file, line.number).strip())
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 2]} …"
