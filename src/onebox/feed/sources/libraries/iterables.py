"""Streams over iterables of batches (or of samples): repeatable ones, one-shot ones, and callables that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from onebox.errors import UsageError
from onebox.feed.sources.libraries.error_context import iterate_with_context, kind_of


class IterableStream:
    """An iterable that begins anew for each iterator, such as a list of batches.

    Args:
        items: The iterable; its ``set_epoch``, if any, is called each epoch.
        batched: Whether its items are batches.
    """

    def __init__(self, items: Iterable[Any], *, batched: bool = True) -> None:
        self.batched = batched
        self._items = items

    def __len__(self) -> int:
        """Return the number of items, where the iterable has a length; else raise a TypeError."""
        return length_of(self._items)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch, in the iterable's own order."""
        tell_epoch(self._items, epoch)
        return iterate_with_context(self._items, self.name)

    def name(self, index: int) -> str:
        """Number of an item, and the class of the iterable."""
        return f"{'batch' if self.batched else 'sample'} {index} of {kind_of(self._items)}"


class OneShotStream:
    """An iterator, such as a generator: it has one epoch, which is the first.

    Args:
        items: The iterator.
        batched: Whether its items are batches.
    """

    def __init__(self, items: Iterator[Any], *, batched: bool = True) -> None:
        self.batched = batched
        self._items = items
        self._begun = False

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin the only epoch.

        Raises:
            UsageError: It is not the first epoch, or has begun before.
        """
        if epoch or self._begun:
            came = f"epoch {epoch} is asked of {kind_of(self._items)}, which can be gone through only once"
            todo = "give a callable that makes one (the generator's function, not yet called), a list, or a Dataset"
            raise UsageError(f"{came}; for more than one epoch, or for starting one again, {todo}.")
        self._begun = True
        return iterate_with_context(self._items, self.name)

    def name(self, index: int) -> str:
        """Number of an item, and the class of the iterator."""
        return f"{'batch' if self.batched else 'sample'} {index} of {kind_of(self._items)}"


class MadeStream:
    """A callable that makes an iterable each epoch, such as a generator function.

    Args:
        make: Called each epoch, with ``epoch=`` and ``seed=`` where it has parameters of these names.
        batched: Whether its items are batches.

    Raises:
        UsageError: It requires other arguments.
    """

    def __init__(self, make: Callable[..., Iterable[Any]], *, batched: bool = True) -> None:
        self.batched = batched
        self._make = make
        self._known = _known_parameters(make)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch, in the order of the iterable.

        Raises:
            UsageError: The result is not iterable.
        """
        values = {"epoch": epoch, "seed": seed}
        made = self._make(**{name: values[name] for name in self._known})
        if not isinstance(made, Iterable):
            raise UsageError(f"{kind_of(self._make)} gave a {kind_of(made)}; it has to give an iterable of batches.")
        return iterate_with_context(made, self.name)

    def name(self, index: int) -> str:
        """Number of an item, and the name of the callable."""
        return f"{'batch' if self.batched else 'sample'} {index} of {kind_of(self._make)}"


def tell_epoch(what: Any, epoch: int) -> None:
    """Call an object's ``set_epoch``, which samplers and data sets may have."""
    set_epoch = getattr(what, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def length_of(what: Any) -> int:
    """Return the length of an object; any failure becomes a TypeError.

    Raises:
        TypeError: It has none.
    """
    try:
        return len(what)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"{kind_of(what)} does not say how long it is") from error


def _known_parameters(make: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = tuple(p.name for p in parameters if p.name in ("epoch", "seed") and p.kind is not positional[0])
    asked = [p.name for p in parameters if p.name not in known and p.default is p.empty and p.kind not in free]
    if asked:
        came = f"{kind_of(make)} asks for {', '.join(asked)}"
        raise UsageError(f"{came}; what makes the batches of an epoch is given epoch and seed at most.")
    return known
