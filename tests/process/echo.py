"""A rank that is a process of its own: it sends back what it is sent, and says so when it has sent all of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.group import CarriedGroup
from onebox.worker.comm.shm.carrier import ShmCarrier
from onebox.worker.comm.shm.rendezvous import find_shm_peers
from onebox.worker.progress import WorkerProgress

TEXT = TensorSpec("uint8", (64,))
"""Of the message before a tensor, which says what it is."""


class Folder:
    """A key-value store of processes that share a folder.

    Args:
        path: It.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        file = self._path / key.replace("/", "_")
        file.with_suffix(".part").write_text(value)
        file.with_suffix(".part").rename(file)

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        file = self._path / key.replace("/", "_")
        end_s = time.monotonic() + 60
        while not file.exists():
            if time.monotonic() > end_s:
                raise RankLost(f"nobody set {key}")
            time.sleep(0.01)
        return file.read_bytes()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, waiting for them."""
        return [self.get(key) for key in keys]


def join(folder: Path, rank: int) -> CarriedGroup:
    """Join a group of two."""
    form = FormGroup(1, rank, 2, "tcp", "127.0.0.1", 60.0, True)
    progress = WorkerProgress()
    memory = ShmCarrier(form, find_shm_peers(form, Folder(folder)), progress)
    return CarriedGroup(form, [memory], accelerator_for("cpu"), progress)


def to_text(spec: TensorSpec | None) -> torch.Tensor:
    """Return a message that says what comes next; with nothing, that nothing does."""
    text = "" if spec is None else " ".join([spec.dtype, *map(str, spec.shape)])
    return torch.tensor(list(text.encode().ljust(64)), dtype=torch.uint8)


def from_text(message: torch.Tensor) -> TensorSpec | None:
    """Return what comes next."""
    words = bytes(message.tolist()).decode().split()
    return TensorSpec(words[0], tuple(int(word) for word in words[1:])) if words else None


def main() -> None:
    """Send back what comes, then keep quiet until somebody ends this process."""
    group = join(Path(sys.argv[1]), 1)
    while (spec := from_text(group.receive(TEXT, 0, 0)().tensor)) is not None:
        group.send(group.receive(spec, 0, 1)().tensor, 0, 2)
    group.reduce([torch.ones(3)])()
    time.sleep(600)


if __name__ == "__main__":
    main()
