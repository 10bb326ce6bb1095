"""Capture: a model and a loss become one exported program, with the names of everything that it reads.

The module that is exported maps (inputs, targets) to the loss and, for evaluation, metrics. Shapes are fixed: another
batch size is another capture.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from onebox.errors import CaptureError
from onebox.graph.front import Front, OnDevice
from onebox.graph.host import HostDevices, on_host
from onebox.graph.locate import explain, node_refusal
from onebox.graph.portable import bfloat16_autocast, portable_operators

Mode = Literal["train", "evaluate"]
Precision = Literal["fp32", "bf16", "auto"]
"""Of a whole run; with ``auto`` it is captured as ``fp32``, and its plan says which stages have another one."""

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, Callable[[Any, Any], Tensor]]

_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")
"""Loggers of PyTorch that tell of what the error tells again."""

_RECURRENT = r"The tensor attributes? (self\.[\w.]*\._flat_weights\[\d+\](, )?)+ (was|were) assigned"
"""A warning for every recurrent layer: it lists its parameters anew, under a name of its own."""


class Wrapper(nn.Module):
    """What is exported: ``model`` and ``loss`` under these two names.

    Args:
        model: The user's model. A tuple of inputs is spread over its positional arguments, a dict over its keyword
            arguments, anything else is its one argument.
        loss: Maps (outputs, targets) to a scalar.
        metrics: Each maps (outputs, targets) to a scalar; ``None`` for training.
        precision: ``bf16`` for autocast; any other one leaves the model as it is.
        on_device: Maps inputs to those of the model; no part of it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        metrics: Metrics | None,
        precision: Precision,
        on_device: OnDevice | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.metrics = dict(metrics or {})
        self.precision = precision
        self._front = None if on_device is None else Front(on_device)

    def forward(self, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Return the loss and the metrics."""
        try:
            with HostDevices(), _assignments_written(self):
                given = inputs if self._front is None else self._front.run(inputs, training=self.model.training)
                with self._autocast():
                    return self._compute(given, targets)
        except CaptureError:
            raise
        except Exception as error:  # here, because the exporter prints the graph of an error that reaches it
            raise explain(error, type(self.model).__name__) from error

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return bfloat16_autocast() if self.precision == "bf16" else contextlib.nullcontext()

    def _compute(self, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        if isinstance(inputs, tuple):
            outputs = self.model(*inputs)
        elif isinstance(inputs, dict):
            outputs = self.model(**inputs)
        else:
            outputs = self.model(inputs)
        results = {"the loss": self.loss(outputs, targets)}
        results |= {f"metric {name!r}": metric(outputs, targets) for name, metric in self.metrics.items()}
        for what, value in results.items():
            _require_scalar(what, value)
        return tuple(results.values())


@contextlib.contextmanager
def _assignments_written(module: nn.Module) -> Iterator[None]:
    """Let ``self.buffer = value`` write into the buffer; the exporter would drop it without a word."""
    before = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    yield
    for part, name, buffer in before:
        assigned = part._buffers.get(name)
        if assigned is buffer:
            continue
        if assigned is None or assigned.shape != buffer.shape or assigned.dtype != buffer.dtype:
            raise CaptureError(
                f"{type(part).__name__}.{name} is a buffer to which forward assigns something of another type or shape"
            )
        buffer.copy_(assigned.detach())
        part._buffers[name] = buffer


def _require_scalar(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise CaptureError(f"{what} is a {type(value).__name__}, but must be a tensor that the graph computes")
    if value.dim():
        raise CaptureError(
            f"{what} has the shape {list(value.shape)}, but must be a scalar: reduce it, by .mean() for example"
        )


@dataclass(frozen=True, kw_only=True)
class Captured:
    """An exported model.

    Args:
        exported: From ``torch.export``.
        example: The (inputs, targets) that it was captured with.
        aliases: For each name of a parameter or buffer the first name of the same tensor; tied weights share one.
        device_type: Where the graph is to run.
        fuse: Whether activations that are written out become single operators; see :mod:`onebox.graph.fuse`.
    """

    exported: ExportedProgram
    example: tuple[Any, Any]
    aliases: Mapping[str, str]
    device_type: str
    fuse: bool = False


def capture(
    model: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    *,
    mode: Mode = "train",
    metrics: Metrics | None = None,
    precision: Precision = "fp32",
    device_type: str = "cpu",
    on_device: OnDevice | None = None,
    fuse: bool = False,
) -> Captured:
    """Export a model and its loss for inputs of one shape.

    Args:
        model: The model, on any devices; its parameters are not read, and its modes (train, eval) are as before
            afterwards.
        loss: Maps (outputs, targets) to a scalar; a module may have parameters and buffers of its own.
        example: Inputs and targets, nested tuples and dicts of tensors; only shapes and types count.
        mode: ``evaluate`` sets every module to eval.
        metrics: With ``evaluate``, more scalars of (outputs, targets).
        precision: ``bf16`` runs the model and the loss under autocast; any other one as they are.
        device_type: ``cpu``, or another one to keep operators out that only CPUs have.
        on_device: Tensor code in front of the model, which maps ``inputs`` to the model's; no part of its state.
        fuse: Whether activations that are written out become single operators.

    Raises:
        CaptureError: The model depends on the values of tensors in a way that no graph can hold, or the loss is not
            a scalar; the message names the line.
    """
    wrapper = Wrapper(model, loss, metrics if mode == "evaluate" else None, precision, on_device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_mode(wrapper, mode))
        stack.enter_context(on_host(wrapper))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(portable_operators(device_type))
        stack.enter_context(quiet())
        try:
            exported = torch.export.export(wrapper, example, strict=False)
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error, type(model).__name__) from error
    _require_known_shapes(exported)
    _require_buffers(exported)
    aliases = _aliases(wrapper)
    return Captured(exported=exported, example=example, aliases=aliases, device_type=device_type, fuse=fuse)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep to itself what PyTorch logs and warns of in this thread while it captures."""
    mine = threading.get_ident()

    def other_thread(record: logging.LogRecord) -> bool:
        return record.thread != mine

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(other_thread)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _RECURRENT)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(other_thread)


@contextlib.contextmanager
def _mode(wrapper: Wrapper, mode: Mode) -> Iterator[None]:
    """Put a model (and the loss, if it is a module) in a mode, and every module back in its own afterwards.

    A model that is in training mode is taken as it is: modules that the user has set to eval stay so.
    """
    before = [(module, module.training) for module in wrapper.modules()]
    try:
        if mode == "evaluate":
            wrapper.eval()
        elif not wrapper.model.training:
            wrapper.model.train()
        yield
    finally:
        for module, training in before:
            module.training = training


def _require_known_shapes(exported: ExportedProgram) -> None:
    """Refuse numbers and shapes that come from the values of tensors."""
    for node in exported.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, Tensor) else [value]
            if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
                raise node_refusal(
                    node,
                    f"{node.target} makes a number or a shape out of the values of a tensor",
                    "Keep it in a tensor of a shape that is known: use torch.where or a mask, and no .item()",
                )


def _require_buffers(exported: ExportedProgram) -> None:
    """Refuse writes to tensors that are attributes of a module and no buffers."""
    plain = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.is_write and getattr(value, "name", None) in plain:
                raise node_refusal(
                    node,
                    f"forward writes to {plain[value.name].removeprefix('model.')}, which is no buffer",
                    "Make it one: self.register_buffer(...)",
                )


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
