"""Captures and routines of a trainer: made when a shape is first seen, kept for the next time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onebox.engine.batch import Batch
from onebox.engine.buckets import gradient_buckets
from onebox.engine.replica import Numbers, ReplicaLowering, Share, StepRoutine
from onebox.graph import Loss, Metrics, ModelPrograms, Precision, capture, model_programs
from onebox.plan import MicroBatch, Plan
from onebox.pool import Pool
from onebox.wire import DTYPES, TensorSpec, spec_of, to_frame
from onebox.wire.messages import Ask, Call, Define, Free, Put, Routine, StoredProgram

_CAPTURING = threading.Lock()
"""torch.export keeps state in module globals: two threads must not trace at once."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a model is captured with.

    Args:
        model: The model.
        loss: The loss.
        metrics: For evaluation.
        precision: ``bf16`` for autocast.
        device_type: The device type that the graph is for.
    """

    model: nn.Module
    loss: Loss
    metrics: Metrics
    precision: Precision
    device_type: str


class Captures:
    """Programs of a model for each shape of inputs, and the buffers of their constants on the workers.

    Args:
        recipe: What to capture.
        pool: The pool.
        devices: The workers.
        new: Makes a number for something that stays on the workers.
    """

    def __init__(self, recipe: Recipe, pool: Pool, devices: tuple[int, ...], new: Callable[[], int]) -> None:
        self.new = new
        self._recipe = recipe
        self._pool = pool
        self._devices = devices
        self._models: dict[Hashable, ModelPrograms] = {}
        self._constants: dict[Hashable, dict[str, int]] = {}

    def programs(self, batch: Batch, size: int, *, train: bool, trained: frozenset[str] | None) -> ModelPrograms:
        """Return the programs for micro-batches of a size, captured once.

        Raises:
            CaptureError: The model cannot be captured.
        """
        key = (batch.signature(size), train)
        if key not in self._models:
            with _CAPTURING:
                model = self._capture(batch, size, train=train, trained=trained)
            self._models[key] = model
            self._constants[key] = {name: self.new() for name in model.constants}
            numbers = tuple(self._constants[key].values())
            if numbers:
                specs = tuple(spec_of(tensor) for tensor in model.constants.values())
                frames = [to_frame(tensor) for tensor in model.constants.values()]
                for worker in self._devices:
                    self._pool.post(worker, [Put(numbers, specs)], frames)
        return self._models[key]

    def _capture(self, batch: Batch, size: int, *, train: bool, trained: frozenset[str] | None) -> ModelPrograms:
        recipe = self._recipe
        captured = capture(
            recipe.model,
            recipe.loss,
            batch.example(size),
            mode="train" if train else "evaluate",
            metrics=recipe.metrics,
            precision=recipe.precision,
            device_type=recipe.device_type,
        )
        return model_programs(captured, backward=train, trained=trained)

    def constants(self, batch: Batch, size: int, *, train: bool) -> dict[str, int]:
        """Return the buffers of a capture's constants, by name."""
        return self._constants[batch.signature(size), train]


class Compiler:
    """Makes the routines of a trainer and stores them on the workers.

    Args:
        pool: The pool.
        plan: The plan.
        captures: The captured model.
        state: Buffer numbers of parameters and buffers, by name.
        max_norm: For clipping; 0 for none.
    """

    def __init__(self, pool: Pool, plan: Plan, captures: Captures, state: Mapping[str, int], max_norm: float) -> None:
        self._pool = pool
        self._plan = plan
        self._state = state
        self._max_norm = max_norm
        self._captures = captures
        self._lowerings: list[ReplicaLowering] = []
        self._steps: dict[Hashable, tuple[list[StepRoutine], list[list[MicroBatch]]]] = {}
        self._evaluations: dict[Hashable, int] = {}
        self.trained: tuple[str, ...] = ()

    def begin(
        self, batch: Batch, wanted: tuple[str, ...], define: Callable[[tuple[str, ...]], int], group: int
    ) -> None:
        """Learn from the first batch which parameters have gradients, and fix the buckets.

        Args:
            batch: The first batch.
            wanted: Parameters that the optimizer holds.
            define: Defines the optimizer over the parameters that are trained and returns its number.
            group: The group of the replicas.
        """
        parts = [part for parts in self._plan.micro_batches(batch.size) for part in parts]
        model = self._captures.programs(batch, parts[0].size, train=True, trained=frozenset(wanted))
        assert model.backward is not None
        with_gradient = {str(port.name) for port in model.backward.outputs}
        self.trained = tuple(name for name in wanted if name in with_gradient)
        numbers = Numbers(state=self._state, optimizer=define(self.trained), group=group, new=self._captures.new)
        buckets = gradient_buckets(model.backward)
        self._lowerings = [
            ReplicaLowering(
                numbers,
                trained=self.trained,
                buckets=buckets,
                max_norm=self._max_norm,
                replicated=len(self._plan.devices) > 1,
            )
            for _ in self._plan.devices
        ]

    def step(self, batch: Batch) -> tuple[list[StepRoutine], list[list[MicroBatch]]]:
        """Return the routine of each replica for a batch, and its micro-batches; made once for each size."""
        key = batch.signature(batch.size)
        if key not in self._steps:
            shares = self._plan.micro_batches(batch.size)
            parts = [part for share in shares for part in share]
            sizes = dict.fromkeys(part.size for part in parts)
            trained = frozenset(self.trained)
            models = {size: self._captures.programs(batch, size, train=True, trained=trained) for size in sizes}
            constants = {size: self._captures.constants(batch, size, train=True) for size in sizes}
            routines = []
            for lowering, share, worker in zip(self._lowerings, shares, self._plan.devices, strict=True):
                last = share[-1].index if share else -1
                routine = lowering.lower(
                    Share(
                        micro_batches=share,
                        after=len(parts) - 1 - last,
                        total=len(parts),
                        batch=batch.size,
                    ),
                    models,
                    constants,
                    next(iter(models.values())),
                    len(batch.leaves),
                )
                self._store(worker, routine)
                routines.append(routine)
            self._steps[key] = (routines, shares)
        return self._steps[key]

    def _store(self, worker: int, routine: StepRoutine) -> None:
        weights = [torch.tensor(weight, dtype=DTYPES[spec.dtype]) for weight, spec in routine.weights.values()]
        put = Put(tuple(routine.weights), tuple(spec_of(weight) for weight in weights))
        self._pool.post(worker, [put, *routine.definitions], [to_frame(weight) for weight in weights])

    def evaluation(self, batch: Batch, size: int) -> int:
        """Return the number of the routine that evaluates so many samples; made once, stored on all workers."""
        key = batch.signature(size)
        if key not in self._evaluations:
            model = self._captures.programs(batch, size, train=False, trained=None)
            constants = self._captures.constants(batch, size, train=False)
            new = self._captures.new
            program, routine = new(), new()
            results = [new() for _ in model.forward.outputs]
            inputs, takes = [], []
            for position, port in enumerate(model.forward.inputs):
                if port.kind == "leaf":
                    inputs.append(-1 - int(port.name))
                    takes.append(position)
                elif port.kind == "constant":
                    inputs.append(constants[str(port.name)])
                else:
                    inputs.append(self._state[str(port.name)])
            leaves = len(batch.leaves)
            steps = (
                Call(program, tuple(inputs), tuple(results), tuple(takes)),
                Ask("scalars", tuple(results)),
                Free((*results, *(-1 - leaf for leaf in range(leaves)))),
            )
            for worker in self._plan.devices:
                self._pool.post(
                    worker,
                    [
                        Define(program, StoredProgram(model.forward.program)),
                        Define(routine, Routine(steps, leaves)),
                    ],
                )
            self._evaluations[key] = routine
        return self._evaluations[key]


def put_leaves(pool: Pool, leaves: Any) -> tuple[Put, tuple[int, ...], list[Any]]:
    """Return the instruction that uploads tensors into new buffers, their numbers, and copies of their elements."""
    numbers = tuple(pool.new_number() for _ in leaves)
    specs: tuple[TensorSpec, ...] = tuple(spec_of(leaf) for leaf in leaves)
    return Put(numbers, specs), numbers, [bytes(to_frame(leaf)) for leaf in leaves]
