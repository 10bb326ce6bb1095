"""A group through shared memory whose other rank is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.segment import supported
from tests.process import echo

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of the other rank."""
    with subprocess.Popen([sys.executable, "-m", "tests.process.echo", str(tmp_path)]) as process:
        yield process
        process.kill()


def test_tensors_of_all_kinds_come_back_and_the_end_of_the_other_process_is_noticed(
    other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    group = echo.join(tmp_path, 0)
    kinds = [dtype for dtype in DTYPES.values() if dtype is not torch.complex32]  # of which PyTorch warns
    tensors = [torch.arange(24).view(2, 3, 4).to(dtype) for dtype in kinds]
    tensors += [torch.empty(0), torch.empty(2, 0, 3), torch.tensor(5.0), torch.randn(2 << 20)]
    for tensor in tensors:  # all at once: the other need not have read any
        group.send(echo.to_text(spec_of(tensor)), 1, 0)
        group.send(tensor, 1, 1)
    group.send(echo.to_text(None), 1, 0)
    for tensor in tensors:
        assert torch.equal(group.receive(spec_of(tensor), 1, 2)().tensor, tensor)
    assert group.reduce([torch.ones(3)])().tensor.tolist() == [2.0] * 3
    wait, total = group.receive(TensorSpec("bool", ()), 1, 2), group.reduce([torch.ones(1)])
    other.kill()
    for finish in (wait, total):
        with pytest.raises(RankLost, match=f"rank 1 has ended: process {other.pid} is gone"):
            finish()
    group.close()
