"""The state of the live page of a run over several machines: their devices, links and clocks."""

from __future__ import annotations

import time

import onebox
from onebox.report.page.live_run import LiveRun
from tests.net.fleet import MACHINES
from tests.net.hosts import Network
from tests.net.training import GRADIENT_BYTES, batch, parts, plans


def test_links_between_hosts_have_a_measured_rate_and_bytes(pool: onebox.Pool, network: Network) -> None:
    addresses = {network[name].address for name in MACHINES}
    with onebox.Trainer(*parts(), pool=pool, plan=plans()["data-parallel"]) as trainer:
        live = LiveRun("wide", trainer, folder="run", total_steps=4, epochs=1)
        for step in range(4):
            loss = trainer.step(*batch(step)).item()
            record = {"event": "step", "step": step + 1, "epoch": 1, "loss": loss, "samples": 12, "time": time.time()}
            live.add(record)
        found = live.state()
    assert {host.name for host in found.hosts} == addresses
    assert all(device.used_bytes and device.peak_bytes for host in found.hosts for device in host.devices)
    links = {(link.source, link.target): link for link in found.links}
    between = [link for (source, target), link in links.items() if {source, target} <= addresses]
    assert between and all(link.measured_bps and link.step_bytes for link in between)
    assert sum(link.step_bytes or 0 for link in between) > GRADIENT_BYTES
    assert {target for source, target in links if source == "this client"} == addresses
    assert found.schedule is not None and found.schedule.step == 4
    assert len({row.process for row in found.schedule.rows}) == len(MACHINES)
