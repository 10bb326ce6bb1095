"""The programs of a captured model: for each stage forward and backward, whole or in halves; for evaluation forward."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from onebox.errors import UsageError
from onebox.graph.capture.export import Captured
from onebox.graph.capture.joint import Joint, Port
from onebox.graph.capture.locate import node_refusal, place_of_node
from onebox.graph.lower.element_types import require_types
from onebox.graph.lower.layouts import read_in_order, state_strides
from onebox.graph.lower.loss_divisors import Divisor, Measure, loss_divisors, normalises_by_batch, with_measures
from onebox.graph.lower.lowering import (
    arguments_of,
    canonical,
    fold_numbers,
    is_view,
    lower,
    random_positions,
    runs_as,
    varies,
)
from onebox.graph.lower.phases import Body, Division, Phase, PhaseKind, again, divide
from onebox.graph.lower.segments import Segments, accumulates, find_segments, picks, root_of
from onebox.graph.lower.small_programs import relaid, sum_alike
from onebox.graph.transform.buffer_updates import BufferUpdate, buffer_updates
from onebox.graph.transform.fuse import fused
from onebox.graph.transform.halves import split_backward_convolutions
from onebox.graph.transform.mixed_precision import to_mixed_precision
from onebox.graph.transform.samples_apart import put_samples_apart
from onebox.wire import Program, TensorSpec, specs_by_slot


class _Tracing:
    """A lock of one thread at a time, which may take it again; within it Python collects no cyclic garbage.

    A trace makes many objects, and nearly all of them stay: going through them again and again takes a sixth of the
    time of a trace, and half of that of a division (``benchmarks/growth_captures.py``).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._collects = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._collects = gc.isenabled()
            gc.disable()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._collects:
            gc.enable()
        self._lock.release()


TRACING = _Tracing()
"""Held while a model is captured or divided: PyTorch's fake tensors are made for one thread at a time."""


@dataclass(frozen=True, kw_only=True)
class NamedProgram:
    """A program whose inputs and outputs have names.

    Args:
        program: The tape.
        inputs: One port for each input.
        outputs: One port for each output.
        nodes: The nodes of the graph that it computes, in order; it may have further operators between theirs.
    """

    program: Program
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[fx.Node, ...] = field(default=(), compare=False, repr=False)

    def node(self, operator: str, count: int) -> fx.Node | None:
        """Return the node of an operator, given its name and the number of such operators up to it, if it is known."""
        alike = [node for node in self.nodes if str(runs_as(node.target)) == operator]
        if len(alike) != sum(each.name == operator for each in self.program.operators):  # some are of no node
            return None
        return alike[count - 1] if 0 < count <= len(alike) else None

    def specs(self) -> dict[Port, TensorSpec]:
        """Return the spec of each output."""
        by_slot = specs_by_slot(self.program)
        return {port: by_slot[slot] for port, slot in zip(self.outputs, self.program.outputs, strict=True)}


@dataclass(frozen=True, kw_only=True)
class ModelPrograms:
    """The programs of a captured model, divided over stages.

    Args:
        phases: The programs: of each stage F and, for training, B and, on request, I and W. Together with F they take
            the same values, so that each micro-batch may use either.
        stages: Number of stages.
        updates: The kind of change of each buffer with a micro-batch.
        constants: Constant tensors of the graph, by name.
        measures: What some of the results tell about others.
    """

    phases: Mapping[Phase, NamedProgram]
    stages: int
    updates: Mapping[str, BufferUpdate]
    constants: Mapping[str, Tensor]
    measures: tuple[Measure, ...] = ()

    def of(self, stage: int, kind: PhaseKind) -> NamedProgram:
        """Return the program of a phase."""
        return self.phases[Phase(stage, kind)]

    @property
    def forward(self) -> NamedProgram:
        """Forward of the first stage: of the whole model, where there is one stage."""
        return self.of(0, "F")

    @property
    def backward(self) -> NamedProgram | None:
        """Backward of the first stage."""
        return self.phases.get(Phase(0, "B"))

    @property
    def with_gradient(self) -> frozenset[str]:
        """The parameters that get a gradient."""
        backwards = (part for phase, part in self.phases.items() if phase.kind == "B")
        return frozenset(str(port.name) for part in backwards for port in part.outputs if port.kind == "gradient")


class TracedModel:
    """A captured model, traced with its gradients, that can be divided over stages in any way.

    Args:
        captured: The model.
        backward: Whether gradients are wanted; without them nothing is updated either.
        trained: Parameters whose gradients are wanted; ``None`` for all that have one.
        halves: Whether backward is to be divided into I and W too.
        updates: Whether forward's writes to buffers are wanted, with the gradients.
        measured: Whether results are to come with what decides whether micro-batches make up a batch.

    Raises:
        CaptureError: The graph holds something that a worker cannot run.
    """

    def __init__(
        self,
        captured: Captured,
        *,
        backward: bool,
        trained: frozenset[str] | None = None,
        halves: bool = False,
        updates: bool = True,
        measured: bool = False,
    ) -> None:
        if captured.fuse:
            joint = fused(captured.joint)
        else:
            joint = captured.joint if captured.fresh else captured.joint.copied()
        self.watch, self.unread = captured.watch, captured.unread
        self.written = tuple(str(port.name) for _, port in joint.outputs if port.kind == "update")
        fold_numbers(joint.graph)
        joint = state_strides(joint)
        require_types(joint)
        self.measures: tuple[Measure, ...] = ()
        if measured:
            joint, self.measures = with_measures(joint, _line_of)
        self._backward = backward
        self._trained = trained
        self._updating = updates and backward
        if halves and backward:
            split_backward_convolutions(joint.graph)
        self._updates = buffer_updates(joint) if self._updating else {}
        self._take(joint, halves=halves and backward)

    def _take(self, joint: Joint, segments: Segments | None = None, *, halves: bool) -> None:
        """Set the model's graph, and its segments, which are computed unless given."""
        self._joint = joint
        self._halves = halves
        kinds = ("result", "update") if self._updating else ("result",)
        self._kept = [(node, port) for node, port in joint.outputs if port.kind in kinds]
        self._gradients = [
            (node, port)
            for node, port in joint.outputs
            if port.kind == "gradient" and (self._trained is None or port.name in self._trained)
        ]
        self._ahead = _ancestors([node for node, _ in self._kept])
        self._segments = segments or find_segments(joint, self._ahead)
        self._positions = random_positions(joint.graph)
        self._in_order = read_in_order(joint)
        self._order = {node: number for number, node in enumerate(joint.graph.nodes)}
        self._places = {node: place for place, (node, _) in enumerate(joint.inputs)}
        self._readers = self._find_readers()

    def require(self, known: Collection[str]) -> None:
        """Require that its programs call only operators that workers have.

        Args:
            known: Their names.

        Raises:
            CaptureError: They call another one; the message names the line.
        """
        needed = _ancestors([node for node, _ in (*self._kept, *self._gradients)])
        for node in self._joint.graph.nodes:
            if (
                node in needed
                and node.op == "call_function"
                and not picks(node)
                and str(runs_as(node.target)) not in known
            ):
                raise node_refusal(node, f"it calls {node.target}, which workers do not have", "Use other operators")

    def halved(self) -> TracedModel:
        """Return the model with backward in halves, too, without another trace."""
        made, joint = copy.copy(self), self._joint.copied()
        split_backward_convolutions(joint.graph)
        made._take(joint, halves=self._backward)
        return made

    def with_weight_in_batch(self, leaf: int) -> TracedModel:
        """Return the model with the weight of its loss as one of the tensors of the batch, without another trace.

        Args:
            leaf: Its index among them.
        """
        made = copy.copy(self)
        ports = ((node, Port("leaf", leaf) if port.kind == "weight" else port) for node, port in self._joint.inputs)
        made._take(replace(self._joint, inputs=tuple(ports)), self._segments, halves=self._halves)
        return made

    def apart(self) -> TracedModel | None:
        """Return the model with samples that depend neither on chance nor on others of their micro-batch by dropout,
        batch norm and the like, and without updates, without another trace; ``None`` where that cannot be had."""
        made, joint = copy.copy(self), self._joint.copied()
        joint = replace(joint, outputs=tuple(pair for pair in joint.outputs if pair[1].kind != "update"))
        put_samples_apart(joint.graph, {node for node, _ in joint.outputs})
        made.__dict__.pop("divisors", None)
        made._updating, made._updates = False, {}
        made._take(joint, halves=False)
        return made if made.regroupable else None

    @functools.cached_property
    def divisors(self) -> tuple[Divisor, ...]:
        """The divisors of the results that depend on the batch alone."""
        return loss_divisors(self._joint)

    @functools.cached_property
    def operators(self) -> int:
        """Hash of the operators of forward: where it is the same, so is the code of the user's that was traced."""
        return hash(tuple(str(node.target) for node in self._joint.graph.nodes if node in self._ahead))

    @property
    def draws(self) -> bool:
        """Return whether it draws random numbers."""
        return bool(self._positions)

    @property
    def by_batch(self) -> bool:
        """Return whether samples are normalised by statistics of their micro-batch."""
        return any(map(normalises_by_batch, self._joint.graph.nodes))

    @property
    def regroupable(self) -> bool:
        """Return whether samples may be in other micro-batches with the same result, but for rounding."""
        return not (any(map(varies, self._positions)) or self.by_batch)

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """The constant tensors of the graph, by name."""
        return self._joint.constants

    def _narrowed(self, stages: Sequence[Sequence[str]], narrow: Collection[int]) -> TracedModel:
        """Return the model with the products of some stages in bfloat16."""
        made = copy.copy(self)
        place = _stage_of_segments(self._segments, stages)
        joint, segments = to_mixed_precision(self._joint, self._segments, place, narrow)
        made._take(joint, segments, halves=self._halves)
        return made

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the model's segments, in the order of forward."""
        return self._segments.names

    def divide(
        self,
        stages: Sequence[Sequence[str]] | None = None,
        *,
        policies: Sequence[str] | None = None,
        blocks: Sequence[int] = (),
        narrow: Collection[int] = (),
    ) -> ModelPrograms:
        """Return the programs of stages.

        Args:
            stages: The names of the segments of each stage; ``None`` for one stage. A segment that is not named belongs
                to the stage of the one before it, and unknown names are ignored: captures for evaluation may have fewer
                segments.
            policies: The activation policy of each stage. With ``recompute`` backward recomputes its forward's values
                from the stage's inputs; random operators draw the same numbers again, and in halves I is all of
                backward, and W is empty. Other policies do not change the programs.
            blocks: The block number of each stage, if several are on the same devices. Values that a recomputed stage
                passed to the next one of its block, whose backward needs them, are still there, and not recomputed.
            narrow: Stages whose products are computed in bfloat16; see :mod:`onebox.graph.transform.mixed_precision`.

        Raises:
            UsageError: A stage needs a value of a later one, or one that is to be in bfloat16 is in float64.
            CaptureError: An operator cannot travel.
        """
        with TRACING:
            if narrow:
                other = self._narrowed(stages or [self.segments], narrow)
                return other.divide(stages, policies=policies, blocks=blocks)
            remade = frozenset(stage for stage, policy in enumerate(policies or ()) if policy == "recompute")
            division = replace(self._division(stages or [self.segments]), remade=remade, blocks=tuple(blocks))
            outputs = [*self._kept, *self._terms(division)]
            bodies = divide(division, outputs, backward=self._backward, halves=self._halves)
            made = {phase: self._program(body) for phase, body in sorted(bodies.items())}
            used = {port for part in made.values() for port in part.inputs}
            constants = {name: t for name, t in self._joint.constants.items() if Port("constant", name) in used}
            return ModelPrograms(
                phases=made,
                stages=division.stages,
                updates=self._updates,
                constants=constants,
                measures=self.measures,
            )

    def _find_readers(self) -> dict[str, list[fx.Node]]:
        """Return the forward nodes that read each parameter, directly or through a view."""
        names = {node: str(port.name) for node, port in self._joint.inputs if port.kind in ("parameter", "rounded")}
        found: dict[str, list[fx.Node]] = {}
        for node in self._segments.of:
            if node in self._ahead and not (is_view(node) and root_of(node) in names):
                for root in {root_of(argument) for argument in arguments_of(node)} & names.keys():
                    found.setdefault(names[root], []).append(node)
        return found

    # ---- dividing

    def _division(self, stages: Sequence[Sequence[str]]) -> Division:
        place = _stage_of_segments(self._segments, stages)
        inputs = dict(self._joint.inputs)
        stage_of: dict[fx.Node, int] = {}
        for node in self._joint.graph.nodes:
            if node.op != "call_function":
                continue
            if picks(node):
                stage_of[node] = stage_of[canonical(node.args[0])]
                continue
            stage = place[self._segments.of[node]]
            if node not in self._ahead:  # a gradient goes from later stages to earlier ones
                behind = [stage_of[source] for source in _behind(node, self._ahead, stage_of)]
                # The nodes that sum the gradients of one value stay in its stage of origin, so that only their sum
                # travels.
                stage = min(behind) if behind and accumulates(node) else min([stage, *behind])
            stage_of[node] = stage
        changed = {str(port.name): canonical(node) for node, port in self._kept if port.kind == "update"}
        owner = {
            node: stage_of.get(changed[str(port.name)], 0)
            for node, port in inputs.items()
            if port.kind == "buffer" and port.name in changed
        }
        division = Division(
            joint=self._joint,
            stage_of=stage_of,
            ahead=self._ahead,
            lasting=set(inputs) - set(owner),
            owner=owner,
            stages=len(stages),
            order=self._order,
        )
        self._require_order(division)
        return division

    def _require_order(self, division: Division) -> None:
        """Refuse stages that need values of later ones."""
        names = self._segments.names
        made = {**division.owner, **{node: stage for node, stage in division.stage_of.items() if node in self._ahead}}
        for node, stage in made.items():
            if node not in division.stage_of or picks(node):
                continue
            for argument in map(canonical, arguments_of(node)):
                _, source = (None, argument) if made.get(argument, 0) <= stage else again(argument, division)
                if source is not None and made.get(source, 0) > stage:
                    raise UsageError(
                        f"stage {stage} (segment {names[self._segments.of[node]]!r}) needs a value of stage "
                        f"{made[source]}: order the stages so that values go from earlier to later ones, and let no "
                        "two stages need each other"
                    )

    def _terms(self, division: Division) -> list[tuple[fx.Node, Port]]:
        """Return the gradients of the parameters; that of a parameter that several stages read as one term for each.

        Where one stage reads it, its gradient is made there whole, even if it is a sum: the gradient of an addend of a
        stream is that of the stream, to which all later stages contribute.
        """
        found: list[tuple[fx.Node, Port]] = []
        for node, port in self._gradients:
            readers = {division.stage_of[reader] for reader in self._readers.get(str(port.name), ())}
            stack = [canonical(node)]
            while stack:
                term = stack.pop()
                stages = {division.stage_of.get(leaf, 0) for leaf in _addends(term)}
                if len(stages) > 1 and stages <= readers:
                    stack += [canonical(source) for source in term.all_input_nodes]
                else:
                    found.append((term, port))
        return found

    def _program(self, body: Body) -> NamedProgram:
        """Lower a phase."""
        inputs = [self._joint.inputs[place] for place in sorted(self._places[node] for node in body.inputs)]
        inputs += [(node, Port("value", self._order[node])) for node in sorted(body.given, key=self._order.__getitem__)]
        nodes = sorted(body.nodes, key=self._order.__getitem__)
        outputs = [canonical(node) for node, _ in body.outputs]
        program = lower(nodes, [node for node, _ in inputs], outputs, self._positions, self._in_order)
        program = relaid(program, _orders(inputs), _orders(body.outputs))
        program, ports_out = sum_alike(program, [port for _, port in body.outputs])
        return NamedProgram(
            program=program, inputs=tuple(port for _, port in inputs), outputs=ports_out, nodes=tuple(nodes)
        )


def model_programs(captured: Captured, *, backward: bool, trained: frozenset[str] | None = None) -> ModelPrograms:
    """Derive the programs of a captured model that is one stage.

    Args:
        captured: The model.
        backward: Whether gradients are wanted; without them nothing is updated either.
        trained: Parameters whose gradients are wanted; ``None`` for all that have one.

    Raises:
        CaptureError: The graph holds something that a worker cannot run.
    """
    return TracedModel(captured, backward=backward, trained=trained).divide()


def _line_of(node: fx.Node) -> str:
    """Return the user's line that made a node, as text; empty where it is not known."""
    place = place_of_node(node)
    return f"{place}: {place.text}" if place else ""


def _orders(ends: Sequence[tuple[fx.Node, Port]]) -> dict[int, tuple[int, ...]]:
    """Return the memory order of dimensions, by index, for each value where it is not the plain order."""
    found: dict[int, tuple[int, ...]] = {}
    for place, (node, port) in enumerate(ends):
        value = node.meta["val"]
        if port.kind == "value" and not value.is_contiguous():
            order = tuple(sorted(range(value.dim()), key=lambda dim, value=value: (-value.stride(dim), dim)))  # type: ignore[misc]
            if value.permute(order).is_contiguous():
                found[place] = order
    return found


def _addends(node: fx.Node) -> list[fx.Node]:
    """Return the addends of the gradient of a value that is read in several places."""
    operands = [canonical(source) for source in node.all_input_nodes]
    if not accumulates(node) or len(operands) != 2:
        return [node]
    return [leaf for operand in operands for leaf in _addends(operand)]


def _behind(node: fx.Node, ahead: set[fx.Node], stage_of: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the backward nodes that a backward node reads."""
    sources = [canonical(source) for source in arguments_of(node)]
    return [source for source in sources if source in stage_of and source not in ahead]


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and all their dependencies, and the nodes that name outputs of multi-output ones."""
    seen: set[fx.Node] = set()
    stack = [canonical(node) for node in nodes]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(canonical(argument) for argument in arguments_of(node))
    return seen | {canonical(user) for node in seen for user in node.users if picks(user)}


def _stage_of_segments(segments: Segments, stages: Sequence[Sequence[str]]) -> list[int]:
    """Return the stage of each segment; a segment that is not named belongs to the stage of the one before it."""
    named = {name: stage for stage, names in enumerate(stages) for name in names}
    found: list[int] = []
    for name in segments.names:
        found.append(named.get(name, found[-1] if found else 0))
    return found
