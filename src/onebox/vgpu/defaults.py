"""The default element type: what operators on integers return depends on it, so workers have that of the client."""

from __future__ import annotations

import functools
from typing import Any

import torch

from onebox.vgpu import box


def register() -> None:
    """Let workers follow ``torch.set_default_dtype``."""
    core: Any = torch._C
    plain = core._set_default_dtype

    @functools.wraps(plain)
    def change(dtype: torch.dtype) -> None:
        plain(dtype)
        if box.device_count():
            for stream in box.current_box().streams:
                stream.follow(torch.get_default_dtype())

    core._set_default_dtype = change
