"""Guards: Dynamo reads the code of a step, and tells later whether anything of Python that it read has changed.

The graph holds the results of Python code at its trace: attributes of modules and of other objects, globals, variables
of closures, hooks. Dynamo knows every one that the code reads, and how it was read.

This file alone touches Dynamo's capture and its guards, internals of PyTorch.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import random
import re
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.utils import _pytree as pytree

from onebox.errors import CaptureError
from onebox.graph.capture.locate import SourceLocation, at_line, place_of_error

_OF_A_STEP = frozenset({
    "AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "DISPATCH_KEY_SET_MATCH",
    "DUAL_LEVEL", "DUPLICATE_INPUT", "FSDP_TRAINING_STATE", "FUNCTORCH_STACK_MATCH", "GLOBAL_STATE", "GRAD_MODE",
    "SHAPE_ENV", "TENSOR_MATCH", "TORCH_FUNCTION_STATE",
})  # fmt: skip
"""Guards of shapes and modes: a capture is for one shape, and sets the modes of its step by itself."""

_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
"""Hooks of modules for gradients, which Dynamo does not read; all hooks of gradients are compared by identity."""

_ELSEWHERE = re.compile(r"^___from_numpy|^L\['(inputs|targets)'\]|\._(parameters|buffers)\['[^']*'\]$")
"""Tensors, by Dynamo's names for them, that are no constants of a graph, or no tensors of the user's."""

_SCOPE = re.compile(r"G\['___unnamed_scope\w*'\]$")
"""All globals of some code together, of which each may come and go."""

_CELL = re.compile(r"(.*)\.__closure__\[(\d+)\]\.cell_contents(.*)$")
_ARRAY = re.compile(r"___from_numpy\(([GL]\[.*\].*)\)$")
_ATTRIBUTE = re.compile(r"hasattr\((.*), '(\w+)'\)")

_MOST_BYTES = 1 << 16
"""Bytes of an array up to which its contents are compared."""

_SAYS = re.compile("debug|info|warn|error|exception|critical|fatal|log$")
"""Names of functions that log, to which libraries add others, such as ``warning_once``."""

_SETTINGS: dict[str, Any] = {
    "allow_rnn": True,
    "automatic_dynamic_shapes": False,
    "compiled_autograd": True,
    "skip_nnmodule_hook_guards": False,
    "specialize_float": True,
    "specialize_int": True,
    "trace_autograd_ops": True,
}

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_HELD = (list, dict, set, deque)
_OTHERS = (random.Random, np.ndarray, np.generic, type(os.environ))

_EXAMPLE = frozenset({"inputs", "targets"})
_FUNCTIONS = (types.FunctionType, property, classmethod, staticmethod)

_MISSING = object()
_NO_PLACE = (AttributeError, IndexError, KeyError, SyntaxError, TypeError, ValueError)


class Guards:
    """The Python state that code has read, to be compared with the present one.

    Args:
        manager: Dynamo's guards.
        scope: The objects that the code was given.
        variables: The globals of the code that Dynamo began with.
        read: All that was read, by Dynamo's names; objects that guards know by their addresses last as long as these.
        key: The guards as text.
        example: Inputs and targets, as :func:`_described` has them.
        batch: Returns whether the same is read for another number of samples.
    """

    def __init__(
        self,
        manager: Any,
        scope: Mapping[str, Any],
        variables: dict[str, Any],
        read: Mapping[str, Any],
        key: frozenset[str],
        example: tuple[Any, list[Any], list[torch.Size]],
        batch: Callable[[int], bool],
    ) -> None:
        self.key = key
        """Equal for guards that hold at the same time."""
        self._manager, self._scope, self._globals = manager, dict(scope), variables
        self.read = {name: self._present(name) if value is None else value for name, value in read.items() if name}
        """All that was read, by Dynamo's names."""
        self._example, self._batch = example, batch
        self._others = {
            name: (value, _content(value)) for name, value in self.read.items() if isinstance(value, _OTHERS)
        }
        """What Dynamo does not compare by contents."""

    @property
    def names(self) -> set[str]:
        """All that was read, as the user's code has it."""
        return set(map(self._called, self.read))

    def serve(self, example: tuple[Any, Any]) -> bool:
        """Return whether the code reads the same for inputs and targets of other sizes."""
        sizes = {shape[0] for shape in _described(example)[2] if shape}
        return _described(example) == self._example or (
            self.differ_in_samples(example) and len(sizes) == 1 and self._batch(*sizes)
        )

    def differ_in_samples(self, example: tuple[Any, Any]) -> bool:
        """Return whether inputs and targets differ from those that were read in their number of samples at most."""
        (nesting, kinds, shapes), (own_nesting, own_kinds, own_shapes) = _described(example), self._example
        alike = [shape[1:] for shape in shapes] == [shape[1:] for shape in own_shapes]
        return alike and (nesting, kinds) == (own_nesting, own_kinds)

    @property
    def changed(self) -> str | None:
        """The first change that is found, as text; ``None`` if there is none."""
        if not self._manager.check(self._scope):
            return self._failed()
        return next((self._called(name) for name, other in self._others.items() if self._differs(name, *other)), None)

    def _differs(self, name: str, value: Any, content: Any) -> bool:
        now = self._present(name)
        return _content(value) != content or (now is not value and now is not _MISSING)

    def _failed(self) -> str:
        """Return what the first guard that fails is about."""
        said = self._manager.check_verbose(self._scope).verbose_code_parts
        failed = _ATTRIBUTE.sub(r"\1.\2", said[0].split("  #")[0].strip()) if said else ""
        name = max((name for name in self.read if name in failed), key=len, default="")
        if failed.startswith("not ") and self._present(failed[4:]) is not _MISSING:
            name = failed[4:]
        if not name:
            return _readable(failed) or "something that the model reads"
        now = self._present(name)
        return f"{self._called(name)} (now {now!r})" if isinstance(now, PLAIN) else self._called(name)

    def _called(self, name: str) -> str:
        """Return one of Dynamo's names as the user's code has it."""
        if cell := _CELL.match(name):
            code = getattr(self._present(cell[1]), "__code__", None)
            if code is not None:
                return _readable(code.co_freevars[int(cell[2])] + cell[3])
        return _readable(name)

    def _present(self, name: str) -> Any:
        """Return what is at one of Dynamo's names now."""
        try:
            return self._found(ast.parse(name, mode="eval").body)
        except _NO_PLACE:
            return _MISSING

    def _found(self, node: ast.expr) -> Any:
        match node:
            case ast.Name("L"):
                return self._scope
            case ast.Name("G"):
                return self._globals
            case ast.Attribute():
                return getattr(self._found(node.value), node.attr)
            case ast.Constant():
                return node.value
            case ast.Subscript():
                return self._found(node.value)[self._found(node.slice)]
            case ast.Call(ast.Name("list"), [items]):
                return list(self._found(items))
            case ast.Call(ast.Attribute(ast.Name("dict"), "keys"), [items]):
                return dict.keys(self._found(items))
        raise ValueError(f"no place: {ast.dump(node)}")

    def kept(self) -> Callable[[], None]:
        """Return a function that restores what was read to its present state, as far as it is plain values."""
        held = [(value, value.copy()) for value in self.read.values() if type(value) in _HELD]
        drawn = [(value, value.getstate()) for value in self.read.values() if isinstance(value, random.Random)]

        def restore() -> None:
            for value, before in held:
                if len(value) != len(before) or any(a is not b for a, b in zip(_all(value), _all(before), strict=True)):
                    value.clear()
                    value.update(before) if isinstance(value, dict | set) else value.extend(before)
            for value, state in drawn:
                value.setstate(state)
            if not self._manager.check(self._scope):
                for name, before in self.read.items():
                    now = self._present(name) if isinstance(before, PLAIN) else before
                    if type(now) is not type(before) or (now is not before and now != before):
                        with contextlib.suppress(*_NO_PLACE):
                            self._assign(name, before)

        return restore

    def _assign(self, name: str, value: Any) -> None:
        match ast.parse(name, mode="eval").body:
            case ast.Attribute() as node:
                setattr(self._found(node.value), node.attr, value)
            case ast.Subscript() as node:
                self._found(node.value)[self._found(node.slice)] = value


def _all(value: Any) -> Iterator[Any]:
    yield from value
    if isinstance(value, dict):
        yield from value.values()


_TEXTS = (
    (re.compile(r"\bG\['___unnamed_scope\w*'\]\['(\w+)'\]"), lambda found: found[1]),
    (re.compile(r"\b[GL]\['__import_(\w+)'\]"), lambda found: found[1].replace("_dot_", ".")),
    (re.compile(r"\b[GL]\['([^']*)'\]"), lambda found: found[1]),
    (re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]"), lambda found: f".{found[1]}"),
    (re.compile(r"\.__dict__\['([^']*)'\]"), lambda found: f".{found[1]}"),
)  # fmt: skip


def _readable(text: str) -> str:
    """Return one of Dynamo's names as one writes it.

    >>> _readable("L['model']._modules['0'].p == 0.5")
    'model.0.p == 0.5'
    """
    for pattern, by in _TEXTS:
        text = pattern.sub(by, text)
    return text


def _step(model: Any, loss: Any, metrics: Any, on_device: Any, inputs: Any, targets: Any) -> None:
    given = inputs if on_device is None else on_device(inputs)
    if isinstance(given, tuple):
        outputs = model(*given)
    elif isinstance(given, dict):
        outputs = model(**given)
    else:
        outputs = model(given)
    loss(outputs, targets)
    for metric in metrics.values():
        metric(outputs, targets)


def _call(hook: Any, inputs: Any) -> None:
    hook(*inputs)


def read_step(
    model: nn.Module,
    loss: Any,
    metrics: Mapping[str, Any],
    on_device: Any,
    example: tuple[Any, Any],
    *,
    evaluated: bool,
    moved: bool,
    symbolic: bool = False,
) -> Guards:
    """Let Dynamo read the code of a step.

    Args:
        model: The model.
        loss: The loss.
        metrics: The metrics.
        on_device: Tensor code in front of the model.
        example: Inputs and targets.
        evaluated: Whether all modules are set to evaluate, whatever their modes are otherwise.
        moved: Whether tensors of the model have been replaced by others for now.
        symbolic: Whether it is to serve other numbers of samples, too; it takes up to four times as long.

    Raises:
        Exception: Whatever Dynamo raises where it cannot read the code.
    """
    given: dict[str, Any] = {"model": model, "loss": loss, "metrics": dict(metrics), "on_device": on_device}
    with _without_hooks_of_backward([each for each in (model, loss) if isinstance(each, nn.Module)]):
        return _read(
            _step,
            given | _as_read(example, symbolic=symbolic),
            example,
            evaluated=evaluated,
            moved=moved,
            symbolic=symbolic,
        )


def _as_read(example: tuple[Any, Any], *, symbolic: bool) -> dict[str, Any]:
    """Return inputs and targets for Dynamo, which lacks the conversions of labels that kernels make."""

    def of(tensor: Tensor) -> Tensor:
        made = tensor.detach()
        if symbolic and made.dim():
            torch._dynamo.maybe_mark_dynamic(made, 0)  # it is told what the code makes of the number of samples
        return made

    inputs = pytree.tree_map_only(Tensor, of, example[0])
    targets = pytree.tree_map_only(Tensor, lambda x: of(x.long() if x.dtype == torch.uint8 else x), example[1])
    return {"inputs": inputs, "targets": targets}


def read_hook(hook: Callable[..., Any], given: tuple[Any, ...]) -> Guards:
    """Let Dynamo read the code of a hook of a gradient.

    Args:
        hook: The hook.
        given: What it is called with.

    Raises:
        Exception: As of :func:`read_step`.
        CaptureError: It changes what it reads.
    """
    guards = _read(_call, {"hook": hook, "inputs": given}, (given, None), evaluated=False)
    restore = guards.kept()
    with torch.random.fork_rng(devices=[]):  # a hook may add noise
        hook(*given)
    changed = guards.changed
    restore()
    if changed:
        raise changing(changed, None)
    return guards


def _read(
    function: Callable[..., None],
    given: Mapping[str, Any],
    example: tuple[Any, Any],
    *,
    evaluated: bool,
    moved: bool = False,
    symbolic: bool = False,
) -> Guards:
    """Let Dynamo read a function of this file with all that it calls.

    Args:
        function: The function.
        given: Its arguments, by name.
        example: Inputs and targets as they came.
        evaluated: As for :func:`read_step`.
        moved: Likewise.
        symbolic: Likewise.
    """
    from torch._dynamo import config
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.utils import get_metrics_context

    read: dict[str, Any] = {}
    key: set[str] = set()

    def wanted(entries: Sequence[Any]) -> list[bool]:
        chosen = [_is_of_python(entry, evaluated=evaluated) for entry in entries]
        for entry, keep in zip(entries, chosen, strict=True):
            if keep:
                read[entry.orig_guard.name] = entry.value if entry.has_value else None
                key.update(entry.orig_guard.code_list or ())
            elif array := _ARRAY.match(entry.orig_guard.name):
                read.setdefault(array[1], None)
        return chosen

    alone = types.FunctionType(function.__code__, {"__name__": __name__, "__builtins__": __builtins__})
    with (
        config.patch({**_SETTINGS, "ignore_logging_functions": _logging()}),
        get_metrics_context(),
        _quiet(),
        _contexts_ignored(),
        _on_host(),
        _requiring_gradients(),
        _any_globals(),
    ):
        captured: Any = fullgraph_capture(alone, tuple(given.values())).graph_capture_output
        graph = captured.output_graph
        graph.skip_guards_check = True  # they hold for other inputs, too
        for guard in () if moved else list(graph.guards):
            if guard.create_fn_name() == "TENSOR_MATCH" and not _ELSEWHERE.search(guard.name):
                graph.guards.add(guard.originating_source.make_guard(GuardBuilder.ID_MATCH))
        batch = _sizes_served(graph.shape_env) if symbolic else lambda size: False
        manager = captured.build_guards(alone.__code__, Hooks(guard_filter_fn=wanted)).guard_manager
    empty = {
        name: pytree.tree_map_only(Tensor, lambda x: x.new_empty(0), given[name]) for name in _EXAMPLE & given.keys()
    }
    return Guards(manager, {**given, **empty}, alone.__globals__, read, frozenset(key), _described(example), batch)


def _described(example: tuple[Any, Any]) -> tuple[Any, list[Any], list[torch.Size]]:
    """Return how inputs and targets are nested, their types and constants, and the shapes of their tensors."""
    leaves, nesting = pytree.tree_flatten(example)
    kinds = [leaf.dtype if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
    return nesting, kinds, [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]


def _sizes_served(sizes: Any) -> Callable[[int], bool]:
    """Return a function that tells whether Dynamo would have read the same with some number of samples.

    Args:
        sizes: What it assumed about the number.
    """
    assumed = [guard.expr for guard in sizes.guards]
    equal = list(sizes.replacements.values())

    def of(expression: Any, size: int) -> Any:
        return expression.xreplace(dict.fromkeys(expression.free_symbols, size))

    def served(size: int) -> bool:
        held = all(of(each, size) == True for each in assumed)  # noqa: E712
        return size > 1 and held and all(of(each, size) == size for each in equal)

    return served


def _is_of_python(entry: Any, *, evaluated: bool) -> bool:
    """Return whether a guard is one of Python's state."""
    if (
        "__builtins_dict__" in entry.orig_guard.name
        or _SCOPE.match(entry.orig_guard.name)
        or (evaluated and entry.name.endswith(".training"))
    ):
        return False
    of_modules = isinstance(entry.value, types.FunctionType) and entry.value.__module__ == nn.Module.__module__
    if of_modules:  # tracers replace methods of every module
        return False
    if entry.value is _nothing or entry.name.endswith("._validate_args"):
        return False
    return entry.guard_type not in _OF_A_STEP and not entry.name.endswith(_OF_BACKWARD)


@contextlib.contextmanager
def _without_hooks_of_backward(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Hide the modules' hooks for gradients, at which Dynamo stops."""
    held = [vars(module)[kind] for owner in owners for module in owner.modules() for kind in _OF_BACKWARD]
    before = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(held, before, strict=True):
            hooks.update(own)


def changing(what: str, place: SourceLocation | None) -> CaptureError:
    """Return the error for a forward or a hook that changes what it reads."""
    return CaptureError(
        f"forward, or a hook, changes {what}, which outlasts it{at_line(place)}\n"
        "  A graph would hold what it was at first. Make it a buffer that forward writes to (self.register_buffer), or "
        "an input of the model; on a virtual device (vgpu) it runs as it is",
        where=str(place) if place else None,
    )


def unreadable(error: Exception, name: str) -> CaptureError:
    """Return the error for code that Dynamo cannot read.

    Args:
        error: Dynamo's.
        name: The class of the model.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    reason = " ".join([lines[0] if lines else type(error).__name__, explained.removeprefix("Explanation:").strip()])
    place = place_of_error(error)
    return CaptureError(
        f"{name} cannot be guarded against changes of Python's state{at_line(place)}\n"
        f"  PyTorch's Dynamo does not read this code: {reason.strip()}\n"
        "  Write it otherwise, or give Trainer(..., guards=False): then the code is run once, and what it reads of "
        "Python (attributes, globals, settings) is taken not to change; a virtual device (vgpu) runs it as it is",
        where=str(place) if place else None,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Dynamo's logs and warnings."""
    logger = logging.getLogger("torch._dynamo")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _nothing(*_: object, **__: object) -> None: ...


@contextlib.contextmanager
def _contexts_ignored() -> Iterator[None]:
    """Let ``save_on_cpu``, which a trace ignores, do nothing, and distributions not decide whether values are valid."""
    kind, checked = autograd.graph.save_on_cpu, torch.distributions.Distribution._validate_args
    before = {name: vars(kind).get(name) for name in ("__init__", "__enter__", "__exit__")}
    for name in before:
        setattr(kind, name, _nothing)
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)
        for name, own in before.items():
            delattr(kind, name) if own is None else setattr(kind, name, own)


def _logging() -> set[Any]:
    """Return the functions that print or log, which Dynamo is to pass by."""
    owners = vars(logging).items(), vars(logging.Logger).items()
    return {
        print,
        warnings.warn,
        *(value for own in owners for name, value in own if _SAYS.match(name) and callable(value)),
    }


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Let Dynamo read the host for every device that code names."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable, TorchInGraphFunctionVariable

    mine = threading.get_ident()
    called: Any = TensorVariable.call_method
    function_called: Any = TorchInGraphFunctionVariable.call_function

    def hosted(value: Any) -> Any:
        found = value.realize()
        named = found.is_python_constant() and isinstance(found.as_python_constant(), str | torch.device)
        return ConstantVariable.create(torch.device("cpu")) if named else found

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != mine:
            return called(self, tx, name, args, kwargs)
        if name == "cuda":
            return self
        given = [hosted(value) for value in args] if name == "to" else args
        return called(self, tx, name, given, all_hosted(kwargs))

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return function_called(self, tx, args, all_hosted(kwargs) if threading.get_ident() == mine else kwargs)

    def all_hosted(kwargs: Any) -> dict[str, Any]:
        return {key: hosted(value) if key == "device" else value for key, value in kwargs.items()}

    TensorVariable.call_method = call_method  # type: ignore[method-assign]
    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchInGraphFunctionVariable.call_function = function_called  # type: ignore[method-assign]
        TensorVariable.call_method = called  # type: ignore[method-assign]


@contextlib.contextmanager
def _requiring_gradients() -> Iterator[None]:
    """Let Dynamo read ``x.requires_grad_()`` and ``x.requires_grad = True`` of inputs, before ``autograd.grad``."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin

    kind: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # the latter up to PyTorch 2.12
    setting = "_call_setattr" if hasattr(kind, "_call_setattr") else "call_setattr"
    set_plainly: Any = getattr(kind, setting)
    required: Any = TensorVariable.method_requires_grad_

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        if not self.source:
            return required(self, tx, requires_grad)
        wanted = requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
        self.as_proxy().node.meta["example_value"].requires_grad_(wanted)
        self.requires_grad = wanted
        return self

    def set_attribute(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        if obj.is_tensor() and name.is_python_constant() and name.as_python_constant() == "requires_grad":
            obj.method_requires_grad_(tx, value)
            return ConstantVariable.create(None)
        return set_plainly(self, tx, obj, name, value)

    TensorVariable.method_requires_grad_ = method_requires_grad_  # type: ignore[method-assign]
    setattr(kind, setting, set_attribute)
    try:
        yield
    finally:
        setattr(kind, setting, set_plainly)
        TensorVariable.method_requires_grad_ = required  # type: ignore[method-assign]


@contextlib.contextmanager
def _any_globals() -> Iterator[None]:
    """Let Dynamo read globals of code that is not in the module of its name: run by a path, or by ``exec``."""
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator

    found: Any = InliningInstructionTranslator.get_globals_source_and_value

    def get_globals_source_and_value(self: Any, name: str) -> Any:
        variables = self.f_globals
        module = sys.modules.get(called := variables.get("__name__", ""))
        if not called or (module is not None and vars(module) is variables):
            return found(self, name)
        variables["__name__"] = f"namedtuple_{called}"  # whose globals Dynamo knows to be those of no module
        try:
            return found(self, name)
        finally:
            variables["__name__"] = called

    InliningInstructionTranslator.get_globals_source_and_value = get_globals_source_and_value  # type: ignore[method-assign]
    try:
        yield
    finally:
        InliningInstructionTranslator.get_globals_source_and_value = found  # type: ignore[method-assign]


class Watch:
    """All of Python's state that a graph depends on.

    Args:
        guards: What Dynamo has read.
        owners: The model, and the loss if it is a module.
        constants: Tensors whose present values the graph holds, with what they are called.
    """

    def __init__(
        self, guards: Sequence[Guards], owners: Collection[nn.Module], constants: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.guards = guards
        self._dicts = [vars(module)[kind] for owner in owners for module in owner.modules() for kind in _OF_BACKWARD]
        self._parameters = [tensor for owner in owners for tensor in owner.parameters()]
        self._hooks = self._present_hooks()
        self._tensors = [(name, tensor, _content(tensor)) for name, tensor in constants]
        kinds = {type(each) for owner in owners for each in owner.modules()}
        self._functions = _functions(kinds.union(*(map(type, each.read.values()) for each in guards)))
        self._default = torch.get_default_dtype()

    def covers(self, other: Watch) -> bool:
        """Return whether another one that holds now changes only if this one does."""
        mine, others = (frozenset[str]().union(*(guards.key for guards in each.guards)) for each in (self, other))
        tensors = {id(tensor) for _, tensor, _ in self._tensors}
        return others <= mine and tensors.issuperset(id(tensor) for _, tensor, _ in other._tensors)

    @property
    def changed(self) -> str | None:
        """The first change that is found, as text; ``None`` if there is none."""
        for guards in self.guards:
            if changed := guards.changed:
                return changed
        if any(a is not b for a, b in zip_longest(self._hooks, self._present_hooks())):
            return "a hook of a gradient"
        for kind, name, function in self._functions:
            if kind.__dict__.get(name) is not function:
                return f"{kind.__module__}.{kind.__qualname__}.{name}"
        for name, tensor, before in self._tensors:
            if _content(tensor) != before:
                return name
        if torch.get_default_dtype() is not self._default:
            return f"torch.get_default_dtype() (now {torch.get_default_dtype()})"
        return None

    def _present_hooks(self) -> list[Any]:
        own = (getattr(tensor, "_backward_hooks", None) for tensor in self._parameters)
        return [hook for hooks in (*self._dicts, *own) if hooks for hook in hooks.values()]


def _content(value: Any) -> Any:
    """Return what changes with the contents of a tensor, an array, a generator of random numbers or the environment."""
    if isinstance(value, Tensor):
        return value._version, value.data_ptr()
    if isinstance(value, np.ndarray | np.generic):
        return value.shape, value.tobytes() if value.nbytes <= _MOST_BYTES else None
    return value.getstate() if isinstance(value, random.Random) else dict(value)


def _functions(classes: Iterable[type]) -> list[tuple[type, str, Any]]:
    """Return the functions of classes and their bases: class, name and function."""
    others = nn.Module, object  # tracers replace methods of the one
    bases = dict.fromkeys(base for each in classes for base in each.__mro__ if base not in others)
    return [
        (base, name, value) for base in bases for name, value in vars(base).items() if isinstance(value, _FUNCTIONS)
    ]
