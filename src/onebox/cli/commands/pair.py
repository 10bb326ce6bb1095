"""``onebox pair``: pairing of a client with an agent, and the lists of known clients and agents."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from onebox.cli.options.agents import AGENT_PORT
from onebox.cli.options.pairing import (
    PAIRING_PORT,
    PairAcceptConfig,
    PairConfig,
    PairConnectConfig,
    PairForgetConfig,
    PairListConfig,
    PairRemoveConfig,
)
from onebox.errors import UsageError
from onebox.pool.backends.agents.agent_source import client_name
from onebox.pool.keys.keyring import (
    KnownAgent,
    Role,
    allow_client,
    allowed_clients,
    fingerprint,
    forget_agent,
    full_address,
    identity,
    is_name,
    known_agent,
    known_agents,
    made_identity,
    remember_agent,
    remove_client,
)
from onebox.pool.keys.pairing import GOOD_FOR_S, PairingListener, find_listener, pair_with
from onebox.pool.keys.pairing_code import PairingCode, new_code, read_code
from onebox.wire.protocol.agents import PairReply, PairRequest

_LONGEST_LINE = 256


def pair(config: PairConfig) -> None:
    """Carry out the requested action.

    Raises:
        UsageError: A name, code or file is invalid, or the name is unknown.
        PoolError: The other side did not answer, or had another code.
    """
    match config:
        case PairAcceptConfig():
            _accept(config)
        case PairConnectConfig():
            _connect(config)
        case PairRemoveConfig():
            _remove(config.client)
        case PairForgetConfig():
            _forget(config.host)
        case PairListConfig():
            _list()


def _accept(config: PairAcceptConfig) -> None:
    keys = identity("agent")
    allowed_clients()  # report a damaged file before the user enters anything
    code = new_code()
    host = platform.node() or "this machine"
    with PairingListener(code, PairReply(host, keys.public), bind=config.bind, port=config.pairing_port) as door:
        port = "" if config.pairing_port == PAIRING_PORT else f" --pairing-port {config.pairing_port}"
        _say(f"fingerprint of the agent on {host}:  {fingerprint(keys.public)}")
        _say(f"code, good once and for {GOOD_FOR_S / 60:.0f} minutes:  {code.text}")
        _say(
            f"on the client:  onebox pair connect {host}{port}  (the name or address by which it reaches this machine)"
        )
        kept: list[str] = []
        found = door.wait(lambda client: kept.append(allow_client(client.client, client.key)))
    _say(f"paired: {kept[0]} may lease devices of this machine from now on")
    _say(f"fingerprint of that client:  {fingerprint(found.key)}")


def _connect(config: PairConnectConfig) -> None:
    address = full_address(config.host)
    mine = identity("client")
    name = client_name() if config.name is None else config.name
    if not is_name(name):
        raise UsageError(f"--name {name!r}: allowed are 1 to 128 characters that can be printed")
    before = known_agent(address)
    machine, _, port = address.rpartition(":")
    find_listener(machine.strip("[]"), config.pairing_port)
    code = _asked_code(address)
    paired = pair_with(machine.strip("[]"), config.pairing_port, code, PairRequest(name, mine.public))
    remember_agent(KnownAgent(address, paired.key, paired.host))
    _say(f"paired with the agent on {paired.host}:  {fingerprint(paired.key)}")
    if before is not None and before.key != paired.key:
        _say(f"it takes the place of the one known at {address} before:  {fingerprint(before.key)}")
    _say(f"fingerprint of this client, {name}:  {fingerprint(mine.public)}")
    shown = machine if int(port) == AGENT_PORT else address
    _say(f"see its devices with:  onebox devices --pool {shown}")


def _asked_code(address: str) -> PairingCode:
    """Ask for the code, at a prompt or on standard input: on a command line other users could read it.

    Raises:
        UsageError: The input is empty or not a code.
    """
    if sys.stdin.isatty():
        print(f"code that onebox pair accept has printed on {address.rpartition(':')[0]}: ", end="", flush=True)
    text = sys.stdin.readline(_LONGEST_LINE)
    if not text.strip():
        raise UsageError("no code was given: type the one that onebox pair accept has printed on the agent's machine")
    return read_code(text)


def _remove(name: str) -> None:
    if not remove_client(name):
        names = ", ".join(client.name for client in allowed_clients()) or "none"
        raise UsageError(f"onebox pair remove {name}: there is no such client; those that are accepted: {names}")
    _say(f"{name} is no longer accepted")


def _forget(address: str) -> None:
    if not forget_agent(address):
        known = ", ".join(agent.address for agent in known_agents()) or "none"
        raise UsageError(f"onebox pair forget {address}: there is no such agent; known are: {known}")
    _say(f"the agent at {full_address(address)} is known no longer")


def _list() -> None:
    clients, agents = allowed_clients(), known_agents()
    _say("fingerprints of this user:")
    _rows([("as agent", _own("agent")), ("as client", _own("client"))])
    _say("clients that may lease devices from this user's agents:")
    _rows([(client.name, fingerprint(client.key)) for client in clients])
    _say("agents that this user was paired with:")
    _rows([(agent.address, agent.host, fingerprint(agent.key)) for agent in agents])


def _own(role: Role) -> str:
    key = made_identity(role)
    return "none yet" if key is None else fingerprint(key)


def _rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _say("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if not rows:
        _say("  none")


def _say(text: str) -> None:
    print(text, flush=True)
