"""The outer optimizer on the workers: global values and momentum, installed routines, and outer steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from onebox.engine.compile.compiler import Compiler
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.compile.update.coded_buckets import GATHER_LABEL
from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.install.program_cache import ProgramCache
from onebox.engine.islands.outer_layout import (
    fragments_of,
    global_sharding,
    outer_buckets,
    outer_bytes,
    outer_parts,
)
from onebox.engine.islands.outer_program import (
    BETWEEN_ISLANDS,
    WEIGHT,
    OuterCompiler,
    OuterNumbers,
    OuterRoutine,
    WorkerOuterStep,
)
from onebox.engine.memory.initial_contents import StateBytes
from onebox.engine.partition.gradient_buckets import PlacedCodecState
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.state.move_executor import download_wholes, upload
from onebox.engine.state.moves import CLIENT, StateItem, StateLayout, plan_moves
from onebox.engine.state.pieces import Key, TensorSource
from onebox.engine.state.remote import RemoteState, StartState
from onebox.engine.state.transfer import OptimizerContents, StateTransfer
from onebox.engine.steps.link_use import add_traffic
from onebox.engine.steps.results import StepTrace
from onebox.errors import OneboxError, ReplicasParted
from onebox.graph import zeros
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.trainer_options import Outer
from onebox.wire import DTYPES, Hole, KernelSpec, SlotArgument, TapeSpec, to_frame
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Ask, Call, Evict, Free, Get, Offload, Prefetch
from onebox.wire.protocol.requests import Define, Instruction, Put, Run, StoredProgram
from onebox.wire.protocol.responses import Digest, LinkTraffic

_COPY = KernelSpec(
    name="aten.copy_.default",
    args=(SlotArgument(0), SlotArgument(1)),
    kwargs={},
    inputs=2,
    floats=0,
    outs=(None,),
)
"""Overwrites its first tensor in place by the second."""

_BLEND = KernelSpec(
    name="aten.lerp_.Scalar",
    args=(SlotArgument(0), SlotArgument(1), Hole(0)),
    kwargs={},
    inputs=2,
    floats=1,
    outs=(None,),
)
"""Moves its first tensor in place towards the second, by a fraction of the way."""

_MOMENTUM = "momentum_buffer"
"""Key of the momentum in a checkpoint, as of ``torch.optim.SGD``."""

_SUM = ""
"""Key of a sum that has begun and is not applied, likewise."""

_PENDING = 3
"""Most pending replies for each inner step in flight, with which the client never waits for them: after a step one
fragment begins, another one is applied, and global values are compared."""

_TIMED = 100
"""Sums of each fragment whose times are kept, and outer steps whose traffic is."""


def _sums_ns(labels: Sequence[InstructionLabel], answer: WorkerReply) -> int:
    """Return the nanoseconds from the first sum between islands that a worker began to the end of its last one; 0 if
    there was none."""
    if not answer.times_ns:
        return 0
    places = [place for place, label in enumerate(labels) if label.name in (BETWEEN_ISLANDS, GATHER_LABEL)]
    times = [answer.times_ns[2 * place : 2 * place + 2] for place in places]
    return max(end for _, end in times) - min(start for start, _ in times) if times else 0


def averaged_buffers(compiler: Compiler) -> tuple[str, ...]:
    """Return the buffers that islands average: floating-point ones that change with the data, as of batch norm."""
    return tuple(name for name in compiler.affine if DTYPES[compiler.state.spec(name).dtype].is_floating_point)


def outer_state_bytes(compiler: Compiler, outer: Outer, islands: int, *, confirmed: bool) -> Mapping[int, StateBytes]:
    """Return the bytes of global values and of the outer optimizer's state on the workers of an island.

    Args:
        compiler: The compiler of the island's plan.
        outer: The outer optimizer.
        islands: Number of islands.
        confirmed: Whether sums are applied only once all islands have them.
    """
    own = {*compiler.trained, *averaged_buffers(compiler)}
    names = [name for name in compiler.state.tensors if name in own]
    specs = {name: compiler.state.spec(name) for name in names}
    kept = confirmed or bool(outer.overlap)
    return outer_bytes(compiler.holdings, names, set(compiler.trained), specs, outer, islands, sums=kept)


class OuterOptimizer:
    """The outer optimizer of islands whose plans are installed.

    Its parameters are the global ones, on a leader of each island; all leaders of a parameter make the same update.

    Args:
        pool: The pool.
        model: The user's model.
        loss: The user's loss.
        installed: The installed plan of each island.
        locals_: State of each island.
        outer: The options.
        start: State of the outer optimizer in a checkpoint; ``None`` for a new one.
        in_flight: Most inner steps in flight.
        trace: Whether workers report the times of sums.
        tell: Called with the times of each outer step, as far as workers report them.

    Raises:
        UsageError: Islands split a parameter differently.
        OneboxError: A worker was lost, or refuses something.
    """

    def __init__(
        self,
        pool: Pool,
        model: nn.Module,
        loss: Any,
        installed: Sequence[InstalledPlan],
        locals_: Sequence[RemoteState],
        outer: Outer,
        start: StartState | None,
        in_flight: int,
        *,
        trace: bool = False,
        tell: Callable[[StepTrace], object] = lambda trace: None,
    ) -> None:
        self._pool, self._trace, self._tell = pool, trace, tell
        self._most_pending = _PENDING * in_flight
        self.sum_times_s: dict[int, deque[float]] = {}
        """For each fragment, seconds of its last sums, from when all islands had come until these had ended; none for
        sums that travel while islands go on or wait to be confirmed, whose ends workers do not report."""
        self.traffic: dict[tuple[int, int], LinkTraffic] = {}
        """What connections between hosts carried, as far as workers reported it with outer steps."""
        self.traces: deque[StepTrace] = deque(maxlen=_TIMED)
        """The last outer steps in which connections between hosts carried something, each as part of the inner step
        before it."""
        self._outer = outer
        named, self.trained = locals_[0].named, installed[0].trained
        self.averaged = averaged_buffers(installed[0].compiler)
        self._names = [name for name in named.tensors if name in self.names]
        self._specs = {name: named.spec(name) for name in self._names}
        self.remote = RemoteState(model, loss, locals_[0].optimizer, pool, start)
        self.transfer = StateTransfer(pool, self.remote)
        self._groups: dict[Members, int] = {}
        self._copy, self._blend = self.remote.new_number(), self.remote.new_number()
        self._sums = {name: self.remote.new_number() for name in self._names}
        self._momenta = {name: self.remote.new_number() for name in self.trained if outer.momentum}
        self._programs = ProgramCache(pool, DefinitionNumbers(self.remote.new_number))
        self._encoded: set[int] = set()  # fragments with sums that have begun in a lossy codec
        self._pending: list[tuple[tuple[int, ...], DeferredReplies]] = []  # with the workers that reply
        self._equipped: set[int] = set()
        """Workers that have the definitions of what changes values in place."""
        self._use(installed, locals_)
        self._bring(start)

    def _use(self, installed: Sequence[InstalledPlan], locals_: Sequence[RemoteState]) -> None:
        """Prepare the outer steps of some islands; sends nothing."""
        holdings = [each.holdings for each in installed]
        parts = outer_parts(holdings, self._names)
        leaders = dict.fromkeys(part.leaders for part in parts if len(part.leaders) > 1)
        self._forming = {m: self._pool.new_number() for m in leaders if m not in self._groups}
        self._groups |= self._forming
        self._workers = tuple(itertools.chain.from_iterable(own.devices for own in holdings))
        self._holdings = global_sharding(parts, holdings)
        self._compiler = OuterCompiler(
            holdings=holdings,
            fragments=[
                outer_buckets([part for part in parts if part.name in own], self._specs, set(self.trained))
                for own in map(set, fragments_of(self._names, self._outer.fragments))
            ],
            specs=self._specs,
            options=self._outer,
            numbers=OuterNumbers(
                values=self.remote.named.numbers,
                local=[each.named.numbers for each in locals_],
                between=self._groups,
                within=lambda island, members, worker: installed[island].broadcast_groups(worker, members),
                new=self.remote.new_number,
                sums=self._sums,
                momenta=self._momenta,
            ),
        )
        self._steps: dict[tuple[str, int], dict[int, WorkerOuterStep]] = {}
        self._around: tuple[dict[int, WorkerOuterStep], dict[int, WorkerOuterStep]] | None = None

    def _bring(self, start: StartState | None) -> None:
        try:
            self._form_groups()
            with self._pool.order:
                self.remote.upload(self._holdings)
                self._put_away(self.remote.named.numbers)
                self._bring_momenta(start)
                self._put_away(self._momenta)
                self._begin_codecs()
                self._equip()
            self.remote.forget_first()
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.close()
            raise

    def _form_groups(self) -> None:
        """Form the groups of leaders that are new."""
        forming, self._forming = self._forming, {}
        asked = [begin_group_formation(self._pool, members, "workers", n) for members, n in forming.items()]
        for each in asked:
            each.take()

    def _equip(self) -> None:
        """Define the in-place operators on the workers that lack them."""
        for worker in self._workers:
            if worker not in self._equipped:
                self._pool.post(worker, [Define(self._copy, _COPY), Define(self._blend, _BLEND)])
                self._equipped.add(worker)

    def regroup(
        self,
        installed: Sequence[InstalledPlan],
        locals_: Sequence[RemoteState],
        values: Mapping[str, Tensor] | None = None,
        beside: Mapping[Key, Tensor] | None = None,
    ) -> None:
        """Join other islands than before by later outer steps; what lossy codecs have lost before is dropped.

        Args:
            installed: The installed plan of each island.
            locals_: State of each island.
            values: The global values, for workers that have none.
            beside: What :meth:`beside` has returned, likewise.

        Raises:
            OneboxError: A worker was lost, or refuses something.
        """
        before, beside = self._holdings.devices, beside or {}
        self._decode(sorted(self._encoded), self._equipped.intersection(self._pool.present))
        self._use(installed, locals_)
        self._form_groups()
        new = [worker for worker in self._holdings.devices if worker not in before]
        every = (*self.remote.named.numbers.values(), *self._momenta.values(), *self._sums.values())
        for worker in set(before).difference(self._holdings.devices).intersection(self._pool.present):
            self._pool.post(worker, [Free(every)])
        with self._pool.order:
            self.remote.admit(self._holdings, values or {})
            for key, numbers in ((_MOMENTUM, self._momenta), (_SUM, self._sums)):
                self._upload({name: tensor for (name, own), tensor in beside.items() if own == key}, numbers, new)
            self._put_away(self.remote.named.numbers, new)
            self._put_away(self._momenta, new)
            self._begin_codecs()
            self._equip()

    def beside(self, fragments: Collection[int]) -> dict[Key, Tensor]:
        """Return what leaders have beside the global values, and is the same on all: momenta, and sums.

        Args:
            fragments: Parts of the model of which there are sums that have begun and are not applied.

        Raises:
            OneboxError: A worker was lost.
        """
        sources = self.contents(fragments).tensors
        return dict(download_wholes(self._pool, {k: each for k, each in sources.items() if k[1] in {_MOMENTUM, _SUM}}))

    def forsake(self, workers: Collection[int]) -> None:
        """Forget the replies that are pending, and the groups of leaders, after a loss.

        Args:
            workers: The workers whose islands have left: what they had is void.
        """
        self._pending.clear()
        self._equipped.difference_update(workers)
        for worker in workers:
            self._programs.forget(worker)
        groups, self._groups = self._groups, {}
        for members, group in groups.items():
            with contextlib.suppress(OneboxError):
                self._pool.leave_group(group, members)

    def _bring_momenta(self, start: StartState | None) -> None:
        """Upload the momenta of a checkpoint, and make those that it lacks."""
        momenta, holdings = self._momenta, self._holdings
        entries = start.optimizer if start else ()
        stored = {
            n: value for n, key, value in entries if key == _MOMENTUM and n in momenta and isinstance(value, Tensor)
        }
        self._upload(stored, momenta, holdings.devices)
        for worker in holdings.devices:
            held = holdings.held_by(worker, [name for name in momenta if name not in stored])
            if held:
                specs = tuple(holdings.spec(worker, name, self._specs[name]) for name in held)
                program = self._pool.new_number()
                made = Call(program, (), tuple(momenta[name] for name in held))
                define = Define(program, StoredProgram(zeros(specs)))
                self._pool.post(worker, [define, made, Free((), (program,))])

    def _upload(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int], workers: Collection[int]) -> None:
        """Upload tensors to those of some workers that lead the parameters or buffers of these names."""
        own = self._holdings
        parts: dict[int, list[StateItem]] = {CLIENT: [StateItem(name, "", 0) for name in tensors]}
        after = {w: [StateItem(n, "", own.share(w, n)) for n in own.held_by(w, tensors)] for w in workers}
        moves = plan_moves(StateLayout(parts=parts), StateLayout(parts=after, placements=own.placements))
        upload(self._pool, moves, own.placements, tensors.items(), numbers, copy=tensors)

    def _begin_codecs(self) -> None:
        """Give lossy codecs their residuals: none, or before the first step those of a checkpoint."""
        residuals = self._residuals()
        self.remote.define_residuals(residuals)
        self._put_away({name: each.number for name, each in residuals.items()})

    def _residuals(self) -> dict[str, PlacedCodecState]:
        """Return the state of lossy codecs, named by island, rank and parameters: the same on other devices."""
        found = {}
        for bucket, coded in self._compiler.coded.items():
            names = crc32(" ".join(bucket.names).encode())
            for island, leader in enumerate(bucket.leaders):
                rank = self._holdings.ranks.get(leader, 0)
                for number, state in coded.state(leader).items():
                    found[f"{island}.{rank}.{names:08x}"] = PlacedCodecState(leader, number, state)
        return found

    def _put_away(
        self, numbers: Mapping[str, int], workers: Collection[int] | None = None, *, back: bool = False
    ) -> None:
        """Copy those of some buffers to the host that are to lie there, or back to the device.

        Args:
            numbers: The buffers.
            workers: The workers; ``None`` for all leaders.
            back: Whether to copy them back.
        """
        for worker in self._holdings.devices if workers is None else workers:
            on_host = self._compiler.on_host(worker)
            own = tuple(number for number in numbers.values() if number in on_host)
            if own:
                self._pool.post(worker, [Prefetch(own)] if back else [Offload(own), Evict(own)])

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace global values.

        Args:
            tensors: New values by name; those of other parameters and buffers are ignored.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        own = {name: tensor for name, tensor in tensors.items() if name in self.names}
        numbers = {name: self.remote.named.numbers[name] for name in own}
        self._put_away(numbers, back=True)
        self.remote.write(own)
        self._put_away(numbers)

    @property
    def names(self) -> frozenset[str]:
        """The parameters and buffers that have global values."""
        return frozenset((*self.trained, *self.averaged))

    def step(self, fragment: int, weights: Sequence[float], workers_of: Sequence[Members], number: int) -> None:
        """Begin an outer step, which workers make when they come to it in their streams.

        Args:
            fragment: The part of the model.
            weights: Weight of each island in the average; they add up to 1.
            workers_of: The workers of each island.
            number: Number of inner steps so far.

        Raises:
            OneboxError: An earlier one failed, or a worker was lost.
        """
        self._begin("step", fragment, weights, workers_of, number)

    def begin(self, fragment: int, weights: Sequence[float], workers_of: Sequence[Members], number: int) -> None:
        """Begin the sums of an outer step, which travel while workers go on; see :meth:`step`."""
        if self._compiler.coded:
            self._encoded.add(fragment)
        self._begin("begin", fragment, weights, workers_of, number)

    def confirm(self, fragment: int, came: Callable[[Mapping[int, Future[WorkerReply]]], bool]) -> bool:
        """Wait until the sums begun before have come to all leaders.

        Args:
            fragment: The part of the model.
            came: Waits for replies by worker until they are there or one has failed; returns whether so. If not, the
                sums have been given up.

        Returns:
            Whether they have come.

        Raises:
            ReplicasParted: They are not the same everywhere.
            OneboxError: Some have not come: they are void.
        """
        self._decode([fragment])
        asked: dict[int, list[tuple[int, Ask]]] = {}
        for place, bucket in enumerate(self._compiler.fragments[fragment]):
            for leader in bucket.leaders:
                numbers = tuple(self._sums[name] for name in bucket.names)
                asked.setdefault(leader, []).append((place, Ask("digest", numbers)))
        futures = {w: self._pool.post(w, [ask for _, ask in own], answer=True) for w, own in asked.items()}
        if not came(futures):
            return False
        self.take()
        found: dict[int, set[bytes]] = {}
        for own, answer in zip(asked.values(), raise_first([*futures.values()]), strict=True):
            for (place, _), digest in zip(own, answer.results, strict=True):
                assert isinstance(digest, Digest)
                found.setdefault(place, set()).add(digest.value)
        if any(len(digests) > 1 for digests in found.values()):
            raise ReplicasParted(
                "the sums of an outer step are not the same in all islands; resume from the last checkpoint, and look "
                "for faulty memory or a faulty network"
            )
        return True

    def apply(self, fragment: int, number: int, *, keep: float) -> None:
        """Apply the sums begun before, once workers have made the steps requested so far.

        Args:
            fragment: The part of the model.
            number: Number of inner steps so far.
            keep: Fraction of its own values that an island keeps.

        Raises:
            OneboxError: An earlier outer step failed, or a worker was lost.
        """
        self._settle()
        first, then = self._decoded(fragment), self._routines("apply", fragment)
        steps = {worker: (*first.get(worker, ()), *own) for worker, own in then.items()}
        self._post(steps, {}, number, keep=keep)

    def _decoded(self, fragment: int) -> Mapping[int, WorkerOuterStep]:
        """Return what makes the sums that have begun in a lossy codec, if there are any; they count as made."""
        if fragment not in self._encoded:
            return {}
        self._encoded.remove(fragment)
        return self._routines("decode", fragment)

    def _decode(self, fragments: Collection[int], workers: Collection[int] | None = None) -> None:
        """Make the sums of fragments that have begun in a lossy codec, if there are any.

        Args:
            fragments: Parts of the model.
            workers: The workers that are still there; ``None`` for all.
        """
        for fragment in fragments:
            steps = self._decoded(fragment)
            if own := {worker: each for worker, each in steps.items() if workers is None or worker in workers}:
                self._post(own, {}, 0)

    def _begin(
        self,
        kind: Literal["step", "begin"],
        fragment: int,
        weights: Sequence[float],
        workers_of: Sequence[Members],
        number: int,
    ) -> None:
        self._settle()
        weight_of = {worker: weights[island] for island, own in enumerate(workers_of) for worker in own}
        timed = self.sum_times_s.setdefault(fragment, deque(maxlen=_TIMED)) if kind == "step" and self._trace else None
        self._post(self._routines(kind, fragment), weight_of, number, timed=timed)

    def _routines(self, kind: Literal["step", "begin", "decode", "apply"], fragment: int) -> dict[int, WorkerOuterStep]:
        """Return the parts of an outer step of a fragment, which workers have."""
        if (kind, fragment) not in self._steps:
            compiler = self._compiler
            make = {"step": compiler.step, "begin": compiler.begin, "decode": compiler.decode, "apply": compiler.apply}
            self._steps[kind, fragment] = self._installed(make[kind](fragment))
        return self._steps[kind, fragment]

    def contents(self, fragments: Collection[int]) -> OptimizerContents:
        """Return the locations of the optimizer's state: momenta, residuals of lossy codecs, and sums.

        Args:
            fragments: Parts of the model of which there are sums that have begun and are not applied.

        Raises:
            OneboxError: A worker was lost.
        """
        self._decode(fragments)
        buckets = [bucket for place in fragments for bucket in self._compiler.fragments[place]]
        sums = {name: self._sums[name] for bucket in buckets for name in bucket.names}
        residuals = self.transfer.residuals()
        found = {**self._sources(_SUM, sums), **self._sources(_MOMENTUM, self._momenta), **residuals.tensors}
        return OptimizerContents(tensors=found, here=residuals.here)

    def _sources(self, name: str, numbers: Mapping[str, int]) -> dict[Key, TensorSource]:
        """Return the locations of buffers that lie where the global values of the same parameters do.

        Args:
            name: Their key.
            numbers: The buffer of each parameter.
        """
        found = {}
        for (parameter, _), source in self.transfer.sources().items():
            if parameter not in numbers:
                continue
            key, pieces = (parameter, name), []
            for piece in source.pieces:
                asked = piece.instruction
                assert isinstance(asked, Get)
                instruction = Get((numbers[parameter],), asked.first, asked.rows)
                pieces.append(dataclasses.replace(piece, key=key, instruction=instruction))
            found[key] = dataclasses.replace(source, pieces=tuple(pieces))
        return found

    def bring_sums(self, tensors: Mapping[str, Tensor]) -> None:
        """Upload sums that a checkpoint holds.

        Raises:
            OneboxError: A worker was lost.
        """
        self._upload(tensors, self._sums, self._holdings.devices)

    def enter(self) -> None:
        """Put the global values in the place of each island's own, which are kept aside.

        Raises:
            OneboxError: A worker failed.
        """
        if self._around is None:
            self._around = self._installed(self._compiler.enter()), self._compiler.leave()
        self._post(self._around[0], {}, 0)
        self.take()

    def leave(self, workers: Collection[int]) -> None:
        """Undo :meth:`enter`.

        Args:
            workers: The workers that are still there.

        Raises:
            OneboxError: A worker failed.
        """
        assert self._around is not None
        steps = {worker: parts for worker, parts in self._around[1].items() if worker in workers}
        self._post(steps, {}, 0, after=lambda worker: [Free(self._compiler.aside(worker))])
        self.take()

    def _settle(self) -> None:
        """Take the replies that have come, without waiting for the others unless they are many."""
        while self._pending:
            _, first = self._pending[0]
            if len(self._pending) <= self._most_pending and not all(future.done() for future in first.futures):
                return
            first.take()
            self._pending.pop(0)

    def take(self) -> None:
        """Wait for the outer steps begun so far.

        Raises:
            OneboxError: One failed.
        """
        while self._pending:
            self._pending[0][1].take()
            self._pending.pop(0)

    def replies(self, workers: Collection[int]) -> list[Future[WorkerReply]]:
        """Return the replies that some workers still have to give; none waits for sums that have only begun."""
        return [
            future
            for own, pending in self._pending
            for worker, future in zip(own, pending.futures, strict=True)
            if worker in workers and not future.done()
        ]

    def void(self, fragments: Collection[int]) -> None:
        """Give up sums that have begun, of which some may never come; leaders wait for them no longer.

        Args:
            fragments: Their parts of the model.

        Raises:
            OneboxError: The pool is closed.
        """
        self._pool.interrupt_groups({group: members for members, group in self._groups.items()})
        with contextlib.suppress(OneboxError):  # a lost worker, which the next message finds
            here = self._equipped.intersection(self._pool.present)
            self._decode(fragments, here)  # it frees what the codecs have encoded
        self.forsake(())

    def check(self) -> None:
        """Require that all leaders of a value have the same bits.

        Raises:
            ReplicasParted: They have not.
        """
        checks = self.remote.checks()
        futures = {
            worker: self._pool.post(worker, [ask for _, ask in asked], answer=True) for worker, asked in checks.items()
        }

        def compare(answers: list[WorkerReply]) -> None:
            digests: dict[Members, set[bytes]] = {}
            for asked, answer in zip(checks.values(), answers, strict=True):
                found = [result.value for result in answer.results if isinstance(result, Digest)]
                for (members, _), digest in zip(asked, found, strict=True):
                    digests.setdefault(members, set()).add(digest)
            if any(len(found) > 1 for found in digests.values()):
                raise ReplicasParted(
                    "after an outer step the global parameters of the islands are no longer bit-identical; resume from "
                    "the last checkpoint, and look for faulty memory or an operator that is not deterministic"
                )

        self._pending.append((tuple(futures), DeferredReplies([*futures.values()], compare)))

    def _installed(self, steps: Mapping[int, WorkerOuterStep]) -> dict[int, WorkerOuterStep]:
        """Send workers their routines, and return them."""
        for worker, parts in steps.items():
            with contextlib.suppress(OneboxError):  # which :meth:`_post` raises, once the others have theirs
                for part in parts:
                    if part.routine is not None:
                        self._programs.store(worker, part.routine)
        return dict(steps)

    def _post(
        self,
        steps: Mapping[int, WorkerOuterStep],
        weight_of: Mapping[int, float],
        number: int,
        after: Callable[[int], Sequence[Instruction]] = lambda worker: (),
        timed: deque[float] | None = None,
        *,
        keep: float = 0.0,
    ) -> None:
        """Send workers their parts: routines with the weights of their islands, and copies.

        Where one cannot be reached, the others get theirs nevertheless.
        """
        futures, workers, labels = [], list[int](), list[list[InstructionLabel]]()
        unreachable: OneboxError | None = None
        with self._pool.order:
            for worker, parts in steps.items():
                message: list[Instruction] = []
                frames = []
                weight = self._pool.new_number()
                weighted = any(part.routine is not None and part.routine.leaves for part in parts)
                if weighted:
                    message.append(Put((weight,), (WEIGHT,)))
                    frames.append(to_frame(torch.tensor(weight_of[worker], dtype=torch.float64)))
                told: list[InstructionLabel] = []
                for part in parts:
                    if part.routine is not None:
                        bindings = (weight,) if part.routine.leaves else ()
                        message.append(Run(part.routine.number, bindings, number, trace=timed is not None))
                        told += part.routine.labels
                    message += self._in_place(part, keep)
                if weighted:
                    message.append(Free((weight,)))
                message += after(worker)
                try:
                    if message:
                        futures.append(self._pool.post(worker, message, frames, answer=True))
                        labels.append(told)
                        workers.append(worker)
                except OneboxError as error:
                    unreachable = unreachable or error

        def take(answers: list[WorkerReply]) -> None:
            spans = [span for own, answer in zip(labels, answers, strict=True) if (span := _sums_ns(own, answer))]
            reported = {
                worker: (own, answer.own_times_ns, answer.used_bytes)
                for worker, own, answer in zip(workers, labels, answers, strict=True)
            }
            carried = {
                (worker, each.worker): each
                for worker, answer in zip(workers, answers, strict=True)
                for each in answer.traffic
            }
            add_traffic(self.traffic, carried)
            trace = StepTrace(step=number - 1, workers=reported, traffic=carried)
            self._tell(trace)
            if carried:
                self.traces.append(trace)
            if timed is not None and spans:
                timed.append(min(spans) * 1e-9)  # of the island that came last and waited for none

        self._pending.append((tuple(workers), DeferredReplies(futures, take)))
        if unreachable is not None:
            raise unreachable

    def _in_place(self, each: OuterRoutine, keep: float) -> list[Instruction]:
        """Return the instructions that change local values in place."""
        floats = (1.0 - keep,) * len(each.blends)
        return [*self._once(self._copy, each.copies), *self._once(self._blend, each.blends, floats)]

    def _once(self, kernel: int, pairs: Sequence[tuple[int, int]], floats: tuple[float, ...] = ()) -> list[Instruction]:
        """Return the instructions that apply a kernel to pairs of buffers, all or none."""
        if not pairs:
            return []
        inputs = tuple(dict.fromkeys(number for pair in pairs for number in pair))
        slots = {number: -1 - index for index, number in enumerate(inputs)}
        calls = tuple(code for one, other in pairs for code in (kernel, slots[one], slots[other]))
        tape = self._pool.new_number()
        return [
            Define(tape, TapeSpec(calls, len(inputs), len(floats))),
            Replay(tape, inputs, (), floats),
            Free((), (tape,)),
        ]

    def close(self) -> None:
        """Leave the groups and free everything on the workers."""
        self.forsake(())
        self.remote.free()
