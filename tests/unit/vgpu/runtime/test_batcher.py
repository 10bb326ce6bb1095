"""How calls are coded: a tape does what the single calls do, whatever buffers are called."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from onebox.vgpu import native
from onebox.vgpu.runtime.batcher import Batcher
from onebox.wire import FREE, TapeSpec
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define

READS = {1: 0, 2: 1, 3: 2, 4: 3}
KEEPS = {1: 1, 2: 1, 3: 2, 4: 0}
"""Kernels by number: how many buffers each reads, and how many it keeps."""

OUTSIDE = range(100, 106)
"""Buffers that are there before."""

FIRST = 1000
"""The first number of a buffer that a call makes."""


class Call(NamedTuple):
    """A call, whose outputs have consecutive numbers; or the end of a buffer, as what ``FREE`` reads."""

    kernel: int
    inputs: tuple[int, ...]
    first: int = 0
    floats: tuple[float, ...] = ()


class Batch(NamedTuple):
    """Calls as the device in C++ encodes them."""

    code: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    strays: tuple[int, ...]
    floats: tuple[float, ...]


Memory = dict[int, Any]


@st.composite
def sequences(draw: st.DrawFn) -> list[Call]:
    """Return calls that read only what is there, and free it once at most."""
    alive = list(OUTSIDE)
    calls: list[Call] = []
    following = FIRST
    for _ in range(draw(st.integers(0, 30))):
        if alive and draw(st.integers(0, 3)) == 0:
            number = draw(st.sampled_from(alive))
            alive.remove(number)
            calls.append(Call(FREE, (number,)))
            continue
        kernel = draw(st.sampled_from([kernel for kernel in READS if alive or not READS[kernel]]))
        inputs = tuple(draw(st.sampled_from(alive)) for _ in range(READS[kernel]))
        calls.append(Call(kernel, inputs, following, (float(len(calls)),) * draw(st.integers(0, 2))))
        alive += range(following, following + KEEPS[kernel])
        following += KEEPS[kernel]
    return calls


def opened(first: int = FIRST) -> Any:
    """Return a queue of the device in C++."""
    return native.load().Queue(0, first, 100)


def encoded(queue: Any, calls: list[Call]) -> Batch:
    """Record calls; return what the queue makes of them."""
    for kernel, inputs, first, floats in calls:
        if kernel == FREE:
            queue.drop(*inputs)
        else:
            number, _ = queue.record(kernel, inputs, floats, KEEPS[kernel], False)
            assert number == first
    return Batch(*map(tuple, queue.take()))


def play(calls: list[Call], memory: Memory, done: list[Any]) -> None:
    """Run calls; what a call makes is named by what it was made from. Add what is run, in order."""
    for kernel, inputs, first, _ in calls:
        if kernel == FREE:
            del memory[inputs[0]]
            continue
        made = (kernel, tuple(memory[number] for number in inputs), len(done))
        done.append(made)
        for position in range(KEEPS[kernel]):
            assert first + position not in memory
            memory[first + position] = (made, position)


def replay(batch: Batch, memory: Memory, done: list[Any]) -> None:
    """Run a batch as a worker does."""
    for number in batch.strays:
        del memory[number]
    calls: list[Call] = []
    at = made = 0
    while at < len(batch.code):
        kernel = batch.code[at]
        end = at + 1 + (1 if kernel == FREE else READS[kernel])
        calls.append(Call(kernel, batch.code[at + 1 : end], made))
        made += KEEPS.get(kernel, 0)
        at = end
    slots: Memory = {-1 - index: memory[number] for index, number in enumerate(batch.inputs)}
    play(calls, slots, done)
    for index, number in enumerate(batch.inputs):
        if -1 - index not in slots:
            del memory[number]
    kept = sorted(slot for slot in slots if slot >= 0)
    memory |= {number: slots[slot] for slot, number in zip(kept, batch.outputs, strict=True)}


# ---- what the device in C++ makes of calls


@given(calls=sequences(), cut=st.integers(0, 30))
def test_batches_do_what_their_calls_do(calls: list[Call], cut: int) -> None:
    one: Memory = {number: f"given {number}" for number in OUTSIDE}
    other = dict(one)
    singly: list[Any] = []
    together: list[Any] = []
    play(calls, one, singly)
    queue = opened()
    batches = [encoded(queue, calls[:cut]), encoded(queue, calls[cut:])]
    for batch in batches:
        replay(batch, other, together)
        assert len(batch.inputs) == len(set(batch.inputs))
    assert together == singly
    assert other == one
    floats = [number for call in calls for number in call.floats]
    assert [number for batch in batches for number in batch.floats] == floats
    assert encoded(queue, []) == ((),) * 5


@given(calls=sequences(), shift=st.integers(1, 10**9))
def test_a_code_does_not_depend_on_what_buffers_are_called(calls: list[Call], shift: int) -> None:
    def moved(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number + shift for number in numbers)

    queue = opened()
    assert queue.reserve(shift) == FIRST
    one = encoded(opened(), calls)
    other = encoded(queue, [call._replace(inputs=moved(call.inputs), first=call.first + shift) for call in calls])
    assert other == (one.code, moved(one.inputs), moved(one.outputs), moved(one.strays), one.floats)


def test_calls_that_share_an_input_are_another_code() -> None:
    same = encoded(opened(), [Call(3, (100, 100), FIRST)])
    apart = encoded(opened(), [Call(3, (100, 101), FIRST)])
    assert same.code != apart.code
    assert (same.inputs, apart.inputs) == ((100,), (100, 101))


def test_what_ends_within_a_batch_is_no_output() -> None:
    ends = [Call(FREE, (FIRST,)), Call(FREE, (105,))]
    batch = encoded(opened(), [Call(2, (100,), FIRST), Call(2, (FIRST,), FIRST + 1, (0.5,)), *ends])
    assert batch == ((2, -1, 2, 0, FREE, 0), (100,), (FIRST + 1,), (105,), (0.5,))


# ---- instructions


def chain(first: int, rate: float) -> Batch:
    """Return four calls, the last with a number, after a buffer that is not used ends."""
    made = tuple(range(first + 1, first + 6))
    return Batch((2, -1, 2, 0, 2, 1, 3, -1, 2), (first,), made, (first - 1,), (rate,))


def test_a_batch_is_defined_at_its_first_occurrence() -> None:
    making = Batcher(itertools.count(50).__next__)
    define, first = making.instructions(*chain(100, 0.5))
    assert define == Define(50, TapeSpec((2, -1, 2, 0, 2, 1, 3, -1, 2), 1, 1))
    assert first == Replay(50, (100,), (101, 102, 103, 104, 105), (0.5,), (99,)), "what ends is freed first"
    for start in (200, 300):
        (again,) = making.instructions(*chain(start, 0.25))
        assert again == Replay(50, (start,), tuple(range(start + 1, start + 6)), (0.25,), (start - 1,))


def test_buffers_that_end_without_a_call_are_freed() -> None:
    making = Batcher(itertools.count(50).__next__)
    assert making.instructions((), (), (), (7, 8), ()) == [Free((7, 8))]


def test_what_has_not_occurred_for_longest_is_freed_on_the_worker() -> None:
    making = Batcher(itertools.count(50).__next__, size=2)
    one, two, three = (Batch((2, -1) * count, (100,), tuple(range(200, 200 + count)), (), ()) for count in (1, 2, 3))
    assert [len(making.instructions(*batch)) for batch in (one, two, one)] == [2, 2, 1]
    free, define, _ = making.instructions(*three)
    assert free == Free((), (51,))
    assert isinstance(define, Define)
    assert len(making.instructions(*one)) == 1
    assert making.instructions(*two)[0] == Free((), (52,))
