"""Updates: the gradients of a step are clipped and applied, and owners distribute updated parameters. Pure.

An update directly follows the gradients of its step; or, where steps overlap, it is in the window of the next one. If
that step uses the new weights, the update is divided by buckets, and each part comes just before the first action that
reads one of its parameters: the communication of later parts then overlaps with earlier actions. The parameters of a
group are distributed in one order on all of its members, before all other exchanges of the window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.compile.update.gradients import Gradients
from onebox.engine.partition.optimizer_sharding import GradientBucket
from onebox.engine.partition.sharding_spec import Members
from onebox.graph import square_norm
from onebox.wire.protocol.instructions import Broadcast, Free, OptimizerStep, Reduce, Rename


class WorkerUpdate:
    """The update of the parameters of one worker in one routine.

    Args:
        shared: The gradients of the trainer.
        builder: The routine.
        worker: The worker.
        age: How many steps before the routine's own the one is whose gradients are applied.
    """

    def __init__(
        self,
        shared: Gradients,
        builder: RoutineBuilder,
        worker: int,
        *,
        age: int = 0,
    ) -> None:
        self._shared = shared
        self._builder = builder
        self._worker = worker
        self._age = age
        self._versions = bool(age and shared.numbers.previous)  # what the parameters are before it is kept
        self._sums = shared.late if self._versions else shared.sums
        self._stepped = shared.holdings.stepped_by(worker, shared.trained)
        self._place = {name: place for place, name in enumerate(self._stepped)}
        handed: list[tuple[Members, GradientBucket]] = list(reversed(shared.buckets_of(worker)))
        known = {name for _, bucket in handed for name in bucket.names}
        own = tuple(name for name in self._stepped if name not in known)
        self._parts = [*handed, *([((), GradientBucket(own))] if own else [])]
        self._left = list(range(len(self._parts)))

    @property
    def waits(self) -> bool:
        """True if it waits for other workers, whose vote it needs."""
        return len(self._shared.holdings.devices) > 1

    # ---- at once

    def finish(self) -> None:
        """Add all parts that have not been added yet."""
        if len(self._left) == len(self._parts):
            with self._builder.of_step(self._age):
                self._at_once()
        else:
            self._apply(tuple(self._left))
        self._left = []

    def _at_once(self) -> None:
        shared, numbers = self._shared, self._shared.numbers
        norm = shared.norm if shared.everybody is not None and shared.max_norm else 0
        if shared.everybody is not None and norm:
            self._sum_norms(shared.everybody)
        gradients = tuple(self._sums[name] for name in self._stepped)
        if gradients:
            step = OptimizerStep(
                numbers.optimizer,
                gradients,
                shared.max_norm,
                norm,
                previous=tuple(numbers.previous[name] for name in self._stepped) if self._versions else (),
                ahead=tuple(numbers.ahead[name] for name in self._stepped if numbers.ahead) if self._versions else (),
            )
            self._builder.add(step, InstructionLabel("optimizer", "compute"))
        if left := (*gradients, *((norm,) if norm else ())):
            self._builder.add(Free(left), InstructionLabel("free"))
        if self._versions:
            self._turn()
        for members, bucket in self._parts:
            self._hand_out(members, bucket)

    def _turn(self) -> None:
        """Make the current parameters of other owners the previous version, freeing its buffers for the new ones."""
        numbers, handed = self._shared.numbers, self._shared.holdings.handed_out(self._worker, self._shared.trained)
        read = [numbers.ahead.get(name, numbers.state[name]) for name in handed]
        before = [numbers.previous[name] for name in handed]
        if handed:
            self._builder.add(Rename((*read, *before), (*before, *read)), InstructionLabel("turn versions"))

    def _sum_norms(self, group: int) -> None:
        """Sum the squared norms of all gradients over all workers, each gradient counted by one worker."""
        shared = self._shared
        owned = shared.holdings.owned_by(self._worker, shared.trained)
        program = square_norm([shared.holdings.spec(self._worker, name, shared.specs[name]) for name in owned])
        self._builder.call(program, [self._sums[name] for name in owned], [shared.norm], InstructionLabel("norm"))
        self._builder.add(Reduce((shared.norm,), group), InstructionLabel("reduce", "transfer"))

    def _hand_out(self, members: Members, bucket: GradientBucket) -> None:
        """Distribute a bucket's updated parameters and their predictions from its owner."""
        if bucket.owner is None:
            return
        numbers = self._shared.numbers
        for kind in (numbers.state, numbers.ahead) if self._versions and numbers.ahead else (numbers.state,):
            buffers = tuple(kind[name] for name in bucket.names)
            broadcast = Broadcast(buffers, numbers.groups[members], members.index(bucket.owner))
            self._builder.add(broadcast, InstructionLabel("broadcast", "transfer"))

    # ---- in parts

    def before(self, names: Collection[str]) -> None:
        """Add the remaining parts that must precede a reader of some parameters."""
        if not self._left:
            return
        if self._shared.max_norm:  # the norm is over all gradients
            self.finish()
            return
        read = {place for place in self._left if not set(names).isdisjoint(self._parts[place][1].names)}
        self._apply(self._with_those_ahead(read))

    def _with_those_ahead(self, places: Iterable[int]) -> Sequence[int]:
        """Return parts, with those of the same groups that are distributed before them."""
        last: dict[Members, int] = {}
        found = set(places)
        for place in found:
            members, bucket = self._parts[place]
            if bucket.owner is not None:
                last[members] = max(place, last.get(members, place))
        ahead = {place for place in self._left if place <= last.get(self._parts[place][0], -1)}
        return sorted(found | ahead)

    def _apply(self, places: Sequence[int]) -> None:
        """Add some parts."""
        for place in places:
            members, bucket = self._parts[place]
            own = [name for name in bucket.names if name in self._place]
            if own:
                gradients = tuple(self._sums[name] for name in own)
                chosen = tuple(self._place[name] for name in own)
                step = OptimizerStep(self._shared.numbers.optimizer, gradients, members=chosen)
                with self._builder.of_step(self._age):
                    self._builder.add(step, InstructionLabel("optimizer", "compute"))
                self._builder.add(Free(gradients), InstructionLabel("free"))
            self._hand_out(members, bucket)
        self._left = [place for place in self._left if place not in places]
