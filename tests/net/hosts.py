"""Hosts on a network, on one machine: namespaces that share a switch, each with a name and addresses of its own.

The switch is a bridge in a namespace, too, so nothing of the machine's own network is touched. All is removed at the
end, and what an earlier run left that was killed is removed first. It takes root, ``ip`` of iproute2 and ``unshare``;
limits take ``tc`` and the kernel's token bucket, and delays its TAP driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TOOL_S = 60.0
_PREFIX = "onebox-net"
_LISTEN = "0A"  # of include/net/tcp_states.h
_NEW_NET = 0x40000000  # CLONE_NEWNET of sched.h; os.setns came with Python 3.12
_libc = ctypes.CDLL(None, use_errno=True)


def tool(*command: str) -> str:
    """Run a tool and return what it prints.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def unavailable() -> str:
    """Return why this machine cannot have hosts, or nothing where it can."""
    if os.geteuid():
        return "network namespaces take root"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here; install iproute2 and util-linux"
    try:
        _sweep()
        with Network(["probe"]):
            return ""
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces are not allowed here: {error}"


class Host:
    """A host: made by :class:`Network`.

    Args:
        name: Its host name.
        space: Its namespace.
        address: Its address on the switch.
        switch: The switch's namespace.
        port: Its port there.
    """

    def __init__(self, name: str, space: str, address: str, switch: str, port: str) -> None:
        self.name = name
        self.space = space
        self.address = address
        self.ahead_s = 0
        """How far the monotonic clock of processes that it starts is ahead of this machine's, in a time namespace."""
        self._switch = switch
        self._port = port

    def command(self, *command: str) -> list[str]:
        """Return a command that runs another one on this host; the process stays the same from one to the other."""
        named = 'hostname "$0" && exec "$@"'
        clock = ["--time", "--monotonic", str(self.ahead_s)] if self.ahead_s else []
        return ["ip", "netns", "exec", self.space, "unshare", "--uts", *clock, "sh", "-c", named, self.name, *command]

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host, without input; its output goes to a file, or nowhere.

        Whoever starts it ends it; what is left when the network is closed is killed.
        """
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(output.open("ab")) if output else subprocess.DEVNULL
            return subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if output else subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, given: str = "", timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end; what is given comes on its standard input."""
        return subprocess.run(
            self.command(*command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            check=False,
            input=given,
        )

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread, and the threads and processes that it starts inside, be on this host's network."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.space}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def plug(self, plugged: bool) -> None:
        """Put its cable into the switch, or pull it out; as if there were another switch between, nobody is told.

        The kernel may take a second to act on a link that comes up, which would make a cut longer than was asked for.
        """
        tool("ip", "-n", self._switch, "link", "set", self._port, *(("master", "bridge") if plugged else ("nomaster",)))

    def block(self, address: str, blocked: bool) -> None:
        """Drop what this host sends to an address, or no longer."""
        tool("ip", "-n", self.space, "route", "add" if blocked else "delete", "blackhole", f"{address}/32")

    def add_address(self, address: str, device: str) -> None:
        """Give it another network card that leads nowhere, with an address."""
        tool("ip", "-n", self.space, "link", "add", device, "type", "bridge")
        tool("ip", "-n", self.space, "address", "add", f"{address}/24", "dev", device)
        tool("ip", "-n", self.space, "link", "set", device, "up")

    def limit(self, rate_bps: int, burst: str = "64kb") -> None:
        """Let no more than so many bits a second in and out, by token buckets; what waits longer is lost.

        Raises:
            RuntimeError: The kernel has no such queue.
        """
        for space, device in ((self.space, "eth0"), (self._switch, self._port)):
            queue = ("root", "tbf", "rate", f"{rate_bps}bit", "burst", burst, "latency", "200ms")
            tool("tc", "-n", space, "qdisc", "replace", "dev", device, *queue)

    def unlimit(self) -> int:
        """Lift the limit, and return how often it held something up."""
        held = 0
        for space, device in ((self.space, "eth0"), (self._switch, self._port)):
            (queue,) = json.loads(tool("tc", "-n", space, "-s", "-j", "qdisc", "show", "dev", device))
            held += int(queue["overlimits"])
            tool("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
        return held

    def processes(self) -> list[int]:
        """Return the processes on this host."""
        return [int(process) for process in tool("ip", "netns", "pids", self.space).split()]

    def listening(self, process: int) -> list[str]:
        """Return the addresses at which a process of this host waits for TCP connections, one for each socket."""
        own = {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
        found = []
        for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                found.append(socket.inet_ntoa(bytes.fromhex(fields[1].partition(":")[0])[::-1]))
        return found

    def traffic_bytes(self) -> int:
        """Return how many bytes came in and went out by its network card."""
        (link,) = json.loads(tool("ip", "-n", self.space, "-s", "-j", "link", "show", "eth0"))
        return int(link["stats64"]["rx"]["bytes"]) + int(link["stats64"]["tx"]["bytes"])


class Network:
    """A switch and hosts on it, by their names; a context manager.

    Args:
        names: Of the hosts; their addresses are 10.77.0.1 and on.
        delay_s: Seconds that a packet takes from one host to another, beside the time that limits of rates cost.

    Raises:
        RuntimeError: It cannot be made; nothing is left of it.
    """

    def __init__(self, names: Sequence[str], delay_s: float = 0.0) -> None:
        self._id = f"{_PREFIX}-{os.getpid()}-{os.urandom(3).hex()}"
        self._spaces: list[str] = []
        self._forwarders: list[subprocess.Popen[bytes]] = []
        self.hosts: dict[str, Host] = {}
        try:
            switch = self._switch = self._space("switch")
            tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            tool("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names, 1):
                self.hosts[name] = self._host(name, switch, number)
            if delay_s:
                self._delay(delay_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove them. Idempotent."""
        while self._spaces:
            _remove(self._spaces.pop())
        for forwarder in self._forwarders:  # all that runs there was killed
            forwarder.wait(TOOL_S)

    def hide(self, name: str, inner: str, ports: Sequence[str]) -> Host:
        """Add a host behind a router that translates addresses, of which some ports lead to it.

        Without ``nft`` a program forwards those ports, and the host cannot connect to any other.

        Args:
            name: Of the host; the address by which others know it is the router's.
            inner: Its own address.
            ports: Of TCP: a port, or the first and the last with a dash between.

        Raises:
            RuntimeError: The kernel translates no addresses.
        """
        router = self._host(f"{name}-router", self._switch, 100)
        space, gateway = self._space(name), f"{inner.rpartition('.')[0]}.1"
        tool(
            "ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", "inner", "netns", router.space
        )
        for where, device, address in ((space, "eth0", inner), (router.space, "inner", gateway)):
            tool("ip", "-n", where, "address", "add", f"{address}/24", "dev", device)
            tool("ip", "-n", where, "link", "set", device, "up")
        tool("ip", "-n", space, "route", "add", "default", "via", gateway)
        self.hosts[name] = Host(name, space, router.address, router._switch, router._port)
        if shutil.which("nft") is None:
            self._forward(router, inner, ports)
            return self.hosts[name]
        rules = (
            "add table ip nat; add chain ip nat in { type nat hook prerouting priority -100; }; "
            "add chain ip nat out { type nat hook postrouting priority 100; }; "
            f'add rule ip nat in iifname "eth0" tcp dport {{ {", ".join(ports)} }} dnat to {inner}; '
            'add rule ip nat out oifname "eth0" masquerade'
        )
        inside = ("ip", "netns", "exec", router.space)
        tool(*inside, "nft", rules)
        tool(*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        return self.hosts[name]

    def _forward(self, router: Host, inner: str, ports: Sequence[str]) -> None:
        self._program(router.space, "port_forwarder.py", router.address, inner, *ports)

    def _delay(self, delay_s: float) -> None:
        """Replace the cables of all hosts by some on which a packet takes half of the time."""
        for host in self.hosts.values():
            tool("ip", "-n", host._switch, "link", "delete", host._port)
        cables = [f"{host.space}=eth0={host._switch}={host._port}" for host in self.hosts.values()]
        self._program(self._switch, "delay_line.py", repr(delay_s / 2), *cables)
        for host in self.hosts.values():
            _connect(host.space, host.address, host._switch, host._port)

    def _program(self, space: str, name: str, *arguments: str) -> None:
        """Run a program of this folder in a namespace until the network is closed; return when it is ready."""
        with tempfile.NamedTemporaryFile() as said:
            program, output = Path(__file__).with_name(name), Path(said.name)
            command = ("ip", "netns", "exec", space, sys.executable, str(program), *arguments)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            self._forwarders.append(process)
            end_s = time.monotonic() + TOOL_S
            while not (printed := output.read_text()).startswith("ready"):
                if time.monotonic() > end_s or process.poll() is not None:
                    raise RuntimeError(f"{name} does not start: {printed.strip()}")
                time.sleep(0.05)

    def _space(self, name: str) -> str:
        space = f"{self._id}-{name}"
        tool("ip", "netns", "add", space)
        self._spaces.append(space)
        tool("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def _host(self, name: str, switch: str, number: int) -> Host:
        space, port, address = self._space(name), f"port{number}", f"10.77.0.{number}"
        tool("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        _connect(space, address, switch, port)
        return Host(name, space, address, switch, port)


@contextlib.contextmanager
def cut(host: Host, for_s: float) -> Iterator[threading.Thread]:
    """Pull a host's cable, and put it back after a while from a thread; it is in again in any case afterwards."""

    def mend() -> None:
        ended.wait(for_s)
        host.plug(True)

    ended = threading.Event()
    thread = threading.Thread(target=mend)
    host.plug(False)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def crawl(host: Host, share: float = 0.05, period_s: float = 0.5) -> Iterator[None]:
    """Let all that is on a host run for a small share of the time only: stopped, continued, stopped, ..."""

    def drag() -> None:
        while not ended.is_set():
            _signal(host, signal.SIGSTOP)
            ended.wait(period_s * (1 - share))
            _signal(host, signal.SIGCONT)
            ended.wait(period_s * share)

    ended = threading.Event()
    thread = threading.Thread(target=drag)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _signal(host: Host, number: signal.Signals) -> None:
    for process in host.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _NEW_NET):
        raise OSError(ctypes.get_errno(), "setns")


def _connect(space: str, address: str, switch: str, port: str) -> None:
    """Put one end of a cable into the switch, and give the other one an address."""
    tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    tool("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
    tool("ip", "-n", space, "link", "set", "eth0", "up")


def _remove(space: str) -> None:
    """Kill the processes of a namespace, which are all ours, and remove it."""
    end_s = time.monotonic() + TOOL_S
    while (left := tool("ip", "netns", "pids", space).split()) and time.monotonic() < end_s:
        for process in map(int, left):
            if process != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    tool("ip", "netns", "delete", space)


def _sweep() -> None:
    """Remove the namespaces of runs whose process is gone."""
    for line in tool("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{_PREFIX}-") and not Path(f"/proc/{name.split('-')[2]}").exists():
            _remove(name)
