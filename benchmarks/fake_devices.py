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
from torch._subclasses.fake_tensor import FakeTensorMode

from onebox.graph.programs import ModelPrograms
from onebox.wire import DTYPES, Many, Operator, Program, SlotArgument, TensorSpec, Value, dtype_name, overload
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
    with FakeTensorMode(allow_non_fake_inputs=True):
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
    made = run(*args, **kwargs)
    results = [made] if isinstance(made, Tensor) else list(made)
    fact = FACTS.get(operator.name) if device.type == "cuda" else None
    return results if fact is None else fact(args, results)


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


FACTS: dict[str, Callable[[Sequence[Any], list[Tensor]], list[Tensor]]] = {}
