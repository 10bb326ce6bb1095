"""Segments: the smallest parts of a model that a plan moves. Every node of its graph belongs to one.

Forward is cut where a matrix of parameters (two dimensions or more: a weight, a kernel, an embedding) is read for the
first time, or by another module than that of the segment; integers, such as the codes of frozen weights, go with what
reads them. All nodes up to the next such place belong to the segment, so that a normalisation, an activation or a
residual sum goes with the layer before it. The cuts depend on the structure alone, not on sizes, so that captures of
one model for other shapes or in eval mode have the same segments, under the same names: the path of the module that
begins them, with ``#2`` and so on where it begins several.

A node of backward belongs to the segment of the operator that it is the gradient of, by autograd's sequence numbers or,
without them, to that of its neighbours. The programs are correct for any segments: a node in another segment costs a
transfer, but does not change a result.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from onebox.graph.capture.joint import Joint
from onebox.graph.capture.locate import layer_of_node
from onebox.graph.lower.lowering import arguments_of, canonical, is_view

_LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments of a graph.

    Args:
        names: In the order of forward.
        of: The number of the segment of each node of the graph, except inputs and the output.
    """

    names: tuple[str, ...]
    of: Mapping[fx.Node, int]


def find_segments(joint: Joint, ahead: set[fx.Node]) -> Segments:
    """Divide a graph into segments.

    Args:
        joint: The graph.
        ahead: Nodes that forward computes; the others are backward's.
    """
    inputs = {node for node, _ in joint.inputs}
    body = [node for node in joint.graph.nodes if node.op == "call_function"]
    forward = [node for node in body if node.meta.get("partitioner_tag") != "is_backward" or node in ahead]
    of, names = _cut(joint, forward)
    behind = [node for node in body if node not in of]
    _follow(behind, of, forward, inputs, last=len(names) - 1)
    return Segments(names=_numbered(names), of=of)


def _cut(joint: Joint, forward: list[fx.Node]) -> tuple[dict[fx.Node, int], list[str]]:
    """Cut forward into segments; return the segment of each node, and the module that begins each segment."""
    integers = {node for node, port in joint.inputs if port.kind == "parameter" and _holds_integers(node)}
    parameters = {node for node, port in joint.inputs if port.kind == "parameter"} - integers
    matrices = {node for node in parameters if node.meta["val"].dim() > 1}
    fixed = {node for node, port in joint.inputs if port.kind == "buffer"} | integers
    of: dict[fx.Node, int] = {}
    names: list[str] = []
    known: set[fx.Node] = set()
    begun = False
    for node in forward:
        if is_view(node) and root_of(node).op != "call_function":
            continue  # a view of an input belongs to its reader
        if _prepares(node, fixed, of):
            continue  # so does a value of buffers and integers alone, as it does in other captures of the model
        own = {root_of(argument) for argument in arguments_of(node)} & matrices
        path = _path(node)
        if not names:
            names.append(path)
        if own and (own - known or path != names[-1]):
            if begun:
                names.append(path)
            else:
                names[-1] = path
            begun = True
        known |= own
        of[node] = len(names) - 1
    for node in reversed(forward):
        if node not in of:
            of[node] = min((of[user] for user in node.users if user in of), default=0)
    return of, names or [_LOSS]


def _holds_integers(node: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def _prepares(node: fx.Node, fixed: Collection[fx.Node], of: Mapping[fx.Node, int]) -> bool:
    """Return whether a value with readers is made of fixed inputs alone, by nodes without a segment so far."""
    sources = [root_of(argument) for argument in arguments_of(node)]
    read = any(user.op == "call_function" for user in node.users)
    return read and bool(sources) and all(s in fixed or (s.op == "call_function" and s not in of) for s in sources)


def root_of(node: fx.Node) -> fx.Node:
    """Follow views to the node that owns their memory."""
    node = canonical(node)
    while is_view(node):
        node = canonical(arguments_of(node)[0])
    return node


def _path(node: fx.Node) -> str:
    """Return the path of the innermost module that a node of forward belongs to."""
    return layer_of_node(node) or _LOSS


def _numbered(names: list[str]) -> tuple[str, ...]:
    """Make names distinct."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(found)


def _follow(
    behind: list[fx.Node], of: dict[fx.Node, int], forward: list[fx.Node], inputs: set[fx.Node], *, last: int
) -> None:
    """Assign each backward node the segment of its forward operator."""
    by_number = {
        node.meta.get("seq_nr"): of[node] for node in reversed(forward)
    }  # others repeat the number of the last
    for node in reversed(behind):
        if accumulates(node):
            users = [of[user] for user in node.users if user in of]
            if users:
                of[node] = max(users)
        else:
            number = node.meta.get("seq_nr")
            if number is not None and number in by_number and node.meta.get("fwd_nn_module_stack") is not None:
                of[node] = by_number[number]
    for node in behind:
        if node not in of:
            sources = [of[source] for source in node.all_input_nodes if source in of and source not in inputs]
            of[node] = min(sources, default=last)


def accumulates(node: fx.Node) -> bool:
    """Return whether a backward node sums gradients of one value that several operators read."""
    return bool(node.meta.get("is_gradient_acc")) or node.meta.get("fwd_nn_module_stack") is None


def picks(node: fx.Node) -> bool:
    """Return whether a node only names an output of another."""
    return node.target is operator.getitem
