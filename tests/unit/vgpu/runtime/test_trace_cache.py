"""How calls are coded: a tape does what the single calls do, whatever buffers are called."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from onebox.vgpu.runtime.trace_cache import Batcher, Record, encode_trace
from onebox.wire import FREE, TapeSpec
from onebox.wire.protocol.eager import Replay
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


def play(records: Calls, memory: Memory) -> list[Any]:
    """Run calls; what a call makes is named by what it was made from. Return what was run, in order."""
    done: list[Any] = []
    for kernel, reads, first, count, _ in records:
        if kernel == FREE:
            del memory[reads]
            continue
        made = (kernel, tuple(memory[number] for number in reads), len(done))
        done.append(made)
        for position in range(count):
            assert first + position not in memory
            memory[first + position] = (made, position)
    return done


def replay(calls: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], memory: Memory) -> list[Any]:
    """Run a tape as a worker does."""
    records: Calls = []
    at = made = 0
    while at < len(calls):
        kernel = calls[at]
        if kernel == FREE:
            records.append((FREE, calls[at + 1], 0, 0, ()))
            at += 2
            continue
        records.append((kernel, list(calls[at + 1 : at + 1 + READS[kernel]]), made, KEEPS[kernel], ()))
        at += 1 + READS[kernel]
        made += KEEPS[kernel]
    slots: Memory = {-1 - index: memory[number] for index, number in enumerate(inputs)}
    done = play(records, slots)
    for index, number in enumerate(inputs):
        if -1 - index not in slots:
            del memory[number]
    kept = sorted(slot for slot in slots if slot >= 0)
    memory |= {number: slots[slot] for slot, number in zip(kept, outputs, strict=True)}
    return done


@given(records=sequences())
def test_a_tape_does_what_its_calls_do(records: Calls) -> None:
    one = {number: f"given {number}" for number in OUTSIDE}
    other: Memory = dict(one)
    done = play(records, one)
    coding = encode_trace(records)
    for number in coding.strays:
        del other[number]
    assert replay(coding.code, coding.inputs, coding.outputs, other) == done
    assert other == one
    assert len(coding.inputs) == len(set(coding.inputs))


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
    assert other.outputs == tuple(number + shift for number in one.outputs)
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
    assert coding.outputs == (1001,)
    assert coding.strays == (105,)


def chain(first: int, rate: float) -> Calls:
    """Return four calls, the last with a number, after a buffer that is not used ends."""
    calls: Calls = [(FREE, first - 1, 0, 0, ())]
    calls += [(2, [number], number + 1, 1, ()) for number in range(first, first + 3)]
    return [*calls, (3, [first, first + 3], first + 4, 2, (rate,))]


def test_a_batch_is_defined_at_its_first_occurrence() -> None:
    making = Batcher(itertools.count(50).__next__)
    define, first = making.instructions(chain(100, 0.5))
    assert define == Define(50, TapeSpec((2, -1, 2, 0, 2, 1, 3, -1, 2), 1, 1))
    assert first == Replay(50, (100,), (101, 102, 103, 104, 105), (0.5,), (99,)), "what ends is freed first"
    for start in (200, 300):
        (again,) = making.instructions(chain(start, 0.25))
        assert again == Replay(50, (start,), tuple(range(start + 1, start + 6)), (0.25,), (start - 1,))


def test_buffers_that_end_without_a_call_are_freed() -> None:
    making = Batcher(itertools.count(50).__next__)
    assert making.instructions([(FREE, 7, 0, 0, ()), (FREE, 8, 0, 0, ())]) == [Free((7, 8))]


def test_what_has_not_occurred_for_longest_is_freed_on_the_worker() -> None:
    making = Batcher(itertools.count(50).__next__, size=2)
    one, two, three = ([(2, [100], 200, 1, ()) for _ in range(count)] for count in (1, 2, 3))
    assert [len(making.instructions(calls)) for calls in (one, two, one)] == [2, 2, 1]
    free, define, _ = making.instructions(three)
    assert free == Free((), (51,))
    assert isinstance(define, Define)
    assert len(making.instructions(one)) == 1
    assert making.instructions(two)[0] == Free((), (52,))
