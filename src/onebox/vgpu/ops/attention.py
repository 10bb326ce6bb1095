"""``scaled_dot_product_attention`` by the kernel that the worker's own PyTorch selects.

PyTorch selects fused kernels for its own devices only, and plain operators for all others. Here the worker selects,
once for each kind of arguments, and the client calls that kernel, whose gradient PyTorch supports on any device.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of, is_virtual, layout_of
from onebox.vgpu.dispatch.synchronous import run_synchronously
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.wire.attention import EFFICIENT, FLASH, MATH

aten = torch.ops.aten

CHOICES = 1 << 12
"""The most kinds of arguments that a device remembers."""

_choices: weakref.WeakKeyDictionary[CommandQueue, dict[Any, int]] = weakref.WeakKeyDictionary()


def implement(library: torch.library.Library) -> None:
    """Register it above autograd, which would decompose the operator, and where there is none."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", attend, key)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of ``torch.nn.functional.scaled_dot_product_attention``, with its arguments."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    choice = choose(given, {"scale": scale, "enable_gqa": enable_gqa})
    return attend_by(choice, *given, scale=scale, enable_gqa=enable_gqa)


def attend_by(
    choice: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the same by a given kernel."""
    if choice == FLASH:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype).log()  # 0 where it is true, minus infinity elsewhere
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        result: Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return result
    if choice == EFFICIENT:
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        efficient = aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, None, learns, dropout_p, is_causal, scale=scale)[0]
    plain = aten.scaled_dot_product_attention.default
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    with _replicated(query):
        return plain._op_dk(composite, *given, scale=scale, enable_gqa=enable_gqa)


def _replicated(query: Tensor) -> AbstractContextManager[None]:
    """Return a context in which a sharded tensor may meet the mask that the plain operators make themselves."""
    sharding: Any = sys.modules.get("torch.distributed.tensor")  # loaded where there are such tensors
    if sharding is None or not isinstance(query, sharding.DTensor):
        return nullcontext()
    if sharding.DTensor._op_dispatcher._allow_implicit_replication:  # which the context would set back
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    replicated: AbstractContextManager[None] = implicit_replication()
    return replicated


def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of the kernel for such arguments, which the worker selects on the first call."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    virtual = [tensor for tensor in tensors if is_virtual(tensor)]
    if len(virtual) != len(tensors) or any(mask.requires_grad for mask in virtual[3:]):
        return MATH
    queue = command_queue_of(virtual[0])
    if any(command_queue_of(tensor) is not queue for tensor in virtual):
        return MATH
    known = _choices.setdefault(queue, {})
    key = tuple(layout_of(value) if is_virtual(value) else value for value in (*args, *kwargs.values()))
    if key not in known:
        floats = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
        while len(known) >= CHOICES:
            known.pop(next(iter(known)), None)  # the oldest
        choice = run_synchronously(queue, aten._fused_sdp_choice.default, args, kwargs, virtual, floats)
        known[key] = _usable(choice, queue, virtual)
    choice = known[key]
    if choice == FLASH and not torch.backends.cuda.flash_sdp_enabled():
        return MATH
    return MATH if choice == EFFICIENT and not torch.backends.cuda.mem_efficient_sdp_enabled() else choice


def _usable(choice: int, queue: CommandQueue, tensors: list[Tensor]) -> int:
    """Return the kernel to call for a selection; on a GPU the same fused kernel for both."""
    if queue.pool.devices[queue.worker].kind != "cuda":
        return choice if choice == FLASH else MATH
    even = all(tensor.shape[-1] % 8 == 0 for tensor in tensors)  # a requirement of that kernel
    return EFFICIENT if choice != MATH and even and len(tensors) == 3 else MATH
