"""Captures of a trainer: made when a shape, or a state of Python, is first seen, kept for the next time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.engine.workload.batch import Batch
from onebox.engine.workload.emulated_costs import SegmentCosts
from onebox.engine.workload.loss_reduction import LossReduction, Weighted
from onebox.engine.workload.named_state import named_state
from onebox.errors import CaptureError, UsageError
from onebox.graph import Captured, Loss, Metrics, Precision, TracedModel, capture
from onebox.graph.capture.on_device_transform import OnDevice
from onebox.graph.capture.python_state import PythonStateGuard
from onebox.graph.capture.python_variables import WatchedValue
from onebox.graph.capture.symbolic_sizes import Varying
from onebox.wire import TensorSpec

_LOG = logging.getLogger("onebox")

_MOST_STATES = 8
"""So many states of Python a model may be captured in: each takes a second or so, and memory on the workers."""

_SYMBOLIC_FROM = 2
"""From so many other sizes than the first on, symbols stand for them: that capture takes three times as long."""

_MOST_SYMBOLIC = 3
"""So many times a model is captured with symbols: each time for what varied otherwise than before."""

_LEAST_SYMBOLIC = 2
"""PyTorch's symbols are never 0 or 1."""

_MANY_ALONE = 4
"""So many captures for one size each are said in a warning."""

_CAPTURING = threading.Lock()
"""The tracer keeps state in module globals: two threads must not trace at once."""

_MOST_NUMBERS = 4
"""So many different values may the numbers among the inputs have, each of which takes a capture of seconds."""


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """What a model is captured with.

    Args:
        model: The model.
        loss: The loss.
        metrics: For evaluation.
        precision: ``bf16`` for autocast; any other one captures the model as it is.
        device_type: The device type that the graph is for.
        trained: Parameters whose gradients are wanted.
        on_device: Tensor code in front of the model.
        fuse: Whether activations that are written out become single operators.
        costs: What its segments cost devices that compute nothing; ``None`` for what the plan predicts.
        reduction: How the losses of micro-batches make up that of their batch.
    """

    model: nn.Module
    loss: Loss
    metrics: Metrics
    precision: Precision
    device_type: str
    trained: frozenset[str]
    on_device: OnDevice | None = None
    fuse: bool = False
    costs: SegmentCosts | None = None
    reduction: LossReduction = None


class Captures:
    """A model, traced for each shape of inputs, each once.

    Args:
        recipe: What to capture.
    """

    def __init__(self, recipe: CaptureSpec) -> None:
        self.recipe = recipe
        self._traced: dict[Hashable, TracedModel] = {}
        owners = ("model", recipe.model), ("loss", recipe.loss)
        self._owners = {name: owner for name, owner in owners if isinstance(owner, nn.Module)}
        self._states = [PythonStateGuard(self._owners)]
        self._state = 0
        self._warned = False
        self._families: dict[Hashable, _Family] = {}
        self._numbers: dict[Hashable, set[tuple[str, ...]]] = {}

    def traced(self, batch: Batch, size: int, *, train: bool, halves: bool = False, probe: bool = False) -> TracedModel:
        """Return the model for micro-batches of a size.

        Args:
            batch: A batch of the same kind.
            size: Samples of a micro-batch.
            train: Whether gradients are wanted.
            halves: Whether backward may be divided.
            probe: Whether it is the model in eval mode, with gradients, which changes no buffer.

        Raises:
            CaptureError: The model cannot be captured.
        """
        key = (batch.signature(size), train, halves and train, probe)
        if key not in self._traced:
            if halves and train:
                self._traced[key] = self.traced(batch, size, train=True).halved()
                return self._traced[key]
            self._count_numbers(batch, size, train=train)
            with _CAPTURING:
                if probe:
                    traced = self._capture(batch, size, train=train, probe=True)
                else:
                    traced = self._sized(batch, size, train=train) or self._timed(batch, size, train=train)
                    self._states[batch.python_state].add(traced.reads)
            weighted = train and not probe and isinstance(self.recipe.reduction, Weighted)
            self._traced[key] = traced.with_weight_in_batch(len(batch.leaves)) if weighted else traced
        return self._traced[key]

    def stamped(self, batch: Batch) -> Batch:
        """Return a batch that says which state of Python it is to be computed in: the present one.

        A change of what a capture has read of Python, such as the rate of a dropout or a variable that the loss reads,
        makes another capture, which is said in the log; a state that was there before has its own already.

        Args:
            batch: The batch.

        Raises:
            UsageError: There have been too many.
        """
        changed = self._states[self._state].changed()
        if changed:
            known = (number for number, state in enumerate(self._states) if not state.changed())
            self._state = next(known, len(self._states))
            if self._state == len(self._states):
                self._begin_state(changed)
        return batch if batch.python_state == self._state else replace(batch, python_state=self._state)

    def _begin_state(self, changed: Sequence[tuple[WatchedValue, Any]]) -> None:
        source, now = changed[0]
        if len(self._states) >= _MOST_STATES:
            raise UsageError(
                f"{source} has changed {len(self._states)} times, and the model was captured anew each time; now it is "
                f"{now!r}\n  Give what changes from step to step as a tensor among the inputs or targets, or run the "
                "code on a virtual device (vgpu)"
            )
        names = ", ".join(str(each) for each, _ in changed[:3])
        _LOG.info("%s changed since the model was captured (%s is now %r): it is captured anew", names, source, now)
        self._states.append(PythonStateGuard(self._owners))

    def _sized(self, batch: Batch, size: int, *, train: bool) -> TracedModel | None:
        """Return the model for a batch that differs from one before it by some sizes, such as the length of sequences.

        The third time that sizes differ it is captured with symbols for them, which serves all others.
        """
        family = self._families.setdefault((batch.kind(size), train), _Family())
        example = batch.example(size)
        leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
        known = family.sized(leaves)
        if known is None and family.add(leaves):
            begin_s = time.perf_counter()
            try:
                family.keep(self._plain_capture(example, train=train, varying=family.varying))
            except Exception as error:  # PyTorch's symbols do not go everywhere that its numbers do
                _LOG.info("sizes %s cannot be symbols (%s): each is a capture of its own", family, _short(error))
            known = family.sized(leaves)
            if known is not None:
                took_s = time.perf_counter() - begin_s
                _LOG.info("captured once more in %.1f s, with symbols for sizes that vary: %s", took_s, family)
        if known is None:
            family.alone += 1
            if family.alone == _MANY_ALONE:
                _LOG.warning(
                    "captured %d times for other sizes (%s): each of these, and each that follows, is a capture of its "
                    "own; pad=onebox.Buckets(multiple=16), for example, makes them few",
                    family.alone,
                    family,
                )
        return None if known is None else TracedModel(known, backward=train, trained=self.recipe.trained)

    def _timed(self, batch: Batch, size: int, *, train: bool) -> TracedModel:
        """Return the model, captured; say so in the log where that is not the first time."""
        if train and not self.recipe.model.training and not self._traced:
            _LOG.warning(
                "the model is in eval mode, and is trained in it, as a training loop would: without dropout, and with "
                "the running statistics of batch norm; call model.train() before the step if that is not wanted"
            )
        begin_s, again = time.perf_counter(), bool(self._traced)
        made = self._capture(batch, size, train=train)
        self._warn_of_writes(() if train else made.written)
        if again:
            shapes = ", ".join(str([size, *leaf.shape[1:]]) for leaf in batch.leaves)
            took_s = time.perf_counter() - begin_s
            _LOG.info("captured in %.1f s for %s, of %s", took_s, "training" if train else "evaluation", shapes)
        return made

    def _warn_of_writes(self, names: Sequence[str]) -> None:
        """Say once of buffers that an evaluation writes, that they stay as they are."""
        if names and not self._warned:
            self._warned = True
            _LOG.warning(
                "in eval mode the model writes to %s, which plain PyTorch would keep: evaluate() changes nothing on "
                "the workers, and what is written is dropped; write only while self.training, or evaluate on a "
                "virtual device (vgpu)",
                ", ".join(names[:3]) + (f" and {len(names) - 3} more buffers" if len(names) > 3 else ""),
            )

    def _count_numbers(self, batch: Batch, size: int, *, train: bool) -> None:
        """Say that a number among the inputs is another than before, and refuse it after a few."""
        numbers = batch.structure.numbers
        known = self._numbers.setdefault((batch.structure.key, size, train, batch.python_state), set())
        if numbers in known:
            return
        if len(known) >= _MOST_NUMBERS:
            raise UsageError(
                f"numbers among the inputs are constants of the captured graph; these have had {len(known)} values, "
                f"and now come {', '.join(numbers)}. Give a number that changes as a tensor with a value for each "
                "sample, such as torch.full((batch_size,), value)"
            )
        if known:
            _LOG.info("captured anew for other numbers among the inputs: %s", ", ".join(numbers))
        known.add(numbers)

    def segments(self, batch: Batch, size: int) -> tuple[str, ...]:
        """Return the names of the model's segments."""
        return self.traced(batch, size, train=True, halves=True).segments

    @property
    def trained(self) -> frozenset[str]:
        """Parameters whose gradients are wanted."""
        return self.recipe.trained

    def state_specs(self) -> dict[str, TensorSpec]:
        """Return what each parameter and buffer of the model and the loss is, by name."""
        state = named_state(self.recipe.model, self.recipe.loss, lambda: 0)
        return {name: state.spec(name) for name in state.tensors}

    def _capture(self, batch: Batch, size: int, *, train: bool, probe: bool = False) -> TracedModel:
        try:
            captured = self._plain_capture(batch.example(size), train=train, probe=probe)
            return TracedModel(captured, backward=train, trained=self.recipe.trained, updates=not probe)
        except CaptureError as error:
            if not error.unfit:
                raise
            part = (
                f"; this is a micro-batch of {size} of its {batch.size} samples: inputs and targets are divided along "
                "the first dimension, which has to be that of samples (batch_first=True of recurrent layers)"
            )
            said = f"{error}; the batch has {batch}{part if size < batch.size else ''}"
            raise CaptureError(said, where=error.where, unfit=True) from error

    def _plain_capture(
        self, example: tuple[Any, Any], *, train: bool, probe: bool = False, varying: Varying | None = None
    ) -> Captured:
        recipe = self.recipe
        return capture(
            recipe.model,
            recipe.loss,
            example,
            mode="train" if train and not probe else "evaluate",
            backward=train,
            metrics=None if probe else recipe.metrics,
            precision=recipe.precision,
            device_type=recipe.device_type,
            on_device=recipe.on_device,
            fuse=recipe.fuse,
            varying=varying,
        )


def _short(error: Exception) -> str:
    """Return the first line of an error, or its type where it is none of onebox's."""
    return str(error).partition("\n")[0] if isinstance(error, CaptureError) else type(error).__name__


class _Family:
    """Captures for inputs and targets that differ by some of their sizes."""

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self.varying: dict[int, frozenset[int]] = {}
        self._first: list[tuple[int, ...]] | None = None
        self._others = self._tries = 0
        self.alone = 0

    def add(self, leaves: Sequence[Tensor]) -> bool:
        """Take note of sizes, and tell whether to capture with symbols for those that have varied so far."""
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if self._first is None:
            self._first = shapes
            return False
        for number, (shape, first) in enumerate(zip(shapes, self._first, strict=True)):
            dims = {dim for dim, pair in enumerate(zip(shape, first, strict=True)) if pair[0] != pair[1]}
            if dims:
                self.varying[number] = self.varying.get(number, frozenset()) | dims
        if shapes == self._first:  # which could not be captured before
            return False
        self._others += 1
        smallest = min(shapes[number][dim] for number, dims in self.varying.items() for dim in dims)
        if self._others < _SYMBOLIC_FROM or smallest < _LEAST_SYMBOLIC:
            return False
        self._tries += 1
        return self._tries <= _MOST_SYMBOLIC

    def keep(self, captured: Captured) -> None:
        """Keep a capture with symbols, unless it is for one value of each only: so another one would be."""
        if captured.of_one_size:
            self._tries = _MOST_SYMBOLIC
            raise CaptureError("the model decides by them")
        self.captured = captured

    def sized(self, leaves: Sequence[Tensor]) -> Captured | None:
        """Return the capture for sizes, if there is one with symbols that is for these."""
        return None if self.captured is None else self.captured.sized(leaves)

    def __str__(self) -> str:
        places = (
            f"dimension {dim} of tensor {number}" for number, dims in self.varying.items() for dim in sorted(dims)
        )
        return ", ".join(places)
