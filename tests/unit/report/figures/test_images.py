"""The pictures of README and docs can be drawn from what was recorded, and say what is emulated."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures import draw
from tests.unit.report.figures.test_step_figure import texts


@pytest.mark.parametrize("name", draw.FIGURES)
def test_a_picture_is_drawn_small_and_well_formed(name: str, tmp_path: Path) -> None:
    vector, raster = draw.write(draw.FIGURES[name](), tmp_path / name)
    assert raster.stat().st_size < 40_000 and vector.stat().st_size < 400_000
    assert ElementTree.parse(vector).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert any("emulated" in text for text in texts(vector)) or name not in ("plan", "timeline")
