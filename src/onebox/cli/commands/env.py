"""``onebox env``: versions, devices of this machine, confinement of its workers, and missing packages or features."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import msgspec
import psutil
import torch
import torch.distributed

from onebox import __version__
from onebox.cli.console import OutputConsole
from onebox.cli.options.pools import EnvConfig
from onebox.extras import PACKAGES
from onebox.portable import LINUX, SYSTEM, usable_cores
from onebox.worker.system.instruction_sets import VARIABLES, mkl_architecture, used_instruction_sets

_PACKAGES = (
    "torch",
    "numpy",
    "pyzmq",
    "msgspec",
    "safetensors",
    "tyro",
    "rich",
    "psutil",
)
_EXTRAS = {package.distribution: f"for {package.purpose}: {package.remedy}" for package in PACKAGES} | {
    "transformers": "for PlannedTrainer, and models by their configuration: pip install transformers",
    "lightning": "for OneboxStrategy: pip install lightning",
}

_ELSEWHERE = {"none": f"workers run on Linux, and this machine has {SYSTEM}; a client here uses those of agents"}


def show_environment(config: EnvConfig) -> None:
    """Print the environment and the missing parts."""
    found = environment()
    if config.json:
        print(msgspec.json.encode(found).decode())
        return
    console = OutputConsole(highlight=False)
    for title, content in found.items():
        console.print(title, style="bold")
        for line in _lines(content) or ["nothing"]:
            console.write_line(f"  {line}")


def environment() -> dict[str, dict[str, str] | list[str]]:
    """Return versions, devices, the confinement of workers, and missing parts, as text."""
    held = _confinement()
    return {
        "versions": _versions(),
        "devices": _devices(),
        "instruction sets": _instructions(),
        "workers": held,
        "missing": _missing() + _loose(held),
    }


def _lines(content: dict[str, str] | list[str]) -> list[str]:
    if isinstance(content, list):
        return content
    width = max(map(len, content))
    return [f"{name:<{width}}  {value}" for name, value in content.items()]


def _versions() -> dict[str, str]:
    versions = {"onebox": __version__, "python": platform.python_version(), "system": platform.platform()}
    versions |= {name: _version(name) or "not installed" for name in (*_PACKAGES, *_EXTRAS)}
    if torch.version.cuda:
        versions["cuda of torch"] = torch.version.cuda
    return versions


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    cores = usable_cores()
    memory_gib = psutil.virtual_memory().total / 2**30
    lines = [f"cpu: {cores} cores for this process, {memory_gib:.1f} GiB"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}: {card.name}, {card.total_memory / 2**30:.1f} GiB, capability {card.major}.{card.minor}"
        )
    return lines


def _instructions() -> dict[str, str]:
    """Return the instruction sets that libraries use here, by the libraries' names, and their limits."""
    if not LINUX:
        return _ELSEWHERE
    found = used_instruction_sets()
    limits = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    return {
        "ATen": found.aten,
        "oneDNN": found.onednn or "not in this torch",
        "MKL": mkl_architecture() or "not in this torch",
        "processor": ", ".join(found.hardware) or "none of those that are asked for",
        "limited by": limits or f"nothing; {', '.join(VARIABLES)} would",
    }


def _missing() -> list[str]:
    missing = [f"{name} is not installed, which onebox needs" for name in _PACKAGES if _version(name) is None]
    missing += [f"{name} is not installed, {why}" for name, why in _EXTRAS.items() if _version(name) is None]
    if not LINUX:
        return missing
    if not torch.version.cuda:
        missing.append("CUDA: this torch is built without it; workers run on CPUs")
    elif not torch.cuda.is_available():
        missing.append("CUDA: torch finds no device or driver; workers run on CPUs")
    elif not torch.distributed.is_nccl_available():
        missing.append("NCCL: this torch is built without it; transfers between GPUs go through the CPU")
    return missing


def _confinement() -> dict[str, str]:
    """Return the rights that workers on this machine give up before they accept a client."""
    if not LINUX:
        return _ELSEWHERE
    from onebox.worker.sandbox import landlock  # of Linux
    from onebox.worker.sandbox.confine import confinement

    abi = landlock.version()
    found = {"Landlock": f"version {abi} of its interface" if abi else "none"}
    found |= confinement()
    found["namespaces"] = "those of the agent; a container, or a service of systemd, for onebox serve has its own"
    return found


def _loose(held: dict[str, str]) -> list[str]:
    """Return advice about tighter confinement of workers."""
    off = {part: text.removeprefix("off: ") for part, text in held.items() if text.startswith("off: ")}
    loose = [f"workers, {part}: {why}" for part, why in off.items()]
    if LINUX and os.geteuid() == 0:
        loose.append(
            "workers: this user is root, as workers of its own pools are; those of onebox serve have other users"
        )
    return loose
