"""A pool's hosts and links as values to draw."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from onebox.cost import PoolProfile
from onebox.pool import DeviceInfo
from onebox.pool.topology_view import places_of, pool_html
from tests.unit.report.tables.test_pool_profile import profile


def devices(hosts: str) -> tuple[DeviceInfo, ...]:
    """Return a device on each of these hosts, of a name of one letter."""
    return tuple(
        DeviceInfo(
            number=number,
            host=host,
            address=f"10.0.0.{ord(host)}",
            device="cpu",
            name="<b>CPU</b>",
            threads=2,
            memory_bytes=1 << 30,
        )
        for number, host in enumerate(hosts)
    )


def test_places_are_hosts_and_links_those_between_them() -> None:
    places, links = places_of(devices("aab"), None)
    assert [(place.name, [device.number for device in place.devices]) for place in places] == [
        ("a", [0, 1]),
        ("b", [2]),
    ]
    assert [(link.ends, link.bandwidth_bps, link.latency_s, link.text) for link in links] == [((0, 1), None, None, "")]


def test_measured_links_are_the_slowest_of_all_between_two_places() -> None:
    measured = profile(5)
    bandwidth = {a: dict(row) for a, row in measured.bandwidth_bps.items()}
    bandwidth[3][0] = 1e6
    found = profile(5, bandwidth_bps=bandwidth)
    places, (link, *_) = places_of(devices("aabbc"), found)
    assert places[0].inner_bps == found.bandwidth_bps[0][1]
    assert (link.ends, link.bandwidth_bps, link.latency_s) == ((0, 1), 1e6, pytest.approx(12.3456e-3))
    assert link.text == "8 Mbit/s, 12.3 ms"


def test_on_one_host_places_are_groups_of_near_devices() -> None:
    found: PoolProfile = profile(5)
    places, links = places_of(devices("aaaaa"), found)
    assert [[device.number for device in place.devices] for place in places] == list(map(list, found.groups[0]))
    assert {place.name for place in places} == {f"a, group {number}" for number in range(len(places))}
    assert all(
        link.bandwidth_bps is None for link in links if 4 in {d.number for e in link.ends for d in places[e].devices}
    )


def test_a_card_names_devices_and_links_and_is_escaped() -> None:
    html = pool_html(devices("aabbc"), profile(5))
    text = " ".join(ElementTree.fromstring(html).itertext())
    assert "Pool of 5 devices" in text and "<b>CPU</b>" in text and "<b>CPU" not in html
    assert "a – b" in text and "1 Gbit/s" in text
    assert "rate" not in pool_html(devices("ab"), None)
