"""Plans over two hosts: a slow link between them is noticed, and so is its end; a run without a plan makes one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onebox.plan import Plan
from tests.net.fleet import Fleet
from tests.net.hosts import Host, Network

SLOW_BPS = 10_000_000
"""Of a network on which the gradients of the model take longer than a step on one device."""

JOB = ("--model", "tests.net.training:Laborious", "--data", "digits", "--batch", "128", "--threads", "1")
COMMAND_S = 300.0

LINKS_MEASURED = re.compile(r"links measured between hosts (just now|\d+ (s|min) ago)")


@contextmanager
def limited(host: Host, rate_bps: int) -> Iterator[None]:
    """Limit what goes in and out of a host."""
    try:
        host.limit(rate_bps)
    except RuntimeError as error:
        pytest.skip(f"no links of a limited rate here: {error}")
    try:
        yield
    finally:
        host.unlimit()


def command(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of onebox as a client."""
    line = (sys.executable, "-m", "onebox", *arguments)
    done = fleet.network["client"].run(*line, env=fleet.environment("client"), timeout_s=COMMAND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def planned(fleet: Fleet, folder: Path) -> tuple[dict[str, Any], str, str]:
    """Return the report of ``onebox plan`` for two hosts, and what it printed."""
    report = folder / "report.json"
    options = ("--pool", fleet.spec("red", "green"), "--budget", "2", "--micro-batches", "64,128")
    done = command(fleet, "plan", *JOB, *options, "--report", str(report))
    return json.loads(report.read_text()), done.stdout, done.stderr


def devices(report: dict[str, Any]) -> set[int]:
    """Return the devices of a report's plan."""
    return {device for stage in report["plan"]["stages"] for replica in stage["replicas"] for device in replica}


def test_a_plan_is_for_the_link_as_it_is_now(fleet: Fleet, network: Network, tmp_path: Path) -> None:
    with limited(network["green"], SLOW_BPS):
        report, said, _ = planned(fleet, tmp_path)
        assert len(devices(report)) == 1
        assert LINKS_MEASURED.search(said), said
        (parallel,) = [one for one in report["candidates"] if one["label"] == "data parallel, equal shares"]
        assert parallel["step_s"] > 1.5 * report["candidates"][0]["step_s"], "a real one: it sends gradients"
    report, said, warned = planned(fleet, tmp_path)
    assert devices(report) == {0, 1}
    assert LINKS_MEASURED.search(said), said
    change = re.search(r"the link between \S+ and \S+ has changed: .* when it was measured", warned)
    assert change, warned
    with limited(network["green"], SLOW_BPS):
        report, _, warned = planned(fleet, tmp_path)
        assert len(devices(report)) == 1
        assert "has changed" in warned


@pytest.mark.feature("Plans: Plan with slow links between hosts")
def test_a_run_without_a_plan_does_without_a_slow_link_and_says_so(
    fleet: Fleet, network: Network, tmp_path: Path
) -> None:
    run, pool = tmp_path / "run", ("--pool", fleet.spec("red", "green"))
    with limited(network["green"], SLOW_BPS):
        done = command(fleet, "train", *JOB, *pool, "--epochs", "1", "--run", str(run))
        reason = re.search(r"2 hosts joined at (\d+\.?\d*) Mbit/s: plan auto, (.*); data parallel would", done.stderr)
        assert reason, done.stderr
        assert float(reason[1]) < 2 * SLOW_BPS / 1e6
        plan = Plan.read(run / "plan.json")
        assert plan.describe() == reason[2]
        assert len(plan.devices) == 1
        assert f"the same plan again: --plan {run}/plan.json" in done.stdout
        assert "predicted and measured" in done.stdout
        done = command(fleet, "train", "--resume", str(run), "--epochs", "2")
        assert f"plan: {plan.describe()}" in done.stdout, "as it was stored"
        assert "plan auto" not in done.stderr


@pytest.mark.feature("Monitoring: Learn which link a run waits for")
def test_a_run_says_which_link_it_waits_for(fleet: Fleet, network: Network, tmp_path: Path) -> None:
    run, pool = tmp_path / "run", ("--pool", fleet.spec("red", "green"))
    job = ("--model", "tests.net.training:Wide", "--data", "digits", "--batch", "361", "--threads", "1")
    with limited(network["green"], SLOW_BPS):
        done = command(fleet, "train", *job, *pool, "--plan", "data-parallel", "--epochs", "1", "--run", str(run))
    ends = [network[name].address for name in ("red", "green")]
    records = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    (links,) = [record["links"] for record in records if record["event"] == "feed"]
    assert {(each["source"], each["target"]) for each in links} == {tuple(ends), tuple(ends[::-1])}
    for each in links:
        assert SLOW_BPS / 2 < 8 * each["size_bytes"] / each["busy_s"] < 2 * SLOW_BPS
    shown = [each["args"] for each in json.loads((run / "timeline.json").read_text())["traceEvents"]]
    assert sum(each.get("size_bytes", 0) for each in shown) == sum(each["size_bytes"] for each in links)
    assert {f"{a} → {b}" for a, b in (ends, ends[::-1])} <= {each.get("name") for each in shown}
    (account,) = [record for record in records if record["event"] == "account"]
    training = {name: share for name, share in account["shares"].items() if name != "capture and planning"}
    assert max(training, key=lambda name: training[name]) == f"link {'–'.join(sorted(ends))}"
    assert f"link {'–'.join(sorted(ends))} " in done.stdout
