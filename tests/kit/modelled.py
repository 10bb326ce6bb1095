"""Pools whose devices are modelled accelerators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import onebox
from onebox.pool import open_pool

_FOLDERS = [str(Path(__file__).parents[2]), str(Path(__file__).parent / "accelerator" / "installed")]
"""That of the tests, and one with the description of a package that has accelerators of the kind ``model``."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Let pools have devices ``model:SEED``, as if a package that has them were installed."""
    for folder in _FOLDERS:
        patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")]))


@contextmanager
def open_modelled(count: int, *, seed: int = 0) -> Iterator[onebox.Pool]:
    """Open a pool of modelled accelerators with one thread each."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        with open_pool(f"model:{seed}*{count}", threads=1) as pool:
            yield pool
