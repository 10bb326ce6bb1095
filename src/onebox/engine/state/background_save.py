"""A checkpoint that a thread writes while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from onebox.errors import CheckpointError, OneboxError


class BackgroundSave:
    """A checkpoint that is being written; :meth:`onebox.Trainer.begin_save` makes it.

    Args:
        write: Writes it, and returns its folder.
        written: Called with the folder.
        drop: Drops the copies on the workers.
        path: The checkpoint folder, for errors.
    """

    def __init__(
        self,
        write: Callable[[], Path],
        written: Callable[[Path], object],
        drop: Callable[[], object],
        *,
        path: Path,
    ) -> None:
        self._write, self._written, self._drop, self._path = write, written, drop, path
        self._saved: Path | None = None
        self._error: Exception | None = None
        self._told = False
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="onebox-save", daemon=True)
        self._thread.start()

    @classmethod
    def ended(cls, saved: Path) -> Self:
        """Return one that has been written."""
        found = cls.__new__(cls)
        found._saved, found._error, found._told, found._thread = saved, None, True, None
        return found

    @property
    def done(self) -> bool:
        """True if it has been written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> Path:
        """Wait for it and return the folder of this save.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def end(self) -> None:
        """Wait for it.

        Raises:
            CheckpointError: It could not be written, and nobody has asked for its result.
        """
        told = self._told
        if self._thread is not None:
            self._thread.join()
        if not told:
            self.result()

    def _run(self) -> None:
        try:
            self._saved = self._write()
            self._written(self._saved)
        except CheckpointError as error:
            self._error = error
        except OneboxError as error:
            text = f"the checkpoint could not be written to {self._path}, as its copy on the workers is lost: {error}"
            self._error = CheckpointError(f"{text}; earlier ones there are whole: save again", path=self._path)
            self._error.__cause__ = error
        except Exception as error:
            self._error = error
        finally:
            self._drop()
