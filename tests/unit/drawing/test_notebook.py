"""Cards for notebooks: well-formed, escaped, without a script, for light and dark pages."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from onebox.drawing import Bar, StepChart, notebook
from onebox.drawing.style import contrast

HOSTILE = "</td><script>alert('&')</script>"


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def _named(rect: ElementTree.Element, name: str) -> bool:
    return str(rect.findtext("{*}title")).startswith(name)


def chart(bars: int = 3) -> StepChart:
    own = [Bar(n % 2, "FBIW"[n % 4], n * 1e-3, (n + 1) * 1e-3, n % 3, n) for n in range(bars)]
    thin = [Bar(0, "transfer", 0.0, 2e-3), Bar(0, "transfer", 1e-3, 3e-3), Bar(1, "sum", 0.0, 1e-3)]
    return StepChart(title="predicted", bars=(*own, *thin), step_s=bars * 1e-3)


def test_all_text_is_escaped() -> None:
    hostile = StepChart(title=f'"{HOSTILE}', bars=chart().bars, step_s=3e-3)
    html = notebook.card(
        HOSTILE, notebook.text(HOSTILE), notebook.table([HOSTILE], [[HOSTILE, 1]], HOSTILE), notebook.step_svg(hostile)
    )
    assert "<script" not in html
    assert "".join(parsed(html).itertext()).count(HOSTILE) == 6
    assert parsed(html).find(".//{*}svg").get("aria-label", "").startswith(f'"{HOSTILE}')  # type: ignore[union-attr]


def test_a_card_has_neither_colours_of_text_nor_anything_from_elsewhere() -> None:
    html = notebook.card("a", notebook.table(["b"], [[1]]), notebook.step_svg(chart()))
    assert not re.search(r"(?<!-)\bcolor:|src=|href=|url\(|<style|on\w+=", html)
    assert set(re.findall(r"https?://[^\"']+", html)) == {"http://www.w3.org/2000/svg"}
    assert 'fill="currentColor"' in html


def test_a_step_has_a_row_for_each_device_and_a_bar_for_each_activity() -> None:
    svg = parsed(f"<div>{notebook.step_svg(chart())}</div>")
    rects = svg.findall(".//{*}rect")
    assert len(rects) == 6
    names = [rect.findtext("{*}title") for rect in rects]
    assert "forward of stage 0, micro-batch 0: 1.00 ms" in names
    assert [text.text for text in svg.findall(".//{*}text")] == ["device 0", "device 1"]
    starts = {rect.findtext("{*}title"): float(rect.get("x", "0")) for rect in rects}
    assert starts["backward of stage 1, micro-batch 1: 1.00 ms"] > starts["forward of stage 0, micro-batch 0: 1.00 ms"]
    ends = [float(rect.get("x", "0")) + float(rect.get("width", "0")) for rect in rects]
    assert max(ends) <= 900


def test_bars_are_seen_on_light_and_on_dark_pages() -> None:
    """Those of light grey, which stand for little, need not be seen on white."""
    named = set(re.findall(r'fill="(#\w{6})"', notebook.step_svg(chart())))
    light, dark = "#ffffff", "#131416"
    assert named and all(contrast(colour, dark) > 3 for colour in named)
    assert all(contrast(colour, light) > 1.5 for colour in named)
    rects = parsed(f"<div>{notebook.step_svg(chart())}</div>").iter()
    sums = [rect for rect in rects if _named(rect, "sum of gradients")]
    assert {rect.get("fill") for rect in sums} == {"currentColor"}


def test_a_step_of_very_many_bars_is_described_alone() -> None:
    html = notebook.step_svg(chart(4000))
    assert "<svg" not in html and "predicted: 4.00 s" in html
    assert "<svg" not in notebook.step_svg(StepChart(title="predicted", bars=(), step_s=1.0))


def test_numbers_are_aligned_to_the_right() -> None:
    html = notebook.table(("name", "count"), [("a", 1), ("b", 2.5)])
    aligned = [(cell.text, "right" in cell.get("style", "")) for cell in parsed(html).iter("td")]
    assert aligned == [("a", False), ("1", True), ("b", False), ("2.5", True)]
    assert "<thead>" in html and "<thead>" not in notebook.table((), [("a", 1)])
