"""Workers of a pool hold no privileges, and take no more memory than they may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onebox
from onebox.errors import OneboxError
from onebox.pool import open_pool
from onebox.wire import DType, Hole, KernelSpec, Many, Strided, TensorSpec, to_frame
from onebox.wire.protocol.eager import Perform
from onebox.wire.protocol.instructions import Ask, Reduce
from onebox.wire.protocol.requests import Put
from onebox.worker.sandbox import seccomp


@pytest.mark.feature("Security: Confine workers without privileges")
def test_no_thread_of_a_worker_has_a_privilege_and_groups_form_all_the_same() -> None:
    with open_pool("cpu*2", threads=2) as pool:
        group = pool.form_group((0, 1), "workers")
        for worker in (0, 1):
            frame = bytes(to_frame(torch.tensor(worker + 1.0)))
            pool.post(worker, [Put((1,), (TensorSpec("float32", ()),)), Reduce((1,), group)], [frame])
        for worker, process in enumerate(pool.process_ids):
            (answer,) = pool.post(worker, [Ask("scalars", (1,))], answer=True).result(30).results
            assert answer.values == (3.0,)
            for thread in Path(f"/proc/{process}/task").iterdir():
                status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
                assert status["CapEff"].strip() == status["CapPrm"].strip() == "0" * 16
                assert status["NoNewPrivs"] == "1"
                if seccomp.supported():
                    assert status["Seccomp"] == "2", "filtered"


def test_an_operator_that_makes_more_than_it_says_fails_and_the_worker_goes_on() -> None:
    small = Strided("float32", (2, 3), (3, 1), 0, 24)
    shape = Many((1 << 15, 1 << 17))  # 16 GiB
    full = KernelSpec("aten.full.default", (shape, Hole(0)), {"dtype": DType("float32")}, 0, 1, (small,))
    with open_pool("cpu", threads=1, memory=64 << 20) as pool:
        with pytest.raises(OneboxError, match=r"aten\.full"):
            pool.post(0, [Perform(full, (), (1.0,), 1)], answer=True).result(60)
        (memory,) = pool.post(0, [Ask("memory")], answer=True).result(30).results
        assert memory.used_bytes == 0


def test_operators_that_are_bound_to_cores_by_the_environment_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_PROC_BIND", "true"), ("OMP_PLACES", "cores"), ("GOMP_CPU_AFFINITY", "0-1")):
        monkeypatch.setenv(name, value)
    with onebox.open("cpu", threads=2):
        here = torch.arange(float(1 << 21)).reshape(-1, 64)
        far = here.to("vgpu:0")
        assert (far @ far.T[:, :64]).sum().cpu() == pytest.approx(float((here @ here.T[:, :64]).sum()), rel=1e-3)
