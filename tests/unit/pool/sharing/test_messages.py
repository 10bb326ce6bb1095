"""Messages between a process that shares its pool and its children: all survive the way, errors with what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from onebox import errors
from onebox.errors import CaptureError, DeviceMemoryError, OneboxError, PoolError, UsageError, WireError, WorkerDied
from onebox.pool.sharing.messages import (
    Claim,
    Detach,
    Failed,
    Form,
    Leave,
    Post,
    Replied,
    decode_request,
    decode_response,
    encode_message,
    failed,
    to_error,
)
from onebox.wire.protocol.responses import Digest


def passed(error: BaseException) -> OneboxError:
    """Return an error as it arrives."""
    message = decode_response(encode_message(failed(3, error)))
    assert isinstance(message, Failed) and message.number == 3
    return to_error(message)


@pytest.mark.parametrize(
    "request_", [Form(1, (0, 2)), Leave(2, 7, (1,)), Claim(3, 1, True), Claim(4, 1, False), Detach()]
)
def test_requests_survive_the_way(request_: Form | Leave | Claim | Detach) -> None:
    assert decode_request(encode_message(request_)) == request_


def test_instructions_are_forwarded_as_they_are() -> None:
    instructions = msgspec.msgpack.encode([["free", [1, 2], []], {"any": b"thing"}])
    post = decode_request(encode_message(Post(1, 0, True, False, msgspec.Raw(instructions))))
    assert isinstance(post, Post) and bytes(post.instructions) == instructions


def test_a_reply_survives_the_way() -> None:
    done = Replied(5, (Digest(b"0f"),), (1, 2), (3,), (), 4)
    assert decode_response(encode_message(done)) == done


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OneboxError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_as_one_of_its_class(kind: type[OneboxError]) -> None:
    error = kind("it failed: try again")
    arrived = passed(error)
    assert type(arrived) is kind and str(arrived) == str(error) and vars(arrived) == vars(error)


def test_an_attribute_that_cannot_be_sent_is_left_out() -> None:
    where: Any = Path("model.py")
    arrived = passed(CaptureError("it failed", where=where, unfit=True))
    assert isinstance(arrived, CaptureError) and (arrived.where, arrived.unfit) == (None, True)


@pytest.mark.parametrize("kind", [WorkerDied, DeviceMemoryError])
def test_an_error_arrives_with_its_attributes(kind: type[errors.WorkerError]) -> None:
    error = kind("it failed", worker=1, device="cpu", host="lab")
    arrived = passed(error)
    assert type(arrived) is kind and str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_other_errors_arrive_as_those_of_the_pool() -> None:
    arrived = passed(ValueError("no such thing"))
    assert type(arrived) is PoolError and str(arrived) == "ValueError: no such thing"


@pytest.mark.parametrize("kind", ["SystemExit", "Any", "__builtins__", "annotations", ""])
def test_no_class_but_an_error_is_made(kind: str) -> None:
    assert type(to_error(Failed(1, kind, "message", {"args": 3, "with_traceback": 0}))) is PoolError


def test_attributes_that_an_error_has_not_are_left_out() -> None:
    arrived = to_error(Failed(1, "UsageError", "message", {"__class__": "x", "other": 1}))
    assert type(arrived) is UsageError and vars(arrived) == {}


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(WireError, match="cannot be encoded"):
        encode_message(Form(1 << 70, ()))
    with pytest.raises(WireError, match="cannot be encoded"):
        encode_message(Failed(1, "PoolError", "\ud800", {}))


@pytest.mark.parametrize("header", [b"", b"\x93\xa4post", b"\x91\xa5other", b"\xc0"])
def test_what_is_no_message_is_refused(header: bytes) -> None:
    for decode in (decode_request, decode_response):
        with pytest.raises(msgspec.DecodeError):
            decode(header)
