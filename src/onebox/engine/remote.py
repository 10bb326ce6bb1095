"""The training state on the workers: parameters, buffers and optimizer of a trainer, the same on every replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onebox.engine.state import (
    OptimizerEntries,
    local_optimizer_state,
    named_state,
    optimizer_definition,
    options_of,
    state_entries,
    trained_names,
)
from onebox.pool import Pool, raise_first
from onebox.wire import TensorSpec, from_frame, spec_of, to_frame
from onebox.wire.messages import Ask, Define, Free, Get, Memory, OptimizerState, Options, Put, Tensors


class RemoteState:
    """Parameters, buffers and optimizer on the workers of a trainer.

    Args:
        model: The user's model; its tensors are uploaded.
        loss: The user's loss, which may be a module with tensors of its own.
        optimizer: The user's optimizer; what it remembers is taken over.
        pool: The pool.

    Raises:
        UsageError: The optimizer is none that workers run, or holds other tensors than the model's.
    """

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, pool: Pool) -> None:
        self.optimizer = optimizer
        self.remembered: OptimizerEntries
        self._pool = pool
        self._workers = range(len(pool))
        self._ledger: list[int] = []
        self._optimizer_number = 0
        self._trained: tuple[str, ...] | None = None
        self._sent_options: tuple[Options, ...] = ()
        self.named = named_state(model, loss, self.new_number)
        self.wanted = trained_names(self.named, optimizer)
        self.remembered = local_optimizer_state(optimizer, self.named)
        for name, tensor in self.named.tensors.items():
            put = Put((self.named.numbers[name],), (spec_of(tensor),))
            frame = to_frame(tensor.detach().clone())
            for worker in self._workers:
                pool.post(worker, [put], [frame])

    def new_number(self) -> int:
        """Return a number for something that stays on the workers until the trainer is closed."""
        self._ledger.append(self._pool.new_number())
        return self._ledger[-1]

    def define_optimizer(self, trained: tuple[str, ...]) -> int:
        """Define the optimizer over the parameters that have gradients, on all workers; return its number.

        Raises:
            OneboxError: A worker refuses it.
        """
        entries, tensors = state_entries(self.remembered, trained)
        self._optimizer_number = self.new_number()
        definition = optimizer_definition(self.optimizer, self.named, trained, entries)
        self._sent_options = options_of(self.optimizer)
        define = Define(self._optimizer_number, definition)
        frames = [to_frame(tensor) for tensor in tensors]
        raise_first([self._pool.post(worker, [define], frames, answer=True) for worker in self._workers])
        self._trained, self.remembered = trained, []
        return self._optimizer_number

    def changed_options(self) -> tuple[Options, ...]:
        """Return the options of each parameter group if they have changed since they were last sent, else nothing."""
        options = options_of(self.optimizer)
        changed = () if options == self._sent_options else options
        self._sent_options = options
        return changed

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers as they are on the first worker, by name."""
        numbers = tuple(self.named.numbers.values())
        (answer,) = raise_first([self._pool.post(0, [Get(numbers)], answer=True)])
        (listing,) = answer.results
        assert isinstance(listing, Tensors)
        made = [from_frame(spec, frame) for spec, frame in zip(listing.specs, answer.frames, strict=True)]
        return dict(zip(self.named.numbers, made, strict=True))

    def optimizer_state(self) -> OptimizerEntries:
        """Return what the optimizer remembers, as (parameter, key, value)."""
        if self._trained is None:
            return self.remembered
        ask = Ask("optimizer", (self._optimizer_number,))
        (answer,) = raise_first([self._pool.post(0, [ask], answer=True)])
        (listing,) = answer.results
        assert isinstance(listing, OptimizerState)
        frames = iter(answer.frames)
        return [
            (
                self._trained[entry.parameter],
                entry.key,
                from_frame(entry.value, next(frames)) if isinstance(entry.value, TensorSpec) else entry.value,
            )
            for entry in listing.entries
        ]

    def memory(self) -> list[Memory]:
        """Return the memory of each worker."""
        answers = raise_first([self._pool.post(worker, [Ask("memory")], answer=True) for worker in self._workers])
        return [result for answer in answers for result in answer.results if isinstance(result, Memory)]

    def free(self) -> None:
        """Free everything that has a number of :meth:`new_number`, on all workers."""
        free = Free(tuple(self._ledger), tuple(self._ledger))
        for worker in self._workers:
            self._pool.post(worker, [free])
