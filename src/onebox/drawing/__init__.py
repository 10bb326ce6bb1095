"""Figures and notebook cards from plain values.

Nothing here knows pools, plans or runs: these turn themselves into the values that are drawn, so that packages on every
level can show what they have. Matplotlib is imported when the first figure is made.
"""

from onebox.drawing import notebook
from onebox.drawing.memory_chart import MemoryRow, Moment, memory_figure
from onebox.drawing.step_chart import Bar, StepChart, lanes, step_figure
from onebox.drawing.style import check_suffix, save
from onebox.drawing.topology_chart import Place, PlaceDevice, PlaceLink, topology_figure

__all__ = [
    "Bar",
    "MemoryRow",
    "Moment",
    "Place",
    "PlaceDevice",
    "PlaceLink",
    "StepChart",
    "check_suffix",
    "lanes",
    "memory_figure",
    "notebook",
    "save",
    "step_figure",
    "topology_figure",
]
