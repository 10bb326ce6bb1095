"""From a model to programs: capture as an ATen graph, gradients, lowering to tapes, cutting."""

from onebox.graph.capture import Captured, Loss, Metrics, Mode, Precision, capture
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
    "capture",
    "model_programs",
    "split",
]
