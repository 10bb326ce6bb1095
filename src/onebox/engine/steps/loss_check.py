"""Check that a batch's loss is the mean of its micro-batches' losses, weighted by their samples.

Used if the user does not set ``loss_reduction``, before a batch has any effect, in two ways. The divisor of the loss is
computed from the targets of each batch: it must be proportional to the samples of each micro-batch. And once for each
batch structure, the workers compute losses and gradients of some samples, together and in parts: in eval mode where
training depends on micro-batches, as with batch norm and dropout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from onebox.engine.compile.compiler import Probe
from onebox.engine.data.batch_transfer import worker_batches
from onebox.engine.data.compression import BatchCompression
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.loss_probe import probe_loss
from onebox.engine.workload.named_state import named_state
from onebox.errors import CaptureError, OperatorError, UsageError
from onebox.graph import ModelPrograms, Port
from onebox.graph.lower.loss_divisors import Divisor
from onebox.plan import MicroBatch
from onebox.pool import Pool, raise_first
from onebox.wire import DTYPES, spec_of, specs_by_slot, to_frame
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Put, Run, SetNumerics
from onebox.wire.protocol.responses import Scalars

_LOG = logging.getLogger("onebox")

_TOLERANCES = {"float64": 1e-9, "float32": 2e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Relative tolerance between two orders of summation, by the coarsest type in the graph, for the loss and the norm of
its gradient, which may be small compared with the gradients of single samples."""

_LEAST = 4
"""Samples to compare with their parts, if available: some models treat a single sample differently."""

_EXACT = 1e-6
"""Relative tolerance of the loss's divisor: sums of a few non-negative numbers."""

_UNKNOWN = "whether the loss is a mean over samples could not be checked; loss_reduction says what it is"

_WAYS_OUT = (
    'Say what it is: loss_reduction="sum" for a sum over samples; loss_reduction=onebox.Weighted(lambda targets: ...) '
    "with what the loss of some targets divides by{example}; results are then exact for any plan. A loss that compares "
    "the samples of a batch, as contrastive ones do, needs one micro-batch on one replica: a pool or plan of one "
    "device and no smaller micro_batch, or virtual devices. "
    'loss_reduction="mean" computes the weighted mean all the same'
)


class MeanLossCheck:
    """Check that refuses batches whose loss is not a mean over samples.

    Args:
        pool: The pool.
        captures: The captured model; its recipe decides whether a check is needed.
    """

    def __init__(self, pool: Pool, captures: Captures) -> None:
        self._pool = pool
        self._captures = captures
        self._probed: set[Hashable] = set()
        recipe = captures.recipe
        layers = recipe.model.named_modules()
        self._synchronized = [(name, each) for name, each in layers if isinstance(each, nn.SyncBatchNorm)]
        self._buffers = named_state(recipe.model, recipe.loss, lambda: 0).tensors

    def compares(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether :meth:`require` depends on the batch rather than on its shape alone."""
        if len(micro_batches) == 1:
            return False
        by_targets = self._captures.recipe.reduction is None
        return bool(self._synchronized) or (by_targets and any(self._divisors(batch, part) for part in micro_batches))

    def require(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> None:
        """Refuse a batch whose loss is certainly not the mean over its micro-batches; no worker is used.

        Args:
            batch: The batch.
            micro_batches: Its micro-batches.

        Raises:
            UsageError: The loss is no such mean; the message gives the reason and the remedy.
        """
        if len(micro_batches) == 1:
            return
        self._require_own_statistics(len(micro_batches))
        if self._captures.recipe.reduction is not None:
            return
        for divisors in zip(*(self._divisors(batch, part) for part in micro_batches), strict=False):
            found = [self._value(batch, part, each) for part, each in zip(micro_batches, divisors, strict=True)]
            sizes = [part.size for part in micro_batches]
            if not proportional(found, sizes):
                raise UsageError(_uneven(divisors[0], found, sizes))

    def due(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether the workers must check batches of this structure; once for each."""
        key = (str(batch.structure), tuple((leaf.dim(), leaf.dtype) for leaf in batch.leaves))
        checked = self._captures.recipe.reduction is None and len(micro_batches) > 1
        emulated = any(device.kind == "sim" for device in self._pool.devices)
        return checked and not emulated and key not in self._probed

    def probe(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], ready: InstalledPlan, packing: BatchCompression
    ) -> None:
        """Compare the loss of some samples, and the norm of its gradient, with those of their parts.

        Samples and parts are of sizes that are captured already, if possible, and halves otherwise.

        Args:
            batch: The batch.
            micro_batches: Its parts.
            ready: What is with the workers, none of which has a step left to end.
            packing: How batches travel to them.

        Raises:
            UsageError: They differ by more than rounding.
            OneboxError: Something failed on a worker, or it was lost.
        """
        for size, part in self._sizes(batch, max(part.size for part in micro_batches)):
            try:
                compared = self._compare(_spread(batch, size), size, part, ready, packing)
            except (CaptureError, OperatorError) as error:
                _LOG.warning("%s (%s)", _UNKNOWN, str(error).splitlines()[0])
                if isinstance(error, OperatorError) and not ready.plan.whole:
                    raise  # unblocks the threads that wait for the result
                break
            if compared is not None:
                compared.require()
                break
        self._probed.add((str(batch.structure), tuple((leaf.dim(), leaf.dtype) for leaf in batch.leaves)))

    def _sizes(self, batch: Batch, most: int) -> list[tuple[int, int]]:
        """Return numbers of samples, and of their parts, in the order in which they are to be compared."""
        known = self._captures.sizes(batch) if self._captures.computes_as_in_eval_mode(batch) else ()
        pairs = [(size, part) for size in known if size >= _LEAST for part in known if 1 < part < size]
        pairs = [(size, part) for size, part in pairs if not size % part]
        halves = [min(size, batch.size) // 2 for size in (max(most, _LEAST), _LEAST, 2)]
        return list(dict.fromkeys([*pairs, *((2 * half, half) for half in halves)]))

    # ---- the divisor of the loss

    def _divisors(self, batch: Batch, part: MicroBatch) -> tuple[Divisor, ...]:
        return self._captures.traced(batch, part.size, train=True).divisors

    def _value(self, batch: Batch, part: MicroBatch, divisor: Divisor) -> float:
        """Return the divisor of a micro-batch's loss."""
        constants = self._captures.traced(batch, part.size, train=True).constants

        def tensor_of(port: Port) -> torch.Tensor:
            if port.kind == "leaf":
                return batch.leaves[int(port.name)][part.start : part.start + part.size]
            found = self._buffers[str(port.name)] if port.kind == "buffer" else constants[str(port.name)]
            return found.detach().to("cpu")

        return divisor.of(tensor_of)

    def _require_own_statistics(self, count: int) -> None:
        """Refuse batch norm layers that promise statistics of the whole batch but get those of a micro-batch."""
        for name, layer in self._synchronized:
            if layer.training:
                raise UsageError(
                    f"layer {name} is a SyncBatchNorm, whose statistics are those of the whole batch, but the batch "
                    f"is cut into {count} micro-batches: each normalises by its own. Use BatchNorm where these do, "
                    "or one micro-batch on one replica (a pool or plan of one device and no smaller micro_batch), or "
                    "virtual devices, where it works as in plain PyTorch"
                )

    # ---- the comparison on workers

    def _compare(
        self, batch: Batch, size: int, part: int, ready: InstalledPlan, packing: BatchCompression
    ) -> PartsComparison | None:
        """Return what some samples make together, and what their parts make; ``None`` where there is no room.

        If the model depends on micro-batches even in eval mode, only the loss function is compared.
        """
        traced = self._captures.traced(batch, size, train=True, probe=True)
        if traced.draws or traced.by_batch:
            alone = probe_loss(self._captures.recipe, batch)
            if alone is None:
                raise CaptureError("the loss depends on chance, or its outputs are not by samples")
            (loss, norm), (parts_loss, parts_norm) = alone.whole, alone.halves
            part = size // 2
            types: Collection[str] = alone.types
        else:
            whole, parts = ready.probe(batch, [size]), ready.probe(batch, [part] * (size // part))
            if whole is None or parts is None:
                return None
            (loss, norm), (parts_loss, parts_norm) = (self._run(batch, probe, packing) for probe in (whole, parts))
            types = _types([*whole.models, *parts.models])
        return PartsComparison(
            samples=size, part=part, loss=(loss, parts_loss), norm=(norm, parts_norm), tolerance=tolerance_of(types)
        )

    def _run(self, batch: Batch, probe: Probe, packing: BatchCompression) -> tuple[float, float]:
        """Return the loss of a batch, weighted by samples, and the norm of its gradient; no state is changed."""
        compiled = probe.compiled
        on_gpus = any(device.kind == "cuda" for device in self._pool.devices)
        exact = [SetNumerics(tf32_convolutions=False)] if on_gpus else []  # rounding must not look like another loss
        futures = []
        for worker, part in worker_batches(self._pool, batch, compiled, packing).items():
            routine = compiled.routines[worker]
            weights = {
                n: torch.tensor(value, dtype=DTYPES[spec.dtype]) for n, (value, spec) in routine.constants.items()
            }
            constants = {**probe.constants, **weights}
            put = Put(tuple(constants), tuple(spec_of(tensor) for tensor in constants.values()))
            frames = [bytes(to_frame(tensor)) for tensor in constants.values()]
            free = Free(tuple(constants), tuple(define.number for define in routine.definitions))
            run = Run(routine.number, part.bindings)
            message = [*([put] if constants else []), *routine.definitions, *part.instructions, *exact, run, free]
            futures.append(self._pool.post(worker, message, [*frames, *part.frames], answer=True))
        loss = square = 0.0
        weights_of = compiled.weights_of(batch)
        for routine, answer in zip(compiled.routines.values(), raise_first(futures), strict=True):
            values = [value for result in answer.results if isinstance(result, Scalars) for value in result.values]
            square += values[0]
            for (micro_batch, _), value in zip(routine.results, values[1:], strict=True):
                loss += weights_of[micro_batch] * value
        return loss, math.sqrt(square)


@dataclass(frozen=True, kw_only=True)
class PartsComparison:
    """Comparison of samples together with their parts, weighted by samples.

    Args:
        samples: Number of samples.
        part: Number of samples of a part.
        loss: Loss of the samples together and in parts.
        norm: 2-norm of the gradients, likewise.
        tolerance: Relative tolerance.
    """

    samples: int
    part: int
    loss: tuple[float, float]
    norm: tuple[float, float]
    tolerance: float

    @property
    def same(self) -> bool:
        """True if they differ by no more than rounding."""
        return alike(*self.loss, self.tolerance) and alike(*self.norm, self.tolerance)

    def require(self) -> None:
        """Require that they are the same.

        Raises:
            UsageError: They differ; the message has both numbers and the remedy.
        """
        if self.same:
            return
        likely = ""
        count = self.samples // self.part
        if alike(self.loss[0], count * self.loss[1], 10 * self.tolerance):
            likely = ' It looks like a sum over samples (reduction="sum").'
        raise UsageError(
            f"the loss is no mean over samples: that of {self.samples} samples is {self.loss[0]:.6g} and the 2-norm of "
            f"its gradient {self.norm[0]:.6g}, but {count} parts of {self.part}, weighted by samples as micro-batches "
            f"are, give {self.loss[1]:.6g} and {self.norm[1]:.6g}.{likely} {_WAYS_OUT.format(example='')}"
        )


def alike(first: float, second: float, tolerance: float) -> bool:
    """Return whether two numbers differ only by rounding; true if neither is a number.

    Example:
        >>> alike(1.0, 1.0 + 1e-12, 1e-9), alike(1.0, 2.0, 1e-9), alike(float("nan"), 1.0, 1e-9)
        (True, False, False)
    """
    if not math.isfinite(first) and not math.isfinite(second):
        return True
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def proportional(found: Sequence[float], sizes: Sequence[int]) -> bool:
    """Return whether numbers are proportional to sizes, except for rounding.

    Example:
        >>> proportional([6.0, 2.0], [3, 1]), proportional([6.0, 3.0], [3, 1]), proportional([0.0, 0.0], [3, 1])
        (True, False, True)
    """
    each = [value / size for value, size in zip(found, sizes, strict=True)]
    return max(each) - min(each) <= _EXACT * max(map(abs, each))


def tolerance_of(types: Collection[str]) -> float:
    """Return the relative tolerance for another order of summation, by the types of the computed values.

    Example:
        >>> tolerance_of({"float64", "int64"}) < tolerance_of({"float64", "float32"}) < tolerance_of({"bfloat16"})
        True
    """
    return max((_TOLERANCES.get(each, 0.0) for each in types), default=0.0)


def _types(models: Sequence[ModelPrograms]) -> set[str]:
    """Return the element types of all values in programs."""
    parts = (part for model in models for part in model.phases.values())
    return {spec.dtype for part in parts for spec in specs_by_slot(part.program).values()}


def _spread(batch: Batch, size: int) -> Batch:
    """Return evenly spread samples of a batch."""
    chosen = torch.arange(size) * batch.size // size
    leaves = tuple(leaf.index_select(0, chosen) for leaf in batch.leaves)
    return replace(batch, leaves=leaves, size=size, samples=None)


def _uneven(divisor: Divisor, found: Sequence[float], sizes: Sequence[int]) -> str:
    """Return the error text for a loss whose micro-batches are not weighted by samples."""
    each = [value / size for value, size in zip(found, sizes, strict=True)]
    low, high = each.index(min(each)), each.index(max(each))
    valid = f"(targets != {divisor.ignored})"
    cause, example = {
        "targets": (
            f"some targets are ignored (ignore_index={divisor.ignored}), and the loss divides by how many are not",
            f", here lambda targets: {valid}.sum()",
        ),
        "classes": (
            "classes have weights, and the loss divides by the sum of those of its targets",
            f", here lambda targets: class_weights[targets[targets != {divisor.ignored}]].sum()",
        ),
        "other": ("it divides by something that is made of the batch", ""),
    }[divisor.kind]
    return (
        f"the loss is no mean over samples: {cause} ({divisor.where}). That is {found[low]:g} for the {sizes[low]} "
        f"samples of micro-batch {low} and {found[high]:g} for the {sizes[high]} of micro-batch {high}, so that "
        f"weighted by their samples they do not make up the loss of the batch. {_WAYS_OUT.format(example=example)}"
    )
