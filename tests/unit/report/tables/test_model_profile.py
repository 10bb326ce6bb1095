"""The table of a model's segments."""

from __future__ import annotations

from rich.console import Console

from onebox.cost.model_profile import (
    AS_CAPTURED,
    CrossingValue,
    ModelBytes,
    ModelProfile,
    SegmentBytes,
    SegmentTimes,
    SegmentVariant,
)
from onebox.report import segment_tables


def segment(name: str, saved_bytes: int) -> SegmentBytes:
    return SegmentBytes(
        name=name,
        parameter_bytes=1024,
        state_bytes=2048,
        saved_bytes=saved_bytes,
        late_bytes=0,
        forward_work_bytes=0,
        backward_work_bytes=0,
    )


def test_bytes_are_for_the_size_that_was_timed() -> None:
    values = (
        CrossingValue(source=0, consumers=(2,), forward_bytes=4096, backward_bytes=0, kept=True),
        CrossingValue(source=1, consumers=(2,), forward_bytes=0, backward_bytes=1024, kept=False),
    )
    segments = (segment("first", 8192), segment("second", 0), segment("third", 0))
    memory = ModelBytes(graph="g", size=8, segments=segments, values=values, ties=())
    times = SegmentTimes(size=4, seconds=((0.001, 0.0, 0.002),) * 3, update_s=0.0005, call_s=3e-6)
    (table,) = segment_tables(ModelProfile(bytes=memory, times={"cpu": (times,)}))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table)
    rows = [line.split() for line in shown.get().splitlines() if line.split()[:1] in (["first"], ["second"], ["third"])]
    assert rows == [
        ["first", "1.00", "0.00", "2.00", "2", "4", "2"],
        ["second", "1.00", "0.00", "2.00", "2", "0", "2"],
        ["third", "1.00", "0.00", "2.00", "2", "0", "0"],
    ]
    assert "optimizer 0.50 ms" in shown.get()
    assert "faster" not in shown.get()


def test_what_other_ways_gain() -> None:
    segments = (segment("first", 8192), segment("second", 0))
    memory = ModelBytes(graph="g", size=8, segments=segments, values=(), ties=())
    plain = ((0.004, 0.0, 0.0), (0.002, 0.0, 0.0))
    ways = (
        (AS_CAPTURED, plain),
        (SegmentVariant(channels_last=True, bf16=True), ((0.001, 0.0, 0.0), (0.003, 0.0, 0.0))),
    )
    times = SegmentTimes(size=4, seconds=plain, update_s=0.0005, call_s=3e-6, ways=ways)
    (table,) = segment_tables(ModelProfile(bytes=memory, times={"cpu": (times,)}))
    said = "1 of 2 segments are faster with channels last and bf16, all of which take 2.00 ms less"
    assert said in str(table.caption)
