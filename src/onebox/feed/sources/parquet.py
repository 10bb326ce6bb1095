"""Tables in files of Parquet and Arrow, a sample a row."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.extras import import_extra
from onebox.feed.checks import check_classes, require_int
from onebox.feed.decode import ImageDecoder
from onebox.feed.sources.formats.columns import Columns
from onebox.feed.sources.formats.files import Paths, expand
from onebox.feed.sources.formats.row_groups import READING, RowGroupCache, RowGroups

CACHE_BYTES = 256 << 20
MAX_GROUP_BYTES = 4 << 30  # limit of an unpacked row group; usual ones have some megabytes


class Parquet:
    """Rows of tables in Parquet, Arrow or Feather files, in any order.

    A row is read with its row group (Parquet) or record batch (Arrow), the most recent of which are cached. Reading in
    a random order is only fast if these are small (some hundred rows) or all of them fit the cache.

    Pictures are columns of bytes, or in Hugging Face's form; lists and numbers become tensors of the types in the file;
    strings stay strings. Tensors of a fixed shape (Arrow's extension type) have theirs.

    Args:
        pattern: The files, as for :class:`onebox.feed.sources.Tars`; those that end in ``.arrow``, ``.feather`` or
            ``.ipc`` are Arrow's, files or streams; others are Parquet.
        inputs: A column, or several, which make a tuple. By default, where there are two columns and one of them is
            called label (or target, class, ...), the other; else samples are dicts of all columns.
        targets: A column; None for samples that are inputs only.
        decoder: Decoder of pictures.
        images: Columns whose bytes are pictures; by default all columns of bytes.
        classes: Names of the classes; by default those in Hugging Face's metadata in the file, if any.
        cache_bytes: Limit of the unpacked bytes of cached groups; one is always kept.

    Attributes:
        classes: Names of the classes, or None.

    Raises:
        UsageError: A column is missing.
        MissingExtra: pyarrow is not installed.
        DataError: A file is missing, damaged, or has other columns than the first.

    Example::

        source = Parquet("train-*.parquet", inputs="image", targets="label")
    """

    def __init__(
        self,
        pattern: Paths,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        decoder: ImageDecoder | None = None,
        images: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        require_int("cache_bytes", cache_bytes, least=0)
        self._groups = RowGroups(expand(pattern), max_bytes=MAX_GROUP_BYTES)
        schema = self._groups.schema
        where = self._groups.paths[0].name
        self._columns = Columns(schema.names, where, inputs=inputs, targets=targets, decoder=decoder, images=images)
        self._groups.choose(self._columns.names)
        self._cache = RowGroupCache(self._groups.load, cache_bytes)
        named = classes if classes is not None else _noted_classes(schema, self._columns.targets)
        self.classes = None if named is None else check_classes(named)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._groups)

    @functools.cached_property
    def labels(self) -> Tensor:
        """The targets of all rows, ``int64 [N]``, -1 where there is none; only their column is read.

        Raises:
            UsageError: There are no targets, or they are not whole numbers.
            DataError: A file is damaged.
        """
        pa = import_extra("pyarrow", READING)

        name = self._columns.targets
        if name is None or not pa.types.is_integer(self._groups.schema.field(name).type):
            raise UsageError(
                f"{self._groups.paths[0].name}: rows have no classes; targets is no column of whole numbers."
            )
        tables = [self._groups.load(group, [name]) for group in self._groups]
        columns = [table.column(name).cast(pa.int64(), safe=False).fill_null(-1).to_numpy() for table in tables]
        return torch.from_numpy(np.concatenate(columns))

    def read(self, index: int) -> dict[str, Any]:
        """The values of a row by column: numbers, bytes, strings, arrays.

        Raises:
            DataError: Its group cannot be read.
        """
        group, row = self._groups.place(index)
        table = self._cache.get(group)
        try:
            return {name: _plain(table.column(name)[row]) for name in self._columns.names}
        except (ValueError, TypeError, NotImplementedError, OSError) as error:
            path = self._groups.path(group)
            problem = f"{self.name(index)} cannot be read: {error}"
            raise DataError(f"{problem}. Fetch the file again.", path=path, sample=index) from error

    def decode(self, raw: dict[str, Any], index: int) -> Any:
        """The sample of a row.

        Raises:
            DataError: A value is missing or damaged.
        """
        path = self._groups.path(self._groups.place(index)[0])
        return self._columns.sample(raw, index, where=self.name(index), path=path)

    def name(self, index: int) -> str:
        """The file, and the number of the row in it."""
        path, row = self._groups.row_of_file(index)
        return f"{path.name}: row {row}"


def _plain(scalar: Any) -> Any:
    """Convert an Arrow value to Python, or to an array of the same number type."""
    pa = import_extra("pyarrow", READING)

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        stored = _plain(scalar.value)
        if not isinstance(kind, pa.FixedShapeTensorType):
            return stored
        if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
            raise ValueError(f"its tensors are stored in the order {list(kind.permutation)} of their dimensions")
        return np.reshape(stored, kind.shape)
    if _is_list(kind):
        return _array(scalar.values)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.asarray(scalar.as_py(), dtype=kind.to_pandas_dtype())
    return scalar.as_py()


def _array(values: Any) -> Any:
    """Convert an Arrow list: to an array if it consists of numbers and has one shape."""
    pa = import_extra("pyarrow", READING)

    leaf, shape = values, [len(values)]
    while _is_list(leaf.type):
        if leaf.null_count:
            raise ValueError("a list in it is empty (null)")
        lengths = (
            set(leaf.value_lengths().to_pylist())
            if not pa.types.is_fixed_size_list(leaf.type)
            else {leaf.type.list_size}
        )
        if len(lengths) > 1:
            raise ValueError(f"its lists have the lengths {sorted(lengths)[:5]}, and one shape is needed")
        shape.append(lengths.pop() if lengths else 0)
        leaf = leaf.flatten()
    if not (pa.types.is_integer(leaf.type) or pa.types.is_floating(leaf.type) or pa.types.is_boolean(leaf.type)):
        return values.to_pylist()
    if leaf.null_count:
        raise ValueError(f"{leaf.null_count} of its numbers are empty (null)")
    return leaf.to_numpy(zero_copy_only=False).reshape(shape)


def _is_list(kind: Any) -> bool:
    pa = import_extra("pyarrow", READING)

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _noted_classes(schema: Any, targets: str | None) -> list[str] | None:
    """Return the class names in the metadata that Hugging Face's library writes to the schema."""
    try:
        noted = json.loads((schema.metadata or {})[b"huggingface"])
        names = noted["info"]["features"][targets]["names"]
        return [str(name) for name in names] or None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
