"""``torch.compile`` as scripts call it: with its default backend, and before anybody has thought of Dynamo.

Dynamo takes a second to load, so it is taught of virtual tensors when it is first asked for. Its default backend,
Inductor, makes kernels for the machine that it runs on; a graph on virtual devices goes to the backend ``onebox``
instead, whatever mode or options are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def register() -> None:
    """Let ``torch.compile`` find what compiles for virtual devices."""
    plain: Any = torch.compile

    @functools.wraps(plain)
    def compile_taught(*args: Any, **kwargs: Any) -> Any:
        from onebox.vgpu.compile import backend  # noqa: F401  # teaches Dynamo

        return plain(*args, **kwargs)

    torch.compile = compile_taught
    inductor: Any = torch._TorchCompileInductorWrapper
    call = inductor.__call__

    @functools.wraps(call)
    def call_either(self: Any, model_: fx.GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
        from onebox.vgpu.compile.backend import is_virtual, onebox

        return onebox(model_, inputs_) if is_virtual(model_, inputs_) else call(self, model_, inputs_, **kwargs)

    inductor.__call__ = call_either
