"""The ways to run a script: plain PyTorch on the CPU, the same loop on a virtual device, and ``onebox.Trainer``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import onebox
from onebox.vgpu import attach
from tests.kit.reference import call
from tests.kit.trainer_arguments import grouped

MakeOptimizer = Callable[[nn.Module], Any]
"""From a model to its optimizer, or a list of several."""

Batches = Sequence[tuple[Any, Any]]


@dataclass(kw_only=True)
class Result:
    """What a script computed: losses and other numbers in their order, and tensors by name."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Loop:
    """A training loop over one model: what a user writes, whatever runs it.

    Args:
        model: In training.
        optimizers: All of them.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers

    def step(self, inputs: Any, targets: Any = None) -> Any:
        """Do a step and return its loss, a number."""
        raise NotImplementedError

    def pull(self) -> None:
        """Bring the weights into the model."""

    def evaluate(self, batches: Batches) -> float:
        """Return the mean loss in eval mode."""
        raise NotImplementedError


class PlainLoop(Loop):
    """The loop of every PyTorch tutorial, with accumulation over micro-batches.

    Args:
        model: To train.
        optimizers: That step it.
        loss: Of outputs and targets.
        device: To which batches go; ``None`` for where they are.
        micro_batch: Samples that forward sees at once; ``None`` for all.
        clip: The most that the norm of the gradients may be.
        precision: ``bf16`` for autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loss: Callable[..., Tensor],
        device: str | None,
        *,
        micro_batch: int | None,
        clip: float | None,
        precision: str,
    ) -> None:
        super().__init__(model, optimizers)
        self._loss, self._device = loss, device
        self._micro_batch, self._clip, self._precision = micro_batch, clip, precision

    def step(self, inputs: Any, targets: Any = None) -> float:
        inputs, targets = tensors_of((inputs, targets), self._device)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        samples = len(tree_leaves(inputs)[0])
        size, total = self._micro_batch or samples, 0.0
        for start in range(0, samples, size):
            part = inputs, targets
            if size < samples:
                part = tree_map(lambda t, a=start: None if t is None else t[a : a + size], part)
            value = self._value(*part)
            if size < samples:
                value = value * (min(size, samples - start) / samples)
            value.backward()
            total += float(value.detach())
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return total

    def evaluate(self, batches: Batches) -> float:
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with torch.no_grad():
            moved = [tensors_of(batch, self._device) for batch in batches]
            values = [float(self._value(*batch)) for batch in moved]
            sizes = [len(tree_leaves(batch)[0]) for batch in moved]
        for module, mode in training.items():
            module.training = mode
        return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)

    def _value(self, inputs: Any, targets: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bf16"):
            return self._loss(call(self.model, inputs), targets)


class TrainerLoop(Loop):
    """The same by a trainer."""

    def __init__(self, trainer: onebox.Trainer, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__(model, optimizers)
        self.trainer = trainer

    def step(self, inputs: Any, targets: Any = None) -> onebox.StepLoss:
        return self.trainer.step(inputs) if targets is None else self.trainer.step(inputs, targets)

    def pull(self) -> None:
        self.trainer.pull()

    def evaluate(self, batches: Batches) -> float:
        return self.trainer.evaluate(batches).loss


class Way:
    """A way to run a script; collects the losses of all its loops and the state of all its models.

    Args:
        name: ``plain``, ``vgpu`` or ``trainer``.
        pool: The workers; ``None`` for plain PyTorch.
    """

    def __init__(self, name: str, pool: onebox.Pool | None) -> None:
        self.name, self.pool = name, pool
        self.device = "vgpu:0" if name == "vgpu" else None
        self.result = Result()

    def note(self, **values: Any) -> None:
        """Compare these numbers and tensors, too."""
        for name, value in values.items():
            for place, leaf in enumerate(tree_leaves(value)):
                tensor = leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else torch.tensor(float(leaf))
                self.result.tensors[f"{name} {place}"] = tensor

    @contextlib.contextmanager
    def loop(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: MakeOptimizer,
        *,
        name: str = "",
        micro_batch: int | None = None,
        clip: float | None = None,
        precision: str = "fp32",
        **options: Any,
    ) -> Iterator[Loop]:
        """Open a loop; at its end the weights are in the model, and noted.

        Args:
            model: To train; it goes to the device first.
            loss: Of outputs and targets.
            optimizer: From the model to its optimizers.
            name: Tells the loops of a script apart.
            micro_batch: Samples of a micro-batch. Where ``loss_reduction`` says how shares add up, plain PyTorch
                computes the whole batch at once.
            clip: The most that the norm of the gradients may be.
            precision: As the trainer's.
            **options: Other ones of the trainer.
        """
        if self.device is not None:
            model = model.to(self.device)
            loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
        made = optimizer(model)
        optimizers = made if isinstance(made, list) else [made]
        losses: list[Any] = []
        if self.name == "trainer":
            assert self.pool is not None
            more = {"clip_grad_norm": clip, "precision": precision, "micro_batch": micro_batch, **options}
            with onebox.Trainer(model, loss, made, **grouped(pool=self.pool, **more)) as trainer:
                opened: Loop = TrainerLoop(trainer, model, optimizers)
                yield noting(opened, losses)
                opened.pull()
                losses[:] = map(float, losses)
        else:
            whole = options.get("loss_reduction") not in (None, "mean")
            size = None if whole else micro_batch
            opened = PlainLoop(model, optimizers, loss, self.device, micro_batch=size, clip=clip, precision=precision)
            yield noting(opened, losses)
        self.result.losses += map(float, losses)
        for key, value in model.state_dict().items():
            self.result.tensors[name + key.removeprefix("_orig_mod.")] = value.detach().cpu().clone()

    def train(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: MakeOptimizer,
        batches: Batches,
        *,
        before: Callable[[int, Loop], object] = lambda step, loop: None,
        after: Callable[[int, Loop], object] = lambda step, loop: None,
        **options: Any,
    ) -> None:
        """Run one loop over batches; ``before`` and ``after`` are called around each step."""
        with self.loop(model, loss, optimizer, **options) as loop:
            for step, (inputs, targets) in enumerate(batches):
                before(step, loop)
                loop.step(inputs, targets)
                after(step, loop)


def noting(loop: Loop, losses: list[Any]) -> Loop:
    """Let a loop keep the losses of its steps."""
    step = loop.step

    def noted(inputs: Any, targets: Any = None) -> Any:
        losses.append(step(inputs, targets))
        return losses[-1]

    loop.step = noted  # type: ignore[method-assign]
    return loop


def make_way(name: str, pool: onebox.Pool | None) -> Way:
    """Return a way; the devices of its pool become the virtual ones."""
    if pool is not None:
        attach(pool)
    return Way(name, pool)


def tensors_of(values: Any, device: str | None) -> Any:
    """Return batches as a plain loop needs them: arrays as tensors, all on the device."""

    def moved(leaf: Any) -> Any:
        tensor = leaf if leaf is None or isinstance(leaf, Tensor) else torch.as_tensor(leaf)
        return tensor if device is None or tensor is None else tensor.to(device)

    return tree_map(moved, values)
