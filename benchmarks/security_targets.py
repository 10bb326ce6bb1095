"""Processes that ``security.py`` attacks: decoders of their own, an agent, a client; what they are told comes on their
input.

python security_targets.py decoders MESSAGES SEED    prints one JSON object of what became of them
python security_targets.py agent                     reads its keys and its client's, prints its endpoint
python security_targets.py client                    reads an agent's address, its key and its own; prints a line when
                                                     connected, and one for each that it reads, which is a request
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from mutations import CARRIED_OUT, WAITING, Mutator, agent_sayings, envelopes, pairings, requests, sayings

from onebox.agent import Agent, ClientLimits, Offered
from onebox.errors import OneboxError, WireError
from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.wire import KeyPair, decode_envelope, decode_worker_message, encode
from onebox.wire.clean_text import clean
from onebox.wire.protocol.agents import GRACE_S, decode_agent_response, decode_pair, decode_paired, decode_request
from onebox.wire.reliable import Reliable
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.layout import DIMENSIONS, FIRST_CELLS, HEADER, SENT, lane_start
from onebox.worker.comm.shm.receiver import ShmReceiver
from onebox.worker.comm.shm.segment import SharedMemory, supported

SLOW_S = 1.0
"""A message that takes longer is a hang: a decoder is one pass over at most some hundred kilobytes here."""

STARTS = 1000
"""After so many messages both ends of the numbered channel begin anew."""

RETRY_S = 0.05
"""Pause after a request that has failed: the agent counts as lost until it is heard again."""

HEAD = struct.Struct("<BQQQQ")


def main() -> None:
    """Be what the command line says."""
    if sys.argv[1] == "agent":
        serve()
    elif sys.argv[1] == "client":
        ask()
    else:
        print(json.dumps(decode(int(sys.argv[2]), int(sys.argv[3]))))


# ---- decoders


def decode(count: int, seed: int) -> dict[str, Any]:
    """Decode mutated messages; return how many were read, refused, crashed and slow, and bytes of memory grown."""
    workers, agents = envelopes(waiting=True), requests()
    targets: list[tuple[Callable[[], bytes], Callable[[bytes], object]]] = [
        (Mutator(seed, workers).next, lambda message: decode_envelope([message])),
        (Mutator(seed + 1, agents).next, decode_request),
        (Mutator(seed + 2, workers).next, lambda message: decode_envelope([message])),
        (Mutator(seed + 3, agents).next, decode_request),
        (Mutator(seed + 4, sayings()).next, lambda message: cleaned(decode_worker_message([message])[0])),
        (Mutator(seed + 5, agent_sayings() + pairings()).next, either),
        (Parcels(seed + 6).next, Channel()),
        *([(Cells(seed + 7).next, Inbox())] if supported() else []),
    ]
    for sample in CARRIED_OUT + WAITING:
        decode_envelope([encode(sample)])
    for request in agents:
        decode_request(request)
    found = {"messages": 0, "read": 0, "refused": 0, "crashes": 0, "hangs": 0}
    examples: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth: list[int] = []
    for number in range(count):
        make, take = targets[number % len(targets)]
        message = make()
        begin_s = time.perf_counter()
        try:
            take(message)
            found["read"] += 1
        except (WireError, RankLost):
            found["refused"] += 1
        except Exception as error:
            found["crashes"] += 1
            examples.append(f"{type(error).__name__}: {str(error)[:80]}: {message[:200].hex()}")
        found["hangs"] += time.perf_counter() - begin_s > SLOW_S
        found["messages"] += 1
        if len(growth) < found["messages"] * 10 // count:  # of the most that was resident, whenever that was
            growth.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    return found | {"grown_bytes": growth[-1], "growth": growth, "examples": examples[:5]}


def either(message: bytes) -> object:
    """Decode what an agent answers, or what is said in a pairing; an error of each is one of all."""
    for decoder in (decode_agent_response, decode_pair, decode_paired):
        try:
            return cleaned(decoder(message))
        except WireError as error:
            refused = error
    raise refused


def cleaned(message: object) -> object:
    """Require that no text of a message steers a terminal.

    Raises:
        AssertionError: One does.
    """
    assert clean(message) is message, f"a text of {message} is not clean"
    return message


class Cells:
    """Headers of messages in shared memory, some of whose numbers are others.

    Args:
        seed: For the same ones again.
    """

    ODD = (-1, -2, -8, 0, 1, 4, 8, 64, 4096, 1 << 20, 1 << 32, 1 << 36, 1 << 46, (1 << 63) - 1, -(1 << 63))

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> bytes:
        """Return a header."""
        fields = list(HEADER.unpack(Inbox.HONEST))
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randrange(len(fields))
            near = min(max(fields[place], -(1 << 62)), 1 << 62) + self._random.choice((-8, -1, 1, 8))
            fields[place] = self._random.choice((*self.ODD, near))
        return HEADER.pack(*fields)


class Inbox:
    """A reader of one message in another worker's memory, which has no elements but these, all of them ones."""

    BLOCK = 1 << 20
    HONEST = HEADER.pack(BLOCK + (1 << 18), 0, 0, 0, BLOCK, 0, 0, 2, 0, 0, 4, 8, *[0] * (DIMENSIONS - 2))

    def __init__(self) -> None:
        self._memory = SharedMemory.make()
        self._memory.bytes[self.BLOCK : self.BLOCK + (1 << 17)].view(torch.float32).fill_(1.0)

    def __call__(self, header: bytes) -> None:
        start = lane_start(1)
        self._memory.map[start + FIRST_CELLS : start + FIRST_CELLS + len(header)] = header
        self._memory.words[start // 8 + SENT] = 1
        reader = ShmReceiver(self._memory, 0, 1, self._give_up)
        expected = reader.expect(0)
        found = expected.find()
        if found is None:
            return  # of another channel
        if found.spec.size_bytes <= self.BLOCK and found.offset >= 0:
            expected.take()

    def _give_up(self, rank: int, begin_s: float) -> None:
        raise RankLost("nothing came")


class Parcels:
    """Messages of the numbered channel with mutated heads.

    Args:
        seed: For the same ones again.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._made = self._number = 0
        self._mutator = Mutator(seed, [HEAD.pack(kind, 1, 0, kind, 0) for kind in range(6)])

    def next(self) -> bytes:
        """Return a head: one in four is right and the next in order, the others are near."""
        chance = self._chance
        self._made += 1
        if self._made % STARTS == 0:
            self._number = 0
        match chance.randrange(4):
            case 0:
                return self._mutator.next()
            case 1:
                self._number += 1
                return HEAD.pack(0, 1, 0, self._number, 0)
            case _:
                numbers = (0, 1, self._number, self._number + 2, self._number + 500, 2**63, 2**64 - 1)
                return HEAD.pack(chance.randrange(8), 1, *(chance.choice(numbers) for _ in range(3)))


class Channel:
    """The receiving end of the numbered channel; it begins anew now and then, as after another start."""

    def __init__(self) -> None:
        self._taken = 0
        self._end = Reliable(2)

    def __call__(self, head: bytes) -> None:
        """Take a head with a kilobyte behind it."""
        self._taken += 1
        if self._taken % STARTS == 0:
            self._end = Reliable(2)
        self._end.take([head, bytes(1024)], float(self._taken))
        self._end.outgoing(float(self._taken))


# ---- an agent


def serve() -> None:
    """Run an agent that offers one core and lets every client of the given keys in."""
    public, secret, *clients = sys.stdin.readline().split()
    agent = Agent(
        keys=KeyPair(public, secret),
        name_of=lambda key: f"client {clients.index(key)}" if key in clients else None,
        bind="127.0.0.1",
        port=0,
        advertise="127.0.0.1",
        offers=[Offered(device="cpu", name="a CPU", memory_bytes=1 << 28, threads=1)],
        limits=ClientLimits(devices=1, requests=2, grace_s=GRACE_S),
        tell=lambda event, **fields: None,
        read_log=lambda lines: ["{}"] * lines,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: agent.stop())
    print(agent.endpoint, flush=True)
    agent.run()


# ---- a client


def ask() -> None:
    """Be connected to an agent, and ask it for its offers as often as a line comes."""
    address, key, public, secret = sys.stdin.readline().split()
    connection = AgentConnection(address, key, KeyPair(public, secret), "somebody")
    print("connected", flush=True)
    for _ in sys.stdin:
        while True:
            with contextlib.suppress(OneboxError):  # what came before may have been a refusal, or no message at all
                connection.inspect()
                break
            time.sleep(RETRY_S)
        print("answered", flush=True)
    connection.close()


if __name__ == "__main__":
    main()
