"""The rules of ATen operators: the letters of their dimensions, as explained in :mod:`onebox.graph.shard.rules`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onebox.graph.shard.rules import LETTERS, WHOLE, Output, Rule, Specs, numbers, shape
from onebox.wire import ATTENTION, ATTENTION_BACKWARD, Many, Operator, SlotArgument, overload


def rule_of(operator: Operator, specs: Specs) -> Rule | None:
    """Return the rule of an operator, or ``None`` where its arguments must be whole.

    Args:
        operator: The operator.
        specs: Specs of the program's slots.
    """
    found = _RULES.get(operator.name)
    if found is not None:
        return found(operator, specs)
    if operator.name in _POINTWISE or torch.Tag.pointwise in overload(operator.name).tags:
        return _pointwise(operator, specs) if len(operator.outs) == 1 and operator.position < 0 else None
    return None


def _pointwise(operator: Operator, specs: Specs) -> Rule | None:
    """Pointwise with broadcasting: dimensions are aligned at the end, and those of one element are repeated."""
    made = operator.specs[0]
    if made is None or any(isinstance(value, Many) for value in operator.args):
        return None
    tensors: dict[int | str, int] = {n: v.index for n, v in enumerate(operator.args) if isinstance(v, SlotArgument)}
    tensors |= {key: value.index for key, value in operator.kwargs.items() if isinstance(value, SlotArgument)}
    return Rule({key: _aligned(specs[slot].shape, made.shape) for key, slot in tensors.items()}, _like(made.shape))


def _aligned(small: Sequence[int], large: Sequence[int]) -> str:
    """Return the letters of a tensor that is broadcast to a shape."""
    letters = LETTERS[len(large) - len(small) : len(large)]
    sizes = large[len(large) - len(small) :]
    return "".join(letter if a == b else WHOLE for letter, a, b in zip(letters, small, sizes, strict=True))


def _like(sizes: Sequence[int]) -> list[Output]:
    return [Output(LETTERS[: len(sizes)])]


def _without(letters: str, dims: Sequence[int]) -> str:
    gone = {dim % len(letters) for dim in dims} if letters else set()
    return "".join(WHOLE if dim in gone else letter for dim, letter in enumerate(letters))


def _along(*inputs: int, dims: int, outputs: int = 1) -> Callable[[Operator, Specs], Rule]:
    """Tensors of one shape; the dimensions that argument ``dims`` names stay whole."""

    def rule(operator: Operator, specs: Specs) -> Rule:
        letters = LETTERS[: len(shape(operator, inputs[0], specs))]
        letters = _without(letters, numbers(operator, dims) or [0])
        return Rule(dict.fromkeys(inputs, letters), [Output(letters)] * outputs)

    return rule


def _reduce(sums: bool) -> Callable[[Operator, Specs], Rule]:
    """Reduction ``(x, dims, keepdim)``; over all dimensions without ``dims``."""

    def rule(operator: Operator, specs: Specs) -> Rule:
        letters = LETTERS[: len(shape(operator, 0, specs))]
        dims = numbers(operator, 1) or list(range(len(letters)))
        gone = {dim % len(letters) for dim in dims} if letters else set()
        keep = bool(operator.args[2]) if len(operator.args) > 2 else False
        left = _without(letters, dims)
        out = left if keep else "".join(letter for dim, letter in enumerate(letters) if dim not in gone)
        summed = "".join(letters[dim] for dim in gone) if sums else ""
        return Rule({0: letters if sums else left}, [Output(out, summed)] * len(operator.outs))

    return rule


def _product(left: str, right: str, out: str, *, bias: bool = False) -> Callable[[Operator, Specs], Rule]:
    """Matrix product, with a bias before it or without; ``k`` is the dimension of the sum."""

    def rule(operator: Operator, specs: Specs) -> Rule:
        made = Output(out, "k")
        if not bias:
            return Rule({0: left, 1: right}, [made], factors=(0, 1))
        rows = operator.specs[0]
        assert rows is not None
        letters = _aligned(shape(operator, 0, specs), rows.shape)
        letters = letters.translate(str.maketrans(LETTERS[: len(out)], out))
        return Rule({0: letters, 1: left, 2: right}, [made], factors=(1, 2))

    return rule


def _convolution(operator: Operator, specs: Specs) -> Rule | None:
    """Convolution.

    ``(x, weight, bias, stride, padding, dilation, transposed, output padding, groups)``; i, o: channels in, out.
    """
    x, weight = shape(operator, 0, specs), shape(operator, 1, specs)
    rest = WHOLE * (len(x) - 2)
    if operator.args[8] != 1:
        if not _depthwise(operator, x, weight, 6):
            return None
        inputs: dict[int | str, str] = {0: "no" + rest, 1: "o-" + rest, 2: "o"}
        return Rule(inputs, [Output("no" + rest)], counts={8: "o"}, factors=(1,))
    kernel = ("io" if operator.args[6] else "oi") + rest
    return Rule({0: "ni" + rest, 1: kernel, 2: "o"}, [Output("no" + rest, "i")], factors=(0, 1))


def _depthwise(operator: Operator, x: Sequence[int], weight: Sequence[int], transposed: int) -> bool:
    """Return whether a convolution treats each channel separately."""
    return operator.args[transposed + 2] == x[1] == weight[0] and weight[1] == 1 and not operator.args[transposed]


def _convolution_backward(operator: Operator, specs: Specs) -> Rule | None:
    """Gradient of a convolution.

    ``(gradient, x, weight, bias sizes, stride, …, transposed, …, groups, mask)`` to gradients of x, weight, bias.
    """
    x, weight = shape(operator, 1, specs), shape(operator, 2, specs)
    rest = WHOLE * (len(x) - 2)
    sizes = {3: 2} if operator.outs[2] is not None else {}
    if operator.args[9] != 1:
        if not _depthwise(operator, x, weight, 7):
            return None
        outputs = [Output("no" + rest), Output("o-" + rest, "n"), Output("o", "n")]
        return Rule({0: "no" + rest, 1: "no" + rest, 2: "o-" + rest}, outputs, sizes, {9: "o"})
    kernel = ("io" if operator.args[7] else "oi") + rest
    outputs = [Output("ni" + rest, "o"), Output(kernel, "n"), Output("o", "n")]
    return Rule({0: "no" + rest, 1: "ni" + rest, 2: kernel}, outputs, sizes)


def _batch_norm(operator: Operator, specs: Specs) -> Rule:
    """Batch norm: ``(x, weight, bias, mean, variance, …)`` to ``(y, …)``, all others one number a channel."""
    x = WHOLE + "c" + WHOLE * (len(shape(operator, 0, specs)) - 2)
    outputs = [Output(x), *(Output("c" if spec and spec.shape[0] else WHOLE) for spec in operator.specs[1:])]
    return Rule({0: x, 1: "c", 2: "c", 3: "c", 4: "c"}, outputs)


def _batch_norm_backward(operator: Operator, specs: Specs) -> Rule:
    """Gradient of batch norm.

    ``(gradient, x, weight, running mean, running variance, mean, 1 / deviation, …)`` to three gradients.
    """
    x = WHOLE + "c" + WHOLE * (len(shape(operator, 0, specs)) - 2)
    inputs: dict[int | str, str] = {0: x, 1: x}
    for number in range(2, 7):
        value = operator.args[number]
        missing = isinstance(value, SlotArgument) and specs[value.index].shape == (0,)
        inputs[number] = WHOLE if missing else "c"
    return Rule(inputs, [Output(x), Output("c"), Output("c")])


def _layer_norm(operator: Operator, specs: Specs) -> Rule:
    """Layer norm: ``(x, normalised shape, weight, bias, …)`` to ``(y, mean, 1 / deviation)``."""
    x, own = _leading(operator, 0, 1, specs)
    inner = WHOLE * own
    return Rule({0: x, 2: inner, 3: inner}, [Output(x), Output(x), Output(x)])


def _layer_norm_backward(operator: Operator, specs: Specs) -> Rule:
    """Gradient of layer norm.

    ``(gradient, x, normalised shape, mean, 1 / deviation, weight, bias, mask)`` to three gradients.
    """
    x, own = _leading(operator, 0, 2, specs)
    inner, sums = WHOLE * own, x.replace(WHOLE, "")
    return Rule({0: x, 1: x, 3: x, 4: x, 5: inner, 6: inner}, [Output(x), Output(inner, sums), Output(inner, sums)])


def _leading(operator: Operator, x: int, normalised: int, specs: Specs) -> tuple[str, int]:
    """Return the letters of the dimensions before the normalised ones, and their number."""
    rank, own = len(shape(operator, x, specs)), len(numbers(operator, normalised))
    return LETTERS[: rank - own] + WHOLE * own, own


def _planes(*inputs: int, outputs: int = 1, spatial: int = 2, sizes: int | None = None) -> Callable[..., Rule]:
    """Separate planes (the last ``spatial`` dimensions); argument ``sizes`` is the output's shape."""

    def rule(operator: Operator, specs: Specs) -> Rule:
        rank = len(shape(operator, inputs[0], specs))
        letters = LETTERS[: rank - spatial] + WHOLE * spatial
        told = {} if sizes is None else {sizes: 0}
        return Rule(dict.fromkeys(inputs, letters), [Output(letters)] * outputs, told)

    return rule


def _pad(operator: Operator, specs: Specs) -> Rule:
    """Padding ``(x, padding)``: two numbers for each padded dimension, the last dimension first."""
    letters = LETTERS[: len(shape(operator, 0, specs))]
    padded = range(-1, -1 - len(numbers(operator, 1)) // 2, -1)
    letters = _without(letters, list(padded))
    return Rule({0: letters}, [Output(letters)])


def _embedding(operator: Operator, specs: Specs) -> Rule:
    """Embedding ``(weight, indices)``: rows of the weight."""
    index = LETTERS[: len(shape(operator, 1, specs))]
    return Rule({0: "-z", 1: index}, [Output(index + "z")])


def _embedding_backward(operator: Operator, specs: Specs) -> Rule:
    """Gradient of an embedding: ``(gradient, indices, …)`` to the gradient of the weight."""
    index = LETTERS[: len(shape(operator, 1, specs))]
    return Rule({0: index + "z", 1: index}, [Output("-z", index)])


def _expand(operator: Operator, specs: Specs) -> Rule:
    """Expansion ``(x, sizes)``: dimensions of one element are repeated, others are put before."""
    made = operator.specs[0]
    assert made is not None
    x = shape(operator, 0, specs)
    letters = _aligned(x, made.shape)
    return Rule({0: letters}, [Output(WHOLE * (len(made.shape) - len(x)) + letters)], {1: 0})


def _select(operator: Operator, specs: Specs) -> Rule:
    """Selection: ``(x, dim, …)`` to one or several tensors without that dimension."""
    letters = LETTERS[: len(shape(operator, 0, specs))]
    dim = (numbers(operator, 1) or [0])[0] % len(letters)
    left = letters[:dim] + letters[dim + 1 :]
    return Rule({0: letters[:dim] + WHOLE + letters[dim + 1 :]}, [Output(left)] * len(operator.outs))


def _split(operator: Operator, specs: Specs) -> Rule:
    """Split: ``(x, sizes, dim)`` to several tensors that are consecutive along a dimension."""
    letters = _without(LETTERS[: len(shape(operator, 0, specs))], numbers(operator, 2) or [0])
    return Rule({0: letters}, [Output(letters)] * len(operator.outs))


def _select_backward(operator: Operator, specs: Specs) -> Rule:
    """Gradient of a selection: ``(gradient, sizes, dim, index)``."""
    rank = len(shape(operator, 0, specs)) + 1
    dim = numbers(operator, 2)[0] % rank
    letters = LETTERS[:rank]
    inside = letters[:dim] + letters[dim + 1 :]
    return Rule({0: inside}, [Output(letters[:dim] + WHOLE + letters[dim + 1 :])], {1: 0})


def _slice_backward(operator: Operator, specs: Specs) -> Rule:
    """Gradient of a slice: ``(gradient, sizes, dim, start, end, step)``."""
    letters = _without(LETTERS[: len(shape(operator, 0, specs))], numbers(operator, 2))
    return Rule({0: letters}, [Output(letters)], {1: 0})


def _several(*, new: bool) -> Callable[[Operator, Specs], Rule | None]:
    """Concatenation ``(tensors, dim)``: along an old dimension (cat) or a new one (stack)."""

    def rule(operator: Operator, specs: Specs) -> Rule | None:
        value, made = operator.args[0], operator.specs[0]
        assert isinstance(value, Many)
        assert made is not None
        shapes = [specs[item.index].shape for item in value.items if isinstance(item, SlotArgument)]
        if any(len(sizes) != len(shapes[0]) for sizes in shapes):  # cat skips empty tensors of one dimension
            return None
        dim = (numbers(operator, 1) or [0])[0] % len(made.shape)
        out = LETTERS[:dim] + WHOLE + LETTERS[dim + 1 : len(made.shape)]
        return Rule({0: [out.replace(WHOLE, "") if new else out] * len(shapes)}, [Output(out)])

    return rule


def _attention(*, backward: bool) -> Callable[[Operator, Specs], Rule | None]:
    """Fused attention, which treats heads separately, if it draws no random numbers.

    ``(query, key, value, dropout, causal)`` to ``(out, logsumexp)``, or with the gradient before and both outputs
    behind the value, to three gradients.
    """

    def rule(operator: Operator, specs: Specs) -> Rule | None:
        head = 1 if backward else 0
        dropout = operator.args[6 if backward else 3] if len(operator.args) > 3 else 0.0
        heads = {shape(operator, position, specs)[:2] for position in range(head, head + 3)}
        if dropout or len(heads) > 1:
            return None
        inputs: dict[int | str, str] = dict.fromkeys(range(head + 3), "bh--")
        if backward:
            inputs |= {4: "bh--", 5: "bh-"}
        place: int | str = "attn_mask"
        mask = operator.kwargs.get("attn_mask")
        if operator.name in (str(ATTENTION), str(ATTENTION_BACKWARD)):
            place = 8 if backward else 5
            mask = operator.args[place] if len(operator.args) > place else None
        if isinstance(mask, SlotArgument):
            batch = (*shape(operator, head, specs)[:2], 0, 0)
            aligned = _aligned(specs[mask.index].shape, batch)
            inputs[place] = aligned.translate(str.maketrans(LETTERS[:4], "bh--"))
        outputs = [Output("bh--")] * 3 if backward else [Output("bh--"), Output("bh-")]
        return Rule(inputs, outputs)

    return rule


_POINTWISE = frozenset(
    f"aten.{name}.default"
    for name in (
        "_to_copy", "leaky_relu_backward", "hardtanh_backward", "elu_backward", "hardswish_backward",
        "softplus_backward", "hardsigmoid_backward", "logit_backward", "zeros_like", "ones_like", "full_like",
    )
)  # fmt: skip
"""Element-wise operators without PyTorch's pointwise tag."""

_SOFTMAX = _along(0, dims=1)
_SOFTMAX_BACKWARD = _along(0, 1, dims=2)

_RULES: dict[str, Callable[[Operator, Specs], Rule | None]] = {
    "aten.mm.default": _product("mk", "kn", "mn"),
    "aten.bmm.default": _product("bmk", "bkn", "bmn"),
    "aten.addmm.default": _product("mk", "kn", "mn", bias=True),
    "aten.baddbmm.default": _product("bmk", "bkn", "bmn", bias=True),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.max_pool2d_with_indices.default": _planes(0, outputs=2),
    "aten.max_pool2d_with_indices_backward.default": _planes(0, 1, 7),
    "aten.avg_pool2d.default": _planes(0),
    "aten.avg_pool2d_backward.default": _planes(0, 1),
    "aten._adaptive_avg_pool2d.default": _planes(0),
    "aten._adaptive_avg_pool2d_backward.default": _planes(0, 1),
    "aten.adaptive_max_pool2d.default": _planes(0, outputs=2),
    "aten.adaptive_max_pool2d_backward.default": _planes(0, 1, 2),
    "aten.upsample_nearest2d.default": _planes(0),
    "aten.upsample_nearest2d.vec": _planes(0),
    "aten.upsample_nearest2d_backward.default": _planes(0, sizes=2),
    "aten.upsample_bilinear2d.default": _planes(0),
    "aten.upsample_bilinear2d.vec": _planes(0),
    "aten.upsample_bilinear2d_backward.default": _planes(0, sizes=2),
    "aten.constant_pad_nd.default": _pad,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._softmax.default": _SOFTMAX,
    "aten._safe_softmax.default": _SOFTMAX,
    "aten._log_softmax.default": _SOFTMAX,
    "aten._softmax_backward_data.default": _SOFTMAX_BACKWARD,
    "aten._log_softmax_backward_data.default": _SOFTMAX_BACKWARD,
    "aten.cumsum.default": _along(0, dims=1),
    "aten.flip.default": _along(0, dims=1),
    "aten.sum.dim_IntList": _reduce(True),
    "aten.sum.default": _reduce(True),
    "aten.mean.dim": _reduce(False),
    "aten.amax.default": _reduce(False),
    "aten.amin.default": _reduce(False),
    "aten.max.dim": _reduce(False),
    "aten.expand.default": _expand,
    "aten.select.int": _select,
    "aten.unbind.int": _select,
    "aten.select_backward.default": _select_backward,
    "aten.slice.Tensor": _along(0, dims=1),
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.slice_backward.default": _slice_backward,
    "aten.cat.default": _several(new=False),
    "aten.stack.default": _several(new=True),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention(backward=False),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention(backward=True),
    str(ATTENTION): _attention(backward=False),
    str(ATTENTION_BACKWARD): _attention(backward=True),
}
