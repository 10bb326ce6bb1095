"""The clock of the wall may jump as it likes, on every side: leases, signs of life and snapshots go by another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.agent.hosts import start

SHIM = """
import os, time

_wall, _wall_ns = time.time, time.time_ns
_jumps = (0, 90_000, -90_000, 3, -3)  # seconds; the next one every 0.2 s


def _offset():
    return _jumps[int(time.monotonic() / 0.2) % len(_jumps)]


time.time = lambda: _wall() + _offset()
time.time_ns = lambda: _wall_ns() + _offset() * 10**9


def _mark():
    open(os.path.join({marks!r}, str(os.getpid())), "w").close()


_mark()
os.register_at_fork(after_in_child=_mark)
"""
"""What Python runs first in every process: the agent, the client, their workers, some of which are forks of one."""

CLIENT = """
import os, signal, sys, time
import onebox, torch
from onebox.plan import Plan
from onebox.pool.liveness import SILENCE_S
from tests.process.faults.training import batch, parts

GRACE_S = 3.0

def train(pool, least_s, kill):
    plan = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=4)
    with onebox.Trainer(*parts(), pool=pool, plan=plan, recovery=onebox.Recovery(snapshot_every=2)) as trainer:
        begin_s = time.monotonic()
        while trainer.steps_done < 8 or time.monotonic() - begin_s < least_s:
            if trainer.steps_done == 4 and kill:
                os.kill(pool.process_ids[1], signal.SIGKILL)
            if trainer.steps_done < 8:
                trainer.step(*batch(trainer.steps_done)).item()
            else:
                time.sleep(0.05)
        return trainer.tensors(), trainer.recoveries

if __name__ == "__main__":
    with onebox.open(sys.argv[1] + "/cpu*2", threads=1, grace_s=GRACE_S) as pool:
        quiet, nothing = train(pool, 1.2 * max(GRACE_S, SILENCE_S), False)
        begin_s = time.monotonic()
        found, stories = train(pool, 0.0, True)
        assert not nothing, nothing
        assert [story.lost for story in stories] == [(1,)], stories
        assert 0 < stories[0].seconds <= time.monotonic() - begin_s
        assert all(torch.equal(found[name], tensor) for name, tensor in quiet.items())
        print("processes", os.getpid(), *pool.process_ids)
"""


def test_a_wall_clock_that_jumps_is_nobodys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SHIM.format(marks=str(marks)))
    repository = Path(__file__).resolve().parents[3]
    paths = [tmp_path, repository, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    (host,) = start(1)
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, host.address], capture_output=True, text=True, timeout=240, check=False
        )
    finally:
        host.kill()
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert {*line.split()[1:], str(host.process.pid)} <= {mark.name for mark in marks.iterdir()}
