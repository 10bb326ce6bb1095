"""From a model to programs: capture as an ATen graph, gradients, lowering to tapes, cutting."""

from onebox.graph.capture import Captured, Loss, Metrics, Mode, Precision, capture
from onebox.graph.extract import add_all, combine_all, extract, round_all, scale_all, square_norm, zeros
from onebox.graph.joint import Port
from onebox.graph.phases import Phase, PhaseKind
from onebox.graph.programs import ModelPrograms, NamedProgram, TracedModel, model_programs
from onebox.graph.split import Piece, split
from onebox.graph.updates import Update

__all__ = [
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
    "Update",
    "add_all",
    "capture",
    "combine_all",
    "extract",
    "model_programs",
    "round_all",
    "scale_all",
    "split",
    "square_norm",
    "zeros",
]
