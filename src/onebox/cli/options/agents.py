"""The options of the commands for pools of several machines: ``serve``, ``status`` and ``logs``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from onebox.cli.options.common import (
    Address,
    Bytes,
    Duration,
    File,
    Flag,
    Ids,
    Int,
    IpAddress,
    PoolSpec,
    PortRange,
    Seconds,
    Text,
    at_least,
    check_ip,
    check_page,
    check_port,
)
from onebox.errors import UsageError
from onebox.sizes import parse_size

AGENT_PORT = 7171

USER_IDS = "60800-61055"
"""Ids of users of leases: a part of those that systemd's overview leaves unused (60706 to 61183,
https://systemd.io/UIDS-GIDS), which containers have, too."""

_MOST_IDS = 4096
_NOBODY = 65534


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Offer this machine's devices to the clients that were paired with it, until Ctrl-C.

    An unprivileged worker process is started for each device, or part of one, that a client leases. Events are printed
    as JSON lines.

    Args:
        devices: Devices to offer: auto (all GPUs and the CPU), or a list such as cuda:0,cuda:1 or cuda,cpu; sim*8
            offers eight emulated devices, which compute nothing.
        memory: Limit of the offered memory of each device, such as 20GiB; without it all.
        cores: Limit of the offered cores; without it all that this process may use.
        bind: IP address to listen on: 0.0.0.0 for all of this machine's, 127.0.0.1 for this machine alone.
        port: Port to listen on; 0 for any free one.
        worker_ports: TCP ports for workers, three for each, such as 7200-7299; without it any free ones, from 49152.
        advertise: Address of this machine that clients and other workers connect to, if it is not the one that it
            listens on: behind a NAT (then --bind names this machine's own), or with several networks.
        max_devices_per_client: The most workers that one client may have; 0 for no limit.
        max_memory_per_client: The most memory that one client may have on all devices, such as 20GiB; without it there
            is no limit. A client that names no amount gets what it may have.
        max_cores_per_client: The most cores that one client may have; 0 for no limit.
        max_lease: Seconds after which a lease ends, in use or not; without it there is no limit.
        user: User whose groups workers have, such as those that may use GPUs, if root starts this.
        user_ids: User ids for workers, if root starts this: each lease has one of its own, which nobody else has.
        allow_root: Let workers run as root, as in a container that has no other user.
        import_per_client: Import PyTorch anew in each worker, which takes a second, so that no client's workers have
            the memory addresses of another's.
        journal: A file for the JSON lines, too; onebox logs also shows its earlier lines.
        metrics_port: Serve metrics for Prometheus on this port, 0 for any free one; without it there are none.
        metrics_address: IP address for metrics. They are not encrypted; everybody who can reach it can read them.
        page: Show this machine's devices on a page in a browser, at an address of this machine that is printed.
        page_port: Port of that page; 0 for any free one.

    Raises:
        UsageError: A value is out of range.
    """

    EVERYDAY: ClassVar = ("devices", "memory", "cores", "port", "user", "worker_ports", "advertise")

    EXAMPLES: ClassVar = (
        "onebox serve",
        "onebox serve --devices cuda:0 --memory 20GiB --cores 8 --worker-ports 7200-7299",
        "onebox serve --advertise 192.168.1.7 --metrics-port 9400",
    )

    devices: PoolSpec = "auto"
    memory: Bytes = None
    cores: Int = None
    bind: IpAddress = "0.0.0.0"
    port: int = AGENT_PORT
    worker_ports: PortRange = None
    advertise: Address = None
    max_devices_per_client: int = 0
    max_memory_per_client: Bytes = None
    max_cores_per_client: int = 0
    max_lease: Seconds = None
    user: Text = None
    user_ids: Ids = USER_IDS
    allow_root: Flag = False
    import_per_client: Flag = False
    journal: File = None
    metrics_port: Int = None
    metrics_address: IpAddress = "127.0.0.1"
    page: Flag = False
    page_port: int = 0

    def __post_init__(self) -> None:
        at_least(0, max_devices_per_client=self.max_devices_per_client, max_cores_per_client=self.max_cores_per_client)
        at_least(1, cores=self.cores)
        check_port("port", self.port, least=0)
        check_port("metrics-port", self.metrics_port, least=0)
        check_ip("bind", self.bind)
        check_ip("metrics-address", self.metrics_address)
        check_page(page=self.page, port=self.page_port)
        if self.max_lease is not None and not 0 < self.max_lease < math.inf:
            raise UsageError(f"--max-lease {self.max_lease}: allowed are seconds above 0")
        _ = self.memory_bytes, self.client_memory_bytes, self.port_range, self.user_id_range

    @property
    def user_id_range(self) -> range:
        """``user_ids`` as numbers."""
        first, dash, last = self.user_ids.partition("-")
        ids = range(int(first), int(last) + 1) if dash and first.isdecimal() and last.isdecimal() else range(0)
        if not ids or not 100 <= ids.start < ids.stop < 1 << 31 or len(ids) > _MOST_IDS or _NOBODY in ids:
            raise UsageError(
                f"--user-ids {self.user_ids}: allowed are two numbers and those between, at most {_MOST_IDS}, from 100 "
                f"on and without {_NOBODY} (nobody), such as {USER_IDS}"
            )
        return ids

    @property
    def port_range(self) -> range:
        """``worker_ports`` as numbers; empty for any."""
        if self.worker_ports is None:
            return range(0)
        first, dash, last = self.worker_ports.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and 1024 <= int(first) < int(last) <= 65535):
            raise UsageError(
                f"--worker-ports {self.worker_ports}: allowed are two ports and those between, from 1024 to 65535, "
                "such as 7200-7299"
            )
        return range(int(first), int(last) + 1)

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else parse_size("--memory", self.memory)

    @property
    def client_memory_bytes(self) -> int:
        """``max_memory_per_client`` in bytes; 0 for no limit."""
        text = self.max_memory_per_client
        return 0 if text is None else parse_size("--max-memory-per-client", text)


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show what agents offer, with holders, queues and load; nothing is leased.

    On a terminal the table stays until Ctrl-C; elsewhere it is printed once.

    Args:
        pool: Hosts, such as lab1,lab2:7171, or a file NAME.toml; without it all that this client was paired with.
        once: Print it once.
        json: Print a JSON list, once.
        interval: Seconds between two queries of the agents.

    Raises:
        UsageError: A value is out of range.
    """

    EXAMPLES: ClassVar = ("onebox status", "onebox status --pool lab1,lab2:7171 --once --json")

    pool: PoolSpec = "auto"
    once: Flag = False
    json: Flag = False
    interval: Duration = 1.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 3600:
            raise UsageError(f"--interval {self.interval}: allowed are 0.1 to 3600 seconds")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Show agents, or a training run from its folder, on a page in a browser, until Ctrl-C.

    The page is read-only. It is served on this machine alone, at an address that is printed, with a token in it. A run
    that is to be shown with all it does is started with onebox train --page.

    Args:
        target: Hosts where onebox serve runs, such as lab1,lab2:7171; or the folder of a run, which may go on or have
            ended; without it the newest run in ./runs.
        port: Port of the page; 0 for any free one.
        open: Open the page in the browser of this machine, too.

    Raises:
        UsageError: A value is out of range.
    """

    EXAMPLES: ClassVar = ("onebox watch", "onebox watch runs/digits --open", "onebox watch lab1,lab2 --port 8000")

    target: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="HOST|RUN_FOLDER", help_behavior_hint="")
    ] = None
    port: int = 0
    open: Flag = False

    def __post_init__(self) -> None:
        check_port("port", self.port, least=0)


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    """Print the newest lines of an agent's log: JSON objects, one a line.

    Args:
        host: The agent's address.
        lines: Number of lines, up to 1000.

    Raises:
        UsageError: A value is out of range.
    """

    EXAMPLES: ClassVar = ("onebox logs lab1 --lines 200",)

    host: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST[:PORT]")]
    lines: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.lines <= 1000:
            raise UsageError(f"--lines {self.lines}: allowed are 1 to 1000")
