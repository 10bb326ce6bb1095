"""From a model to programs: capture as an ATen graph, gradients, lowering to tapes, cutting."""

from onebox.graph.capture import Captured, Loss, Metrics, Mode, Precision, capture
from onebox.graph.extract import add_all, combine_all, extract, scale_all, zeros
from onebox.graph.joint import Port
from onebox.graph.programs import ModelPrograms, NamedProgram, model_programs
from onebox.graph.split import Piece, split
from onebox.graph.updates import Update

__all__ = [
    "Captured",
    "Loss",
    "Metrics",
    "Mode",
    "ModelPrograms",
    "NamedProgram",
    "Piece",
    "Port",
    "Precision",
    "Update",
    "add_all",
    "capture",
    "combine_all",
    "extract",
    "model_programs",
    "scale_all",
    "split",
    "zeros",
]
