"""What is noted for a timeline of a script: activities of its threads, and messages with their operators."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

from onebox.errors import PoolError
from onebox.pool import WorkerReply
from onebox.vgpu.runtime.script_events import MessageEvent, ScriptEvent, ScriptEvents
from onebox.vgpu.runtime.script_time import ScriptLine
from onebox.wire import KernelSpec, SlotArgument, TapeSpec
from onebox.wire.protocol.eager import FREE, Replay
from onebox.wire.protocol.instructions import Get
from onebox.wire.protocol.requests import Define
from onebox.wire.protocol.responses import MessageTimes

MM = KernelSpec("aten.mm.default", (SlotArgument(0), SlotArgument(1)), {}, 2, 0)
ADD = KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0)
BACKWARD, STEP, READ = (ScriptLine("train.py", number) for number in (14, 15, 17))


def reply(*messages: MessageTimes) -> Future[WorkerReply]:
    future: Future[WorkerReply] = Future()
    future.set_result(WorkerReply((), (), (), messages=messages))
    return future


def test_messages_have_their_operators_and_the_lines_between_which_they_were_recorded() -> None:
    events = ScriptEvents()
    tape = TapeSpec((1, -1, -2, 2, 0, -1, FREE, 0, 1, 1, -2), 2)
    defined = [Define(1, MM), Define(2, ADD), Define(3, tape), Replay(3, (7, 8), (9,))]
    replied = events.sent(0, 1, defined, STEP)
    events.sent(1, 1, [Get((5,))], BACKWARD)  # another device's message of the same number
    events.sent(0, 2, [Replay(3, (7, 8), (9,)), Get((9,))], READ)
    replied(reply())
    replied(reply(MessageTimes(1, 10, 20, 3), MessageTimes(2, 30, 40, 0)))
    operators = Counter({"aten.mm.default": 2, "aten.add.Tensor": 1})
    assert events.of_devices == [
        MessageEvent(0, None, STEP, operators, 10, 20, 3),
        MessageEvent(0, STEP, READ, operators, 30, 40, 0),
    ]


def test_a_message_that_has_failed_or_is_not_known_has_no_lines() -> None:
    events = ScriptEvents()
    failed: Future[WorkerReply] = Future()
    failed.set_exception(PoolError("over"))
    events.sent(0, 1, [], STEP)(failed)
    assert events.of_devices == []
    events.sent(0, 2, [], STEP)(reply(MessageTimes(9, 1, 2, 0)))  # played again after a recovery
    assert events.of_devices == [MessageEvent(0, None, None, Counter(), 1, 2, 0)]
    assert not events.has_lines
    events.add("wait", READ, 3, 4)
    assert events.has_lines


def test_the_number_of_events_is_limited() -> None:
    events = ScriptEvents(2)
    events.add("upload", STEP, 1, 2, 100)
    replied = events.sent(0, 1, [], STEP)
    replied(reply(MessageTimes(1, 1, 2, 0)))
    events.add("wait", READ, 3, 4)
    replied(reply(MessageTimes(1, 1, 2, 0)))
    assert events.of_threads == [ScriptEvent("MainThread", "upload", STEP, 1, 2, 100)]
    assert (len(events.of_devices), events.left_out) == (1, 2)
