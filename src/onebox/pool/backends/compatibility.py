"""Compatibility of a client's and an agent's versions."""

from __future__ import annotations

import contextlib
import platform
import sys
from functools import cache
from importlib import metadata

from onebox.version import __version__
from onebox.wire.protocol.agents import AGENT_PROTOCOL, SoftwareVersions
from onebox.wire.protocol.requests import PROTOCOL

_LONGEST = 40
"""The most characters of a version that are shown: the other side may have sent any text."""


@cache
def own_versions() -> SoftwareVersions:
    """Return the versions on this side."""
    return SoftwareVersions(AGENT_PROTOCOL, PROTOCOL, __version__, _torch_version(), platform.python_version())


def agree(one: SoftwareVersions, other: SoftwareVersions) -> bool:
    """Return whether two sides are compatible: equal protocols, and equal torch versions up to a ``+`` suffix."""
    return _binding(one) == _binding(other)


def mismatch(client: SoftwareVersions, agent: SoftwareVersions, host: str) -> str | None:
    """Explain why a client and an agent are incompatible; ``None`` where they are compatible.

    Args:
        client: Versions of the client.
        agent: Versions of the agent.
        host: The agent's host.
    """
    if agree(client, agent):
        return None
    return (
        f"versions that do not match: this client runs {describe(client)}; the agent on {host} runs {describe(agent)}: "
        "install the same version of onebox and of torch on both, and start both again"
    )


def describe(versions: SoftwareVersions) -> str:
    """Format versions for a message."""
    protocols = f"protocols {versions.agent_protocol} and {versions.protocol}"
    return f"onebox {versions.onebox[:_LONGEST]} ({protocols}) with torch {versions.torch[:_LONGEST]}"


def _torch_version() -> str:
    """Return PyTorch's version; without its import, which takes a second, the package's, which may lack the suffix."""
    if "torch" not in sys.modules:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version("torch")
    import torch

    return str(torch.__version__)


def _binding(versions: SoftwareVersions) -> tuple[int, int, str]:
    return versions.agent_protocol, versions.protocol, versions.torch.split("+")[0]
