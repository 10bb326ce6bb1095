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

from mutations import CARRIED_OUT, WAITING, Mutator, agent_sayings, envelopes, pairings, requests, sayings

from onebox.agent import Agent, ClientLimits, Offered
from onebox.errors import OneboxError, WireError
from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.wire import KeyPair, decode_envelope, decode_worker_message, encode
from onebox.wire.protocol.agents import GRACE_S, decode_agent_response, decode_pair, decode_paired, decode_request
from onebox.wire.reliable import Reliable

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
        (Mutator(seed + 4, sayings()).next, lambda message: decode_worker_message([message])),
        (Mutator(seed + 5, agent_sayings() + pairings()).next, either),
        (Parcels(seed + 6).next, Channel()),
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
        except WireError:
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
            return decoder(message)
        except WireError as error:
            refused = error
    raise refused


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
