"""The rules by which the allow-lists of operators are made from the schemas of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import ATTENTION, ATTENTION_BACKWARD, RECURRENT, RECURRENT_BACKWARD, is_known, overload

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


_UNNEEDED = frozenset(
    {
        # formats of sparse tensors, and kernels that read indices of them without a check
        "segment_reduce", "_segment_reduce_backward", "_convert_indices_from_coo_to_csr",
        "_convert_indices_from_csr_to_coo", "_coalesce", "_coalesced", "coalesce", "_indices", "_indices_copy",
        "indices", "indices_copy", "_values", "_values_copy", "values", "values_copy", "ccol_indices",
        "ccol_indices_copy",
        "col_indices", "col_indices_copy", "crow_indices", "crow_indices_copy", "row_indices", "row_indices_copy",
        "_spdiags", "_spsolve", "hspmm", "smm", "sspaddmm", "_to_dense", "to_dense", "to_dense_backward", "native_norm",
        "to_padded_tensor",
        # numbers of low discrepancy, pruning, quantization
        "_sobol_engine_draw", "_sobol_engine_ff_", "_sobol_engine_initialize_state_", "_sobol_engine_scramble_",
        "_rowwise_prune", "choose_qparams_optimized", "_fused_moving_avg_obs_fq_helper_functional",
        "_saturate_weight_to_fp16", "_mixed_dtypes_linear", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2", "_grouped_mm", "int_repr", "q_per_channel_scales", "q_per_channel_zero_points",
        # parts of other operators, with fewer checks than these have
        "_cummax_helper", "_cummin_helper", "_grid_sampler_2d_cpu_fallback", "_grid_sampler_2d_cpu_fallback_backward",
        "_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv3d_forward", "slow_conv_dilated2d",
        "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d", "_conv_depthwise2d",
        "conv_depthwise3d", "convolution_overrideable", "convolution_backward_overrideable", "linear_backward",
        "matmul_backward", "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
        "_efficient_attention_backward", "_flash_attention_forward_no_dropout_inplace",
        "_fill_mem_eff_dropout_mask_", "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_fused_attention_overrideable_backward", "_transform_bias_rescale_qkv",
        "_triton_multi_head_attention", "_triton_scaled_dot_attention",
        "batch_norm_update_stats", "_batch_norm_impl_index", "_batch_norm_impl_index_backward",
        "_embedding_bag_dense_backward", "linalg_ldl_solve", "_cholesky_solve_helper", "_compute_linear_combination",
        "_logcumsumexp", "_chunk_cat", "_stack",
        # the functional forms of optimizers, which are no part of a program
        "_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd",
        # tensors without memory of their own, or with state that only the client's PyTorch has
        "_add_batch_dim", "_remove_batch_dim", "_make_dual", "_make_dual_copy", "_fw_primal", "_fw_primal_copy",
        "_efficientzerotensor", "_lazy_clone", "_to_cpu", "resize", "resize_as", "set", "_foobar", "_list_to_tensor",
        "tensor", "as_tensor",
    }
)  # fmt: skip
"""Operators that no script or model needs on a worker, and that would need checks."""

_UNNEEDED_KINDS = ("__interpolate", "__upsample", "_ncf_", "cudnn", "fbgemm", "mkldnn")
"""The same as parts of names: of TorchScript, and of libraries that PyTorch's own operators call."""

_INNER_OUT = ("_fft", "_linalg", "_softmax", "_log_softmax", "_conj_physical", "_int_mm")
"""Beginnings of names of parts of other operators that scripts reach with ``out=``; the results of all other parts, and
gradients, are always new tensors."""

_WHOLE = frozenset(
    {"contiguous", "is_nonzero", "set_", "matmul", "linear", "reshape", "view_as", "expand_as", "conj_physical"}
)
"""Composites that are on the lists nevertheless."""

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
        "_make_dual", "_unpack_dual", "_has_same_storage_numel",
    }
)  # fmt: skip
"""Operators for PyTorch's own autograd bookkeeping, which clients do not need on workers."""


def _is_unneeded(operator: OpOverload) -> bool:
    """Return whether neither programs nor scripts need an operator on a worker.

    Composites are decomposed where they are called: into operators whose arguments are checked one by one. Operators
    outside PyTorch's dispatcher belong to TorchScript, and some access files.
    """
    base = operator._schema.name.rpartition("::")[2]
    if base in _UNNEEDED or any(part in base for part in _UNNEEDED_KINDS):
        return True
    if any(argument.is_out for argument in operator._schema.arguments) and (
        base.removeprefix("new_").startswith("empty")
        or "backward" in base
        or (base.startswith("_") and not base.startswith(_INNER_OUT))
    ):
        return True
    if operator.namespace != "aten":
        return False
    if not torch._C._dispatch_has_kernel(operator.name()):
        return True
    composite, own = (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        for key in ("CompositeImplicitAutograd", "CPU")
    )
    return base not in _WHOLE and composite and not own


def allowed_by_rule(operator: OpOverload) -> bool:
    """Return whether the rule admits an operator: functional or a view, plain arguments, outputs with known shapes."""
    schema = operator._schema
    if schema.is_mutable or not is_known(operator) or not schema.returns or _is_unneeded(operator):
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
    """
    if allowed_by_rule(operator):
        return True
    schema = operator._schema
    base = schema.name.removeprefix("aten::")
    if (
        operator.namespace != "aten"
        or _is_unneeded(operator)
        or base in _NOT_EAGER | _UNCHECKED
        or any(part in base for part in _ELSEWHERE_EAGER)
    ):
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
