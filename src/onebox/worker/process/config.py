"""Messages between a worker and its parent: its configuration, and the endpoints that it has bound."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from onebox.version import __version__
from onebox.worker.faults import Fault

START_S = 90.0
"""How long a worker may take until its ports are bound, mostly for the import of torch."""


SHARING_KEY_BYTES = 32
"""Length of a key of workers that share memory."""


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a worker, written to its standard input by its parent as one line of JSON.

    Args:
        device: ``cpu``, ``cuda:k`` or ``sim``.
        threads: Threads that operators may use.
        public: The worker's public key.
        secret: Its secret key.
        client: The public key of the one client.
        address: Bind address: an IP address, for TCP; or a folder of this machine, for sockets in it.
        quota_bytes: Most bytes of buffers; 0 for no limit.
        faults: For tests.
        speed: Fraction of a CPU's full speed; for ``sim``, the divisor of costs.
        first_port: First of the allowed TCP ports, with ``last_port``; 0 for any. Beside the two of the channel, the
            listeners of groups that form take one of them if it is free.
        last_port: Last of the allowed TCP ports.
        owner: Process id of the owner with which it ends; 0 for its parent.
        cores: Cores of its operators; empty for any.
        sharing: Workers of its pool on its GPU; each has an equal part of the memory unless it has a quota.
        sharing_key: A secret of the workers that share memory with it: those of its owner for one client.
        advertise: The address of this host at which workers of others connect to this one; empty for ``address``, or
            for what the client says where that is a folder: it is on this machine then, and has started this worker.
        most_processes: Most processes and threads of its user, which its lease has for itself; 0 for no limit.
        onebox: The version of what has started it.
    """

    device: str
    threads: int
    public: str
    secret: str
    client: str
    address: str = "127.0.0.1"
    quota_bytes: int = 0
    faults: tuple[Fault, ...] = ()
    speed: float = 1.0
    first_port: int = 0
    last_port: int = 0
    owner: int = 0
    cores: tuple[int, ...] = ()
    sharing: int = 1
    advertise: str = ""
    sharing_key: str = ""
    most_processes: int = 0
    onebox: str = __version__

    @property
    def group_address(self) -> str:
        """The address at which workers of other hosts connect to this one; empty for the client's choice."""
        return self.advertise or ("" if self.address.startswith("/") else self.address)

    @property
    def ports(self) -> range:
        """Allowed TCP ports; empty for any."""
        return range(self.first_port, self.last_port + 1) if self.first_port else range(0)

    def __repr__(self) -> str:  # without the secret
        return f"WorkerConfig(device={self.device!r}, threads={self.threads}, address={self.address!r})"


class _Starter(Struct):
    """The part that a configuration of any version has."""

    onebox: str = ""


def read_config(line: bytes) -> WorkerConfig:
    """Decode a configuration.

    Raises:
        SystemExit: It comes from another version than this one, which was installed while that program ran.
    """
    starter = msgspec.json.decode(line, type=_Starter).onebox
    if starter != __version__:
        raise SystemExit(
            f"onebox {starter} has started this worker, but installed is now onebox {__version__}: "
            "start the program again that runs the other version"
        )
    return msgspec.json.decode(line, type=WorkerConfig)


class Ports(Struct, frozen=True, forbid_unknown_fields=True):
    """Reply of a worker on its standard output, as one line of JSON: the endpoints that it has bound."""

    commands: str
    heartbeats: str


WITH_USERS, STAYS = "users", "stays"
"""Arguments of a zygote: each of its workers takes a user of its own; it stays while it has none."""
