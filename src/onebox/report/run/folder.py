"""The folder of all files of a training run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from onebox.errors import UsageError
from onebox.files import make_folder, put_file, sync
from onebox.report.run.json_files import to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The folder of a run. Make one with :meth:`create` or :meth:`resume`.

    Args:
        path: The folder; it exists.
    """

    path: Path

    @classmethod
    def create(cls, name: str, *, path: Path | str | None = None, root: Path | str = "runs") -> RunFolder:
        """Make the folder of a new run.

        Args:
            name: Name of the run, for instance its model: letters, digits, dots, dashes, underscores.
            path: The folder itself; by default ``<root>/<UTC timestamp>-<name>``, with the suffix ``-2``, ``-3``, ...
                where several runs start within one second.
            root: Folder of all runs, used where no path is given.

        Returns:
            The new folder; parent folders are made too.

        Raises:
            UsageError: The name has other characters, or the path is a file or a folder that is not empty.

        Example:
            >>> RunFolder.create("cnn").path  # doctest: +SKIP
            PosixPath('runs/20260102T030405Z-cnn')
        """
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise UsageError(
                f"{name!r} cannot be the name of a run; "
                "use letters, digits, dots, dashes and underscores, such as 'cnn-digits'"
            )
        if path is None:
            return cls(path=_fresh(Path(root), f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"))
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; give the path of a folder for this run")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"the folder {folder} is not empty; give another one for a new run, or resume the run in it"
            )
        make_folder(folder)
        return cls(path=folder)

    @classmethod
    def resume(cls, path: Path | str) -> RunFolder:
        """Return the folder of an earlier run, to resume it.

        Args:
            path: The folder.

        Returns:
            The folder with its files.

        Raises:
            UsageError: There is no such folder.

        Example:
            >>> RunFolder.resume("runs/20260102T030405Z-cnn")  # doctest: +SKIP
        """
        folder = Path(path)
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder, so there is no run to resume; check the path")
        return cls(path=folder)

    @property
    def metrics(self) -> Path:
        """File of the metrics, as JSON lines; see :class:`onebox.report.MetricsLog`."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """File of the run's configuration."""
        return self.path / "config.json"

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint; created by the writer of the checkpoint."""
        return self.path / "checkpoint"

    @property
    def timeline(self) -> Path:
        """File of the timeline; see :class:`onebox.report.Timeline`."""
        return self.path / "timeline.json"

    @property
    def plan(self) -> Path:
        """File of the plan, if the run has one."""
        return self.path / "plan.json"

    @property
    def schedule(self) -> Path:
        """Figure of a measured step, if the run has a plan."""
        return self.path / "schedule.png"

    @property
    def memory(self) -> Path:
        """The figure of the memory of a step."""
        return self.path / "memory.png"

    @property
    def status(self) -> Path:
        """File of the run's status while it goes on; see :class:`onebox.report.RunStatus`."""
        return self.path / "status.json"

    @property
    def summary(self) -> Path:
        """File of the run's result."""
        return self.path / "summary.json"

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write the configuration atomically.

        Args:
            config: The options of the run. Numbers that are not finite become ``null``.

        Raises:
            UsageError: It contains something that JSON cannot express.
        """
        _write(self.config, config)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write the result atomically.

        Args:
            summary: The results of the run. Numbers that are not finite become ``null``.

        Raises:
            UsageError: It contains something that JSON cannot express.
        """
        _write(self.summary, summary)


def _fresh(root: Path, name: str) -> Path:
    make_folder(root)
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            sync(root)
            return folder


def _write(path: Path, content: Mapping[str, object]) -> None:
    put_file(path, msgspec.json.format(to_json(content), indent=2) + b"\n", private=False)
