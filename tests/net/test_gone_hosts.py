"""A script on virtual devices one of whose hosts is cut off for good: it goes on at the client, with the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.waiting import until
from tests.net.fleet import Fleet
from tests.net.hosts import Network

SCRIPT = """
import hashlib, sys, time
from pathlib import Path

import torch
from torch import nn

import onebox

if __name__ == "__main__":
    spec, go_on = sys.argv[1], Path(sys.argv[2])
    with onebox.open(spec, threads=1) as pool:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3)).to("vgpu:0")
        second = nn.Linear(32, 4).to("vgpu:1")
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-2)
        generator = torch.Generator().manual_seed(3)
        for step in range(12):
            x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(second(first(x.to("vgpu:0")).to("vgpu:1")), y.to("vgpu:1")).backward()
            optimizer.step()
            if step == 6:
                print("half", first[0].weight.sum().item(), flush=True)
                while not go_on.exists():
                    time.sleep(0.05)
        values = [value.cpu() for part in (first, second) for value in part.state_dict().values()]
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
        print("digest", digest, "hosts", *(device.host for device in pool.devices), flush=True)
        print("addresses", *(device.address for device in pool.devices), flush=True)
"""


def run(fleet: Fleet, script: Path, spec: str, at: Callable[[], object]) -> str:
    """Run the script at the client; what is to happen happens at its half. Return what it has printed."""
    go_on = script.with_suffix(".go")
    go_on.unlink(missing_ok=True)
    process = fleet.python("client", "client", str(script), spec, str(go_on))
    until(lambda: process.poll() is not None or "half" in fleet.printed("client"))
    at()
    go_on.touch()
    until(lambda: process.poll() is not None)
    said = fleet.printed("client")
    (fleet.folder / "client.out").unlink()
    assert process.returncode == 0, said
    return said


@pytest.mark.feature("Virtual devices: A script survives the loss of a machine")
def test_a_script_whose_host_is_cut_off_for_good_goes_on_at_the_client(
    fleet: Fleet, network: Network, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    spec = fleet.spec("red", "green")
    red, green, client = (network[name].address for name in ("red", "green", "client"))
    try:
        expected = run(fleet, script, spec, lambda: None)
        found = run(fleet, script, spec, lambda: network["green"].plug(False))
    finally:
        network["green"].plug(True)
    assert f"hosts {red} {green}\n" in expected
    assert f"hosts {red} localhost\naddresses {red} {client}\n" in found
    assert f"device 1 is cpu on localhost now, not cpu on {green}" in found
    assert re.findall(r"digest (\w+)", found) == re.findall(r"digest (\w+)", expected)
    until(lambda: not fleet.workers("red") and not fleet.workers("green"))
