"""The loss in isolation: its value for generated outputs, for some samples together and in halves.

A model that draws random numbers or normalises by its batch even in eval mode computes other outputs for a sample in
another micro-batch. Then only the loss function itself is checked to be a mean over samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import CaptureSpec
from onebox.errors import CaptureError
from onebox.graph import Loss
from onebox.graph.capture.export import capture
from onebox.wire import program_dtype_name

MOST_BYTES = 256 << 20
"""Largest size of the outputs of a comparison, which is made in the client."""


class _Shapes:
    """A stand-in for a loss that records the specs of the model's outputs; not a module, as changes of modules are
    refused.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return any scalar."""
        del targets
        self.found.append(pytree.tree_map(lambda value: (tuple(value.shape), value.dtype), outputs))
        (first, *_) = (leaf for leaf in pytree.tree_leaves(outputs) if leaf.is_floating_point())
        return first.float().mean()


@dataclass(frozen=True, kw_only=True)
class LossProbe:
    """Losses of samples, together and in halves weighted by samples.

    Args:
        whole: Loss and 2-norm of its gradient with respect to the outputs, for all samples together.
        halves: The same for the halves.
        types: Element types of the outputs.
    """

    whole: tuple[float, float]
    halves: tuple[float, float]
    types: frozenset[str]


def probe_loss(recipe: CaptureSpec, batch: Batch) -> LossProbe | None:
    """Return the losses of generated outputs for a batch.

    Args:
        recipe: The model and its loss.
        batch: Samples, an even number.

    Returns:
        The losses; ``None`` if the comparison is impossible: the outputs have no sample dimension or are too large, or
            the loss draws random numbers.

    Raises:
        CaptureError: The model cannot be captured, or the loss raises an error.
    """
    outputs = _outputs(recipe, batch)
    if outputs is None:
        return None
    _, targets = batch.structure.nest(batch.leaves)
    half = batch.size // 2
    with _in_eval_mode(recipe.loss), torch.random.fork_rng(devices=[]):
        try:
            whole, again = (_weighted(recipe.loss, outputs, targets, [slice(None)]) for _ in range(2))
            halves = _weighted(recipe.loss, outputs, targets, [slice(0, half), slice(half, None)])
        except Exception as error:
            raise CaptureError(f"the loss raises {type(error).__name__}: {error}") from error
    types = frozenset(program_dtype_name(leaf.dtype) for leaf in pytree.tree_leaves(outputs))
    return LossProbe(whole=whole, halves=halves, types=types) if whole == again else None


def _weighted(loss: Loss, outputs: Any, targets: Any, cuts: Sequence[slice]) -> tuple[float, float]:
    """Return the loss of samples and the norm of its gradient, computed over slices and weighted by samples."""
    size = pytree.tree_leaves(outputs)[0].shape[0]
    total = square = 0.0
    for cut in cuts:
        leaves, structure = pytree.tree_flatten(pytree.tree_map(lambda value, cut=cut: value[cut], outputs))
        floats = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        weight = leaves[0].shape[0] / size
        value = loss(
            pytree.tree_unflatten(leaves, structure), pytree.tree_map(lambda each, cut=cut: each[cut], targets)
        )
        gradients = torch.autograd.grad(value, floats, allow_unused=True) if value.requires_grad else ()
        total += weight * value.item()
        square += sum((weight * each.double().norm().item()) ** 2 for each in gradients if each is not None)
    return total, math.sqrt(square)


@contextlib.contextmanager
def _in_eval_mode(loss: Any) -> Iterator[None]:
    """Put a loss module into eval mode for the duration of the context."""
    before = [(each, each.training) for each in loss.modules()] if isinstance(loss, nn.Module) else []
    for each, _ in before:
        each.training = False
    try:
        yield
    finally:
        for each, training in before:
            each.training = training


def _outputs(recipe: CaptureSpec, batch: Batch) -> Any:
    """Return generated outputs of a model, all of them probabilities; ``None`` if they have no sample dimension."""
    shapes = _Shapes()
    capture(
        recipe.model,
        shapes,
        batch.example(batch.size),
        mode="evaluate",
        backward=False,
        precision=recipe.precision,
        device_type=recipe.device_type,
        on_device=recipe.on_device,
    )
    found = shapes.found[-1]
    leaves, structure = pytree.tree_flatten(found, is_leaf=_is_shape)
    needed_bytes = sum(math.prod(shape) * 8 for shape, _ in leaves)
    if any(shape[:1] != (batch.size,) for shape, _ in leaves) or needed_bytes > MOST_BYTES:
        return None
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, dtype in leaves:
        values = 0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
        made.append(values.to(dtype))
    return pytree.tree_unflatten(made, structure)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)
