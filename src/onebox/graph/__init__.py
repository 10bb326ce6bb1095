"""From a model to programs: capture as an ATen graph, gradients, lowering to tapes, division into stages."""

from onebox.graph.capture.export import Captured, Loss, Metrics, Mode, Precision, capture
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
from onebox.graph.lower.small_programs import add_all, combine_all, extract, round_all, scale_all, square_norm, zeros
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
    "capture",
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
