"""Junk on the wire: decoding raises one kind of error, and takes neither long nor much memory."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable

import msgspec
import pytest

from onebox.errors import WireError
from onebox.wire import (
    FREE,
    Complex,
    DType,
    GeneratorArgument,
    GeneratorSpec,
    Hole,
    KernelSpec,
    LayoutArgument,
    Many,
    Operator,
    OwnDevice,
    Program,
    SlotArgument,
    Strided,
    TapeSpec,
    TensorSpec,
    decode_envelope,
    decode_worker_message,
    encode,
)
from onebox.wire.protocol import codec
from onebox.wire.protocol.eager import KeepGenerator, Perform, Replay, SetGenerator
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.instructions import Ask, Call, Free, Get, OptimizerStep
from onebox.wire.protocol.requests import Define, Envelope, OptimizerSpec, Put, Routine, Run, StoredProgram
from onebox.wire.protocol.responses import (
    Contribution,
    GroupTraffic,
    Hello,
    Lookup,
    MessageTimes,
    OperatorResult,
    Reply,
    Scalars,
)
from onebox.wire.protocol.snapshots import Remembered, StateEntry

SPEC = TensorSpec("float32", (2, 3))
PROGRAM = Program(
    (SPEC, SPEC),
    (
        Operator(
            "aten.cat.default",
            (Many((SlotArgument(0), SlotArgument(1))), 0),
            {"dtype": DType("int64")},
            (2,),
            (SPEC,),
            (0, 1),
        ),
        Operator("aten.max.dim", (SlotArgument(2), 0, True, None, 0.5, "text"), {}, (3, None), (SPEC, None), (2,), 4),
    ),
    (3,),
    4,
)
KERNEL = KernelSpec(
    "aten._foreach_add_.ScalarList",
    (
        Many((SlotArgument(0), SlotArgument(1))),
        Many((Hole(0), Hole(1), Complex(1.0, -2.0), True, 3, 0.5, None)),
        "text",
        2,
        0.25,
    ),
    {
        "dtype": DType("int64"),
        "device": OwnDevice(),
        "layout": LayoutArgument(),
        "generator": GeneratorArgument(9),
        "alpha": Hole(1),
    },
    2,
    2,
    (Strided("float32", (2, 3), (3, 1), 0, 24), None),
)
ENVELOPES = [
    Envelope(1, True, (Put((1,), (SPEC,), there=True), Get((1,), 4, 8), Remembered(6, 0, "exp_avg", 4, 8))),
    Envelope(1, True, (Define(3, StoredProgram(PROGRAM)),)),
    Envelope(
        2,
        False,
        (Put((1, 2), (SPEC, SPEC), ("lz4", "")), Run(5, (1, 2), 7, 9, ({"lr": 0.1, "betas": (0.9, 0.99)},), True)),
    ),
    Envelope(3, True, (Define(4, Routine((Call(3, (-1, 2), (4,), (0,)), Free((4,)), Ask("scalars", (4,))), 1)),)),
    Envelope(4, True, (Define(6, OptimizerSpec("SGD", (((0,), {"lr": 0.1}),), (1,), (StateEntry(0, "m", SPEC),))),)),
    Envelope(
        4, True, (Define(6, OptimizerSpec(("SGD", "Adam"), (((0,), {}), ((), {})), (1,), delay=("none", "both"))),)
    ),
    Envelope(
        6,
        True,
        (Define(7, KERNEL), Define(8, TapeSpec((7, -1, -2, FREE, -1), 2, 2)), Define(9, GeneratorSpec(3))),
    ),
    Envelope(7, False, (Replay(8, (1, 2), (3,), (0.1, 0.2)), Replay(8, (2, 3), (4,), (0.5, 0.5)))),
    Envelope(
        8,
        True,
        (Perform(KERNEL, (1, 2), (0.1, 0.2), 10), SetGenerator(9, 7), SetGenerator(0, None, 3), KeepGenerator(9, 4)),
    ),
    Envelope(5, True, (FormGroup(1, 0, 2, "tcp", "127.0.0.1", 60.0), OptimizerStep(6, (1,), 1.0), Get((1, 2)))),
]
SAYINGS = [
    Hello(1, "2.13.0", "cpu", "a processor", 2, 2**34),
    Reply(3, (Scalars((1.0, 2.0)),), None, (1, 2), (3, 4), (GroupTraffic(1, 0, 1000, 2000),)),
    Reply(3, messages=(MessageTimes(5, 1, 4, 2),)),
    Reply(4, (OperatorResult((Strided("float32", (2,), (1,), 0, 8), Complex(0.0, 1.0), True, 3, 0.5, None), ()),)),
    Lookup(1, 2, "set", ("key",), b"value"),
    Contribution(1, 2, 3, SPEC),
]


def junk(chance: random.Random, samples: list[bytes]) -> bytes:
    """Return bytes that are almost a message, or not at all."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(64))
    good = bytearray(chance.choice(samples))
    place = chance.randrange(len(good))
    if kind == 1:
        return bytes(good[:place])
    if kind == 2:
        for _ in range(chance.randrange(1, 6)):
            good[chance.randrange(len(good))] = chance.randrange(256)
    elif kind == 3:
        good[place:place] = chance.randbytes(chance.randrange(1, 6))
    elif kind == 4:
        del good[place : place + chance.randrange(1, 6)]
    else:  # a length of a string, array or map that is not there
        length = chance.choice([2**16, 2**24, 2**31 - 1, 2**32 - 1])
        good[place:place] = chance.choice(b"\xdb\xc6\xdd\xdf\xc9").to_bytes(1, "big") + struct.pack(">I", length)
    return bytes(good)


@pytest.mark.parametrize(("decode", "samples"), [(decode_envelope, ENVELOPES), (decode_worker_message, SAYINGS)])
def test_ten_thousand_pieces_of_junk(decode: Callable[[list[bytes]], object], samples: list[Envelope]) -> None:
    chance = random.Random(20)
    encoded = [encode(sample) for sample in samples]
    for header in encoded:
        decode([header])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(10_000):
        try:
            decode([junk(chance, encoded)])
        except WireError:
            refused += 1
    assert refused > 7_000, "most junk is no message"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x91" * 1_000_000,
        b"\x81" * 1_000_000,
        b"\x93\x01\xc3" + b"\x91" * 1_000_000,
        b"\x93\x01\xc3\x91\x92\xa3get" + b"\x91" * 1_000_000,
        b"\x93\x01\xc3\x91\x94\xa3get\x90\xc0" + b"\x91" * 1_000_000,  # in a field too many
        b"\x93\x01\xc3\x91\x92\xa3get\xdd\xff\xff\xff\xff",
        b"\x93\x01\xc3\xdd\xff\xff\xff\xff",
        b"\x93\x01\xc3\x91\x97\xa3run\x01\x90\x00\x00\x91\xdf\xff\xff\xff\xff",
        b"\x93\x01\xc3\x91\x92\xa3\xff\xff\xff\x01",
        b"\x93\xcf" + b"\xff" * 8 + b"\xc3\x90\x00",
        msgspec.msgpack.encode([1, True, []]) + b"\x00",
        msgspec.json.encode([1, True, []]),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    ],
    ids=[
        "empty", "reserved", "deep arrays", "deep maps", "deep instructions", "deep buffers", "deep extra field",
        "long buffers", "long instructions", "long map", "no text", "wide number", "trailing", "json", "http", "pickle",
    ],
)  # fmt: skip
def test_hostile_headers(header: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for decode in (decode_envelope, decode_worker_message):
        with pytest.raises(WireError):
            decode([header])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_limits_hold_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Envelope(1, False, (Free(tuple(range(100_000, 110_000))),))  # longer than what other pools send meanwhile
    header = encode(long)
    monkeypatch.setattr(codec, "HEADER_BYTES", len(header))
    decode_envelope([header])
    with pytest.raises(WireError, match="header"):
        decode_envelope([header + b"\x00"])
    monkeypatch.setattr(codec, "HEADER_BYTES", len(header) - 1)
    with pytest.raises(WireError, match="limit"):
        encode(long)


@pytest.mark.parametrize("count", [0, codec.FRAMES + 1])
def test_the_number_of_frames_is_limited(count: int) -> None:
    with pytest.raises(WireError, match="frames"):
        decode_envelope([encode(Envelope(1, False, ()))][:count] + [b""] * max(0, count - 1))


def test_the_largest_number_of_frames_comes_in() -> None:
    _, frames = decode_envelope([encode(Envelope(1, False, ()))] + [b""] * (codec.FRAMES - 1))
    assert len(frames) == codec.FRAMES - 1
