"""Rows of argument rules: limits of operators whose kernels do not check all that they rely on.

Each row was written after reading a kernel of ATen that takes sizes, integers or elements of a tensor for granted, and
reads or writes elsewhere, or divides by zero, if they are wrong. A row may be stricter than the kernel needs, but
admits everything that PyTorch's own modules, functions and gradients pass. Its language is that of
:mod:`.rule_language`.

Clauses of elements cost one pass over each tensor in every call. On a GPU they add an assertion to the device's stream,
without a wait of the host; where kernels of GPUs assert the same themselves (``nll_loss``, ``multi_margin_loss``),
nothing is added.

An operator without a row is in ``operator_kinds.txt``, by the kind of which no argument leads a kernel out of memory;
one that is in neither is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.worker.sandbox.allow_list import KINDS, kinds
from onebox.worker.sandbox.rule_functions import FUNCTIONS
from onebox.worker.sandbox.rule_language import Row

_INTEGERS = "int64|int32"
_FLAT_INTEGERS = f"{_INTEGERS}, contiguous"

_LEADING = "len(grad_output) == len(self); grad_output[:-d] == self[:-d]"
_POOLED = f"indices: int64, dense, ~ grad_output, in 0 .. prod(self[-d:]); len(self) in (d + 1, d + 2); {_LEADING}"
_UNDIVIDED = "divisor_override > 0 if given(divisor_override) and not floating(self)"  # see rule_functions.quotient
_SPREAD = f"{_LEADING}; prod(self) > 0 or prod(grad_output) == 0"

_BAGS = f"indices offsets: {_FLAT_INTEGERS}, 1d; 0 <= mode < 3"
_BAGS_BACK = (
    f"{_BAGS}; grad: 2d; offset2bag: {_FLAT_INTEGERS}, in 0 .. grad[0]; "
    "offset2bag ~ [prod(indices)] if prod(offset2bag) > 0; "
    "prod(offsets) > 0 or prod(indices) == 0 if prod(offset2bag) == 0; @offsets"
)

_IMAGE = "len(input) >= 2; input[1] > 0"
_CHANNELS = "floating, ~ [input[1]]"
_NORM = f"{_IMAGE}; weight? bias? running_mean? running_var?: {_CHANNELS}"
_NORM_BACK = f"{_IMAGE}; prod(input) > 0; grad_out ~ input; weight?: {_CHANNELS}"
_RUNNING = "given(running_mean) and given(running_var)"
_SAVED = f"save_{{0}}?: {_CHANNELS} if {{1}} or given(save_{{0}}) and prod(save_{{0}}) > 0"
_GATHERED = (
    f"{_IMAGE}; running_mean? running_var?: {_CHANNELS}; mean invstd: floating; mean ~ [mean[0], input[1]]; "
    "invstd ~ [invstd[0], input[1]]"
)

_LAYER = "0 < len(normalized_shape) <= len(input); input[len(input) - len(normalized_shape):] == normalized_shape"
_LAYER_ROWS = "prod(input[:len(input) - len(normalized_shape)])"
_GROUPS = (
    "len(input) >= 2; input[:2] == [N, C]; HxW == prod(input[2:]); group > 0; C > 0; C % group == 0; input: dense; "
    "weight?: contiguous, ~ [C]"
)

_GRID = (
    "0 <= interpolation_mode < 3; 0 <= padding_mode < 3; len(input) in (4, 5); len(grid) == len(input); "
    "grid[0] == input[0]; grid[-1] == len(input) - 2"
)
_GRID_BACK = f"{_GRID}; grad_output ~ input[:2] + grid[1:-1]"
_FFT = "0 <= normalization < 3; 0 <= dim < len(self); distinct(dim)"
_REDUCTION = "0 <= reduction < 3"
_LABELS = "target in -1 .. prod(self[-1:])"  # the first -1 ends them
_MARGIN_BACK = (
    "target: int64; len(self) <= 2; prod(grad_output) > 0 or prod(self) == 0; "
    "len(grad_output) == 0 or grad_output[:] == [prod(self[:-1])] if reduction == 0"
)
_QUERIES = (
    "query: 4d; key value: 4d, like query; key[0] == query[0]; key[:3] == value[:3]; key[3] == query[3]; "
    "not cpu(query) or min(query[:3]) > 0 and prod(key) > 0"
)
_FLASH = f"{_QUERIES}; value[3] == query[3]; query key value: adjacent; key[1] > 0; query[1] % key[1] == 0"
_PAIRS = "query[:3] + [key[2]]"
_OUT = "query[:3] + [value[3]]"
_ENCODER = (
    "{1} > 0; embed_dim > 0; embed_dim % {1} == 0; {0}: 3d; {0}[2] == embed_dim; "
    "mask? ~ [{0}[1], {0}[1]] if mask_type == 0; mask? ~ {0}[:2] if mask_type == 1; "
    "mask? ~ [{0}[0], {1}, {0}[1], {0}[1]] if mask_type not in (0, 1)"
)


def _under_fused(row: str) -> str:
    """Return a row that holds where the operators of attention choose a fused kernel: plain ones check themselves."""
    return "; ".join(f"{clause} if fused(query, key, value, mask)" for clause in row.split("; "))


ROWS: Mapping[str, str] = {
    # pooling and padding
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward": _POOLED,
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward": _POOLED,
    "fractional_max_pool2d_backward fractional_max_pool3d_backward": f"{_POOLED}; output_size == grad_output[-d:]",
    "fractional_max_pool2d fractional_max_pool3d": (
        "len(self) in (d + 1, d + 2); len(kernel_size) == d; kernel_size > 0; len(output_size) == d; output_size > 0; "
        "random_samples: 3d, contiguous, in 0 .. 1; random_samples[2] == d; "
        "prod(random_samples) >= d * prod(self[:-d])"
    ),
    "max_unpool2d max_unpool3d": "len(output_size) == d; output_size >= 0; indices: ~ self, in 0 .. prod(output_size)",
    "avg_pool2d avg_pool3d": _UNDIVIDED,
    "avg_pool2d_backward avg_pool3d_backward": f"{_UNDIVIDED}; {_SPREAD}",
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward": _SPREAD,
    "adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d": "output_size >= 0; visits(output_size) < 2**31",
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d": (
        "len(padding) == 2 * d"
    ),
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
    "replication_pad2d_backward replication_pad3d_backward": f"len(padding) == 2 * d; {_LEADING}",
    # embeddings; the plain kernel of CPUs leaves rows out that there are not, but counts frequencies of all
    "embedding_dense_backward": (
        f"indices: {_INTEGERS}; num_weights >= 0; len(grad_output) > 0; grad_output[:-1] == indices[:]; "
        "indices in 0 .. num_weights if scale_grad_by_freq; "
        "indices in 0 .. num_weights or padding_idx if not scale_grad_by_freq and not cpu(indices)"
    ),
    "embedding_renorm embedding_renorm_": f"self: 2d; indices: {_INTEGERS}, in 0 .. self[0]",
    "_embedding_bag _embedding_bag_forward_only": (
        f"{_BAGS}; weight: 2d; indices in 0 .. weight[0]; per_sample_weights? ~ [prod(indices)]; "
        "mode == 0 if given(per_sample_weights); prod(offsets) > include_last_offset or prod(indices) == 0; "
        "prod(offsets) > 0 if include_last_offset; @offsets"
    ),
    "_embedding_bag_backward": (  # on GPUs the last offset has a bag_size, too; empty bags have 0 or -1 as maximum
        f"{_BAGS_BACK}; not sparse; num_weights >= 0; per_sample_weights? ~ [prod(indices)]; "
        f"indices in 0 .. num_weights; bag_size: {_FLAT_INTEGERS} if mode == 1; "
        "prod(bag_size) >= grad[0] if mode == 1; "
        f"maximum_indices: {_FLAT_INTEGERS}, ~ grad, in -1 .. max(num_weights, 1) if mode == 2"
    ),
    "_embedding_bag_per_sample_weights_backward": (
        f"{_BAGS_BACK}; mode == 0; weight: 2d; weight[1] == grad[1]; indices in 0 .. weight[0]"
    ),
    # losses
    "binary_cross_entropy": "target ~ self",
    "binary_cross_entropy_backward": "target ~ self; grad_output ~ self if prod(grad_output) != 1",
    "huber_loss": _REDUCTION,
    "soft_margin_loss": f"{_REDUCTION}; target ~ self",
    "smooth_l1_loss_backward": (  # of integers beta is one, too, and may be zero
        "floating(grad_output) or floating(self) or floating(target)"
    ),
    "nll_loss_backward": (
        "target: int64|uint8; prod(target) == 1 if len(self) == 1; "
        "target in 0 .. self[-1] or ignore_index if reduction == 0 and cpu(target)"
    ),
    "nll_loss2d_backward": (
        "len(self) == 4; target: int64|uint8; target in 0 .. self[1] or ignore_index if reduction == 0 and cpu(target)"
    ),
    "multi_margin_loss": "prod(self) > 0 or reduction == 0",
    "multi_margin_loss_backward": (
        f"{_MARGIN_BACK}; prod(target) == prod(self[:-1]); weight? ~ [prod(self[-1:])]; "
        "target in 0 .. prod(self[-1:]) if cpu(target)"
    ),
    "multilabel_margin_loss_forward": f"prod(self) > 0 or reduction == 0; {_LABELS} if not cpu(target)",
    "multilabel_margin_loss_backward": f"{_MARGIN_BACK}; target is_target ~ self; {_LABELS}",
    "_ctc_loss": (
        f"log_probs: 3d; log_probs[1] > 0; targets: {_INTEGERS}; len(targets) in (1, 2); 0 <= blank < log_probs[2]; "
        "targets[0] == log_probs[1] if len(targets) == 2; @ctc; @ctc_elements"
    ),
    "_ctc_loss_backward": (
        f"log_probs: 3d; log_probs[1] > 0; targets: {_INTEGERS}; len(targets) in (1, 2); 0 <= blank < log_probs[2]; "
        "targets[0] == log_probs[1] if len(targets) == 2; log_alpha: 3d; log_alpha[0] == log_probs[1]; "
        "log_alpha[1] == log_probs[0]; grad neg_log_likelihood ~ [log_probs[1]]; "
        "grad neg_log_likelihood log_alpha: like log_probs; @ctc; @ctc_elements"
    ),
    # norms
    "native_batch_norm": (
        f"{_NORM}; {_RUNNING} if not training; {_SAVED.format('mean', 'training')}; "
        f"{_SAVED.format('invstd', 'training')}"
    ),
    "_native_batch_norm_legit _native_batch_norm_legit_functional": f"{_NORM}; {_RUNNING} if not training",
    "_native_batch_norm_legit_no_training _batch_norm_no_update": f"{_NORM}; {_RUNNING}",
    "_batch_norm_with_update _batch_norm_with_update_functional": _NORM,
    "native_batch_norm_backward": (
        f"{_NORM_BACK}; running_mean? running_var?: {_CHANNELS}; {_SAVED.format('mean', 'train')}; "
        f"{_SAVED.format('invstd', 'train')}; given(save_mean) and given(save_invstd) if train; {_RUNNING} if not train"
    ),
    "batch_norm_backward": (
        f"{_NORM_BACK}; running_mean? running_var?: {_CHANNELS}; {_SAVED.format('mean', 'update')}; "
        f"{_SAVED.format('var', 'update')}; given(save_mean) and given(save_var) if update; {_RUNNING} if not update"
    ),
    "batch_norm_stats": _IMAGE,
    "batch_norm_elemt": f"{_IMAGE}; weight? bias? mean invstd: {_CHANNELS}",
    "batch_norm_backward_reduce": f"{_NORM_BACK}; mean invstd: {_CHANNELS}",
    "batch_norm_backward_elemt": f"{_NORM_BACK}; mean invstd sum_dy sum_dy_xmu: {_CHANNELS}",
    "batch_norm_gather_stats": _GATHERED,
    "batch_norm_gather_stats_with_counts": f"{_GATHERED}; counts ~ [mean[0]]",
    "native_layer_norm": f"{_LAYER}; weight? bias? ~ normalized_shape",
    "native_layer_norm_backward": (
        f"{_LAYER}; weight? bias? ~ normalized_shape; grad_out ~ input; mean rstd: contiguous; "
        f"prod(mean) == {_LAYER_ROWS}; prod(rstd) == {_LAYER_ROWS}"
    ),
    "_fused_rms_norm_backward": (
        f"{_LAYER}; weight? ~ normalized_shape; grad_out ~ input; rstd: contiguous; prod(rstd) == {_LAYER_ROWS}"
    ),
    "native_group_norm": f"{_GROUPS}; bias?: contiguous, ~ [C]",
    "native_group_norm_backward": (
        f"{_GROUPS}; grad_out: dense, ~ input; mean rstd: contiguous; prod(mean) == N * group; prod(rstd) == N * group"
    ),
    "_weight_norm_interface": "prod(v) > 0; dim in (0, len(v) - 1); prod(g) == v[dim]; v g: contiguous",
    "_weight_norm_interface_backward": (
        "prod(saved_v) > 0; dim in (0, len(saved_v) - 1); prod(saved_g) == saved_v[dim]; "
        "prod(saved_norms) == saved_v[dim]; grad_w ~ saved_v; saved_v saved_g saved_norms grad_w: contiguous"
    ),
    # recurrent layers and attention
    "recurrent recurrent_backward": "@recurrent",
    "_thnn_fused_lstm_cell": "cx ~ [input_gates[0], input_gates[1] // 4]",
    "_thnn_fused_gru_cell": "hx ~ [input_gates[0], input_gates[1] // 3]",
    "_thnn_fused_lstm_cell_backward_impl": (
        "cx: 2d; cy ~ cx; grad_hy? grad_cy? ~ cx; prod(workspace) == 4 * prod(cx); workspace: 2d"
    ),
    "_thnn_fused_gru_cell_backward": "grad_hy: 2d; workspace ~ [grad_hy[0], 5 * grad_hy[1]]",
    "attention": _under_fused(f"{_QUERIES}; key[1] == query[1]; mask? <~ {_PAIRS}"),
    "attention_backward": _under_fused(
        f"{_QUERIES}; key[1] == query[1]; mask? <~ {_PAIRS}; out gradient: like query, ~ {_OUT}; logsumexp ~ query[:3]"
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        f"{_FLASH}; key[1] == query[1] or shares_heads(); attn_mask? <~ {_PAIRS}"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        f"{_FLASH}; key[1] == query[1] or shares_heads(); attn_mask? <~ {_PAIRS}; "
        f"out: adjacent; out grad_out: like query, ~ {_OUT}; logsumexp ~ query[:3]"
    ),
    "_scaled_dot_product_flash_attention": _FLASH,
    "_scaled_dot_product_flash_attention_backward": (
        f"{_FLASH}; out: adjacent; out grad_out: like query, ~ {_OUT}; logsumexp ~ query[:3]; "
        "prod(cum_seq_q) == 0 if given(cum_seq_q); prod(cum_seq_k) == 0 if given(cum_seq_k); "
        "prod(philox_seed) >= 2 or dropout_p == 0"
    ),
    "_scaled_dot_product_efficient_attention": (
        f"{_QUERIES}; key[1] == query[1]; query key value: adjacent; attn_bias? <~ {_PAIRS}"
    ),
    "_scaled_dot_product_efficient_attention_backward": (  # rows of logsumexp are padded
        f"{_QUERIES}; key[1] == query[1]; query key value out: adjacent; attn_bias? <~ {_PAIRS}; "
        f"out grad_out_: like query, ~ {_OUT}; logsumexp: 3d; logsumexp[:2] == query[:2]; logsumexp[2] >= query[2]; "
        "prod(philox_seed) >= 1 or dropout_p == 0"
    ),
    "_native_multi_head_attention": _ENCODER.format("query", "num_head"),
    "_transformer_encoder_layer_fwd": _ENCODER.format("src", "num_heads"),
    "_softmax_backward_data _log_softmax_backward_data": "output ~ grad_output",
    "_masked_softmax": (
        "prod(self) > 0; len(self) == 4 if mask_type in (0, 1); mask ~ self[2:] if mask_type == 0; "
        "mask ~ [self[0], self[3]] if mask_type == 1; mask ~ self if mask_type not in (0, 1)"
    ),
    "_masked_softmax_backward": "prod(grad_output) > 0; output mask ~ grad_output",
    # images
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward": (
        "@scales"
    ),
    "upsample_linear1d upsample_trilinear3d upsample_linear1d_backward upsample_bilinear2d_backward "
    "upsample_trilinear3d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward "
    "_upsample_bicubic2d_aa_backward _upsample_lanczos2d_aa_backward": "@scales",
    "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa": (
        "@scales; "  # in images one pixel wide a kernel for bytes steps by the last stride
        "stride(self, 2) == stride(self, 3) "
        "if given(self) and type(self) == uint8 and len(self) == 4 and self[3] == 1 and self[2] > 1"
    ),
    "grid_sampler_2d grid_sampler_3d": _GRID,
    "grid_sampler_3d_backward": _GRID_BACK,
    "grid_sampler_2d_backward": (  # the kernel of CPUs takes no number, or one beyond its type, for an index
        f"{_GRID_BACK}; grid in -1e30 .. 1e30 if cpu(grid) and interpolation_mode == 0 and padding_mode != 0"
    ),
    "convolution_backward": "@convolution_backward",
    "unfold_backward": (
        "prod(grad_in) == 1 if len(input_sizes) == 0; "
        "-len(input_sizes) <= dim < len(input_sizes) if len(input_sizes) > 0; "
        "step > 0 and 0 <= size <= input_sizes[dim] if len(input_sizes) > 0; "
        "grad_in ~ input_sizes[:dim % len(input_sizes)] + [(input_sizes[dim] - size) // step + 1] "
        "+ input_sizes[dim % len(input_sizes) + 1:] + [size] if len(input_sizes) > 0"
    ),
    "native_channel_shuffle": "len(self) > 2; groups > 0; self[1] % groups == 0",
    # gradients and distributions of single elements
    "gelu_backward": "grad_output ~ self",
    "log_sigmoid_backward": (  # programs for GPUs have no buffer
        "grad_output ~ self; buffer ~ self if cpu(self) and not (own and buffer[:] == [0])"
    ),
    "_prelu_kernel": "weight <~ self",
    "_prelu_kernel_backward": "weight <~ self; grad_output ~ self",
    "rrelu_with_noise": "noise: dense, ~ self; out? ~ self",
    "rrelu_with_noise_ rrelu_with_noise_functional": "noise: dense, ~ self",
    "_dirichlet_grad": "alpha total ~ x",
    "_standard_gamma_grad": "output ~ self",
    "binomial": "count prob: not nan",  # a sample would be drawn for ever
    "random.from random.from_out random_.from": (  # the kernel looks for the next number above, beyond the last
        "abs(from) <= 2**62; abs(to) <= 2**62 if given(to)"
    ),
    "div.Tensor_mode div.Scalar_mode div.out_mode div.Scalar_mode_out div_.Tensor_mode div_.Scalar_mode floor_divide "
    "floor_divide_ fmod fmod_ remainder remainder_": "@quotient",
    "lcm lcm_": "@multiple",
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
    "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h "
    "special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p": "@polynomial",
    # linear algebra, transforms, distances
    "linalg_lu_solve": "len(LU) >= 2; pivots: int32, ~ LU[:-2] + [min(LU[-2:])], in 1 .. LU[-2] + 1",
    "lu_unpack": (
        "len(LU_data) >= 2; LU_pivots: int32, ~ LU_data[:-2] + [min(LU_data[-2:])]; "
        "LU_pivots in 1 .. LU_data[-2] + 1 if unpack_pivots"
    ),
    "linalg_lstsq": "prod(b) > 0 or prod(self) == 0",
    "linalg_eig linalg_eigvals _linalg_eigvals": "@finite",
    "_foreach_powsum linalg__powsum": "dtype != bfloat16 if complex(self)",  # which has no complex counterpart
    "_fft_c2c": f"{_FFT}; complex(self)",
    "_fft_r2c": f"{_FFT}; not complex(self)",
    "_fft_c2r": f"{_FFT}; complex(self); last_dim_size > 0; len(dim) > 0; self[dim[-1]] == last_dim_size // 2 + 1",
    "_cdist_backward": (
        "len(x1) >= 2; len(x2) >= 2; x1[-1] == x2[-1]; grad cdist ~ broadcast(x1[:-2], x2[:-2]) + [x1[-2], x2[-2]]"
    ),
    "_pdist_forward": "self: 2d, contiguous",
    "_pdist_backward": "self: 2d, contiguous; prod(self) > 0; grad pdist ~ [self[0] * (self[0] - 1) // 2]",
    # others
    "arange range": (
        "abs(start) < 2**62 if given(start); abs(end) < 2**62; abs(step) < 2**62 if given(step); "
        "abs(step) >= 1 if given(step) and given(dtype) and not floating(dtype); "
        "abs(step) >= 1 if given(step) and given(out) and not floating(out)"
    ),
    "as_strided as_strided_copy as_strided_scatter": "@strides",
    "as_strided_": "@strides_again",
    "_new_zeros_with_same_feature_meta": "0 <= self_num_batch_dims <= len(self)",
    "repeat_interleave": "repeats in 0 .. 2**62 // max(1, prod(repeats))",
    "_foreach_copy": "len(src) == len(self)",
    "median nanmedian": "stride(self, dim) > 0 if given(dim) and len(self) > 0 and self[dim] > 1",
    "histc": "0 < bins < 2**31; @bins_of_range",
    "histogram.bin_ct histogram.bin_ct_out": "0 < bins < 2**31; weight? ~ self; @bins_of_range",
    "histogram.bins_tensor histogram.bins_tensor_out": "bins: 1d, like self; prod(bins) > 1; weight? ~ self",
    "_histogramdd_from_bin_cts": "0 < bins < 2**31; weight? ~ self[:-1]; @bins_of_range",
    "_histogramdd_from_bin_tensors": "bins: 1d, like self; smallest(bins) > 1; weight? ~ self[:-1]",
    "_index_put_impl _index_put_impl_": "len(indices) <= len(self); @unsafe_indices",
    "_unsafe_masked_index _unsafe_masked_index_put_accumulate": "len(indices) <= len(self)",
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_": "@fused_optimizer",
}
"""Rows by operators, of all of their overloads, or of those that are named."""


@functools.cache
def _rows() -> Mapping[str, str]:
    return {name: row for names, row in ROWS.items() for name in names.split()}


def base_name(operator: OpOverload) -> str:
    """Return the name of an operator without namespace and overload."""
    return str(operator._schema.name).rpartition("::")[2]


def _names(operator: OpOverload) -> tuple[str, str]:
    base = base_name(operator)
    return base, f"{base}.{operator._overloadname}"


def kind_of(operator: OpOverload) -> str | None:
    """Return the kind of an operator that needs no rules, ``None`` for any other."""
    return next((kinds()[name] for name in _names(operator) if name in kinds()), None)


@functools.cache
def rules_of(operator: OpOverload) -> Row | None:
    """Return the rules of an operator's arguments, ``None`` if it is of a kind that needs none.

    Raises:
        WireError: It has no rules and is of no kind.
    """
    row = next((_rows()[name] for name in _names(operator) if name in _rows()), None)
    if row is not None:
        return Row(row, FUNCTIONS)
    if kind_of(operator) is None:
        raise WireError(
            f"{operator} has no rules of arguments and is of no kind that needs none; allowed: operators that have a "
            f"row in argument_rules.py or a place in {KINDS}"
        )
    return None
