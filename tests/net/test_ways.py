"""The ways of tensors in a group over two hosts: memory between the workers of one, TCP between the hosts."""

from __future__ import annotations

import pytest

import onebox
from onebox.pool import raise_first
from onebox.wire.protocol.instructions import Ask
from onebox.worker.comm.shm.segment import supported
from tests.kit.leaks import mapped
from tests.kit.reference import assert_same
from tests.net.fleet import Fleet
from tests.net.training import NARROW, alone, batch, outcome, parts, plans

STEPS = 2


@pytest.mark.feature("Networks: Share memory among workers of a host, or not")
@pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")
def test_workers_of_one_host_share_memory_and_none_share_it_across_hosts(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """All hosts of these tests have one kernel, whose memory they could share if they saw each other's sockets."""
    with fleet.client():
        pool = onebox.open(f"cpu*2,{fleet.spec('green')}", threads=1)
    with pool:
        group = pool.form_group((0, 1, 2), "workers")
        maps = [mapped("onebox", pid) for pid in pool.process_ids]
        assert maps == [2, 2, 0]
        pool.leave_group(group, (0, 1, 2))
        raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in range(3)])
        for plan in plans().values():
            with onebox.Trainer(*parts(NARROW), pool=pool, plan=plan, engine=onebox.Engine(check_every=1)) as trainer:
                found = outcome(trainer, [trainer.step(*batch(step)) for step in range(STEPS)])
            assert_same(found, alone(plan, STEPS, NARROW))
    assert "share memory" not in caplog.text, "nobody could have, and nobody is told"
