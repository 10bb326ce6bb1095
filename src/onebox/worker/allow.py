"""The allow-list: the only operators that a worker runs.

It is built from the schemas of PyTorch by a rule, and pinned in ``operators.txt`` beside this file; a test compares the
two, so that a new PyTorch cannot widen what a worker does without a person reading the difference.
"""

from __future__ import annotations

import contextlib
import functools
from importlib import resources

import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import overload

_TYPES = frozenset(
    {
        "Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]",
        "int", "Optional[int]", "List[int]", "Optional[List[int]]",
        "float", "Optional[float]", "List[float]", "Optional[List[float]]",
        "bool", "Optional[bool]", "List[bool]",
        "number", "Optional[number]", "str", "Optional[str]", "Device", "Optional[Device]", "Optional[Generator]",
    }
)  # fmt: skip
"""Types of arguments that travel (of a generator only its absence does). Not among them: storages, streams, classes."""

_RETURNS = frozenset({"Tensor", "List[Tensor]"})

_SHAPE_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_ELSEWHERE = (
    "from_file", "_test", "pin_memory", "record_stream", "_cuda_", "mps", "miopen", "vulkan", "nested", "jagged",
    "sparse", "_cslt", "quant", "pack", "_resize_output", "_make_dep_token", "_philox", "sym_constrain",
)  # fmt: skip
"""Parts of names of operators for files, packed and sparse formats, other devices, or PyTorch's own tests."""

_WRITES = frozenset(
    {
        "_copy_from", "_copy_from_and_resize", "_no_grad_embedding_renorm_", "batch_norm", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts", "batch_norm_update_stats", "cudnn_batch_norm", "instance_norm",
        "native_batch_norm",
    }
)  # fmt: skip
"""Operators that write to an argument (running statistics, for most) and whose schemas do not say so."""


def allowed_by_rule(operator: OpOverload) -> bool:
    """Tell whether the rule admits an operator: functional or a view, plain arguments, tensors of known shape out."""
    schema = operator._schema
    if schema.is_mutable or operator.namespace != "aten" or not schema.returns:
        return False
    if schema.name.removeprefix("aten::") in _WRITES:
        return False
    if any(part in schema.name for part in _ELSEWHERE) or _SHAPE_FROM_DATA & set(operator.tags):
        return False
    return all(str(argument.type) in _TYPES for argument in schema.arguments) and all(
        str(value.type) in _RETURNS for value in schema.returns
    )


def names_by_rule() -> list[str]:
    """Return the names of all operators of this torch that the rule admits, sorted."""
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            name = f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
            with contextlib.suppress(WireError):
                names.add(name if allowed_by_rule(overload(name)) else "")
    return sorted(names - {""})


@functools.cache
def pinned_names() -> frozenset[str]:
    """Return the pinned allow-list."""
    text = resources.files("onebox.worker").joinpath("operators.txt").read_text()
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def allowed(name: str) -> OpOverload:
    """Return an operator of the allow-list.

    Raises:
        WireError: It is not on the list, or this torch has not got it.
    """
    if name not in pinned_names():
        raise WireError(f"operator {name!r} is not on the allow-list of this worker")
    return overload(name)
