"""The default element type: results of operators on integers depend on it, so workers use that of the client."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from onebox.errors import OneboxError
from onebox.vgpu.runtime import context


def register() -> None:
    """Make workers follow ``torch.set_default_dtype``, and ``torch.set_default_tensor_type``, which also sets it."""
    core: Any = torch._C
    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        setattr(core, name, _followed(getattr(core, name)))


def _followed(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(plain)
    def change(kind: Any) -> None:
        plain(kind)
        if context.device_count():
            for queue in context.current_context().queues:
                with contextlib.suppress(OneboxError):  # the next use of the device raises the error
                    queue.follow(torch.get_default_dtype())

    return change
