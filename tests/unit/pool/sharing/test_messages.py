"""Errors between a process that shares its pool and its children: they arrive with what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onebox import errors
from onebox.errors import CaptureError, DeviceMemoryError, OneboxError, PoolError, UsageError, WireError, WorkerDied
from onebox.pool.sharing.messages import ENVELOPES, REPLIES, WELCOMES, Failed, failed, to_error
from onebox.wire import encode
from onebox.wire.protocol.codec import decode


def passed(error: BaseException) -> OneboxError:
    """Return an error as it arrives."""
    message = decode(REPLIES, [encode(failed(3, error))], "a reply")
    assert isinstance(message, Failed) and message.number == 3
    return to_error(message)


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


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit", "Any", "__builtins__", "annotations", ""])
def test_no_class_but_an_error_of_onebox_is_made(kind: str) -> None:
    assert type(to_error(Failed(1, kind, "message", {"args": 3, "with_traceback": 0}))) is PoolError


def test_attributes_that_an_error_has_not_are_left_out() -> None:
    arrived = to_error(Failed(1, "UsageError", "message", {"__class__": "x", "other": 1}))
    assert type(arrived) is UsageError and vars(arrived) == {}


@pytest.mark.parametrize("header", [b"", b"\x93\xa4post", b"\x91\xa5other", b"\xc0"])
def test_what_is_no_message_is_refused(header: bytes) -> None:
    for decoder in (ENVELOPES, WELCOMES, REPLIES):
        with pytest.raises(WireError, match="not of this protocol"):
            decode(decoder, [header], "a message")
