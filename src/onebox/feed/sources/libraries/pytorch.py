"""Adapters for PyTorch's data sets, iterable data sets, loaders, and the nodes of ``torchdata``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from onebox.errors import UsageError
from onebox.feed.sources.libraries.error_context import iterate_with_context, kind_of, origin, with_sample_context
from onebox.feed.sources.libraries.iterables import length_of, tell_epoch


class DatasetSource:
    """A data set of numbered samples: ``read`` is ``dataset[index]``, and nothing is left to decode.

    It is called by several threads at once, as PyTorch's loader calls it in several processes: a data set that seeks in
    a shared file has to open one for each thread.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``; such as a ``torch.utils.data.Dataset``.

    Raises:
        UsageError: It has no length.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        try:
            self._count = len(dataset)
        except (TypeError, NotImplementedError) as error:
            todo = "give it __len__, or make it an IterableDataset"
            raise UsageError(f"The data set {kind_of(dataset)} does not say how long it is; {todo}.") from error

    def __len__(self) -> int:
        """Number of samples."""
        return self._count

    def read(self, index: int) -> Any:
        """Read the sample from the data set.

        Raises:
            DataError: The data set raised an exception, which is the cause.
        """
        try:
            return self.dataset[index]
        except Exception:  # names are made only for errors, not for every sample
            with with_sample_context(self.name(index), index, path=self._origin(index)):
                raise

    def decode(self, raw: Any, index: int) -> Any:
        """Return the sample unchanged."""
        return raw

    def name(self, index: int) -> str:
        """The sample's number and the class of the data set, or the file where the data set tells."""
        path = self._origin(index)
        return f"sample {index} of {kind_of(self.dataset)}{f' ({path})' if path else ''}"

    def _origin(self, index: int) -> str | None:
        try:
            return origin(self.dataset, index)
        except (TypeError, LookupError, AttributeError, ValueError):  # it has such attributes with another meaning
            return None


class IterableDatasetStream:
    """An iterable data set, read by one reader: no item is left out or repeated.

    Args:
        dataset: The data set; its ``set_epoch``, if any, is called each epoch.
        batched: Whether its items are batches.
    """

    def __init__(self, dataset: IterableDataset[Any], *, batched: bool = False) -> None:
        self.batched = batched
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of items, where the data set has a length; else raise a TypeError."""
        return length_of(self.dataset)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch, in the order of the data set."""
        tell_epoch(self.dataset, epoch)
        return iterate_with_context(self.dataset, self.name)

    def name(self, index: int) -> str:
        """The sample's number, and the class of the data set."""
        return f"{'batch' if self.batched else 'sample'} {index} of {kind_of(self.dataset)}"


class LoaderStream:
    """A loader, unchanged: its sampler, its collation, its workers.

    The order of a shuffling loader follows from the seed and the epoch alone: during an epoch, the generators of the
    loader and of its samplers are replaced by others, seeded by both and by the seed of the user's generator. A
    sampler's ``set_epoch`` is called. Samplers that draw from the global generators are not repeatable, nor are random
    transforms where the loader has no workers.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batched = loader.batch_sampler is not None or loader.batch_size is not None

    def __len__(self) -> int:
        """Return the number of items in an epoch, from the loader; raise a TypeError without a length."""
        return length_of(self.loader)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch; closing the iterator ends the loader's workers, unless they are persistent."""
        loader = self.loader
        samplers = _with_inner([loader.batch_sampler, getattr(loader, "sampler", None)])
        for part in (*samplers, loader.dataset):
            tell_epoch(part, epoch)
        with _seeded([loader, *samplers], seed, epoch):
            yield from iterate_with_context(loader, self.name)

    def name(self, index: int) -> str:
        """The batch's number, and the classes of loader and data set."""
        what = "batch" if self.batched else "sample"
        return f"{what} {index} of {kind_of(self.loader)} over {kind_of(self.loader.dataset)}"


class NodeStream:
    """A graph of ``torchdata.nodes``, reset at the beginning of each epoch; its threads end with the epoch.

    Its samplers get the epoch and seeds like those of :class:`LoaderStream`.

    Args:
        root: The root, or a ``torchdata.nodes.Loader`` around it, whose own state is not used.
        batched: Whether its items are batches.
    """

    def __init__(self, root: Any, *, batched: bool = True) -> None:
        self.batched = batched
        self.root = getattr(root, "root", root)
        self._nodes = _nodes(self.root)
        self._first = [getattr(node, "epoch", 0) for node in self._nodes]

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch."""
        samplers = _with_inner([getattr(node, "sampler", None) for node in self._nodes])
        for node, first in zip(self._nodes, self._first, strict=True):
            _to_epoch(node, first, epoch)
        with _seeded(samplers, seed, epoch):
            try:
                self.root.reset()
                yield from iterate_with_context(self.root, self.name)
            finally:
                for node in self._nodes:
                    _end_threads(node)

    def name(self, index: int) -> str:
        """The item's number, and the class of the root."""
        return f"{'batch' if self.batched else 'sample'} {index} of {kind_of(self.root)}"


def _nodes(root: Any) -> list[Any]:
    """Return the nodes of a graph, the root first: those that a node has as attributes, or in a mapping of them."""
    base = next(kind for kind in type(root).__mro__ if kind.__name__ == "BaseNode")
    found: list[Any] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, base) or any(node is other for other in found):
            continue
        found.append(node)
        for value in vars(node).values():
            waiting.extend(value.values() if isinstance(value, Mapping) else [value])
    return found


def _to_epoch(node: Any, first: int, epoch: int) -> None:
    """Set a node so that its next reset begins an epoch as if the earlier ones had been consumed.

    Nodes that count epochs advance when they are reset after they have ``_started``.
    """
    if not hasattr(node, "_started"):
        return
    node._started = False
    if hasattr(node, "epoch_updater"):
        for _ in range(epoch):
            first = node.epoch_updater(first)
        node.epoch = first
    elif hasattr(node, "_epoch"):
        node._epoch = epoch


def _end_threads(node: Any) -> None:
    """End the threads, or processes, of a node that reads ahead, which would otherwise wait for garbage collection."""
    end = getattr(getattr(node, "_it", None), "_shutdown", None)
    if callable(end):
        end()


def _with_inner(samplers: list[Any]) -> list[Any]:
    """Return samplers, and those that they wrap, each once."""
    found: list[Any] = []
    waiting = list(samplers)
    while waiting:
        sampler = waiting.pop()
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            waiting.append(getattr(sampler, "sampler", None))
    return found


@contextmanager
def _seeded(holders: list[Any], seed: int, epoch: int) -> Iterator[None]:
    """Replace generators by ones seeded from numbers only, inside the ``with`` block."""
    kept = [(holder, holder.generator) for holder in holders if hasattr(holder, "generator")]
    try:
        for holder, own in kept:
            base = own.initial_seed() if isinstance(own, torch.Generator) else ""
            digest = hashlib.blake2b(f"onebox.feed.loader {seed} {epoch} {base}".encode(), digest_size=8).digest()
            holder.generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        yield
    finally:
        for holder, own in kept:
            holder.generator = own
