"""The versions that both sides tell each other."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

import onebox
from onebox.pool.backends.compatibility import own_versions


def test_where_torch_is_imported_its_own_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the package may lack the suffix, such as +cpu, by which a node without CUDA is recognised."""
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    versions = own_versions.__wrapped__()
    assert versions.torch == str(torch.__version__)
    assert versions.onebox == onebox.__version__, "the version of the code that runs"
