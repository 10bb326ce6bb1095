"""Statistics: buffers that change with the data, shared exactly by the replicas of a stage. Pure.

See :mod:`onebox.graph.transform.buffer_updates`: an affine update of K micro-batches is ``decay**K`` times the old
buffer plus the contribution of each, decayed by the number of later ones. Each replica starts from zero, adds its own
micro-batches in order with the decay of those in between, and the sum over the replicas is the total contribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from onebox.engine.compile.batch_job import BufferNumbers
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.compile.update.reductions import GroupReduction, RoutineScope
from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.errors import CaptureError
from onebox.graph import ModelPrograms, NamedProgram, Port, combine_all, extract, scale_all, split, zeros
from onebox.graph.lower.small_programs import own_outputs
from onebox.plan import Action
from onebox.wire import Program, TensorSpec


class BatchNormStatistics:
    """The changing buffers of a trainer.

    Args:
        holdings: The sharding spec.
        numbers: Shared numbers.
        model: Returns the programs for a micro-batch size, from one capture: another capture, as in eval mode, may
            change other buffers, or by other factors.
        moved: Buffers for the replicas' contributions, by name; new ones are added.

    Raises:
        CaptureError: A buffer of a replicated stage changes in a way that replicas cannot share.
    """

    def __init__(
        self, holdings: ShardingSpec, numbers: BufferNumbers, model: ModelPrograms, moved: dict[str, int]
    ) -> None:
        self.holdings = holdings
        self.numbers = numbers
        self.model = model
        self.affine: dict[int, list[str]] = {}
        self.constant: dict[int, list[str]] = {}
        self.specs: dict[str, TensorSpec] = {}
        for stage, replicas in enumerate(holdings.stages):
            if len(replicas) > 1:
                self._sort(stage)
        for name in (name for names in self.affine.values() for name in names if name not in moved):
            moved[name] = numbers.new()
        self.moved = moved
        self._decays: dict[tuple[int, int, int], Program] = {}

    def decay(self, worker: int, stage: int, times: int) -> Program:
        """Return the program that decays a worker's buffers of a stage by a number of micro-batches."""
        key = (self.holdings.ranks.get(worker, 0), stage, times)
        if key not in self._decays:
            names = self.affine[stage]
            factors = [self.model.updates[name].decay ** times for name in names]
            specs = [self.holdings.spec(worker, name, self.specs[name]) for name in names]
            self._decays[key] = scale_all(specs, factors)
        return self._decays[key]

    def _sort(self, stage: int) -> None:
        """Sort the buffers that a replicated stage changes by the kind of their update."""
        for port, spec in self.model.of(stage, "F").specs().items():
            if port.kind != "update":
                continue
            name = str(port.name)
            kind = self.model.updates[name].kind
            if kind == "general":
                raise CaptureError(
                    f"buffer {name} changes in a way that depends on the order of samples, which replicas cannot share "
                    "exactly; train this model on one device, or keep the buffer's update affine in the buffer"
                )
            (self.affine if kind == "affine" else self.constant).setdefault(stage, []).append(name)
            self.specs[name] = spec


class WorkerStatistics:
    """The changing buffers of one worker in one routine.

    Args:
        shared: The changing buffers of the trainer.
        scope: The worker's part of the step.
    """

    def __init__(self, shared: BatchNormStatistics, scope: RoutineScope) -> None:
        worker = scope.worker
        self._shared = shared
        self._builder = scope.builder
        self._total = len(scope.job.micro_batches)
        self._exchanges = scope.exchanges
        self._worker = worker
        mine = [
            stage for stage, replicas in enumerate(shared.holdings.stages) if any(worker in one for one in replicas)
        ]
        self._affine = {stage: names for stage, names in shared.affine.items() if stage in mine}
        self._constant = {stage: names for stage, names in shared.constant.items() if stage in mine}
        self._own = {
            stage: [action.micro_batch for action in scope.actions if action.kind == "F" and action.stage == stage]
            for stage in mine
        }
        self.moved = {name: shared.moved[name] for names in self._affine.values() for name in names}
        self._waiting: dict[int, list[GroupReduction]] = {}
        for stage, names in self._affine.items():
            program = zeros([self._spec(name) for name in names])
            scope.builder.call(program, [], [self.moved[name] for name in names], InstructionLabel("zero"))
            self._waiting[stage] = [self._expect(stage, alike) for alike in self._messages(names)]
            self._ready(stage, ready=not self._own[stage])

    def _spec(self, name: str) -> TensorSpec:
        """Return the spec of this worker's part of a buffer."""
        return self._shared.holdings.spec(self._worker, name, self._shared.specs[name])

    def _messages(self, names: Sequence[str]) -> list[list[str]]:
        """Return the buffers to sum, those of one element type together."""
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(self._spec(name).dtype, []).append(name)
        return list(kinds.values())

    def _expect(self, stage: int, names: Sequence[str]) -> GroupReduction:
        members, specs = self._shared.holdings.members(self._worker, stage), [self._spec(name) for name in names]
        numbers = tuple(self.moved[name] for name in names)
        parts = self._shared.holdings.parts(members, sum(spec.size_bytes for spec in specs))
        return self._exchanges.expect(members, lambda: [numbers], parts=parts, specs=specs)

    def _ready(self, stage: int, *, ready: bool) -> None:
        for exchange in self._waiting[stage]:
            exchange.ready = ready

    def before(self, action: Action) -> None:
        """Decay earlier contributions by the micro-batches of other replicas before this one."""
        if action.kind == "F" and action.stage in self._affine:
            own = self._own[action.stage]
            place = own.index(action.micro_batch)
            if place:
                self._decay(action.stage, action.micro_batch - own[place - 1] - 1)

    def after(self, action: Action) -> None:
        """After the last micro-batch, decay by later ones of other replicas, and begin the sum."""
        if action.kind == "F" and action.stage in self._affine and action.micro_batch == self._own[action.stage][-1]:
            self._decay(action.stage, self._total - 1 - action.micro_batch)
            self._ready(action.stage, ready=True)
            self._exchanges.flush()

    def _decay(self, stage: int, times: int) -> None:
        names = self._affine[stage]
        if not times:
            return
        numbers = [self.moved[name] for name in names]
        program = self._shared.decay(self._worker, stage, times)
        self._builder.call(program, numbers, numbers, InstructionLabel("statistics"), takes=range(len(numbers)))

    def finish(self) -> None:
        """Combine the replicas' contributions, and repeat data-independent updates for the micro-batches of others."""
        state = self._shared.numbers.state
        for names in self._affine.values():
            specs = [self._spec(name) for name in names]
            factors = [self._shared.model.updates[name].decay ** self._total for name in names]
            old, moved = [state[name] for name in names], [self.moved[name] for name in names]
            program, new = combine_all(specs, factors), [self._builder.renew(number) for number in old]
            takes = range(len(old), 2 * len(old))
            self._builder.call(program, [*old, *moved], new, InstructionLabel("statistics"), takes=takes)
        for stage, names in self._constant.items():
            repeats = self._total - len(self._own[stage])
            part, read, changed = _updates_alone(self._shared.model.of(stage, "F"), names)
            for _ in range(repeats):
                given = [self._builder.newest(state[name]) for name in read]
                new = [self._builder.renew(state[name]) for name in changed]
                self._builder.call(part, given, new, InstructionLabel("count"))


def _updates_alone(forward: NamedProgram, names: Sequence[str]) -> tuple[Program, list[str], list[str]]:
    """Return the part of forward that updates some buffers, the buffers that it reads, and its outputs."""
    where = dict(zip(forward.outputs, forward.program.outputs, strict=True))
    part = own_outputs(extract(forward.program, [where[Port("update", name)] for name in names]))
    (piece,) = split(part, [])
    changed = dict(zip(part.outputs, names, strict=True))  # a piece has its own order of outputs
    return piece.program, [str(forward.inputs[slot].name) for slot in piece.inputs], [changed[s] for s in piece.outputs]
