"""The profile of a pool as tables: speeds of devices, links between them, and groups of near devices."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from onebox.cost import CEILING_BPS, DeviceProfile, PoolProfile

_FIGURES = (
    ("matmul_flops", "matmul\nGFLOP/s", 1e-9),
    ("bf16_flops", "bf16\nGFLOP/s", 1e-9),
    ("convolution_flops", "conv\nGFLOP/s", 1e-9),
    ("pointwise_bps", "pointwise\nGB/s", 1e-9),
    ("norm_bps", "norm\nGB/s", 1e-9),
    ("host_copy_bps", "to host\nGB/s", 1e-9),
    ("operator_s", "operator\nµs", 1e6),
    ("call_s", "call\nµs", 1e6),
)
"""Columns of :class:`~onebox.cost.Speeds`: field, heading, and factor from its unit to that of the heading."""


def profile_tables(profile: PoolProfile) -> list[Text | Table]:
    """Return the tables of a profile: devices, latency and bandwidth of links where there are any, and groups.

    Args:
        profile: The profile.

    Returns:
        Each table after its title, so that a title is not cut to the width of a small table.
    """
    shown: list[Text | Table] = [
        Text("\nspeed on the fixed kernels, all devices at work at once"),
        speed_table(profile.devices),
    ]
    if len(profile.devices) > 1:
        shown += [
            Text("\nlatency in µs, row to column"),
            _link_table(profile, profile.latency_s, 1e6),
            Text("bandwidth in GB/s, row to column"),
            _link_table(profile, profile.bandwidth_bps, 1e-9),
            Text("near to each other, by the links"),
            group_table(profile),
        ]
    return shown


def speed_table(devices: Sequence[DeviceProfile]) -> Table:
    """Return the table of the devices' speeds on the fixed kernels; a dash where one has no kernels.

    Args:
        devices: The devices, in the order of the table.
    """
    table = Table("device", "kind", caption=_caption(any(d.emulated for d in devices)), caption_justify="left")
    for _, heading, _ in _FIGURES:
        table.add_column(heading, justify="right")
    for device in devices:
        figures = (_number(getattr(device.speeds, field), factor) for field, _, factor in _FIGURES)
        table.add_row(str(device.number), device.device + ("*" if device.emulated else ""), *figures)
    return table


def group_table(profile: PoolProfile) -> Table:
    """Return the table of the groups of near devices, and of their hosts.

    Args:
        profile: The profile; level 1 are the smallest groups, level 2 the groups of these.
    """
    table = Table("level", "devices", "hosts")
    for level, groups in enumerate(profile.groups, 1):
        for group in groups:
            table.add_row(str(level), " ".join(map(str, group)), Text(", ".join(profile.host_names(group))))
    return table


def _link_table(profile: PoolProfile, values: dict[int, dict[int, float]], factor: float) -> Table:
    emulated = set(profile.emulated_links)
    table = Table("", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.caption, table.caption_justify = _caption(bool(emulated)), "left"
    for target in values:
        table.add_column(str(target), justify="right", no_wrap=True)
    for source, row in values.items():
        mark = {target: "*" if (source, target) in emulated else "" for target in values}
        table.add_row(str(source), *(_number(row.get(target), factor) + mark[target] for target in values))
    return table


def _caption(emulated: bool) -> str | None:
    return "* emulated" if emulated else None


def _number(value: float | None, factor: float) -> str:
    """Format a number with three significant digits and no exponent."""
    if value is None:
        return "-"
    if value >= CEILING_BPS:
        return "∞"
    scaled = value * factor
    if scaled >= 100:
        return f"{scaled:,.0f}"
    return f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}" if scaled >= 1 else f"{scaled:.3g}"
