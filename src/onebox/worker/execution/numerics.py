"""Precision and determinism of this process's operators, for the messages that ask for others than PyTorch's
defaults."""

from __future__ import annotations

import torch

from onebox.wire.protocol.requests import SetNumerics

_DEFAULTS = SetNumerics()
_MODES = {"no": 0, "warn": 1, "yes": 2}

CUBLAS_BUFFERS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Environment variable of cuBLAS's buffers, and a value with which it is deterministic; otherwise PyTorch's
deterministic algorithms refuse matrix products. It is read once, before it is known whether a run needs it."""


class NumericState:
    """Precision and determinism of operators at present."""

    def __init__(self) -> None:
        self.present = _DEFAULTS

    def use(self, wanted: SetNumerics = _DEFAULTS) -> None:
        """Set precision and determinism; PyTorch's defaults without an argument."""
        if wanted == self.present:
            return
        torch.set_float32_matmul_precision(wanted.matmul)
        cudnn = torch.backends.cudnn
        cudnn.allow_tf32 = wanted.tf32_convolutions
        cudnn.benchmark = wanted.cudnn_benchmark
        cudnn.deterministic = wanted.cudnn_deterministic
        torch.set_deterministic_debug_mode(_MODES[wanted.deterministic])
        self.present = wanted
