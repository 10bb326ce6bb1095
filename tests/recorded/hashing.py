"""Hashes of tensors and plain data, and numbers to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def text(value: float) -> str:
    """Return a number to the last bit."""
    return float(value).hex()


def hash_of(value: Any) -> str:
    """Return the hash of tensors, numbers and strings, nested in mappings and sequences."""
    digest = hashlib.sha256()
    _update(digest, value)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key};".encode())
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)};".encode())
        for item in value:
            _update(digest, item)
    elif isinstance(value, float):
        digest.update(f"{value.hex()};".encode())
    else:
        digest.update(f"{value!r};".encode())
