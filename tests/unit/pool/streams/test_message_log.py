"""The log of what scripts have sent: what a worker has, what is between two workers, and what is kept where."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from onebox.pool.streams.message_log import (
    FIRST_BUFFER,
    MESSAGE_BYTES,
    SPAN,
    Balance,
    LoggedMessage,
    MessageLog,
    SpillFile,
    WorkerState,
    is_measurement,
    is_stream,
    regrouped,
    stream_end,
)
from onebox.wire import FREE, GeneratorSpec, KernelSpec, SlotArgument, TapeSpec, TensorSpec
from onebox.wire.protocol.eager import DefaultType, Replay, StreamHeader
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Ask, Free, Gather, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, FreeRange, Instruction, Put, ReadClock, Run

SPEC = TensorSpec("float32", (2,))
ADD = KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0)
RELU = KernelSpec("aten.relu.default", (SlotArgument(0),), {}, 1, 0)


def message(worker: int, *instructions: Instruction, frames: tuple[Any, ...] = ()) -> LoggedMessage:
    return LoggedMessage(worker, instructions, frames, False, Future())


def test_a_stream_ends_where_the_numbers_of_its_process_do() -> None:
    assert stream_end(FIRST_BUFFER) == SPAN
    assert stream_end(3 * SPAN + FIRST_BUFFER - 1) == 4 * SPAN


@pytest.mark.parametrize(
    ("instructions", "whether"),
    [
        ([StreamHeader(FIRST_BUFFER, 1), Free((7,))], True),
        ([FreeRange(SPAN, 2 * SPAN)], True),
        ([Ask("memory")], True),
        ([Ask("scalars", (3,))], False),
        ([], True),
        ([Run(3)], False),
        ([LeaveGroup(4)], False),
        ([Ask("memory"), Run(3)], False),
    ],
)
def test_messages_of_scripts_are_told_from_those_of_trainers(instructions: list[Instruction], whether: bool) -> None:
    assert is_stream(instructions) is whether


def test_bytes_in_use_are_no_value_of_a_script() -> None:
    assert is_measurement([Ask("memory")])
    assert is_measurement([StreamHeader(FIRST_BUFFER, 1), Ask("peak")])
    assert not is_measurement([Ask("scalars", (4,))])


class TestWorkerState:
    def test_has_what_was_defined_and_not_freed(self) -> None:
        state = WorkerState()
        state.take([StreamHeader(FIRST_BUFFER, 1), Define(5, RELU), Define(6, ADD), Define(7, GeneratorSpec(1))])
        state.take([DefaultType("float64"), Free((), (6,))])
        state.prune()
        assert [*state.definitions] == [5, 7]
        assert state.generators == (0, 7)
        assert state.default == DefaultType("float64")
        assert state.streams == {FIRST_BUFFER}

    def test_keeps_a_freed_kernel_as_long_as_a_tape_has_it(self) -> None:
        state = WorkerState()
        tape = TapeSpec((6, -1, -2, FREE, -2, 5, 0), 2)
        state.take([Define(5, RELU), Define(6, ADD), Define(8, tape), Free((), (5, 6))])
        state.prune()
        assert [*state.definitions] == [5, 6, 8]
        assert state.ended == {5, 6}
        state.take([Free((), (8,))])
        state.prune()
        assert not state.definitions
        assert not state.ended

    def test_a_number_that_is_defined_again_is_not_freed(self) -> None:
        state = WorkerState()
        state.take([Define(5, RELU), Free((), (5,)), Define(5, ADD)])
        state.prune()
        assert state.definitions[5].what == ADD

    def test_the_end_of_a_process_ends_its_stream_and_its_definitions(self) -> None:
        state = WorkerState()
        state.take([StreamHeader(SPAN + FIRST_BUFFER - 1, 1), Define(SPAN + 3, RELU), Define(9, RELU)])
        state.take([FreeRange(SPAN, 2 * SPAN)])
        state.prune()
        assert [*state.definitions] == [9]
        assert not state.streams


class TestBalance:
    def test_a_transfer_is_even_once_both_of_its_ends_know_of_it(self) -> None:
        balance = Balance()
        balance.form(3, (1, 0))
        assert balance.even
        balance.take(0, [Receive(20, SPEC, 3, 0)])
        assert not balance.even
        balance.take(1, [Send(30, 3, 1)])
        assert balance.even

    def test_channels_are_told_apart(self) -> None:
        balance = Balance()
        balance.form(3, (0, 1))
        balance.take(0, [Send(30, 3, 1, channel=1)])
        balance.take(1, [Receive(20, SPEC, 3, 0, channel=2)])
        assert not balance.even

    def test_a_tensor_in_chunks_is_as_many_transfers(self) -> None:
        balance = Balance()
        balance.form(3, (0, 1))
        balance.take(1, [Receive(20, SPEC, 3, 0, rows=(1, 1))])
        balance.take(0, [Send(30, 3, 1, whole=SPEC)])
        assert not balance.even
        balance.take(0, [Send(31, 3, 1, whole=SPEC, first=1)])
        assert balance.even

    @pytest.mark.parametrize("collective", [Reduce((4,), 3), Gather(4, 5, SPEC, 3, (1, 1))])
    def test_a_collective_is_even_once_all_members_take_part(self, collective: Instruction) -> None:
        balance = Balance()
        balance.form(3, (0, 1))
        balance.take(0, [collective])
        assert not balance.even
        balance.take(1, [collective])
        assert balance.even

    def test_what_was_under_way_in_a_group_ends_with_it(self) -> None:
        balance = Balance()
        balance.form(3, (0, 1))
        balance.form(4, (0, 1))
        balance.take(0, [Send(30, 3, 1), Send(30, 4, 1), Reduce((4,), 3)])
        balance.take(1, [LeaveGroup(3)])
        assert not balance.even
        balance.leave(4)
        assert balance.even

    def test_groups_of_others_do_not_count(self) -> None:
        balance = Balance()
        balance.take(0, [Send(30, 9, 1)])
        assert balance.even


class TestMessageLog:
    def test_forgets_the_first_messages_but_not_what_they_have_left(self) -> None:
        log = MessageLog(SpillFile(0))
        log.append(message(0, StreamHeader(FIRST_BUFFER, 1), Define(5, RELU)))
        log.append(message(1, StreamHeader(FIRST_BUFFER, 1), Define(6, ADD)))
        log.append(message(0, StreamHeader(FIRST_BUFFER, 2), Free((), (5,))))
        log.start_at(2)
        assert len(log.messages) == 1
        assert log.count == 3
        assert log.size_bytes == MESSAGE_BYTES
        assert [*log.base[0].definitions] == [5]
        assert not log.present[0].definitions
        assert [*log.base[1].definitions] == [6]

    def test_what_memory_has_no_room_for_goes_to_a_file_and_comes_back(self) -> None:
        spill = SpillFile(1 << 20)
        log = MessageLog(spill)
        first, second = message(0, Put((4,), (SPEC,)), frames=(bytes(range(8)),)), b"abcdefgh" * 1000
        log.append(first, 2 * MESSAGE_BYTES)
        log.append(message(0, Put((5,), (SPEC,)), frames=(second, b"")), 2 * MESSAGE_BYTES)
        assert log.size_bytes == 2 * MESSAGE_BYTES + 8
        assert spill.size_bytes == 8000
        assert [spill.frames(each.frames) for each in log.messages] == [[bytes(range(8))], [second, b""]]
        log.start_at(1)
        assert spill.size_bytes == 8000
        log.start_at(1)
        assert spill.size_bytes == 0
        assert log.size_bytes == 0
        spill.close()

    def test_a_file_that_is_full_is_an_error_that_loses_nothing(self) -> None:
        log = MessageLog(SpillFile(10))
        log.append(message(0, Put((4,), (SPEC,)), frames=(b"12345678",)), 0)
        with pytest.raises(OSError, match="more than 10 bytes"):
            log.append(message(0, Put((5,), (SPEC,)), frames=(b"87654321",)), 0)
        assert log.spill.frames(log.messages[1].frames) == [b"87654321"]
        log.spill.close()


def test_instructions_name_groups_by_their_present_numbers() -> None:
    given: list[Instruction] = [Send(1, 3, 0), Reduce((2,), 4), Replay(5, (), ()), ReadClock(0)]
    assert regrouped(given, {}) is given
    assert regrouped(given, {9: 10}) is given
    assert regrouped(given, {3: 30}) == [Send(1, 30, 0), *given[1:]]
