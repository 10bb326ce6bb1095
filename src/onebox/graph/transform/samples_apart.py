"""Graphs without what makes samples depend on chance, or on the others of their micro-batch.

A loss that is a mean over samples has the same value for some samples together and in parts, but for dropout and other
random numbers, and for batch norm. So to compare the two, random numbers become a constant, and batch norm uses running
statistics, those of a layer that has none are 0 and 1.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from onebox.graph.lower.loss_divisors import normalises_by_batch
from onebox.graph.lower.lowering import draws, varies

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
_RRELU = _aten.rrelu_with_noise_functional.default
_NORM = _aten._native_batch_norm_legit_functional.default
_NORM_ALONE = _aten._native_batch_norm_legit.no_stats
_NORM_BY_RUNNING = _aten._native_batch_norm_legit_no_training.default
_NORM_BACKWARD = _aten.native_batch_norm_backward.default
_PERMUTATIONS = (_aten.randperm.default, _aten.randperm.generator)

_EVEN, _SOME = 1.0, 0.5
"""What random numbers become: those of a yes or no, and others."""


def put_samples_apart(graph: fx.Graph, outputs: Collection[fx.Node]) -> None:
    """Replace random operators and batch norms of a graph; those of other kinds stay.

    Args:
        graph: Changed in place.
        outputs: Its outputs.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (_NORM, _NORM_ALONE):
            if normalises_by_batch(node):
                _by_running_statistics(node)
        elif draws(node) or varies(node):
            _without_chance(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node not in outputs:
            graph.erase_node(node)


def _without_chance(node: fx.Node) -> None:
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if node.target is _DROPOUT:
        _replace_outputs(node, node.args[0], _constant(node, node.meta["val"][1], True))
    elif node.target is _RRELU:
        x: Any = node.args[0]
        low: Any = node.args[2] if len(node.args) > 2 else 1 / 8  # arguments with the schema's defaults are left out
        high: Any = node.args[3] if len(node.args) > 3 else 1 / 3
        with node.graph.inserting_before(node):
            leaky = node.graph.call_function(_aten.leaky_relu.default, (x, (low + high) / 2))
        leaky.meta = {**node.meta, "val": node.meta["val"][0]}
        _replace_outputs(node, leaky, _constant(node, node.meta["val"][1], _SOME))
    elif "dropout_p" in arguments or "p" in arguments[3:]:  # attention
        place = arguments.index("dropout_p" if "dropout_p" in arguments else "p")
        if place < len(node.args):
            node.args = (*node.args[:place], 0.0, *node.args[place + 1 :])
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "dropout_p"}
    elif isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(_number(node))


def _number(node: fx.Node) -> fx.Node:
    """Return the constant that stands for random numbers."""
    made = node.meta["val"]
    if node.target in _PERMUTATIONS:
        with node.graph.inserting_before(node):
            found = node.graph.call_function(_aten.arange.default, (node.args[0],), _placed(made))
        found.meta = dict(node.meta)
        return found
    if made.dtype is torch.bool:
        return _constant(node, made, True)
    if not made.dtype.is_floating_point and not made.dtype.is_complex:
        low = node.args[0] if "low" in str(node.target) else 0
        return _constant(node, made, low if isinstance(low, int) else 0)
    return _constant(node, made, _EVEN if "bernoulli" in str(node.target) else _SOME)


def _by_running_statistics(node: fx.Node) -> None:
    """Replace a batch norm, and its gradient."""
    x, weight, bias = node.args[:3]
    made = node.meta["val"]
    if node.target is _NORM:
        mean, variance, momentum, eps = node.args[3], node.args[4], *node.args[6:8]
    else:
        value = weight.meta["val"] if isinstance(weight, fx.Node) else x.meta["val"].new_empty(x.meta["val"].shape[1])  # type: ignore[union-attr]
        mean, variance = _constant(node, value, 0.0), _constant(node, value, 1.0)
        momentum, eps = node.args[4:6]
    with node.graph.inserting_before(node):
        other = node.graph.call_function(_NORM_BY_RUNNING, (x, weight, bias, mean, variance, momentum, eps))
    empty = made[1].new_empty(0)
    other.meta = {**node.meta, "val": (made[0], empty, empty)}
    for user in list(node.users):
        if user.target is not operator.getitem:
            continue
        place = user.args[1]
        for reader in list(user.users) if place in (1, 2) else ():
            if reader.target is _NORM_BACKWARD:
                args: list[Any] = list(reader.args)
                args[3], args[4], args[5], args[6], args[7] = mean, variance, None, None, False
                reader.args = tuple(args)
        if place == 0:
            user.args = (other, 0)
        elif place in (3, 4):
            user.replace_all_uses_with(mean if place == 3 else variance)  # type: ignore[arg-type]


def _replace_outputs(node: fx.Node, first: Any, second: fx.Node) -> None:
    """Replace the two outputs of a node."""
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(first if user.args[1] == 0 else second)


def _constant(node: fx.Node, like: torch.Tensor, value: float | int | bool) -> fx.Node:
    """Return a tensor of one value, before a node."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(_aten.full.default, (list(map(int, like.shape)), value), _placed(like))
    made.meta = {**node.meta, "val": like}
    return made


def _placed(like: torch.Tensor) -> dict[str, Any]:
    return {"dtype": like.dtype, "device": like.device, "pin_memory": False}
