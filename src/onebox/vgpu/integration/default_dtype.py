"""The default element type: results of operators on integers depend on it, so workers use that of the client."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from onebox.errors import OneboxError
from onebox.vgpu.runtime import context


def followed(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that sets the default type, such as ``torch._C._set_default_dtype``, for workers, too."""

    @functools.wraps(plain)
    def change(kind: Any) -> None:
        plain(kind)
        for queue in context.open_queues():
            with contextlib.suppress(OneboxError):  # the next use of the device raises the error
                queue.follow()

    return change
