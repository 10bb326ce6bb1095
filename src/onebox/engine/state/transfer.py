"""The training state as the client reads it, piece by piece with bounded memory, and the changes that it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from onebox.engine.state.move_executor import download, download_wholes, write_piece
from onebox.engine.state.pieces import Key, TensorSource, read_from_slots, snapshots_of
from onebox.engine.state.remote import RESIDUAL, RemoteState
from onebox.engine.workload.named_state import OptimizerEntries
from onebox.errors import OneboxError
from onebox.pool import Pool, raise_first
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import Drop, Number


@dataclass(frozen=True, kw_only=True)
class OptimizerContents:
    """State of an optimizer.

    Args:
        tensors: Location of its tensors.
        numbers: Scalar entries.
        here: Tensors that have not been uploaded to the workers yet.
    """

    tensors: Mapping[Key, TensorSource] = field(default_factory=dict)
    numbers: Mapping[Key, Number] = field(default_factory=dict)
    here: Mapping[Key, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateChanges:
    """User changes of a state, as independent copies.

    Args:
        tensors: New parameters and buffers, by name.
        entries: The whole new optimizer state; ``None`` if it is unchanged.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    entries: OptimizerEntries | None = None

    def then(self, later: StateChanges) -> StateChanges:
        """Return the combination of these changes and later ones."""
        entries = self.entries if later.entries is None else later.entries
        return StateChanges(tensors={**self.tensors, **later.tensors}, entries=entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        values = [*self.tensors.values(), *(value for _, _, value in self.entries or ())]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


@dataclass(frozen=True, kw_only=True)
class FrozenState:
    """Tensors as they were at a time.

    Args:
        sources: Where they are read from.
        slots: The slot of each worker that holds them.
    """

    sources: Mapping[Key, TensorSource]
    slots: Mapping[int, int]


class StateTransfer:
    """Reads the state on the workers.

    Args:
        pool: The pool.
        remote: The remote state.
    """

    def __init__(self, pool: Pool, remote: RemoteState) -> None:
        self._pool = pool
        self._remote = remote

    def read_from(self, remote: RemoteState) -> None:
        """Read another state from now on."""
        self._remote = remote

    def into(self, tensors: Mapping[str, Tensor]) -> None:
        """Write parameters and buffers, read from their first holders, into tensors of the same kind.

        Args:
            tensors: Destinations by name; those that no worker holds are left unchanged.

        Raises:
            OneboxError: A worker failed, or the pool is closed; some destinations may have been written.
        """
        sources = {key: source for key, source in self.sources().items() if key[0] in tensors}
        for piece, rows in download(self._pool, sources.values()):
            write_piece(tensors[piece.key[0]], piece, rows)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers, by name.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        here = {name: tensor.detach().to("cpu", copy=True) for (name, _), tensor in self.not_held().items()}
        away = {name: tensor for (name, _), tensor in download_wholes(self._pool, self.sources())}
        return {name: here[name] if name in here else away[name] for name in self._remote.named.tensors}

    def sources(self) -> dict[Key, TensorSource]:
        """Return the locations of parameters and buffers that workers hold.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self._pool.post(self._pool.present[0], ())  # raises the error of a broken or closed pool
        return self._remote.tensor_sources()

    def not_held(self) -> dict[Key, Tensor]:
        """Return the parameters and buffers that no worker holds; those of this process are the state."""
        held = self._remote.held
        return {(name, ""): self._remote.local(name) for name in self._remote.named.tensors if name not in held}

    def optimizer_state(self) -> OptimizerEntries:
        """Return the optimizer's state, as (parameter, key, value).

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        remembered = self.remembered()
        found: OptimizerEntries = [(*key, value) for key, value in remembered.numbers.items()]
        found += [(*key, tensor) for key, tensor in remembered.here.items()]
        found += [(*key, tensor) for key, tensor in download_wholes(self._pool, remembered.tensors)]
        return found

    def remembered(self) -> OptimizerContents:
        """Return the locations of the optimizer's state.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        if not self._remote.stepping:
            entries = self._remote.remembered
            return OptimizerContents(
                numbers={(name, key): value for name, key, value in entries if not isinstance(value, Tensor)},
                here={(name, key): value for name, key, value in entries if isinstance(value, Tensor)},
            )
        asked = self._remote.optimizer_listings()
        listings = {}
        for worker, answer in zip(asked, raise_first(list(asked.values())), strict=True):
            (kept,) = answer.results
            assert isinstance(kept, SnapshotContents)
            listings[worker] = kept.entries
        tensors, numbers = self._remote.optimizer_sources(listings)
        return OptimizerContents(tensors=tensors, numbers=numbers)

    def versions(self) -> dict[Key, TensorSource]:
        """Return the locations of parameter versions, if there are any."""
        keys = self._remote.versions.keys if self._remote.branched else ()
        return {at: source for key in keys for at, source in self._remote.tensor_sources(key).items()}

    def residuals(self) -> OptimizerContents:
        """Return the locations of the residuals of lossy codecs, if there are any."""
        here = {(name, RESIDUAL): tensor for name, tensor in self._remote.first_residuals.items()}
        return OptimizerContents(tensors=self._remote.residual_sources(), here=here)

    def elements(self, sources: Mapping[Key, TensorSource], *, aside: bool = False) -> Iterator[Tensor]:
        """Yield the elements of tensors in order, one tensor after the other, in chunks as they arrive.

        Args:
            sources: The tensors.
            aside: Whether steps go on meanwhile, whose messages are not to wait behind many of these.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        ahead = {"ahead": 1} if aside else {}
        return (rows for _, rows in download_wholes(self._pool, sources, chunks=True, **ahead))

    def freeze(self, sources: Mapping[Key, TensorSource]) -> FrozenState:
        """Have workers copy what is read of them, so that steps may change it.

        Raises:
            DeviceMemoryError: A worker has no room for it.
            OneboxError: A worker failed, or the pool is closed.
        """
        taken = snapshots_of(sources.values(), self._pool.new_number)
        slots = {worker: snapshot.slot for worker, snapshot in taken.items()}
        asked = {worker: self._pool.post(worker, [snapshot], answer=True) for worker, snapshot in taken.items()}
        kept = {}
        try:
            for worker, answer in zip(asked, raise_first(list(asked.values())), strict=True):
                (found,) = answer.results
                assert isinstance(found, SnapshotContents)
                kept[worker] = found
        except OneboxError:
            self.thaw(slots)
            raise
        return FrozenState(sources=read_from_slots(sources, taken, kept), slots=slots)

    def thaw(self, slots: Mapping[int, int]) -> None:
        """Drop what :meth:`freeze` has made; workers that are lost have nothing."""
        for worker, slot in slots.items():
            with contextlib.suppress(OneboxError):
                self._pool.post(worker, [Drop((slot,))])
