"""The pictures of README and docs: drawn again they are the same, from numbers that the text has, too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy
import pytest
from PIL import Image

from onebox.drawing import save
from tests.unit.report.figures.test_step_figure import texts

ROOT = Path(__file__).parents[4]
IMAGES = ROOT / "docs" / "images"
NAMES = ["plan", "memory", "timeline", "topology", "scaling", "prediction"]
TOLERANCE = 0.4
"""Mean difference of two pictures, of 255: other versions of matplotlib and FreeType draw edges of glyphs otherwise."""


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_figures_draw", ROOT / "docs" / "figures" / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def difference(one: Path, other: Path) -> float:
    """Return the mean difference of two pictures of the same size."""
    first, second = (numpy.asarray(Image.open(path).convert("RGB"), dtype=numpy.float64) for path in (one, other))
    assert first.shape == second.shape
    return float(abs(first - second).mean())


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_drawn_again_is_the_same(name: str, draw: ModuleType, tmp_path: Path) -> None:
    draw.write(draw.FIGURES[name](), tmp_path / name)
    assert difference(tmp_path / f"{name}.png", IMAGES / f"{name}.png") < TOLERANCE, "make figures draws it anew"


def test_another_picture_would_be_found(draw: ModuleType, tmp_path: Path) -> None:
    figure = draw.FIGURES["plan"]()
    for patch in figure.axes[0].collections[:3]:
        patch.set_visible(False)
    save(figure, tmp_path / "plan.png")
    assert difference(tmp_path / "plan.png", IMAGES / "plan.png") > TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_small_and_well_formed(name: str) -> None:
    assert (IMAGES / f"{name}.png").stat().st_size < 40_000
    assert (IMAGES / f"{name}.svg").stat().st_size < 400_000
    ElementTree.parse(IMAGES / f"{name}.svg")
    assert "http://www.w3.org/2000/svg" in (IMAGES / f"{name}.svg").read_text()[:1000]


def test_figures_of_benchmarks_show_what_the_results_say() -> None:
    said = texts(IMAGES / "scaling.svg")
    assert {"98 %", "97 %", "93 %", "82 %", "CNN, onebox", "MLP, DDP on Gloo"} <= set(said)
    assert any(
        text.startswith("32 plans, predicted and measured: mean error ") for text in texts(IMAGES / "prediction.svg")
    )


def test_pictures_of_plans_say_that_devices_are_emulated() -> None:
    for name in ("plan", "timeline"):
        assert any("emulated" in text for text in texts(IMAGES / f"{name}.svg"))
