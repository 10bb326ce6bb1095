"""Pools as figures: places, devices, links as wide as they are fast."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onebox.drawing import Place, PlaceDevice, PlaceLink, save, topology_figure
from onebox.drawing.topology_chart import link_width_pt
from tests.unit.report.figures.test_step_figure import texts


def places(count: int, each: int = 2) -> tuple[Place, ...]:
    return tuple(
        Place(
            name=f"lab{place}",
            devices=tuple(
                PlaceDevice(number=place * each + number, kind=("cuda", "cpu", "sim")[number % 3], emulated=number == 1)
                for number in range(each)
            ),
            inner_bps=1e9,
        )
        for place in range(count)
    )


def links(count: int, rate: float | None = 125e6) -> tuple[PlaceLink, ...]:
    late = None if rate is None else 2e-4
    return tuple(PlaceLink(ends=ends, bandwidth_bps=rate, latency_s=late) for ends in combinations(range(count), 2))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12])
def test_places_devices_and_links_are_named(count: int, tmp_path: Path) -> None:
    save(topology_figure(places(count), links(count), title="the lab"), tmp_path / "pool.svg")
    ElementTree.parse(tmp_path / "pool.svg")
    said = texts(tmp_path / "pool.svg")
    assert {"the lab", *(f"lab{number}" for number in range(count)), "0", "1*", "cuda", "cpu", "emulated"} <= set(said)
    assert said.count("within: 8 Gbit/s") == count
    labels = said.count("1 Gbit/s")
    assert labels == (len(links(count)) if count <= 8 else 0)
    assert ("link of 1 Gbit/s" in said) == (count > 1)


@pytest.mark.parametrize("name", ["a$b$c", "$\\frac{$", "x$\\bad$"])
def test_a_dollar_in_a_name_is_one(name: str, tmp_path: Path) -> None:
    save(topology_figure((Place(name=name, devices=places(1)[0].devices),), (), title=name), tmp_path / "pool.svg")
    assert texts(tmp_path / "pool.svg").count(name) == 2


def test_links_that_were_not_measured_are_said_to_be(tmp_path: Path) -> None:
    save(topology_figure(places(3), links(3, None)), tmp_path / "pool.svg")
    said = texts(tmp_path / "pool.svg")
    assert "link, not measured" in said
    assert not [text for text in said if text.startswith("link of")]


def test_a_faster_link_is_wider() -> None:
    widths = [link_width_pt(rate / 8) for rate in (1e5, 1e6, 1e8, 1e9, 1e11, 1e15)]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (1.0, 8.5)


def test_boxes_do_not_cover_each_other() -> None:
    from matplotlib.patches import FancyBboxPatch

    for count in (2, 3, 5, 8, 16):
        for each in (1, 4, 9):
            figure = topology_figure(places(count, each), links(count))
            (axes,) = figure.axes
            boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch) and patch.get_zorder() == 3]
            assert len(boxes) == count
            for one, other in combinations(boxes, 2):
                apart_x = abs(one.get_x() - other.get_x()) >= one.get_width()
                apart_y = abs(one.get_y() - other.get_y()) >= one.get_height()
                assert apart_x or apart_y, f"{count} places of {each}"
