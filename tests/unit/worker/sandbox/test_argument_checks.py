"""Arguments of operators: what would make a kernel leave its tensors' memory is refused, all else goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onebox.errors import WireError
from onebox.wire import (
    DType,
    KernelSpec,
    Many,
    Operator,
    OwnDevice,
    Program,
    SlotArgument,
    TensorSpec,
    dtype_name,
    overload,
    spec_of,
    with_deaths,
)
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed
from onebox.worker.programs.kernels import CompiledKernel, flatten
from onebox.worker.progress import WorkerProgress
from onebox.worker.sandbox.allow_list import EAGER, PROGRAMS, pinned_names
from onebox.worker.sandbox.argument_checks import check_arguments, guarded, zeros_strided
from onebox.worker.sandbox.argument_rules import kind_of, rules_of

CPU = torch.device("cpu")
FAR = 1 << 40
"""An index or size outside of any memory."""

REFUSED, RAN, OTHERWISE = 0, 1, 2
"""Exit statuses of a child: the check refused a call, the operator ran, or raised an error of its own."""


class Case(NamedTuple):
    """An operator with arguments that are right, and changes of them that are not, by the name of an argument."""

    name: str
    right: Mapping[str, Any]
    wrong: Sequence[Mapping[str, Any]]


def floats(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape) / 8


def integers(*values: int, shape: Sequence[int] = (-1,), dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(tuple(shape))


def pooled(dimensions: int, name: str, **more: Any) -> Case:
    ones, two, four = ((size,) * dimensions for size in (1, 2, 4))
    right = {
        "grad_output": floats(1, 1, *ones), "self": floats(1, 1, *four), **more,
        "indices": torch.zeros(1, 1, *ones, dtype=torch.int64),
    }  # fmt: skip
    return Case(
        name,
        right,
        [
            {"indices": torch.full((1, 1, *ones), FAR)},
            {"indices": torch.full((1, 1, *ones), -1)},
            {"indices": torch.full((1, 1, *ones), 4**dimensions)},
            {"grad_output": floats(1, 8, *ones), "indices": torch.zeros(1, 8, *ones, dtype=torch.int64)},
            {"grad_output": floats(1, 1, *two), "indices": integers(0).expand(1, 1, *two)},
        ],
    )


def windows(dimensions: int) -> dict[str, Any]:
    size = [4] * dimensions
    return {
        "kernel_size": size, "stride": size, "padding": [0] * dimensions, "dilation": [1] * dimensions,
        "ceil_mode": False,
    }  # fmt: skip


CTC = {
    "log_probs": floats(4, 2, 3), "targets": integers(1, 2, 1, -1, shape=(2, 2)), "input_lengths": [4, 3],
    "target_lengths": [2, 1], "blank": 0, "zero_infinity": False,
}  # fmt: skip

CTC_WRONG: list[dict[str, Any]] = [
    {"targets": integers(1, FAR, 1, 1, shape=(2, 2))},
    {"targets": integers(1, -1, 1, 1, shape=(2, 2))},
    {"input_lengths": [5, 3]},
    {"input_lengths": [4, -1]},
    {"target_lengths": [3, 1]},
    {"target_lengths": [2, -1]},
    {"target_lengths": [2]},
    {"blank": 3},
    {"blank": -1},
    {"targets": integers(1, 2, 1, 1, 2), "target_lengths": [4, 4]},
]

BAG = {
    "weight": floats(4, 2), "indices": integers(0, 3, 1), "offsets": integers(0, 2), "scale_grad_by_freq": False,
    "mode": 0, "sparse": False, "per_sample_weights": floats(3), "include_last_offset": False, "padding_idx": -1,
}  # fmt: skip

BAG_WRONG: list[dict[str, Any]] = [
    {"indices": integers(0, FAR, 1)},
    {"indices": integers(0, -1, 1)},
    {"offsets": integers(0, FAR)},
    {"offsets": integers(1, 2)},
    {"offsets": integers(2, 0)},
    {"offsets": integers(shape=(0,))},
    {"indices": integers(0).expand(3)},
    {"offsets": integers(0).expand(2)},
    {"per_sample_weights": floats(1)},
    {"mode": 7, "per_sample_weights": None},
]

BAG_BACK = {
    "grad": floats(2, 2), "indices": integers(0, 3, 1), "offsets": integers(0, 2), "offset2bag": integers(0, 0, 1),
    "bag_size": integers(2, 1), "maximum_indices": integers(shape=(0,)), "num_weights": 4,
    "scale_grad_by_freq": True, "mode": 1, "sparse": False, "per_sample_weights": None, "padding_idx": -1,
}  # fmt: skip

BAG_BACK_WRONG: list[dict[str, Any]] = [
    {"indices": integers(0, FAR, 1)},
    {"offset2bag": integers(0, 0, FAR)},
    {"offset2bag": integers(0)},
    {"num_weights": 1},
    {"bag_size": integers(2)},
    {"bag_size": integers(2).expand(2)},
    {"offset2bag": integers(0).expand(3)},
    {"mode": 2},
    {"mode": 2, "maximum_indices": integers(0).expand(2, 2)},
]


BATCH = {
    "input": floats(2, 64, 2), "weight": floats(64), "bias": floats(64), "running_mean": floats(64),
    "running_var": floats(64), "training": True, "momentum": 0.1, "eps": 1e-5,
}  # fmt: skip

BATCH_WRONG: list[dict[str, Any]] = [{name: floats(1)} for name in ("weight", "bias", "running_mean", "running_var")]

BATCH_BACK = {
    "grad_out": floats(2, 64, 2), "input": floats(2, 64, 2), "weight": floats(64), "running_mean": None,
    "running_var": None, "save_mean": floats(64), "save_invstd": floats(64), "train": True, "eps": 1e-5,
    "output_mask": [True, True, True],
}  # fmt: skip

NORM_BACK = {
    "grad_out": floats(4, 8), "input": floats(4, 8), "normalized_shape": [8], "mean": floats(4, 1),
    "rstd": floats(4, 1), "weight": floats(8), "bias": floats(8), "output_mask": [True, True, True],
}  # fmt: skip

GROUPS = {
    "input": floats(2, 8, 3), "weight": floats(8), "bias": floats(8), "N": 2, "C": 8, "HxW": 3, "group": 4,
    "eps": 1e-5,
}  # fmt: skip

SGD = {
    "self": [floats(64)], "grads": [floats(64)], "momentum_buffer_list": [], "weight_decay": 0.0, "momentum": 0.0,
    "lr": 1.0, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": True,
}  # fmt: skip

ADAM = {
    "self": [floats(64)], "grads": [floats(64)], "exp_avgs": [floats(64)], "exp_avg_sqs": [floats(64)],
    "max_exp_avg_sqs": [], "state_steps": [torch.ones(())], "lr": 1.0, "beta1": 0.9, "beta2": 0.9,
    "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False,
}  # fmt: skip

LAYER = {
    "input": floats(3, 2, 4), "states": [floats(1, 2, 5), floats(1, 2, 5)],
    "weights": [floats(20, 4), floats(20, 5), floats(20), floats(20)], "kind": "lstm", "biases": True,
    "bidirectional": False,
}  # fmt: skip

HEADS = {
    "query": floats(2, 3, 4, 8), "key": floats(2, 3, 5, 8), "value": floats(2, 3, 5, 8), "dropout_p": 0.0,
    "is_causal": False,
}  # fmt: skip

HEADS_BACK = {
    "grad_out": floats(2, 3, 4, 8), **HEADS, "out": floats(2, 3, 4, 8), "logsumexp": floats(2, 3, 4),
}  # fmt: skip

HEADS_WRONG: list[dict[str, Any]] = [
    {"key": floats(1, 3, 5, 8)},
    {"value": floats(2, 1, 5, 8)},
    {"value": floats(2, 3, 1, 8)},
    {"key": floats(2, 3, 5, 4)},
    {"value": floats(2, 3, 5, 1).expand(2, 3, 5, 8)},
    {"query": floats(2, 3, 0, 8)},
    {"query": floats(0, 3, 4, 8), "key": floats(0, 3, 5, 8), "value": floats(0, 3, 5, 8)},
]

CONVOLUTION = {
    "grad_output": floats(1, 4, 3, 3), "input": floats(1, 2, 5, 5), "weight": floats(4, 2, 3, 3), "bias_sizes": [4],
    "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0],
    "groups": 1, "output_mask": [True, True, True],
}  # fmt: skip

LU = {"LU": torch.eye(3), "pivots": integers(1, 2, 3, dtype=torch.int32), "B": floats(3, 1)}

CASES = [
    pooled(2, "aten.max_pool2d_with_indices_backward.default", **windows(2)),
    pooled(3, "aten.max_pool3d_with_indices_backward.default", **windows(3)),
    pooled(2, "aten.adaptive_max_pool2d_backward.default"),
    pooled(3, "aten.adaptive_max_pool3d_backward.default"),
    pooled(2, "aten.fractional_max_pool2d_backward.default", kernel_size=[4, 4], output_size=[1, 1]),
    pooled(3, "aten.fractional_max_pool3d_backward.default", kernel_size=[4, 4, 4], output_size=[1, 1, 1]),
    Case(
        "aten.fractional_max_pool2d.default",
        {
            "self": floats(1, 1, 8, 8), "kernel_size": [2, 2], "output_size": [3, 3],
            "random_samples": torch.full((1, 1, 2), 0.5),
        },
        [{"random_samples": torch.full((1, 1, 2), value)} for value in (1e9, -1.0, torch.nan)]
        + [{"random_samples": torch.full((1, 1, 1), 0.5)}],
    ),
    Case(
        "aten._adaptive_avg_pool2d_backward.default",
        {"grad_output": floats(1, 4, 2, 2), "self": floats(1, 4, 4, 4)},
        [{"grad_output": floats(1, 1, 2, 2), "self": floats(1, 4096, 4, 4)}],
    ),
    Case(
        "aten._adaptive_avg_pool3d_backward.default",
        {"grad_output": floats(1, 2, 2, 2, 2), "self": floats(1, 2, 4, 4, 4)},
        [{"self": floats(1, 2, 4, 0, 4)}, {"self": floats(1, 2, 0, 4, 4)}],
    ),
    *(
        Case(
            f"aten.avg_pool{dimensions}d_backward.default",
            {
                "grad_output": floats(1, 1, *(1,) * dimensions), "self": floats(1, 1, *(4,) * dimensions),
                "kernel_size": [4] * dimensions, "stride": [4] * dimensions, "padding": [0] * dimensions,
                "ceil_mode": False, "count_include_pad": True, "divisor_override": None,
            },
            [
                {"grad_output": floats(4096, 1, *(1,) * dimensions)},
                {"self": floats(0, 1, *(4,) * dimensions)},
            ],
        )
        for dimensions in (2, 3)
    ),
    Case("aten._ctc_loss.default", CTC, CTC_WRONG),
    Case(
        "aten._ctc_loss.Tensor",
        {**CTC, "input_lengths": integers(4, 3), "target_lengths": integers(2, 1)},
        [{"target_lengths": integers(2, FAR)}, {"input_lengths": integers(4, FAR)}, {"target_lengths": integers(2)}],
    ),
    Case(
        "aten._ctc_loss_backward.default",
        {**CTC, "grad": floats(2), "neg_log_likelihood": floats(2), "log_alpha": floats(2, 4, 5)},
        [*CTC_WRONG, {"grad": floats(1)}, {"neg_log_likelihood": floats(1)}, {"log_alpha": floats(2, 4, 3)}],
    ),
    Case("aten._embedding_bag.default", BAG, BAG_WRONG),
    Case("aten._embedding_bag_forward_only.default", BAG, BAG_WRONG),
    Case(
        "aten._embedding_bag_backward.default",
        BAG_BACK,
        [
            *BAG_BACK_WRONG, {"offsets": integers(0, FAR)}, {"sparse": True},
            {"offsets": integers(shape=(0,)), "offset2bag": integers(shape=(0,))},
            {"offset2bag": integers(shape=(0,)), "grad": floats(1, 2), "bag_size": integers(1)},
        ],
    ),
    Case(
        "aten._embedding_bag_per_sample_weights_backward.default",
        {
            "grad": floats(2, 2), "weight": floats(4, 2), "indices": integers(0, 3, 1), "offsets": integers(0, 2),
            "offset2bag": integers(0, 0, 1), "mode": 0,
        },
        [
            {"indices": integers(0, FAR, 1)}, {"offset2bag": integers(0, FAR, 1)}, {"weight": floats(4, 1)},
            {"indices": integers(0).expand(3)}, {"offsets": integers(shape=(0,)), "offset2bag": integers(shape=(0,))},
        ],
    ),
    Case(
        "aten.embedding_dense_backward.default",
        {
            "grad_output": floats(3, 2), "indices": integers(0, 3, 1), "num_weights": 4, "padding_idx": -1,
            "scale_grad_by_freq": True,
        },
        [
            {"indices": integers(0, FAR, 1)}, {"num_weights": 2}, {"grad_output": floats(2, 2)},
            {"indices": integers(0, -1, 1)},
        ],
    ),
    *(
        Case(
            f"aten.{name}.default",
            {"self": floats(4, 2), "indices": integers(0, 3), "max_norm": 0.1, "norm_type": 2.0},
            [{"indices": integers(0, FAR)}, {"indices": integers(0, -1)}, {"self": floats(4)}],
        )
        for name in ("embedding_renorm", "embedding_renorm_")
    ),
    Case(
        "aten.nll_loss_backward.default",
        {
            "grad_output": floats(2), "self": floats(2, 3), "target": integers(1, -100), "weight": None,
            "reduction": 0, "ignore_index": -100, "total_weight": torch.ones(()),
        },
        [{"target": integers(1, FAR)}, {"target": integers(1, 3)}],
    ),
    Case(
        "aten.nll_loss2d_backward.default",
        {
            "grad_output": floats(1, 1, 2), "self": floats(1, 3, 1, 2), "target": integers(1, -100, shape=(1, 1, 2)),
            "weight": None, "reduction": 0, "ignore_index": -100, "total_weight": torch.ones(()),
        },
        [{"target": integers(1, FAR, shape=(1, 1, 2))}],
    ),
    Case(
        "aten.multi_margin_loss_backward.default",
        {
            "grad_output": torch.ones(()), "self": floats(2, 3), "target": integers(1, 2), "p": 1, "margin": 1.0,
            "weight": None, "reduction": 1,
        },
        [
            {"target": integers(1, FAR)}, {"weight": floats(1)}, {"target": integers(1)},
            {"reduction": 0, "grad_output": floats(1)},
        ],
    ),
    Case("aten._native_batch_norm_legit_functional.default", BATCH, [*BATCH_WRONG, {"input": floats(2, 0, 2)}]),
    Case(
        "aten._native_batch_norm_legit.no_stats",
        {name: value for name, value in BATCH.items() if not name.startswith("running")},
        [{"training": False}],
    ),
    Case("aten._batch_norm_no_update.default", {name: BATCH[name] for name in BATCH if name != "training"}, [
        {"running_mean": None}, {"running_var": None},
    ]),
    Case("aten.native_batch_norm.default", BATCH, [*BATCH_WRONG, {"training": False, "running_mean": None}]),
    Case(
        "aten.native_batch_norm_backward.default",
        BATCH_BACK,
        [
            {"save_mean": floats(1)}, {"save_invstd": floats(1)}, {"weight": floats(1)}, {"grad_out": floats(1, 64, 2)},
            {"train": False}, {"save_mean": None, "save_invstd": None},
            {"input": floats(0, 64, 2), "grad_out": floats(0, 64, 2)}, {"save_mean": integers(*range(64))},
        ],
    ),
    Case("aten.native_layer_norm_backward.default", NORM_BACK, [
        {"mean": floats(1)}, {"grad_out": floats(1, 8)}, {"rstd": floats(1).expand(4, 1)},
    ]),
    Case(
        "aten.native_group_norm.default",
        GROUPS,
        [
            {"HxW": FAR}, {"N": 64}, {"group": 0}, {"group": 3}, {"bias": floats(1)}, {"weight": floats(1).expand(8)},
            {"input": floats(1).expand(2, 8, 3)},
        ],
    ),
    Case(
        "aten.native_group_norm_backward.default",
        {
            **{name: value for name, value in GROUPS.items() if name not in ("bias", "eps")},
            "grad_out": floats(2, 8, 3), "mean": floats(2, 4), "rstd": floats(2, 4),
            "output_mask": [True, True, True],
        },
        [
            {"mean": floats(1)}, {"rstd": floats(1)}, {"grad_out": floats(1)}, {"weight": floats(1)}, {"HxW": 30},
            {"mean": floats(1).expand(2, 4)}, {"grad_out": floats(1).expand(2, 8, 3)},
        ],
    ),
    Case("aten._weight_norm_interface.default", {"v": floats(64, 2), "g": floats(64, 1), "dim": 0}, [
        {"g": floats(1)}, {"v": floats(0, 1), "g": floats(0, 1)},
    ]),
    Case(
        "aten._weight_norm_interface_backward.default",
        {
            "grad_w": floats(64, 2), "saved_v": floats(64, 2), "saved_g": floats(64, 1), "saved_norms": floats(64, 1),
            "dim": 0,
        },
        [{"saved_g": floats(1)}, {"saved_norms": floats(1)}, {"grad_w": floats(1, 2)}],
    ),
    Case("aten._fused_sgd_.default", SGD, [{"grads": [floats(1)]}, {"grads": []}]),
    Case(
        "aten._fused_adam_.default",
        ADAM,
        [
            {"exp_avgs": [floats(1)]}, {"exp_avg_sqs": [floats(1)]}, {"state_steps": []},
            {"self": [floats(1).expand(64)], "grads": [floats(1).expand(64)]},
        ],
    ),
    Case(
        "onebox.recurrent.default",
        LAYER,
        [
            {"weights": [floats(20, 4), floats(20, 1), floats(20), floats(20)]},
            {"weights": [floats(20, 4), floats(20, 5), floats(1), floats(20)]},
            {"states": [floats(1, 1, 5), floats(1, 2, 5)]},
            {"kind": "gru"},
        ],
    ),
    Case(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        HEADS,
        [*HEADS_WRONG, {"key": floats(2, 3, 0, 8), "value": floats(2, 3, 0, 8), "is_causal": True}],
    ),
    Case(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        HEADS_BACK,
        [
            *HEADS_WRONG, {"logsumexp": floats(2, 3, 1)}, {"out": floats(2, 3, 1, 8)}, {"grad_out": floats(1, 3, 4, 8)},
            {"value": floats(2, 3, 5, 4), "out": floats(2, 3, 4, 4), "grad_out": floats(2, 3, 4, 4)},
        ],
    ),
    Case(
        "aten.upsample_nearest2d.default",
        {"self": floats(1, 1, 4, 4), "output_size": [8, 8], "scales_h": 2.0, "scales_w": None},
        [{"scales_h": 1e-30}, {"scales_w": 1e-9}, {"output_size": [8]}],
    ),
    Case(
        "aten.upsample_bilinear2d_backward.default",
        {
            "grad_output": floats(1, 1, 8, 8), "output_size": [8, 8], "input_size": [1, 1, 4, 4],
            "align_corners": False, "scales_h": 2.0, "scales_w": None,
        },
        [{"scales_h": 1e-30}, {"scales_w": 1e-30}],
    ),
    Case("aten.convolution_backward.default", CONVOLUTION, [{"grad_output": floats(1, 4, 9, 9)}, {"groups": 0}]),
    Case(
        "aten.grid_sampler_2d_backward.default",
        {
            "grad_output": floats(1, 2, 3, 3), "input": floats(1, 2, 4, 4), "grid": floats(1, 3, 3, 2) / 4,
            "interpolation_mode": 0, "padding_mode": 2, "align_corners": False, "output_mask": [True, True],
        },
        [
            {"grad_output": floats(1, 2, 1, 1)}, {"interpolation_mode": 9}, {"grid": floats(1, 3, 3, 2) * 1e38},
            {"grid": floats(1, 3, 3, 2) * torch.nan, "padding_mode": 1},
        ],
    ),
    Case(
        "aten.unfold_backward.default",
        {"grad_in": floats(2, 3, 2), "input_sizes": [2, 4], "dim": 1, "size": 2, "step": 1},
        [{"grad_in": floats(2, 1, 1)}, {"size": 3}, {"step": 0}],
    ),
    Case("aten.native_channel_shuffle.default", {"self": floats(1, 4, 2), "groups": 2}, [{"groups": 0}, {"groups": 3}]),
    Case(
        "aten._fft_c2r.default",
        {"self": floats(3).to(torch.complex64), "dim": [0], "normalization": 0, "last_dim_size": 4},
        [{"last_dim_size": FAR}, {"dim": [5]}, {"dim": [0, 0]}],
    ),
    Case(
        "aten._cdist_backward.default",
        {"grad": floats(3, 2), "x1": floats(3, 4), "x2": floats(2, 4), "p": 2.0, "cdist": floats(3, 2)},
        [{"grad": floats(1, 1)}, {"cdist": floats(1, 2)}, {"x2": floats(2, 8)}, {"x1": floats(4)}],
    ),
    Case(
        "aten._cdist_backward.default",
        {"grad": floats(5, 3, 2), "x1": floats(5, 3, 4), "x2": floats(2, 4), "p": 2.0, "cdist": floats(5, 3, 2)},
        [{"grad": floats(3, 2)}, {"cdist": floats(3, 2)}, {"x2": floats(4, 2, 4)}, {"x1": floats(7, 1, 3, 4)}],
    ),
    Case(
        "aten._pdist_backward.default",
        {"grad": floats(3), "self": floats(3, 4), "p": 2.0, "pdist": floats(3)},
        [{"grad": floats(1)}, {"pdist": floats(1)}, {"self": floats(0, 4), "grad": floats(0), "pdist": floats(0)}],
    ),
    Case("aten.linalg_lu_solve.default", LU, [{"pivots": integers(FAR >> 12, 2, 3, dtype=torch.int32)}]),
    Case(
        "aten.lu_unpack.default",
        {"LU_data": torch.eye(3), "LU_pivots": integers(1, 2, 3, dtype=torch.int32)},
        [{"LU_pivots": integers(FAR >> 12, 2, 3, dtype=torch.int32)}],
    ),
    Case(
        "aten.histc.default",
        {"self": floats(8), "bins": 4, "min": 0, "max": 0},
        [{"self": torch.tensor([-3e38, 3e38])}],
    ),
    Case(
        "aten._new_zeros_with_same_feature_meta.default",
        {"self": floats(3, 4), "other": floats(4), "self_num_batch_dims": 1},
        [{"self_num_batch_dims": FAR}, {"self_num_batch_dims": -1}, {"self_num_batch_dims": 3}],
    ),
    Case(
        "aten.histogram.bins_tensor",
        {"self": floats(8), "bins": floats(3)},
        [{"bins": floats(1)}, {"bins": floats(2, 3)}],
    ),
    Case("aten.reflection_pad1d.default", {"self": floats(1, 4), "padding": [1, 1]}, [{"padding": []}]),
    *(
        Case(
            f"aten.{name}_backward_data.default",
            {"grad_output": floats(6, 2, 5), "output": floats(6, 2, 5), "dim": 0, "input_dtype": torch.float32},
            [{"output": floats(6, 2, 4)}, {"output": floats(6, 2, 0)}, {"grad_output": floats(6, 2, 0)}],
        )
        for name in ("_softmax", "_log_softmax")
    ),
    Case(
        "aten.binary_cross_entropy.default",
        {"self": floats(4), "target": floats(4)},
        [{"self": torch.tensor(0.5), "target": floats(0)}, {"target": floats(1)}],
    ),
    Case(
        "aten.binary_cross_entropy_backward.default",
        {"grad_output": torch.ones(()), "self": floats(4), "target": floats(4)},
        [{"self": torch.tensor(0.5), "target": floats(0)}, {"grad_output": floats(0)}, {"grad_output": floats(2, 4)}],
    ),
    Case(
        "aten._foreach_copy.default",
        {"self": [floats(3)], "src": [floats(3) + 1]},
        [{"src": [floats(3), floats(3)]}, {"src": []}],
    ),
    Case(
        "aten.arange.start_step",
        {"start": 0, "end": 4, "step": 2},
        [
            {"start": 0, "end": 1, "step": 0.5, "dtype": torch.int64},
            {"start": 2**63 - 1, "end": -1, "step": -1}, {"start": 2.0**62, "end": -(2.0**62), "step": -1},
        ],
    ),
    Case(
        "aten.range.step",
        {"start": 0, "end": 4, "step": 2},
        [{"step": 0.5, "dtype": torch.int64}],
    ),
    Case("aten._linalg_eigvals.default", {"self": floats(3, 3)}, [{"self": floats(3, 3) * torch.nan}]),
    Case(
        "aten.repeat_interleave.Tensor",
        {"repeats": integers(1, 0, 2)},
        [{"repeats": torch.full((4,), 1 << 62)}, {"repeats": integers(-1)}],
    ),
    Case(
        "aten._prelu_kernel.default",
        {"self": floats(2, 3), "weight": floats(1, 3)},
        [{"self": torch.tensor(0.5), "weight": floats(0)}, {"weight": floats(4, 2, 3)}],
    ),
    Case(
        "aten._prelu_kernel_backward.default",
        {"grad_output": floats(2, 3), "self": floats(2, 3), "weight": floats(1, 3)},
        [{"weight": floats(4, 2, 3)}, {"grad_output": floats(4, 2, 3)}],
    ),
    Case(
        "aten.as_strided_.default",
        {"self": floats(64), "size": [2, 2], "stride": [2, 1], "storage_offset": 3},
        [{"storage_offset": (1 << 62) - 50}, {"storage_offset": 1 << 61}, {"stride": [1 << 62, 1]}],
    ),
    Case(
        "aten._upsample_bilinear2d_aa.default",
        {"self": floats(1, 1, 4, 5), "output_size": [8, 12], "align_corners": False, "scales_h": 2.0, "scales_w": 2.5},
        [{"scales_h": 1.0}, {"scales_w": 0.5}, {"output_size": [128, 128]}],
    ),
    *(
        Case(
            f"aten.{kind}.default",
            {
                "self": torch.ones(1, 2, 4, 1, dtype=torch.uint8), "output_size": [3, 1], "align_corners": True,
                "scales_h": None, "scales_w": None,
            },
            [{"self": torch.ones(64, dtype=torch.uint8).as_strided([1, 2, 4, 1], [1, 1, 2, 8])}],
        )
        for kind in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bicubic2d_aa")
    ),
    Case(
        "aten._dirichlet_grad.default",
        {name: floats(2, 3) for name in ("x", "alpha", "total")},
        [{"alpha": floats(0, 3)}, {"total": floats(1, 0)}],
    ),
    Case(
        "aten._standard_gamma_grad.default",
        {"self": floats(1, 3), "output": floats(1, 3)},
        [{"output": floats(0, 3)}, {"output": floats(4, 3)}],
    ),
    Case(
        "aten.log_sigmoid_backward.default",
        {"grad_output": floats(2, 3), "self": floats(2, 3), "buffer": floats(2, 3)},
        [
            {"grad_output": floats(0, 3)}, {"grad_output": floats(2, 1)}, {"self": floats(2, 1)},
            {"buffer": floats(1, 0)}, {"grad_output": floats(2, 1), "self": floats(2, 1), "buffer": floats(1, 0)},
        ],
    ),
    Case("aten._pdist_forward.default", {"self": floats(3, 4)}, [
        {"self": floats(2, 3, 4, 0)}, {"self": floats(1, 4).expand(3, 4)},
    ]),
    Case(
        "aten.adaptive_max_pool3d.default",
        {"self": floats(1, 2, 4, 4, 4), "output_size": [2, 2, 2]},
        [{"output_size": [-(1 << 63), 2, 2]}],
    ),
    Case(
        "aten._adaptive_avg_pool3d.default",
        {"self": floats(1, 2, 4, 4), "output_size": [2, 2, 0]},
        [{"output_size": [(1 << 31) + 1, (1 << 31) + 1, 0]}],
    ),
    *(
        Case(name, {"self": x, "dtype": torch.float64}, [{"dtype": torch.bfloat16}])
        for name, x in (
            ("aten.linalg__powsum.default", floats(5).to(torch.complex64)),
            ("aten._foreach_powsum.Scalar", [floats(5).to(torch.complex128)]),
        )
    ),
    Case(
        "aten._unsafe_masked_index.default",
        {
            "self": floats(5, 5), "mask": torch.ones(3, dtype=torch.bool), "indices": [integers(0, 4, 9)] * 2,
            "fill": 1,
        },
        [{"indices": [integers(0, 1, 2)] * 4}],
    ),
    Case(
        "aten._unsafe_masked_index_put_accumulate.default",
        {
            "self": floats(5, 5), "mask": torch.ones(3, dtype=torch.bool), "indices": [integers(0, 4, 9)] * 2,
            "values": floats(3),
        },
        [{"indices": [integers(0, 1, 2)] * 4}],
    ),
    Case(
        "aten.multi_margin_loss.default",
        {"self": floats(2, 5), "target": integers(1, 2), "p": 1, "margin": 1.0, "weight": None, "reduction": 1},
        [{"self": floats(0, 5), "target": integers()}],
    ),
    Case(
        "aten.multilabel_margin_loss_forward.default",
        {"self": floats(2, 5), "target": integers(*range(5), shape=(1, 5)).repeat(2, 1), "reduction": 2},
        [{"self": floats(0, 5), "target": integers(shape=(0, 5))}],
    ),
    Case(
        "aten._masked_softmax.default",
        {"self": floats(2, 3), "mask": torch.zeros(2, 3, dtype=torch.bool), "dim": 1, "mask_type": None},
        [{"self": floats(0), "mask": torch.zeros(0, dtype=torch.bool), "dim": 0}],
    ),
    Case("aten.linalg_eig.default", {"self": torch.eye(3)}, [{"self": torch.full((3, 3), 1e38)}]),
    Case(
        "aten.huber_loss.default",
        {"self": floats(3), "target": floats(3) + 1, "reduction": 1, "delta": 1.0},
        [{"reduction": 3}, {"reduction": -1}],
    ),
    Case(
        "aten.soft_margin_loss.default",
        {"self": floats(3), "target": floats(3) + 1, "reduction": 1},
        [{"reduction": 16}, {"self": floats(0), "target": torch.tensor(2)}],
    ),
    Case(
        "aten.smooth_l1_loss_backward.default",
        {"grad_output": floats(3), "self": floats(3), "target": floats(3) + 1, "reduction": 1, "beta": 1e-5},
        [{"grad_output": integers(1, 2, 3), "self": integers(1, 2, 3), "target": integers(3, 2, 1)}],
    ),
    Case(
        "aten.gelu_backward.default",
        {"grad_output": floats(10, 10), "self": floats(10, 10), "approximate": "none"},
        [{"grad_output": floats(1).expand(10)}],
    ),
    Case(
        "aten.random.from",
        {"self": floats(2, 10), "from": 5, "to": None},
        [{"from": (1 << 63) - 1}],
    ),
    Case(
        "aten.linalg_lstsq.default",
        {"self": torch.eye(2), "b": floats(2, 1), "driver": "gelsy"},
        [{"self": floats(2, 3).to(torch.complex64), "b": torch.zeros(2, 0, dtype=torch.complex64), "driver": "gelss"}],
    ),
    Case(
        "aten.reflection_pad1d_backward.default",
        {"grad_output": floats(2, 4), "self": floats(2, 3), "padding": [1, 0]},
        [{"grad_output": floats(0, 4)}, {"self": floats(64, 3)}],
    ),
    *(
        Case(
            f"aten.{name}.dim",
            {"self": floats(4, 3), "dim": 0, "keepdim": False},
            [{"self": floats(3).expand(4, 3)}, {"self": floats(4, 1).expand(4, 3), "dim": -1}],
        )
        for name in ("median", "nanmedian")
    ),
    *(
        Case(name, {"self": integers(7, 9, dtype=dtype), "other": integers(2, -1, dtype=dtype), **more}, [
            {"self": integers(7, torch.iinfo(dtype).min, dtype=dtype)},
            {"self": integers(torch.iinfo(dtype).min, dtype=dtype), "other": integers(-1, dtype=torch.int8)},
        ])
        for dtype in (torch.int32, torch.int64)
        for name, more in (
            ("aten.div.Tensor_mode", {"rounding_mode": "trunc"}), ("aten.div_.Tensor_mode", {"rounding_mode": "trunc"}),
            ("aten.floor_divide.default", {}), ("aten.fmod.Tensor", {}), ("aten.remainder.Tensor", {}),
        )
    ),
    Case(
        "aten.div.Scalar_mode",
        {"self": integers(7, 9), "other": 2, "rounding_mode": "trunc"},
        [{"self": integers(7, -(1 << 63)), "other": -1}],
    ),
    Case(
        "aten.lcm.default",
        {"self": integers(4, 6), "other": integers(6, 9)},
        [{"self": integers(-(1 << 63)), "other": integers(7)}, {"self": integers(7), "other": integers(-(1 << 63))}],
    ),
    Case(
        "aten.binomial.default",
        {"count": floats(3) * 8, "prob": floats(3)},
        [{"count": torch.full((50,), torch.nan), "prob": torch.full((50,), 0.3)}, {"prob": floats(3) * torch.nan}],
    ),
    Case(
        "aten.as_strided.default",
        {"self": floats(64), "size": [2, 2], "stride": [2, 1], "storage_offset": 3},
        [{"storage_offset": 1 << 61}, {"storage_offset": (1 << 63) - 1, "stride": [0, 0]}],
    ),
    *(
        Case(
            f"aten.avg_pool{dimensions}d.default",
            {
                "self": integers(*range(4**dimensions), shape=(1, 1, *(4,) * dimensions)),
                "kernel_size": [2] * dimensions, "stride": [2] * dimensions, "padding": [0] * dimensions,
                "ceil_mode": False, "count_include_pad": True, "divisor_override": 3,
            },
            [{"self": torch.full((1, 1, *(4,) * dimensions), -(1 << 63) >> dimensions), "divisor_override": -1}],
        )
        for dimensions in (2, 3)
    ),
    Case(
        "aten.avg_pool2d_backward.default",
        {
            "grad_output": integers(5, shape=(1, 1, 1, 1)), "self": integers(*range(4), shape=(1, 1, 2, 2)),
            "kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0], "ceil_mode": False, "count_include_pad": True,
            "divisor_override": 3,
        },
        [{"grad_output": integers(-(1 << 63), shape=(1, 1, 1, 1)), "divisor_override": -1}],
    ),
    Case(
        "aten.special_legendre_polynomial_p.default",
        {"x": floats(4), "n": integers(0, 3, -1, 4096)},
        [
            {"n": integers(1, FAR, 1, 1)}, {"n": torch.tensor([1.0, torch.nan, torch.inf, 2.0])},
            {"n": integers(4097)}, {"x": torch.tensor([0.5, torch.nan, 0.5, 0.5])},
        ],
    ),
    Case("aten.special_laguerre_polynomial_l.n_scalar", {"x": floats(4), "n": 3}, [{"n": FAR}, {"n": 4097}]),
    Case(
        "aten.special_shifted_chebyshev_polynomial_w.x_scalar",
        {"x": 0.5, "n": integers(3, 100, dtype=torch.int8)},
        [{"n": integers(5000)}, {"n": torch.tensor(1e30)}, {"x": torch.nan}],
    ),
    Case(
        "aten.rrelu_with_noise.default",
        {"self": floats(64), "noise": floats(64), "training": True},
        [{"noise": floats(1)}, {"noise": floats(1).expand(64)}],
    ),
    Case(
        "aten.rrelu_with_noise.out",
        {"self": floats(64), "noise": floats(64), "training": True, "out": floats(64)},
        [{"out": floats(0)}, {"out": floats(1)}],
    ),
]  # fmt: skip


def wire(value: Any, tensors: list[Tensor], many: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Return an argument for the wire; its tensors are appended to those of the call."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return SlotArgument(len(tensors) - 1)
    if isinstance(value, list | tuple):
        return many(tuple(wire(item, tensors, many) for item in value))
    if isinstance(value, torch.dtype):
        return DType(dtype_name(value))
    return OwnDevice() if isinstance(value, torch.device) else value


def split(name: str, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments of an operator."""
    args, kwargs = [], {}
    for argument in overload(name)._schema.arguments:
        if argument.kwarg_only:
            kwargs |= {argument.name: given[argument.name]} if argument.name in given else {}
        elif argument.name in given or argument.has_default_value():
            args.append(given.get(argument.name, argument.default_value if argument.has_default_value() else None))
    return args, kwargs


def as_program(name: str, given: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a run of an operator as a stored program, which states other results than it has."""
    args, kwargs = split(name, given)
    tensors: list[Tensor] = []
    args = [wire(value, tensors, Many) for value in args]
    kwargs = {key: wire(value, tensors, Many) for key, value in kwargs.items()}
    returns = overload(name)._schema.returns
    count = len(returns) if str(returns[0].type) == "Tensor" else 3
    slots = tuple(range(len(tensors), len(tensors) + count))
    operator = Operator(name, tuple(args), kwargs, slots, (TensorSpec("float32", (1,)),) * count)
    program = with_deaths(Program(tuple(map(spec_of, tensors)), (operator,), (), len(tensors) + count))
    compiled = CompiledProgram(program, CPU)
    return lambda: compiled.run(list(tensors), lambda position: None, WorkerProgress())


def as_kernel(name: str, given: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a run of an operator as an eager call."""
    args, kwargs = split(name, given)
    tensors: list[Tensor] = []
    spec_args = tuple(wire(value, tensors, Many) for value in args)
    spec_kwargs = {key: wire(value, tensors, Many) for key, value in kwargs.items()}
    kernel = CompiledKernel(
        KernelSpec(name, spec_args, spec_kwargs, len(tensors), 0), CPU, lambda number: torch.Generator()
    )
    return lambda: kernel.run(*kernel.pick([*tensors, *kernel.constants]))


def eagerly(name: str, given: Mapping[str, Any]) -> Any:
    """Run an operator as an eager call."""
    return as_kernel(name, given)()


WAYS = {PROGRAMS: as_program, EAGER: as_kernel}


def in_child(work: Callable[[], int]) -> int:
    """Return the exit status of work in a forked process; negative if a signal ended it."""
    child = os.fork()
    if not child:
        status = OTHERWISE
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(run: Callable[[], Any], name: str) -> int:
    """Return what becomes of a call."""
    try:
        run()
    except OperatorFailed as error:
        return REFUSED if str(error.__cause__).startswith(f"{name}: ") else OTHERWISE
    except WireError as error:
        return REFUSED if str(error).startswith(f"{name}: ") else OTHERWISE
    return RAN


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arguments_beyond_memory_are_refused(case: Case) -> None:
    """In a child, which would crash, hang or return foreign memory without the check."""
    for file, way in WAYS.items():
        if case.name not in pinned_names(file):
            continue
        runs = [way(case.name, {**case.right, **changed}) for changed in case.wrong]
        status = in_child(lambda runs=runs: max(outcome(run, case.name) for run in runs))
        assert status == REFUSED, f"{file} {case.name}: {status}"


def draws(name: str) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in overload(name).tags or name.startswith("aten.random.")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_arguments_compute_what_the_operator_does(case: Case) -> None:
    args, kwargs = split(case.name, case.right)
    check_arguments(overload(case.name), args, kwargs)
    if overload(case.name)._schema.is_mutable or case.name not in pinned_names(EAGER):
        return
    expected, made = flatten(overload(case.name)(*args, **kwargs)), flatten(eagerly(case.name, case.right))
    for mine, theirs in zip(made, expected, strict=True):
        if isinstance(mine, Tensor) and mine.numel() and "ctc" not in case.name and not draws(case.name):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_every_case_is_of_a_listed_operator_with_rules() -> None:
    for case in CASES:
        assert rules_of(overload(case.name)) is not None
        assert case.name in pinned_names(PROGRAMS) | pinned_names(EAGER)


def test_other_operators_run_as_they_are() -> None:
    def run(*args: Any) -> None: ...

    assert guarded(overload("aten.mm.default"), run) is run
    assert guarded(overload("aten.add_.Tensor"), run) is run
    assert guarded(overload("aten.div.Tensor"), run) is run
    assert guarded(overload("aten.nll_loss_backward.default"), run) is not run


@pytest.mark.parametrize("number", [128, torch.tensor(5)], ids=["a number", "a tensor"])
@pytest.mark.parametrize(
    ("name", "given", "argument"),
    [
        ("aten.clone.default", {"self": torch.ones(2, 3)}, "memory_format"),
        ("aten.zeros_like.default", {"self": torch.ones(2, 3)}, "layout"),
        ("aten.sum.default", {"self": torch.ones(2, 3)}, "dtype"),
    ],
)
def test_types_and_formats_are_names(name: str, given: dict[str, Any], argument: str, number: Any) -> None:
    """Of the number 128, PyTorch would make a type that does not exist."""
    for way in WAYS.values():
        assert outcome(way(name, given), name) != REFUSED
        with pytest.raises(WireError, match=f"{name}: {argument} is .*allowed: .*, or none"):
            way(name, given | {argument: number})


@pytest.mark.parametrize("way", WAYS.values())
@pytest.mark.parametrize(
    ("name", "given"),
    [
        (
            "aten.im2col.default",
            {
                "self": floats(5, 1, 1, 3), "kernel_size": [2, 2], "dilation": [(1 << 63) - 1, 1], "padding": [0, 0],
                "stride": [1, 1],
            },
        ),
        ("aten.replication_pad2d.default", {"self": floats(1, 1, 4, 4), "padding": [(1 << 63) - 1] * 4}),
    ],
)  # fmt: skip
def test_windows_are_within_64_bits(way: Callable[..., Any], name: str, given: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=rf"{name}: (dilation|padding) is .*; allowed: less than 1073741824"):
        way(name, given)


@pytest.mark.parametrize("way", WAYS.values())
def test_a_tensor_that_is_not_optional_is_given(way: Callable[..., Any]) -> None:
    """PyTorch takes none for any tensor, and this kernel reads it."""
    name = "aten._log_softmax_backward_data.default"
    given = {"grad_output": floats(4), "output": floats(4), "dim": 0, "input_dtype": torch.float32}
    way(name, given)
    with pytest.raises(WireError, match=f"{name}: output is None; allowed: a tensor"):
        way(name, given | {"output": None})


def test_what_an_operator_does_not_make_is_no_tensor() -> None:
    tensors: list[Tensor] = []
    name = "aten.native_layer_norm_backward.default"
    args, _ = split(name, {**NORM_BACK, "output_mask": [True, False, False]})
    given = tuple(wire(value, tensors, Many) for value in args)
    count = len(tensors)
    outs, specs = (count, count + 1, count + 2), (spec_of(floats(4, 8)),) * 3
    inputs = tuple(map(spec_of, tensors))
    program = with_deaths(Program(inputs, (Operator(name, given, {}, outs, specs),), (), count + 3))
    with pytest.raises(OperatorFailed) as failed:
        CompiledProgram(program, CPU).run(list(tensors), lambda position: None, WorkerProgress())
    assert "but the program says" in str(failed.value.__cause__)


def test_elements_are_checked_in_every_call_and_shapes_when_they_change() -> None:
    pool = guarded(overload("aten.adaptive_max_pool2d_backward.default"), torch.ops.aten.adaptive_max_pool2d_backward)
    gradient, x, index = floats(1, 1, 1, 1), floats(1, 1, 4, 4), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    pool(gradient, x, index)
    with pytest.raises(WireError, match="indices has elements from 16 to 16; allowed: 0 to 15"):
        pool(gradient, x, index + 16)
    with pytest.raises(
        WireError,
        match=r"grad_output is torch.float32 \[1, 2, 1, 1\], self is .*; allowed: grad_output\[:-2\] == self\[:-2\]",
    ):
        pool(floats(1, 2, 1, 1), x, torch.zeros(1, 2, 1, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "aten._thnn_fused_lstm_cell.default",
            {"input_gates": floats(2, 20), "hidden_gates": floats(2, 20), "cx": floats(2, 5)},
            {"cx": floats(1, 10)},
        ),
        (
            "aten._thnn_fused_gru_cell.default",
            {"input_gates": floats(2, 15), "hidden_gates": floats(2, 15), "hx": floats(2, 5)},
            {"hx": floats(1, 10)},
        ),
        (
            "aten._thnn_fused_lstm_cell_backward_impl.default",
            {
                "grad_hy": floats(2, 5), "grad_cy": None, "cx": floats(2, 5), "cy": floats(2, 5),
                "workspace": floats(2, 20), "has_bias": True,
            },
            {"workspace": floats(2, 5)},
        ),
        (
            "aten._thnn_fused_gru_cell_backward.default",
            {"grad_hy": floats(2, 5), "workspace": floats(2, 25), "has_bias": True},
            {"grad_hy": floats(4, 5)},
        ),
    ],
)  # fmt: skip
def test_cells_of_recurrent_layers_have_the_sizes_of_their_gates(
    name: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Only GPUs have such kernels: by a state of more features than gates one reads behind the biases."""
    args, kwargs = split(name, right)
    check_arguments(overload(name), args, kwargs)
    args, kwargs = split(name, right | wrong)
    with pytest.raises(WireError, match=f"{name}: .*allowed: "):
        check_arguments(overload(name), args, kwargs)


def test_on_gpus_the_last_offset_has_a_size_of_bag() -> None:
    args, kwargs = split("aten._embedding_bag_backward.default", BAG_BACK | {"bag_size": integers(2, 1, 0)})
    check_arguments(overload("aten._embedding_bag_backward.default"), args, kwargs)


def test_heads_of_queries_share_keys_where_pytorch_lets_them() -> None:
    """Without a refusal, and as if each head had keys of its own."""
    query, key = floats(1, 4, 3, 8), floats(1, 2, 5, 8)
    with _Checked():
        shared = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    own = key.repeat_interleave(2, 1)
    torch.testing.assert_close(shared, torch.nn.functional.scaled_dot_product_attention(query, own, own))


class _Checked(TorchDispatchMode):
    """Checks the arguments of all operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_arguments(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def test_checked_indices_are_not_what_is_written() -> None:
    memory = torch.zeros(2, dtype=torch.int64)
    given = {"self": memory, "indices": [memory[:1]], "values": integers(5), "accumulate": False, "unsafe": True}
    with pytest.raises(WireError, match="indices shares the memory that is written"):
        eagerly("aten._index_put_impl_.default", given)
    eagerly("aten._index_put_impl_.default", given | {"indices": [integers(1)]})
    assert memory.tolist() == [0, 5]


# ---- memory that nothing has written


def dirty(*sizes_bytes: int) -> None:
    """Fill memory of given sizes, and free it, so that the next tensors of these sizes lie there."""
    for size_bytes in sizes_bytes:
        used = [torch.full((size_bytes,), 77, dtype=torch.uint8) for _ in range(8)]
        del used


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten.empty.memory_format", {"size": [2048]}),
        ("aten.empty_strided.default", {"size": [2, 3], "stride": [600, 5]}),
        ("aten.empty_like.default", {"self": torch.ones(2048)}),
        ("aten.new_empty.default", {"self": torch.ones(2), "size": [2048]}),
        ("aten.new_empty_strided.default", {"self": torch.ones(2), "size": [2, 3], "stride": [600, 5]}),
        ("aten.empty_permuted.default", {"size": [32, 64], "physical_layout": [1, 0]}),
    ],
)
def test_empty_memory_is_zero(name: str, given: dict[str, Any]) -> None:
    for _ in range(8):
        dirty(8192, 4 * (600 + 11))
        made = eagerly(name, given)
        flat = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
        assert not flat.any(), name


def test_memory_by_which_a_storage_grows_is_zero() -> None:
    for name, given in (
        ("aten.resize_.default", {"size": [2048]}),
        ("aten.resize_as_.default", {"the_template": torch.ones(2048)}),
    ):
        dirty(8192)
        target = torch.full((4,), 3.0)
        eagerly(name, {"self": target, **given})
        assert target[:4].tolist() == [3.0] * 4
        assert not target[4:].any(), name
    dirty(8192)
    source, target = torch.full((4,), 3.0), torch.ones(1)
    given = {"self": target, "source": source, "storage_offset": 0, "size": [2048], "stride": [1]}
    eagerly("aten.set_.source_Tensor_storage_offset", given)
    assert target[:4].tolist() == [3.0] * 4
    assert not target[4:].any()


@pytest.mark.parametrize("length", [0, 1, 3])
def test_states_beyond_a_sequence_are_zero(length: int) -> None:
    given = {**CTC, "log_probs": floats(64, 2, 3), "input_lengths": [64, length], "target_lengths": [2, 0]}
    for _ in range(8):
        dirty(64 * 2 * 5 * 4)
        states = eagerly("aten._ctc_loss.default", given)[1]
        assert not states[1, length:].any()
        assert not states[1, :, 1:].any()


def test_there_is_nothing_behind_distinct_elements() -> None:
    given = {"self": torch.zeros(1024), "return_inverse": False, "return_counts": True, "dim": None}
    for _ in range(8):
        dirty(4096, 8192)
        for made in eagerly("aten.unique_consecutive.default", given):
            assert not torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())[made.nbytes :].any()


def test_a_part_of_a_result_is_not_what_is_behind_it() -> None:
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    found = eagerly("aten.linalg_lstsq.default", {"self": x, "b": y})
    torch.testing.assert_close(found[0], torch.linalg.lstsq(x, y)[0])


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_sizes_of_bags_have_nothing_behind_them(mode: int) -> None:
    given = {**BAG, "offsets": torch.zeros(4097, dtype=torch.int64), "include_last_offset": True, "mode": mode}
    given |= {"per_sample_weights": None, "indices": integers(0)}
    for _ in range(8):
        dirty(4097 * 8)
        sizes = eagerly("aten._embedding_bag.default", given)[2]
        behind = torch.empty(0, dtype=torch.int64).set_(sizes.untyped_storage())[sizes.numel() :]
        assert not behind.any()


def test_windows_have_nothing_behind_them() -> None:
    sizes = {"kernel_size": [1, 1], "dilation": [1, 1], "padding": [0, 0], "stride": [4, 4]}
    for _ in range(8):
        dirty(4 * 64)
        made = eagerly("aten.im2col.default", {"self": floats(1, 1, 8, 8), **sizes})
        assert made.flatten().tolist() == floats(1, 1, 8, 8)[..., ::4, ::4].flatten().tolist()
        assert made.untyped_storage().nbytes() == made.nbytes


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss"])
def test_a_loss_has_nothing_behind_it(name: str) -> None:
    x, y = floats(2048), torch.zeros(2048)
    given = {"self": x, "target": y, "reduction": 1}
    made = eagerly(f"aten.{name}.default", given)
    assert torch.equal(made, getattr(torch.nn.functional, name)(x, y))
    assert made.untyped_storage().nbytes() == made.nbytes
    out = torch.empty(0)
    dirty(8192)
    eagerly(f"aten.{name}.out", given | {"out": out})
    assert torch.equal(out, made)
    assert not torch.empty(0).set_(out.untyped_storage())[1:].any()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_loss_of_other_sizes_has_nothing_behind_it() -> None:
    made = eagerly(
        "aten.huber_loss.default", {"self": floats(1, 64), "target": floats(0, 1), "reduction": 0, "delta": 1}
    )
    assert made.shape == (0, 64)
    assert not made.untyped_storage().nbytes()


def test_results_go_into_a_tensor_with_a_stride_of_zero() -> None:
    """A kernel divides by the stride, though the size is 1."""
    out = torch.zeros(1).as_strided((1, 1), (1, 0))
    run = as_kernel("aten.stack.out", {"tensors": [floats(1)], "dim": 1, "out": out})
    assert in_child(lambda: outcome(run, "aten.stack.out")) == RAN
    run()
    assert out.tolist() == [[0.125]]


def test_a_result_that_goes_into_an_input_is_made_of_what_it_was() -> None:
    small = torch.empty(2, 0)
    given = {"self": small, "mat1": floats(1, 4), "mat2": floats(4, 3), "out": small}
    with pytest.raises(RuntimeError, match="expand"):  # without the check, memory that nothing has written is added
        eagerly("aten.addmm.out", given)
    whole = floats(2, 3)
    expected = torch.addmm(whole, floats(2, 2), floats(2, 3))
    given = {"self": whole, "mat1": floats(2, 2), "mat2": floats(2, 3), "out": whole}
    assert eagerly("aten.addmm.out", given) is whole
    assert torch.equal(whole, expected)


def test_gaps_of_a_layout_are_zero() -> None:
    dirty(4 * 611)
    made = zeros_strided((2, 3), (600, 5), torch.float32, CPU)
    assert not torch.empty(0).set_(made.untyped_storage()).any()


@pytest.mark.parametrize("out", [torch.zeros(8, 8).t(), torch.zeros(8, 16)[:, ::2], torch.zeros(3)])
def test_results_go_into_tensors_with_gaps(out: Tensor) -> None:
    x = floats(8, 8)
    if out.dim() == 1:
        eagerly("aten.triu.out", {"self": x, "diagonal": 0, "out": out.resize_(0)})
    else:
        assert eagerly("aten.triu.out", {"self": x, "diagonal": 0, "out": out}) is out
    assert torch.equal(out, x.triu())


def test_a_result_that_a_kernel_leaves_as_it_was_is_not_foreign() -> None:
    """A mean with gaps is written to other memory first, and this kernel does not write it."""
    mean = torch.full((4,), 7.0)[::2]
    given = {
        "input": floats(200).as_strided((1, 2, 3), (12, 6, 17)), "weight": None, "bias": None, "running_mean": None,
        "running_var": None, "training": True, "momentum": 0.5, "eps": 1e-5, "out": floats(1, 2, 3), "save_mean": mean,
        "save_invstd": torch.full((2,), 7.0),
    }  # fmt: skip
    dirty(8)
    eagerly("aten.native_batch_norm.out", given)
    assert mean.tolist() == [7.0, 7.0]


def test_results_do_not_go_into_each_other() -> None:
    memory = torch.zeros(8, dtype=torch.int32)
    x = torch.randn(1000, 3, 5)
    given = {"A": x, "pivot": True, "check_errors": False, "LU": floats(0), "pivots": memory[:3], "info": memory[:3]}
    found = eagerly("aten.linalg_lu_factor_ex.out", given)
    for mine, theirs in zip(found, torch.linalg.lu_factor_ex(x), strict=True):
        assert mine.shape == theirs.shape
    run = as_kernel("aten.linalg_lu_factor_ex.out", given | {"pivots": memory, "info": memory})
    with pytest.raises(WireError, match="a tensor is two results at once; allowed: one for each"):
        run()


def overlapping(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    return floats(1000).as_strided(tuple(shape), tuple(strides))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(
            (
                "aten._scaled_dot_product_flash_attention_for_cpu.default",
                {
                    "query": overlapping((4, 4, 3, 8), strides), "key": floats(4, 4, 6, 8), "value": floats(4, 4, 6, 8),
                    "is_causal": True,
                },
            )
            for strides in ((1, 24, 8, 1), (96, 24, 1, 1))
        ),
        (
            "aten.grid_sampler_2d_backward.default",
            {
                "grad_output": floats(2, 3, 13, 10), "input": floats(2, 3, 5, 20),
                "grid": overlapping((2, 13, 10, 2), (17, 20, 2, 1)), "interpolation_mode": 0, "padding_mode": 2,
                "align_corners": False, "output_mask": [True, True],
            },
        ),
    ],
)  # fmt: skip
def test_results_of_overlapping_elements_are_those_of_a_copy(name: str, given: dict[str, Any]) -> None:
    apart = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in given.items()}
    dirty(4 * 384, 4 * 520)
    for mine, theirs in zip(flatten(eagerly(name, given)), flatten(eagerly(name, apart)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten.ldexp.Tensor", {"self": floats(1, 3), "other": integers(shape=(0, 10, 3))}),
        ("aten.glu_jvp.default", {"glu": floats(1, 2, 3, 4, 1), "x": floats(2), "dx": floats(3, 0), "dim": 0}),
        ("aten.binomial.default", {"count": floats(), "prob": floats(0, 1)}),
        *(
            (f"aten.{loss}_backward.default", {
                "grad_output": floats(), "self": floats(), "target": floats(0, 1), "reduction": 0, **more,
            })
            for loss, more in (("mse_loss", {}), ("smooth_l1_loss", {"beta": 1.0}), ("huber_loss", {"delta": 1.0}))
        ),
    ],
)  # fmt: skip
def test_a_result_without_elements_has_nothing_behind_it(name: str, given: dict[str, Any]) -> None:
    made = flatten(eagerly(name, given))[0]
    assert made.numel() == 0
    assert made.untyped_storage().nbytes() == 0


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_number_plus_an_empty_product_has_nothing_behind_it() -> None:
    made = eagerly("aten.addmv.default", {"self": floats(), "mat": floats(5, 0), "vec": floats(0)})
    assert made.untyped_storage().nbytes() == made.nbytes


def test_a_result_is_not_written_over_itself() -> None:
    with pytest.raises(RuntimeError, match="single memory location"):
        eagerly("aten.triu.out", {"self": floats(8, 8), "diagonal": 0, "out": torch.zeros(1, 1).expand(8, 8)})


def test_what_reads_elements_to_find_memory_has_them_in_its_own() -> None:
    made = [overload(name) for file in (PROGRAMS, EAGER) for name in pinned_names(file)]
    names = {"index", "indices", "mask", "sorter", "target"}
    for operator in made:
        rules = rules_of(operator)
        packet = operator._overloadpacket
        leads = any(torch.Tag.dynamic_output_shape in getattr(packet, one).tags for one in packet.overloads())
        leads |= bool(rules.elements) if rules is not None else kind_of(operator) in ("counted", "indexed")
        leads |= not names.isdisjoint(argument.name for argument in operator._schema.arguments)
        assert (type(guarded(operator, operator)).__name__ == "_Owned") == leads, operator
