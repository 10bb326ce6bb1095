"""Row groups of Parquet files and record batches of Arrow files: their index, and a cache of them."""

from __future__ import annotations

import bisect
import contextlib
import faulthandler
import os
import select
import signal
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from onebox.errors import DataError
from onebox.extras import import_extra
from onebox.feed.sources.formats.arrow_sizes import file_sizes, stream_sizes
from onebox.feed.sources.formats.files import open_regular, unreadable
from onebox.feed.sources.formats.parquet_pages import column_bounds
from onebox.forking import fork
from onebox.portable import LINUX

ARROW_ENDINGS = (".arrow", ".feather", ".ipc")
ARROW_MAGIC = b"ARROW1"  # first bytes of an Arrow file, absent in an Arrow stream


_TRIAL_S = 30.0
"""Longest trial of one file; what takes longer is left to the reader."""

READING = "Reading Parquet and Arrow files"


class RowGroups:
    """The row groups of several files, in order.

    Args:
        paths: The files.
        max_bytes: Limit of a group's unpacked and decoded bytes.

    Attributes:
        paths: The files.
        schema: Columns and types of the first file; all have the same.

    Raises:
        MissingExtra: pyarrow is not installed.
        DataError: A file cannot be read, is damaged, has other columns, or all are empty.
    """

    def __init__(self, paths: Sequence[Path], *, max_bytes: int) -> None:
        self._arrow = import_extra("pyarrow", READING)
        self.paths = tuple(paths)
        self.schema: Any = None
        self._max_bytes = max_bytes
        self._names: list[str] | None = None
        self._checked: set[tuple[int, tuple[str, ...]]] = set()  # groups that were validated
        self._files: list[_Parquet | _Arrow] = []
        self._of: list[tuple[int, int]] = []  # file, and number in it, of each group
        self._ends: list[int] = []  # rows up to the end of each group
        self._first_rows: list[int] = []  # of each file
        rows = 0
        _try_first([path for path in self.paths if path.suffix.lower() not in ARROW_ENDINGS])
        for number, path in enumerate(self.paths):
            self._first_rows.append(rows)
            for group, (count, size_bytes) in enumerate(self._open(path)):
                _Limit(path, max_bytes).check(group, size_bytes)
                if count:
                    rows += count
                    self._of.append((number, group))
                    self._ends.append(rows)
        if not rows:
            raise DataError(f"{self.paths[0]} has no rows.", path=self.paths[0])

    def __len__(self) -> int:
        return self._ends[-1]

    def choose(self, names: list[str]) -> None:
        """Read only these columns from now on."""
        self._names = names

    def place(self, index: int) -> tuple[int, int]:
        """Return the group of a row, and the row's number in it."""
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"row {index} of {self._ends[-1]}")
        group = bisect.bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def path(self, group: int) -> Path:
        """Return the file of a group."""
        return self.paths[self._of[group][0]]

    def row_of_file(self, index: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in that."""
        number = self._of[self.place(index)[0]][0]
        return self.paths[number], index - self._first_rows[number]

    def __iter__(self) -> Iterator[int]:
        """The numbers of the groups."""
        return iter(range(len(self._of)))

    def load(self, group: int, names: list[str] | None = None) -> Any:
        """Read a group: a table of the named columns, by default of the chosen ones.

        Raises:
            DataError: It cannot be read.
        """
        number, inside = self._of[group]
        path = self.paths[number]
        wanted = names or self._names
        try:
            table = self._files[number].load(inside, wanted)
            if (group, tuple(wanted or ())) not in self._checked:
                table.validate(full=True)  # Arrow trusts lengths in a file, and would crash the process by wrong ones
                self._checked.add((group, tuple(wanted or ())))
            return table
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            problem = f"{path}: row group {inside} is damaged or cannot be read ({error})"
            raise DataError(f"{problem}. Fetch it again.", path=path) from error

    def _open(self, path: Path) -> list[tuple[int, int]]:
        """Return rows and bytes of each group of a file."""
        try:
            os.close(open_regular(path))
            kind = _Arrow if path.suffix.lower() in ARROW_ENDINGS else _Parquet
            file = kind(path, _Limit(path, self._max_bytes))
            twice = [name for name, count in Counter(file.schema.names).items() if count > 1]
            if twice:
                raise ValueError(f"it has several columns called {twice[0]!r}")
        except (self._arrow.ArrowException, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # Arrow's own errors, about damaged files, have none
                raise unreadable(path, error) from error
            what = "Arrow" if path.suffix.lower() in ARROW_ENDINGS else "Parquet"
            problem = f"{path} is no {what} file that can be read ({error})"
            raise DataError(f"{problem}. Fetch it again, or name another.", path=path) from error
        if self.schema is None:
            self.schema = file.schema
        if not file.schema.equals(self.schema):
            came = f"{path} has the columns {_described(file.schema)}"
            problem = f"{came}; {self.paths[0].name} has {_described(self.schema)}"
            raise DataError(f"{problem}, and all need the same.", path=path)
        self._files.append(file)
        return file.groups()


class _Limit(NamedTuple):
    """Limit of the unpacked and decoded bytes of each row group of a file."""

    path: Path
    max_bytes: int

    def check(self, group: int, size_bytes: int) -> None:
        """Require that a group is within the limit.

        Raises:
            DataError: It is not.
        """
        if size_bytes > self.max_bytes:
            came = f"{self.path}: row group {group} has {size_bytes} bytes or more, unpacked"
            todo = f"allowed are {self.max_bytes}. Write it with smaller row groups."
            raise DataError(f"{came}; {todo}", path=self.path)


def _try_first(paths: Sequence[Path]) -> None:
    """Require that a process survives the metadata of Parquet files: by some that contradict themselves, such as in the
    statistics of sizes, pyarrow ends it. A forked process reads them first, which has nothing to lose.

    Raises:
        DataError: One of them ends it.
    """
    if not paths or not LINUX:
        return
    parquet = import_extra("pyarrow.parquet", READING)
    outlet, inlet = os.pipe()
    try:
        child = fork()
    except OSError:  # as many processes as there may be
        os.close(outlet)
        os.close(inlet)
        return
    if not child:
        _read_metadata(parquet, paths, inlet)
    os.close(inlet)
    tried = 0
    try:
        while select.select([outlet], [], [], _TRIAL_S)[0] and (said := os.read(outlet, 1 << 12)):
            tried += len(said)
    finally:
        os.close(outlet)
        os.kill(child, signal.SIGKILL)  # it has ended, or waits for what another thread held when it was forked
        _, status = os.waitpid(child, 0)
    if tried < len(paths) and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        path, name = paths[tried], signal.Signals(os.WTERMSIG(status)).name
        problem = f"{path} is no Parquet file that can be read (a process that tried was ended by {name})"
        raise DataError(f"{problem}. Fetch it again, or name another.", path=path)


def _read_metadata(parquet: Any, paths: Sequence[Path], inlet: int) -> NoReturn:
    """Read all that is read of files before their pages, say so with a byte for each, and end this process."""
    try:
        import resource  # not on every system, as a fork is not

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library's last words
        for path in paths:
            with contextlib.suppress(Exception), parquet.ParquetFile(path) as file:  # raised by the next to open it
                for number in range(file.metadata.num_row_groups if file.schema_arrow is not None else 0):
                    group = file.metadata.row_group(number)
                    for column in range(group.num_columns):  # also what the bounds of its pages are read from
                        chunk, kind = group.column(column), file.metadata.schema.column(column)
                        _ = chunk.compression, chunk.physical_type, kind.logical_type.type
            os.write(inlet, b".")
    finally:
        os._exit(0)


class _Parquet:
    """A Parquet file; it is opened anew for each group, as a reader is not thread-safe."""

    def __init__(self, path: Path, limit: _Limit) -> None:
        parquet = import_extra("pyarrow.parquet", READING)

        self._path = path
        self._limit = limit
        with parquet.ParquetFile(path) as file:
            self._metadata = file.metadata
            self.schema = file.schema_arrow

    def groups(self) -> list[tuple[int, int]]:
        found = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in found]

    def load(self, group: int, names: list[str] | None) -> Any:
        parquet = import_extra("pyarrow.parquet", READING)

        bounds = column_bounds(self._path, self._metadata, group, names)
        max_bytes = self._limit.max_bytes
        self._limit.check(group, sum(column.unpacked_bytes for column in bounds))
        decoded_bytes = sum(column.decoded_bytes for column in bounds)
        with parquet.ParquetFile(self._path, metadata=self._metadata) as file:
            if decoded_bytes <= max_bytes:
                return file.read_row_group(group, columns=names, use_threads=False)
            # Values that are short in the file, but may be long: a few rows at a time, until they are too many.
            row_bytes = sum(column.value_bytes for column in bounds)
            self._limit.check(group, sum(column.decoded_bytes for column in bounds if column.repeated))
            pa = import_extra("pyarrow", READING)
            batches, rows, size_bytes = [], max(1, max_bytes // max(1, row_bytes)), 0
            for batch in file.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                size_bytes += batch.nbytes
                self._limit.check(group, size_bytes)
                batches.append(batch)
            return pa.Table.from_batches(batches)


class _Arrow:
    """An Arrow file or stream, mapped into memory."""

    def __init__(self, path: Path, limit: _Limit) -> None:
        pa = import_extra("pyarrow", READING)

        self._path = path
        self._batches: list[Any] | None = None
        with open(open_regular(path), "rb") as file:
            is_file = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
        content = pa.memory_map(str(path)).read_buffer()
        dictionary_bytes, sizes = file_sizes(content) if is_file else stream_sizes(content)
        for number, size_bytes in enumerate(sizes):
            limit.check(number, dictionary_bytes + size_bytes)
        if is_file:
            reader = self._reader([])
            self._counts = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
            self.schema = self._reader(None).schema
        else:
            limit.check(0, dictionary_bytes + sum(sizes))  # all stay in memory
            stream = pa.ipc.open_stream(pa.memory_map(str(path)))
            self._batches, self.schema = list(stream), stream.schema
            self._counts = [batch.num_rows for batch in self._batches]

    def groups(self) -> list[tuple[int, int]]:
        return [(count, 0) for count in self._counts]

    def load(self, group: int, names: list[str] | None) -> Any:
        wanted = self.schema.names if names is None else names
        if self._batches is not None:
            return self._batches[group].select(wanted)
        return self._reader([self.schema.get_field_index(name) for name in wanted]).get_batch(group)

    def _reader(self, columns: list[int] | None) -> Any:
        """Return a reader of a file, for one thread, of some columns or all."""
        pa = import_extra("pyarrow", READING)

        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return pa.ipc.open_file(pa.memory_map(str(self._path)), options=options)


class RowGroupCache:
    """The most recently used groups, up to a number of bytes; each is loaded by one thread only.

    Args:
        load: Loads a group.
        max_bytes: Limit of the cached bytes; the last group is always kept.
    """

    def __init__(self, load: Callable[[int], Any], max_bytes: int) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._begin()

    def get(self, group: int) -> Any:
        """Return a group, loaded or cached."""
        if self._process != os.getpid():  # forked: a lock may be held by a thread that does not exist here
            self._begin()
        with self._lock:
            kept = self._kept.get(group)
            if kept is not None:
                self._kept.move_to_end(group)
                return kept
            loading = self._loading.setdefault(group, threading.Lock())
        with loading:
            with self._lock:
                kept = self._kept.get(group)
            if kept is None:
                kept = self._load(group)
                self._keep(group, kept)
        return kept

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[int, threading.Lock] = {}
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._bytes = 0
        self._process = os.getpid()

    def _keep(self, group: int, table: Any) -> None:
        with self._lock:
            before = self._kept.pop(group, None)
            self._kept[group] = table
            self._loading.pop(group, None)
            self._bytes += table.nbytes - (0 if before is None else before.nbytes)
            while self._bytes > self._max_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.nbytes


def _described(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
