"""What ended processes by a signal, and its neighbours: each works, or is an error that says what to do."""

from __future__ import annotations

from pathlib import Path

from tests.process.cli.commands import command

EACH = """
import copy, io, os, pickle, sys, torch, warnings
from multiprocessing.reduction import ForkingPickler
warnings.simplefilter("ignore")

torch.ones(1, device="cuda").item()
for name in sys.argv[1:]:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            x = torch.arange(6.0, device="cuda").reshape(2, 3)
            weight = torch.nn.Parameter(torch.ones(3, 3, device="cuda"))
            entries = torch.nn.Parameter(torch.tensor([2.0, 3.0], device="cuda"))
            places = torch.tensor([[0, 1], [1, 0]], device="cuda")
            rows, storage = torch.tensor([0, 1, 2], device="cuda"), x.untyped_storage()
            try:
                eval(name)
                torch.cuda.synchronize()
                print(name, "works", sep=": ")
            except Exception as error:
                print(name, type(error).__name__, sep=": ")
        finally:
            sys.stdout.flush()
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        print(name, f"ended with {status}", sep=": ")
"""

KNOWN = {
    "torch.sparse_coo_tensor(places, entries, (2, 2)).to_dense().sum().backward()": "works",
    "type(storage)._new_shared(8, device='cuda')": "works",
    "torch.UntypedStorage(8, device='vgpu')[0]": "works",
    "torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)) + 1": "works",
}

OTHERS = {
    **{
        f"storage.{call}": "works"
        for call in (
            "_new_shared(8)", "clone()", "copy_(torch.UntypedStorage(24))", "cpu()", "cuda()", "fill_(0)", "new()",
            "resize_(48)", "share_memory_()", "to(device='cpu')", "tolist()",
        )
    },
    **{
        f"storage.{call}": "RuntimeError"
        for call in ("_share_fd_cpu_()", "_share_filename_cpu_()", "_write_file(None, True, True, 4)")
    },
    "storage.byteswap(torch.float32)": "NotImplementedError",
    "storage.pin_memory()": "TypeError",
    "storage[0]": "works",
    "list(storage)": "works",
    "torch.UntypedStorage(8, device='cuda')": "works",
    "torch.UntypedStorage(8).fill_(0).tolist()": "works",
    "ForkingPickler.dumps(storage)": "RuntimeError",
    "ForkingPickler.dumps(x)": "works",
    "pickle.loads(pickle.dumps(x))": "works",
    "torch.sparse_coo_tensor(places, entries)": "works",
    "torch.sparse_coo_tensor(places.tolist(), entries, (2, 2)).coalesce()": "works",
    "torch.sparse_coo_tensor(places, entries * 2, (2, 2)).cpu().to_dense()": "works",
    "torch.sparse.mm(torch.sparse_coo_tensor(places, entries, (2, 2)), x)": "NotImplementedError",
    "weight.to_sparse().to_dense().sum().backward()": "works",
    "weight.to_sparse_csr()": "NotImplementedError",
    "torch.sparse_csr_tensor(rows, places[0], entries, (2, 2))": "works",
    "torch.sparse_csr_tensor(rows, places[0], entries, (2, 2)) * 2": "RuntimeError",
    "torch.sparse_bsr_tensor(rows[:2], rows[:1], weight[None], (3, 3)) * 2": "RuntimeError",
    "torch.nested.as_nested_tensor([entries, entries])": "NotImplementedError",
    "torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)": "NotImplementedError",
    "x.to_mkldnn()": "NotImplementedError",
    "x.numpy()": "TypeError",
    "x.apply_(abs)": "TypeError",
}  # fmt: skip


def outcomes(names: list[str], folder: Path) -> dict[str, str]:
    """Run each expression in a process of its own, which shares the devices of one ``onebox run``."""
    (folder / "each.py").write_text(EACH)
    done = command(["run", "--pool", "cpu", "--threads", "1", "each.py", *names], folder)
    assert done.returncode == 0, done.stderr
    return dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())  # type: ignore[misc]


def test_what_ended_processes_works_or_is_an_error(tmp_path: Path) -> None:
    assert outcomes(list(KNOWN), tmp_path) == KNOWN


def test_its_neighbours_work_or_are_errors(tmp_path: Path) -> None:
    assert outcomes(list(OTHERS), tmp_path) == OTHERS


READS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.ones(4, 2, device="cuda"))
    for _ in DataLoader(data, 2, num_workers=1, multiprocessing_context=sys.argv[1]):
        pass
"""


def test_a_data_set_on_a_device_is_an_error_in_a_forked_worker_of_a_data_loader(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS)
    done = command(["run", "--pool", "cpu", "--threads", "1", "reads.py", "fork"], tmp_path)
    assert done.returncode == 1
    assert "PoolError: a forked process, such as a worker of a DataLoader, cannot use tensors that its" in done.stderr
    assert "Segmentation fault" not in done.stderr


def test_a_data_set_on_a_device_is_read_by_a_spawned_worker_which_shares_the_device(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS)
    done = command(["run", "--pool", "cpu", "--threads", "1", "reads.py", "spawn"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_SHARING = """
import os, onebox, torch
with onebox.open("cpu", threads=1):
    x = torch.ones(2, device="vgpu:0")
    if os.fork() == 0:
        try:
            x + 1
        except onebox.OneboxError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
    assert (x + 1).tolist() == [2, 2]
"""


def test_a_forked_process_is_told_at_the_first_operator(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(WITHOUT_SHARING)
    done = command(["run", "--pool", "cpu", "--threads", "1", "forks.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cannot use tensors that its parent has on virtual devices; give it tensors of the host" in done.stdout
