"""The style of figures: contrast of text, and colours for all kinds of colour vision."""

from __future__ import annotations

import math
from itertools import combinations
from operator import mul
from pathlib import Path

import pytest

from onebox.drawing import Bar, StepChart, save, step_figure
from onebox.drawing.style import COLOURS, GROUND, LIMIT, MEANINGS, MEASURED, PREDICTED, TEXT, contrast, text_on, tint
from onebox.drawing.topology_chart import KINDS
from onebox.errors import UsageError

Linear = tuple[float, float, float]

VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""How linear RGB is seen: G. M. Machado and others, "A Physiologically-based Model for Simulation of Color Vision
Deficiency", 2009, doi:10.1109/TVCG.2009.113, severity 1."""


def linear(colour: str) -> Linear:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def lab(colour: str, vision: str) -> Linear:
    """Return a colour in CIELAB, as it is seen."""
    seen = linear(colour)
    red, green, blue = (min(1.0, max(0.0, sum(map(mul, row, seen)))) for row in VISION[vision])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    one, two, three = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * two - 16, 500 * (one - two), 200 * (two - three)


def difference(one: str, other: str, vision: str) -> float:
    """Return the difference of two colours (CIE 1976); 2.3 is just noticed."""
    return math.dist(lab(one, vision), lab(other, vision))


@pytest.mark.parametrize("vision", VISION)
def test_kinds_of_work_are_told_apart(vision: str) -> None:
    near = {pair: difference(COLOURS[pair[0]], COLOURS[pair[1]], vision) for pair in combinations(COLOURS, 2)}
    assert min(near.values()) > 15, min(near, key=near.__getitem__)
    assert min(difference(*pair, vision) for pair in combinations(KINDS.values(), 2)) > 15
    assert min(difference(*pair, vision) for pair in combinations((PREDICTED, MEASURED, LIMIT), 2)) > 15


def test_red_and_green_alike_would_be_found() -> None:
    assert difference("#c0392b", "#7a7a1e", "usual") > 40
    assert difference("#c0392b", "#7a7a1e", "deuteranopia") < 25


def test_text_has_the_contrast_that_is_asked_for() -> None:
    """4.5 is that of WCAG 2.2 for text, 3 that for what is no text; light grey has none, and stands for little."""
    assert contrast(TEXT, GROUND) > 12
    for colour in COLOURS.values():
        for white in (0.0, 0.25, 0.5):
            assert contrast(text_on(tint(colour, white)), tint(colour, white)) >= 4.5
    assert all(contrast(COLOURS[kind], GROUND) >= 2 for kind in COLOURS if kind != "other")


def test_every_kind_has_a_colour_and_a_meaning() -> None:
    assert COLOURS.keys() == MEANINGS.keys()


def test_settings_of_the_user_change_nothing_and_are_not_changed(tmp_path: Path) -> None:
    import matplotlib

    chart = StepChart(title="predicted", bars=(Bar(0, "F", 0.0, 1e-3, 0, 0),), step_s=1e-3)
    save(step_figure([chart]), tmp_path / "first.svg")
    with matplotlib.rc_context({"text.color": "red", "font.size": 30.0, "figure.facecolor": "black"}):
        save(step_figure([chart]), tmp_path / "second.svg")
        assert matplotlib.rcParams["font.size"] == 30.0
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    chart = StepChart(title="predicted", bars=(Bar(0, "F", 0.0, 1e-3, 0, 0),), step_s=1e-3)
    with pytest.raises(UsageError, match=r"allowed are \.png, \.svg, \.pdf"):
        save(step_figure([chart]), tmp_path / "plan.jpg")
