"""Texts of other machines: each field of each message that can hold one is cleaned where the message is decoded."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.wire import decode_worker_message
from onebox.wire.clean_text import OF_LINES, clean, clean_text
from onebox.wire.protocol.agents import (
    AgentResponse,
    PairReply,
    PairRequest,
    Request,
    decode_agent_response,
    decode_pair,
    decode_paired,
    decode_request,
)
from onebox.wire.protocol.responses import WorkerMessage

HOSTILE = "a\x1b]52;c;eA==\x07\x1b[2J\x9b31m\u202e\r\n\tb\U000e0001"
DECODERS = {
    WorkerMessage: lambda frame: decode_worker_message([frame])[0],
    AgentResponse: decode_agent_response,
    Request: decode_request,
    PairRequest: decode_pair,
    PairReply: decode_paired,
}
CASES = [(kind, decode) for kinds, decode in DECODERS.items() for kind in (get_args(kinds) or (kinds,))]


def made(annotation: Any) -> list[Any]:
    """Return values of an annotation, one for each alternative, with hostile text wherever there can be text."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is str:
        return [HOSTILE]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        hints = get_type_hints(annotation, include_extras=True)
        fields = [made(hints[name]) for name in annotation.__struct_fields__]
        return [annotation(*(each[place % len(each)] for each in fields)) for place in range(max(map(len, fields)))]
    if origin is Literal:
        return [arguments[0]]
    if origin is Annotated:
        return made(arguments[0])
    if origin in (Union, types.UnionType):
        return [one for alternative in arguments for one in made(alternative)]
    if origin is tuple and arguments[-1] is Ellipsis:
        return [tuple(made(arguments[0]))]
    if origin is tuple:
        return [tuple(made(one)[0] for one in arguments)]
    known = {int: 1, float: 1.0, bool: True, bytes: b"\x1b", type(None): None}
    return [known[annotation]]


def texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Return all texts of a message, each with the field that holds it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, tuple):
        for one in value:
            yield from texts(one, name)
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from texts(getattr(value, field), field)


@pytest.mark.parametrize(("kind", "decode"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_every_text_of_every_message_is_clean(kind: type, decode: Any) -> None:
    for message in made(kind):
        found = list(texts(decode(msgspec.msgpack.encode(message))))
        assert found == [(name, clean_text(text, lines=name in OF_LINES)) for name, text in texts(message)]


def test_there_are_texts_to_clean() -> None:
    of_messages = {kind.__name__: {name for one in made(kind) for name, _ in texts(one)} for kind, _ in CASES}
    assert of_messages["Hello"] >= {"device", "name", "torch", "gpu", "hardware", "maker", "codecs"}
    assert of_messages["Reply"] >= {"message", "operator", "shapes", "cause", "failure", "apart", "key", "dtype"}
    assert of_messages["WorkerEnded"] == {"last_words"}
    assert of_messages["Leased"] >= {"device", "commands"}


def test_what_is_clean_stays_itself() -> None:
    for kind, _ in CASES:
        for message in map(clean, made(kind)):
            assert clean(message) is message


@given(st.text())
def test_nothing_but_ends_of_lines_steers_a_terminal(text: str) -> None:
    assert clean_text(text).isprintable()
    assert clean_text(text, lines=True).replace("\n", "").replace("\t", "").isprintable()
    if text.isprintable():
        assert clean_text(text) == text
