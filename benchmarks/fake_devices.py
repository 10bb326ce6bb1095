"""Programs run with fake tensors as if on another device, and compared with the outputs that they state.

A fake tensor has a device, a shape and a type, and no memory, so that this needs no GPU: the shape functions of PyTorch
know much of what its CUDA kernels return. What they do not know is in :data:`FACTS`, from PyTorch's sources, and the
list of operators that have a CUDA kernel is the one from which PyTorch is generated (``native_functions.yaml``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchgen
import yaml
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from onebox.graph import ModelPrograms, Phase, Port
from onebox.wire import (
    ATTENTION,
    ATTENTION_BACKWARD,
    DTYPES,
    Many,
    Operator,
    Program,
    SlotArgument,
    TensorSpec,
    Value,
    dtype_name,
    overload,
    specs_by_slot,
)
from onebox.wire import attention as attention_operators
from onebox.worker.programs.arguments import constant
from onebox.worker.programs.device_implementation import device_implementation

CUDA = torch.device("cuda:0")

_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """An operator that would not do on a device what its program states.

    Args:
        program: The program.
        operator: The operator.
        problem: The difference.
    """

    program: str
    operator: str
    problem: str

    def __str__(self) -> str:
        return f"{self.program}: {self.operator} {self.problem}"


def mismatches(name: str, program: Program, device: torch.device = CUDA) -> list[Mismatch]:
    """Run a program with fake tensors on a device; return what differs from its statements.

    Args:
        name: Its name in the results.
        program: The program.
        device: The device.
    """
    with _faked():
        return _walk(name, program, [_made(spec, device) for spec in program.inputs], device)[0]


def of_model(name: str, model: ModelPrograms, device: torch.device = CUDA) -> list[Mismatch]:
    """Return the mismatches of all programs of a model, each run with the values that those before it make."""
    found: list[Mismatch] = []
    values: dict[Port, Tensor] = {}
    with _faked():
        for phase in sorted(model.phases, key=_in_order):
            part = model.phases[phase]
            inputs = zip(part.inputs, part.program.inputs, strict=True)
            given = [values[port] if port in values else _made(spec, device) for port, spec in inputs]
            bad, made = _walk(f"{name} {phase.kind}{phase.stage}", part.program, given, device)
            found += bad
            values |= {port: value for port, value in zip(part.outputs, made, strict=True) if port.kind == "value"}
    return found


def _in_order(phase: Phase) -> tuple[bool, int]:
    """Return the place of a phase: forward first, backward from the last stage to the first."""
    return (False, phase.stage) if phase.kind == "F" else (True, -phase.stage)


@contextlib.contextmanager
def _faked() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(Tensor, "contiguous", _contiguous):
        yield


def _walk(
    name: str, program: Program, inputs: Sequence[Tensor], device: torch.device
) -> tuple[list[Mismatch], list[Tensor]]:
    """Run a program; return its mismatches and its outputs."""
    found: list[Mismatch] = []
    registers = dict(enumerate(inputs))
    specs = specs_by_slot(program)
    for operator in program.operators:
        problems, made = _run(operator, registers, specs, device)
        found += [Mismatch(program=name, operator=operator.name, problem=problem) for problem in problems]
        registers.update(made)
        for slot in operator.dies:
            del registers[slot]
    return found, [registers[slot] for slot in program.outputs]


def _contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return ``tensor.contiguous()``; the method itself needs a PyTorch that is built for the tensor's device."""
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def _run(
    operator: Operator, registers: Mapping[int, Tensor], specs: Mapping[int, TensorSpec], device: torch.device
) -> tuple[list[str], dict[int, Tensor]]:
    """Run an operator; return its problems, and its outputs, or what it should have returned."""
    if device.type == "cuda" and not has_cuda_kernel(operator.name):
        return ["has no CUDA kernel"], _stated(operator, device)
    try:
        made = _call(operator, registers, specs, device)
    except Exception as error:
        return [f"fails: {type(error).__name__}: {str(error).splitlines()[0][:200]}"], _stated(operator, device)
    problems: list[str] = []
    given: dict[int, Tensor] = {}
    for number, (slot, spec) in enumerate(zip(operator.outs, operator.specs, strict=True)):
        if slot is None or spec is None:
            continue
        value = made[number]
        given[slot] = value
        if tuple(value.shape) != spec.shape or dtype_name(value.dtype) != spec.dtype:
            seen = f"{dtype_name(value.dtype)}{list(value.shape)}"
            problems.append(f"returns {seen} as output {number}, and the program states {spec}")
            given[slot] = _made(spec, device)
        elif value.device.type != device.type:
            problems.append(f"returns output {number} on {value.device}")
            given[slot] = _made(spec, device)
    return problems, given


def _call(
    operator: Operator, registers: Mapping[int, Tensor], specs: Mapping[int, TensorSpec], device: torch.device
) -> list[Tensor]:
    run = overload(operator.name)
    views = operator.name in ("aten.view.default", "aten._unsafe_view.default")
    other = Tensor.reshape if views else device_implementation(operator, specs, device)  # strides may not allow a view
    args = [_argument(value, registers, device) for value in operator.args]
    kwargs = {key: _argument(value, registers, device) for key, value in operator.kwargs.items()}
    own = run in ON_CUDA and device.type == "cuda"
    try:
        made = _attention(run, args) if own else (other or run)(*args, **kwargs)
    except (AssertionError, RuntimeError) as error:
        if not any(text in str(error) for text in _NEED_CUDA):
            raise
        made = _as_on_cpu(other or run, args, kwargs, device)
    results = [made] if isinstance(made, Tensor) else list(made)
    fact = FACTS.get(operator.name) if device.type == "cuda" else None
    return results if fact is None else fact(args, results)


_NEED_CUDA = ("PyTorch is not linked with support for cuda devices", "Torch not compiled with CUDA enabled")
"""Errors of shape functions that slice a tensor, and of operators without one, whose kernel would be run on zeros."""


def _as_on_cpu(run: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """Return results of an operator whose shapes need a PyTorch for its device, as the CPU has them."""

    def on(where: torch.device, value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where)

    args, kwargs = tree_map_only(Tensor, lambda value: on(torch.device("cpu"), value), (args, kwargs))
    return tree_map_only(Tensor, lambda value: on(device, value), run(*args, **kwargs))


def _attention(operator: OpOverload, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run attention by each kernel that a GPU may choose; return the results, which must be alike."""
    backward = operator is ATTENTION_BACKWARD
    query, (mask, *_) = args[backward], [*args[8 if backward else 5 :], None]
    kernels = [attention_operators.MATH]
    if attention_operators.fits_fused(query, query, query, mask):
        kernels.append(attention_operators.EFFICIENT)
        if mask is None and query.dtype is not torch.float32:
            kernels.append(attention_operators.FLASH)
    made = []
    for kernel in kernels:
        with mock.patch.object(attention_operators, "kernel_of", lambda *_, kernel=kernel: kernel):
            made.append(ON_CUDA[operator](*args))
    looks = {tuple((tuple(t.shape), t.stride(), t.dtype) for t in results) for results in made}
    if len(looks) > 1:
        raise ValueError(f"the kernels' results are of several kinds: {looks}")
    return made[-1]


def _argument(value: Value, registers: Mapping[int, Tensor], device: torch.device) -> Any:
    if isinstance(value, SlotArgument):
        return registers[value.index]
    if isinstance(value, Many):
        return [_argument(item, registers, device) for item in value.items]
    return constant(value, device)


def _stated(operator: Operator, device: torch.device) -> dict[int, Tensor]:
    pairs = zip(operator.outs, operator.specs, strict=True)
    return {slot: _made(spec, device) for slot, spec in pairs if slot is not None and spec is not None}


def _made(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)


# ---- what PyTorch's sources say


def has_cuda_kernel(name: str) -> bool:
    """Return whether an operator runs on CUDA, by PyTorch's own declarations."""
    return name not in _without_cuda()


@functools.cache
def _without_cuda() -> frozenset[str]:
    """Return the operators with kernels for some devices, none of which is CUDA."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found = set()
    for entry in yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        dispatch = entry.get("dispatch")
        if not dispatch or "structured_delegate" in entry:
            continue
        keys = {key.strip() for keys in dispatch for key in keys.split(",")}
        if "CUDA" not in keys and not keys.intersection(_COMPOSITE):
            base, _, rest = entry["func"].split("(")[0].partition(".")
            found.add(f"aten.{base}.{rest or 'default'}")
    return frozenset(found)


ON_CUDA: dict[OpOverload, Callable[..., tuple[Tensor, ...]]] = {
    ATTENTION: attention_operators.forward_cuda,
    ATTENTION_BACKWARD: attention_operators.backward_cuda,
}
"""Operators of onebox that are different functions on GPUs; PyTorch would call their shape functions instead."""


def _running_statistics(args: Sequence[Any], made: list[Tensor]) -> list[Tensor]:
    """Correct the new running statistics of batch norm.

    They are changed copies of the old ones (``aten/src/ATen/native/BatchNorm.cpp``,
    ``_batch_norm_legit_functional``), whatever the type of the input; shape functions say float32.
    """
    return [*made[:3], *(value.to(old.dtype) for value, old in zip(made[3:], args[3:5], strict=True))]


FACTS: dict[str, Callable[[Sequence[Any], list[Tensor]], list[Tensor]]] = {
    "aten._native_batch_norm_legit_functional.default": _running_statistics,
}
"""What CUDA kernels return where PyTorch's shape functions are wrong, by operator: of arguments and fake outputs."""
