"""The profile of a model as tables: times and bytes of its segments."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from onebox.cost.model_profile import AS_CAPTURED, ModelProfile, SegmentTimes


def segment_tables(profile: ModelProfile) -> list[Table]:
    """Return a table of a model's segments for each type of device and each measured size of a micro-batch.

    Args:
        profile: The profile.
    """
    return [_table(profile, kind, times) for kind, measured in sorted(profile.times.items()) for times in measured]


def _table(profile: ModelProfile, kind: str, times: SegmentTimes) -> Table:
    shown = Table(
        box=SIMPLE_HEAD,
        title=f"segments on {kind}, micro-batches of {times.size}",
        title_justify="left",
        caption=f"optimizer {1e3 * times.update_s:.2f} ms a step; {1e6 * times.call_s:.0f} µs beside each action"
        + _formats(times),
        caption_justify="left",
    )
    for heading in ("segment", "F ms", "I ms", "W ms", "state KiB", "saved KiB", "crossing KiB"):
        shown.add_column(heading, justify="left" if heading == "segment" else "right", overflow="fold")
    part = times.size / profile.bytes.size
    for index, (segment, seconds) in enumerate(zip(profile.bytes.segments, times.seconds, strict=True)):
        crossing = sum(
            value.forward_bytes + value.backward_bytes
            for value in profile.bytes.values
            if value.source <= index < max(value.consumers)
        )
        sizes = (segment.state_bytes, part * segment.saved_bytes, part * crossing)
        shown.add_row(
            segment.name, *(f"{1e3 * second:.2f}" for second in seconds), *(f"{size / 2**10:,.0f}" for size in sizes)
        )
    return shown


def _formats(times: SegmentTimes) -> str:
    """Describe the gain of each memory format of segments, where several were measured."""
    plain = next((seconds for way, seconds in times.ways if way == AS_CAPTURED), ())
    said = ""
    for way, seconds in times.ways:
        gains = [sum(before) - sum(after) for before, after in zip(plain, seconds, strict=True)]
        if way != AS_CAPTURED:
            name = " and ".join(["channels last"] * way.channels_last + ["bf16"] * way.bf16)
            said += (
                f"\n{sum(gain > 0 for gain in gains)} of {len(gains)} segments are faster with {name}, all of which "
                f"take {1e3 * sum(gains):.2f} ms less with it"
            )
    return said + "\ntimes are those of the fastest of these ways" * bool(said)
