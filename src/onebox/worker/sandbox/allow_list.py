"""The allow-lists: the only operators that a worker runs.

They are built from the schemas of PyTorch by rules, and pinned beside this file, in ``operators.txt`` (for programs,
which are functional) and ``operators_eager.txt`` (for kernels, which may write to their arguments, too); a test
compares rules and lists, so that a new PyTorch cannot extend the lists without a review of the difference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import resources

import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import ATTENTION, ATTENTION_BACKWARD, RECURRENT, RECURRENT_BACKWARD, is_known, overload

PROGRAMS = "operators.txt"
"""The list of operators of programs."""

EAGER = "operators_eager.txt"
"""The list of operators of kernels; it includes all operators of programs."""

_TYPES = frozenset(
    {
        "Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]",
        "int", "Optional[int]", "List[int]", "Optional[List[int]]",
        "float", "Optional[float]", "List[float]", "Optional[List[float]]",
        "bool", "Optional[bool]", "List[bool]",
        "number", "Optional[number]", "str", "Optional[str]", "Device", "Optional[Device]", "Optional[Generator]",
    }
)  # fmt: skip
"""Types of arguments that can be sent (a generator only as ``None``); not storages, streams, classes."""

_RETURNS = frozenset({"Tensor", "List[Tensor]"})

_TYPES_EAGER = frozenset({"List[number]", "Generator"})

_RETURNS_EAGER = frozenset({"bool", "int", "number"})

_SHAPE_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_ELSEWHERE = (
    "from_file", "_test", "pin_memory", "record_stream", "_cuda_", "mps", "miopen", "vulkan", "nested", "jagged",
    "sparse", "_cslt", "quant", "_pack", "prepack", "nnpack", "4pack", "8pack", "_unpack_dual", "_resize_output",
    "_make_dep_token", "_philox", "sym_constrain",
)  # fmt: skip
"""Parts of names of operators for files, packed and sparse formats, other devices, or PyTorch's own tests."""

_UNCHECKED = frozenset({"_reshape_alias", "_reshape_alias_copy"})
"""Operators that create views outside of a storage without an error."""

_WRITES = frozenset(
    {
        "_copy_from", "_copy_from_and_resize", "_no_grad_embedding_renorm_", "batch_norm", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts", "batch_norm_update_stats", "cudnn_batch_norm", "instance_norm",
        "native_batch_norm",
    }
)  # fmt: skip
"""Operators that write to an argument, mostly running statistics, without declaring it in their schemas."""


_ELSEWHERE_EAGER = (
    *_ELSEWHERE, "fused_moving_avg", "qparams", "q_scale", "q_zero_point", "q_per_channel", "int_repr", "cudnn",
    "nnpack", "mkl", "fbgemm", "triton", "xla", "is_pinned", "storage", "shallow_copy", "coalesce", "indices_copy",
    "_nnz", "_dimI", "_dimV", "dense_dim", "hspmm", "sspaddmm", "padded_tensor", "_foobar", "_transformer_encoder",
)  # fmt: skip
"""The same for kernels, which need no operator that the client's PyTorch would not choose on a common device."""

_NOT_EAGER = frozenset(
    {
        "_backward", "backward", "set_data", "retain_grad", "requires_grad_", "_copy_from", "_copy_from_and_resize",
        "_no_grad_embedding_renorm_", "data", "is_leaf", "output_nr", "_version", "retains_grad", "_fw_primal",
        "_make_dual", "_unpack_dual", "_has_same_storage_numel", "_assert_async", "_functional_assert_async",
    }
)  # fmt: skip
"""Operators for PyTorch's own autograd bookkeeping, which clients do not need on workers."""


def allowed_by_rule(operator: OpOverload) -> bool:
    """Return whether the rule admits an operator: functional or a view, plain arguments, outputs with known shapes."""
    schema = operator._schema
    if schema.is_mutable or not is_known(operator) or not schema.returns:
        return False
    if schema.name.removeprefix("aten::") in _WRITES | _UNCHECKED:
        return False
    if any(part in schema.name for part in _ELSEWHERE) or _SHAPE_FROM_DATA & set(operator.tags):
        return False
    return all(str(argument.type) in _TYPES for argument in schema.arguments) and all(
        str(value.type) in _RETURNS for value in schema.returns
    )


def eager_by_rule(operator: OpOverload) -> bool:
    """Return whether the rule for kernels admits an operator: all of programs, and those that only operate on tensors.

    Operators that write to their arguments, return numbers, or return tensors with data-dependent shapes are included.
    Operators outside PyTorch's dispatcher are excluded: they belong to TorchScript, and some access files.
    """
    if allowed_by_rule(operator):
        return True
    schema = operator._schema
    base = schema.name.removeprefix("aten::")
    if (
        operator.namespace != "aten"
        or base in _NOT_EAGER | _UNCHECKED
        or any(part in base for part in _ELSEWHERE_EAGER)
    ):
        return False
    qualified = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if not torch._C._dispatch_has_kernel(qualified):
        return False
    types = [str(argument.type) for argument in schema.arguments]
    return (
        any("Tensor" in kind for kind in types)
        and all(kind in _TYPES | _TYPES_EAGER for kind in types)
        and all(str(value.type) in _RETURNS | _RETURNS_EAGER for value in schema.returns)
    )


def names_by_rule(rule: Callable[[OpOverload], bool] = allowed_by_rule) -> list[str]:
    """Return the names of all operators of this torch that a rule admits, sorted."""
    own = (ATTENTION, ATTENTION_BACKWARD, RECURRENT, RECURRENT_BACKWARD)
    names = {str(operator) for operator in own if rule(operator)}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            name = f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
            with contextlib.suppress(WireError):
                names.add(name if rule(overload(name)) else "")
    return sorted(names - {""})


@functools.cache
def pinned_names(file: str = PROGRAMS) -> frozenset[str]:
    """Return a pinned allow-list."""
    text = resources.files("onebox.worker.sandbox").joinpath(file).read_text()
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def allowed(name: str, file: str = PROGRAMS) -> OpOverload:
    """Return an operator of an allow-list.

    Raises:
        WireError: It is not on the list, or this torch does not have it.
    """
    if name not in pinned_names(file):
        raise WireError(f"operator {name!r} is not on the allow-list of this worker")
    return overload(name)
