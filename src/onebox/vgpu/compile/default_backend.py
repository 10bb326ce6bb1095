"""``torch.compile`` with its default backend, and lazy registration with Dynamo.

Dynamo takes a second to load, so virtual tensors are registered with it on first use. Its default backend, Inductor,
makes kernels for the machine that it runs on; a graph on virtual devices goes to the backend ``onebox`` instead,
whatever mode or options are given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import fx


def compiling(plain: Any) -> Any:
    """Wrap ``torch.compile``, to register virtual tensors with Dynamo first."""

    @functools.wraps(plain)
    def compile_taught(*args: Any, **kwargs: Any) -> Any:
        from onebox.vgpu.compile.dynamo import DYNAMO

        DYNAMO.apply()
        return plain(*args, **kwargs)

    return compile_taught


def either_backend(call: Any) -> Any:
    """Wrap the call of the default backend, to compile graphs on virtual devices by that of this package."""

    @functools.wraps(call)
    def call_either(self: Any, model_: fx.GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
        from onebox.vgpu.compile.backend import has_virtual, onebox

        return onebox(model_, inputs_) if has_virtual(model_, inputs_) else call(self, model_, inputs_, **kwargs)

    return call_either
