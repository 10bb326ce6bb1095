"""What the parallel paths are compared with: a plain PyTorch loop over the same micro-batches, in this process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from onebox.plan import Plan
from onebox.plan_names import GradientCodec

AGREE = 1e-10
"""The most by which float64 results may differ after 20 steps."""


Cut = int | Plan | Callable[[int], Sequence[int]]
"""How batches are cut into micro-batches: each but the last of so many samples, as a plan does, or by a function."""

CODE_BLOCK = 256
"""Values that a lossy codec encodes together."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training run went.

    Args:
        losses: Mean loss of each step.
        norms: 2-norm of the gradients of each step, before clipping.
        tensors: Parameters and buffers afterwards, by their names in the model.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model as a trainer does: a tuple is spread over its arguments, a dict over its keyword arguments."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def sizes_of(batch: Any) -> int:
    """Return the samples of a batch."""
    return int(tree_leaves(batch)[0].shape[0])


def micro_batches(cut: Cut, size: int) -> Sequence[int]:
    """Return the samples of each micro-batch of a batch."""
    if isinstance(cut, int):
        whole, rest = divmod(size, cut)
        return [cut] * whole + [rest] * (rest > 0)
    return [part.size for part in cut.micro_batches(size)] if isinstance(cut, Plan) else cut(size)


def train(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Any]],
    cut: Cut,
    *,
    max_norm: float | None = None,
    around: Callable[[int, int], contextlib.AbstractContextManager[Any]] | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> Outcome:
    """Train a model as anybody would without onebox.

    Args:
        model: Changed in place.
        loss: Maps (outputs, targets) to a scalar.
        optimizer: Over the model's parameters.
        batches: (inputs, targets) of each step.
        cut: Into micro-batches.
        max_norm: For clipping.
        around: From (step, micro-batch) to a context for forward.
        after_step: Called after each step, for a scheduler.
    """
    losses, norms = [], []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        losses.append(backward(model, loss, batch, cut, lambda index, s=step: around(s, index) if around else None))
        norms.append(clipped(model, max_norm))
        optimizer.step()
        after_step()
    return Outcome(losses=losses, norms=norms, tensors=state_of(model))


def backward(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    cut: Cut,
    around: Callable[[int], contextlib.AbstractContextManager[Any] | None],
) -> float:
    """Add the gradients of a batch, micro-batch by micro-batch; return its mean loss.

    Args:
        model: Its parameters get the gradients.
        loss: Maps (outputs, targets) to a scalar.
        batch: (inputs, targets).
        cut: Into micro-batches.
        around: From a micro-batch to a context for forward, or ``None``.
    """
    total, start, size = 0.0, 0, sizes_of(batch)
    for index, part in enumerate(micro_batches(cut, size)):
        inputs, targets = tree_map(lambda t, a=start, b=start + part: t[a:b], batch)
        with around(index) or contextlib.nullcontext():
            value = loss(call(model, inputs), targets)
        (value * (part / size)).backward()
        total += float(value.detach()) * part / size
        start += part
    assert start == size
    return total


def clipped(model: nn.Module, max_norm: float | None) -> float:
    """Return the 2-norm of a model's gradients, which are clipped where there is a most that it may be."""
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of parameters and buffers, those included that a state dict leaves out."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def coded(values: Tensor, codec: GradientCodec) -> Tensor:
    """Return values as they are after encoding and decoding, in blocks of 256 from the first on."""
    if codec == "none":
        return values
    if codec == "bf16":
        return values.float().bfloat16().to(values.dtype)
    blocks = values.view(-1, CODE_BLOCK)
    if codec == "e3m0":
        scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(2.0**-126).float().to(values.dtype)
        parts = (blocks / scale).float().double()
        allowed = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))], dtype=torch.float64)
        bounds = (allowed[1:] + allowed[:-1]) / 2
        powers = allowed[torch.bucketize(parts.abs(), bounds, right=True)]
        return ((powers * parts.sign()).to(values.dtype) * scale).view(-1)
    largest = blocks.abs().max(dim=1, keepdim=True).values * (1 / 127)
    scale = largest.clamp_min(2.0**-126).float().to(values.dtype)
    steps = torch.round(blocks / scale)
    assert steps.abs().max() <= 127
    return (steps * scale).view(-1)


class Drawing(TorchDispatchMode):
    """Seeds every random operator by its place in the run, as the design says that workers do.

    Args:
        seed: Of the run.
        step: Of the run.
        micro_batch: In the batch.
    """

    def __init__(self, seed: int, step: int, micro_batch: int) -> None:
        super().__init__()
        self.prefix = f"{seed}/{step}/{micro_batch}"
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            digest = hashlib.blake2b(f"{self.prefix}/{self.count}".encode(), digest_size=8).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            self.count += 1
        return func(*args, **(kwargs or {}))


def drawing(seed: int) -> Callable[[int, int], contextlib.AbstractContextManager[Any]]:
    """Return what :func:`train` needs to draw the random numbers of a run with a seed."""

    @contextlib.contextmanager
    def around(step: int, micro_batch: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), Drawing(seed, step, micro_batch):
            yield

    return around


def assert_same(found: Outcome, expected: Outcome, tolerance: float = AGREE) -> None:
    """Require that two runs had the same losses and ended with the same parameters and buffers."""
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(
            found.tensors[name], tensor, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    differences = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    assert max(differences) <= tolerance, differences
