"""Hosts whose monotonic clocks are days apart, by time namespaces: what they report is on the client's clock."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

import onebox
from onebox.engine.steps.account import COMPUTING, UNKNOWN
from tests.net.fleet import Fleet
from tests.net.hosts import Network, unavailable

DAYS_S = 9 * 86_400
HOUR_NS = 3600 * 10**9


def test_times_of_a_host_whose_clock_is_days_ahead(tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(why)
    if subprocess.run(["unshare", "--time", "--monotonic", "9", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no time namespaces")
    with Network(["red", "client"]) as network:
        network["red"].ahead_s = DAYS_S
        with Fleet(network, tmp_path) as fleet:
            fleet.pair("red")
            fleet.start(["red"])
            with fleet.client(), onebox.open(f"cpu,{fleet.spec('red')}", threads=1) as pool:
                model = torch.nn.Linear(16, 4)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                plan = onebox.DataParallel(shares="equal")
                loss = torch.nn.functional.mse_loss
                with onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan) as trainer:
                    for _ in range(4):
                        trainer.step(torch.ones(8, 16), torch.zeros(8, 4)).item()
                    account, events, now_ns = trainer.wall.take(), trainer.events(), time.monotonic_ns()
    assert {event.worker for event in events} == {0, 1}
    assert all(abs(now_ns - event.start_ns) < HOUR_NS for event in events)
    assert sum(account.shares.values()) == pytest.approx(1.0)
    assert COMPUTING in account.shares and account.shares.get(UNKNOWN, 0.0) < 0.5
    known = ("computing", "waiting for device ", "link ", "client", "capture and planning", "not attributed")
    assert all(cause.startswith(known) for cause in account.shares)
    assert set(account.computing) == {0, 1}
