"""How calls are coded: a block does what the single calls do, whatever buffers are called."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from onebox.vgpu.runtime.trace_cache import Batcher, Record, TraceCache, block_of, encode_trace, plain
from onebox.wire import FREE, BlockSpec
from onebox.wire.protocol.eager import Operate, Replay
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define

READS = {1: 0, 2: 1, 3: 2, 4: 3}
KEEPS = {1: 1, 2: 1, 3: 2, 4: 0}
"""Kernels by number: how many buffers each reads, and how many it keeps."""

OUTSIDE = range(100, 106)
"""Buffers that are there before."""

Calls = list[Record]
Memory = dict[int, Any]


@st.composite
def sequences(draw: st.DrawFn) -> Calls:
    """Return calls that read only what is there, and free it once at most."""
    alive = list(OUTSIDE)
    records: Calls = []
    following = 1000
    for _ in range(draw(st.integers(0, 30))):
        if alive and draw(st.integers(0, 3)) == 0:
            number = draw(st.sampled_from(alive))
            alive.remove(number)
            records.append((FREE, number, 0, 0, ()))
            continue
        kernel = draw(st.sampled_from([kernel for kernel in READS if alive or not READS[kernel]]))
        inputs = [draw(st.sampled_from(alive)) for _ in range(READS[kernel])]
        records.append((kernel, inputs, following, KEEPS[kernel], ()))
        alive += range(following, following + KEEPS[kernel])
        following += KEEPS[kernel]
    return records


def play(calls: tuple[int, ...], memory: Memory) -> list[Any]:
    """Run coded calls; what a call makes is named by what it was made from. Return what was run, in order."""
    at, done = 0, []
    while at < len(calls):
        kernel = calls[at]
        if kernel == FREE:
            del memory[calls[at + 1]]
            at += 2
            continue
        middle = at + 1 + READS[kernel]
        end = middle + KEEPS[kernel]
        made = (kernel, tuple(memory[number] for number in calls[at + 1 : middle]), len(done))
        done.append(made)
        for position, number in enumerate(calls[middle:end]):
            assert number not in memory
            memory[number] = (made, position)
        at = end
    return done


def replay(block: BlockSpec, inputs: tuple[int, ...], outputs: tuple[int, ...], memory: Memory) -> list[Any]:
    """Run a block as a worker does."""
    slots: Memory = {slot: memory[number] for slot, number in enumerate(inputs)}
    done = play(block.calls, slots)
    for slot, number in enumerate(inputs):
        if slot not in slots:
            del memory[number]
    for slot, number in zip(block.outputs, outputs, strict=True):
        memory[number] = slots[slot]
    return done


@given(records=sequences())
def test_a_block_does_what_its_calls_do(records: Calls) -> None:
    one = {number: f"given {number}" for number in OUTSIDE}
    other: Memory = dict(one)
    done = play(plain(records), one)
    coding = encode_trace(records)
    block = block_of(coding, KEEPS, READS, 0)
    for number in coding.strays:
        del other[number]
    assert replay(block, coding.inputs, tuple(number for _, number in coding.outputs), other) == done
    assert other == one
    assert block.inputs == len(coding.inputs) == len(set(coding.inputs))


@given(records=sequences(), shift=st.integers(1, 10**9))
def test_a_code_does_not_depend_on_what_buffers_are_called(records: Calls, shift: int) -> None:
    moved: Calls = [
        (FREE, reads + shift, 0, 0, ())
        if kernel == FREE
        else (kernel, [number + shift for number in reads], first + shift, count, floats)
        for kernel, reads, first, count, floats in records
    ]
    one, other = encode_trace(records), encode_trace(moved)
    assert other.code == one.code
    assert [slot for slot, _ in other.outputs] == [slot for slot, _ in one.outputs]
    assert other.inputs == tuple(number + shift for number in one.inputs)
    assert other.strays == tuple(number + shift for number in one.strays)


def test_calls_that_share_an_input_are_another_code() -> None:
    same = encode_trace([(3, [100, 100], 1000, 2, ())])
    apart = encode_trace([(3, [100, 101], 1000, 2, ())])
    assert same.code != apart.code
    assert (same.inputs, apart.inputs) == ((100,), (100, 101))


def test_what_ends_within_a_sequence_is_no_output() -> None:
    coding = encode_trace(
        [(2, [100], 1000, 1, ()), (2, [1000], 1001, 1, (0.5,)), (FREE, 1000, 0, 0, ()), (FREE, 105, 0, 0, ())]
    )
    assert coding.outputs == ((1, 1001),)
    assert coding.strays == (105,)


def test_a_book_knows_what_has_come_before() -> None:
    book = TraceCache()
    assert book.look((1,)) is None
    assert book.look((1,)) == 0
    book.define((1,), 77)
    assert book.look((1,)) == 77
    assert book.look((2,)) is None


def test_a_book_forgets_what_has_not_come_for_longest() -> None:
    book = TraceCache(size=3)
    for key in range(3):
        book.look((key,))
        book.define((key,), 10 + key)
    book.look((0,))
    book.look((3,))
    assert book.shed() == [11]
    assert book.look((0,)) == 10
    assert book.look((1,)) is None
    assert book.shed() == [12]
    assert book.shed() == []


def batches() -> Batcher:
    made = Batcher(itertools.count(50).__next__)
    for kernel, reads in READS.items():
        made.define(kernel, reads, KEEPS[kernel])
    return made


def chain(first: int, rate: float) -> Calls:
    """Return four calls, the last with a number, after a buffer that is not used ends."""
    calls: Calls = [(FREE, first - 1, 0, 0, ())]
    calls += [(2, [number], number + 1, 1, ()) for number in range(first, first + 3)]
    return [*calls, (3, [first, first + 3], first + 4, 2, (rate,))]


def test_a_sequence_is_a_block_from_the_second_time_on() -> None:
    making = batches()
    (operate,) = making.instructions(chain(100, 0.5))
    assert operate == Operate(plain(chain(100, 0.5)), (0.5,))
    gone, define, replay = making.instructions(chain(200, 0.25))
    assert gone == Free((199,)), "before the block, which then has room"
    assert isinstance(define, Define)
    assert define.number == 50
    assert replay == Replay(50, (200,), (201, 202, 203, 204, 205), (0.25,))
    gone, replay = making.instructions(chain(300, 0.125))
    assert replay == Replay(50, (300,), (301, 302, 303, 304, 305), (0.125,))


def test_a_short_sequence_is_never_a_block() -> None:
    making = batches()
    for first in (100, 200, 300):
        assert [type(each) for each in making.instructions(chain(first, 1.0)[:3])] == [Operate]
