"""Adapters from a user's data to a source or a stream: one function, `as_source`.

Optional libraries (``datasets``, ``torchdata``) are never imported here: their objects are recognised by the modules of
their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from onebox.errors import UsageError
from onebox.feed.source import Source, Stream
from onebox.feed.sources.arrays import Arrays
from onebox.feed.sources.libraries.huggingface import HuggingFace, HuggingFaceStream
from onebox.feed.sources.libraries.iterables import IterableStream, MadeStream, OneShotStream
from onebox.feed.sources.libraries.pytorch import DatasetSource, IterableDatasetStream, LoaderStream, NodeStream

ALLOWED = (
    "a Source or Stream, a torch Dataset, IterableDataset or DataLoader, a datasets.Dataset or IterableDataset, "
    "a torchdata.nodes graph, an iterable of batches, or a callable that makes one"
)
TABLES = ("pandas", "polars", "pyarrow")
"""Packages of tables, which are iterable by columns."""


def as_source(what: Any, *, batched: bool | None = None) -> Source | Stream:
    """Adapt data to the interface of a source or a stream.

    Args:
        what: A source or stream (returned unchanged); a torch ``Dataset`` (or anything else with ``__getitem__`` and
            ``__len__`` that is not iterable), ``IterableDataset`` or ``DataLoader``; a Hugging Face ``Dataset`` or
            ``IterableDataset``; a node or loader of ``torchdata.nodes``; an iterable of batches: a list, an object
            whose ``__iter__`` begins anew, a generator (valid for one epoch), or a callable that makes any of these,
            called each epoch, with ``epoch=`` and ``seed=`` if it has such parameters.
        batched: Whether an iterable or a graph of nodes gives batches (else samples); by default it does.

    Returns:
        Source | Stream: A source where samples can be read in any order, else a stream.

    Raises:
        UsageError: It is of another kind.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> source = as_source(TensorDataset(torch.arange(3), torch.arange(3) * 2))
        >>> len(source), source.decode(source.read(2), 2)
        (3, (tensor(2), tensor(4)))
    """
    if (
        isinstance(what, type)
        or what is None
        or isinstance(what, str | bytes | PurePath | Mapping | Tensor | np.ndarray)
    ):
        raise _refused(what)
    if type(what).__module__.partition(".")[0] in TABLES:
        todo = "give its columns as arrays, onebox.feed.sources.Arrays(inputs, targets), or a file of it to Parquet"
        raise UsageError(f"Data came as a {type(what).__module__}.{type(what).__name__}; {todo}.")
    if isinstance(what, Source | Stream):
        return what
    if _is_of(what, "datasets.", ("Dataset",)):
        return HuggingFace(what)
    if _is_of(what, "datasets.", ("IterableDataset",)):
        return HuggingFaceStream(what)
    if isinstance(what, DataLoader):
        return LoaderStream(what)
    if isinstance(what, IterableDataset):
        return IterableDatasetStream(what)
    if type(what) is TensorDataset and len(what.tensors) == 2:
        return Arrays(*what.tensors, where="TensorDataset")  # it can read whole batches at once
    if isinstance(what, Dataset):
        return DatasetSource(what)
    if _is_of(what, "torchdata.nodes", ("BaseNode", "Loader")):
        return NodeStream(what, batched=batched is not False)
    return _as_plain(what, batched=batched is not False)


def _as_plain(what: Any, batched: bool) -> Source | Stream:
    """Adapt an object that belongs to no known library."""
    if isinstance(what, Sequence) and len(what) and all(isinstance(part, Tensor | np.ndarray) for part in what):
        raise UsageError(
            f"A {type(what).__name__} of {len(what)} arrays is neither samples nor batches; say "
            "onebox.feed.sources.Arrays(inputs, targets), for samples that are their rows."
        )
    if hasattr(what, "__next__"):
        return OneShotStream(what, batched=batched)
    if isinstance(what, Iterable):
        return IterableStream(what, batched=batched)
    if hasattr(what, "__getitem__") and hasattr(what, "__len__"):
        return DatasetSource(what)
    if isinstance(what, Callable):  # type: ignore[arg-type]  # mypy does not accept it as a class
        return MadeStream(what, batched=batched)
    raise _refused(what)


def _is_of(what: Any, module: str, names: tuple[str, ...]) -> bool:
    """Return whether an object's class or a base class is of a module and has one of the names."""
    return any(kind.__module__.startswith(module) and kind.__name__ in names for kind in type(what).__mro__)


def _refused(what: Any) -> UsageError:
    came, todo = f"a {type(what).__name__}", f"allowed are {ALLOWED}"
    if isinstance(what, type):
        came = f"the class {what.__name__}, not an object of it"
    elif isinstance(what, str | PurePath):
        came, todo = repr(str(what)), "files are read by onebox.feed.sources, such as ImageFolder(path)"
    elif isinstance(what, Mapping) and _is_of(what, "datasets.", ("DatasetDict", "IterableDatasetDict")):
        todo = f"take one of its splits: {', '.join(map(str, what))}"
    return UsageError(f"Data came as {came}; {todo}.")
