"""Names of data for messages, and errors that name the sample."""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from onebox.errors import DataError, OneboxError


def kind_of(what: Any) -> str:
    """Return the name of a function or class, or of an object's class, for messages."""
    if isinstance(what, functools.partial):
        return kind_of(what.func)
    return getattr(what, "__qualname__", type(what).__qualname__)


def origin(dataset: Any, index: int) -> str | None:
    """Return the file of a sample of a data set, from the lists of torchvision's data sets; ``None`` without such a
    list.

    Args:
        dataset: The data set; PyTorch's subsets and concatenations are unwrapped.
        index: Number of the sample.
    """
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None:
        return origin(inner, int(indices[index]))
    ends = getattr(dataset, "cumulative_sizes", None)
    if isinstance(ends, list):
        number = bisect.bisect_right(ends, index)
        return origin(dataset.datasets[number], index - (ends[number - 1] if number else 0))
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or not 0 <= index < len(samples):
        return None
    first = samples[index][0] if isinstance(samples[index], tuple) and samples[index] else samples[index]
    return os.fspath(first) if isinstance(first, str | os.PathLike) else None


@contextmanager
def with_sample_context(where: str, index: int, doing: str = "read", path: object = None) -> Iterator[None]:
    """Add the sample to errors of a user's code.

    Args:
        where: Name of the data, for messages.
        index: Number of the sample.
        doing: The operation, as a participle.
        path: The file, where it is known.

    Raises:
        DataError: In place of any exception that is not onebox's own, which is its cause.
    """
    try:
        yield
    except OneboxError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(f"{where} cannot be {doing}: {problem}.", path=path, sample=index) from error


def iterate_with_context(items: Iterable[Any], name: Callable[[int], str]) -> Iterator[Any]:
    """Iterate over a user's items, and add the item to errors.

    Args:
        items: The items; their iterator is closed, if it has ``close``, when this ends or is closed.
        name: Returns the name of the item with a number.

    Raises:
        DataError: In place of any exception that is not onebox's own, which is its cause.
    """
    index = 0
    with with_sample_context(name(index), index):
        iterator = iter(items)
    try:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except Exception:  # names are made only for errors, not for every item
                with with_sample_context(name(index), index):
                    raise
            yield item
            index += 1
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()
