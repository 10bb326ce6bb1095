"""From a model to programs: capture as an ATen graph, gradients, lowering to tapes, division into stages.

Modules are imported when something of them is used: capture brings the compiler of PyTorch, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names

if TYPE_CHECKING:
    from onebox.graph.capture.export import Captured, Loss, Metrics, Mode, Precision
    from onebox.graph.capture.joint import Port
    from onebox.graph.lower.codec_programs import (
        decode_bucket,
        encode_bucket,
        encode_values,
        factor,
        project,
        recode_sum,
        restore,
    )
    from onebox.graph.lower.phases import Phase, PhaseKind
    from onebox.graph.lower.small_programs import (
        add_all,
        combine_all,
        extract,
        round_all,
        scale_all,
        square_norm,
        zeros,
    )
    from onebox.graph.lower.split import Piece, split
    from onebox.graph.programs import TRACING, ModelPrograms, NamedProgram, TracedModel, model_programs
    from onebox.graph.transform.buffer_updates import BufferUpdate

__all__ = [
    "TRACING",
    "BufferUpdate",
    "Captured",
    "Loss",
    "Metrics",
    "Mode",
    "ModelPrograms",
    "NamedProgram",
    "Phase",
    "PhaseKind",
    "Piece",
    "Port",
    "Precision",
    "TracedModel",
    "add_all",
    "combine_all",
    "decode_bucket",
    "encode_bucket",
    "encode_values",
    "extract",
    "factor",
    "model_programs",
    "project",
    "recode_sum",
    "restore",
    "round_all",
    "scale_all",
    "split",
    "square_norm",
    "zeros",
]

__getattr__ = lazy_names(
    "onebox.graph",
    {
        "onebox.graph.capture.export": ("Captured", "Loss", "Metrics", "Mode", "Precision"),
        "onebox.graph.capture.joint": ("Port",),
        "onebox.graph.lower.codec_programs": (
            "decode_bucket",
            "encode_bucket",
            "encode_values",
            "factor",
            "project",
            "recode_sum",
            "restore",
        ),
        "onebox.graph.lower.phases": ("Phase", "PhaseKind"),
        "onebox.graph.lower.small_programs": (
            "add_all",
            "combine_all",
            "extract",
            "round_all",
            "scale_all",
            "square_norm",
            "zeros",
        ),
        "onebox.graph.lower.split": ("Piece", "split"),
        "onebox.graph.programs": ("ModelPrograms", "NamedProgram", "TRACING", "TracedModel", "model_programs"),
        "onebox.graph.transform.buffer_updates": ("BufferUpdate",),
    },
)
