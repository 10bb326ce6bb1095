"""From a model to programs: capture as an ATen graph, gradients, lowering to tapes, division into stages.

Modules are imported when something of them is used: capture brings the compiler of PyTorch, which takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "BufferUpdate": "onebox.graph.transform.buffer_updates",
    "Captured": "onebox.graph.capture.export",
    "Loss": "onebox.graph.capture.export",
    "Metrics": "onebox.graph.capture.export",
    "Mode": "onebox.graph.capture.export",
    "ModelPrograms": "onebox.graph.programs",
    "NamedProgram": "onebox.graph.programs",
    "Phase": "onebox.graph.lower.phases",
    "PhaseKind": "onebox.graph.lower.phases",
    "Piece": "onebox.graph.lower.split",
    "Port": "onebox.graph.capture.joint",
    "Precision": "onebox.graph.capture.export",
    "TRACING": "onebox.graph.programs",
    "TracedModel": "onebox.graph.programs",
    "add_all": "onebox.graph.lower.small_programs",
    "combine_all": "onebox.graph.lower.small_programs",
    "decode_bucket": "onebox.graph.lower.codec_programs",
    "encode_bucket": "onebox.graph.lower.codec_programs",
    "encode_values": "onebox.graph.lower.codec_programs",
    "extract": "onebox.graph.lower.small_programs",
    "factor": "onebox.graph.lower.codec_programs",
    "model_programs": "onebox.graph.programs",
    "project": "onebox.graph.lower.codec_programs",
    "recode_sum": "onebox.graph.lower.codec_programs",
    "restore": "onebox.graph.lower.codec_programs",
    "round_all": "onebox.graph.lower.small_programs",
    "scale_all": "onebox.graph.lower.small_programs",
    "split": "onebox.graph.lower.split",
    "square_norm": "onebox.graph.lower.small_programs",
    "zeros": "onebox.graph.lower.small_programs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'onebox.graph' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
