"""Groups through shared memory, the ranks being threads of this process: sums, gathers, messages, and lost peers."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.worker.comm.api import Finish, RankLost, RowRange
from onebox.worker.comm.shm.layout import ShmMessage
from onebox.worker.comm.shm.receiver import ShmReceiver
from onebox.worker.comm.shm.rendezvous import shm_domain
from onebox.worker.comm.shm.segment import LEAST_BYTES, SharedMemory, supported
from onebox.worker.comm.shm.sender import ShmSender, region_of
from onebox.worker.memory.shared import LENT_STORAGES, SharedMemoryQuota
from tests.kit import leaks
from tests.unit.ranks import MemoryGroup, memory_card, run_ranks

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

COMPARED = [name for name in DTYPES if name != "complex32"]
"""The element types that PyTorch can compare."""


def part(rank: int, order: int, shape: tuple[int, ...], dtype: str = "float64") -> Tensor:
    """Return a tensor that a rank has."""
    generator = torch.Generator().manual_seed(100 * rank + order)
    return torch.randint(0, 200, shape, generator=generator).to(DTYPES[dtype])


# ---- sums and gathers


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=5))
@settings(max_examples=25)
def test_every_rank_gets_the_same_sum(size: int, buckets: list[list[int]]) -> None:
    def rank(number: int, group: MemoryGroup) -> list[Tensor]:
        finishes = [
            group.reduce([part(number, order, (1, count)) / 7 for count in counts])
            for order, counts in enumerate(buckets)
        ]
        random.Random(number).shuffle(places := list(range(len(buckets))))
        made = {place: finishes[place]().tensor for place in places}
        return [made[place] for place in range(len(buckets))]

    results = run_ranks(size, rank)
    for order, counts in enumerate(buckets):
        expected = torch.cat([part(0, order, (count,)) / 7 for count in counts])
        for number in range(1, size):
            expected = expected + torch.cat([part(number, order, (count,)) / 7 for count in counts])
        assert all(torch.equal(result[order], expected) for result in results)


@given(st.integers(1, 4), st.sampled_from(COMPARED), st.lists(st.integers(0, 5), min_size=4, max_size=4), st.data())
@settings(max_examples=25)
def test_every_rank_gets_all_parts(size: int, dtype: str, sizes: list[int], data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = [part(number, 0, (*shape[:dim], sizes[number], *shape[dim + 1 :]), dtype) for number in range(size)]
    whole = torch.cat(parts, dim)

    def rank(number: int, group: MemoryGroup) -> torch.Tensor:
        return group.gather(parts[number], spec_of(whole), dim, sizes[:size])().tensor

    for result in run_ranks(size, rank):
        assert result.dtype == whole.dtype
        assert torch.equal(result, whole)


def test_a_part_stays_until_its_own_rank_has_read_it_too() -> None:
    def rank(number: int, group: MemoryGroup) -> float:
        first = group.reduce([torch.ones(1000)])
        if number == 1:
            total = first().tensor
            group.send(torch.ones(1), 0, 0)
        else:
            group.receive(TensorSpec("float32", (1,)), 1, 0)()  # by now the other has read it
            group.send(torch.zeros(1000), 1, 0)
            total = first().tensor
        return float(total.sum())

    assert run_ranks(2, rank) == [2000.0, 2000.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
def test_types_of_sums(dtype: str) -> None:
    values = torch.tensor([1, 2, 3]).to(DTYPES[dtype])
    for result in run_ranks(3, lambda number, group: group.reduce([values])().tensor):
        assert result.dtype == values.dtype
        assert torch.equal(result, values * 3)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda group: group.reduce([torch.ones(3)]), "a sum of float32[3]"),
        (lambda group: group.reduce([torch.ones(2, dtype=torch.float64)]), "a sum of float64[2]"),
        (lambda group: group.reduce([torch.ones(2, dtype=torch.int32)]), "a sum of int32[2]"),
        (
            lambda group: group.gather(torch.ones(2), TensorSpec("float32", (4,)), 0, (2, 2)),
            "a gather along dimension 0",
        ),
    ],
    ids=["bytes", "size of elements", "element type", "kind"],
)
def test_ranks_that_disagree_are_told_so(other: object, named: str) -> None:
    def rank(number: int, group: MemoryGroup) -> str:
        first = group.reduce([torch.ones(1)])
        second = other(group) if number == 1 else group.reduce([torch.ones(2)])  # type: ignore[operator]
        assert first().tensor.tolist() == [2.0]
        with pytest.raises(WireError, match="disagree on collective 2") as caught:
            second()
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert named in message
        assert "a sum of float32[2]" in message


def test_parts_that_do_not_fit_together() -> None:
    def rank(number: int, group: MemoryGroup) -> None:
        finish = group.gather(torch.ones(2, 2 + number), TensorSpec("float32", (4, 2 + number)), 0, (2, 2))
        with pytest.raises(WireError, match=r"disagree.*float32\[2, 2\].*float32\[2, 3\]|float32\[2, 3\].*float32"):
            finish()
        with pytest.raises(WireError, match="no dimension 2"):
            group.gather(torch.ones(2, 2), TensorSpec("float32", (4, 2)), 2, (2, 2))

    run_ranks(2, rank)


# ---- messages


@st.composite
def traffic(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, str, tuple[int, ...]]], int]:
    """Draw how many ranks there are, their messages (from, to, channel, element type, shape), and a seed for orders."""
    size = draw(st.integers(2, 4))
    rank = st.integers(0, size - 1)
    shape = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    message = st.tuples(rank, rank, st.integers(0, 2), st.sampled_from(COMPARED), shape)
    return size, draw(st.lists(message, max_size=30)), draw(st.integers(0, 1 << 30))


@given(traffic())
@settings(max_examples=40)
def test_what_is_received_is_what_was_sent(
    case: tuple[int, list[tuple[int, int, int, str, tuple[int, ...]]], int],
) -> None:
    """Each rank does its part of one order of all sends and waits, in which a wait comes behind its send."""
    size, messages, seed = case
    chance = random.Random(seed)
    events: list[tuple[str, int]] = []
    for number in range(len(messages)):
        events.insert(chance.randint(0, len(events)), ("send", number))
    sent = [number for kind, number in events if kind == "send"]
    for number in sent:
        events.insert(chance.randint(events.index(("send", number)) + 1, len(events)), ("wait", number))

    def rank(number: int, group: MemoryGroup) -> dict[int, Tensor]:
        finishes: dict[int, Finish] = {}
        made = {}
        for which in sent:  # asked for in the order of sending, waited for in any
            sender, receiver, channel, dtype, shape = messages[which]
            if receiver == number:
                finishes[which] = group.receive(TensorSpec(dtype, shape), sender, channel)
        for kind, which in events:
            sender, receiver, channel, dtype, shape = messages[which]
            if kind == "send" and sender == number:
                tensor = part(which, 1, shape, dtype)
                group.send(tensor.t().contiguous().t() if len(shape) == 2 else tensor, receiver, channel)
            elif kind == "wait" and receiver == number:
                made[which] = finishes[which]().tensor
        return made

    results = run_ranks(size, rank)
    for which, (_, receiver, _, dtype, shape) in enumerate(messages):
        came = results[receiver][which]
        assert spec_of(came) == TensorSpec(dtype, shape)
        assert torch.equal(came, part(which, 1, shape, dtype))


def test_nobody_waits_to_send_however_much_is_unread() -> None:
    everything = threading.Event()
    large = torch.arange(1 << 21, dtype=torch.float32)  # 8 MB

    def rank(number: int, group: MemoryGroup) -> None:
        small, other = TensorSpec("int64", (1,)), TensorSpec("float32", (1 << 21,))
        if number == 0:
            for count in range(3000):
                group.send(torch.tensor([count]), 1, 7)
            for count in range(4):
                group.send(large + count, 1, 8)
            everything.set()
        else:
            assert everything.wait(30)
            for count in range(4):  # the other channel first
                assert torch.equal(group.receive(other, 0, 8)().tensor, large + count)
            for count in range(3000):
                assert group.receive(small, 0, 7)().tensor.item() == count

    run_ranks(2, rank)


def test_what_was_read_is_used_again() -> None:
    quotas = {number: SharedMemoryQuota() for number in range(2)}

    def rank(number: int, group: MemoryGroup) -> int:
        spec = TensorSpec("float32", (1000,))
        for step in range(500):
            if number == 0:
                group.send(torch.full((1000,), float(step)), 1, 0)
                group.receive(TensorSpec("bool", ()), 1, 0)()
            else:
                assert float(group.receive(spec, 0, 0)().tensor[-1]) == step
                group.send(torch.tensor(True), 0, 0)
        return quotas[number].used_bytes

    assert max(run_ranks(2, rank, quotas=quotas)) < 50_000, "a few tensors of 4,000 bytes, and some messages"


def test_a_letter_or_sum_that_nobody_waits_for_holds_no_memory() -> None:
    def rank(number: int, group: MemoryGroup) -> int:
        spec = TensorSpec("float32", (10_000,))
        for _ in range(20):
            group.send(torch.zeros(10_000), 1 - number, 3)
            group.receive(spec, 1 - number, 3)  # forgotten at once, here or before it has come
            group.reduce([torch.zeros(10_000)])
        group.send(torch.ones(1), 1 - number, 3)
        assert group.receive(TensorSpec("float32", (1,)), 1 - number, 3)().tensor.item() == 1
        assert group.reduce([torch.ones(1)])().tensor.item() == 2
        assert group.reduce([torch.ones(1)])().tensor.item() == 2  # by now the other has returned all before
        return group.memory.sender.unread_bytes

    assert max(run_ranks(2, rank)) < 40_000


@pytest.mark.parametrize(
    "spec", [TensorSpec("float32", (3,)), TensorSpec("int32", (2,)), TensorSpec("float32", (2, 1))]
)
def test_a_tensor_that_is_not_what_was_to_come(spec: TensorSpec) -> None:
    def rank(number: int, group: MemoryGroup) -> None:
        if number == 0:
            group.send(torch.ones(2), 1, 0)
            group.send(torch.zeros(2), 1, 0)
        else:
            with pytest.raises(WireError, match=r"rank 0 sent float32\[2\] on channel 0"):
                group.receive(spec, 0, 0)()
            assert group.receive(TensorSpec("float32", (2,)), 0, 0)().tensor.tolist() == [0.0, 0.0]

    run_ranks(2, rank)


def test_ranks_and_tensors_that_do_not_travel() -> None:
    def rank(number: int, group: MemoryGroup) -> None:
        with pytest.raises(WireError, match="rank 1 of a group of 1"):
            group.send(torch.ones(1), 1, 0)
        with pytest.raises(WireError, match="rank -1"):
            group.receive(TensorSpec("bool", ()), -1, 0)
        with pytest.raises(WireError, match="30 dimensions"):
            group.send(torch.ones((1,) * 30), 0, 0)
        with pytest.raises(WireError, match="float32, float64 in one sum"):
            group.reduce([torch.ones(1), torch.ones(1, dtype=torch.float64)])
        group.send(torch.ones((1,) * 20), 0, 0)
        assert group.receive(TensorSpec("float32", (1,) * 20), 0, 0)().tensor.sum() == 1  # to oneself

    run_ranks(1, rank)


# ---- tensors that stay where they came


LARGE = TensorSpec("float32", (1 << 16,))


def test_what_was_received_is_the_readers_own_until_it_forgets_it() -> None:
    """However much is sent meanwhile; then its memory is used again."""
    quota = SharedMemoryQuota()

    def rank(number: int, group: MemoryGroup) -> int:
        if number == 0:
            for count in range(60):
                group.send(torch.full(LARGE.shape, float(count)), 1, 0)
                group.receive(TensorSpec("bool", ()), 1, 0)()
            return quota.used_bytes
        kept: list[Tensor] = []
        for count in range(60):
            kept.append(group.receive(LARGE, 0, 0)().tensor)
            assert kept[-1].untyped_storage().nbytes() == LARGE.size_bytes
            kept[-1][0] += 100  # as an operator of a program of its own may
            kept = kept[-5:]
            for age, tensor in enumerate(reversed(kept)):
                assert tensor[1:].eq(count - age).all()
                assert tensor[0] == count - age + 100
            group.send(torch.tensor(True), 0, 0)
        return 0

    assert max(run_ranks(2, rank, quotas={0: quota})) <= 12 * LARGE.size_bytes


def test_what_was_received_outlasts_its_group_and_is_forgotten_in_any_thread() -> None:
    def rank(number: int, group: MemoryGroup) -> Tensor | None:
        if number == 1:
            group.send(torch.arange(LARGE.shape[0], dtype=torch.float32), 0, 0)
            return None
        return group.receive(LARGE, 1, 0)().tensor

    def maps() -> int:
        gc.collect()
        return leaks.mapped("onebox")

    before = maps()
    kept = [run_ranks(2, rank)[0]]
    assert torch.equal(kept[0], torch.arange(LARGE.shape[0], dtype=torch.float32))
    assert maps() == before + 1
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert maps() == before


def test_what_is_forgotten_in_another_thread_is_given_back() -> None:
    def rank(number: int, group: MemoryGroup) -> int:
        if number == 1:
            for _ in range(2):
                kept = [group.receive(LARGE, 0, 0)().tensor]
                thread = threading.Thread(target=kept.clear)
                thread.start()
                thread.join()
            group.receive(TensorSpec("bool", ()), 0, 0)
            group.send(torch.tensor(True), 0, 0)
            group.receive(TensorSpec("bool", ()), 0, 1)()
            return 0
        group.send(torch.zeros(LARGE.shape), 1, 0)
        group.send(torch.zeros(LARGE.shape), 1, 0)
        group.receive(TensorSpec("bool", ()), 1, 0)()
        unread = group.memory.sender.unread_bytes
        group.send(torch.tensor(True), 1, 1)
        return unread

    assert run_ranks(2, rank)[0] < 20_000


def test_no_more_than_a_part_of_a_writers_memory_is_lent() -> None:
    """Where address space is short, what comes beyond that is copied."""

    def rank(number: int, group: MemoryGroup) -> int:
        spec = TensorSpec("float16", (3 << 19,))
        if number == 1:
            for count in range(40):
                group.send(torch.full(spec.shape, count, dtype=torch.float16), 0, 0)
                group.receive(TensorSpec("bool", ()), 0, 0)()
            return 0
        kept = []
        for _ in range(40):
            kept.append(group.receive(spec, 1, 0)().tensor)
            assert all(tensor[-1] == place for place, tensor in enumerate(kept))
            group.send(torch.tensor(True), 1, 0)
        lent = [tensor for tensor in kept if tensor.untyped_storage()._cdata in LENT_STORAGES]
        return sum(tensor.nbytes for tensor in lent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onebox.worker.comm.shm.segment.SPAN_BYTES", LEAST_BYTES)
        lent = run_ranks(2, rank)[0]
    assert 12 << 20 < lent <= LEAST_BYTES // 4


# ---- the end


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Requires that nothing is open or mapped afterwards that was not before."""
    with leaks.nothing_left():
        yield


@pytest.mark.usefixtures("nothing_left")
def test_nothing_stays_behind() -> None:
    def rank(number: int, group: MemoryGroup) -> Finish:
        for size in (10, 400_000, 900_000):
            group.reduce([torch.zeros(size)])()
            group.send(torch.zeros(size), (number + 1) % 3, 0)
        return group.receive(TensorSpec("float32", (10,)), (number + 2) % 3, 0)

    kept = run_ranks(3, rank)
    for finish in kept:
        with pytest.raises(RankLost, match="has been left"):
            finish()


@pytest.mark.usefixtures("nothing_left")
def test_nothing_stays_behind_of_a_group_that_nobody_joins() -> None:
    def rank(number: int, group: MemoryGroup) -> None:
        raise AssertionError("there is no group")

    with pytest.MonkeyPatch.context() as patch:
        cards = {f"memory/{rank}": memory_card(rank, shm_domain(), process=1, post="ff").encode() for rank in range(2)}
        patch.setattr("tests.unit.ranks.Keys.get", lambda self, key: cards.get(key, b"0,1"))
        with pytest.raises(RankLost, match=r"only ranks \[[01]\] share"):
            run_ranks(2, rank, timeout_s=0.2)


def test_who_waits_for_a_rank_that_leaves_hears_of_it_at_once() -> None:
    def rank(number: int, group: MemoryGroup) -> None:
        group.reduce([torch.ones(1)])()
        if number == 0:
            wait = group.reduce([torch.ones(1)])
            with pytest.raises(RankLost, match="rank 1 has left"):
                wait()
            with pytest.raises(RankLost, match="rank 1 has left"):
                group.receive(TensorSpec("bool", ()), 1, 0)()

    run_ranks(2, rank, timeout_s=3600.0)


def test_what_a_rank_published_before_it_left_still_counts() -> None:
    left = threading.Event()

    def rank(number: int, group: MemoryGroup) -> float:
        wait = group.reduce([torch.ones(1)])
        if number == 1:
            group.close()
            left.set()
            return 0.0
        assert left.wait(30)
        return float(wait().tensor)

    assert run_ranks(2, rank)[0] == 2.0


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_rank_sends_at_the_last_moment_still_counts(ends: bool) -> None:
    """The reader has looked and found nothing; then the other sends and leaves, or ends, before the reader gives up."""
    spec = TensorSpec("float32", (1,))
    memory = SharedMemory.make()
    sender = ShmSender(memory, 2)
    begun: list[bool] = []

    def send() -> None:
        if not begun:
            begun.append(True)
            sender.post(1, 0, sender.write([torch.ones(1)], spec.size_bytes), spec)

    class Receiver(ShmReceiver):
        def find(self, channel: int, order: int) -> ShmMessage | None:
            found = super().find(channel, order)
            if not ends:
                send()
                sender.leave()
            return found

    def watch(rank: int, begin_s: float) -> None:
        send()
        raise RankLost("the process is gone")

    receiver = Receiver(memory, 0, 1, watch)
    expected = receiver.expect(0)
    receiver.wait(0, 1)
    expected.wait()
    assert expected.take().tolist() == [1.0]


def test_who_waits_can_be_told_from_another_thread_to_wait_no_longer() -> None:
    waits = threading.Event()

    def rank(number: int, group: MemoryGroup) -> None:
        if number == 1:
            waits.wait(20)
            return
        timer = threading.Timer(0.05, group.interrupt)
        timer.start()
        try:
            with pytest.raises(RankLost, match="rank 1 is waited for no longer: the group is given up"):
                group.receive(TensorSpec("bool", ()), 1, 0)()
            with pytest.raises(RankLost, match="given up"):
                group.reduce([torch.ones(1)])()
        finally:
            timer.join()
            waits.set()

    run_ranks(2, rank, timeout_s=3600.0)


def test_letters_of_other_channels_do_not_prolong_a_wait() -> None:
    done = threading.Event()

    def rank(number: int, group: MemoryGroup) -> None:
        if number == 1:
            end_s = time.monotonic() + 20
            while not done.is_set() and time.monotonic() < end_s:
                group.send(torch.ones(1), 0, 1)
                time.sleep(0.01)
            assert done.is_set()
            return
        with pytest.raises(RankLost, match="rank 1 did not come"):
            group.receive(TensorSpec("float32", (1,)), 1, 0)()
        done.set()

    run_ranks(2, rank, timeout_s=0.3)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_allowed() -> None:
    done = threading.Event()

    def rank(number: int, group: MemoryGroup) -> None:
        if number == 1:
            assert done.wait(20)
            return
        try:
            with pytest.raises(RankLost, match="rank 1 did not come within 0 s"):
                group.reduce([torch.ones(1)])()
        finally:
            done.set()

    run_ranks(2, rank, timeout_s=0.3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=25)
def test_what_is_not_the_part_that_is_due_is_not_sent(rows: list[int], data: st.DataObject) -> None:
    whole = TensorSpec("int16", (sum(rows), 3))
    place, first = None, 0
    for count in rows:
        part = TensorSpec("int16", (count, 3))
        wrong = data.draw(st.integers(0, sum(rows)).filter(lambda row, first=first: row != first))
        with pytest.raises(WireError, match="is due"):
            region_of(part, RowRange(whole, wrong), place)
        with pytest.raises(WireError, match="is due"):
            region_of(TensorSpec("int16", (count, 2)), RowRange(whole, first), place)
        place = region_of(part, RowRange(whole, first), place)
        first += count
        assert (place.start, place.end, place.last) == (6 * (first - count), 6 * first, first == sum(rows))
    if len(rows) > 1:
        with pytest.raises(WireError, match="is due"):
            region_of(whole, None, region_of(TensorSpec("int16", (rows[0], 3)), RowRange(whole, 0), None))
