"""The training state on the workers: parameters, buffers and optimizer of a trainer, the same on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebox.engine.holdings import Holdings, Members
from onebox.engine.state import (
    OptimizerEntries,
    local_optimizer_state,
    named_state,
    optimizer_definition,
    options_of,
    state_entries,
    trained_names,
)
from onebox.graph.placements import REPLICATE, Shard, shard_of, unshard
from onebox.pool import Pool, raise_first
from onebox.wire import TensorSpec, from_frame, spec_of, to_frame
from onebox.wire.messages import Ask, Define, Free, Get, Options, Put
from onebox.wire.sayings import Memory, OptimizerState, Tensors


class RemoteState:
    """Parameters, buffers and optimizer on the workers of a trainer.

    Each worker holds what the plan's stages on it need. Until then, and for what no stage reads, the user's own tensors
    are the state.

    Args:
        model: The user's model.
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
        self._ledger: list[int] = []
        self._optimizer_number = 0
        self._trained: dict[int, tuple[str, ...]] = {}
        self._owned: dict[int, tuple[str, ...]] = {}
        self._holders: dict[str, Members] = {}
        self._holdings: Holdings | None = None
        self._sent_options: tuple[Options, ...] = ()
        self.named = named_state(model, loss, self.new_number)
        self.wanted = trained_names(self.named, optimizer)
        self.remembered = local_optimizer_state(optimizer, self.named)

    def new_number(self) -> int:
        """Return a number for something that stays on the workers until the trainer is closed."""
        self._ledger.append(self._pool.new_number())
        return self._ledger[-1]

    def upload(self, holders: Mapping[str, Members], holdings: Holdings | None = None) -> None:
        """Bring every tensor to its holders, from the user's model; those that have it keep it.

        Args:
            holders: Who is to hold what.
            holdings: Which share of it, where it is split; everybody gets the whole when ``None``.
        """
        self._holdings = holdings
        for name, workers in holders.items():
            number, tensor = self.named.numbers[name], self.named.tensors[name].detach()
            placement = holdings.placement(name) if holdings else REPLICATE
            parts = [tensor]
            if holdings and isinstance(placement, Shard):
                parts = [shard_of(tensor, placement, rank) for rank in range(len(placement.sizes))]
            frames = [to_frame(part.clone()) for part in parts]
            for worker in workers:
                if worker in self._holders.get(name, ()) and len(parts) == 1:
                    continue
                rank = holdings.ranks[worker] if holdings and len(parts) > 1 else 0
                self._pool.post(worker, [Put((number,), (spec_of(parts[rank]),))], [frames[rank]])
            for worker in set(self._holders.get(name, ())) - set(workers):
                self._pool.post(worker, [Free((number,))])
            for worker in set(self._holders.get(name, ())) - set(workers):
                self._pool.post(worker, [Free((number,))])
        for name in set(self._holders) - set(holders):
            for worker in self._holders[name]:
                self._pool.post(worker, [Free((self.named.numbers[name],))])
        self._holders = dict(holders)

    def define_optimizer(self, trained: tuple[str, ...], holdings: Holdings) -> int:
        """Define the optimizer over the parameters that have gradients, on their holders; return its number.

        Raises:
            OneboxError: A worker refuses it.
        """
        self._optimizer_number = self.new_number()
        self._sent_options = options_of(self.optimizer)
        futures = []
        for worker in holdings.devices:
            held = holdings.held_by(worker, trained)
            if held:
                self._trained[worker] = held
                self._owned[worker] = holdings.owned_by(worker, trained)
                entries, tensors = state_entries(self._share(worker, holdings), held)
                definition = optimizer_definition(self.optimizer, self.named, held, entries)
                define = Define(self._optimizer_number, definition)
                futures.append(self._pool.post(worker, [define], [to_frame(t) for t in tensors], answer=True))
        raise_first(futures)
        self.remembered = []
        return self._optimizer_number

    def changed_options(self) -> tuple[Options, ...]:
        """Return the options of each parameter group if they have changed since they were last sent, else nothing."""
        options = options_of(self.optimizer)
        changed = () if options == self._sent_options else options
        self._sent_options = options
        return changed

    def _share(self, worker: int, holdings: Holdings) -> OptimizerEntries:
        """Return what the optimizer remembers of a worker's shares of the parameters."""
        found: OptimizerEntries = []
        for name, key, value in self.remembered:
            placement = holdings.placement(name)
            if isinstance(placement, Shard) and isinstance(value, Tensor) and worker in holdings.holders.get(name, ()):
                whole = value.shape == self.named.tensors[name].shape
                value = shard_of(value, placement, holdings.ranks[worker]) if whole else value  # noqa: PLW2901
            found.append((name, key, value))
        return found

    def checks(self) -> dict[int, list[tuple[Members, Ask]]]:
        """Return for each worker what to ask so that members can be compared: hashes of what they share."""
        shared: dict[Members, list[int]] = {}
        for name, holders in self._holders.items():
            for members in self._holdings.circles[name] if self._holdings else (holders,):
                if len(members) > 1:
                    shared.setdefault(members, []).append(self.named.numbers[name])
        found: dict[int, list[tuple[Members, Ask]]] = {}
        for members, numbers in shared.items():
            for worker in members:
                found.setdefault(worker, []).append((members, Ask("digest", tuple(numbers))))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers as they are on their first holder, by name.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        self._pool.post(0, ())  # where nothing has been uploaded yet, a pool that is no more still says so
        by_worker: dict[int, list[str]] = {}
        for name, members in self._holders.items():
            for worker in self._holdings.sources(name) if self._holdings else members[:1]:
                by_worker.setdefault(worker, []).append(name)
        parts: dict[str, list[Tensor]] = {}
        gets = {worker: Get(tuple(self.named.numbers[n] for n in names)) for worker, names in by_worker.items()}
        answers = raise_first([self._pool.post(worker, [get], answer=True) for worker, get in gets.items()])
        for names, answer in zip(by_worker.values(), answers, strict=True):
            (listing,) = answer.results
            assert isinstance(listing, Tensors)
            for name, spec, frame in zip(names, listing.specs, answer.frames, strict=True):
                parts.setdefault(name, []).append(from_frame(spec, frame))
        return {
            name: self._whole(name, parts[name]) if name in parts else tensor.detach().to("cpu", copy=True)
            for name, tensor in self.named.tensors.items()
        }

    def _whole(self, name: str, parts: list[Tensor]) -> Tensor:
        return unshard(parts, self._holdings.placement(name)) if self._holdings and len(parts) > 1 else parts[0]

    def optimizer_state(self) -> OptimizerEntries:
        """Return what the optimizer remembers, as (parameter, key, value)."""
        if not self._trained:
            return self.remembered
        ask = Ask("optimizer", (self._optimizer_number,))
        workers = [worker for worker, owned in self._owned.items() if owned]
        answers = raise_first([self._pool.post(worker, [ask], answer=True) for worker in workers])
        found: dict[tuple[str, str], list[Any]] = {}
        for worker, answer in zip(workers, answers, strict=True):
            (listing,) = answer.results
            assert isinstance(listing, OptimizerState)
            frames = iter(answer.frames)
            for entry in listing.entries:
                value = from_frame(entry.value, next(frames)) if isinstance(entry.value, TensorSpec) else entry.value
                name = self._trained[worker][entry.parameter]
                if name in self._owned[worker]:
                    found.setdefault((name, entry.key), []).append(value)
        return [(name, key, self._joined(name, values)) for (name, key), values in found.items()]

    def _joined(self, name: str, values: list[Any]) -> Any:
        """Put together an entry of the optimizer's state from those of all shares of its parameter."""
        if len(values) == 1 or not isinstance(values[0], Tensor) or not values[0].dim():
            return values[0]
        return self._whole(name, values)

    def memory(self) -> list[Memory]:
        """Return the memory of each worker."""
        workers = range(len(self._pool))
        answers = raise_first([self._pool.post(worker, [Ask("memory")], answer=True) for worker in workers])
        return [result for answer in answers for result in answer.results if isinstance(result, Memory)]

    def free(self) -> None:
        """Free everything that has a number of :meth:`new_number`, on all workers."""
        free = Free(tuple(self._ledger), tuple(self._ledger))
        for worker in range(len(self._pool)):
            self._pool.post(worker, [free])
