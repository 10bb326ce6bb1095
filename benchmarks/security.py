"""Does anything that a stranger, a malicious client or a malicious agent says make another end crash, hang or grow?

Mutations of valid messages go to the decoders of all ends, in a process of their own; a share of them, stated in the
table, goes with a valid key over sockets to a worker, which carries out what is still an instruction, to an agent, and
to a client's connection to an agent. Resident memory is looked at after each batch: ``rss_growth_mb`` is the most that
a process has grown by since the first one, and the table's last column has it at ten places, so that what grows without
a bound is seen. Then intruders try to be let in: without a key, with a wrong one, with a recorded handshake, with an
expired lease.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq
from common import finish, show
from intruders import Recorder, disguises, got_in, hears, replay
from mutations import FRAME, Mutator, agent_sayings, envelopes, requests

from onebox.errors import WireError
from onebox.pool.backends.compatibility import own_versions
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.socket_folder import SocketFolder
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.wire import KeyPair, configure, decode_worker_message, encode, new_keys
from onebox.wire.protocol.agents import (
    TOKEN_BYTES,
    Inspect,
    Introduce,
    Introduced,
    Lease,
    Leased,
    Release,
    Renew,
    Renewed,
    Request,
    Stock,
    Want,
    decode_agent_response,
    decode_request,
    encode_agent,
)
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import Reply
from onebox.worker import WorkerConfig

WORKER_SHARE = 0.05
AGENT_SHARE = 0.005
CLIENT_SHARE = 0.005
"""Shares of the messages that go over sockets, which take longer than those that are decoded in this process."""

BATCH = 40
SESSION = 90
ANSWER_S = 30.0
"""A worker or an agent that answers a valid question later than that hangs."""

QUOTA_BYTES = 256 << 20
PROBE = 1 << 40
PLACES = 10
"""So often the growth of a process is noted."""

TARGETS = Path(__file__).with_name("security_targets.py")


def main() -> None:
    """Attack and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    finish(attack(options.messages, options.seed), as_json=options.json)


def attack(messages: int, seed: int) -> dict[str, Any]:
    """Send so many messages, let intruders try, print a table of both, and return the counts."""
    to_worker, to_agent, to_client = (int(messages * share) for share in (WORKER_SHARE, AGENT_SHARE, CLIENT_SHARE))
    found = {
        "decoders": decoders(messages - to_worker - to_agent - to_client, seed),
        "worker": worker(to_worker, seed + 100),
        "agent": agent(to_agent, seed + 200),
        "client": client(to_client, seed + 300),
    }
    tried = intruders()
    columns = ["messages", "crashes", "hangs", "grown_bytes", "seconds"]
    show(
        f"Mutated messages, seed {seed}",
        ["to", *columns[:3], "grown MiB", "s", "grown MiB at ten places"],
        [
            [
                name,
                *(f"{of[key]:,}" for key in columns[:3]),
                f"{of['grown_bytes'] / 2**20:.0f}",
                f"{of['seconds']:.0f}",
                " ".join(f"{grown / 2**20:.0f}" for grown in of["growth"]),
            ]
            for name, of in found.items()
        ],
    )
    show("Intruders", ["who", "at", "got in"], [[who, at, "yes" if inside else "no"] for who, at, inside in tried])
    return {
        "messages": sum(of["messages"] for of in found.values()),
        "crashes": sum(of["crashes"] for of in found.values()),
        "hangs": sum(of["hangs"] for of in found.values()),
        "intruders": sum(inside for _, _, inside in tried),
        "attempts": len(tried),
        "rss_growth_mb": round(max(of["grown_bytes"] for of in found.values()) / 1e6, 1),
        "rss_growth_mb_of": {name: [round(grown / 1e6, 1) for grown in of["growth"]] for name, of in found.items()},
        "examples": [example for of in found.values() for example in of["examples"]],
        "seed": seed,
    }


def nothing(messages: int = 0) -> dict[str, Any]:
    """Return the counts of a target before anything has come of so many messages."""
    return {"messages": messages, "crashes": 0, "hangs": 0, "grown_bytes": 0, "growth": [], "examples": []}


def note_growth(found: dict[str, Any], count: int, grown_bytes: int) -> None:
    """Note what a process has grown by after a batch of so many messages in all."""
    found["grown_bytes"] = max(found["grown_bytes"], grown_bytes)
    found["growth"] += [grown_bytes] * (len(found["growth"]) < found["messages"] * PLACES // max(1, count))


# ---- decoders


def decoders(count: int, seed: int) -> dict[str, Any]:
    """Decode messages in a process of its own; the end of that process is a crash, its silence a hang."""
    begin_s = time.monotonic()
    command = [sys.executable, str(TARGETS), "decoders", str(count), str(seed)]
    found = nothing(count)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60 + count / 1000, check=False)
    except subprocess.TimeoutExpired:
        found["hangs"] = 1
    else:
        if run.returncode == 0:
            found = json.loads(run.stdout)
        else:
            found |= {"crashes": 1, "examples": [f"status {run.returncode}: {run.stderr[-300:]}"]}
    return found | {"seconds": time.monotonic() - begin_s}


# ---- a worker


class Worker:
    """A worker that is attacked by its own client.

    Args:
        address: Where it listens: an IP address, or a folder.
    """

    def __init__(self, address: str) -> None:
        self.keys, self.own = new_keys(), new_keys()
        config = WorkerConfig(
            "cpu", 1, self.own.public, self.own.secret, self.keys.public, address, quota_bytes=QUOTA_BYTES
        )
        self.process = WorkerProcess(WorkerLocation(worker=0, host="localhost", device="cpu"), config)
        self.ports = self.process.ports()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        configure(self.socket, self.keys, server_key=self.own.public)
        self.socket.connect(self.ports.commands)
        self._probes = PROBE

    def answers(self) -> bool:
        """Ask something valid; tell whether it is answered in time."""
        self._probes += 1
        question = encode(Envelope(self._probes, True, (Ask("memory"),)))
        end_s = time.monotonic() + ANSWER_S
        self.socket.send(question)
        while (left_s := end_s - time.monotonic()) > 0:
            if self.ended():
                return False
            if self.socket.poll(min(200, int(left_s * 1000))):
                with contextlib.suppress(WireError):
                    saying, _ = decode_worker_message(self.socket.recv_multipart())
                    if isinstance(saying, Reply) and saying.number == self._probes:
                        return True
        return False

    def ended(self) -> bool:
        """Tell whether its process has ended."""
        return not psutil.pid_exists(self.process.pid) or psutil.Process(self.process.pid).status() == "zombie"

    def close(self) -> None:
        """End it."""
        self._context.destroy(linger=0)
        self.process.close(grace_s=0.0)


def worker(count: int, seed: int) -> dict[str, Any]:
    """Let a worker carry out mutated messages; one that was told to end, as a mutation may, is started anew."""
    begin_s = time.monotonic()
    mutator = Mutator(seed, envelopes(waiting=False))
    found = nothing()
    folder = SocketFolder()
    victim = Worker(folder.path)
    before = 0
    try:
        while found["messages"] < count:
            batch = [mutator.next() for _ in range(min(BATCH, count - found["messages"]))]
            for message in batch:
                victim.socket.send_multipart([message, FRAME, FRAME][: 1 + len(message) % 3])
            found["messages"] += len(batch)
            fine = victim.answers()
            if fine:
                memory = psutil.Process(victim.process.pid).memory_info().rss
                before = before or memory
                note_growth(found, count, memory - before)
                continue
            ended = victim.ended()
            death = victim.process.death() if ended else None
            if death is None or death.exit_status != 0:
                found["crashes" if ended else "hangs"] += 1
                found["examples"].append(f"worker: {death}: {' '.join(message.hex() for message in batch)}"[:20000])
            victim.close()
            victim = Worker(folder.path)
            before = 0
    finally:
        victim.close()
        folder.close()
    return found | {"seconds": time.monotonic() - begin_s}


# ---- an agent


class Talk:
    """A session of a client with an agent, over a connection of its own."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.poll = socket.poll
        self.recv = socket.recv

    def say(self, message: bytes) -> None:
        """Say something."""
        self._socket.send_multipart([self._token, message])


class Agent:
    """An agent in a process of its own, and the keys of clients that it lets in."""

    def __init__(self) -> None:
        self.keys = new_keys()
        self.clients = [new_keys() for _ in range(2)]
        self._process = subprocess.Popen(
            [sys.executable, str(TARGETS), "agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = [self.keys.public, self.keys.secret, *(client.public for client in self.clients)]
        self._process.stdin.write(" ".join(told) + "\n")
        self._process.stdin.flush()
        self.endpoint = self._process.stdout.readline().strip()
        self.pid = self._process.pid

    def ended(self) -> bool:
        """Tell whether its process has ended."""
        return self._process.poll() is not None

    def memory_bytes(self) -> int:
        """Return what it takes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @contextlib.contextmanager
    def client(self, keys: KeyPair, endpoint: str = "") -> Iterator[Talk]:
        """Connect as a client."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as made:
            configure(made, keys, server_key=self.keys.public)
            made.connect(endpoint or self.endpoint)
            yield Talk(made)

    def answers(self) -> bool:
        """Ask something valid as another client; tell whether it is answered in time."""
        with self.client(self.clients[1]) as asking:
            asking.say(encode_agent(Introduce(1, own_versions(), "somebody")))
            asking.say(encode_agent(Inspect(2)))
            return isinstance(heard(asking, Introduced), Introduced) and isinstance(heard(asking, Stock), Stock)

    def close(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def heard(asking: Talk, kind: type[Any], *, renewing: bool = False) -> Any:
    """Return the next saying of a kind; None if there is none in time.

    Args:
        asking: A client.
        kind: What to wait for.
        renewing: Whether to give signs of life meanwhile.
    """
    end_s = time.monotonic() + ANSWER_S
    while time.monotonic() < end_s:
        if asking.poll(300):
            saying = decode_agent_response(asking.recv())
            if isinstance(saying, kind):
                return saying
        elif renewing:
            asking.say(encode_agent(Renew(0)))
    return None


def agent(count: int, seed: int) -> dict[str, Any]:
    """Send mutated requests to an agent, over as many connections as its limit of their rate needs."""
    begin_s = time.monotonic()
    mutator = Mutator(seed, requests())
    found = nothing()
    victim = Agent()
    try:
        victim.answers()
        before = victim.memory_bytes()
        while found["messages"] < count:
            batch = [mutator.next() for _ in range(min(SESSION, count - found["messages"]))]
            with victim.client(victim.clients[0]) as client:
                client.say(encode_agent(Introduce(1, own_versions(), "somebody")))
                heard(client, Introduced)
                for message in batch:
                    client.say(message)
                    while client.poll(0):
                        client.recv()
                client.say(encode_agent(Renew(PROBE)))
                fine = heard(client, object) is not None and victim.answers()
            found["messages"] += len(batch)
            if not fine:
                found["crashes" if victim.ended() else "hangs"] += 1
                found["examples"].append(f"agent: {' '.join(message.hex() for message in batch)}"[:20000])
                victim.close()
                victim = Agent()
            note_growth(found, count, victim.memory_bytes() - before)
    finally:
        victim.close()
    return found | {"seconds": time.monotonic() - begin_s}


# ---- a client


class Client:
    """A client in a process of its own, and the agent that it is connected to, which is this process."""

    def __init__(self) -> None:
        self.keys, mine = new_keys(), new_keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, self.keys, server_key=None)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._process = subprocess.Popen(
            [sys.executable, str(TARGETS), "client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._tell(f"127.0.0.1:{port} {self.keys.public} {mine.public} {mine.secret}")
        self._who = b""
        self.pid = self._process.pid
        assert self._said_in_time(), "the client connects to this agent"

    def say(self, message: bytes) -> None:
        """Say something to the client."""
        self._socket.send_multipart([self._who, message])

    def answers(self) -> bool:
        """Have the client ask this agent something; tell whether it gets the answer in time."""
        self._tell("ask")
        return self._said_in_time()

    def ended(self) -> bool:
        """Tell whether its process has ended."""
        return self._process.poll() is not None

    def memory_bytes(self) -> int:
        """Return what it takes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._context.destroy(linger=0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line + "\n")
            self._stdin.flush()

    def _said_in_time(self) -> bool:
        """Answer as an agent does until the client prints a line; return whether that comes in time."""
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s and not self.ended():
            while self._socket.poll(10):
                self._who, _, frame = self._socket.recv_multipart()
                self._answer(decode_request(frame))
            if select.select([self._stdout], [], [], 0)[0]:
                return self._stdout.readline() != ""
        return False

    def _answer(self, request: Request) -> None:
        match request:
            case Introduce():
                self.say(encode_agent(Introduced(request.number, own_versions(), "host", "127.0.0.1")))
            case Inspect():
                self.say(encode_agent(Stock(request.number, ())))
            case Renew():
                self.say(encode_agent(Renewed(request.number, ())))


def client(count: int, seed: int) -> dict[str, Any]:
    """Send mutated messages of an agent to a client."""
    begin_s = time.monotonic()
    mutator = Mutator(seed, agent_sayings())
    found = nothing()
    victim = Client()
    try:
        before = victim.memory_bytes()
        while found["messages"] < count:
            batch = [mutator.next() for _ in range(min(SESSION, count - found["messages"]))]
            for message in batch:
                victim.say(message)
            found["messages"] += len(batch)
            if not victim.answers():
                found["crashes" if victim.ended() else "hangs"] += 1
                found["examples"].append(f"client: {' '.join(message.hex() for message in batch)}"[:20000])
                victim.close()
                victim = Client()
            note_growth(found, count, victim.memory_bytes() - before)
    finally:
        victim.close()
    return found | {"seconds": time.monotonic() - begin_s}


# ---- intruders


def intruders() -> list[tuple[str, str, bool]]:
    """Let everybody try who should not get in; return who, where, and whether they did."""
    tried: list[tuple[str, str, bool]] = []
    question = encode_agent(Introduce(1, own_versions(), "somebody"))
    victim = Agent()
    try:
        for name, disguise in disguises(victim.keys.public, victim.clients[0].public).items():
            tried.append((name, "agent", hears(victim.endpoint, disguise, question)))
        with Recorder(victim.endpoint) as recorder:
            with victim.client(victim.clients[0], recorder.endpoint) as client:
                client.say(question)
                assert isinstance(heard(client, Introduced), Introduced), "who has the key is let in"
            said = recorder.said
            assert got_in(recorder.heard), "what a client hears is told from what everybody hears"
        tried.append(("a recorded handshake, played again", "agent", got_in(replay(victim.endpoint, said))))
        tried += expired(victim)
    finally:
        victim.close()
    target = Worker("127.0.0.1")
    try:
        for port in (target.ports.commands, target.ports.heartbeats):
            where = "worker's commands" if port == target.ports.commands else "worker's signs of life"
            for name, disguise in disguises(target.own.public, target.keys.public).items():
                tried.append((name, where, hears(port, disguise, question)))
    finally:
        target.close()
    return tried


def expired(victim: Agent) -> list[tuple[str, str, bool]]:
    """Lease a worker, fall silent until the lease ends, and try to use both again."""
    keys = victim.clients[0]
    with victim.client(keys) as client:
        client.say(encode_agent(Introduce(1, own_versions(), "somebody")))
        client.say(encode_agent(Lease(2, (Want("cpu"),), keys.public, 1.0)))
        leased = heard(client, Leased, renewing=True)
        assert isinstance(leased, Leased), "a client gets its lease"
        started = leased.workers[0]
        lets_in: Any = lambda tried: configure(tried, keys, server_key=started.key)  # noqa: E731
        assert hears(started.commands, lets_in, b""), "a lease is good for its worker"
        other: Any = lambda tried: configure(tried, victim.clients[1], server_key=started.key)  # noqa: E731
        found = [("another client of the agent", "worker of a lease", hears(started.commands, other, b""))]
        end_s = time.monotonic() + ANSWER_S
        while psutil.pid_exists(started.process) and time.monotonic() < end_s:
            time.sleep(0.1)
        found.append(("an expired lease", "its worker", hears(started.commands, lets_in, b"")))
        client.say(encode_agent(Release(3, leased.lease)))
        refused = heard(client, object)
        while refused is not None and getattr(refused, "number", 0) != 3:
            refused = heard(client, object)
        found.append(("an expired lease", "agent", type(refused).__name__ != "Refused"))
    return found


if __name__ == "__main__":
    main()
