"""Pool specifications: devices of this machine, of hosts where an agent runs, or of a Ray cluster. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from onebox.errors import UsageError
from onebox.files import read_regular
from onebox.pool.discovery import MOST_CPU_WORKERS, is_known
from onebox.pool.keys.keyring import full_address
from onebox.pool.spec_suggestion import suggestion
from onebox.sizes import Budgets, parse_budgets
from onebox.wire.protocol.agents import Offer, Want

POOL_VARIABLE = "ONEBOX_POOL"
"""The environment variable that defines ``auto``."""

GRAMMAR = (
    "'auto'; a list with devices of this machine such as 'cuda', 'cuda:0', 'cpu', 'cpu*3' (and emulated 'cpu@0.5', "
    "'sim*4@2') and of hosts where 'onebox serve' runs such as 'hostA', 'hostB:7171', 'hostA/cuda:0', 'hostA/cuda*2', "
    "'hostA/cpu*2', 'hostA/sim*4'; 'ray' or 'ray://HOST:PORT'; or a file 'NAME.toml'"
)

_FILE_BYTES = 1 << 20
"""Largest file of hosts that is read."""

THIS_MACHINE = "local"
"""Address of this machine in a file of hosts."""

_LOCAL = re.compile(r"(?:auto|cpu|cuda|sim)(?![\w.-])", re.ASCII)
_NUMBERED = re.compile(r"([a-z]{1,20}):\d{1,3}(?!\d)", re.ASCII)
"""An accelerator of an installed package, or a host with a port that no agent has."""

_DEVICE = re.compile(r"auto|cpu(?:\*[1-9]\d{0,2})?|(?:cuda|sim)(?::\d{1,3}|\*[1-9]\d{0,2})?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LocalPart:
    """Devices of this machine.

    Args:
        devices: A specification for :func:`~onebox.pool.discovery.requested_devices`.
        threads: Threads of each worker; ``None`` for an equal share of the cores.
        memory: Limit of each worker's buffers in bytes, in the order of the devices; ``None`` where not specified.
    """

    devices: str
    threads: int | None = None
    memory: Budgets | None = None


@dataclass(frozen=True, kw_only=True)
class AgentPart:
    """Devices of a host where an agent runs.

    Args:
        address: ``HOST`` or ``HOST:PORT``, as written.
        devices: ``auto``, ``cpu``, ``cpu*N``, ``cuda`` (all), ``cuda:K`` or ``cuda*N`` (any N), in order; and
            ``sim`` in the place of ``cuda``, for emulated devices that it offers.
        threads: Threads of each worker; ``None`` for the agent's choice.
        memory: Limit of each worker's buffers in bytes, in the order of the devices; where not specified, a whole GPU
            or the agent's default.
        plain_links: Whether its file asks for connections between hosts that are not encrypted.
    """

    address: str
    devices: tuple[str, ...]
    threads: int | None = None
    memory: Budgets | None = None
    plain_links: bool = False


@dataclass(frozen=True, kw_only=True)
class RayPart:
    """Devices of a Ray cluster.

    Args:
        spec: ``ray`` or a text that begins with ``ray://``, as written.
    """

    spec: str


Part = LocalPart | AgentPart | RayPart


def asked_parts(spec: str, environment: Mapping[str, str], read: Callable[[str], str]) -> tuple[Part, ...]:
    """Return the parts of a specification, in the order of the pool's numbering.

    Args:
        spec: The specification; for ``auto`` the environment may define another.
        environment: Environment variables, of which :data:`POOL_VARIABLE` is read.
        read: Function that returns the text of a file.

    Raises:
        UsageError: The specification is invalid, or the file cannot be read.
    """
    spec, told = spec.strip(), ""
    if spec == "auto" and environment.get(POOL_VARIABLE, "").strip():
        spec, told = environment[POOL_VARIABLE].strip(), f", which {POOL_VARIABLE} names,"
    if not spec.endswith(".toml"):
        return parse_spec(spec)
    try:
        text = read(spec)
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"pool {spec!r}{told} cannot be read: {why}") from None
    return parse_hosts(text, spec)


def read_hosts(name: str) -> str:
    """Return the text of a file of hosts.

    Raises:
        OSError: It cannot be read, or is too large.
        UnicodeDecodeError: It is no text.
    """
    return read_regular(Path(name).expanduser(), _FILE_BYTES).decode()


def parse_spec(spec: str) -> tuple[Part, ...]:
    """Parse a specification that names no file.

    Raises:
        UsageError: The specification is invalid.

    Example:
        >>> [part.address for part in parse_spec("hostA/cuda:0,hostA/cpu*2,hostB:7272")]
        ['hostA', 'hostB:7272']
    """
    if re.match(r"ray(?![\w.-])", spec):
        return (RayPart(spec=spec),)
    return _checked(_merged(_part(text.strip(), spec) for text in spec.split(",")), spec)


def _part(text: str, spec: str) -> LocalPart | AgentPart:
    if not text:
        where = "beside a comma" if "," in spec else "at all"
        raise UsageError(f"pool {spec!r} names nothing {where}; allowed: {GRAMMAR}")
    numbered = _NUMBERED.match(text)
    if _LOCAL.match(text) or (numbered and is_known(numbered[1])):
        return LocalPart(devices=text)
    address, slash, device = text.partition("/")
    try:
        full_address(address)
    except UsageError:
        near = suggestion(text)
        raise UsageError(f"pool {spec!r} is not understood at {text!r}{near}; allowed: {GRAMMAR}") from None
    return AgentPart(address=address, devices=(_device(device, text, spec) if slash else "auto",))


def _device(device: str, text: str, spec: str) -> str:
    if not _DEVICE.fullmatch(device):
        allowed = "of another host cpu, cpu*N, cuda (all), cuda:K, cuda*N (any N), auto, or sim likewise"
        raise UsageError(f"pool {spec!r} is not understood at {text!r}: it asks for {device!r}; allowed: {allowed}")
    return device


def _merged(parts: Iterable[LocalPart | AgentPart]) -> list[LocalPart | AgentPart]:
    """Merge neighbouring parts of one host."""
    found: list[LocalPart | AgentPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(last, LocalPart) and isinstance(part, LocalPart):
            found[-1] = replace(last, devices=f"{last.devices},{part.devices}")
        elif isinstance(last, AgentPart) and isinstance(part, AgentPart) and _key(last) == _key(part):
            found[-1] = replace(last, devices=last.devices + part.devices)
        else:
            found.append(part)
    return found


def _key(part: LocalPart | AgentPart) -> str:
    return full_address(part.address) if isinstance(part, AgentPart) else ""


def _checked(parts: Sequence[LocalPart | AgentPart], spec: str) -> tuple[Part, ...]:
    """Require that each host occurs once: a lease of some of its devices could not wait for another of the same
    pool."""
    keys = [_key(part) for part in parts]
    twice = next((part for part in parts if keys.count(_key(part)) > 1), None)
    if twice is not None:
        name = twice.address if isinstance(twice, AgentPart) else "this machine"
        raise UsageError(f"pool {spec!r} has devices of {name} in two places; name those of one host side by side")
    return tuple(parts)


# ---- a file of hosts


class _Host(Struct, frozen=True, forbid_unknown_fields=True):
    address: str
    devices: tuple[str, ...] | str = "auto"
    memory: int | str | tuple[int | str, ...] | None = None
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None


class _Hosts(Struct, frozen=True, forbid_unknown_fields=True):
    hosts: Annotated[tuple[_Host, ...], Meta(min_length=1)]
    plain_links: bool = False


def parse_hosts(text: str, name: str) -> tuple[Part, ...]:
    """Parse a file of hosts, which has a table ``[[hosts]]`` for each.

    Args:
        text: TOML. Each host has an ``address`` (``local`` for this machine), and may have ``devices`` (a list, as
            behind the slash of a specification), ``memory`` (bytes of each worker, or text such as ``8GiB``; or a list
            with one for each of its devices) and ``threads`` (of each worker). ``plain_links`` is as of
            :func:`onebox.open`.
        name: Name of the file, for messages.

    Raises:
        UsageError: The file is invalid; an unknown key is named.
    """
    try:
        file = msgspec.convert(tomllib.loads(text), _Hosts)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"pool {name!r} is no TOML: {error}") from None
    except msgspec.ValidationError as error:
        allowed = "tables [[hosts]] with address, and if need be devices, memory and threads; and plain_links"
        raise UsageError(f"pool {name!r}: {error}; allowed are {allowed}") from None
    return _checked([_host_part(host, name, file.plain_links) for host in file.hosts], name)


def _host_part(host: _Host, name: str, plain_links: bool) -> LocalPart | AgentPart:
    devices = (host.devices,) if isinstance(host.devices, str) else host.devices
    what = f"pool {name!r}: memory of {host.address}"
    memory = None if host.memory is None else parse_budgets(what, host.memory)
    if host.address == THIS_MACHINE:
        return LocalPart(devices=",".join(devices), threads=host.threads, memory=memory)
    full_address(host.address)
    wanted = tuple(_device(device, f"{host.address}/{device}", name) for device in devices)
    if not wanted:
        raise UsageError(f"pool {name!r} wants no device of {host.address}; leave devices out for all")
    return AgentPart(address=host.address, devices=wanted, threads=host.threads, memory=memory, plain_links=plain_links)


# ---- devices to lease


def wants(part: AgentPart, offers: Sequence[Offer]) -> tuple[Want, ...]:
    """Return the devices to lease from an agent.

    Args:
        part: The requested devices.
        offers: The agent's offers.

    Raises:
        UsageError: It offers no such devices, one device is requested twice, or the numbers of memory limits and
            devices differ.
    """
    names = [name for device in part.devices for name in _expand(device, part.address, offers)]
    twice = next((name for name in names if ":" in name and names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} of {part.address} is asked for twice")
    cores = sum(offer.threads for offer in offers if offer.device == "cpu")
    share = max(1, cores // max(1, names.count("cpu")))  # the same for a worker that is restarted by itself
    quotas = (part.memory or Budgets()).of(len(names), part.address)
    return tuple(
        Want(name, part.threads or (share if name == "cpu" else 0), quota)
        for name, quota in zip(names, quotas, strict=True)
    )


def _expand(device: str, address: str, offers: Sequence[Offer]) -> list[str]:
    cores = sum(offer.threads for offer in offers if offer.device == "cpu")
    name, _, count = device.partition("*")
    kind = "cuda" if name == "auto" else name.partition(":")[0]
    numbered = [offer.device for offer in offers if offer.device.startswith(f"{kind}:")]
    if name == "auto":
        found = numbered or ["cpu"] * min(cores, MOST_CPU_WORKERS)
    elif name == "cpu":
        found = ["cpu"] * int(count or 1) if cores else []
    elif count:
        found = [kind] * int(count) if int(count) <= len(numbered) else []
    else:
        found = numbered if name == kind else [each for each in numbered if each == name]
    if not found:
        offered = ", ".join(offer.device for offer in offers) or "nothing"
        raise UsageError(f"{address} has no {device} to lease; it offers {offered}")
    return found
