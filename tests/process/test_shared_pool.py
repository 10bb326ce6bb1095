"""Processes that share the pool of ``onebox run``: they end, are killed and are refused, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from onebox.errors import OneboxError, PoolError, UsageError
from onebox.pool import Pool
from onebox.pool.sharing import AttachedPool, PoolServer, pool_server
from onebox.pool.sharing.message_stream import MessageStream
from onebox.pool.sharing.messages import Claim
from onebox.pool.streams.message_log import SPAN
from onebox.wire import TensorSpec, encode
from onebox.wire.protocol.eager import BoundMemory, CopyBuffers
from onebox.wire.protocol.groups import FormGroup, Rendezvous, TicketCancelled
from onebox.wire.protocol.instructions import Free, Get
from onebox.wire.protocol.requests import Envelope, FreeRange, Put, ReadClock, Shutdown
from tests.kit.pools import Pools
from tests.kit.waiting import until
from tests.process.cli.commands import POOL, WITHIN_S, assert_gone, command, read_until, running

TORCHRUN = ("torchrun", *POOL)


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


# ---- ranks

RESTARTED = r"""
import os, signal, time, torch, torch.distributed as dist
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.cuda.set_device(rank)
before = torch.cuda.memory_allocated()
x = torch.full((1 << 20,), rank + 1.0, device="cuda")
dist.init_process_group("nccl")
dist.all_reduce(x)
print(f"attempt {attempt} rank {rank} before {before} sum {x[0].item()}\n", end="", flush=True)
dist.all_reduce(x)
x.sum().item()  # the other rank has printed, too
while attempt == 0:
    if rank == 1:
        if os.fork() == 0:  # such as a data loader, which ends a little later
            for _ in range(600):
                time.sleep(0.0 if os.path.exists("over") else 0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    x.sum().item()
open("over", "w").close()
dist.destroy_process_group()
"""


@pytest.mark.feature("Launchers: Start a killed rank again")
@pytest.mark.feature("Launchers: Start a rank for each device by onebox torchrun")
def test_a_killed_rank_is_started_anew_and_its_memory_is_free(tmp_path: Path) -> None:
    done = command([*TORCHRUN, "--max-restarts", "1", script(tmp_path, RESTARTED)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"attempt {attempt} rank {rank} before 0 sum 3.0" for attempt in range(2) for rank in range(2)
    ]


FAILED = r"""
import os, torch, torch.distributed as dist
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.cuda.set_device(rank)
x = torch.full((2,), rank + 1.0, device="cuda")

def collective():
    dist.all_reduce(x)
    return x.tolist()

def fails(match):
    try:
        collective()
    except Exception as error:
        assert match in str(error), error
        return str(error)
    assert False, "no error"

dist.init_process_group("nccl")
assert collective() == [3.0, 3.0]
if attempt == 0:
    if rank == 0:
        torch.nn.functional.embedding(torch.tensor([9], device="cuda"), torch.ones(4, 3, device="cuda"))
    assert rank == 1 or "embedding" in fails("index out of range")
    for _ in range(2):
        assert ("embedding" if rank == 0 else "rank 0 has left") in fails("init_process_group()")
    assert fails("--max-restarts").count("--max-restarts") == 1
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    assert collective() == [6.0, 6.0]
    if rank == 0:
        raise SystemExit(1)
print(f"attempt {attempt} rank {rank} {collective()}\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_a_rank_that_fails_ends_the_group_until_it_is_formed_again(tmp_path: Path) -> None:
    """By the ranks that caught the error, or by torchrun, which starts all of them again."""
    done = command([*TORCHRUN, "--max-restarts", "1", script(tmp_path, FAILED)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"attempt 1 rank {rank} [6.0, 6.0]" for rank in range(2)]


TOGETHER = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
x = torch.ones(2, device="cuda:0")
dist.all_reduce(x)
print(x.sum().item())
"""


def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    done = command([*TORCHRUN, "--nproc-per-node", "2", script(tmp_path, TOGETHER)], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "device 0 is used by the collectives of another process: let each rank have a device of its own" in done.stderr
    )


OF_ALL = r"""
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(1 << 20, device="cuda")
dist.all_reduce(x)
if rank == 0:
    dist.all_reduce(x)  # the device now waits for the other one, whose process asks for its memory
numbers = range(torch.cuda.device_count())
torch.set_default_dtype(torch.float64)
kinds = {(torch.arange(3, device="cuda") / 2).dtype, torch.ones(1, device="cuda").dtype}
torch.set_default_dtype(torch.float32)
kinds.add((torch.arange(3, device="cuda") / 2).dtype)
if rank == 1:
    held = [torch.cuda.memory_allocated(number) >= x.nbytes for number in numbers]
    free = [torch.cuda.mem_get_info(number)[0] > 0 for number in numbers]
    dist.all_reduce(x)
    print(held, free, flush=True)
for number in numbers:
    torch.cuda.max_memory_allocated(number), torch.cuda.memory_stats(number), torch.cuda.memory_summary(number)
    torch.cuda.reset_peak_memory_stats(number)
    torch.cuda.get_device_properties(number), torch.cuda.can_device_access_peer(number, 1 - number)
    torch.cuda.synchronize(number)
    torch.cuda.Event().record(torch.cuda.current_stream(number))
    with torch.cuda.device(number):
        torch.cuda.empty_cache()
torch.manual_seed(1), torch.cuda.manual_seed_all(1)
torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
dist.all_reduce(x)
assert x.sum().item() == 8 << 20 and kinds == {torch.float32, torch.float64}, (x, kinds)
dist.destroy_process_group()
"""


def test_what_is_set_or_asked_of_all_devices_does_not_reach_those_of_other_ranks(tmp_path: Path) -> None:
    done = command([*TORCHRUN, script(tmp_path, OF_ALL)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, True] [True, True]\n"


FED = r"""
import os, sys, torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return torch.full((2,), float(index))
if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layer = torch.nn.Linear(2, 1).cuda()
    for how in "fork", "spawn":
        total = 0
        for x in DataLoader(Data(), batch_size=2, num_workers=2, pin_memory=True, multiprocessing_context=how):
            layer(x.cuda(non_blocking=True)).sum().backward()
            total += x.cuda().sum().item()
        print(f"{how} {total} {layer.weight.grad.device}\n", end="", flush=True)
"""


def test_a_rank_reads_data_by_processes_of_its_own(tmp_path: Path) -> None:
    done = command([*TORCHRUN, script(tmp_path, FED)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{how} 30.0 cuda:{rank}" for how in ("fork", "spawn") for rank in range(2)
    ]


def test_torchrun_needs_a_script(tmp_path: Path) -> None:
    """Where flags of torchrun come, torchrun says so itself."""
    done = command([*TORCHRUN, "--nproc-per-node", "2"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: " in done.stderr and "training_script" in done.stderr


# ---- tensors between processes

SENT = """
import torch, torch.multiprocessing as mp
def write(inbox, outbox, go):
    x, layer, part = inbox.get(), inbox.get(), inbox.get()
    go.wait()  # the sender has dropped one of its tensors
    outbox.put(part.tolist())
    del part
    x[1] = 7
    with torch.no_grad():
        layer.bias.fill_(2)
    layer(torch.ones(3, 2, device="cuda:1")).sum().backward()
    outbox.put([isinstance(layer.weight, torch.nn.Parameter), layer.weight.requires_grad, str(layer.weight.device)])
    outbox.put([layer.weight.grad.tolist()])
    torch.cuda.synchronize()
if __name__ == "__main__":
    context = mp.get_context("spawn")
    inbox, outbox, go = context.Queue(), context.Queue(), context.Event()
    child = context.Process(target=write, args=(inbox, outbox, go))
    child.start()
    x, layer = torch.arange(4.0, device="cuda:1"), torch.nn.Linear(2, 2).to("cuda:1")
    big = torch.arange(6.0, device="cuda:0").reshape(2, 3)
    before = torch.cuda.memory_allocated(0)
    for each in x, layer, big.t()[1:]:
        inbox.put(each)
    print(outbox.empty())
    del each, big
    go.set()
    for _ in range(3):
        print(outbox.get(timeout=60))
    child.join()
    print(child.exitcode, x.tolist(), layer.bias.tolist())
    print(before > 0, torch.cuda.memory_allocated(0))
"""


@pytest.mark.feature("Launchers: Share tensors of devices between processes")
def test_a_tensor_and_a_module_arrive_as_the_same_memory(tmp_path: Path) -> None:
    done = command(["run", *POOL, script(tmp_path, SENT)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "[[1.0, 4.0], [2.0, 5.0]]",
        "[True, True, 'cuda:1']",
        "[[[3.0, 3.0], [3.0, 3.0]]]",
        "0 [0.0, 7.0, 2.0, 3.0] [2.0, 2.0]",
        "True 0",
    ]


FORKED = """
import os, sys, torch
x = torch.arange(3.0, device="cuda:1")
x.sum().item()
sys.stdout.flush()
if (child := os.fork()) == 0:
    mine = torch.ones(4, device="cuda:1")
    print("child", mine.sum().item(), torch.cuda.device_count(), flush=True)
    sys.exit(0)
print("status", os.waitpid(child, 0)[1], x.tolist())
"""


def test_a_forked_process_uses_the_devices_too(tmp_path: Path) -> None:
    done = command(["run", *POOL, script(tmp_path, FORKED)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child 4.0 2", "status 0 [0.0, 1.0, 2.0]"]


# ---- the end

LONGER = """
import os, time, torch
x = torch.ones(2, device="cuda")
x.sum().item()
open("attached", "w").close()
while os.path.exists("parent"):
    time.sleep(0.05)
time.sleep(1)
print("child", x.sum().item(), flush=True)
"""

SHORTER = """
import os, subprocess, sys, time
open("parent", "w").close()
subprocess.Popen([sys.executable, "longer.py"])
while not os.path.exists("attached"):
    time.sleep(0.05)
os.unlink("parent")
print("parent", flush=True)
"""


def test_the_pool_stays_for_processes_that_use_it(tmp_path: Path) -> None:
    (tmp_path / "longer.py").write_text(LONGER)
    done = command(["run", *POOL, script(tmp_path, SHORTER)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["parent", "child 2.0"]


ENDLESS = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["RANK"]))
dist.init_process_group("nccl")
x = torch.zeros(2, device="cuda")
dist.all_reduce(x)
x.sum().item()
print("at", os.environ["ONEBOX_PARENT"], flush=True)
while True:
    dist.all_reduce(x)
    x.sum().item()
"""


def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    with running([*TORCHRUN, script(tmp_path, ENDLESS)], tmp_path) as process:
        (address,) = read_until(process, "^at (.*)")
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 4 and Path(address).exists()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode in (1, 130, -signal.SIGINT)
        assert_gone(started)
    assert not Path(address).parent.exists()


ORPHAN = """
import subprocess, sys, time, torch
child = subprocess.Popen([sys.executable, "-c", '''
import signal, torch
signal.signal(signal.SIGINT, signal.SIG_IGN)
x = torch.ones(2, device="cuda")
print("begun", x.sum().item(), flush=True)
try:
    while True:
        x.sum().item()
except Exception as error:
    print(type(error).__name__, error, flush=True)
'''])
time.sleep(60)
"""


def test_a_process_whose_pool_has_ended_gets_an_error(tmp_path: Path) -> None:
    with running(["run", *POOL, script(tmp_path, ORPHAN)], tmp_path) as process:
        read_until(process, "begun 2.0")
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=WITHIN_S)
        assert printed.splitlines() == ["PoolError the process that shares its devices with this one has ended"]
        assert_gone(started)


# ---- the server, and pools attached to it, in this process


@pytest.fixture
def server(pools: Pools) -> Iterator[PoolServer]:
    """A server of a pool of two workers."""
    made = PoolServer(pools(2))
    yield made
    made.close()


@contextlib.contextmanager
def attached(server: PoolServer) -> Iterator[AttachedPool]:
    pool = AttachedPool(server.address)
    try:
        yield pool
    finally:
        pool.close()


def put(pool: Pool, worker: int) -> int:
    """Put four bytes on a worker and return the number of their buffer."""
    number = pool.new_number()
    pool.post(worker, [Put((number,), (TensorSpec("uint8", (4,)),))], [b"\1\2\3\4"])
    return number


def got(pool: Pool, worker: int, number: int) -> bytes:
    return bytes(pool.post(worker, [Get((number,))], answer=True).result(WITHIN_S).frames[0])


def test_each_process_has_numbers_of_its_own(server: PoolServer) -> None:
    with attached(server) as first, attached(server) as second:
        ours, theirs = put(first, 0), put(second, 0)
        assert ours != theirs and got(first, 0, ours) == got(second, 0, theirs)
        second.close()
        assert got(first, 0, ours) == b"\1\2\3\4"
        with attached(server) as third, pytest.raises(OneboxError, match=f"there is no buffer {theirs}"):
            got(third, 0, theirs)


def test_what_a_process_has_sent_can_be_read_after_its_end_by_others_that_go_on(
    server: PoolServer, pools: Pools
) -> None:
    pool = pools(2)
    with attached(server) as first, attached(server) as second, attached(server) as third:
        first.claim(0)
        second.claim(1)
        group = first.form_group((0, 1), "workers")
        assert pool.is_whole(group)
        first.close()

        def released() -> bool:
            try:
                third.claim(0)
            except UsageError:
                return False
            return True

        until(released)
        for _ in range(20):
            assert got(second, 1, put(second, 1))
        assert pool.is_whole(group)
        assert got(third, 0, put(third, 0))
        second.release(1)
        until(lambda: not pool.is_whole(group))


def test_a_device_is_one_process_s_alone_while_it_has_claimed_it(server: PoolServer) -> None:
    with attached(server) as first, attached(server) as second:
        number = put(first, 0)
        assert got(first, 0, number)  # so that it has come before the claim
        second.claim(0)
        with pytest.raises(UsageError, match="device 0 is used by the collectives of another process"):
            first.claim(0)
        with pytest.raises(UsageError, match="device 0 is used by the collectives of another process"):
            got(first, 0, number)
        assert got(first, 1, put(first, 1))
        first.post(0, [Free((number,))])  # waits for nothing, so that it may come at any time
        second.close()
        first.claim(0)
        with pytest.raises(OneboxError, match=f"there is no buffer {number}"):
            got(first, 0, number)


def test_a_process_knows_the_memory_of_a_device_that_another_one_has_claimed(server: PoolServer) -> None:
    with attached(server) as first, attached(server) as second:
        before = first.memory(0).used_bytes
        put(second, 0)
        second.claim(0)
        until(lambda: first.memory(0).used_bytes == before + 4)  # it comes with the worker's next heartbeat
        assert second.memory(0).used_bytes == before + 4
        with pytest.raises(UsageError, match="there is no device 2"):
            first.memory(2)


@pytest.mark.parametrize("worker", [-1, 2])
def test_a_device_that_is_not_there_is_refused(server: PoolServer, worker: int) -> None:
    with attached(server) as pool:
        with pytest.raises(UsageError, match=f"there is no device {worker}; the pool has 0 to 1"):
            pool.claim(worker)
        with pytest.raises(UsageError, match=f"there is no device {worker}"):
            pool.form_group((0, worker), "workers")
        assert got(pool, 0, put(pool, 0))


def test_too_many_processes_are_refused(server: PoolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_server, "_CHILDREN", 1)
    with attached(server) as pool:
        with pytest.raises(PoolError, match="1 processes share the devices"), attached(server):
            pass
        assert got(pool, 0, put(pool, 0))


def test_the_end_of_the_server_is_an_error_of_its_children(server: PoolServer) -> None:
    with attached(server) as pool:
        put(pool, 0)
        server.close()
        with pytest.raises(PoolError, match="has ended"):
            while True:
                pool.post(0, [], answer=True).result(WITHIN_S)
    with pytest.raises(PoolError, match="cannot be reached"):
        AttachedPool(server.address)


def test_only_this_user_can_enter_the_folder_of_the_socket(server: PoolServer) -> None:
    folder = Path(server.address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    server.close()
    assert not folder.exists()


def test_what_is_no_request_ends_its_child_alone(server: PoolServer, caplog: pytest.LogCaptureFixture) -> None:
    with attached(server) as pool, socket.socket(socket.AF_UNIX) as foreign:
        foreign.connect(server.address)
        foreign.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while foreign.recv(1 << 16):  # until the server ends it
                pass
        assert got(pool, 0, put(pool, 0))
    assert "sent what is no request" in caplog.text


@pytest.mark.parametrize(
    "own",
    [
        Shutdown(),
        FreeRange(0, 1 << 60),
        CopyBuffers(0, 1 << 60),
        Rendezvous(1, (b"",)),
        TicketCancelled(1),
        ReadClock(1),
        Claim(True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_only_the_parent_may_send_to_a_worker_is_refused(server: PoolServer, own: Any) -> None:
    with attached(server) as pool:
        number = put(pool, 0)
        with pytest.raises(UsageError, match="what only the one that shares its devices may send"):
            pool.post(0, [Free(()), own], answer=True).result(WITHIN_S)
        assert got(pool, 0, number) == b"\1\2\3\4"


def test_a_child_bounds_the_memory_of_its_own_buffers_alone(server: PoolServer) -> None:
    with attached(server) as pool:
        with pytest.raises(UsageError, match="of the memory of its own buffers only"):
            pool.post(0, [BoundMemory(0, 1 << 60, most_bytes=1)], answer=True).result(WITHIN_S)
        number = put(pool, 0)
        assert got(pool, 0, number) == b"\1\2\3\4"


@pytest.mark.parametrize(
    "form",
    [
        lambda own: FormGroup(1, 0, 2, "tcp", "127.0.0.1", 1.0),
        lambda own: FormGroup(own + 2 * SPAN, 0, 2, "tcp", "127.0.0.1", 1.0),
        lambda own: FormGroup(own, 1, 2, "tcp", "127.0.0.1", 1.0),
        lambda own: FormGroup(own, 0, 2, "client", "127.0.0.1", 1.0),
    ],
    ids=["the parent's number", "another child's number", "no first rank", "for sums at the client"],
)
def test_a_group_of_others_or_for_something_else_is_refused(
    server: PoolServer, form: Callable[[int], FormGroup]
) -> None:
    with attached(server) as pool:
        with pytest.raises(UsageError, match="group"):
            pool.post(0, [form(pool.first_number)], answer=True).result(WITHIN_S)
        group = pool.form_group((0, 1), "workers")
        pool.leave_group(group, (0, 1))


@pytest.mark.parametrize("ask", [lambda pool: pool.claim(0), lambda pool: pool.memory(0)], ids=["claim", "memory"])
def test_a_parent_that_does_not_answer_is_not_waited_for_without_end(
    server: PoolServer, ask: Callable[[AttachedPool], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(server) as pool, monkeypatch.context() as silent:
        silent.setattr("onebox.pool.sharing.attached_pool._REPLY_S", 0.0)
        silent.setattr("onebox.pool.sharing.pool_server._Child.received", lambda *message: True)
        with pytest.raises(PoolError, match="has not answered for 0 s"):
            ask(pool)


def test_instructions_that_are_none_end_their_child_alone(server: PoolServer, caplog: pytest.LogCaptureFixture) -> None:
    with attached(server) as pool, socket.socket(socket.AF_UNIX) as foreign:
        foreign.connect(server.address)
        stream = MessageStream(foreign, "foreign")
        stream.receive()
        stream.transmit(0, msgspec.msgpack.encode([1, True, [["no such instruction"]]]))
        with pytest.raises(ConnectionError):
            stream.receive()
        assert got(pool, 0, put(pool, 0))
    assert "sent what is no request" in caplog.text


def test_a_process_that_reads_nothing_holds_up_nobody(server: PoolServer) -> None:
    with attached(server) as pool, socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(server.address)
        stream = MessageStream(deaf, "deaf")
        stream.receive()
        ones = bytes(1 << 22)
        with attached(server) as other:
            number = other.new_number()
            other.post(0, [Put((number,), (TensorSpec("uint8", (len(ones),)),))], [ones])
            for request in range(1, 5):
                stream.transmit(0, encode(Envelope(request, True, (Get((number,)),))))
            assert got(pool, 0, put(pool, 0)) == b"\1\2\3\4"
        server.close()
        until(lambda: not any(each.name.startswith("onebox-child") for each in threading.enumerate()))


def test_a_forked_process_does_not_use_the_connection_of_its_parent(server: PoolServer) -> None:
    with attached(server) as pool:
        if (child := os.fork()) == 0:
            status = 1
            try:
                pool.claim(0)
            except PoolError as error:
                status = 0 if "a forked process cannot use" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        pool.claim(0)
