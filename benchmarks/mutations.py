"""Messages that are almost right: mutations of valid ones, the same for the same seed.

Samples hold every type of message, as its type says and, where that would do little, written by hand. Those that wait
for other workers are in :data:`WAITING`: a client that sends them alone waits, as it asked to; they are only decoded.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
from specimens import specimens

from onebox.pool.backends.compatibility import own_versions
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
    encode,
    new_keys,
)
from onebox.wire.protocol.agents import (
    AgentResponse,
    Inspect,
    Introduce,
    Lease,
    PairReply,
    PairRequest,
    ReadLog,
    Release,
    Renew,
    Request,
    Want,
    encode_agent,
)
from onebox.wire.protocol.eager import KeepGenerator, Perform, Replay, SetGenerator
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Rendezvous
from onebox.wire.protocol.instructions import (
    Ask,
    Branch,
    Call,
    Evict,
    Free,
    Gather,
    Get,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Reduce,
    Rename,
    Send,
)
from onebox.wire.protocol.requests import (
    Define,
    Envelope,
    Instruction,
    OptimizerSpec,
    Put,
    Routine,
    Run,
    Shutdown,
    StoredProgram,
)
from onebox.wire.protocol.responses import Contribution, Hello, Lookup, OperatorResult, Reply, Scalars, WorkerMessage
from onebox.wire.protocol.snapshots import Read, Snapshot, StateEntry

SPEC = TensorSpec("float32", (2, 3))
FRAME = bytes(24)
"""The elements of one such tensor."""

_LAYOUT = Strided("float32", (2, 3), (3, 1), 0, 24)
_PROGRAM = Program(
    (SPEC, SPEC),
    (
        Operator(
            "aten.cat.default",
            (Many((SlotArgument(0), SlotArgument(1))), 0),
            {},
            (2,),
            (TensorSpec("float32", (4, 3)),),
            (0, 1),
        ),
        Operator(
            "aten.sum.dim_IntList", (SlotArgument(2), Many((0,))), {"dtype": DType("float32")}, (3,), (None,), (2,)
        ),
    ),
    (3,),
    4,
)
_ADD = KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {"alpha": Hole(0)}, 2, 1, (_LAYOUT,))
_MAKE = KernelSpec(
    "aten.full.default",
    (Many((2, 3)), Hole(0)),
    {"dtype": DType("float32"), "device": OwnDevice(), "layout": LayoutArgument()},
    0,
    1,
    (_LAYOUT,),
)
_ODD = KernelSpec(
    "aten._foreach_add_.ScalarList",
    (Many((SlotArgument(0), SlotArgument(1))), Many((Hole(0), Complex(1.0, -2.0), True, None))),
    {"generator": GeneratorArgument(9)},
    2,
    1,
    (_LAYOUT, None),
)

CARRIED_OUT = [
    Envelope(1, True, (Put((1, 2), (SPEC, SPEC)), Define(3, StoredProgram(_PROGRAM)), Call(3, (1, 2), (4,)))),
    Envelope(2, False, (Put((1, 2), (SPEC, SPEC)), Free((5,), (99,)), Snapshot(3, (1, 2)), Read(3, 0, 8))),
    Envelope(3, True, (Put((1, 2), (SPEC, SPEC)), Define(4, Routine((Call(3, (-1, 2), (4,)), Ask("scalars", ())), 1)))),
    Envelope(4, True, (Run(4, (1,), 7, 9, (), True), Ask("digest", (1, 2)), Ask("memory"))),
    Envelope(
        5,
        True,
        (
            Put((1, 2), (SPEC, SPEC)),
            Define(6, OptimizerSpec("Adam", (((0,), {"lr": 0.1, "betas": (0.9, 0.99)}),), (1,), ())),
            OptimizerStep(6, (2,), 1.0),
        ),
    ),
    Envelope(
        6,
        True,
        (
            Put((1,), (SPEC,)),
            Define(7, _ADD),
            Define(8, TapeSpec((7, -1, -1), 1, 1)),
            Replay(8, (1,), (2,), (0.5,)),
            Get((2,)),
        ),
    ),
    Envelope(
        7,
        True,
        (Define(8, _MAKE), Define(9, GeneratorSpec(3)), Define(10, TapeSpec((8,), 0, 1)), Replay(10, (), (4,), (1.5,))),
    ),
    Envelope(8, True, (Define(10, TapeSpec((7, -1, -1, 7, 0, -1, FREE, 0), 1, 2)), Replay(10, (1,), (4,), (0.5, 0.5)))),
    Envelope(9, True, (Perform(_MAKE, (), (0.1,), 10), SetGenerator(9, 7), KeepGenerator(9, 4), Get((10,)))),
    Envelope(10, False, (Perform(_ODD, (1, 2), (0.1,), 12),)),
    Envelope(15, True, (Put((1, 2), (SPEC, SPEC)), Offload((1, 2)), Evict((1, 2)), Prefetch((2, 1)), Get((1, 2)))),
    Envelope(
        16,
        True,
        (
            Put((1, 2), (SPEC, SPEC)),
            Define(6, OptimizerSpec("AdamW", (((0,), {}),), (1,), delay="predict")),
            Branch(6, (11,), (12,)),
            OptimizerStep(6, (2,), members=(0,), previous=(11,), ahead=(12,), age=1),
            Rename((2,), (13,)),
            Get((1, 11, 12, 13)),
        ),
    ),
    Envelope(11, True, (LeaveGroup(3), Rendezvous(1, (b"x", b"yz")), Get((1, 2)))),
]
"""What a worker does at once; each buffer that is put takes one frame."""

WAITING = [
    Envelope(12, True, (FormGroup(1, 0, 2, "tcp", "127.0.0.1", 60.0), Reduce((1,), 1), Send(1, 1, 1))),
    Envelope(13, True, (Receive(4, SPEC, 1, 1), Gather(1, 5, SPEC, 1, (1, 1)), Shutdown())),
    Envelope(14, True, (Define(6, OptimizerSpec("SGD", (((0,), {}),), (1,), (StateEntry(0, "m", SPEC),))),)),
]
SAYINGS = [
    Hello(1, "2.13.0", "cpu", "a processor", 2, 2**34),
    Reply(3, (Scalars((1.0, 2.0)),), None, (1, 2)),
    Reply(4, (OperatorResult((_LAYOUT, Complex(0.0, 1.0), True, 3, 0.5, None), ()),)),
    Lookup(1, 2, "set", ("key",), b"value"),
    Contribution(1, 2, 3, SPEC),
]


def envelopes(*, waiting: bool) -> list[bytes]:
    """Return encoded messages to a worker, with those that wait for other workers or without."""
    first = (Put((1, 2), (SPEC, SPEC)), Snapshot(1, (1, 2)))
    but = frozenset() if waiting else frozenset((*(type(each) for each in _waits()), Shutdown))
    all_kinds = [Envelope(20, True, (*first, made)) for made in specimens(Instruction, but=but)]
    return [encode(sample) for sample in CARRIED_OUT + (WAITING if waiting else []) + all_kinds]


def _waits() -> list[Any]:
    """Return the instructions that wait for other workers."""
    return [each for sample in WAITING for each in sample.instructions if not isinstance(each, Define)]


def sayings() -> list[bytes]:
    """Return encoded messages of a worker."""
    return [encode(saying) for saying in (*SAYINGS, *specimens(WorkerMessage))]


def agent_sayings() -> list[bytes]:
    """Return encoded messages of an agent."""
    return [encode_agent(saying) for saying in specimens(AgentResponse)]


def requests() -> list[bytes]:
    """Return encoded requests to an agent."""
    key = new_keys().public
    return [
        encode_agent(request)
        for request in (
            *specimens(Request),
            Introduce(1, own_versions(), "ana@desk"),
            Inspect(2),
            Lease(3, (Want("cpu", 1, 1 << 20), Want("cpu")), key, 3.0, True, 1.0),
            Lease(4, (Want("cuda:0"),), key),
            Renew(5),
            Release(6, 1),
            Release(7, 0, 3),
            ReadLog(8, 100),
        )
    ]


def pairings() -> list[bytes]:
    """Return encoded messages of a pairing."""
    return [
        encode_agent(PairRequest("ana@desk", new_keys().public)),
        encode_agent(PairReply("host", new_keys().public)),
    ]


LIMITS = [
    b"\xcf" + b"\xff" * 8,  # 2^64 - 1
    b"\xcf\x80" + bytes(7),  # 2^63
    b"\xd3\x80" + bytes(7),  # - 2^63
    b"\xce\xff\xff\xff\xff",
    b"\xd2\x80\x00\x00\x00",
    b"\xff",  # - 1
    b"\x00",
    b"\xcb\x7f\xf0" + bytes(6),  # infinity
    b"\xcb\xff\xf8" + bytes(6),  # not a number
    b"\xcb\x7f\xef" + b"\xff" * 6,  # the largest
    b"\xc0",
    b"\xc3",
    b"\xa0",
    b"\x90",
    b"\x80",
]
"""Encoded values at the ends of what can be said."""

VALUES = [
    *(sign * 2**power + by for power in (0, 7, 15, 31, 40, 62) for sign in (1, -1) for by in (-1, 0, 1)),
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.0,
    -0.0,
    1e308,
    5e-324,
    float("inf"),
    float("-inf"),
    float("nan"),
    None,
    True,
    False,
    "",
    "x" * 1000,
    "aten.add.Tensor",
    "__class__",
    b"",
    [],
    {},
    [0, -1, 1],
]
"""What to put in the place of a value."""

_LONG = b"\xdb\xc6\xdd\xdf\xc9"
"""Beginnings of texts, bytes, arrays, maps and extensions whose length follows in four bytes."""

DEPTHS = (10, 600, 5_000)


def _leaves(tree: Any, place: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Return all values in a tree of lists and maps, with their places."""
    if isinstance(tree, list | dict) and tree:
        steps = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [found for step, value in steps for found in _leaves(value, [*place, step])]
    return [(tree, place)] if place else []


def _values(message: bytes) -> list[Any]:
    """Return all values in a message; none where it is not of MessagePack."""
    try:
        return [leaf for leaf, _ in _leaves(msgspec.msgpack.decode(message), [])]
    except msgspec.DecodeError:
        return []


class Mutator:
    """Makes messages that are almost right.

    Args:
        seed: For the same ones again.
        samples: Valid messages.
    """

    def __init__(self, seed: int, samples: Sequence[bytes]) -> None:
        self._chance = random.Random(seed)
        self._samples = list(samples)
        self._kinds = [
            self._flip,
            self._flip,
            self._write,
            self._cut,
            self._splice,
            self._remove,
            self._repeat,
            self._limit,
            self._limit,
            self._limit,
            self._lie,
            self._nest,
            self._noise,
            *[self._exchange] * 8,
        ]
        self._leaves = [leaf for sample in self._samples for leaf in _values(sample)]

    def next(self) -> bytes:
        """Return the next message: a sample with one to three mutations."""
        message = self._chance.choice(self._samples)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            message = self._chance.choice(self._kinds)(message)
        return message

    def _place(self, message: bytes) -> int:
        return self._chance.randrange(len(message)) if message else 0

    def _flip(self, message: bytes) -> bytes:
        if not message:
            return message
        changed = bytearray(message)
        for _ in range(self._chance.randrange(1, 5)):
            changed[self._place(message)] ^= 1 << self._chance.randrange(8)
        return bytes(changed)

    def _write(self, message: bytes) -> bytes:
        place = self._place(message)
        return message[:place] + self._chance.randbytes(self._chance.randrange(1, 5)) + message[place + 1 :]

    def _cut(self, message: bytes) -> bytes:
        return message[: self._place(message)]

    def _splice(self, message: bytes) -> bytes:
        other = self._chance.choice(self._samples)
        return message[: self._place(message)] + other[self._place(other) :]

    def _remove(self, message: bytes) -> bytes:
        place = self._place(message)
        return message[:place] + message[place + self._chance.randrange(1, 8) :]

    def _repeat(self, message: bytes) -> bytes:
        begin = self._place(message)
        end = min(len(message), begin + self._chance.randrange(1, 40))
        return message[:end] + message[begin:end] * self._chance.choice((1, 2, 50)) + message[end:]

    def _limit(self, message: bytes) -> bytes:
        place = self._place(message)
        return message[:place] + self._chance.choice(LIMITS) + message[place + 1 :]

    def _lie(self, message: bytes) -> bytes:
        """Announce more than there is."""
        place = self._place(message)
        length = self._chance.choice([2**16, 2**24, 2**31 - 1, 2**32 - 1])
        return message[:place] + bytes([self._chance.choice(_LONG)]) + struct.pack(">I", length) + message[place:]

    def _nest(self, message: bytes) -> bytes:
        place = self._place(message)
        return message[:place] + self._chance.choice((b"\x91", b"\x81")) * self._chance.choice(DEPTHS) + message[place:]

    def _exchange(self, message: bytes) -> bytes:
        """Put other values in the places of some: still a message, which may well be of the protocol."""
        try:
            tree = msgspec.msgpack.decode(message)
            places = [place for _, place in _leaves(tree, [])]
            for place in self._chance.sample(places, min(len(places), self._chance.choice((1, 1, 2, 4)))):
                holder = tree
                for step in place[:-1]:
                    holder = holder[step]
                holder[place[-1]] = self._chance.choice(VALUES if self._chance.random() < 0.5 else self._leaves)
            return msgspec.msgpack.encode(tree)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError, IndexError):
            return message  # what other mutations have made of it is no tree

    def _noise(self, message: bytes) -> bytes:
        return self._chance.randbytes(self._chance.randrange(64))
