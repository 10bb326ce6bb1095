"""The keyring of a user: its identities towards agents and clients, and its known peers.

Four JSON files in one folder: the secret keys of the two roles, the agents that the client was paired with, and the
clients that the agent accepts.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import time
from pathlib import Path
from typing import Literal

import zmq
from msgspec import Struct
from zmq.utils import z85

from onebox.errors import UsageError
from onebox.pool.keys.key_files import changing, read, write
from onebox.wire import KeyPair, new_keys
from onebox.wire.protocol.agents import AGENT_PORT

Role = Literal["client", "agent"]

AGAIN_S = 1.0
"""Interval at which a list of clients that could not be read is read again."""

NAME_LENGTH = 128
"""The longest name of a client or a host, in characters."""


class KnownAgent(Struct, frozen=True, forbid_unknown_fields=True):
    """An agent that this client was paired with.

    Args:
        address: Its address, ``HOST:PORT``.
        key: Its public CURVE key.
        host: The name of its host, as it reported it.
    """

    address: str
    key: str
    host: str


class AllowedClient(Struct, frozen=True, forbid_unknown_fields=True):
    """A client that this agent accepts.

    Args:
        name: Its unique name, such as ``ana@desk``.
        key: Its public CURVE key.
    """

    name: str
    key: str


def config_folder() -> Path:
    """Return the configuration folder: ``$ONEBOX_CONFIG``, else ``onebox`` in the user's folder for configuration.

    The user's folder is that of the XDG base directory specification.

    Raises:
        UsageError: The user has no home folder.
    """
    own = os.environ.get("ONEBOX_CONFIG")
    if own:
        return Path(own).expanduser().absolute()
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        base = named if named.is_absolute() else Path.home() / ".config"  # the specification ignores relative paths
    except RuntimeError:
        raise UsageError("there is no home to keep keys in; name a folder in ONEBOX_CONFIG") from None
    return base / "onebox"


def identity(role: Role) -> KeyPair:
    """Return this user's lasting keys in a role; they are created on first use.

    Args:
        role: ``client`` towards agents, ``agent`` towards clients.

    Raises:
        UsageError: The file is damaged, other users can read it, or it cannot be written.
    """
    path = config_folder() / f"{role}.key.json"
    found = read(path, KeyPair, secret=True)
    if found is None:
        keys = new_keys()
        with changing(path):
            if read(path, KeyPair, secret=True) is None:  # no other process was faster
                write(path, keys)
        found = read(path, KeyPair, secret=True)
    if found is None or not _belong(found):
        raise UsageError(f"{path} is damaged: it holds no pair of keys; delete it to get new ones, and pair again")
    return found


def made_identity(role: Role) -> str | None:
    """Return this user's public key in a role; ``None`` where it has not been created yet.

    Raises:
        UsageError: The file is damaged, or other users can read it.
    """
    path = config_folder() / f"{role}.key.json"
    return None if read(path, KeyPair, secret=True) is None else identity(role).public


def fingerprint(public: str) -> str:
    """Return the text by which a user recognises a key: 160 bits of its hash, in eight groups.

    Args:
        public: A public CURVE key in Z85.

    Raises:
        UsageError: It is not a key.

    Example:
        >>> fingerprint("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7")
        '2yph:djbn:thw7:gjwt:j7zs:c5q2:zsbv:a4ea'
    """
    digest = hashlib.blake2b(_raw(public), digest_size=20, person=b"onebox key print").digest()
    text = base64.b32encode(digest).decode().lower()
    return ":".join(text[start : start + 4] for start in range(0, len(text), 4))


def is_key(text: str) -> bool:
    """Return whether a text is a CURVE key in Z85."""
    try:
        return len(_raw(text)) == 32
    except UsageError:
        return False


# ---- agents that a client knows


def known_agents() -> tuple[KnownAgent, ...]:
    """Return the agents that this client was paired with, in the order of their addresses.

    Raises:
        UsageError: The file is damaged, or other users can write to it.
    """
    path = _agents_file()
    found = read(path, tuple[KnownAgent, ...]) or ()
    _check_entries(path, [(agent.address, agent.key) for agent in found])
    return found


def full_address(address: str) -> str:
    """Return an agent's address with its port, in the canonical form under which its key is stored.

    Args:
        address: ``HOST`` or ``HOST:PORT``; an IPv6 address in brackets.

    Raises:
        UsageError: The address is invalid.

    Example:
        >>> full_address("Lab-1")
        'lab-1:7171'
    """
    match = re.fullmatch(r"([\w.-]+|\[[0-9a-f:.%\w]+\])(?::(\d{1,5}))?", address.strip().lower(), re.ASCII)
    port = AGENT_PORT if match is None or match[2] is None else int(match[2])
    if match is None or not 1 <= port <= 65535:
        raise UsageError(f"{address!r} is no address of an agent: allowed are HOST and HOST:PORT; IPv6 in brackets")
    return f"{match[1]}:{port}"


def known_agent(address: str) -> KnownAgent | None:
    """Return the agent at an address, if this client was paired with it.

    Args:
        address: ``HOST`` or ``HOST:PORT``, with the host name or number used for the pairing.

    Raises:
        UsageError: The address is invalid; the file is damaged, or other users can write to it.
    """
    address = full_address(address)
    return next((agent for agent in known_agents() if agent.address == address), None)


def remember_agent(agent: KnownAgent) -> None:
    """Store an agent's key, in place of an earlier one at that address.

    Raises:
        UsageError: The file is damaged, other users can write to it, or it cannot be written.
    """
    agent = KnownAgent(full_address(agent.address), agent.key, agent.host)
    if not is_key(agent.key) or not is_name(agent.host):
        raise UsageError(f"{agent.address} gave {agent.host!r} for its host, {agent.key!r} for its key: not to be kept")
    with changing(_agents_file()) as path:
        others = [each for each in known_agents() if each.address != agent.address]
        write(path, sorted([*others, agent], key=lambda each: each.address))


def forget_agent(address: str) -> bool:
    """Remove the agent at an address, and return whether it was known.

    Raises:
        UsageError: The file is damaged, other users can write to it, or it cannot be written.
    """
    address = full_address(address)
    if known_agent(address) is None:
        return False
    with changing(_agents_file()) as path:
        write(path, [each for each in known_agents() if each.address != address])
    return True


# ---- clients that an agent accepts


def clients_file() -> Path:
    """Return the file of the clients that this user's agents accept."""
    return config_folder() / "clients.json"


class AllowedClients:
    """The clients that an agent accepts, read again whenever their file changes.

    Args:
        path: The file; by default that in the user's folder. It need not exist yet.

    Raises:
        UsageError: It is damaged, or other users can write to it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = clients_file() if path is None else path
        self._seen = self._state()
        self._names = self._load()
        self.problem: str | None = None
        """The problem with the file for which no client is accepted at the moment."""
        self._again_s = 0.0  # time from which a file with a problem is read again, though it looks the same

    def name(self, public_key: str) -> str | None:
        """Return the name of the client with a key; ``None`` where it is not accepted.

        A file that becomes invalid while an agent runs rejects every client.

        Args:
            public_key: The key, in Z85.
        """
        self._refresh()
        return self._names.get(public_key)

    def __len__(self) -> int:
        """Return the number of clients."""
        self._refresh()
        return len(self._names)

    def _refresh(self) -> None:
        state = self._state()
        if state == self._seen and (self.problem is None or time.monotonic() < self._again_s):
            return
        try:
            self._names, self.problem = self._load(), None
        except (UsageError, OSError) as error:  # which may pass, such as where there is no descriptor left
            self._names, self.problem = {}, str(error)
            self._again_s = time.monotonic() + AGAIN_S
        self._seen = state

    def _load(self) -> dict[str, str]:
        return {client.key: client.name for client in _clients(self._path)}

    def _state(self) -> tuple[int, ...] | None:
        """Return a value that changes with the file: each writer replaces it."""
        try:
            about = self._path.stat()
        except OSError:
            return None
        return about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_size


def allowed_clients() -> tuple[AllowedClient, ...]:
    """Return the clients that this user's agents accept, in the order of their names.

    Raises:
        UsageError: The file is damaged, or other users can write to it.
    """
    return _clients(clients_file())


def allow_client(name: str, key: str) -> str:
    """Accept a client from now on.

    Args:
        name: The name that others see.
        key: Its public CURVE key; one that is accepted already gets the new name.

    Returns:
        Its name, which differs from ``name`` where a client with another key has that one.

    Raises:
        UsageError: The key or name is invalid; the file is damaged, other users can write to it, or it cannot be
            written.
    """
    if not is_key(key):
        raise UsageError(f"{key!r} is no public key: one has 40 characters of Z85")
    if not is_name(name):
        raise UsageError(f"{name!r} is no name: allowed are 1 to {NAME_LENGTH} characters that can be printed")
    with changing(clients_file()) as path:
        others = [client for client in _clients(path) if client.key != key]
        taken = {client.name for client in others}
        free = next(each for number in range(1, len(others) + 2) if (each := _numbered(name, number)) not in taken)
        write(path, sorted([*others, AllowedClient(free, key)], key=lambda client: client.name))
    return free


def remove_client(name: str) -> bool:
    """Stop accepting a client, and return whether it was accepted.

    Args:
        name: Its name, or the fingerprint of its key.

    Raises:
        UsageError: The file is damaged, other users can write to it, or it cannot be written.
    """
    found = [client for client in allowed_clients() if name in (client.name, fingerprint(client.key))]
    if not found:
        return False
    with changing(clients_file()) as path:
        write(path, [client for client in _clients(path) if client not in found])
    return True


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a client or a host: it is printed, so it must not contain terminal
    escapes."""
    return 0 < len(text) <= NAME_LENGTH and text.isprintable()


def _numbered(name: str, number: int) -> str:
    if number == 1:
        return name
    end = f" ({number})"
    return name[: NAME_LENGTH - len(end)] + end


def _clients(path: Path) -> tuple[AllowedClient, ...]:
    found = read(path, tuple[AllowedClient, ...]) or ()
    _check_entries(path, [(client.name, client.key) for client in found])
    if len({client.key for client in found}) < len(found):
        raise UsageError(f"{path} is damaged: a key is in it twice; delete it and pair again, or mend it")
    return found


def _agents_file() -> Path:
    return config_folder() / "agents.json"


def _raw(key: str) -> bytes:
    """Return the 32 bytes of a key."""
    try:
        if len(key) == 40:
            return z85.decode(key.encode("ascii"))
    except (ValueError, KeyError, struct.error):  # invalid Z85, or groups of five digits that are too large
        pass
    raise UsageError(f"{key!r} is no public key: one has 40 characters of Z85")


def _belong(keys: KeyPair) -> bool:
    """Return whether the public key belongs to the secret key."""
    if not is_key(keys.public) or not is_key(keys.secret):
        return False
    return zmq.curve_public(keys.secret.encode()).decode() == keys.public


def _check_entries(path: Path, entries: list[tuple[str, str]]) -> None:
    names = [name for name, _ in entries]
    if len(set(names)) < len(names) or not all(is_name(name) and is_key(key) for name, key in entries):
        raise UsageError(f"{path} is damaged: it needs names, each once, with public keys; delete it and pair again")
