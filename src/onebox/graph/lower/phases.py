"""Phases: the forward and backward of each stage, as programs that pass values to each other.

A stage has up to three phases: F (forward), and backward whole (B) or as two halves, I (what other stages wait for: the
gradients of its inputs) and W (the rest: the gradients of its parameters). The nodes of the model's graph are divided
over the phases; a value that another phase needs is an output of the phase that makes it, under a port of kind
``value``, numbered by its place in the whole graph, so that a skip connection is a value like any other.

Values that are cheaper to recompute than to send are recomputed: views of a value, the same value in a wider type, and
constants. The backward of a *recomputed* stage recomputes everything that it needs of its own forward: such a stage
keeps only its inputs from other stages, and buffers as they were before forward changed them. The one exception costs
no memory: values that the stage passed to the next one, whose backward has just run on the same devices and needed
them, are still there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import fx

from onebox.graph.capture.joint import Joint, Port
from onebox.graph.lower.lowering import arguments_of, canonical, draws, is_view, widens
from onebox.graph.lower.segments import picks

PhaseKind = Literal["F", "I", "W", "B"]


class Phase(NamedTuple):
    """A phase of a stage."""

    stage: int
    kind: PhaseKind


@dataclass(kw_only=True)
class Body:
    """The contents of a phase.

    Args:
        nodes: The nodes that it computes, recomputed ones among them.
        given: Values that it takes from other phases.
        inputs: Inputs of the graph that it reads.
        outputs: Nodes whose values are its outputs, with their ports.
    """

    nodes: set[fx.Node] = field(default_factory=set)
    given: set[fx.Node] = field(default_factory=set)
    inputs: set[fx.Node] = field(default_factory=set)
    outputs: list[tuple[fx.Node, Port]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Division:
    """The division of a graph's nodes over phases.

    Args:
        joint: The graph.
        stage_of: The stage of each computed node.
        ahead: Nodes of forward.
        lasting: Inputs of the graph that are the same at any time of a step.
        owner: For inputs that forward changes, the stage that does.
        stages: Number of stages.
        order: The place of each node in the graph.
        remade: Stages whose backward recomputes the values of their forward.
        blocks: The block number of each stage: consecutive stages of one block are on the same devices, and their
            backwards follow each other directly.
    """

    joint: Joint
    stage_of: Mapping[fx.Node, int]
    ahead: set[fx.Node]
    lasting: set[fx.Node]
    owner: Mapping[fx.Node, int]
    stages: int
    order: Mapping[fx.Node, int]
    remade: frozenset[int] = frozenset()
    blocks: Sequence[int] = ()

    def value(self, node: fx.Node) -> Port:
        """Return the port of a value."""
        return Port("value", self.order[node])

    def phase(self, node: fx.Node, early: set[fx.Node] | None) -> Phase:
        """Return the phase of a node.

        Args:
            node: A computed node, or an input that forward changes.
            early: From :func:`early_half`; ``None`` where backward is whole.
        """
        if picks(node):
            node = canonical(node.args[0])  # type: ignore[arg-type]
        if node not in self.stage_of:
            return Phase(self.owner[node], "F")
        stage = self.stage_of[node]
        if node in self.ahead:
            return Phase(stage, "F")
        if early is None:
            return Phase(stage, "B")
        return Phase(stage, "I" if node in early else "W")

    def phase_of_output(self, node: fx.Node, port: Port, early: set[fx.Node] | None) -> Phase:
        """Return the phase of an output of the whole graph; one that is itself an input belongs to the last stage."""
        if node in self.stage_of or node in self.owner:
            return self.phase(node, early)
        last = self.stages - 1
        behind: PhaseKind = "B" if early is None else "I" if last in self.remade else "W"
        return Phase(last, behind if port.kind == "gradient" else "F")

    def follows_at_once(self, stage: int) -> bool:
        """Return whether a stage's backward directly follows that of the next stage on the same devices."""
        return stage + 1 < len(self.blocks) and self.blocks[stage] == self.blocks[stage + 1]

    def computed_in(self, phase: Phase, node: fx.Node, early: set[fx.Node] | None, there: Set[fx.Node]) -> bool:
        """Return whether a phase computes a node, because it belongs there or because it is recomputed there.

        Args:
            phase: The phase.
            node: The node.
            early: From :func:`early_half`; ``None`` where backward is whole.
            there: Values of forward that need not be recomputed.
        """
        own = self.phase(node, early)
        again = own == Phase(phase.stage, "F") and phase.stage in self.remade and phase.kind in ("B", "I")
        return own == phase or (again and node in self.stage_of and node not in there)


def early_half(division: Division) -> set[fx.Node]:
    """Return the nodes of backward that other stages wait for; of a recomputed stage all, to recompute only once.

    All backward nodes of such a stage use recomputed values; passing these to a second half would keep the memory that
    recomputation is to free.
    """
    early = {n for n, stage in division.stage_of.items() if stage in division.remade and n not in division.ahead}
    for node in reversed(list(division.stage_of)):
        if node in division.ahead:
            continue
        stage = division.stage_of[node]
        for source in _sources(node):
            if source in division.ahead or source not in division.stage_of:
                continue
            if division.stage_of[source] != stage or node in early:
                early.add(source)
    return early


def divide(
    division: Division, outputs: Sequence[tuple[fx.Node, Port]], *, backward: bool, halves: bool
) -> dict[Phase, Body]:
    """Compute the contents of each phase, from the last phase to the first.

    Args:
        division: The division of nodes, in the order of the graph, over phases.
        outputs: Outputs of the whole graph: results, updates, gradients.
        backward: Whether there is backward.
        halves: Whether backward is wanted as I and W too. The outputs of F are then those that either needs.
    """
    early = early_half(division) if halves else None
    own = [(canonical(node), port) for node, port in outputs]
    demanded: dict[Phase, dict[fx.Node, None]] = {}
    bodies: dict[Phase, Body] = {}
    phases = _backwards(division.stages, backward=backward, halves=halves)
    outputs_of: dict[Phase, list[tuple[fx.Node, Port]]] = {phase: [] for phase in phases}
    for pair in own:
        for phase in {division.phase_of_output(*pair, variant) for variant in (None, early)} & outputs_of.keys():
            outputs_of[phase].append(pair)

    def settle(phase: Phase) -> None:
        variant = _variant(phase, early)
        body = Body(outputs=list(outputs_of[phase]))
        wanted = sorted(demanded.pop(phase, ()), key=division.order.__getitem__)
        body.outputs += [(node, division.value(node)) for node in wanted]
        _fill(body, phase, division, variant)
        bodies[phase] = body
        demand(phase)

    def demand(phase: Phase) -> None:
        for node in bodies[phase].given:
            demanded.setdefault(division.phase(node, _variant(phase, early)), {})[node] = None

    back = [phase for phase in phases if phase.kind != "F"]
    for phase in back:
        settle(phase)
    if _spare(bodies, division, early):
        demanded.clear()
        for phase in back:
            demand(phase)
        for phase in back:
            demanded.pop(phase, None)  # the exchange within backward is unchanged
    for phase in phases[len(back) :]:
        settle(phase)
    assert not demanded, f"values of phases that have gone by: {demanded}"
    return bodies


def _variant(phase: Phase, early: set[fx.Node] | None) -> set[fx.Node] | None:
    return early if phase.kind in ("I", "W") else None


def _spare(bodies: dict[Phase, Body], division: Division, early: set[fx.Node] | None) -> bool:
    """Replace recomputation in stages by values that the stage whose backward runs before theirs has taken.

    This goes from the last stage to the first, since a stage that takes more may need less of the one before it.

    Returns:
        Whether there was such a stage.
    """
    spared = False
    for phase in sorted(bodies, reverse=True):
        if phase.kind in ("B", "I") and phase.stage in division.remade and division.follows_at_once(phase.stage):
            kinds: Sequence[PhaseKind] = ("B",) if phase.kind == "B" else ("I", "W")  # W comes later
            there = set[fx.Node]().union(*(bodies[Phase(phase.stage + 1, kind)].given for kind in kinds))
            body = bodies[phase] = Body(outputs=bodies[phase].outputs)
            _fill(body, phase, division, _variant(phase, early), there)
            spared = True
    return spared


def _backwards(stages: int, *, backward: bool, halves: bool) -> list[Phase]:
    """Return all phases, each before those that it takes values from."""
    found: list[Phase] = []
    for kinds in (("W", "I") if halves else (), ("B",) if backward else ()):
        found += [Phase(stage, kind) for stage in range(stages) for kind in kinds]
    return [*found, *(Phase(stage, "F") for stage in reversed(range(stages)))]


def _fill(
    body: Body,
    phase: Phase,
    division: Division,
    early: set[fx.Node] | None,
    there: Set[fx.Node] = frozenset(),
) -> None:
    """Compute the nodes of a phase for its outputs, and the values that it takes from others.

    Args:
        body: The contents, with outputs alone.
        phase: The phase.
        division: The division of nodes over phases.
        early: From :func:`early_half`; ``None`` where backward is whole.
        there: Values of its own forward that need not be recomputed.
    """
    stack = [canonical(node) for node, _ in body.outputs]
    while stack:
        node = stack.pop()
        if node in body.nodes or node in body.inputs:
            continue
        if node in division.lasting:
            body.inputs.add(node)
        elif not division.computed_in(phase, node, early, there):
            chain, source = again(node, division)
            body.nodes.update(chain)
            if source is None:
                continue
            if source in division.lasting:
                body.inputs.add(source)
            elif division.computed_in(phase, source, early, there):
                stack.append(source)
            else:
                body.given.add(source)
        elif node in division.stage_of:
            body.nodes.add(node)
            stack.extend(_sources(node))
        else:
            body.inputs.add(node)  # a buffer that this stage changes, as it was before


def again(node: fx.Node, division: Division) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the nodes to recompute for a value, and the value that they begin with.

    A view is recomputed from the smallest possible value; so that a value travels once, however many views of it are
    read, and without unread bytes.
    """
    if node.op == "call_function" and not node.all_input_nodes and not draws(node):
        return [node], None
    path = [node]
    while is_view(path[-1]) or widens(path[-1]):
        path.append(canonical(arguments_of(path[-1])[0]))
    if path[-1] in division.lasting:
        return path[:-1], path[-1]
    smallest = min(range(len(path)), key=lambda index: (path[index].meta["val"].nbytes, -index))
    return path[:smallest], path[smallest]


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node; a node that only names an output of another is replaced by that output."""
    found = [canonical(argument) for argument in node.all_input_nodes]
    return found if not picks(node) else [canonical(argument) for argument in arguments_of(node)]
