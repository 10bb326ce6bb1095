"""Backward in halves: operators that give the gradients of inputs and of parameters at once are split in two.

So the gradient of the inputs, which other stages wait for, does not wait for that of the parameters (zero-bubble
schedules, arXiv 2401.10241). Convolutions are such operators; matrix products come as two already. Norms give both in
one pass over the data, and stay whole.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_CONVOLUTION = torch.ops.aten.convolution_backward.default
_MASK = 10
"""Index of ``output_mask`` among the arguments: the wanted gradients out of input, weight and bias."""


def split_backward_convolutions(graph: fx.Graph) -> None:
    """Split each backward of a convolution into one call for its input's gradient, and one for its parameters'."""
    for node in list(graph.find_nodes(op="call_function", target=_CONVOLUTION)):
        mask: list[bool] = list(node.args[_MASK])
        if not mask[0] or not any(mask[1:]):
            continue
        with graph.inserting_after(node):
            other = graph.call_function(_CONVOLUTION, (*node.args[:_MASK], [False, *mask[1:]]), node.kwargs)
        other.meta = dict(node.meta)
        made = node.meta["val"]
        other.meta["val"] = (None, *made[1:])
        node.args = (*node.args[:_MASK], [True, False, False])
        node.meta["val"] = (made[0], None, None)
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] != 0:
                user.args = (other, user.args[1])
