"""Which ways the tensors of a group go: ranks find out with whom they share memory, whatever their hosts are called."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.comm.api import RankLost, WorkerGroup
from onebox.worker.comm.manager import form_group
from onebox.worker.comm.shm import rendezvous
from onebox.worker.comm.shm.descriptors import DescriptorExchange
from onebox.worker.comm.shm.rendezvous import find_shm_peers, shm_domain
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.progress import WorkerProgress
from tests.kit.leaks import nothing_left
from tests.unit.programs import HOST
from tests.unit.ranks import Hub, Keys, in_threads, memory_card

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

PLACE = threading.local()
SPEC = TensorSpec("float64", (30_000,))


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads be in places of their own."""
    monkeypatch.setattr(rendezvous, "shm_domain", lambda: PLACE.name)


def run(places: str, rank: Callable[[int, WorkerGroup], Any], *, owners: str = "") -> list[Any]:
    """Form a group of ranks in places, each named by a letter as its owner is, and run a function in each."""
    hub = Hub()

    def one(number: int) -> Any:
        PLACE.name = places[number]
        form = FormGroup(3, number, len(places), "tcp", "127.0.0.1", 20.0, True)
        key = owners[number : number + 1].encode()
        group = form_group(form, hub.channel(number), HOST, WorkerProgress(), sharing_key=key)
        try:
            return rank(number, group)
        finally:
            group.close()

    return in_threads(len(places), one)


def part(sender: int, receiver: int, order: int) -> Tensor:
    """Return what a rank sends to another."""
    return torch.arange(SPEC.shape[0], dtype=torch.float64) / 7 + 1000 * sender + 100 * receiver + order


def swap(group: WorkerGroup, number: int, size: int) -> list[tuple[int, int, Tensor]]:
    """Send three tensors to everybody at once, receive everybody's, and return them."""
    peers = [peer for peer in range(size) if peer != number]
    finishes = [(peer, order, group.receive(SPEC, peer, 4)) for peer in peers for order in range(3)]
    for order in range(3):
        for peer in peers:
            group.send(part(number, peer, order), peer, 4)
    return [(peer, order, finish().tensor) for peer, order, finish in reversed(finishes)]


def links() -> list[str]:
    """Return the names of the threads that send to other ranks over TCP."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onebox-to-")]


@pytest.mark.parametrize(("places", "over_tcp"), [("aa", 0), ("ab", 2), ("abaab", 12), ("aab", 4)])
def test_tensors_go_by_the_way_that_there_is(places: str, over_tcp: int) -> None:
    size = len(places)
    done = threading.Barrier(size, timeout=20)

    def rank(number: int, group: WorkerGroup) -> int:
        near = tuple(peer for peer in range(size) if places[peer] == places[number])
        assert group.joined == (Joined() if near == (number,) else Joined(near))
        for peer, order, came in swap(group, number, size):
            assert torch.equal(came, part(peer, number, order))
        total = group.reduce([torch.full((3,), float(number))])
        whole = group.gather(torch.tensor([number]), TensorSpec("int64", (size,)), 0, [1] * size)
        assert whole().tensor.tolist() == list(range(size))
        assert total().tensor.tolist() == [size * (size - 1) / 2] * 3
        done.wait()
        found = len(links())
        done.wait()
        return found

    assert run(places, rank) == [over_tcp] * size


def test_ranks_two_of_which_do_not_share_memory_all_take_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = DescriptorExchange.exchange

    def without(self: DescriptorExchange, *args: Any) -> dict[int, int]:
        came = exchange(self, *args)
        lost = {(0, 2): 2, (0, 1): 1}.get(tuple(sorted(came)))  # ranks 1 and 2 miss each other's
        if lost is not None:
            os.close(came.pop(lost))
        return came

    monkeypatch.setattr(DescriptorExchange, "exchange", without)

    def rank(number: int, group: WorkerGroup) -> list[float]:
        for peer, order, came in swap(group, number, 3):
            assert torch.equal(came, part(peer, number, order))
        return group.reduce([torch.full((2,), float(number))])().tensor.tolist()

    assert run("aaa", rank) == [[3.0, 3.0]] * 3


def test_memory_is_shared_by_workers_of_one_owner_only() -> None:
    def rank(number: int, group: WorkerGroup) -> Joined:
        for peer, order, came in swap(group, number, 3):
            assert torch.equal(came, part(peer, number, order))
        return group.joined

    assert run("aaa", rank, owners="xyx") == [Joined((0, 2)), Joined(), Joined((0, 2))]


@pytest.mark.parametrize("change", ["key", "rank", "group", "inode", "post", "nothing"])
def test_who_copies_or_changes_what_another_rank_has_said_shares_nothing(change: str) -> None:
    PLACE.name = "a"
    keys = Keys()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as post:
        post.bind("")
        name = post.getsockname()[1:].hex()
        key, group, number = (b"n" if change == "key" else b"k"), 3 + (change == "group"), 1 + (change == "rank")
        card = memory_card(number, "a", process=os.getpid(), post=name, group=group, key=key)
        card = {"inode": card.replace(":3:", ":4:"), "post": card.replace(name, "00ff")}.get(change, card)
        keys.set("memory/1", card)
        keys.set("shares/1", "0,1")
        form = FormGroup(3, 0, 2, "tcp", "127.0.0.1", 0.2, True)
        met = find_shm_peers(form, keys, sharing_key=b"k")
        assert list(met.memories) == [0]
        with pytest.raises(BlockingIOError) if change != "nothing" else contextlib.nullcontext():
            _, (descriptor,), _, _ = socket.recv_fds(post, 1, 2)  # of its memory
            os.close(descriptor)


def test_what_goes_through_memory_does_not_wait_for_what_goes_through_sockets() -> None:
    done = threading.Event()

    def rank(number: int, group: WorkerGroup) -> None:
        if number == 0:
            silent = group.receive(SPEC, 2, 0)
            assert torch.equal(group.receive(SPEC, 1, 0)().tensor, part(1, 0, 0))
            done.set()
            assert torch.equal(silent().tensor, part(2, 0, 0))
        elif number == 1:
            group.send(part(1, 0, 0), 0, 0)
        else:
            assert done.wait(20)
            group.send(part(2, 0, 0), 0, 0)

    run("aab", rank)


def test_ranks_that_cannot_hand_over_memory_use_sockets_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if one of them were in a box that others' sockets cannot be seen from: only one of the two gets something."""
    send = socket.socket.sendmsg

    def sendmsg(self: socket.socket, *arguments: Any) -> int:
        if self.family == socket.AF_UNIX and PLACE.name == "b":
            raise ConnectionRefusedError
        return send(self, *arguments)

    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.3)
    monkeypatch.setattr(socket.socket, "sendmsg", sendmsg)
    monkeypatch.setattr(rendezvous, "shm_domain", lambda: "a")

    def rank(number: int, group: WorkerGroup) -> Joined:
        for peer, order, came in swap(group, number, 2):
            assert torch.equal(came, part(peer, number, order))
        return group.joined

    assert run("ab", rank) == [
        Joined((0,), ((1, "its memory did not come"),)),
        Joined((1,), ((0, "it could not have this one's memory"),)),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"nonsense", "is named b'nonsense'"),
        (b"place:1:1:2:3:zz:", "is named"),
        (b"place:cpu:1:4096:3:ff:", "is named"),
        (b"place:1:1:4096:3:ff", "is named"),
        (b"place:1:1:4096:3:ff:", "a memory of 4096 bytes"),
        (b"\xff", "is named"),
    ],
)
def test_what_is_no_card_is_refused(text: bytes, complaint: str) -> None:
    PLACE.name = "a"
    keys = Keys()
    keys.values["memory/1"] = text
    with pytest.raises(WireError, match=complaint):
        find_shm_peers(FormGroup(3, 0, 2, "tcp", "127.0.0.1", 1.0, True), keys)


def test_a_rank_whose_process_has_ended_is_lost() -> None:
    PLACE.name = "a"
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    keys = Keys()
    keys.set("memory/1", memory_card(1, "a", process=pid, post="ff"))
    with pytest.raises(RankLost, match=f"process {pid} has ended"):
        find_shm_peers(FormGroup(3, 0, 2, "tcp", "127.0.0.1", 1.0, True), keys)


def test_nothing_stays_behind_of_a_group_in_two_places() -> None:
    run("aab", lambda number, group: None)  # what is opened once and for all
    with nothing_left():
        run("aab", lambda number, group: [spec_of(came) for _, _, came in swap(group, number, 3)])


def test_memory_that_could_become_smaller_is_not_mapped() -> None:
    for allowed in (0, os.MFD_ALLOW_SEALING):
        descriptor = os.memfd_create("test", allowed)
        os.ftruncate(descriptor, 1 << 26)
        with pytest.raises(RankLost, match="not for good"):
            SharedMemory.of(descriptor, 1 << 26)
    own = SharedMemory.make()
    with pytest.raises(PermissionError):
        os.ftruncate(own.descriptor, 1 << 20)
    own.seal()


def test_a_place_is_the_same_for_all_processes_of_it() -> None:
    reading, writing = os.pipe()
    shm_domain.cache_clear()
    child = os.fork()
    if not child:  # which knows nothing of what is found out here
        os.write(writing, shm_domain().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as child_output:
        assert child_output.read() == shm_domain()
    os.waitpid(child, 0)
    assert len(shm_domain()) == 32
