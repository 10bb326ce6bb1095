"""Text as a file of tokens, cut into samples for a language model."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.checks import require_int
from onebox.feed.sources.formats.files import Paths, expand, unreadable
from onebox.feed.sources.formats.records import Records

DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")


class Tokens:
    """Samples of a language model from files of tokens: numbers of a fixed size, consecutively.

    Sample ``i`` has as inputs the ``length`` tokens from ``i * stride`` on, and as targets the token after each of
    them. No sample crosses the end of a file; tokens at the end that fill no sample are left out.

    Args:
        pattern: The file, or several as for :class:`onebox.feed.sources.Tars`; little-endian, without a header.
        length: Tokens of a sample.
        stride: Tokens from the beginning of a sample to that of the next; by default ``length``, which uses each
            token once.
        dtype: Type of a token in the file: uint8, uint16, uint32, int16, int32 or int64.
        offset_bytes: Bytes of a header at the beginning of each file, which are skipped.
        vocabulary: Number of valid tokens; a sample with others is an error.

    Raises:
        UsageError: A number or a type is invalid.
        DataError: A file is missing, has part of a token, or too few tokens for a sample.

    Example::

        source = Tokens("train.bin", length=1024)
        inputs, targets = source.decode(source.read(0), 0)  # int64 [1024], each
    """

    def __init__(
        self,
        pattern: Paths,
        *,
        length: int,
        stride: int | None = None,
        dtype: str = "uint16",
        offset_bytes: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        require_int("length", length, least=1)
        require_int("offset_bytes", offset_bytes, least=0)
        stride = length if stride is None else stride
        require_int("stride", stride, least=1)
        if vocabulary is not None:
            require_int("vocabulary", vocabulary, least=1)
        if dtype not in DTYPES:
            raise UsageError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}.")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._stride = stride
        self._vocabulary = vocabulary
        paths, counts, size = expand(pattern), list[int](), self._dtype.itemsize
        for path in paths:
            try:
                values_bytes = os.stat(path).st_size - offset_bytes
            except OSError as error:
                raise unreadable(path, error) from error
            if values_bytes < 0 or values_bytes % size:
                came = f"{path} has {values_bytes} bytes of tokens (after {offset_bytes})"
                raise DataError(f"{came}, no multiple of the {size} of {dtype}: say which dtype it is.", path=path)
            tokens = values_bytes // size
            if tokens <= length:
                came = f"{path} has {tokens} tokens"
                raise DataError(f"{came}, and a sample needs {length + 1}: take a smaller length.", path=path)
            counts.append((tokens - length - 1) // stride + 1)
        self._records = Records(paths, counts, (length + 1) * size, offset=offset_bytes, step_bytes=stride * size)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._records)

    def read(self, index: int) -> bytes:
        """Read the tokens of a sample, and the one after them, as stored.

        Raises:
            DataError: They cannot be read, or the file has become shorter.
        """
        return self._records.read(index)

    def decode(self, raw: bytes, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``int64 [length]`` each; they share memory.

        Raises:
            DataError: A token is not in the vocabulary.
        """
        tokens = torch.from_numpy(np.frombuffer(raw, self._dtype).astype(np.int64))
        if self._vocabulary is not None:
            wrong = ((tokens < 0) | (tokens >= self._vocabulary)).nonzero()
            if len(wrong):
                came = f"{self.name(index)}: token {int(tokens[wrong[0]])} is {int(wrong[0])} after that"
                path = self._records.place(index)[0]
                allowed = f"allowed are 0 to {self._vocabulary - 1}"
                raise DataError(f"{came}; {allowed}. See that dtype is right.", path=path, sample=index)
        return tokens[:-1], tokens[1:]

    def name(self, index: int) -> str:
        """The file, and the number of the sample's first token in it."""
        path, inside = self._records.place(index)
        return f"{path.name}: token {inside * self._stride}"
