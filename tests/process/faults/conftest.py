"""What every test of faults is followed by: a look whether anything was left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import onebox
from onebox.pool import open_pool
from onebox.pool.launch.zygotes import OWN
from tests.kit import warm as programs
from tests.kit.leaks import descriptors
from tests.process.faults.training import batch, parts

SETTLE_S = 60.0
"""How long what is being closed may take to be gone."""


@dataclass(frozen=True)
class Belongings:
    """What this process holds.

    Args:
        children: Process ids of its children, theirs included.
        threads: Names of the threads that onebox started.
        descriptors: Its open files and sockets.
        files: Files of onebox in the folders for temporary files and for shared memory.
    """

    children: frozenset[int]
    threads: tuple[str, ...]
    descriptors: frozenset[tuple[str, str]]
    files: frozenset[Path]

    def beyond(self, before: Belongings) -> list[Any]:
        """Return what this process holds more than before: what others left may have ended meanwhile."""
        threads = Counter(self.threads) - Counter(before.threads)
        sets = self.children - before.children, self.descriptors - before.descriptors, self.files - before.files
        return [*threads.elements(), *itertools.chain.from_iterable(sets)]


def belongings() -> Belongings:
    """Look what this process holds, but for zygotes without workers, which stay a while for the next pool, and for the
    browser of other tests, which starts and ends processes when it likes."""
    children = frozenset(child.pid for child in psutil.Process().children(recursive=True) if not _of_browser(child))
    found = OWN._found.values()
    zygotes = {zygote.pid for zygote in found}
    theirs = {str(number) for zygote in found for number in (zygote.channel, zygote._words.fileno())}
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return Belongings(
        children=children - zygotes,
        threads=tuple(t.name for t in threading.enumerate() if t.name.startswith("onebox")),
        descriptors=frozenset(each for each in descriptors() if each[0] not in theirs),
        files=frozenset(path for folder in folders if folder.is_dir() for path in folder.glob("*onebox*")),
    )


def _of_browser(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith("chrom")
    return True  # it has ended


@pytest.fixture(scope="session")
def own_folder() -> Iterator[None]:
    """Give these tests a folder for temporary files of their own: pools of others come and go in the common one."""
    with tempfile.TemporaryDirectory(prefix="tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def warm(own_folder: None) -> None:
    """Start what starts scripts, and open and close a pool once, so that what libraries open once and for all is open.

    That is PyZMQ's thread for frames that are sent without a copy, with its own sockets: hence the wide model.
    """
    programs.start()
    with open_pool("cpu*1", threads=1) as pool, onebox.Trainer(*parts(width=8192), pool=pool) as trainer:
        trainer.step(*batch(0)).item()


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fail if a process, thread, descriptor or file is left behind."""
    before = belongings()
    yield
    end_s = time.monotonic() + SETTLE_S
    while (left := belongings().beyond(before)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not left


@pytest.fixture(autouse=True)
def nothing_left(warm: None) -> Iterator[None]:
    """Fail a test that leaves something behind."""
    gc.collect()  # what tests of other files have left to it
    with leaving_nothing():
        yield
