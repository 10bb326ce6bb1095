"""The edge between users and the engine: calls of a trainer come one at a time, and raise the errors of
:mod:`onebox.errors` or what the user's own code raises.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from onebox.errors import InternalError, OneboxError
from onebox.graph.capture.locate import is_users, place_of_call

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_OURS = Path(__file__).parents[1]
_LIBRARIES = frozenset({"numpy", "zmq", "msgspec", "safetensors", "psutil", "ray"})
"""Libraries that onebox calls by itself: an exception from one says nothing about the user's code."""

_USERS = "_onebox_users_code"
_within = threading.local()


_S = TypeVar("_S")


def entry(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Make a method of a trainer one that a thread runs at a time, and whose errors are for users."""
    name = "onebox.Trainer()" if method.__name__ == "__init__" else f"Trainer.{method.__name__}()"

    @functools.wraps(method)
    def call(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        own = vars(self)  # empty while it is being made
        model = own.get("model", args[0] if args else kwargs.get("model"))
        with own.get("_lock", contextlib.nullcontext()), entered(name, model):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]  # mypy gives it a named self


def entry_of_model(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function of a model, its first argument, one whose errors are for users."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with entered(f"onebox.{function.__name__}()", args[0] if args else kwargs.get("model")):
            return function(*args, **kwargs)

    return call


def inside() -> bool:
    """Return whether this thread is in a call of a trainer."""
    return bool(getattr(_within, "depth", 0))


@contextlib.contextmanager
def entered(doing: str, model: Any) -> Iterator[None]:
    """Convert exceptions that are neither onebox's nor the user's own to one that is.

    Args:
        doing: The call, as text.
        model: The model.

    Raises:
        InternalError: The code of onebox, or what it calls, has raised something else than an error of onebox.
    """
    _within.depth = getattr(_within, "depth", 0) + 1
    try:
        yield
    except (OneboxError, Warning, OSError, MemoryError):
        raise
    except Exception as error:
        if _within.depth > 1 or _is_users(error) or _does_not_fit(error):
            raise
        raise _internal(error, doing, model) from error
    finally:
        _within.depth -= 1


def _does_not_fit(error: Exception) -> bool:
    """Return whether a call has other arguments than its function takes, as of a misspelled name."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, TypeError) and innermost.filename == __file__


def users(values: Iterable[_T]) -> Iterator[_T]:
    """Yield what users give as an iterable; an exception in it is theirs, whatever it calls."""
    try:
        yield from values
    except Exception as error:
        setattr(error, _USERS, True)
        raise


def _is_users(error: Exception) -> bool:
    """Return whether the user's code has raised an exception: a function that the engine calls, or an iterable."""
    if hasattr(error, _USERS):
        return True
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_OURS):
            return False
        if is_users(frame.filename) and not _LIBRARIES.intersection(path.parts):
            return True
    return False


def _internal(error: Exception, doing: str, model: Any) -> InternalError:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_OURS)]
    at = f" at onebox/{Path(ours[-1].filename).relative_to(_OURS)}:{ours[-1].lineno}" if ours else ""
    place, said = place_of_call(), str(error).strip()
    called = f", called at {place}: {place.text}," if place else ""
    path = f"{type(model).__module__}.{type(model).__qualname__}"
    return InternalError(
        f"{doing}{called} failed for {path}: {type(error).__name__}{f': {said}' if said else ''}{at}\n"
        "  The cause is a fault of onebox and not of your script. Until it is mended, run the model on virtual devices "
        "(vgpu), operator by operator, or give another plan=; send this message, with the traceback above it, to the "
        "project's issues",
        where=str(place) if place else None,
    )
