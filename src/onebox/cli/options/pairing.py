"""The options of ``onebox pair`` with its subcommands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from onebox.cli.options.common import IpAddress, Text, check_ip, check_port

PAIRING_PORT = 7172

_Address = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST[:PORT]")]


@dataclass(frozen=True, kw_only=True)
class PairAcceptConfig:
    """Accept a client for the agents that this user runs on this machine.

    A code is printed that works once, for ten minutes; onebox pair connect HOST on the client's machine prompts for it,
    and then each side stores the other's key. An eavesdropper without the code learns nothing useful.

    Args:
        bind: IP address to listen on.
        pairing_port: Port of the pairing, on both sides.

    Raises:
        UsageError: A value is out of range.
    """

    EXAMPLES: ClassVar = ("onebox pair accept", "onebox pair accept --bind 192.168.1.7 --pairing-port 7300")

    bind: IpAddress = "0.0.0.0"
    pairing_port: int = PAIRING_PORT

    def __post_init__(self) -> None:
        check_port("pairing-port", self.pairing_port, least=1)
        check_ip("bind", self.bind)


@dataclass(frozen=True, kw_only=True)
class PairConnectConfig:
    """Pair this client with an agent, on whose machine onebox pair accept has printed a code.

    Args:
        host: The agent's address, as in pool specifications.
        name: Name of this client for others; without it USER@HOST.
        pairing_port: Port of the pairing, on both sides.

    Raises:
        UsageError: A value is out of range.
    """

    EXAMPLES: ClassVar = ("onebox pair connect lab1", "onebox pair connect 192.168.1.7:7171 --name ana")

    host: _Address
    name: Text = None
    pairing_port: int = PAIRING_PORT

    def __post_init__(self) -> None:
        check_port("pairing-port", self.pairing_port, least=1)


@dataclass(frozen=True, kw_only=True)
class PairListConfig:
    """List the clients that this user's agents accept, and the agents that this user was paired with."""


@dataclass(frozen=True, kw_only=True)
class PairRemoveConfig:
    """Stop accepting a client.

    Args:
        client: Its name or fingerprint.
    """

    client: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class PairForgetConfig:
    """Delete the key of an agent.

    Args:
        host: The agent's address.
    """

    host: _Address


PairConfig = PairAcceptConfig | PairConnectConfig | PairListConfig | PairRemoveConfig | PairForgetConfig
