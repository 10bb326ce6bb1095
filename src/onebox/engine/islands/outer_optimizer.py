"""The outer optimizer on the workers: global values and momentum, installed routines, and outer steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from onebox.engine.compile.compiler import Compiler
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.install.program_cache import ProgramCache
from onebox.engine.islands.outer_layout import fragments_of, global_sharding, outer_buckets, outer_parts
from onebox.engine.islands.outer_program import WEIGHT, OuterCompiler, OuterNumbers, OuterRoutine, WorkerOuterStep
from onebox.engine.partition.gradient_buckets import PlacedCodecState
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.state.move_executor import upload
from onebox.engine.state.moves import CLIENT, StateItem, StateLayout, plan_moves
from onebox.engine.state.pieces import Key, TensorSource
from onebox.engine.state.remote import RemoteState, StartState
from onebox.engine.state.transfer import OptimizerContents, StateTransfer
from onebox.errors import OneboxError, ReplicasParted
from onebox.graph import zeros
from onebox.pool import Pool, WorkerReply
from onebox.trainer_options import Outer
from onebox.wire import DTYPES, Hole, KernelSpec, SlotArgument, to_frame
from onebox.wire.protocol.eager import Operate
from onebox.wire.protocol.instructions import Call, Evict, Free, Get, Offload, Prefetch
from onebox.wire.protocol.requests import Define, Instruction, Put, Run, StoredProgram
from onebox.wire.protocol.responses import Digest

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

_PENDING = 3
"""Most pending replies for each inner step in flight, with which the client never waits for them: after a step one
fragment begins, another one is applied, and global values are compared."""


def averaged_buffers(compiler: Compiler) -> tuple[str, ...]:
    """Return the buffers that islands average: floating-point ones that change with the data, as of batch norm."""
    return tuple(name for name in compiler.affine if DTYPES[compiler.state.spec(name).dtype].is_floating_point)


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
    ) -> None:
        self._pool = pool
        self._most_pending = _PENDING * in_flight
        holdings = [each.holdings for each in installed]
        named, trained = locals_[0].named, installed[0].trained
        self.trained = trained
        self.averaged = averaged_buffers(installed[0].compiler)
        names = [name for name in named.tensors if name in {*trained, *self.averaged}]
        parts = outer_parts(holdings, names)
        self.remote = RemoteState(model, loss, locals_[0].optimizer, pool, start)
        self.transfer = StateTransfer(pool, self.remote)
        specs = {name: named.spec(name) for name in names}
        leaders = dict.fromkeys(part.leaders for part in parts if len(part.leaders) > 1)
        self._groups: dict[Members, int] = {members: pool.new_number() for members in leaders}
        self._copy, self._blend = self.remote.new_number(), self.remote.new_number()
        self._keep = outer.keep
        self._workers = tuple(itertools.chain.from_iterable(own.devices for own in holdings))
        self._holdings = global_sharding(parts, holdings)
        self._specs = specs
        self._compiler = OuterCompiler(
            holdings=holdings,
            fragments=[
                outer_buckets([part for part in parts if part.name in own], specs, set(trained))
                for own in map(set, fragments_of(names, outer.fragments))
            ],
            specs=specs,
            options=outer,
            numbers=OuterNumbers(
                values=self.remote.named.numbers,
                local=[each.named.numbers for each in locals_],
                between=self._groups,
                within=lambda island, members: installed[island].group_of(members),
                new=self.remote.new_number,
            ),
        )
        self._programs = ProgramCache(pool, DefinitionNumbers(self.remote.new_number))
        self._encoded: set[int] = set()  # fragments with sums that have begun in a lossy codec
        self._steps: dict[tuple[str, int], dict[int, WorkerOuterStep]] = {}
        self._around: tuple[dict[int, WorkerOuterStep], dict[int, WorkerOuterStep]] | None = None
        self._pending: list[DeferredReplies] = []
        self._bring(start)

    def _bring(self, start: StartState | None) -> None:
        try:
            asked = [
                begin_group_formation(self._pool, members, "workers", number)
                for members, number in self._groups.items()
            ]
            for each in asked:
                each.take()
            with self._pool.order:
                self.remote.upload(self._holdings)
                self._put_away(self.remote.named.numbers)
                self._bring_momenta(start)
                self._put_away(self._compiler.momenta)
                residuals = self._residuals()
                self.remote.define_residuals(residuals)
                self._put_away({name: each.number for name, each in residuals.items()})
                for worker in self._workers:
                    self._pool.post(worker, [Define(self._copy, _COPY), Define(self._blend, _BLEND)])
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.close()
            raise

    def _bring_momenta(self, start: StartState | None) -> None:
        """Upload the momenta of a checkpoint, and make those that it lacks."""
        momenta = self._compiler.momenta
        entries = start.optimizer if start else ()
        stored = {
            n: value for n, key, value in entries if key == _MOMENTUM and n in momenta and isinstance(value, Tensor)
        }
        self._upload(stored, momenta)
        for worker in self._holdings.devices:
            held = self._holdings.held_by(worker, [name for name in momenta if name not in stored])
            if held:
                specs = tuple(self._holdings.spec(worker, name, self._specs[name]) for name in held)
                program = self._pool.new_number()
                made = Call(program, (), tuple(momenta[name] for name in held))
                define = Define(program, StoredProgram(zeros(specs)))
                self._pool.post(worker, [define, made, Free((), (program,))])

    def _upload(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Upload tensors of a checkpoint to the leaders of the parameters or buffers of these names."""
        own = self._holdings
        parts: dict[int, list[StateItem]] = {CLIENT: [StateItem(name, "", 0) for name in tensors]}
        after = {w: [StateItem(n, "", own.share(w, n)) for n in own.held_by(w, tensors)] for w in own.devices}
        moves = plan_moves(StateLayout(parts=parts), StateLayout(parts=after, placements=own.placements))
        upload(self._pool, moves, own.placements, tensors, numbers, copy=True)

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

    def _put_away(self, numbers: Mapping[str, int], *, back: bool = False) -> None:
        """Copy those of some buffers to the host that are to lie there, or back to the device."""
        for worker in self._holdings.devices:
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
        self._begin("begin", fragment, weights, workers_of, number)
        if self._compiler.coded:
            self._encoded.add(fragment)

    def apply(self, fragment: int, number: int) -> None:
        """Apply the sums begun before, once workers have made the steps requested so far.

        Args:
            fragment: The part of the model.
            number: Number of inner steps so far.

        Raises:
            OneboxError: An earlier outer step failed, or a worker was lost.
        """
        self._settle()
        first, then = self._decoded(fragment), self._routines("apply", fragment)
        self._post({worker: (*first.get(worker, ()), *own) for worker, own in then.items()}, {}, number)

    def _decoded(self, fragment: int) -> Mapping[int, WorkerOuterStep]:
        """Return what makes the sums that have begun in a lossy codec, if there are any; they count as made."""
        if fragment not in self._encoded:
            return {}
        self._encoded.remove(fragment)
        return self._routines("decode", fragment)

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
        self._post(self._routines(kind, fragment), weight_of, number)

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
        for fragment in fragments:
            if steps := self._decoded(fragment):
                self._post(steps, {}, 0)
        buckets = [bucket for place in fragments for bucket in self._compiler.fragments[place]]
        sums = {name: self._compiler.sums[name] for bucket in buckets for name in bucket.names}
        residuals = self.transfer.residuals()
        found = {**self._sources("", sums), **self._sources(_MOMENTUM, self._compiler.momenta), **residuals.tensors}
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
        self._upload(tensors, self._compiler.sums)

    def enter(self) -> None:
        """Put the global values in the place of each island's own, which are kept aside.

        Raises:
            OneboxError: A worker failed.
        """
        if self._around is None:
            self._around = self._installed(self._compiler.enter()), self._compiler.leave()
        self._post(self._around[0], {}, 0)
        self.take()

    def leave(self) -> None:
        """Undo :meth:`enter`.

        Raises:
            OneboxError: A worker failed.
        """
        assert self._around is not None
        self._post(self._around[1], {}, 0, after=lambda worker: [Free(self._compiler.aside(worker))])
        self.take()

    def _settle(self) -> None:
        """Take the replies that have come, without waiting for the others unless they are many."""
        while self._pending:
            first = self._pending[0]
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
            self._pending[0].take()
            self._pending.pop(0)

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

        self._pending.append(DeferredReplies(list(futures.values()), compare))

    def _installed(self, steps: Mapping[int, WorkerOuterStep]) -> dict[int, WorkerOuterStep]:
        """Send workers their routines, and return them."""
        for worker, parts in steps.items():
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
    ) -> None:
        """Send workers their parts: routines with the weights of their islands, and copies."""
        futures = []
        with self._pool.order:
            for worker, parts in steps.items():
                message: list[Instruction] = []
                frames = []
                weight = self._pool.new_number()
                weighted = any(part.routine is not None and part.routine.leaves for part in parts)
                if weighted:
                    message.append(Put((weight,), (WEIGHT,)))
                    frames.append(to_frame(torch.tensor(weight_of[worker], dtype=torch.float64)))
                for part in parts:
                    if part.routine is not None:
                        bindings = (weight,) if part.routine.leaves else ()
                        message.append(Run(part.routine.number, bindings, number))
                    message += self._in_place(part)
                if weighted:
                    message.append(Free((weight,)))
                message += after(worker)
                if message:
                    futures.append(self._pool.post(worker, message, frames, answer=True))
        self._pending.append(DeferredReplies(futures, lambda answers: None))

    def _in_place(self, each: OuterRoutine) -> list[Instruction]:
        """Return the instructions that change local values in place."""
        found: list[Instruction] = []
        if each.copies:
            found.append(Operate(tuple(n for pair in each.copies for n in (self._copy, *pair))))
        if each.blends:
            calls = tuple(n for pair in each.blends for n in (self._blend, *pair))
            found.append(Operate(calls, (1.0 - self._keep,) * len(each.blends)))
        return found

    def close(self) -> None:
        """Leave the groups and free everything on the workers."""
        for members, group in self._groups.items():
            self._pool.leave_group(group, members)
        self._groups = {}
        self.remote.free()
