"""The line of the user's code behind an exception or a node of a graph, and errors that name it."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

from onebox.errors import CaptureError

_OURS = (Path(torch.__file__).parent, Path(__file__).parents[2])
_STANDARD = Path(sysconfig.get_path("stdlib"))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')

_MODULES = Path(torch.nn.modules.__file__).parent

_VIRTUAL = "A model that cannot be captured runs on a virtual device (vgpu), operator by operator."


class SourceLocation(NamedTuple):
    """A line of source.

    Args:
        file: Path.
        line: Number, from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The line itself, without its indentation."""
        return linecache.getline(self.file, self.line).strip()


def at_line(place: SourceLocation | None) -> str:
    """Return the words of an error that name a line; none where it is not known."""
    return f" at {place}: {place.text}" if place else ""


def place_of_error(error: BaseException) -> SourceLocation | None:
    """Return the innermost line on the way to an exception that is neither PyTorch's nor onebox's.

    An exception of a repeated trace quotes the lines that made the graph.
    """
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(line)) for file, line in _FRAME.findall(str(error))]
    return _innermost(SourceLocation(file, line) for file, line in frames)


def place_of_call() -> SourceLocation | None:
    """Return the innermost line on the way here that is neither PyTorch's nor onebox's."""
    return _innermost(SourceLocation(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())


def place_of_node(node: fx.Node) -> SourceLocation | None:
    """Return the innermost line that made a node and is neither PyTorch's nor onebox's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return _innermost(SourceLocation(file, int(line)) for file, line in frames)


def layer_of_node(node: fx.Node) -> str:
    """Return the path of the innermost module that made a node, or the one that it is the gradient of; may be empty."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(where[0]) for where in stack.values()]
    return paths[-1].split("@")[0] if paths else ""


def _innermost(places: Iterable[SourceLocation]) -> SourceLocation | None:
    found = [place for place in places if is_users(place.file)]
    return found[-1] if found else None


def is_users(file: str) -> bool:
    """Return whether a file belongs to neither PyTorch, onebox nor the standard library."""
    path = Path(file)
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    if file.startswith("<") or (path.is_relative_to(_STANDARD) and not installed):
        return False
    return not any(path.is_relative_to(folder) for folder in _OURS)


def refusal(
    what: str, place: SourceLocation | None, reason: str, advice: str, *, layer: tuple[str, str] | None = None
) -> CaptureError:
    """Return the error for something that a graph cannot hold.

    Args:
        what: What cannot be captured, such as the class of the model.
        place: The line that caused it, where it is known.
        reason: The cause.
        advice: The remedy.
        layer: The path and the class of the module that caused it, where it is known.
    """
    where = at_line(place)
    if layer is not None and layer[0]:
        where += f" (layer {layer[0]}, {layer[1]})" if place else f" at layer {layer[0]}, {layer[1]}"
    return CaptureError(
        f"{what} cannot be captured as a graph{where}\n  {reason}\n  {advice}. {_VIRTUAL}",
        where=str(place) if place else None,
    )


def node_refusal(node: fx.Node, reason: str, advice: str) -> CaptureError:
    """Return the error for a node that a worker cannot run."""
    return refusal("The model", place_of_node(node), reason, advice)


def _is_check_of_module(error: Exception) -> bool:
    """Return whether a layer of PyTorch has refused its input by itself, as a recurrent one does a wrong state."""
    frames = traceback.extract_tb(error.__traceback__)
    refuses = isinstance(error, ValueError | RuntimeError | AssertionError) and not isinstance(
        error, NotImplementedError
    )
    return refuses and bool(frames) and Path(frames[-1].filename).parent == _MODULES


def explain(
    error: Exception,
    name: str,
    doing: str = "while it was traced",
    layer: tuple[str, str] | None = None,
    refused: str | None = None,
) -> CaptureError:
    """Convert an exception during a capture to one error that names the user's line.

    Args:
        error: The exception.
        name: The class of the model.
        doing: The phase of the capture, as text.
        layer: The path and the class of the module that was computed.
        refused: The reason for which plain PyTorch refuses it, where it is known to do so.
    """
    place = place_of_error(error)
    reason = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return refusal(
            name,
            place,
            reason.split(" (unhinted")[0],
            "The line decides by the value of a tensor, which a graph cannot do: use torch.where, or decide by shapes",
            layer=layer,
        )
    if refused or _is_check_of_module(error):
        where = at_line(place)
        where += f" (layer {layer[0]}, {layer[1]})" if layer is not None and layer[0] else ""
        return CaptureError(
            f"{name} and its loss cannot be computed for this batch{where}\n  {refused or reason}\n"
            "  PyTorch itself refuses it: use inputs and targets of shapes and types that fit the model and the loss",
            where=str(place) if place else None,
            unfit=True,
        )
    line = "The line" if place else "The model"
    advice = f"{line} raised {type(error).__name__} {doing}; the model may also fail without onebox"
    return refusal(name, place, reason, advice, layer=layer)
