"""Dynamo reads the code of a step: all of Python's state that it depends on, and how it was read.

This file, and for layers :mod:`onebox.graph.capture.repeated.equal_layers`, touch Dynamo's capture and its guards,
internals of PyTorch. Dynamo makes a graph, too, which is thrown away: :mod:`onebox.graph.capture.joint` traces faster,
and what else a step needs.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, autograd, fx, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from onebox.errors import CaptureError
from onebox.graph.capture.guards import OF_BACKWARD, Guards, LayerGuards, changing
from onebox.graph.capture.locate import at_line, place_of_error
from onebox.graph.capture.repeated.equal_layers import EqualLayers

_OF_A_STEP = frozenset({
    "AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "DISPATCH_KEY_SET_MATCH",
    "DUAL_LEVEL", "DUPLICATE_INPUT", "FSDP_TRAINING_STATE", "FUNCTORCH_STACK_MATCH", "GLOBAL_STATE", "GRAD_MODE",
    "SHAPE_ENV", "TENSOR_MATCH", "TORCH_FUNCTION_STATE",
})  # fmt: skip
"""Guards of shapes and modes: a capture is for one shape, and sets the modes of its step by itself."""

_ELSEWHERE = re.compile(r"^___from_numpy|^L\['(inputs|targets)'\]|\._(parameters|buffers)\['[^']*'\]$")
"""Tensors, by Dynamo's names for them, that are no constants of a graph, or no tensors of the user's."""

_SCOPE = re.compile(r"G\['___unnamed_scope\w*'\]$")
"""All globals of some code together, of which each may come and go."""
_OURS = "['__import_onebox_dot_"
"""In the names of globals of this package, which do not change: those of calls that a trace makes for the user's."""

_ARRAY = re.compile(r"___from_numpy\(([GL]\[.*\].*)\)$")

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

_EXAMPLE = frozenset({"inputs", "targets"})

_WRITING = frozenset({"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR"})
_WRITERS = frozenset({"clear", "extend", "object_setattr_ignore_descriptor", "setattr", "update"})
"""Instructions, and names of functions, by which Dynamo does side effects after a graph."""


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


def _call_layer(layer: Any, inputs: Any) -> None:
    args, kwargs = inputs
    layer(*args, **kwargs)


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
    owners = [each for each in (model, loss) if isinstance(each, nn.Module)]

    def read(symbolic: bool, counters: Collection[str] = ()) -> Guards:
        return _read(
            _step,
            given | _as_read(example, symbolic=symbolic),
            example,
            evaluated=evaluated,
            moved=moved,
            symbolic=symbolic,
            counters=frozenset(counters),
            owners=() if symbolic or counters else owners,
        )

    with _without_hooks_of_backward(owners):
        guards = read(symbolic)
        if symbolic and guards.effects is not None:  # which may note the number of samples
            guards = read(False)
        counters = guards.tried(owners)
        if counters:  # integers that the code changes, and perhaps does not depend on
            counting = read(False, counters)
            if counting.effects is not None and counting.tried(owners) == []:
                return counting
        if counters != []:
            guards.effects = None
        return guards


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
    counters: frozenset[str] = frozenset(),
    owners: Sequence[nn.Module] = (),
) -> Guards:
    """Let Dynamo read a function of this file with all that it calls.

    Args:
        function: The function.
        given: Its arguments, by name.
        example: Inputs and targets as they came.
        evaluated: As for :func:`read_step`.
        moved: Likewise.
        symbolic: Likewise.
        counters: Integers, by Dynamo's names, for whose values symbols stand.
        owners: Modules of whose equal layers one is read.
    """
    from torch._dynamo import config
    from torch._dynamo.utils import get_metrics_context

    variables: dict[str, Any] = {"__name__": __name__, "__builtins__": __builtins__}
    options: Any = {"variables": variables, "evaluated": evaluated, "moved": moved}

    def read_layer(layer: nn.Module, inputs: tuple[Any, Any]) -> LayerGuards:
        made = _Capture(_call_layer, {"layer": layer, "inputs": inputs}, **options)
        manager = made.guards(lambda name: "L['inputs']" not in name)
        own = made.guards(lambda name: "L['layer']" in name and "L['inputs']" not in name)
        return LayerGuards(manager, own, variables, made.read, made.tensors, frozenset(made.key), layer)

    equal = EqualLayers(owners, read_layer)
    with (
        config.patch({**_SETTINGS, "ignore_logging_functions": _logging()}),
        torch.compiler.config.patch(dynamic_sources=",".join(map(re.escape, counters))),  # type: ignore[attr-defined]
        _quiet(),  # about metrics, too, which torch 2.11 cannot write with functions among the settings
        get_metrics_context(),
        _contexts_ignored(),
        _on_host(),
        _requiring_gradients(),
        _any_globals(),
        _checkpoints_read(),
    ):
        with equal.standing_in():
            made = _Capture(function, given, **options)
        effects = _effects(made.whole, counters)
        batch = _sizes_served(made.graph.shape_env) if symbolic else lambda size: False
        manager = made.guards(lambda name: True)
    empty = {
        name: pytree.tree_map_only(Tensor, lambda x: x.new_empty(0), given[name]) for name in _EXAMPLE & given.keys()
    }
    scope = {**given, **empty}
    layers = equal.called.values()
    guards = Guards(manager, scope, variables, made.read, frozenset(made.key), example, batch, counters, layers)
    if effects is not None:
        guards.effects = functools.partial(effects, *scope.values())
    return guards


class _Capture:
    """Dynamo's reading of a function of this file.

    Args:
        function: The function.
        given: Its arguments, by name.
        variables: Its globals, to which Dynamo adds.
        evaluated: As for :func:`read_step`.
        moved: Likewise.
    """

    def __init__(
        self,
        function: Callable[..., None],
        given: Mapping[str, Any],
        *,
        variables: dict[str, Any],
        evaluated: bool,
        moved: bool,
    ) -> None:
        from torch._dynamo.convert_frame import fullgraph_capture
        from torch._dynamo.guards import GuardBuilder

        self._code, self._evaluated = function.__code__, evaluated
        self.read: dict[str, Any] = {}
        self.tensors: set[str] = set()
        self.key: set[str] = set()
        self.whole: Any = fullgraph_capture(types.FunctionType(self._code, variables), tuple(given.values()))
        self.graph = self.whole.graph_capture_output.output_graph
        self.graph.skip_guards_check = True  # they hold for other inputs, too
        for guard in () if moved else list(self.graph.guards):
            if guard.create_fn_name() == "TENSOR_MATCH" and not _ELSEWHERE.search(guard.name):
                self.graph.guards.add(guard.originating_source.make_guard(GuardBuilder.ID_MATCH))

    def guards(self, about: Callable[[str], bool]) -> Any:
        """Return Dynamo's guards of Python's state, and note what they compare.

        Args:
            about: Returns whether those of one of Dynamo's names are wanted.
        """
        from torch._dynamo.hooks import Hooks

        def wanted(entries: Sequence[Any]) -> list[bool]:
            named = [(entry, entry.orig_guard.name) for entry in entries]
            chosen = [about(name) and _is_of_python(entry, evaluated=self._evaluated) for entry, name in named]
            for (entry, name), keep in zip(named, chosen, strict=True):
                if keep:
                    self.read[name] = entry.value if entry.has_value else None
                    self.key.update(entry.orig_guard.code_list or ())
                elif array := _ARRAY.match(name):
                    self.read.setdefault(array[1], None)
                elif about(name) and entry.guard_type == "TENSOR_MATCH":
                    self.tensors.add(name)
            return chosen

        captured = self.whole.graph_capture_output
        return captured.build_guards(self._code, Hooks(guard_filter_fn=wanted)).guard_manager


def _effects(whole: Any, counters: frozenset[str]) -> Callable[..., object] | None:
    """Return a function of the code's arguments that does what the code does to Python's state, without its tensors.

    Args:
        whole: What Dynamo has captured.
        counters: Integers, by Dynamo's names, for whose values symbols stand.

    Returns:
        The function; ``None`` where there is nothing to do, or where it takes values of tensors, or the code depends on
            those of counters.
    """
    captured, given = whole.graph_capture_output, whole.backend_input
    code = captured.bytecode
    if given is None or not any(
        each.opname in _WRITING or each.argval in _WRITERS
        for each in dis.get_instructions(code)
        if each.opname in _WRITING or isinstance(each.argval, str)
    ):
        return None
    nodes = list(given.graph_module.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    whole_numbers = {node for node in nodes if isinstance(node.meta.get("example_value"), torch.SymInt)}
    sizes = captured.output_graph.shape_env
    symbols = {symbol for name, symbol in sizes.source_to_var.items() if name in counters}
    counted = {node for node in places if node in whole_numbers and node.meta["example_value"].node.expr in symbols}
    for node in nodes:
        if counted.intersection(node.all_input_nodes) and node.op != "output":
            if node not in whole_numbers:
                return None
            counted.add(node)
    decided = [guard.expr.free_symbols for guard in sizes.guards] + [set(sizes.replacements)]
    known_nodes = set(places)  # others are values of tensors, or follow from them
    computed = list[Any]()
    for node in nodes:
        if node in whole_numbers and node.op == "call_function" and known_nodes.issuperset(node.all_input_nodes):
            computed.append(node)
            known_nodes.add(node)
    if any(symbols & each for each in decided):
        return None
    if not (whole_numbers & known_nodes).issuperset(nodes[-1].all_input_nodes):
        return None

    def numbers(*values: Any) -> Any:
        known = dict(zip(places, values, strict=True))
        for node in computed:
            known[node] = node.target(*fx.node.map_arg(node.args, known.__getitem__))
        return fx.node.map_arg(nodes[-1].args[0], known.__getitem__)

    done: Callable[..., object] = whole.forward_callable(compiled_fn=numbers)
    return done


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
        or _OURS in entry.orig_guard.name
        or _SCOPE.match(entry.orig_guard.name)
        or (evaluated and entry.name.endswith(".training"))
    ):
        return False
    of_modules = isinstance(entry.value, types.FunctionType) and entry.value.__module__ == nn.Module.__module__
    if of_modules:  # tracers replace methods of every module
        return False
    if entry.value is _nothing or entry.name.endswith("._validate_args"):
        return False
    return entry.guard_type not in _OF_A_STEP and not entry.name.endswith(OF_BACKWARD)


@contextlib.contextmanager
def _without_hooks_of_backward(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Hide the modules' hooks for gradients, at which Dynamo stops."""
    held = [vars(module)[kind] for owner in owners for module in owner.modules() for kind in OF_BACKWARD]
    before = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(held, before, strict=True):
            hooks.update(own)


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
def _checkpoints_read() -> Iterator[None]:
    """Let Dynamo read ``checkpoint_sequential``, which calls ``checkpoint``, which it knows."""
    from torch._dynamo.trace_rules import get_mod_inlinelist

    files, own = get_mod_inlinelist(), checkpoint.__file__
    before = own in files
    files.add(own)
    try:
        yield
    finally:
        if not before:
            files.discard(own)


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
