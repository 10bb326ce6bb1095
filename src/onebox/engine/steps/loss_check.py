"""Check that a batch's loss, and each metric, is the mean of its micro-batches', weighted by their samples.

Used where the user does not set ``loss_reduction``, and for all metrics, in three ways. A divisor that depends on the
batch alone is computed from it, before it has any effect: it must be proportional to the samples of each micro-batch.
Once for each capture, the workers compute losses and gradients, or metrics, of some samples, together and in parts. And
what only the step itself shows, such as a divisor that outputs decide, is compared when its results arrive.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from onebox.engine.compile.compiler import Probe
from onebox.engine.data.batch_transfer import worker_batches
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.named_state import named_state
from onebox.errors import CaptureError, OperatorError, UsageError
from onebox.graph import Mode, ModelPrograms, Port, TracedModel
from onebox.graph.lower.loss_divisors import Divisor, Measure
from onebox.plan import MicroBatch
from onebox.pool import Pool, raise_first
from onebox.pool.network.upload_compression import UploadCompression
from onebox.wire import DTYPES, program_dtype_name, spec_of, specs_by_slot, to_frame
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Put, Run, SetNumerics
from onebox.wire.protocol.responses import Scalars

_LOG = logging.getLogger("onebox")

_TOLERANCES = {"float64": 1e-9, "float32": 2e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Relative tolerance between two orders of summation, by the coarsest type in the graph, for the loss and the norm of
its gradient, which may be small compared with the gradients of single samples."""

_OF_METRICS = 1e-6
"""Least relative tolerance of metrics."""

_NORM = -1
"""Number that stands for the norm of the gradient among results."""

_LEAST = 4
"""Samples to compare with their parts, if available: some models treat a single sample differently."""

_EXACT = 1e-6
"""Relative tolerance of the loss's divisor: sums of a few non-negative numbers."""

_UNKNOWN = "whether %s could not be checked%s (%s)"

_METRIC_WAYS_OUT = (
    "evaluate() takes the mean of each metric over samples, the same on any number of devices. Return a mean, such as "
    "(outputs.argmax(1) == targets).float().mean(): a count is that times Evaluation.samples. Of a quotient or a root, "
    "return the parts as metrics of their own, such as the mean of squares, and divide or take the root of what "
    "evaluate() returns. What is none of these is computed with the model in this process, after pull()"
)

_WAYS_OUT = (
    'Say what it is: loss_reduction="sum" for a sum over samples; loss_reduction=onebox.Weighted(lambda targets: ...) '
    "with what the loss of some targets divides by{example}; results are then exact for any plan. A loss that compares "
    "the samples of a batch, as contrastive ones do, needs one micro-batch on one replica: a pool or plan of one "
    "device and no smaller micro_batch, or virtual devices. "
    'loss_reduction="mean" computes the weighted mean all the same'
)


class MeanLossCheck:
    """Check that refuses batches whose loss, or a metric of which, is not a mean over samples.

    Args:
        pool: The pool.
        captures: The captured model; its recipe decides whether a check is needed.
    """

    def __init__(self, pool: Pool, captures: Captures) -> None:
        self._pool = pool
        self._captures = captures
        self._checked: set[Hashable] = set()
        recipe = captures.recipe
        layers = recipe.model.named_modules()
        self._synchronized = [(name, each) for name, each in layers if isinstance(each, nn.SyncBatchNorm)]
        self._buffers = named_state(recipe.model, recipe.loss, lambda: 0).tensors
        self._names = {0: "the loss"} if recipe.reduction is None else {}
        """The results that have to be means: of training the loss, of an evaluation metrics, too."""
        self._names |= {1 + place: f"metric {name!r}" for place, name in enumerate(recipe.metrics)}

    def compares(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether :meth:`require` depends on the batch rather than on its shape alone."""
        if len(micro_batches) == 1:
            return False
        by_targets = self._captures.recipe.reduction is None
        sizes = dict.fromkeys(part.size for part in micro_batches)
        return bool(self._synchronized) or (
            by_targets and any(self._captures.traced(batch, size, train=True).divisors for size in sizes)
        )

    def require(self, batch: Batch, micro_batches: Sequence[MicroBatch], *, train: bool = True) -> None:
        """Refuse a batch whose loss, or a metric, is certainly not the mean over its micro-batches; no worker is used.

        Args:
            batch: The batch.
            micro_batches: Its micro-batches.
            train: Whether it is for training.

        Raises:
            UsageError: The loss is no such mean; the message gives the reason and the remedy.
        """
        if len(micro_batches) == 1:
            return
        if train:
            self._require_own_statistics(len(micro_batches))
        if not self._names:
            return
        sizes = [part.size for part in micro_batches]
        # Looked up once for each size: with every step a look-up takes longer than a divisor.
        traced = {size: self._captures.traced(batch, size, train=train) for size in dict.fromkeys(sizes)}
        for divisors in zip(*(traced[size].divisors for size in sizes), strict=False):
            name = self._names.get(divisors[0].result)
            if name is None:
                continue
            parts = zip(micro_batches, divisors, strict=True)
            found = [self._value(batch, part, each, traced[part.size]) for part, each in parts]
            if not even(found, sizes):
                raise UsageError(_uneven(name, divisors[0], [value for value, _ in found], sizes))

    def fault(
        self, measures: Sequence[Measure], results: Mapping[int, Mapping[int, float]], parts: Sequence[MicroBatch]
    ) -> UsageError | None:
        """Return the reason why a result was no mean over the micro-batches of a batch; ``None`` if it was one.

        Args:
            measures: What some results tell about others.
            results: By number of the result, the value for each micro-batch.
            parts: The micro-batches.
        """
        for measure in measures if len(parts) > 1 else ():
            name, values = self._names.get(measure.result), results.get(measure.value, {})
            if name is None or len(values) < len(parts):
                continue
            sizes = [part.size for part in parts]
            own = [values[part.index] for part in parts]
            if not all(map(math.isfinite, own)):
                continue
            tolerance = _TOLERANCES.get(program_dtype_name(measure.dtype), _EXACT)
            if measure.function is None:
                counts = [results[measure.counted][part.index] for part in parts]
                if not even(list(zip(own, counts, strict=True)), sizes):
                    return UsageError(_uneven_outputs(name, measure, counts, sizes))
                continue
            mean = sum(value * size for value, size in zip(own, sizes, strict=True)) / sum(sizes)
            functions = [measure.of_mean(value) for value in own]
            of_mean, scale = measure.of_mean(mean), max(map(abs, functions))
            weighted = sum(value * size for value, size in zip(functions, sizes, strict=True)) / sum(sizes)
            if abs(of_mean - weighted) > tolerance * scale:
                return UsageError(_unlike(name, measure, of_mean, weighted))
        return None

    def due(self, batch: Batch, micro_batches: Sequence[MicroBatch], *, train: bool = True) -> bool:
        """Return whether the workers must check batches of this kind; once for each capture."""
        checked = (self._captures.recipe.reduction is None or not train) and len(micro_batches) > 1
        emulated = any(device.kind == "sim" for device in self._pool.devices)
        if not checked or not self._names or emulated:
            return False
        return self._key(batch, micro_batches, train=train) not in self._checked

    def _key(self, batch: Batch, micro_batches: Sequence[MicroBatch], *, train: bool) -> Hashable:
        """Return the same for batches of which one code of the user's, in one state, computes the loss."""
        size = max(part.size for part in micro_batches)
        leaves = tuple((leaf.dim(), leaf.dtype) for leaf in batch.leaves)
        operators = self._captures.traced(batch, size, train=train).operators
        return str(batch.structure), batch.structure.numbers, leaves, batch.python_state, train, operators

    def probe(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], ready: InstalledPlan, packing: UploadCompression
    ) -> None:
        """Compare the loss of some samples, and the norm of its gradient, with those of their parts.

        Samples and parts are of sizes that are captured already, if possible, and halves otherwise. A model that writes
        buffers may compute by micro-batches in training, as a batch norm of one's own does: where only that differs, it
        is said and not refused.

        Args:
            batch: The batch.
            micro_batches: Its parts.
            ready: What is with the workers, none of which has a step left to end.
            packing: How batches travel to them.

        Raises:
            UsageError: They differ by more than rounding.
            OneboxError: Something failed on a worker, or it was lost.
        """
        most = max(part.size for part in micro_batches)
        for size, part in self._sizes(batch, most):
            try:
                compared = self._in_modes(batch, size, part, ready, packing)
            except (CaptureError, OperatorError) as error:
                reduction = "; loss_reduction says what it is"
                _LOG.warning(_UNKNOWN, "the loss is a mean over samples", reduction, str(error).splitlines()[0])
                if isinstance(error, OperatorError) and not ready.plan.whole:
                    error.steps = ()  # no step of the run has failed
                    raise  # unblocks the threads that wait for the result
                break
            if compared is not None:
                compared.require()
                break
        self._checked.add(self._key(batch, micro_batches, train=True))

    def _in_modes(
        self, batch: Batch, size: int, part: int, ready: InstalledPlan, packing: UploadCompression
    ) -> PartsComparison | None:
        """Return the comparison in training, or in eval mode where that is another one for a good reason."""
        samples = _spread(batch, size)
        try:
            compared = self._compare(samples, size, part, ready, packing, mode="train")
        except CaptureError:
            compared = self._compare(samples, size, part, ready, packing, mode="evaluate")
            _LOG.warning(
                _UNKNOWN, "the loss is a mean over samples in training, too,", "", "in eval mode it was compared"
            )
            return compared
        if compared is None or (compared.same and all(map(math.isfinite, (*compared.loss, *compared.norm)))):
            return compared
        traced = self._captures.traced(batch, size, train=True)
        if compared.same or traced.written:
            alone = self._compare(samples, size, part, ready, packing, mode="evaluate")
            if alone is not None and alone.same and not compared.same:
                _LOG.warning(
                    "in training, the loss of %d samples is %.6g and that of %d parts of %d %.6g, and in eval mode it "
                    "is the same: the model computes by micro-batches in training, as batch norm does, so that the "
                    "result depends on their size (micro_batch=); if it is a term of the loss that does so, one "
                    "micro-batch on one device is exact",
                    *(size, compared.loss[0], size // part, part, compared.loss[1]),
                )
            return alone
        return compared

    def probe_evaluation(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], ready: InstalledPlan, packing: UploadCompression
    ) -> None:
        """Compare the loss and the metrics of some samples with those of their parts.

        Args and errors are those of :meth:`probe`.
        """
        most = max(part.size for part in micro_batches)
        size = max(2, most if most % 2 == 0 else most - 1)
        try:
            samples = _spread(batch, size)
            probes = [ready.probe(samples, sizes, train=False, mode="evaluate") for sizes in ([size], [size // 2] * 2)]
            known = [(self._results(samples, each, packing), each.models) for each in probes if each is not None]
            if len(known) == len(probes):
                (whole, models), (parts, others) = known
                tolerance = max(_OF_METRICS, tolerance_of(_types([*models, *others])))
                for number, name in self._names.items():
                    if not alike(whole[number], parts[number], tolerance):
                        raise UsageError(_unequal(name, size, (whole[number], parts[number])))
        except (CaptureError, OperatorError) as error:
            what = " and ".join(self._names.values())
            _LOG.warning(_UNKNOWN, f"{what} are means over samples", "", str(error).splitlines()[0])
            if isinstance(error, OperatorError) and not ready.plan.whole:
                raise
        self._checked.add(self._key(batch, micro_batches, train=False))

    def _sizes(self, batch: Batch, most: int) -> list[tuple[int, int]]:
        """Return numbers of samples, and of their parts, in the order in which they are to be compared."""
        known = self._captures.sizes(batch)
        pairs = [(size, part) for size in known if size >= _LEAST for part in known if 1 < part < size]
        pairs = [(size, part) for size, part in pairs if not size % part and size <= batch.size]
        halves = [min(size, batch.size) // 2 for size in (max(most, _LEAST), _LEAST, 2)]
        return list(dict.fromkeys([*pairs, *((2 * half, half) for half in halves)]))

    # ---- divisors

    def _value(self, batch: Batch, part: MicroBatch, divisor: Divisor, traced: TracedModel) -> tuple[float, float]:
        """Return the divisor of a micro-batch; see :meth:`Divisor.of`."""

        def tensor_of(port: Port) -> torch.Tensor:
            if port.kind == "leaf":
                return batch.leaves[int(port.name)][part.start : part.start + part.size]
            found = self._buffers[str(port.name)] if port.kind == "buffer" else traced.constants[str(port.name)]
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
        self, batch: Batch, size: int, part: int, ready: InstalledPlan, packing: UploadCompression, *, mode: Mode
    ) -> PartsComparison | None:
        """Return what some samples make together, and what their parts make; ``None`` where there is no room."""
        probes = [ready.probe(batch, sizes, train=True, mode=mode) for sizes in ([size], [part] * (size // part))]
        known = [each for each in probes if each is not None]
        if len(known) < len(probes):
            return None
        found = [self._results(batch, probe, packing) for probe in known]
        types = _types([model for probe in known for model in probe.models])
        loss, norm = ((found[0][number], found[1][number]) for number in (0, _NORM))
        return PartsComparison(samples=size, part=part, loss=loss, norm=norm, tolerance=tolerance_of(types))

    def _results(self, batch: Batch, probe: Probe, packing: UploadCompression) -> dict[int, float]:
        """Return each result of a batch, weighted by samples, and the norm of the gradient; no state is changed."""
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
        square, totals = 0.0, dict[int, float]()
        sizes = [part.size for part in compiled.micro_batches]
        for routine, answer in zip(compiled.routines.values(), raise_first(futures), strict=True):
            values = [value for result in answer.results if isinstance(result, Scalars) for value in result.values]
            square += sum(values[: len(values) - len(routine.results)])
            for (micro_batch, number), value in zip(
                routine.results, values[len(values) - len(routine.results) :], strict=True
            ):
                totals[number] = totals.get(number, 0.0) + sizes[micro_batch] / sum(sizes) * value
        return {**totals, _NORM: math.sqrt(square)}


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


def even(found: Sequence[tuple[float, float]], sizes: Sequence[int]) -> bool:
    """Return whether divisors make up that of all samples: they are proportional to sizes, and where something keeps
    them from being 0 it does so for all or none.

    Args:
        found: Each divisor, and the same without what keeps it from being 0.
        sizes: The samples of each.

    Example:
        >>> even([(2.0, 2.0), (2.0, 2.0)], [3, 3]), even([(1.0, 1.0), (1.0, 0.0)], [3, 3])
        (True, False)
    """
    counts = [count for _, count in found]
    if not any(counts):
        return True
    return proportional(counts, sizes) and all(abs(value - count) <= 1e-3 * abs(count) for value, count in found)


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


def _ways_out(name: str, example: str = "") -> str:
    return _WAYS_OUT.format(example=example) if name == "the loss" else _METRIC_WAYS_OUT


def _unequal(name: str, samples: int, found: tuple[float, float]) -> str:
    """Return the error text for a result of an evaluation that is no mean over samples."""
    together, apart = found
    likely = " It looks like a sum over samples." if alike(together, 2 * apart, 1e-3) else ""
    return (
        f"{name} is no mean over samples: of {samples} samples it is {together:.6g}, and as the mean of two halves, as "
        f"micro-batches are put together, {apart:.6g}.{likely} {_ways_out(name)}"
    )


def _uneven_outputs(name: str, measure: Measure, found: Sequence[float], sizes: Sequence[int]) -> str:
    """Return the error text for a divisor that outputs decide, and that has turned out to be uneven."""
    each = [value / size for value, size in zip(found, sizes, strict=True)]
    low, high = each.index(min(each)), each.index(max(each))
    at = f" at {measure.line}" if measure.line else ""
    return (
        f"{name} is no mean over samples: it divides by a number that the outputs decide ({measure.where}{at}). That "
        f"was {found[low]:g} for the {sizes[low]} samples of micro-batch {low} and {found[high]:g} for the "
        f"{sizes[high]} of micro-batch {high}, so that their mean was another one than that of the batch; "
        f"{_already(name)}. {_divided(name)}"
    )


def _unlike(name: str, measure: Measure, of_mean: float, mean: float) -> str:
    """Return the error text for a function of a mean that is not the mean of the function."""
    at = f" at {measure.line}" if measure.line else ""
    return (
        f"{name} is no mean over samples: it is made of a function of a mean ({measure.where}{at}), which is "
        f"{of_mean:.6g} for the batch, and in the mean of its micro-batches {mean:.6g}; {_already(name)}. "
        f"{_divided(name)}"
    )


def _already(name: str) -> str:
    return "the step has been made so" if name == "the loss" else "nothing has been changed"


def _divided(name: str) -> str:
    """Return the remedy for what outputs decide."""
    if name != "the loss":
        return _METRIC_WAYS_OUT
    return (
        "Divide by the number of samples instead, or compute each batch in one micro-batch on one replica (a pool or "
        'plan of one device and no smaller micro_batch), or on virtual devices; loss_reduction="mean" computes the '
        "weighted mean of micro-batches and says nothing"
    )


def _uneven(name: str, divisor: Divisor, found: Sequence[float], sizes: Sequence[int]) -> str:
    """Return the error text for a loss whose micro-batches are not weighted by samples."""
    each = [value / size for value, size in zip(found, sizes, strict=True)]
    low, high = each.index(min(each)), each.index(max(each))
    valid = f"(targets != {divisor.ignored})"
    cause, example = {
        "targets": (
            f"some targets are ignored (ignore_index={divisor.ignored}), and it divides by how many are not",
            f", here lambda targets: {valid}.sum()",
        ),
        "classes": (
            "classes have weights, and it divides by the sum of those of its targets",
            f", here lambda targets: class_weights[targets[targets != {divisor.ignored}]].sum()",
        ),
        "other": ("it divides by something that is made of the batch", ""),
    }[divisor.kind]
    return (
        f"{name} is no mean over samples: {cause} ({divisor.where}). That is {found[low]:g} for the {sizes[low]} "
        f"samples of micro-batch {low} and {found[high]:g} for the {sizes[high]} of micro-batch {high}, so that "
        f"weighted by their samples they do not make up that of the batch. {_ways_out(name, example)}"
    )
