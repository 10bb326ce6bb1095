"""The specification of a pool on a Ray cluster, and its translation to Ray's resources. Pure: the nodes are an
argument."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onebox.errors import UsageError
from onebox.sizes import parse_size

RAY_PORT = 10001
"""Default port of a Ray cluster's head for clients from outside."""

WAIT_S = 60.0
"""Default wait for the cluster to have room."""

_A_LITTLE = 0.001
"""The share of a resource that marks a property of its node (GPU type, address), as Ray does it."""

GPU_MEMORY = "onebox-gpu-memory"
"""A label that nodes may be started with, such as ``80GiB``: the memory of each of their GPUs."""

_NODE = "ray.io/node-id"
"""Ray's own node label."""

_GRAMMAR = (
    "'ray' or 'ray://HOST:PORT', then, each behind a slash: devices ('cuda', 'cuda*4', 'cpu*2', 'cuda*4+cpu*2'), "
    "'spread' or 'pack', 'type=A100' (of the GPUs), 'memory=40g' (of each device), 'threads=4', 'wait=60' (seconds)"
)

_DEVICES = re.compile(r"(?:cuda|cpu)(?:\*[^+]*)?(?:\+(?:cuda|cpu)(?:\*[^+]*)?)*")
_DEVICE = re.compile(r"(?P<kind>cuda|cpu)(?:\*(?P<count>[1-9]\d{0,3}))?")
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?")
_TYPE = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class RayRequest:
    """A parsed request for devices of a Ray cluster.

    Args:
        spec: The specification as written, for messages.
        address: Host and port of the cluster's head; ``None`` for the cluster that this machine is a node of.
        devices: Kinds and numbers of devices; ``None`` for all of the kind. With none at all, all GPUs of the cluster
            or, where it has none, a CPU worker on every node.
        strategy: Whether the devices are to be spread over the nodes, or packed onto few.
        gpu_type: Ray's name of the GPUs' product, such as ``A100``.
        memory_bytes: Least memory of each device, and limit of its buffers; 0 for no limit.
        threads: Threads of each worker.
        wait_s: How long to wait for room.
    """

    spec: str
    address: tuple[str, int] | None = None
    devices: tuple[tuple[Literal["cuda", "cpu"], int | None], ...] = ()
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    gpu_type: str | None = None
    memory_bytes: int = 0
    threads: int | None = None
    wait_s: float = WAIT_S


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node of the cluster, with its total resources, used or not."""

    id: str
    host: str
    address: str
    resources: Mapping[str, float]
    gpu_bytes: int = 0
    """Memory of each of its GPUs; 0 where unknown."""

    @property
    def cores(self) -> int:
        """Number of whole cores."""
        return int(self.resources.get("CPU", 0))

    def gpus(self, request: RayRequest) -> int:
        """Return the number of its GPUs of the requested type and memory, as far as known."""
        right = request.gpu_type is None or f"accelerator_type:{request.gpu_type}" in self.resources
        small = 0 < self.gpu_bytes < request.memory_bytes
        return int(self.resources.get("GPU", 0)) if right and not small else 0


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One worker to start, and the resources reserved for it, by Ray's names."""

    kind: Literal["cuda", "cpu"]
    threads: int
    resources: Mapping[str, float] = field(default_factory=dict)


def parse_ray(spec: str, *, threads: int | None = None, memory_bytes: int | None = None) -> RayRequest:
    """Read a specification such as ``ray/cuda*4/spread/type=A100``.

    Args:
        spec: Everything from ``ray`` on.
        threads: Threads of each worker, where the specification says nothing.
        memory_bytes: The most bytes of each worker's buffers, likewise.

    Raises:
        UsageError: It is invalid, or sets an option twice.
    """
    rest, address = spec.removeprefix("ray"), None
    if rest.startswith("://"):
        host, _, rest = rest.removeprefix("://").partition("/")
        address, rest = _address(host, spec), "/" + rest if rest else ""
    if rest and not rest.startswith("/"):
        raise _misread(spec, rest)
    found: dict[str, str] = {}
    for part in rest.split("/")[1:]:
        name, value = _option(part, spec)
        if name in found:
            raise UsageError(f"pool {spec!r} says {found[name]!r} and {value!r} for its {name}; allowed is one of them")
        found[name] = value
    return RayRequest(
        spec=spec,
        address=address,
        devices=tuple(_device(part, spec) for part in found["devices"].split("+")) if "devices" in found else (),
        strategy="SPREAD" if found.get("placement") == "spread" else "PACK",
        gpu_type=found.get("type"),
        memory_bytes=parse_size(f"pool {spec!r}: memory", found["memory"]) if "memory" in found else memory_bytes or 0,
        threads=_number("threads", found["threads"], spec, 1, 4096) if "threads" in found else threads,
        wait_s=_number("wait", found["wait"], spec, 1, 86_400) if "wait" in found else WAIT_S,
    )


def _misread(spec: str, part: str) -> UsageError:
    return UsageError(f"pool {spec!r} is not understood at {part!r}; allowed: {_GRAMMAR}")


def _address(text: str, spec: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"] or RAY_PORT) if match else 0
    if not match or not 0 < port < 65536:
        raise _misread(spec, text)
    return match["six"] or match["host"], port


def _option(part: str, spec: str) -> tuple[str, str]:
    """Return the name and the value of one part of a specification."""
    if part in ("spread", "pack"):
        return "placement", part
    name, equals, value = part.partition("=")
    if equals and name in ("type", "memory", "threads", "wait"):
        if name == "type" and not _TYPE.fullmatch(value):
            raise _misread(spec, part)
        return name, value
    if _DEVICES.fullmatch(part):
        return "devices", part
    raise _misread(spec, part)


def _device(part: str, spec: str) -> tuple[Literal["cuda", "cpu"], int | None]:
    match = _DEVICE.fullmatch(part)
    if not match:
        raise _misread(spec, part)
    if match["kind"] == "cuda":
        return "cuda", int(match["count"]) if match["count"] else None
    return "cpu", int(match["count"] or 1)


def _number(name: str, text: str, spec: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text[:9]) <= most:
        raise UsageError(f"pool {spec!r} has {name}={text}; allowed: {least} to {most}")
    return int(text)


# ---- the request to Ray


def bundles(request: RayRequest, nodes: Sequence[RayNode]) -> list[Bundle]:
    """Return the workers to start, in the pool's order.

    Args:
        request: The request.
        nodes: The cluster's living nodes.

    Raises:
        UsageError: All devices of a kind are asked for, and there are none.
    """
    every = sum(node.gpus(request) for node in nodes)
    devices = request.devices
    if not devices and request.gpu_type is None and not any(node.resources.get("GPU") for node in nodes):
        return _on_every_node(request, nodes)
    found: list[Bundle] = []
    for kind, count in devices or (("cuda", None),):
        wanted = every if count is None else count
        if not wanted or (kind == "cuda" and not every and any(node.gpu_bytes for node in nodes)):
            named = f"of type {request.gpu_type} " if request.gpu_type else ""
            named += f"with {request.memory_bytes / 2**30:.3g} GiB " if request.memory_bytes else ""
            raise UsageError(
                f"pool {request.spec!r} asks for {'all' if count is None else count} GPUs {named}of the cluster, which "
                f"has none: {describe_nodes(nodes)}"
            )
        found += [_bundle(request, kind, _threads(request, kind, wanted, nodes))] * wanted
    return found


def _bundle(request: RayRequest, kind: Literal["cuda", "cpu"], threads: int) -> Bundle:
    resources: dict[str, float] = {"CPU": threads}
    if kind == "cuda":
        resources["GPU"] = 1
        if request.gpu_type:
            resources[f"accelerator_type:{request.gpu_type}"] = _A_LITTLE
    elif request.memory_bytes:  # memory of the host, which Ray counts; that of GPUs it does not
        resources["memory"] = request.memory_bytes
    return Bundle(kind=kind, threads=threads, resources=resources)


def selectors(wanted: Sequence[Bundle], request: RayRequest, nodes: Sequence[RayNode]) -> list[dict[str, str]] | None:
    """Return the nodes that each bundle may be on, by Ray's labels: not those whose GPUs are known to be too small.

    Returns:
        A selector for each bundle; None where all may be anywhere.
    """
    small = [node.id for node in nodes if node.resources.get("GPU") and 0 < node.gpu_bytes < request.memory_bytes]
    if not small or not any(bundle.kind == "cuda" for bundle in wanted):
        return None
    return [{_NODE: f"!in({', '.join(small)})"} if bundle.kind == "cuda" else {} for bundle in wanted]


def _on_every_node(request: RayRequest, nodes: Sequence[RayNode]) -> list[Bundle]:
    """Return a CPU worker with all cores of its node for each node."""
    found = []
    for node in nodes:
        if node.cores:
            one = _bundle(request, "cpu", min(request.threads or node.cores, node.cores))
            found.append(
                Bundle(kind="cpu", threads=one.threads, resources={**one.resources, f"node:{node.address}": _A_LITTLE})
            )
    if not found:
        raise UsageError(f"pool {request.spec!r}: the cluster has neither GPUs nor cores: {describe_nodes(nodes)}")
    return found


def _threads(request: RayRequest, kind: str, wanted: int, nodes: Sequence[RayNode]) -> int:
    """Return the threads of each worker of a kind: one beside a GPU; else as many as leave room for all."""
    if request.threads:
        return request.threads
    if kind == "cuda":
        return 1
    beside = any(kind == "cuda" for kind, _ in request.devices)
    return fair_threads([node.cores - (node.gpus(request) if beside else 0) for node in nodes], wanted)


def fair_threads(cores: Sequence[int], workers: int) -> int:
    """Return the most threads per worker with which all fit on nodes with so many cores.

    At least 1, even where there is no room.
    """
    fitting = (each for each in range(max(cores, default=1), 1, -1) if sum(free // each for free in cores) >= workers)
    return next(fitting, 1)


# ---- text for people


def describe_bundles(wanted: Sequence[Bundle]) -> str:
    """Describe a request, such as ``4 x (1 CPU, 1 GPU)``."""
    counts = Counter(_resources(bundle.resources) for bundle in wanted)
    return " and ".join(f"{count} x ({text})" for text, count in counts.items())


def describe_nodes(nodes: Sequence[RayNode]) -> str:
    """Describe the nodes of a cluster."""
    each = "; ".join(f"{node.host} ({node.address}): {_resources(node.resources)}{_of_gpus(node)}" for node in nodes)
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}{', ' + each if nodes else ''}"


def _of_gpus(node: RayNode) -> str:
    return f", {node.gpu_bytes / 2**30:.3g} GiB on each GPU" if node.gpu_bytes else ""


def describe_free(resources: Mapping[str, float]) -> str:
    """Describe the free resources."""
    return _resources(resources) or "nothing"


def _resources(resources: Mapping[str, float]) -> str:
    """Describe resources, without those that every node has or that are Ray's internals."""
    texts = []
    for name, amount in sorted(resources.items()):
        if name.startswith("accelerator_type:"):
            texts.append(f"type {name.partition(':')[2]}")
        elif name == "memory":
            texts.append(f"{amount / 2**30:.3g} GiB of memory")
        elif name in ("CPU", "GPU"):
            texts.append(f"{amount:g} {name}")
        elif name.startswith("node:") and amount < 1:
            texts.append(f"on {name.partition(':')[2]}")
    return ", ".join(texts)


def host_names(nodes: Sequence[tuple[str, str]]) -> list[str]:
    """Return a name for each worker's host; two are equal only if their nodes are the same.

    Args:
        nodes: Host name and address of each worker's node.
    """
    addresses: dict[str, set[str]] = {}
    for host, address in nodes:
        addresses.setdefault(host, set()).add(address)
    return [host if len(addresses[host]) == 1 else f"{host} ({address})" for host, address in nodes]
