"""Workers of a pool hold no privileges."""

from __future__ import annotations

from pathlib import Path

import torch

from onebox.pool import open_pool
from onebox.wire import TensorSpec, to_frame
from onebox.wire.messages import Ask, Put, Reduce
from onebox.worker import seccomp


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
