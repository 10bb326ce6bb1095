"""Capture cache of a trainer: one capture for each shape and each Python state, made at first use."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.engine.workload.batch import Batch
from onebox.engine.workload.loss_reduction import LossReduction, Weighted
from onebox.engine.workload.named_state import named_state
from onebox.engine.workload.step_thread import StepThread
from onebox.errors import CaptureError, UsageError
from onebox.graph import TRACING, Captured, Loss, Metrics, Mode, Precision, TracedModel
from onebox.graph.capture.export import capture
from onebox.graph.capture.guards import Guards, Watch
from onebox.graph.capture.on_device_transform import OnDevice
from onebox.graph.capture.symbolic_sizes import Varying
from onebox.pool import DeviceInfo
from onebox.trainer_options import Numerics, SegmentCosts
from onebox.wire import TensorSpec
from onebox.worker.sandbox.allow_list import pinned_names

_LOG = logging.getLogger("onebox")

_MOST_STATES = 8
"""Most Python states that a model is captured in: each capture takes about a second, and memory on the workers."""

_SYMBOLIC_FROM = 2
"""Number of further sizes from which a capture uses symbolic sizes: such a capture takes three times as long."""

_MOST_SYMBOLIC = 3
"""Most symbolic captures of a model: each covers another set of varying dimensions."""

_LEAST_SYMBOLIC = 2
"""Smallest value of a PyTorch symbolic size; never 0 or 1."""

_MANY_ALONE = 4
"""Number of captures with a fixed size that causes a warning."""

_MOST_NUMBERS = 4
"""Most different values of the numbers among the inputs; each takes a capture of seconds."""


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """Arguments of a model's capture.

    Args:
        model: The model.
        loss: The loss.
        metrics: Metrics for evaluation.
        precision: ``bf16`` for autocast; any other value captures the model unchanged.
        device_type: Target device type of the graph.
        trained: Parameters that require gradients.
        on_device: Tensor code that runs before the model.
        fuse: Whether to fuse activations that are written out as several operators.
        costs: Costs of the model's segments on emulated devices; ``None`` for the plan's predictions.
        reduction: Reduction of the micro-batches' losses to the batch's loss.
        numerics: Precision and determinism of operators; open values are PyTorch's defaults.
        guards: Whether changes of what the model reads of Python are noticed: ``required`` refuses a model of which
            they cannot be, with ``none`` they are not.
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
    numerics: Numerics = Numerics()
    guards: Literal["required", "tried", "none"] = "tried"


def target_type(devices: Iterable[DeviceInfo]) -> str:
    """Return the device type that graphs for some devices are captured for."""
    return "cuda" if any(device.kind == "cuda" for device in devices) else "cpu"


class Captures:
    """Captures of one model, one for each shape of inputs.

    Args:
        recipe: The capture arguments.
    """

    def __init__(self, recipe: CaptureSpec) -> None:
        self.recipe = recipe
        self.step_thread = StepThread()
        """The thread that uses the model, and makes the captures that others need."""
        self._traced: dict[Hashable, TracedModel] = {}
        self._training: dict[Hashable, dict[int, TracedModel]] = {}
        owners = ("model", recipe.model), ("loss", recipe.loss)
        self._owners = {name: owner for name, owner in owners if isinstance(owner, nn.Module)}
        self._states: list[list[Watch]] = [[]]
        """What the captures of each Python state read."""
        self._state = 0
        self._read: dict[bool, set[Guards]] = {}
        """What Dynamo has read, for training and for evaluation."""
        self._warned = self._effects = False
        self._families: dict[Hashable, _Family] = {}
        self._numbers: dict[Hashable, set[tuple[str, ...]]] = {}

    def regroupable(self, batch: Batch, size: int) -> bool:
        """Return whether samples of training may be in other micro-batches with the same result, but for rounding.

        Args:
            batch: A batch of the same kind.
            size: Samples of the present micro-batches.

        Raises:
            CaptureError: The model cannot be captured.
        """
        return self.traced(batch, size, train=True).regroupable

    def traced(
        self, batch: Batch, size: int, *, train: bool, halves: bool = False, probe: Mode | None = None
    ) -> TracedModel:
        """Return the capture for micro-batches of a size.

        Args:
            batch: A batch of the same kind.
            size: Samples of a micro-batch.
            train: Whether gradients are needed.
            halves: Whether backward may be split into input and weight gradients.
            probe: For the comparison of samples together and in parts, the mode in which they are computed: by
                :meth:`~onebox.graph.TracedModel.apart`, without a change of a buffer.

        Raises:
            CaptureError: The model cannot be captured, or samples depend on chance or on each other.
        """
        key = (batch.signature(size), train, halves and train, probe)
        if key not in self._traced:
            if halves and train:
                whole = self.traced(batch, size, train=True)
                with TRACING:
                    self._traced[key] = whole.halved()
                return self._traced[key]
            if self.step_thread.elsewhere:
                return self.step_thread.call(lambda: self.traced(batch, size, train=train, probe=probe))
            if probe is not None:
                self._traced[key] = self._apart(batch, size, train=train, mode=probe)
                return self._traced[key]
            self._count_numbers(batch, size, train=train)
            with TRACING:
                traced = self._sized(batch, size, train=train) or self._timed(batch, size, train=train)
            self._add(batch, size, traced, train=train)
        return self._traced[key]

    def _add(self, batch: Batch, size: int, traced: TracedModel, *, train: bool) -> None:
        """Store a capture."""
        self._watch(batch.python_state, traced.watch)
        self._effects = self._effects or traced.watch.effects is not None
        weighted = train and isinstance(self.recipe.reduction, Weighted)
        made = traced.with_weight_in_batch(len(batch.leaves)) if weighted else traced
        self._traced[batch.signature(size), train, False, None] = made
        if train:
            self._training.setdefault(batch.signature(0), {})[size] = made

    def _apart(self, batch: Batch, size: int, *, train: bool, mode: Mode) -> TracedModel:
        """Return the capture for a comparison; one of training, or of an evaluation, serves for steps, too."""
        known = self._traced.get((batch.signature(size), train, False, None))
        with TRACING:
            if train and mode == "evaluate":
                known = self._capture(batch, size, train=True, probe=True)
            elif known is None:
                known = self._capture(batch, size, train=train)
                self._add(batch, size, known, train=train)
            found = known.apart()
        if found is None:
            raise CaptureError("samples depend on chance, or on others of their micro-batch")
        return found

    def sizes(self, batch: Batch) -> tuple[int, ...]:
        """Return the sizes of micro-batches for which training with batches of a kind is captured, ascending."""
        return tuple(sorted(self._training.get(batch.signature(0), ())))

    def adopt(self, other: Captures, batch: Batch, largest: int) -> None:
        """Take the captures of training that another object has just made of this model, where they are the same.

        Args:
            other: The other captures, in one Python state.
            batch: A batch of the same kind, marked with the present Python state.
            largest: Samples of the largest micro-batch whose capture is taken.
        """
        if batch.python_state or _traced_by(self.recipe) != _traced_by(other.recipe):
            return
        for size, traced in other._training.get(batch.signature(0), {}).items():
            if size <= largest and (traced.unread is None or self.recipe.guards != "required"):
                whole, halved = ((batch.signature(size), True, halves, None) for halves in (False, True))
                self._traced.setdefault(whole, traced)
                if halved in other._traced:
                    self._traced.setdefault(halved, other._traced[halved])
                self._training.setdefault(batch.signature(0), {}).setdefault(size, traced)
                self._watch(0, traced.watch)

    def stamped(self, batch: Batch) -> Batch:
        """Return a batch marked with the present Python state, in which it is to be computed.

        A change of Python state that a capture has read, such as a dropout rate or a variable of the loss, causes
        another capture, which is logged; an earlier state reuses its capture.

        Args:
            batch: The batch.

        Raises:
            UsageError: There are too many different states.
        """
        changed = self._changed(self._state)
        if changed:
            known = (number for number in range(len(self._states)) if self._changed(number) is None)
            self._state = next(known, len(self._states))
            if self._state == len(self._states):
                self._begin_state(changed)
        return batch if batch.python_state == self._state else replace(batch, python_state=self._state)

    def repeat_effects(self, batch: Batch, sizes: Iterable[int], *, train: bool) -> None:
        """Do to Python's state what the code does to it in each micro-batch, such as to count.

        Args:
            batch: The batch.
            sizes: Samples of each micro-batch.
            train: Whether it is one of training.
        """
        for size in sizes if self._effects else ():
            effects = self.traced(batch, size, train=train).watch.effects
            if effects is not None:
                effects()

    def _watch(self, state: int, watch: Watch) -> None:
        """Add what a capture has read to a state's."""
        watches = self._states[state]
        if not any(each.covers(watch) for each in watches):
            watches[:] = [each for each in watches if not watch.covers(each)] + [watch]

    def _changed(self, state: int) -> str | None:
        """Return what has changed since a state, as text; ``None`` if nothing has that its captures read."""
        return next((text for watch in self._states[state] if (text := watch.changed)), None)

    def _begin_state(self, changed: str) -> None:
        if len(self._states) >= _MOST_STATES:
            raise UsageError(
                f"{changed} has changed {len(self._states)} times, and the model was captured anew each time\n"
                "  Give what changes from step to step as a tensor among the inputs or targets, or run the code on a "
                "virtual device (vgpu)"
            )
        _LOG.info("%s changed since the model was captured: it is captured anew", changed)
        self._states.append([])

    def _sized(self, batch: Batch, size: int, *, train: bool) -> TracedModel | None:
        """Return the capture for a batch that differs from an earlier one in some sizes, such as sequence lengths.

        From the third set of sizes on, the capture is symbolic and serves all further sizes.
        """
        family = self._families.setdefault((batch.kind(size), train), _Family())
        example = batch.example(size)
        leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
        known = family.sized(leaves)
        if known is None and family.add(leaves):
            begin_s = time.perf_counter()
            try:
                family.keep(self._plain_capture(example, train=train, varying=family.varying))
            except Exception as error:  # PyTorch's symbolic sizes do not work with every operator
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
        return None if known is None else self._model(known, train=train)

    def _timed(self, batch: Batch, size: int, *, train: bool) -> TracedModel:
        """Return a new capture; log its time if it is not the first."""
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
        """Warn once that buffers written by an evaluation keep their values."""
        if names and not self._warned:
            self._warned = True
            _LOG.warning(
                "in eval mode the model writes to %s, which plain PyTorch would keep: evaluate() changes nothing on "
                "the workers, and what is written is dropped; write only while self.training, or evaluate on a "
                "virtual device (vgpu)",
                ", ".join(names[:3]) + (f" and {len(names) - 3} more buffers" if len(names) > 3 else ""),
            )

    def _count_numbers(self, batch: Batch, size: int, *, train: bool) -> None:
        """Log a changed number among the inputs, and refuse it after a few changes."""
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
        """Parameters that require gradients."""
        return self.recipe.trained

    def state_specs(self) -> dict[str, TensorSpec]:
        """Return the spec of each parameter and buffer of the model and the loss, by name."""
        state = named_state(self.recipe.model, self.recipe.loss, lambda: 0)
        return {name: state.spec(name) for name in state.tensors}

    def _capture(self, batch: Batch, size: int, *, train: bool, probe: bool = False) -> TracedModel:
        try:
            captured = self._plain_capture(batch.example(size), train=train, probe=probe)
            return self._model(captured, train=train)
        except CaptureError as error:
            if not error.unfit:
                raise
            part = (
                f"; this is a micro-batch of {size} of its {batch.size} samples: inputs and targets are divided along "
                "the first dimension, which has to be that of samples (batch_first=True of recurrent layers)"
            )
            part = f"{part}{self._kept_by_sample(batch, error)}" if size < batch.size else ""
            raise CaptureError(f"{error}; the batch has {batch}{part}", where=error.where, unfit=True) from error

    def _kept_by_sample(self, batch: Batch, error: CaptureError) -> str:
        """Return the cause of a misfit where a buffer seems to have a row for each sample of a batch."""
        for owner in self._owners.values():
            for name, buffer in owner.named_buffers():
                if (batch.size in buffer.shape and batch.size > 1) or f"got {list(buffer.shape)}" in str(error):
                    return (
                        f". Buffer {name} {list(buffer.shape)} seems to hold something for each sample of a batch, "
                        "such as a state that is carried from batch to batch: buffers are not divided, so that such a "
                        "model needs one micro-batch on one replica (a pool or plan of one device and no smaller "
                        "micro_batch), or virtual devices"
                    )
        return ""

    def _model(self, captured: Captured, *, train: bool) -> TracedModel:
        measured = self.recipe.reduction is None or (not train and bool(self.recipe.metrics))
        made = TracedModel(captured, backward=train, trained=self.recipe.trained, measured=measured)
        made.require(pinned_names())
        return made

    def _plain_capture(
        self, example: tuple[Any, Any], *, train: bool, probe: bool = False, varying: Varying | None = None
    ) -> Captured:
        recipe = self.recipe
        captured = capture(
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
            guards=recipe.guards != "none" and (self._effects or not probe),
            known=list(self._read.get(train, ())),
        )
        if recipe.guards == "required" and captured.unread is not None:
            raise captured.unread
        if captured.watch.guards and not probe:
            self._read.setdefault(train, set()).add(captured.watch.guards[0])
        return captured


def _traced_by(recipe: CaptureSpec) -> CaptureSpec:
    """Return a recipe reduced to what captures of training depend on, among it whether batches hold weights."""
    weighted = recipe.reduction if isinstance(recipe.reduction, Weighted) else None
    return replace(recipe, metrics={}, costs=None, reduction=weighted, numerics=Numerics(), guards="tried")


def _short(error: Exception) -> str:
    """Return the first line of an onebox error, or the type of any other."""
    return str(error).partition("\n")[0] if isinstance(error, CaptureError) else type(error).__name__


class _Family:
    """Captures for inputs and targets that differ in some sizes."""

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self.varying: dict[int, frozenset[int]] = {}
        self._first: list[tuple[int, ...]] | None = None
        self._others = self._tries = 0
        self.alone = 0

    def add(self, leaves: Sequence[Tensor]) -> bool:
        """Record sizes, and return whether to capture symbolically in the dimensions that have varied so far."""
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if self._first is None:
            self._first = shapes
            return False
        for number, (shape, first) in enumerate(zip(shapes, self._first, strict=True)):
            dims = {dim for dim, pair in enumerate(zip(shape, first, strict=True)) if pair[0] != pair[1]}
            if dims:
                self.varying[number] = self.varying.get(number, frozenset()) | dims
        if shapes == self._first:  # could not be captured before
            return False
        self._others += 1
        smallest = min(shapes[number][dim] for number, dims in self.varying.items() for dim in dims)
        if self._others < _SYMBOLIC_FROM or smallest < _LEAST_SYMBOLIC:
            return False
        self._tries += 1
        return self._tries <= _MOST_SYMBOLIC

    def keep(self, captured: Captured) -> None:
        """Store a symbolic capture, unless it is valid for a single value of each size only."""
        if captured.of_one_size:
            self._tries = _MOST_SYMBOLIC
            raise CaptureError("the model decides by them")
        self.captured = captured

    def sized(self, leaves: Sequence[Tensor]) -> Captured | None:
        """Return a symbolic capture that is valid for the given sizes, if there is one."""
        return None if self.captured is None else self.captured.sized(leaves)

    def __str__(self) -> str:
        places = (
            f"dimension {dim} of tensor {number}" for number, dims in self.varying.items() for dim in sorted(dims)
        )
        return ", ".join(places)
