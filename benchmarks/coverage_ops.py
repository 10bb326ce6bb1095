"""PyTorch's own operator database as trials: every sample of every operator, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from coverage_judge import Mover, Trial, quiet, seed_all
from torch import Tensor
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

UNINITIALISED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "Tensor.resize_")
)
"""Operators whose results are whatever the memory held."""

ON_HOST = frozenset({"tensor_split"})
"""Operators whose arguments beside the first are read by PyTorch itself, and stay on the CPU whatever the device."""

VARIANTS = ("opinfo", "noncontiguous", "inplace", "out")
"""An operator as it is, on inputs with gaps, on its own input, and into tensors that are there already."""


def operator_names() -> list[str]:
    """Return the formatted names of the operators."""
    return sorted(_by_name())


@functools.cache
def _by_name() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for op in op_db:
        found.setdefault(op.formatted_name, []).append(op)
    return found


def trials(kind: str, name: str, dtype: torch.dtype, seed: int) -> Iterator[Trial]:
    """Return every sample of the operators of a name.

    Args:
        kind: One of :data:`VARIANTS`.
        name: The operator's formatted name.
        dtype: Element type of its inputs.
        seed: Of the samples; the same for every kind.
    """
    for op in _by_name()[name]:
        variant = _VARIANTS[kind](op)
        if variant is None or dtype not in op.supported_dtypes("cpu"):
            continue
        backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        if kind == "inplace":
            backward = backward and bool(op.supports_inplace_autograd)
        backward = backward and kind != "out"
        own = (seed * 1_000_003 + zlib.crc32(f"{name} {dtype}".encode())) % 2**31
        seed_all(own)
        with quiet():
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=backward))
        rtol, atol = tolerance(op, dtype)
        values = not (name in UNINITIALISED or getattr(op, "has_nondeterministic_output", False))
        for number, sample in enumerate(samples):
            if kind == "inplace" and sample.broadcasts_input:
                continue
            run = functools.partial(variant, sample, backward, name in ON_HOST, own + number)
            yield Trial(name=f"{number}", run=run, seed=own + number, values=values, rtol=rtol, atol=atol)


def tolerance(op: Any, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """Return the widest relative and absolute tolerance that the database names for an operator and a type."""
    found = [
        override.d[dtype]
        for info in op.decorators
        for override in getattr(info, "decorators", [info])
        if isinstance(override, toleranceOverride) and dtype in override.d
    ]
    if not found:
        return None, None
    return max(item.rtol for item in found), max(item.atol for item in found)


def _forward(op: Any) -> Callable[..., dict[str, Any]]:
    return functools.partial(_run, lambda value, args, kwargs: op(value, *args, **kwargs))


def _inplace(op: Any) -> Callable[..., dict[str, Any]] | None:
    function = op.inplace_variant
    if function is None:
        return None

    def on_copy(value: Any, args: Any, kwargs: Any) -> Any:
        return function(value.clone() if isinstance(value, Tensor) else value, *args, **kwargs)

    return functools.partial(_run, on_copy)


def _out(op: Any) -> Callable[..., dict[str, Any]] | None:
    if not op.supports_out:
        return None

    def into(value: Any, args: Any, kwargs: Any) -> Any:
        made = op(value, *args, **kwargs)
        if isinstance(made, Tensor):
            out: Any = torch.zeros_like(made)
        else:
            out = tuple(torch.zeros_like(item) for item in made)
        returned = op(value, *args, **kwargs, out=out)
        return returned, out

    return functools.partial(_run, into)


def _with_gaps(op: Any) -> Callable[..., dict[str, Any]]:
    def run(sample: Any, *rest: Any) -> dict[str, Any]:
        return _forward(op)(sample.noncontiguous(), *rest)

    return run


_VARIANTS = {"opinfo": _forward, "noncontiguous": _with_gaps, "inplace": _inplace, "out": _out}


def _run(
    function: Callable[[Any, Any, Any], Any],
    sample: Any,
    backward: bool,
    on_host: bool,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    """Run a sample; return its output, its gradients and the inputs that it changed."""
    mover = Mover(device)
    beside = Mover(torch.device("cpu")) if on_host else mover
    value, args, kwargs = mover(sample.input), beside(sample.args), beside(sample.kwargs)
    before = [tensor._version for tensor in mover.tensors]
    chosen = contextlib.nullcontext() if mover.placed or beside.placed else device  # what makes a tensor of none
    with torch.set_grad_enabled(backward), chosen:
        output = function(value, args, kwargs)
    results = {"output": output}
    for number, (tensor, version) in enumerate(zip(mover.tensors, before, strict=True)):
        if tensor._version != version:
            results[f"input {number}"] = tensor
    if backward:
        results |= gradients(sample.output_process_fn_grad(output), mover.tensors, seed)
    return results


def gradients(output: Any, inputs: list[Tensor], seed: int) -> dict[str, Any]:
    """Return the gradients of the inputs for random cotangents, which are the same on every device."""
    sources = [tensor for tensor in inputs if tensor.requires_grad]
    targets = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sources or not targets:
        return {}
    generator = torch.Generator().manual_seed(seed)
    cotangents = [_random_like(target, generator) for target in targets]
    found = torch.autograd.grad(targets, sources, cotangents, allow_unused=True)
    return {f"gradient {number}": gradient for number, gradient in enumerate(found)}


def _random_like(target: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(target.shape, dtype=target.dtype, generator=generator)
    if target.layout != torch.strided:
        made = made.to_sparse() if target.layout == torch.sparse_coo else made.to_sparse(layout=target.layout)
    return made.to(target.device)
