"""Columns of tables as samples: the choice of inputs and targets, and the conversion of values to tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.decode import ImageDecoder
from onebox.feed.sources.formats.files import read_file

TARGETS = ("label", "labels", "target", "targets", "fine_label", "class")
"""Default names of the column of targets, the first one present."""


class Columns:
    """The columns of a sample.

    Args:
        there: Names of all columns of the table.
        where: Name of the table, for messages.
        inputs: A column, or several, which make a tuple. By default: where there are two columns and one of them has
            a usual name of targets, the other.
        targets: A column; None for samples that are inputs only.
        decoder: Decoder of pictures.
        images: Columns whose bytes are pictures; by default all columns of bytes.
        beside: Whether a picture that has a path in place of bytes is read from there; not where the table is a file
            from elsewhere.

    Attributes:
        names: The columns to read; all, for samples that are dicts, where inputs are not known.
        targets: The column of targets, or None.

    Raises:
        UsageError: A column is missing, or targets are given without inputs.
    """

    def __init__(
        self,
        there: Sequence[str],
        where: str,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        decoder: ImageDecoder | None = None,
        images: Sequence[str] | None = None,
        beside: bool = False,
    ) -> None:
        if inputs is None and targets is None:
            inputs, targets = _guess(there)
        if inputs is None and targets is not None:
            raise UsageError(
                f"{where}: targets is {targets!r}, and inputs is missing; say which of {list(there)} it is."
            )
        self._single = isinstance(inputs, str)
        self.inputs = [inputs] if isinstance(inputs, str) else list(inputs or ())
        self.targets = targets
        self.names = [*self.inputs, *([targets] if targets is not None else [])] or list(there)
        self._decoder = decoder
        self._beside = beside
        self._images = None if images is None else tuple(images)
        for name in (*self.names, *(images or ())):
            if name not in there:
                raise UsageError(f"{where} has no column {name!r}; there are {', '.join(there)}.")

    def sample(self, values: Mapping[str, Any], index: int, *, where: str, path: object = None) -> Any:
        """Return the sample of a row.

        Args:
            values: Values by column.
            index: Number of the row, for errors.
            where: Name of the row, for messages.
            path: The file, for errors.

        Returns:
            Any: Inputs and targets, or inputs only, or a dict by column where inputs are not known.

        Raises:
            DataError: A value is missing or damaged.
        """
        made = {name: self._value(name, values[name], index, where, path) for name in self.names}
        if not self.inputs:
            return made
        inputs = made[self.inputs[0]] if self._single else tuple(made[name] for name in self.inputs)
        return inputs if self.targets is None else (inputs, made[self.targets])

    def _value(self, name: str, value: Any, index: int, where: str, path: object) -> Any:
        place = f"{where}, column {name!r}"
        if isinstance(value, Mapping) and set(value) == {"bytes", "path"}:  # Hugging Face's pictures
            follow = self._beside and value["bytes"] is None and value["path"]
            value = read_file(value["path"], sample=index) if follow else value["bytes"]
        if value is None:
            raise DataError(f"{place} is empty; fill it, or take the row away.", path=path, sample=index)
        if isinstance(value, bytes) and (self._images is None or name in self._images):
            self._decoder = self._decoder or ImageDecoder()  # tables without pictures do without Pillow
            return self._decoder.decode(value, where=place, path=path, sample=index)
        if isinstance(value, str | bytes | Tensor | Mapping):
            return value
        try:
            return _to_tensor(value)
        except (ValueError, TypeError) as error:
            came = f"{place} has a {type(value).__name__} that is no tensor: {error}"
            raise DataError(f"{came}.", path=path, sample=index) from error


def _guess(there: Sequence[str]) -> tuple[str | None, str | None]:
    targets = next((name for name in TARGETS if name in there), None)
    if len(there) != 2 or targets is None:
        return None, None
    return next(name for name in there if name != targets), targets


def _to_tensor(value: Any) -> Any:
    pillow = sys.modules.get("PIL.Image")  # a picture of its would have imported it
    if pillow is not None and isinstance(value, pillow.Image):
        pixels = np.array(value)
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    array = np.array(value)  # a copy: read data may be shared, or read-only
    if array.dtype.kind in "US":
        return value
    if array.dtype.kind not in "biufc":
        raise ValueError(f"values of type {array.dtype}")
    return torch.from_numpy(array)
