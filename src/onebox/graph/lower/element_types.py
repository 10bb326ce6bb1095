"""Element types of a graph, checked before anything is sent: tracing accepts mixtures that kernels refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from onebox.errors import CaptureError
from onebox.graph.capture.joint import Joint, Port
from onebox.graph.capture.locate import place_of_node
from onebox.graph.lower.lowering import resolve
from onebox.wire import ATTENTION

_aten = torch.ops.aten

_ALIKE: Mapping[Any, str] = {
    _aten.mm.default: "a product",
    _aten.bmm.default: "a product",
    _aten.mv.default: "a product",
    _aten.dot.default: "a product",
    _aten.addmm.default: "a product",
    _aten.addmv.default: "a product",
    _aten.addbmm.default: "a product",
    _aten.baddbmm.default: "a product",
    _aten.convolution.default: "a convolution",
    _aten._scaled_dot_product_flash_attention_for_cpu.default: "attention",
    _aten._scaled_dot_product_efficient_attention.default: "attention",
    ATTENTION: "attention",
}
"""Operators whose tensors must be of one type, with their names in messages."""

_LABELS: Mapping[Any, int] = {_aten.nll_loss_forward.default: 1, _aten.nll_loss2d_forward.default: 1}
"""Losses that take class indices, and the index of that argument."""

_LABEL_TYPES = (torch.int64, torch.uint8)


def require_types(joint: Joint) -> None:
    """Require that operators get the element types that their kernels accept.

    Raises:
        CaptureError: An operator does not, such as a product of a batch of float32 with parameters of float64; the
            message names the line, the types and the remedy.
    """
    ports = dict(joint.inputs)
    for node in joint.graph.nodes:
        if node.target in _ALIKE:
            _require_alike(node, ports)
        elif node.target in _LABELS:
            _require_labels(node)


def _require_alike(node: fx.Node, ports: dict[fx.Node, Port]) -> None:
    sources = [source for source in node.all_input_nodes if isinstance(source.meta["val"], Tensor)]
    types = {source.meta["val"].dtype for source in sources}
    if len(types) < 2:
        return
    came = " and ".join(dict.fromkeys(_described(source, ports) for source in sources))
    ends = _ends(sources, ports)
    data = next((_spelled(source.meta["val"].dtype) for source, port in ends if port.kind == "leaf"), "")
    held = [source for source, port in ends if port.kind in ("parameter", "buffer")]
    if held and data:
        own = _spelled(held[0].meta["val"].dtype)
        advice = f"Convert the batch, x.to(torch.{own}), or the model, model.to(torch.{data})"
    else:
        advice = "Convert one of them with .to(dtype) in forward"
    raise _refused(node, f"{_ALIKE[node.target]} takes tensors of one type only, and got {came}", advice)


def _require_labels(node: fx.Node) -> None:
    scores, labels = node.args[0], node.args[_LABELS[node.target]]
    assert isinstance(scores, fx.Node)
    assert isinstance(labels, fx.Node)
    found = labels.meta["val"].dtype
    if found not in _LABEL_TYPES:
        raise _refused(
            node,
            f"the loss takes numbers of classes as int64 (or uint8), and got targets of {_spelled(found)} "
            f"{list(labels.meta['val'].shape)} for scores of {_spelled(scores.meta['val'].dtype)} "
            f"{list(scores.meta['val'].shape)}",
            "Convert the targets with .long()",
        )


def _ends(sources: Iterable[fx.Node], ports: dict[fx.Node, Port]) -> list[tuple[fx.Node, Port]]:
    """Return the inputs of the graph among values, with views followed to their base."""
    found = []
    for source in sources:
        node = _root(source)
        if node in ports:
            found.append((node, ports[node]))
    return found


def _root(node: fx.Node) -> fx.Node:
    """Return the base of a view."""
    node = resolve(node)
    while node.target in (_aten.t.default, _aten.transpose.int, _aten.view.default, _aten.permute.default):
        first = node.args[0]
        assert isinstance(first, fx.Node)
        node = resolve(first)
    return node


def _described(source: fx.Node, ports: dict[fx.Node, Port]) -> str:
    value = source.meta["val"]
    text = f"{_spelled(value.dtype)} {list(value.shape)}"
    port = ports.get(_root(source))
    if port is None:
        return text
    if port.kind == "leaf":
        return f"{text} (of the batch)"
    return f"{text} ({port.kind} {str(port.name).removeprefix('model.')})"


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refused(node: fx.Node, reason: str, advice: str) -> CaptureError:
    place = place_of_node(node)
    where = f"{place}: {place.text}\n  " if place else ""
    return CaptureError(
        f"{where}{reason}; plain PyTorch refuses that, too. {advice}", where=str(place) if place else None, unfit=True
    )
