"""Synchronisation of the client's model with the state on the workers.

The workers train a copy. User writes to the model are uploaded if the model was up to date, and refused if steps have
been run since. Trainers that share modules exchange their results through the model.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from onebox.engine.entry import entered
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.islands.islands_session import TrainerSession
from onebox.engine.readers import Readers
from onebox.engine.state.change_detection import ChangeDetector
from onebox.engine.state.optimizer_state import OptimizersOnWorkers, StaleState
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.transfer import StateChanges
from onebox.engine.steps.observer import StepObserver
from onebox.engine.workload.named_state import OptimizerEntries
from onebox.errors import OneboxError, UsageError
from onebox.sizes import size_text

_LOG = logging.getLogger("onebox")

_OPEN: weakref.WeakSet[ClientState] = weakref.WeakSet()
"""Client states of all open trainers of this process."""

_clock = itertools.count(1)


class ClientState(StepObserver):
    """The client's side of a training state.

    Args:
        run: The run.
        remote: The remote state.
        model: The user's model.
        loss: The user's loss, which may be a module.
        lock: Held while the trainer is used.
    """

    def __init__(
        self, run: TrainerSession, remote: RemoteState, model: nn.Module, loss: Any, lock: threading.RLock
    ) -> None:
        self._run = run
        self._model = model
        self._lock = lock
        self._remote = remote
        self._detector = ChangeDetector(model, loss, remote.named)
        self._at = -1
        """Step count at which the local model equals the workers' state; -1 if it equals none of them."""
        self._news: dict[str, int] = {}
        """Time at which shared tensors were last trained or changed here, on a clock that all trainers share."""
        self._seen: weakref.WeakKeyDictionary[ClientState, int] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakSet[ClientState] = weakref.WeakSet()
        """Trainers of shared tensors whose changes the snapshots of this one contain."""
        self._pulled: Collection[str] | None = None
        self._kept_at = run.steps_done
        """Step count at which the workers' weights were last pulled, saved, or replaced by the local ones."""
        self._said = False
        self._told: set[str] = set()
        self._optimizers = OptimizersOnWorkers(
            remote.optimizer, remote.named, self._fetch_optimizers, lambda: self._run.steps_done
        )
        run.subscribe(self)
        remote.edited = self._edited
        owners = [each for each in (model, loss) if isinstance(each, nn.Module)]
        modules = (module for owner in owners for module in owner.modules())
        self._readers = Readers(modules, remote.optimizer, remote.named.tensors, self._bring_for, lambda: run.begun)
        _OPEN.add(self)

    # ---- called by the trainer

    def bring(self, *, overwrite: bool = False) -> None:
        """Upload user changes, and the results of other trainers of the same tensors.

        Args:
            overwrite: Whether changes that cannot be uploaded are about to be overwritten; they only cause a warning
                then.

        Raises:
            UsageError: A user change cannot be uploaded; nothing has been changed.
            OneboxError: A worker failed.
        """
        self._take_changes(overwrite=overwrite)
        self._exchange()

    def stepped(self) -> None:
        """Record that a step has begun."""
        if self._partners():
            self._have_news(self._in_training)

    def synchronized(self) -> None:
        """Record that outer steps without a step have changed the workers' state."""
        self._at = -1
        self.stepped()

    def pull(self) -> None:
        """Copy parameters and buffers from the workers into the model.

        Parameters on the meta device that are not trained stay there.

        Raises:
            UsageError: Something that is trained is on the meta device; nothing has been written.
            OneboxError: A worker failed; the model may be partly written.
        """
        run, named = self._run, self._remote.named
        self._require_places(self._in_training)
        tensors = {name: tensor for name, tensor in named.tensors.items() if not tensor.is_meta}
        try:
            self._write(run, tensors)
        finally:
            self._note(tensors, fully=True)
        if run.begun:
            self._at = run.steps_done
        self.kept()

    def kept(self) -> None:
        """Record that the present weights of the workers are in the model, or in files."""
        self._kept_at = self._run.steps_done

    @property
    def lost_steps(self) -> int:
        """Number of the latest steps whose weights are on the workers alone."""
        return 0 if self._remote.emulated or not self._run.begun else self._run.steps_done - self._kept_at

    def push(self) -> None:
        """Upload the local model to the workers.

        Raises:
            UsageError: It cannot be uploaded.
            OneboxError: A worker failed.
        """
        run, named = self._run, self._remote.named
        changed = self._detector.changed(fully=True)  # adopts replaced buffers, refuses replaced parameters
        if not run.begun:
            return
        self._require_one_version(list(named.tensors))
        for partner in self._partners():
            self._seen[partner] = partner._newest
        known = self._remote.constant.difference(changed)  # the workers have these
        here = [name for name, tensor in named.tensors.items() if not tensor.is_meta and name not in known]
        self._change(here, self._changed_optimizers())
        self._at = run.steps_done
        self.kept()

    def release(self, *, keep: bool) -> None:
        """Return the model and the optimizers to their user.

        Args:
            keep: Whether to download the optimizer state, if the model equals the workers' state.

        Raises:
            OneboxError: A worker failed.
        """
        try:
            if keep and self._in_step and self._run.error is None:
                for partner in self._partners():
                    if partner._run.begun and partner._run.error is None:
                        partner._take_from(self, partner._seen.get(self, 0))
                self._optimizers.bring()
        finally:
            _OPEN.discard(self)
            self._readers.close()
            self._optimizers.close()

    def _bring_for(self, reader: str) -> None:
        """Pull for something that reads the model in this process, if it is older than the workers' state.

        A failure is no error of the reader: it gets what there is, and the log says so.
        """
        run, held = self._run, self._remote.named.tensors
        if self._in_step or not run.begun or run.error is not None or any(held[n].is_meta for n in self._in_training):
            return
        with self._lock:
            if self._in_step or self._detector.changed(fully=False):  # the next step refuses such a change
                return
            try:
                with entered(reader, self._model):
                    run.drain()
                    run.wait(0)
                    self.pull()
            except OneboxError as error:
                _LOG.warning("%s has the weights of an older step: %s", reader, str(error).splitlines()[0])
                return
        if reader not in self._told:
            self._told.add(reader)
            _LOG.info("pulled the weights, as %s reads them", reader)

    # ---- user changes

    @property
    def _in_step(self) -> bool:
        return self._at == self._run.steps_done

    def _take_changes(self, *, overwrite: bool) -> None:
        changed = self._detector.changed(fully=self._in_step)
        if not self._run.begun:
            if (entries := self._changed_optimizers()) is not None:
                self._remote.use_optimizer_state(entries)
            return
        if changed and not self._in_step:
            changed = self._left_over(changed, overwrite=overwrite)
        entries = self._changed_optimizers()
        if changed or entries is not None:
            self._require_one_version(changed or ["the optimizer's state"])
            self._change(changed, entries)

    def _left_over(self, changed: list[str], *, overwrite: bool) -> list[str]:
        """Handle changes of a model that is older than the workers' state; return those that remain to be uploaded."""
        tensors = self._remote.named.tensors
        wanted = {id(tensors[name]) for name in changed}
        for partner in self._partners():  # the model may be that of another trainer, which then provides it
            if partner._in_step and partner._run.begun and wanted <= partner._ids:
                partner._change([n for n, t in partner._remote.named.tensors.items() if id(t) in wanted], None)
                return []
        which, steps = _listed(changed), self._run.steps_done - self._at
        behind = "an outer step" if self._at < 0 else f"{steps} step{'s' if steps > 1 else ''}"
        if not overwrite:
            raise UsageError(
                f"{which} changed by hand, but the model in this process is {behind} behind the workers' "
                "(steps since the last pull()), so that what was computed from it would undo these: call "
                "trainer.pull() before a change, or trainer.push() after one, which lets the workers go on with the "
                "model as it is here; nothing was done"
            )
        _LOG.warning("pull() overwrites %s changed by hand %s after the last pull()", which, behind)
        return []

    def _changed_optimizers(self) -> OptimizerEntries | None:
        try:
            return self._optimizers.changed()
        except StaleState:
            raise UsageError(
                "the optimizer's state was changed by hand, but steps have been made since it was read: read "
                "optimizer.state or optimizer.state_dict() again before a change, or replace all of it by "
                "optimizer.load_state_dict(); nothing was done"
            ) from None

    def _require_one_version(self, changed: list[str]) -> None:
        if self._remote.branched:
            raise UsageError(
                f"{_listed(changed)} changed by hand while gradients are stale: there are several versions of the "
                "weights on the workers then; change them before the first step that is late (warm_up says which), or "
                "train with stale=None; nothing was done"
            )

    @property
    def _in_training(self) -> list[str]:
        """Names of what training may change: the parameters of the optimizer, and buffers."""
        trained, named = set(self._remote.wanted), self._remote.named
        return [name for name in named.tensors if name in trained or name not in named.parameters]

    def _require_places(self, names: Iterable[str]) -> None:
        """Require that this process has memory for some tensors.

        Raises:
            UsageError: One is on the meta device.
        """
        lost = [name for name in names if self._remote.named.tensors[name].is_meta]
        if lost:
            raise UsageError(
                f"{lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}: on the meta device here, so that "
                "no values can be written to the model or read from it: trainer.save_weights(folder) writes what the "
                "workers have, file by file, and trainer.save(folder) a checkpoint; nothing was done"
            )

    def _change(self, names: Iterable[str], entries: OptimizerEntries | None) -> None:
        """Upload local tensors, and the optimizer's state if it is given."""
        tensors = self._remote.named.tensors
        chosen = list(names)
        try:
            self._require_places(chosen)
        except UsageError:
            self._note([name for name in chosen if tensors[name].is_meta], fully=True)
            raise
        self._note(chosen, fully=True)
        held = self._remote.held
        copies = {name: tensors[name].detach().to("cpu", copy=True) for name in chosen if name in held}
        self._have_news(chosen)
        self._run.change(StateChanges(tensors=copies, entries=entries))

    def installed(self, plan: InstalledPlan) -> None:
        """Record the first upload of the local model to the workers."""
        if self._at < 0:
            self._detector.note(fully=True)
            self._at = self._run.steps_done

    def _write(self, run: TrainerSession, tensors: Mapping[str, Tensor]) -> None:
        """Write what the workers have into tensors of the model."""
        self._pulled = self._edited()
        try:
            run.recovery.run(lambda: run.transfer.into(tensors))
        finally:
            self._pulled = None

    def _edited(self) -> Collection[str]:
        """Return the tensors that the user has changed in this process; while others are written, those before."""
        return self._detector.changed(fully=False) if self._pulled is None else self._pulled

    def _note(self, names: Collection[str], *, fully: bool) -> None:
        """Record the present tensors, for all trainers that share them."""
        self._detector.note(names, fully=fully)
        ids = {id(self._remote.named.tensors[name]) for name in names}
        for partner in self._partners():
            theirs = [name for name, tensor in partner._remote.named.tensors.items() if id(tensor) in ids]
            partner._detector.note(theirs, fully=fully)

    # ---- trainers that share tensors

    @property
    def _ids(self) -> set[int]:
        return {id(tensor) for tensor in self._remote.named.tensors.values()}

    def _partners(self) -> list[ClientState]:
        """Return the other open trainers of the same tensors, the latest to train last."""
        if len(_OPEN) < 2:
            return []
        own = self._ids
        found = [other for other in _OPEN if other is not self and own & other._ids]
        return sorted(found, key=lambda other: other._newest)

    @property
    def _newest(self) -> int:
        return max(self._news.values(), default=0)

    def _have_news(self, names: Iterable[str]) -> None:
        now = next(_clock)
        self._news.update(dict.fromkeys(names, now))

    def _exchange(self) -> None:
        """Take over the results of other trainers of shared tensors since the last exchange."""
        for partner in self._partners():
            self._keep_changes_of(partner)
            partner._keep_changes_of(self)
            seen = self._seen.get(partner, 0)
            if partner._newest > seen and partner._run.begun:
                self._take_from(partner, seen)

    def _keep_changes_of(self, partner: ClientState) -> None:
        """Have snapshots contain what another trainer trains, and this one does not, before that has changed it."""
        if partner in self._kept or not self._run.begun:
            return
        tensors = partner._remote.named.tensors
        theirs = {id(tensors[name]) for name in partner._in_training}
        self._run.keep([name for name, tensor in self._remote.named.tensors.items() if id(tensor) in theirs])
        self._kept.add(partner)

    def _take_from(self, partner: ClientState, seen: int) -> None:
        """Take over another trainer's results for shared tensors since a time."""
        partner._take_changes(overwrite=False)
        newest, run = partner._newest, partner._run
        own = {id(tensor): name for name, tensor in self._remote.named.tensors.items()}
        theirs = {
            name: tensor
            for name, tensor in partner._remote.named.tensors.items()
            if id(tensor) in own and partner._news.get(name, 0) > seen
        }
        if theirs:
            self._require_places(own[id(tensor)] for tensor in theirs.values())
            run.drain()
            run.wait(0)
            partner._write(run, theirs)
            shared = {own[id(tensor)]: tensor for tensor in theirs.values()}
            self._note(shared, fully=self._in_step)
            self._say(shared)
            if self._run.begun:
                held = self._remote.held
                copies = {n: tensor.detach().to("cpu", copy=True) for n, tensor in shared.items() if n in held}
                self._run.change(StateChanges(tensors=copies))
        self._seen[partner] = newest

    def _say(self, shared: Mapping[str, Tensor]) -> None:
        """Log once the cost of sharing tensors."""
        if self._said:
            return
        self._said = True
        size_bytes = sum(tensor.nbytes for tensor in shared.values())
        _LOG.warning(
            "two open trainers share %s%s: each step of one waits for the steps of the other, and brings what that has "
            "trained, %s, by way of this process",
            next(iter(shared)),
            f" and {len(shared) - 1} more tensors" if len(shared) > 1 else "",
            size_text(size_bytes),
        )

    # ---- optimizers

    def _fetch_optimizers(self) -> OptimizerEntries | None:
        run = self._run
        if run.error is not None:
            return None
        if not run.begun:
            return self._remote.remembered
        run.drain()
        run.wait(0)
        return run.recovery.run(run.transfer.optimizer_state)


def _listed(names: Sequence[str]) -> str:
    """Return names as the subject of a sentence."""
    more = len(names) - 1
    return f"{names[0]} and {more} more tensor{'s' if more > 1 else ''} were" if more > 0 else f"{names[0]} was"
