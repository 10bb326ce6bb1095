"""``torch.compile`` with its default backend, and lazy registration with Dynamo.

Dynamo takes a second to load, so virtual tensors are registered with it on first use. Its default backend, Inductor,
makes kernels for the machine that it runs on; a graph on virtual devices goes to the backend ``onebox`` instead,
whatever mode or options are given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def register() -> None:
    """Make ``torch.compile`` use the virtual devices' backend."""
    plain: Any = torch.compile

    @functools.wraps(plain)
    def compile_taught(*args: Any, **kwargs: Any) -> Any:
        from onebox.vgpu.compile import backend  # noqa: F401  # registers with Dynamo

        return plain(*args, **kwargs)

    torch.compile = compile_taught
    inductor: Any = torch._TorchCompileInductorWrapper
    call = inductor.__call__

    @functools.wraps(call)
    def call_either(self: Any, model_: fx.GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
        from onebox.vgpu.compile.backend import is_virtual, onebox

        return onebox(model_, inputs_) if is_virtual(model_, inputs_) else call(self, model_, inputs_, **kwargs)

    inductor.__call__ = call_either
