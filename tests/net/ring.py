"""A process of a test: joins a group, sums over it, hands a tensor round; prints what came as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from onebox.wire import TensorSpec
from onebox.wire.messages import FormGroup
from onebox.worker.tape import Progress
from onebox.worker.torchgroup import TorchGroup


def main(rank: int, size: int, address: str, file: str, elements: int) -> None:
    """Take part as one rank; the rendezvous is a file that all ranks reach."""
    form = FormGroup(1, rank, size, "gloo", address, 60.0)
    group = TorchGroup(form, dist.FileStore(file, size), torch.device("cpu"), Progress())
    spec = TensorSpec("float64", (elements,))
    mine = torch.full((elements,), float(rank + 1), dtype=torch.float64)
    total = group.reduce([mine])().tensor
    arriving = group.receive(spec, (rank - 1) % size, 0)
    group.send(mine, (rank + 1) % size, 0)
    came = arriving().tensor
    alike = bool((total == total[0]).all() and (came == came[0]).all())
    print(json.dumps({"total": total[0].item(), "came": came[0].item(), "alike": alike}))
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
