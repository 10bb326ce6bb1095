"""Programs run with fake tensors as if on another device, and compared with the outputs that they state.

A fake tensor has a device, a shape and a type, and no memory, so that this needs no GPU: the shape functions of PyTorch
know much of what its CUDA kernels return. What they do not know is in :data:`FACTS`, from PyTorch's sources, and the
list of operators that have a CUDA kernel is the one from which PyTorch is generated (``native_functions.yaml``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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

from onebox.graph.programs import ModelPrograms
from onebox.wire import ATTENTION, ATTENTION_BACKWARD, DTYPES, attention, Many, Operator, Program, SlotArgument, TensorSpec, Value, dtype_name, overload
from onebox.worker.programs.arguments import constant

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
    found: list[Mismatch] = []
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(Tensor, "contiguous", _contiguous):
        registers: dict[int, Tensor] = {slot: _made(spec, device) for slot, spec in enumerate(program.inputs)}
        for operator in program.operators:
            problems, made = _run(operator, registers, device)
            found += [Mismatch(program=name, operator=operator.name, problem=problem) for problem in problems]
            registers.update(made)
            for slot in operator.dies:
                del registers[slot]
    return found


def of_model(name: str, model: ModelPrograms, device: torch.device = CUDA) -> list[Mismatch]:
    """Return the mismatches of all programs of a model."""
    parts = model.phases.items()
    return [bad for phase, part in parts for bad in mismatches(f"{name} {phase.kind}{phase.stage}", part.program, device)]


def _contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return ``tensor.contiguous()``; the method itself needs a PyTorch that is built for the tensor's device."""
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def _run(
    operator: Operator, registers: Mapping[int, Tensor], device: torch.device
) -> tuple[list[str], dict[int, Tensor]]:
    """Run an operator; return its problems, and its outputs, or what it should have returned."""
    if device.type == "cuda" and not has_cuda_kernel(operator.name):
        return ["has no CUDA kernel"], _stated(operator, device)
    try:
        made = _call(operator, registers, device)
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


def _call(operator: Operator, registers: Mapping[int, Tensor], device: torch.device) -> list[Tensor]:
    run = overload(operator.name)
    args = [_argument(value, registers, device) for value in operator.args]
    kwargs = {key: _argument(value, registers, device) for key, value in operator.kwargs.items()}
    own = run in ON_CUDA and device.type == "cuda"
    made = _attention(run, args) if own else run(*args, **kwargs)
    results = [made] if isinstance(made, Tensor) else list(made)
    fact = FACTS.get(operator.name) if device.type == "cuda" else None
    return results if fact is None else fact(args, results)


def _attention(operator: OpOverload, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run attention by each kernel that a GPU may choose; return the results, which must be alike."""
    query, mask = args[1 if operator is ATTENTION_BACKWARD else 0], args[8 if operator is ATTENTION_BACKWARD else 5]
    kernels = [attention.MATH]
    if attention.fits_fused(query, query, query, mask):
        kernels.append(attention.EFFICIENT)
        if mask is None and query.dtype is not torch.float32:
            kernels.append(attention.FLASH)
    made = []
    for kernel in kernels:
        with mock.patch.object(attention, "kernel_of", lambda *_, kernel=kernel: kernel):
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
    ATTENTION: attention.forward_cuda,
    ATTENTION_BACKWARD: attention.backward_cuda,
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
