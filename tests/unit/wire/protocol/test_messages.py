"""Messages: all of them survive the wire, and nothing that is not quite one of them gets in."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import WireError
from onebox.wire import TensorSpec, decode_envelope, decode_worker_message, encode
from onebox.wire.clean_text import clean
from onebox.wire.protocol.instructions import Ask, Call, Get, Step
from onebox.wire.protocol.requests import Envelope, Instruction, Put, Run, Shutdown
from onebox.wire.protocol.responses import Reply, Scalars, WorkerMessage
from tests.unit.wire.protocol.samples import INSTRUCTIONS, SAYINGS, STRUCTS, values_of


@pytest.mark.parametrize("kind", INSTRUCTIONS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=40)
def test_an_instruction_arrives_as_it_was_sent(kind: Any, data: st.DataObject) -> None:
    sent = Envelope(7, True, (data.draw(values_of(kind)),))
    came, rest = decode_envelope([encode(sent), b"a", b"b"])
    assert came == sent
    assert repr(came) == repr(sent)  # numbers keep their type: True is no 1, and 1 no 1.0
    assert list(rest) == [b"a", b"b"]


@pytest.mark.parametrize("kind", SAYINGS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=40)
def test_what_a_worker_says_arrives_as_it_was_said(kind: Any, data: st.DataObject) -> None:
    sent = data.draw(values_of(kind))
    came, _ = decode_worker_message([encode(sent)])
    assert came == clean(sent), "its texts are cleaned"
    assert repr(came) == repr(clean(sent))


def test_not_a_number_survives() -> None:
    came, _ = decode_worker_message([encode(Reply(1, (Scalars((float("nan"), float("-inf"))),)))])
    assert repr(came) == repr(Reply(1, (Scalars((float("nan"), float("-inf"))),)))


def test_every_step_is_an_instruction() -> None:
    assert set(get_args(Step)) <= set(get_args(Instruction))


def test_the_two_sides_do_not_share_types() -> None:
    assert not set(get_args(Instruction)) & set(get_args(WorkerMessage))


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_all_types_are_immutable_and_strict(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert config.array_like
    assert config.forbid_unknown_fields, "an extra field has to be refused"


@pytest.mark.parametrize(
    "broken",
    [
        [1, True, [["bye"]], "more"],
        [1, True, [["bye", 5]]],
        [1, True, [["get", [1], 7, 8, 9]]],
        [1, True],
        [1, 1, []],
        ["1", True, []],
        [1, True, [["get", [1.0]]]],
        [1, True, [["get", ["1"]]]],
        [1, True, [["get", None]]],
        [1, True, [["ask", "password"]]],
        [1, True, [["eval", "1 + 1"]]],
        [1, True, [["run", 1, [], 0, 0, [{"lr": {"a": 1}}]]]],
        [1, True, [["form", 1, 0, 2, "mpi", "127.0.0.1", 1.0]]],
        [1, True, [["put", [1], [["float32", [2], "cuda"]]]]],
        [1, True, [["define", 1, ["routine", [["run", 1]], 0]]]],
        {"number": 1, "answer": True, "instructions": []},
        None,
        [],
    ],
)
def test_what_is_almost_a_message_is_refused(broken: Any) -> None:
    with pytest.raises(WireError, match="not of this protocol"):
        decode_envelope([msgspec.msgpack.encode(broken)])


def test_a_worker_does_not_take_what_workers_say_nor_a_client_what_clients_say() -> None:
    with pytest.raises(WireError):
        decode_envelope([encode(Reply(1))])
    with pytest.raises(WireError):
        decode_worker_message([encode(Envelope(1, False, (Shutdown(),)))])


def test_fields_that_may_be_left_out_are_filled_in() -> None:
    came, _ = decode_envelope([msgspec.msgpack.encode([3, False, [["call", 1, [2], [3]], ["run", 4]]])])
    assert came == Envelope(3, False, (Call(1, (2,), (3,), (), 0), Run(4)))


@pytest.mark.parametrize(
    "message",
    [
        Envelope(1, True, (Run(1, seed=2**70),)),
        Envelope(1, True, (Run(1, seed=-(2**63) - 1),)),
        Envelope(1, True, (Put((1,), (TensorSpec("\ud800", ()),)),)),
    ],
    ids=["large", "small", "surrogate"],
)
def test_what_cannot_be_encoded_is_an_error_of_ours(message: Envelope) -> None:
    with pytest.raises(WireError):
        encode(message)


def test_a_message_is_small() -> None:
    """A step is started by a few dozen bytes, whatever the model."""
    header = encode(Envelope(10**6, True, (Run(1000, tuple(range(1000, 1004)), 10**6, 42, (), True), Ask("digest"))))
    assert len(header) < 60
    assert len(encode(Envelope(1, False, (Get((1,)),)))) < 14
