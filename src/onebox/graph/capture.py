"""Capture: a model and a loss become one exported program, with the names of everything that it reads.

The module that is exported maps (inputs, targets) to (loss, outputs) for training and to (loss, metrics) for
evaluation. Shapes are fixed: another batch size is another capture.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from onebox.errors import CaptureError

Mode = Literal["train", "evaluate"]
Precision = Literal["fp32", "bf16"]

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, Callable[[Any, Any], Tensor]]

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent.parent


class Wrapper(nn.Module):
    """What is exported: ``model`` and ``loss`` under these two names.

    Args:
        model: The user's model. A tuple of inputs is spread over its positional arguments, a dict over its keyword
            arguments, anything else is its one argument.
        loss: Maps (outputs, targets) to a scalar.
        metrics: Each maps (outputs, targets) to a scalar; they replace the outputs.
        precision: ``bf16`` for autocast.
        device_type: The device type that autocast is for.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, metrics: Metrics | None, precision: Precision, device_type: str
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.metrics = None if metrics is None else dict(metrics)
        self.precision = precision
        self.device_type = device_type

    def forward(self, inputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """Return the loss, and the outputs (detached) or the metrics."""
        autocast = (
            torch.autocast(self.device_type, torch.bfloat16)
            if self.precision == "bf16"
            else contextlib.nullcontext()
        )
        with autocast:
            if isinstance(inputs, tuple):
                outputs = self.model(*inputs)
            elif isinstance(inputs, dict):
                outputs = self.model(**inputs)
            else:
                outputs = self.model(inputs)
            loss = self.loss(outputs, targets)
            if self.metrics is not None:
                return loss, tuple(metric(outputs, targets) for metric in self.metrics.values())
        return loss, ()


@dataclass(frozen=True, kw_only=True)
class Captured:
    """An exported model.

    Args:
        exported: From ``torch.export``.
        example: The (inputs, targets) that it was captured with.
        aliases: For each name of a parameter or buffer the first name of the same tensor; tied weights share one.
    """

    exported: ExportedProgram
    example: tuple[Any, Any]
    aliases: Mapping[str, str]


def capture(
    model: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    *,
    mode: Mode = "train",
    metrics: Metrics | None = None,
    precision: Precision = "fp32",
    device_type: str = "cpu",
) -> Captured:
    """Export a model and its loss for inputs of one shape.

    Args:
        model: The model; its parameters are not read, and its modes (train, eval) are as before afterwards.
        loss: Maps (outputs, targets) to a scalar; a module may have parameters and buffers of its own.
        example: Inputs and targets, nested tuples and dicts of tensors; only shapes and types count.
        mode: ``evaluate`` sets every module to eval.
        metrics: With ``evaluate``, more scalars of (outputs, targets).
        precision: ``bf16`` runs the model and the loss under autocast.
        device_type: The device type that autocast is for.

    Raises:
        CaptureError: The model depends on the values of tensors in a way that no graph can hold, or the loss is not
            a scalar; the message names the line.
    """
    wrapper = Wrapper(model, loss, metrics if mode == "evaluate" else None, precision, device_type)
    with _mode(model, mode), torch.random.fork_rng(devices=[]):
        try:
            exported = torch.export.export(wrapper, example, strict=False)
        except CaptureError:
            raise
        except Exception as error:
            raise _explain(error, model) from error
    shape = _first_output_shape(exported)
    if shape != ():
        raise CaptureError(
            f"the loss has the shape {list(shape)}, but must be a scalar: reduce it, by .mean() for example"
        )
    return Captured(exported=exported, example=example, aliases=_aliases(wrapper))


@contextlib.contextmanager
def _mode(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Put a model in a mode, and every module back in its own afterwards.

    A model that is in training mode is taken as it is: modules that the user has set to eval stay so.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        if mode == "evaluate":
            model.eval()
        elif not model.training:
            model.train()
        yield
    finally:
        for module, training in before:
            module.training = training


def _first_output_shape(exported: ExportedProgram) -> tuple[int, ...]:
    output = next(node for node in exported.graph.nodes if node.op == "output")
    name = exported.graph_signature.user_outputs[0]
    for node in output.args[0]:
        if getattr(node, "name", None) == name:
            return tuple(node.meta["val"].shape)
    raise CaptureError("the loss must be a tensor that the graph computes; what came is a constant or no tensor")


def _aliases(wrapper: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [
        *wrapper.named_parameters(remove_duplicate=False),
        *wrapper.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        aliases[name] = first.setdefault(id(tensor), name)
    return aliases


def _explain(error: Exception, model: nn.Module) -> CaptureError:
    """Turn what the exporter raised into one message that names the user's line."""
    where = line = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if frame.filename.startswith("<") or path.is_relative_to(_TORCH) or path.is_relative_to(_HERE):
            continue
        if "contextlib" in path.name or "importlib" in path.parts:
            continue
        where, line = f"{frame.filename}:{frame.lineno}", frame.line
    reason = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
    data_dependent = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
    place = f" at {where}: {line}" if where else ""
    if data_dependent:
        advice = (
            "The line makes a decision on the value of a tensor. Use torch.where or torch.cond instead, or compute "
            "the decision from shapes"
        )
    else:
        advice = f"The line raised {type(error).__name__} under torch.export; the model may also fail without onebox"
    return CaptureError(
        f"{type(model).__name__} cannot be captured as a graph{place}\n"
        f"  {reason}\n"
        f"  {advice}. A model that cannot be captured runs on a virtual device (vgpu), operator by operator.",
        where=where,
    )
