"""Data sets of Hugging Face's library `datasets`, which is never imported here."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.checks import check_classes
from onebox.feed.decode import ImageDecoder
from onebox.feed.sources.formats.columns import Columns
from onebox.feed.sources.libraries.error_context import iterate_with_context, with_sample_context
from onebox.feed.sources.libraries.iterables import tell_epoch

FORMATS = (None, "torch", "numpy", "custom")
"""Supported formats of a data set: plain, tensors, arrays, and a user's transform."""


class HuggingFace:
    """A ``datasets.Dataset``, a sample a row.

    Without a format, pictures are read as bytes and decoded here, by any number of threads. With the format of torch or
    NumPy, or with a transform, values are used unchanged.

    Args:
        dataset: The data set.
        inputs: A column, or several, which make a tuple. By default, where there are two columns and one of them is
            called label (or target, class, ...), the other; else samples are dicts of all columns.
        targets: A column; None for samples that are inputs only.
        decoder: Decoder of pictures.

    Attributes:
        classes: Names of the classes, where the targets are labels of classes; or None.

    Raises:
        UsageError: A column is missing, or the format is unsupported.
        DataError: The data set is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        decoder: ImageDecoder | None = None,
    ) -> None:
        form = dataset.format["type"]
        if form not in FORMATS:
            raise UsageError(f"The data set has the format {form!r}; say with_format('torch'), or with_format(None).")
        self._where = _where(dataset)
        if not len(dataset):
            raise DataError(f"{self._where} has no rows.")
        self._dataset = _undecoded(dataset) if form is None else dataset
        there = list(dataset[0]) if form == "custom" else list(dataset.format["columns"])
        images = [name for name in _pictures(dataset) if name in there]
        self._columns = Columns(
            there, self._where, inputs=inputs, targets=targets, decoder=decoder, images=images, beside=True
        )
        self.classes = _classes(dataset, self._columns)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._dataset)

    @functools.cached_property
    def labels(self) -> Tensor:
        """The targets of all rows, ``int64 [N]``; only their column is read.

        Raises:
            UsageError: There are no targets, or they are not whole numbers.
        """
        name = self._columns.targets
        values = np.array([]) if name is None else np.array(self._dataset.with_format(None)[name][:])
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise UsageError(f"{self._where}: rows have no classes; targets is no column of whole numbers.")
        return torch.from_numpy(values.astype(np.int64))

    def read(self, index: int) -> dict[str, Any]:
        """Read a row in the data set's form.

        Raises:
            DataError: The data set raised an exception, which is the cause.
        """
        with with_sample_context(self.name(index), index):
            return self._dataset[index]

    def decode(self, raw: dict[str, Any], index: int) -> Any:
        """The sample of a row.

        Raises:
            DataError: A value is missing or damaged.
        """
        return self._columns.sample(raw, index, where=self.name(index))

    def name(self, index: int) -> str:
        """The data set, its split, and the number of the row."""
        return f"{self._where}: row {index}"


class HuggingFaceStream:
    """A ``datasets.IterableDataset``, a sample a row, read by one reader; it gets each epoch's number.

    Args:
        dataset: The data set.
        inputs: As for :class:`HuggingFace`.
        targets: Likewise.
        decoder: Likewise.

    Attributes:
        batched: False; a row is a sample.

    Raises:
        UsageError: A column is missing.
    """

    batched = False

    def __init__(
        self,
        dataset: Any,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        decoder: ImageDecoder | None = None,
    ) -> None:
        self._dataset = _undecoded(dataset)
        self._where = _where(dataset)
        self._make = functools.partial(
            Columns, where=self._where, inputs=inputs, targets=targets, decoder=decoder, images=_pictures(dataset),
            beside=True,
        )  # fmt: skip
        self._columns = self._make(dataset.column_names) if dataset.column_names else None

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch; a data set that shuffles does so by its own seed and the epoch."""
        tell_epoch(self._dataset, epoch)
        for index, row in enumerate(iterate_with_context(self._dataset, self.name)):
            columns = self._columns or self._make(list(row))
            self._columns = columns
            yield columns.sample(row, index, where=self.name(index))

    def name(self, index: int) -> str:
        """The data set, its split, and the number of the row."""
        return f"{self._where}: row {index}"


def _undecoded(dataset: Any) -> Any:
    """Return the data set with its pictures as bytes."""
    for name, feature in (dataset.features or {}).items():
        if _is_picture(feature) and feature.decode:
            dataset = dataset.cast_column(name, type(feature)(mode=feature.mode, decode=False))
    return dataset


def _pictures(dataset: Any) -> list[str]:
    """Return the columns that are pictures; others may be bytes, too."""
    return [name for name, feature in (dataset.features or {}).items() if _is_picture(feature)]


def _is_picture(feature: Any) -> bool:
    return type(feature).__name__ == "Image" and type(feature).__module__.startswith("datasets.")


def _classes(dataset: Any, columns: Columns) -> tuple[str, ...] | None:
    names = getattr((dataset.features or {}).get(columns.targets), "names", None)
    return check_classes(names) if names else None


def _where(dataset: Any) -> str:
    parts = (dataset.info.builder_name, dataset.split)
    return " ".join(str(part) for part in parts if part) or f"datasets.{type(dataset).__name__}"
