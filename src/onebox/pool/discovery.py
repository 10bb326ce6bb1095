"""The devices of this machine, and the parser of local pool specifications."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import dataclass

from onebox.errors import UsageError
from onebox.pool.spec_suggestion import suggestion
from onebox.portable import require_linux, usable_cores

MOST_CPU_WORKERS = 4
"""Without accelerators, one CPU worker a core up to this number."""

LOCAL_HOST = "localhost"
"""Name of this machine in a pool."""

HERE = "this client"
"""Name of the client's end of a link."""

_GRAMMAR = (
    "'auto', or a list such as 'cuda', 'cuda:0,cuda:1', 'cpu', 'cpu*3' (three CPU workers), 'cuda,cpu'; and emulated: "
    "'cpu@0.5' (a CPU worker at half of its speed), 'sim*4@2' (four devices that compute nothing, at twice the speed)"
)

_PART = re.compile(
    r"(?P<kind>[a-z]{1,20})(?::(?P<index>\d{1,3}))?(?:\*(?P<count>[1-9]\d{0,2}))?(?:@(?P<speed>\d{1,6}(?:\.\d{1,9})?))?"
)


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """One worker to start.

    Args:
        device: ``cpu``, ``cuda:k`` or ``sim``; or ``KIND:k``, an accelerator of an installed package.
        threads: Threads that its CPU operators may use.
        speed: Fraction of its full speed that a CPU is to work at; for ``sim``, the divisor of costs.
        sharing: Workers of the pool that share its GPU, itself included; 1 for other devices.
    """

    device: str
    threads: int
    speed: float = 1.0
    sharing: int = 1


def require_local_workers(spec: str) -> None:
    """Require that workers can run on this machine.

    Raises:
        UsageError: It has another system than Linux.
    """
    require_linux(
        f"pool {spec!r} asks for workers of this machine, which run",
        "name hosts with Linux where 'onebox serve' runs, such as 'hostA' or 'hostB:7171/cuda:0', with which "
        "'onebox pair connect HOST' pairs this machine; ONEBOX_POOL may name them for 'auto'",
    )


def cores() -> int:
    """Return the number of cores that this process may use."""
    return usable_cores()


def gpu_count() -> int:
    """Return the number of this machine's GPUs, also while ``torch.cuda`` stands for virtual devices, whose functions
    wrap PyTorch's own.
    """
    import torch

    available, count = map(inspect.unwrap, (torch.cuda.is_available, torch.cuda.device_count))
    return count() if available() else 0


def requested_devices(spec: str = "auto", threads: int | None = None) -> list[DeviceRequest]:
    """Turn a specification into the workers to start.

    Args:
        spec: ``auto`` for all accelerators of this machine or, with none, one CPU worker a core up to four; or a list
            separated by commas of ``cuda``, ``cuda:K``, ``cpu``, ``cpu*N``, ``sim`` and ``sim*N``. With the suffix
            ``@SPEED`` a CPU worker is slowed down to that fraction of its speed, and a ``sim`` device has that speed.
        threads: Threads for each worker that computes; when ``None``, an equal share of the cores, less one core for
            each worker of a GPU.

    Raises:
        UsageError: The specification is wrong, or names a missing device.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads={threads}: a worker needs at least one thread")
    whole = spec.strip()
    accelerators = gpu_count() if whole == "auto" or "cuda" in whole else 0
    found: list[tuple[str, float]] = []
    for part in _default(accelerators) if whole == "auto" else spec.split(","):
        found += _expand(part.strip(), spec, accelerators)
    cards = sum(name.startswith("cuda") for name, _ in found)
    processors = sum(not name.startswith(("cuda", "sim")) for name, _ in found)
    others = threads or max(1, (cores() - cards) // max(1, processors))  # a GPU's worker keeps a core busy
    shares = {"sim": 1, "cuda": threads or max(1, cores() // max(1, processors + cards))}
    on_gpus = Counter(name for name, _ in found if name.startswith("cuda"))
    return [
        DeviceRequest(
            device=name, threads=shares.get(name.split(":")[0], others), speed=speed, sharing=on_gpus.get(name, 1)
        )
        for name, speed in found
    ]


def _default(accelerators: int) -> list[str]:
    return ["cuda"] if accelerators else [f"cpu*{min(cores(), MOST_CPU_WORKERS)}"]


def _expand(part: str, spec: str, accelerators: int) -> list[tuple[str, float]]:
    """Return name and speed of each device of one part of a specification."""
    match = _PART.fullmatch(part)
    kind = match["kind"] if match else ""
    numbered, cuda = kind not in ("cpu", "sim"), kind == "cuda"
    if not match or (cuda and match["count"]) or (match["index"] and not numbered) or not is_known(kind):
        raise UsageError(f"pool {spec!r} is not understood at {part!r}{suggestion(part)}; allowed: {_GRAMMAR}")
    speed = float(match["speed"] or 1)
    if speed <= 0 or (speed > 1 and not part.startswith("sim")) or (cuda and match["speed"]):
        allowed = "above 0 for sim, above 0 and up to 1 for cpu (what slows it down), none for cuda"
        raise UsageError(f"pool {spec!r} asks for speed {match['speed']} at {part!r}; allowed: {allowed}")
    count = int(match["count"] or 1)
    if not numbered:
        return [(kind, speed)] * count
    if not cuda:
        first = int(match["index"] or 0)
        return [(f"{kind}:{index}", speed) for index in range(first, first + count)]
    wanted = range(accelerators) if match["index"] is None else [int(match["index"])]
    if not wanted or any(index >= accelerators for index in wanted):
        raise UsageError(f"pool {spec!r} asks for {part}, but this machine has {accelerators} CUDA devices")
    return [(f"cuda:{index}", 1.0) for index in wanted]


def is_known(kind: str) -> bool:
    """Return whether there are devices of a kind, also of packages that are installed."""
    if kind in ("cpu", "sim", "cuda"):
        return True
    from onebox.worker.accelerator import is_installed

    return is_installed(kind)
