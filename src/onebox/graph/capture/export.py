"""Capture: the conversion of a model and a loss to one graph with named inputs and outputs.

The traced module maps the tensors of (inputs, targets) to the loss and, for evaluation, metrics. Shapes are fixed:
another batch size is another capture. The user's own Python runs under the tracer, with autograd: custom functions,
hooks and gradients within forward are in the graph as PyTorch computes them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.errors import CaptureError, OneboxError
from onebox.graph.capture.attention import WholeAttention
from onebox.graph.capture.guards import Guards, Watch
from onebox.graph.capture.host_devices import HostDevices, on_host
from onebox.graph.capture.joint import Joint, trace
from onebox.graph.capture.locate import explain
from onebox.graph.capture.on_device_transform import OnDevice, OnDeviceTransform
from onebox.graph.capture.operator_support import bfloat16_autocast, portable_operators
from onebox.graph.capture.python_state import SideEffects, forward_hooks
from onebox.graph.capture.reading import read_hook, read_step, unreadable
from onebox.graph.capture.recurrent import WholeRecurrent
from onebox.graph.capture.repeated.layers import RepeatedLayers
from onebox.graph.capture.symbolic_sizes import Varying
from onebox.graph.capture.traced_calls import Layer, TracedCalls, fails_in_backward, let_go, require_plain
from onebox.graph.capture.transparent_contexts import transparent

Mode = Literal["train", "evaluate"]
Precision = Literal["fp32", "bf16", "auto"]
"""Precision of a whole run; with ``auto`` it is captured as ``fp32``, and its plan sets the precision of stages."""

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, Callable[[Any, Any], Tensor]]

_SYMBOLIC_FROM = 2
"""Number of numbers of samples from which Dynamo reads the code for all further ones."""

_LOGGERS = (
    "torch._functorch",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)
"""PyTorch's loggers whose messages repeat the error's."""


class Wrapper(nn.Module):
    """The traced module: ``model`` and ``loss`` under these two names.

    Args:
        model: The user's model. A tuple of inputs is spread over its positional arguments, a dict over its keyword
            arguments, anything else is its one argument.
        loss: Maps (outputs, targets) to a scalar.
        metrics: Each maps (outputs, targets) to a scalar; ``None`` for training.
        precision: ``bf16`` for autocast; with any other value the model is unchanged.
        on_device: Maps inputs to those of the model; not a part of it.
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
        self._front = None if on_device is None else OnDeviceTransform(on_device)

    @property
    def owners(self) -> dict[str, nn.Module]:
        """The modules among the model and the loss."""
        return {name: owner for name in ("model", "loss") if isinstance(owner := getattr(self, name), nn.Module)}

    def forward(self, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Return the loss and the metrics."""
        given = inputs if self._front is None else self._front.run(inputs, training=self.model.training)
        with self.in_precision():
            return self._compute(given, targets)

    def in_precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model and the loss compute."""
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
    """Turn ``self.buffer = value`` into a write to the buffer; a trace would drop it silently."""
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


class _Stateless(nn.Module):
    """A wrapper whose tensors are parameters and buffers of this module, each once, however many names it has.

    Args:
        wrapper: The wrapper.
        name: The class of the model, for error messages.
        example: Inputs and targets, nested; non-tensors in them are passed on unchanged.
        device_type: The type of device on which the graph is to run.
        guards: What forward reads of Python, where that is known.
    """

    def __init__(
        self, wrapper: Wrapper, name: str, example: tuple[Any, Any], device_type: str, guards: Guards | None
    ) -> None:
        super().__init__()
        self._attention = contextlib.nullcontext if device_type == "cpu" else WholeAttention
        leaves, self._nesting = pytree.tree_flatten(example)
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self._wrapper = (wrapper,)  # in a tuple, so that its tensors are not registered twice
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self.calls = TracedCalls(wrapper, name)
        self._effects = SideEffects(wrapper.owners, guards)
        self.state: dict[str, str] = {}
        self.known: dict[int, str] = {}
        self._hooked: list[tuple[str, Tensor]] = []
        self._add(wrapper.named_parameters, "_parameters", "parameter")
        self._add(wrapper.named_buffers, "_buffers", "buffer")
        self._add_plain(wrapper)
        places = [(held, key) for held, key, _ in self._places]
        restored = functools.partial(self._effects.run, part=True)
        self.repeated = RepeatedLayers(wrapper, places, lambda: self.calls.stack, self._within_layers, restored)

    def _add(self, named: Callable[..., Any], kind: str, prefix: str) -> None:
        """Register the tensors of the state."""
        own: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            path, _, key = name.rpartition(".")
            if id(tensor) not in own:
                own[id(tensor)] = f"{prefix}_{len(own)}"
                getattr(self, kind)[own[id(tensor)]] = tensor
                self.state[own[id(tensor)]] = self.known[id(tensor)] = name
                self.calls.require_hooks(name, tensor)
                self._hooked.append((own[id(tensor)], tensor))
            self._places.append((vars(self._wrapper[0].get_submodule(path))[kind], key, own[id(tensor)]))

    def _add_plain(self, wrapper: Wrapper) -> None:
        """Register tensors that are attributes of modules but not buffers, so that the tracer sees writes to them."""
        own: dict[int, str] = {}
        for module in wrapper.modules():
            for key, value in vars(module).items():
                if type(value) is Tensor and id(value) not in self.known:
                    own.setdefault(id(value), f"plain_{len(own)}")
                    self._buffers[own[id(value)]] = value.detach()
                    self._places.append((vars(module), key, own[id(value)]))

    @contextlib.contextmanager
    def _within(self, layers: Sequence[Layer] = ()) -> Iterator[None]:
        """Let PyTorch's functions be called as in the trace, within the context, and inside some layers."""
        with WholeRecurrent(), self._attention(), self.calls, HostDevices(), self.calls.layers(*self._wrapper, layers):
            yield

    @contextlib.contextmanager
    def _within_layers(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Let a layer be called as the model calls it, within the context."""
        with self._within(layers), self._wrapper[0].in_precision():
            yield

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the loss and the metrics, computed with this module's present tensors."""
        (wrapper,), left = self._wrapper, iter(tensors)
        leaves = [next(left) if constant is None else constant[0] for constant in self._constants]
        inputs, targets = pytree.tree_unflatten(leaves, self._nesting)
        given: dict[str, Any] = {**self._parameters, **self._buffers}
        for name, real in self._hooked:
            given[name] = self.calls.hooked(given[name], real)

        def computed() -> tuple[Tensor, ...]:
            before = [(held, key, held[key]) for held, key, _ in self._places]
            try:
                for held, key, name in self._places:
                    held[key] = given[name]
                with self.repeated.standing_in(), self._within(), _assignments_written(wrapper):
                    made: tuple[Tensor, ...] = wrapper(_apart(inputs), _apart(targets))
                    return made
            finally:
                for held, key, tensor in before:
                    held[key] = tensor

        made = self._effects.run(computed)
        if fails_in_backward(made[:1]):
            raise CaptureError(
                "plain PyTorch raises an error in the backward of this loss: trying to differentiate twice a "
                "function that was marked with @once_differentiable\n  Remove that decorator, if its backward is "
                "differentiable, or detach the gradient that forward computes"
            )
        return made


def _apart(nested: Any) -> Any:
    """Return inputs as they are in a training loop: leaves that may require gradients."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach() if x.is_floating_point() or x.is_complex() else x, nested)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A traced model.

    Args:
        joint: Its graph.
        backward: Whether the graph includes gradients.
        watch: Python state that the graph depends on.
        unread: Why changes of it may pass unnoticed; ``None`` where they do not.
        fuse: Whether the model made of it is to have single operators for activations that are written out.
        fresh: Whether the graph is used only here, so that the one model made of it may change it.
    """

    joint: Joint
    backward: bool
    watch: Watch
    unread: CaptureError | None = None
    fuse: bool = False
    fresh: bool = False

    @property
    def of_one_size(self) -> bool:
        """Return whether it is valid for one value of each size only, although there were symbols for some."""
        return self.joint.symbols is None or self.joint.symbols.constant

    def sized(self, leaves: Sequence[Tensor]) -> Captured | None:
        """Return the capture for inputs and targets of some sizes; ``None`` where it is not valid for them.

        Args:
            leaves: Their tensors, flattened.
        """
        joint = self.joint.sized(leaves)
        return None if joint is None else replace(self, joint=joint, fresh=True)


def capture(
    model: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    *,
    mode: Mode = "train",
    backward: bool | None = None,
    metrics: Metrics | None = None,
    precision: Precision = "fp32",
    device_type: str = "cpu",
    on_device: OnDevice | None = None,
    fuse: bool = False,
    varying: Varying | None = None,
    guards: bool = True,
    known: Sequence[Guards] = (),
) -> Captured:
    """Trace a model and its loss for inputs of one shape.

    Args:
        model: The model, on any devices; its parameters are not read, and its modes (train, eval) are restored.
        loss: Maps (outputs, targets) to a scalar; a module may have parameters and buffers of its own.
        example: Inputs and targets, nested tuples and dicts of tensors, of which only shapes and types count, and of
            constants, which are passed on unchanged.
        mode: ``evaluate`` sets every module to eval.
        backward: Whether to trace gradients; ``None`` for those of ``train``.
        metrics: With ``evaluate``, more scalars of (outputs, targets).
        precision: ``bf16`` runs the model and the loss under autocast; other values do not change them.
        device_type: ``cpu``, or another one to exclude operators that only CPUs have.
        on_device: Tensor code in front of the model, which maps ``inputs`` to the model's; no part of its state.
        fuse: Whether the model made of it is to have single operators for activations that are written out.
        varying: Sizes of the inputs and targets for which there are to be symbols; see :meth:`Captured.sized`.
        guards: Whether Dynamo reads the code, so that changes of all that it reads of Python are noticed.
        known: What it has read of this model in this mode, for inputs of other sizes perhaps.

    Raises:
        CaptureError: The model depends on the values of tensors, or on Python's state, in a way that a graph cannot
            hold, or the loss is not a scalar; the message names the line and the layer.
    """
    wrapper = Wrapper(model, loss, metrics if mode == "evaluate" else None, precision, on_device)
    require_plain(model)
    backward = mode == "train" if backward is None else backward

    def made() -> Captured:
        return _capture(
            wrapper,
            on_device,
            example,
            mode=mode,
            backward=backward,
            device_type=device_type,
            fuse=fuse,
            varying=varying or {},
            guards=guards,
            known=known,
        )

    hooks = forward_hooks([wrapper])
    try:
        captured = made()
    except CaptureError:
        if forward_hooks([wrapper]) == hooks:
            raise
    else:
        if forward_hooks([wrapper]) == hooks:
            return captured
    return made()  # code that adds hooks at its first call, as of transformers, has done so


def _capture(
    wrapper: Wrapper,
    on_device: OnDevice | None,
    example: tuple[Any, Any],
    *,
    mode: Mode,
    backward: bool,
    device_type: str,
    fuse: bool,
    varying: Varying,
    guards: bool,
    known: Sequence[Guards],
) -> Captured:
    """Trace a model and its loss once."""
    model, loss = wrapper.model, wrapper.loss
    name = type(model).__name__
    unread = None
    constants = [
        (f"{path}.{key}", value)
        for path, module in wrapper.named_modules()
        for key, value in vars(module).items()
        if type(value) is Tensor
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_mode(wrapper, mode))
        stack.enter_context(quiet())
        moved = stack.enter_context(on_host(wrapper))
        read_by_dynamo = next((each for each in known if each.serve(example) and each.changed is None), None)
        if guards and read_by_dynamo is None:
            options = {
                "evaluated": mode == "evaluate",
                "moved": moved,
                "symbolic": sum(each.differ_in_samples(example) for each in known) >= _SYMBOLIC_FROM,
            }
            try:
                with wrapper.in_precision(), contextlib.nullcontext() if backward else torch.no_grad():
                    read_by_dynamo = read_step(model, loss, wrapper.metrics, on_device, example, **options)
            except Exception as error:
                unread = unreadable(error, name)
        if varying and read_by_dynamo is not None and read_by_dynamo.effects is not None:
            raise CaptureError("forward changes Python's state, perhaps by such a size")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(portable_operators(device_type))
        stack.enter_context(_nondeterministic_traced())
        stack.enter_context(transparent())
        tensors = tuple(leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor))

        def traced(module: _Stateless, repeated: RepeatedLayers | None) -> Joint:
            return trace(
                module,
                tensors,
                module.state,
                module.known,
                backward=backward,
                varying=varying,
                device_type=device_type,
                repeated=repeated,
            )

        module = _Stateless(wrapper, name, example, device_type, read_by_dynamo)
        try:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Error detected in .*RepeatedLayer")
                    joint = traced(module, module.repeated)
            except Exception:
                if not module.repeated.used:
                    raise
                module = _Stateless(wrapper, name, example, device_type, read_by_dynamo)
                joint = traced(module, None)
        except OneboxError:  # says what is the matter
            raise
        except Exception as error:
            calls = module.calls
            refused = calls.failed.refused_by_pytorch(error) if calls.failed else None
            raise explain(error, name, layer=calls.failed_in, refused=refused) from error
    for tensor in module.calls.constants.values():
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        constants.append((f"a tensor that is none of the model's ({kind})", tensor))
    read, unread = ([], unread) if read_by_dynamo is None else _with_hooks(read_by_dynamo, module.calls, name)
    watch = Watch(read, list(wrapper.owners.values()), constants)
    return Captured(joint=joint, backward=backward, watch=watch, unread=unread, fuse=fuse)


def _with_hooks(guards: Guards, calls: TracedCalls, name: str) -> tuple[list[Guards], CaptureError | None]:
    """Let Dynamo read the hooks of gradients that a trace has called; return all guards, or why it cannot."""
    try:
        for hook, _ in calls.hooks.values():
            let_go(hook)
        return [guards, *(read_hook(hook, given) for hook, given in calls.hooks.values())], None
    except OneboxError:
        raise
    except Exception as error:
        return [guards], unreadable(error, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress PyTorch's logs and warnings of this thread during a capture."""
    mine = threading.get_ident()

    def other_thread(record: logging.LogRecord) -> bool:
        return record.thread != mine

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(other_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(other_thread)


@contextlib.contextmanager
def _nondeterministic_traced() -> Iterator[None]:
    """Let operators without a deterministic implementation be traced in a deterministic run, where a worker refuses
    them; the tracer refuses some itself, unless it has traced them before."""
    before = torch.get_deterministic_debug_mode()
    if before == 0:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* does not have a deterministic implementation")
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def _mode(wrapper: Wrapper, mode: Mode) -> Iterator[None]:
    """Set the mode of a model (and of the loss, if it is a module), and restore each module's own afterwards.

    For training, modules keep their modes: those that the user has set to eval stay so, as in a training loop.
    """
    before = [(module, module.training) for module in wrapper.modules()]
    try:
        if mode == "evaluate":
            wrapper.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
