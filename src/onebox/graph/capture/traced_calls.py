"""Interception of every PyTorch function that a user's forward, loss or hook calls while it is traced.

It records the line and the layer of each traced node, replaces a tensor of the model that is reached otherwise than
through its module (a closure, a global) by the traced one, and refuses calls that would leave the graph, with their
line and layer.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as fx_traceback
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from onebox.errors import CaptureError
from onebox.graph.capture.locate import SourceLocation, is_users, refusal

_DECIDES = frozenset({"__bool__", "__int__", "__index__", "__float__"})
"""Methods that convert a tensor to a Python number, for control flow or computation."""

_LEAVES = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__})
"""Calls that export values from PyTorch."""

_BACKWARD = frozenset({Tensor.backward, Tensor.register_post_accumulate_grad_hook})
"""Calls that need an accumulated gradient."""

_DATA, _GRAD = (inspect.getattr_static(Tensor, name) for name in ("data", "grad"))
_GET_DATA, _SET_DATA, _SET_GRAD = _DATA.__get__, _DATA.__set__, _GRAD.__set__

_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})

_TRACER = str(Path(__file__).with_name("joint.py"))

_CLASS_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})
_CLASSES = (
    "targets are int64, in the shape of the scores without classes (.long(), .squeeze(1)), or probabilities of classes"
)
_DISTANCES = frozenset({functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss})

_VALIDATION = torch.distributions.distribution.__file__
_CHECK = torch._check_tensor_all_with.__code__
_VALIDATING = frozenset({torch._is_all_true, Tensor._is_all_true, Tensor.__bool__, Tensor.item})
"""Calls by which checks of values end in a decision."""

_MOST_ZEROS = 1 << 26
"""Elements of the tensors of a call up to which it is made again."""

Layer = tuple[str, str]
"""The path of a module, and its class."""


def fails_in_backward(results: Sequence[Tensor]) -> bool:
    """Return whether plain PyTorch's backward from some results reaches a node that only raises an error, as that of
    ``once_differentiable`` does; a trace computes the gradients of parameters alone, and passes it by.
    """
    seen: set[Any] = set()
    with torch._C.DisableTorchFunction():  # no call of the user's
        stack = [made.grad_fn for made in results if made.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if type(node).__name__ == "Error" and node.next_functions:  # without any it marks the tracer's inputs
                return True
            stack += [behind for behind, _ in node.next_functions if behind is not None]
    return False


class FailedCall:
    """A call of PyTorch that failed in a trace.

    Args:
        error: The exception.
        func: The called function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self, error: Exception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._error, self._func = error, func
        self._given = pytree.tree_map(_like, (args, dict(kwargs)))
        self._autocast = torch.is_autocast_enabled("cpu")

    def refused_by_pytorch(self, error: BaseException) -> str | None:
        """Return why plain PyTorch refuses the call, too, whatever the values are; ``None`` where it may not.

        The call is made again, on zeros of the same types and shapes; first without memory, for the size of its result.

        Args:
            error: The exception that ended the trace.
        """
        cause: BaseException | None = error
        while cause is not None and cause is not self._error:
            cause = cause.__cause__
        if cause is None or not resolve_name(self._func):
            return None
        try:
            given = pytree.tree_map(_sized, self._given)
        except Exception:  # a size that depends on values
            return None
        tensors = [value for value in pytree.tree_leaves(given) if isinstance(value, _Like)]
        if _elements(tensors) > _MOST_ZEROS:
            return None
        try:
            with suppress(Exception), torch.device("meta"):
                if _elements(pytree.tree_leaves(self._again(given, "meta"))) > _MOST_ZEROS:
                    return None
            self._again(given, "cpu")
        except (torch.linalg.LinAlgError, NotImplementedError, MemoryError):  # because of the zeros, or of this machine
            return None
        except Exception as refused:
            if "DefaultCPUAllocator" in str(refused):  # a lack of memory, too
                return None
            said = next((line for line in str(refused).splitlines() if line.strip()), type(refused).__name__)
            hint = f"; {_CLASSES}" if self._func in _CLASS_LOSSES else ""
            return (
                f"{getattr(self._func, '__name__', 'a call')} of {', '.join(map(str, tensors))}: {said.strip()}{hint}"
            )
        return None

    def _again(self, given: Any, device: str) -> Any:
        """Make the call on zeros of a device; global random numbers stay as they are."""
        args, kwargs = pytree.tree_map(functools.partial(_zeros, device), given)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self._autocast)
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(action="ignore"), autocast:
            return self._func(*args, **kwargs)


@dataclass(frozen=True)
class _Like:
    """The type and shape of a tensor; sizes may be symbols, whose conversion would bind a trace to them."""

    dtype: torch.dtype
    shape: tuple[int | torch.SymInt, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def _like(value: Any) -> Any:
    return _Like(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def _validates(frame: FrameType | None) -> bool:
    """Return whether a distribution, or ``torch._check_tensor_all``, is about to decide whether values are valid."""
    for _ in range(4):  # other modes, and the method of a traced tensor, are between
        if frame is None or frame.f_code.co_filename == _VALIDATION or frame.f_code is _CHECK:
            return frame is not None
        frame = frame.f_back
    return False


def _validated(func: Callable[..., Any], value: Tensor) -> Any:
    """Check values where they are computed, in place of a decision."""
    if func in (torch._is_all_true, Tensor._is_all_true):
        return value.all()
    torch._assert_async(
        value, "values do not satisfy a check (of torch._check_tensor_all, or a distribution's constraint)"
    )
    return True


def _blank(value: Tensor) -> Tensor:
    """Return zeros in the shape of a traced tensor, of which two take the place of a symbol."""
    sizes = [size if isinstance(size, int) else 2 for size in value.shape]
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.zeros(sizes, dtype=value.dtype)


def let_go(hook: Any) -> None:
    """Replace the traced tensors that a hook holds, which was made in forward, by zeros."""
    for cell in getattr(hook, "__closure__", None) or ():
        if is_traced(_contents(cell)):
            cell.cell_contents = _blank(_contents(cell))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _sized(value: Any) -> Any:
    """Return an argument with numbers in place of symbols."""
    if isinstance(value, _Like):
        return _Like(value.dtype, tuple(map(int, value.shape)))
    return int(value) if isinstance(value, torch.SymInt) else value


def _zeros(device: str, value: Any) -> Any:
    if isinstance(value, torch.Generator):  # not the user's, whose state would change
        return torch.Generator()
    return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, _Like) else value


def _elements(values: Sequence[Any]) -> int:
    return sum(math.prod(map(int, each.shape)) for each in values if isinstance(each, _Like | Tensor))


def _explicit(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a loss with the conversions that its kernels make, and of which traces know nothing."""
    if len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
        return args
    outputs, targets, *rest = args
    if func in _CLASS_LOSSES:
        return (outputs, targets.long(), *rest) if targets.dtype == torch.uint8 else args
    if outputs.dtype == targets.dtype:
        return args
    kind = torch.result_type(outputs, targets)
    return (outputs.to(kind), targets.to(kind), *rest)


class TracedCalls(TorchFunctionMode):
    """The calls of one trace.

    Args:
        wrapper: The traced module; names of layers are paths in it.
        name: The class of the model, for error messages.
    """

    def __init__(self, wrapper: nn.Module, name: str) -> None:
        super().__init__()
        self._name = name
        self._layers: list[Layer] = []
        self._failed_in: Layer | None = None
        self._paths = {id(module): path for path, module in wrapper.named_modules()}
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        for module in wrapper.modules():
            for held in (module._parameters, module._buffers):
                self._owners |= {id(tensor): (module, key) for key, tensor in held.items() if tensor is not None}
        self._detached: list[Tensor] = []
        self._written: Any = None
        self.constants: dict[int, Tensor] = {}
        """Tensors from outside of the model and the trace, by their identity: the graph holds their present values."""
        self.hooks: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        """Hooks of gradients that were called, by their identity, with tensors like those that they were given."""
        self.failed: FailedCall | None = None
        """The last call that failed."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if fx_traceback.has_preserved_node_meta():
            place = _place_of(sys._getframe(1))
            if place is not None:
                fx_traceback.set_stack_trace([f'  File "{place.file}", line {place.line}, in forward\n'])
        if any(map(_is_foreign, pytree.tree_leaves((args, kwargs)))):
            args, kwargs = pytree.tree_map(self._traced, (args, kwargs))
            self._refuse_writes(func, args, kwargs)
        self._refuse_leaving(func, args, kwargs)
        if func in _VALIDATING and _validates(sys._getframe(1)):
            return _validated(func, args[0])
        if func is Tensor.register_hook:
            args = (args[0], self._observed(args[1]))
        if args and _writes(func):
            self._written = args[0]
        if func == _GET_DATA and is_traced(args[0]):
            self._detached.append(args[0].detach())
            return self._detached[-1]
        if self._detached and _writes(func) and any(args[0] is each for each in self._detached):
            raise self._refusal(
                "forward writes through .data, behind autograd's back", "Write to a copy: h = h.detach().clone()"
            )
        if func in _CLASS_LOSSES or func in _DISTANCES:
            args = _explicit(func, args)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._depends_on_values(func) from error
        except Exception as error:
            self.failed = FailedCall(error, func, args, kwargs)
            raise

    # ---- layers

    @property
    def failed_in(self) -> Layer | None:
        """The innermost layer that was computed when an error occurred."""
        return self._failed_in

    @contextmanager
    def layers(self, wrapper: nn.Module, inside: Sequence[Layer] = ()) -> Iterator[None]:
        """Record the layer being computed, within the context.

        Args:
            wrapper: As for the constructor.
            inside: The layers that are being computed as the context begins.
        """
        self._layers += inside
        self._note_layer()
        removed, hooks = [], list[tuple[dict[int, Any], int, Any]]()
        try:
            for module in wrapper.modules():
                for own in (module._backward_pre_hooks, module._backward_hooks):
                    hooks += [(own, key, hook) for key, hook in own.items()]
                    own.update({key: self._observed(hook) for key, hook in own.items()})
                layer = self._paths[id(module)], type(module).__name__
                enter = functools.partial(self._enter, layer)
                removed.append(module.register_forward_pre_hook(enter, prepend=True))
                removed.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in removed:
                handle.remove()
            for own, key, hook in hooks:
                own[key] = hook
            self._layers.clear()
            self._note_layer()

    def _enter(self, layer: Layer, module: nn.Module, inputs: Any) -> None:
        self._layers.append(layer)
        self._note_layer()

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if sys.exc_info()[0] is not None and self._failed_in is None:
            self._failed_in = self.layer
        if self._layers:
            self._layers.pop()
        self._note_layer()

    def _note_layer(self) -> None:
        if fx_traceback.has_preserved_node_meta():
            meta = fx_traceback.get_current_meta()
            if self._layers:
                meta["nn_module_stack"] = {path: (path, kind) for path, kind in self._layers if path}
            else:
                meta.pop("nn_module_stack", None)

    # ---- hooks

    def require_hooks(self, name: str, tensor: Tensor) -> None:
        """Refuse hooks of a model's tensor that a graph cannot hold.

        Args:
            name: Its name.
            tensor: The user's tensor.
        """
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which workers cannot call\n"
                "  Remove it. What changes gradients can be a hook of register_hook, which is traced; what reads them "
                "runs on a virtual device (vgpu)"
            )

    def hooked(self, traced: Tensor, tensor: Tensor) -> Tensor:
        """Return the traced tensor that replaces a tensor of the model, with the latter's hooks.

        Args:
            traced: The replacement without hooks.
            tensor: The user's tensor.
        """
        hooks = getattr(tensor, "_backward_hooks", None)
        if not hooks or not traced.requires_grad:
            return traced
        made: Tensor = torch.ops.aten.alias.default(traced)
        for hook in hooks.values():
            made.register_hook(self._observed(hook))
        return made

    def _observed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook so that it is refused if it changes no gradient: it would be called only once, in the trace."""

        def run(*given: Any) -> Any:
            self.hooks[id(hook)] = hook, pytree.tree_map_only(Tensor, _blank, given)
            self._written = None
            with self:
                result = hook(*given)
            if result is None and not any(each is self._written for each in pytree.tree_leaves(given)):
                code = getattr(hook, "__code__", None)
                place = code and SourceLocation(code.co_filename, code.co_firstlineno)
                raise refusal(
                    self._name,
                    place if place and _users_file(place.file) else None,
                    "a hook looks at a gradient and leaves it as it is; workers cannot call it",
                    "Return the gradient that it makes, or remove it",
                )
            return result

        return run

    # ---- tensors from elsewhere

    def _traced(self, value: Any) -> Any:
        """Return the traced tensor of a model's tensor that was reached by a closure or a global."""
        if not _is_foreign(value):
            return value
        owner = self._owners.get(id(value))
        if owner is None:
            self.constants[id(value)] = value
            return value
        module, key = owner
        return module._parameters.get(key) if key in module._parameters else module._buffers.get(key)

    # ---- refusals

    def _refuse_writes(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        written = kwargs.get("out", args[0] if args and _writes(func) else None)
        if any(map(_is_foreign, pytree.tree_leaves(written))):
            raise self._refusal(
                "forward writes to a tensor that is neither a buffer nor made in forward",
                "Make it a buffer: self.register_buffer(...)",
            )

    def _refuse_leaving(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func in _LEAVES and args and is_traced(args[0]):
            raise self._leaving(getattr(func, "__name__", "this call"))
        if func in _BACKWARD:
            raise self._refusal(
                f"forward calls {func.__name__}, which needs gradients that are accumulated",
                "Use torch.autograd.grad(..., create_graph=True), or a hook of register_hook",
            )
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise self._refusal(
                "forward draws from a torch.Generator, which workers do not have",
                "Draw without generator=: the numbers are made on the workers, from the seed of the run",
            )
        if func in (_SET_DATA, _SET_GRAD):
            what = ".data" if func == _SET_DATA else ".grad"
            raise self._refusal(f"forward assigns to {what} of a tensor", "Compute a new tensor instead")

    def _depends_on_values(self, func: Callable[..., Any]) -> CaptureError:
        called = resolve_name(func) or getattr(func, "__name__", "the call")
        if "tolist" in _callers(sys._getframe(1)):
            return self._leaving("tolist")
        if _DECIDES.intersection([called.rpartition(".")[2], *_callers(sys._getframe(1))]):
            return self._refusal(
                "a data-dependent decision: the value of a tensor becomes a number of Python",
                "The line decides by the value of a tensor, which a graph cannot do: use torch.where, or decide by "
                "shapes",
            )
        if called.endswith("ctc_loss"):
            return self._refusal(
                f"{called} computes in a space whose size depends on the values of the lengths",
                "A Trainer cannot train with it",
            )
        if self.layer is not None and self.layer[1].endswith("Experts"):
            return self._refusal(
                f"{called} decides by values which experts compute",
                'Where they are those of transformers, set experts_implementation="batched_mm" in the configuration',
            )
        return self._refusal(
            f"{called} makes a number or a shape out of the values of a tensor",
            "Keep it in a tensor of a shape that is known: use torch.where or a mask, and no .item()",
        )

    def _leaving(self, called: str) -> CaptureError:
        return self._refusal(
            f".{called}() takes values out of PyTorch, where no gradient and no worker can follow",
            "Compute it with PyTorch's operators, or before the step, in the data set",
        )

    def _refusal(self, reason: str, advice: str) -> CaptureError:
        return refusal(self._name, _place_of(sys._getframe(1)), reason, advice, layer=self.layer)

    @property
    def stack(self) -> tuple[Layer, ...]:
        """The layers being computed, from the outermost."""
        return tuple(self._layers)

    @property
    def layer(self) -> Layer | None:
        """The innermost layer being computed."""
        return self._layers[-1] if self._layers else None


def _is_foreign(value: Any) -> bool:
    """Return whether something is a tensor with values, made outside of the trace."""
    return isinstance(value, Tensor) and not is_traced(value)


def is_traced(value: Any) -> bool:
    """Return whether something is a tensor of a trace, without values."""
    if not isinstance(value, Tensor):
        return False
    if isinstance(value, FakeTensor | FunctionalTensor):
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return is_traced(torch._C._functorch.get_unwrapped(value))
    return False


def _writes(func: Callable[..., Any]) -> bool:
    """Return whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_")


@functools.lru_cache(maxsize=4096)
def _users_file(file: str) -> bool:
    return is_users(file)


def _callers(frame: FrameType | None) -> Iterator[str]:
    """Yield the names of the functions between a user's line and PyTorch's call, the innermost first."""
    while frame is not None and not _users_file(frame.f_code.co_filename):
        yield frame.f_code.co_name
        frame = frame.f_back


def _place_of(frame: FrameType | None) -> SourceLocation | None:
    """Return the innermost line of a user's code among the callers of a frame, up to the tracer."""
    while frame is not None and frame.f_code.co_filename != _TRACER:
        if _users_file(frame.f_code.co_filename):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def require_plain(model: nn.Module) -> None:
    """Refuse models that are wrapped for other ways of distribution, or scripted, or have sparse state.

    Raises:
        CaptureError: The model is such a module; the message gives the remedy.
    """
    for path, module in model.named_modules():
        kind = type(module).__name__
        called = f"{path} ({kind})" if path else f"the model ({kind})"
        norm = isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None
        if norm and module.training and module.track_running_stats:
            raise CaptureError(
                f"{called} has momentum=None: its running averages depend on a count of batches, which a graph cannot "
                "decide by\n  Give it a momentum, such as 0.1; as it is it runs on a virtual device (vgpu)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{called} is scripted, which cannot be traced with its gradients\n"
                "  Give the module that it was scripted from; a scripted one runs on a virtual device (vgpu)"
            )
        if kind in _WRAPPERS:
            raise CaptureError(
                f"{called} divides the work among devices itself, as the Trainer does\n"
                "  Unwrap it: give its .module to the Trainer, and the parameters of that to the optimizer"
            )
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.layout is not torch.strided:  # with compressed parameters PyTorch 2.11 to 2.13 end the process
                raise CaptureError(
                    f"{name} of {called} is a sparse tensor ({tensor.layout}), which workers do not hold\n"
                    "  Make it dense, as by to_dense()"
                )
