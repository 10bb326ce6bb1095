"""Print the machine as one JSON object, and require that plain PyTorch computes on its devices.

Run it by ``python -m tests.gpu_run.machine cuda``. It imports nothing of onebox but the list of what confines workers,
so that what fails here is not onebox.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from typing import Any

NEEDED = ("torch", "numpy", "zmq", "msgspec", "tyro", "rich", "safetensors", "psutil")
"""Packages that onebox needs, by the names of their imports."""

NEEDED_BY_TESTS = ("pytest", "pytest_timeout", "hypothesis", "transformers")

_VARIABLES = ("CUDA", "NCCL", "TORCH", "PYTORCH", "CUBLAS", "ONEBOX", "OMP", "NVIDIA")
"""Beginnings of the names of environment variables that change what is checked."""

_MATRIX = 512


def main(kind: str) -> int:
    """Print the machine, and return 1 where something is missing that all checks need."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "missing": [name for name in (*NEEDED, *NEEDED_BY_TESTS) if importlib.util.find_spec(name) is None],
    }
    problems = [f"package {name} is missing" for name in found["missing"]]
    if "torch" not in found["missing"]:
        found |= torch_and_gpus()
        problems += plain_products(found["devices"]) if kind == "cuda" else []
        if kind == "cuda" and not found["devices"]:
            problems.append("PyTorch sees no CUDA device")
    if set(NEEDED).isdisjoint(found["missing"]):
        from onebox.worker.sandbox.confine import confinement

        found["confinement"] = confinement()
    found["problems"] = problems
    print(json.dumps(found), flush=True)
    return 1 if problems else 0


def torch_and_gpus() -> dict[str, Any]:
    """Return the versions that PyTorch was built with, and the GPUs that it sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "free_bytes": torch.cuda.mem_get_info(index)[0],
                "capability": f"{properties.major}.{properties.minor}",
                "processors": properties.multi_processor_count,
                "peers": [
                    other
                    for other in range(count)
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
        )
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if count else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
        "driver": driver(),
        "devices": gpus,
    }


def driver() -> str | None:
    """Return the version of the driver, as ``nvidia-smi`` says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ran.stdout.split()
    return lines[0] if ran.returncode == 0 and lines else None


def plain_products(gpus: list[dict[str, Any]]) -> list[str]:
    """Multiply matrices on each GPU, and return what was wrong."""
    import torch

    problems = []
    for index in range(len(gpus)):
        device = torch.device("cuda", index)
        try:
            one = torch.arange(_MATRIX * _MATRIX, dtype=torch.float64).reshape(_MATRIX, _MATRIX) % 7
            if not torch.equal((one.to(device) @ one.to(device)).cpu(), one @ one):
                problems.append(f"{device} multiplies wrongly")
        except RuntimeError as error:
            problems.append(f"{device}: {error}")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
