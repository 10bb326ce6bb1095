"""Rules of arguments: limits of operators whose kernels do not check all that they rely on.

Each rule was written after reading a kernel of ATen that takes sizes, integers or elements of a tensor for granted, and
reads or writes elsewhere, or divides by zero, if they are wrong. A rule may be stricter than the kernel needs, but
admits everything that PyTorch's own modules, functions and gradients pass.

Rules of shapes read everything but elements. Rules of elements read index tensors: one pass over each, with
:func:`_within` and its like. On a GPU they add an assertion to the device's stream, without a wait of the host; where
kernels of GPUs assert the same themselves (``nll_loss``, ``multi_margin_loss``), nothing is added.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire.attention import fits_fused
from onebox.wire.tensors import is_dense

Arguments = Mapping[str, Any]
"""Arguments of one call by their names in the operator's schema, defaults included.

There are two more: ``operator``, its name, and ``own``, whether an implementation of this project takes its place."""

Rule = Callable[[Arguments], None]


class Rules(NamedTuple):
    """The rules of an operator, each raising :class:`onebox.errors.WireError`.

    Args:
        shapes: Checks everything but elements; ``None`` for no rule.
        elements: Checks elements of tensors; ``None`` for no rule.
        apart: Whether checked elements must not be what the operator writes; those of pointwise operators may, as they
            are read before that.
    """

    shapes: Rule | None
    elements: Rule | None = None
    apart: bool = True


def _require(holds: bool, came: str, allowed: str) -> None:
    if not holds:
        raise WireError(f"{came}; allowed: {allowed}")


def _same_shape(left: Tensor, left_name: str, right: Sequence[int], right_name: str) -> None:
    _require(tuple(left.shape) == tuple(right), f"{left_name} is {list(left.shape)}", f"{right_name}, {list(right)}")


def _vector(tensor: Tensor | None, name: str, length: int) -> None:
    """Require a tensor of one dimension and a length, if there is a tensor."""
    if tensor is not None:
        _require(tuple(tensor.shape) == (length,), f"{name} is {list(tensor.shape)}", f"[{length}]")


def _numel(tensor: Tensor | None, name: str, count: int) -> None:
    if tensor is not None:
        _require(tensor.numel() == count, f"{name} has {tensor.numel()} elements", str(count))


def _integers(tensor: Tensor, name: str, *dtypes: torch.dtype) -> None:
    allowed = dtypes or (torch.int64, torch.int32)
    _require(tensor.dtype in allowed, f"{name} is {tensor.dtype}", ", ".join(map(str, allowed)))


def _contiguous(tensor: Tensor, name: str) -> None:
    _require(tensor.is_contiguous(), f"{name} has strides {list(tensor.stride())}", "a contiguous tensor")


def _dense(tensor: Tensor, name: str) -> None:
    """Require that a kernel which ignores strides finds the elements, perhaps in another order."""
    _require(is_dense(tensor), f"{name} has strides {list(tensor.stride())}", "a dense tensor")


def _choice(value: int, name: str, count: int) -> None:
    _require(0 <= value < count, f"{name} is {value}", f"0 to {count - 1}")


# ---- elements


def _holds(condition: Tensor, came: Callable[[], str], allowed: str) -> None:
    """Require that all elements are true; on other devices than CPUs by an assertion in the device's stream."""
    if condition.device.type == "cpu":
        if not bool(condition.all()):
            raise WireError(f"{came()}; allowed: {allowed}")
    elif condition.device.type != "meta":
        torch._assert_async(condition.all())


def _within(index: Tensor, name: str, start: int, stop: int, ignored: int | None = None) -> None:
    """Require that all elements are in a range, or are an ignored value."""
    if not index.numel() or index.device.type == "meta":
        return
    allowed = f"{start} to {stop - 1}" + ("" if ignored is None else f", or {ignored}")
    if index.device.type == "cpu":
        lowest, highest = (int(found) for found in torch.aminmax(index))
        if start <= lowest and highest < stop:
            return
        if ignored is None:
            raise WireError(f"{name} has elements from {lowest} to {highest}; allowed: {allowed}")
    inside = (index >= start) & (index < stop)
    if ignored is not None:
        inside |= index == ignored
    _holds(inside, lambda: f"{name} has elements from {int(index.min())} to {int(index.max())}", allowed)


# ---- pooling


def _pool_backward(dimensions: int) -> Rules:
    """Return the rules of a gradient that is added at the places where maxima were."""

    def shapes(a: Arguments) -> None:
        gradient, x, indices = a["grad_output"], a["self"], a["indices"]
        _integers(indices, "indices", torch.int64)
        _require(
            x.dim() in (dimensions + 1, dimensions + 2) and gradient.dim() == x.dim(),
            f"a gradient of {gradient.dim()} dimensions for an input of {x.dim()}",
            f"{dimensions + 1} or {dimensions + 2} of both",
        )
        _same_shape(indices, "indices", gradient.shape, "the shape of the gradient")
        _dense(indices, "indices")
        _leading(gradient, x, dimensions)
        sizes = list(a.get("output_size", gradient.shape[-dimensions:]))
        _require(sizes == list(gradient.shape[-dimensions:]), f"output_size is {sizes}", "that of the gradient")

    def elements(a: Arguments) -> None:
        _within(a["indices"], "indices", 0, math.prod(a["self"].shape[-dimensions:]))

    return Rules(shapes, elements)


def _leading(gradient: Tensor, x: Tensor, dimensions: int) -> None:
    """Require that a gradient has the samples and channels of an input, and as many dimensions."""
    _require(
        gradient.dim() == x.dim() and gradient.shape[:-dimensions] == x.shape[:-dimensions],
        f"a gradient of {list(gradient.shape)} for an input of {list(x.shape)}",
        f"the same sizes but for the last {dimensions}",
    )


def _average(a: Arguments) -> None:
    divisor = a["divisor_override"]
    if divisor is not None and not a["self"].dtype.is_floating_point:  # see _quotient
        _require(divisor > 0, f"divisor_override is {divisor}", "from 1")


def _average_backward(dimensions: int) -> Rules:
    def shapes(a: Arguments) -> None:
        gradient, x = a["grad_output"], a["self"]
        if "divisor_override" in a:
            _average(a)
        _leading(gradient, x, dimensions)
        _require(x.numel() > 0 or not gradient.numel(), f"an input of {list(x.shape)}", "one with elements")

    return Rules(shapes)


def _fractional_pool(dimensions: int) -> Rules:
    def shapes(a: Arguments) -> None:
        x, samples = a["self"], a["random_samples"]
        _require(x.dim() in (dimensions + 1, dimensions + 2), f"an input of {x.dim()} dimensions", "a batch or one")
        planes = math.prod(x.shape[:-dimensions])
        _require(
            samples.dim() == 3 and samples.shape[2] == dimensions and samples.numel() >= planes * dimensions,
            f"random_samples is {list(samples.shape)}",
            f"{dimensions} for each of {planes} planes",
        )
        _contiguous(samples, "random_samples")
        for name in ("kernel_size", "output_size"):
            _require(
                len(a[name]) == dimensions and min(a[name]) > 0, f"{name} is {list(a[name])}", f"{dimensions} from 1"
            )

    def elements(a: Arguments) -> None:
        samples = a["random_samples"]
        if samples.device.type != "meta":
            _holds((samples >= 0) & (samples < 1), lambda: "a random sample is outside", "0 to 1, 1 excluded")

    return Rules(shapes, elements)


def _unpool(dimensions: int) -> Rules:
    def shapes(a: Arguments) -> None:
        _require(
            len(a["output_size"]) == dimensions and min(a["output_size"]) >= 0,
            f"output_size is {list(a['output_size'])}",
            f"{dimensions} sizes",
        )
        _same_shape(a["indices"], "indices", a["self"].shape, "the shape of the input")

    def elements(a: Arguments) -> None:
        _within(a["indices"], "indices", 0, math.prod(a["output_size"]))

    return Rules(shapes, elements)


def _adaptive(a: Arguments) -> None:
    sizes = a["output_size"]
    few = math.prod(max(size, 1) for size in sizes) < 1 << 31  # a kernel visits them all, though one of them is 0
    _require(min(sizes, default=0) >= 0 and few, f"output_size is {list(sizes)}", "sizes from 0")


def _padding(a: Arguments) -> None:
    dimensions = next(count for count in (1, 2, 3) if f"{count}d" in a["operator"])
    _require(
        len(a["padding"]) == 2 * dimensions, f"a padding of {len(a['padding'])} numbers", f"{2 * dimensions} numbers"
    )
    if "grad_output" in a:
        _leading(a["grad_output"], a["self"], dimensions)


# ---- embeddings


def _embedding_backward(a: Arguments) -> None:
    gradient, indices = a.get("grad_output", a.get("grad")), a["indices"]
    assert gradient is not None
    _integers(indices, "indices")
    _require(a["num_weights"] >= 0, f"{a['num_weights']} rows", "0 or more")
    _require(not a.get("sparse"), "a sparse gradient", "a dense one")
    _require(
        gradient.dim() > 0 and gradient.shape[:-1] == indices.shape,
        f"a gradient of {list(gradient.shape)} for indices of {list(indices.shape)}",
        "the shape of the indices and one dimension more",
    )


def _embedding_backward_elements(a: Arguments) -> None:
    if a["scale_grad_by_freq"] or a["indices"].device.type != "cpu":  # the plain kernel of CPUs leaves others out
        ignored = None if a["scale_grad_by_freq"] else a["padding_idx"]  # frequencies are counted of all
        _within(a["indices"], "indices", 0, a["num_weights"], ignored)


def _bag(a: Arguments) -> None:
    weight, indices, offsets, samples = a["weight"], a["indices"], a["offsets"], a["per_sample_weights"]
    _require(weight.dim() == 2, f"a weight of {weight.dim()} dimensions", "2")
    _bag_indices(indices, offsets)
    _choice(a["mode"], "mode", 3)
    _vector(samples, "per_sample_weights", indices.numel())
    _require(samples is None or a["mode"] == 0, "per_sample_weights of another mode", "mode 0, which adds")
    _require(
        offsets.numel() > (1 if a["include_last_offset"] else 0) or not indices.numel(),
        f"{offsets.numel()} offsets for {indices.numel()} indices",
        "one for each bag",
    )
    _require(not a["include_last_offset"] or offsets.numel() > 0, "no offsets", "at least the last one")


def _bag_indices(indices: Tensor, offsets: Tensor | None) -> None:
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor is not None:
            _integers(tensor, name)
            _require(tensor.dim() == 1, f"{name} of {tensor.dim()} dimensions", "1")
            _contiguous(tensor, name)


def _offsets(offsets: Tensor, stop: int) -> None:
    """Require that offsets begin with 0, never fall, and end within the indices."""
    if not offsets.numel() or offsets.device.type == "meta":
        return
    _within(offsets, "offsets", 0, stop + 1)
    _holds(offsets[:1] == 0, lambda: f"the first offset is {int(offsets[0])}", "0")
    _holds(offsets[1:] >= offsets[:-1], lambda: "an offset is less than the one before", "offsets that never fall")


def _bag_elements(a: Arguments) -> None:
    _within(a["indices"], "indices", 0, a["weight"].shape[0])
    _offsets(a["offsets"], a["indices"].numel())


def _bag_backward(a: Arguments) -> None:
    gradient, indices, bags = a["grad"], a["indices"], a["offset2bag"]
    _bag_indices(indices, a.get("offsets"))
    _integers(bags, "offset2bag")
    _contiguous(bags, "offset2bag")
    _choice(a["mode"], "mode", 3)
    _require(gradient.dim() == 2, f"a gradient of {gradient.dim()} dimensions", "2")
    _require(not a.get("sparse"), "a sparse gradient", "a dense one")
    if bags.numel() or "offsets" not in a:
        _vector(bags, "offset2bag", indices.numel())
    else:  # they are computed from offsets
        _require(a["offsets"].numel() > 0 or not indices.numel(), "no offsets", "one for each bag")
    _vector(a.get("per_sample_weights"), "per_sample_weights", indices.numel())
    weight = a.get("weight")
    if weight is not None:
        _require(
            weight.dim() == 2 and weight.shape[1] == gradient.shape[1],
            f"a weight of {list(weight.shape)} for a gradient of {list(gradient.shape)}",
            "as many columns",
        )
        _require(a["mode"] == 0, f"mode is {a['mode']}", "0, which adds")
        return
    _require(a["num_weights"] >= 0, f"{a['num_weights']} rows", "0 or more")
    if a["mode"] == 1:
        _integers(a["bag_size"], "bag_size")
        _contiguous(a["bag_size"], "bag_size")
        count = a["bag_size"].numel()  # on GPUs the last offset has one, too
        _require(count >= gradient.shape[0], f"bag_size has {count} elements", f"at least {gradient.shape[0]}")
    if a["mode"] == 2:
        _integers(a["maximum_indices"], "maximum_indices")
        _contiguous(a["maximum_indices"], "maximum_indices")
        _same_shape(a["maximum_indices"], "maximum_indices", gradient.shape, "the shape of the gradient")


def _bag_backward_elements(a: Arguments) -> None:
    indices, bags, count = a["indices"], a["offset2bag"], a["grad"].shape[0]
    rows = a["weight"].shape[0] if "weight" in a else a["num_weights"]
    _within(indices, "indices", 0, rows)
    _within(bags, "offset2bag", 0, count)
    if a["mode"] == 2:  # -1, and in empty bags 0, where a bag has no maximum
        _within(a["maximum_indices"], "maximum_indices", -1, max(rows, 1))
    if "offsets" in a:
        offsets = a["offsets"]
        _offsets(offsets, indices.numel())
        if not bags.numel() and indices.numel() and offsets.device.type != "meta":
            filled = (offsets < indices.numel()).sum()
            _holds(filled <= count, lambda: f"{int(filled)} bags", f"{count}, the rows of the gradient")


# ---- losses


def _cross_entropy(a: Arguments) -> None:
    x = a["self"]
    _same_shape(a["target"], "target", x.shape, "the shape of the input")
    gradient = a.get("grad_output")
    if gradient is not None and gradient.numel() != 1:
        _same_shape(gradient, "the gradient", x.shape, "the shape of the input")


def _ctc(a: Arguments) -> None:
    """Check a loss between sequences and targets: [T, N, C], and [N, S] or one after the other."""
    x, targets, blank = a["log_probs"], a["targets"], a["blank"]
    _require(x.dim() == 3, f"log_probs of {x.dim()} dimensions", "3")
    _require(targets.dim() in (1, 2), f"targets of {targets.dim()} dimensions", "1 or 2")
    _integers(targets, "targets")
    _choice(blank, "blank", x.shape[-1])
    batch = x.shape[1]
    if targets.dim() == 2:
        _require(targets.shape[0] == batch, f"targets of {targets.shape[0]} samples", str(batch))
    for name in ("input_lengths", "target_lengths"):
        lengths = a[name]
        count = lengths.numel() if isinstance(lengths, Tensor) else len(lengths)
        _require(count == batch, f"{count} {name}", str(batch))
        if isinstance(lengths, Tensor):
            _require(not lengths.dtype.is_floating_point and lengths.dim() <= 1, f"{name} {lengths.dtype}", "integers")
    _require(batch > 0, "no samples", "at least one")
    if "log_alpha" in a:
        alpha = a["log_alpha"]
        _require(
            alpha.dim() == 3 and alpha.shape[0] == batch and alpha.shape[1] == x.shape[0],
            f"log_alpha is {list(alpha.shape)}",
            f"[{batch}, {x.shape[0]}, ...]",
        )
        for name in ("grad", "neg_log_likelihood"):
            _vector(a[name], name, batch)
        for name in ("grad", "neg_log_likelihood", "log_alpha"):
            _require(a[name].dtype is x.dtype, f"{name} is {a[name].dtype}", str(x.dtype))
    if not isinstance(a["input_lengths"], Tensor):
        _ctc_lengths(a, a["input_lengths"], a["target_lengths"])


def _ctc_lengths(a: Arguments, inputs: Sequence[int], wanted: Sequence[int]) -> None:
    x, targets = a["log_probs"], a["targets"]
    _require(0 <= min(inputs) <= max(inputs) <= x.shape[0], f"input_lengths are {list(inputs)}", f"0 to {x.shape[0]}")
    _require(min(wanted) >= 0, f"target_lengths are {list(wanted)}", "0 or more")
    if targets.dim() == 2:
        _require(max(wanted) <= targets.shape[1], f"target_lengths are {list(wanted)}", f"up to {targets.shape[1]}")
    else:
        _require(sum(wanted) <= targets.shape[0], f"{sum(wanted)} targets in all", str(targets.shape[0]))
    if "log_alpha" in a:
        states = a["log_alpha"].shape[2]
        _require(2 * max(wanted) + 1 <= states, f"{states} states in log_alpha", f"from {2 * max(wanted) + 1}")


def _ctc_elements(a: Arguments) -> None:
    x, targets, wanted = a["log_probs"], a["targets"], a["target_lengths"]
    if x.device.type == "meta":
        return
    if isinstance(wanted, Tensor):  # the operator itself brings them to the host
        wanted = wanted.reshape(-1).tolist()
        _ctc_lengths(a, a["input_lengths"].reshape(-1).tolist(), wanted)
    if targets.dim() == 1:
        _within(targets[: sum(wanted)], "targets", 0, x.shape[-1])
        return
    if max(wanted) == targets.shape[1] and min(wanted) == targets.shape[1]:
        _within(targets, "targets", 0, x.shape[-1])
        return
    lengths = torch.tensor(wanted, device=targets.device)
    read = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
    _within(torch.where(read, targets, torch.zeros_like(targets)), "targets", 0, x.shape[-1])


def _nll_backward(a: Arguments) -> None:
    x, target = a["self"], a["target"]
    _integers(target, "target", torch.int64, torch.uint8)
    if x.dim() == 1:
        _require(target.numel() == 1, f"{target.numel()} targets of one sample", "1")


def _nll_backward_elements(a: Arguments) -> None:
    x, target = a["self"], a["target"]
    if a["reduction"] == 0 and target.device.type == "cpu":  # all other kernels check them
        classes = x.shape[-1] if x.dim() < 3 else x.shape[1]
        _within(target, "target", 0, classes, a["ignore_index"])


def _margin(a: Arguments) -> None:
    x = a["self"]
    _require(x.numel() > 0 or a["reduction"] == 0, f"an input of {list(x.shape)}", "elements, or no reduction")


def _margin_backward_elements(a: Arguments) -> None:
    x, target = a["self"], a["target"]
    if target.device.type == "cpu":
        several = a["operator"].startswith("multilabel")
        _within(target, "target", -1 if several else 0, x.shape[-1] if x.dim() else 1)


def _margin_backward(a: Arguments) -> None:
    x, target = a["self"], a["target"]
    _integers(target, "target", torch.int64)
    if a["operator"].startswith("multilabel"):
        _same_shape(target, "target", x.shape, "the shape of the input")
        _same_shape(a["is_target"], "is_target", x.shape, "the shape of the input")
    else:
        _numel(target, "target", x.shape[0] if x.dim() == 2 else 1)
        _vector(a["weight"], "weight", x.shape[-1] if x.dim() else 1)
    _require(a["grad_output"].numel() > 0 or not x.numel(), "an empty gradient", "one of the loss")
    if a["reduction"] == 0:
        rows = x.shape[0] if x.dim() == 2 else 1
        _require(
            a["grad_output"].dim() == 0 or tuple(a["grad_output"].shape) == (rows,),
            f"a gradient of {list(a['grad_output'].shape)}",
            "one number for each sample",
        )


# ---- norms


def _channels(x: Tensor) -> int:
    _require(x.dim() >= 2 and x.shape[1] > 0, f"an input of {list(x.shape)}", "samples and channels, at least one")
    return x.shape[1]


_CHANNEL_VECTORS = (
    "weight", "bias", "running_mean", "running_var", "mean", "invstd", "save_mean", "save_invstd", "save_var",
    "sum_dy", "sum_dy_xmu",
)  # fmt: skip


def _batch_norm(a: Arguments) -> None:
    x, count = a["input"], _channels(a["input"])
    gathers = "gather" in a["operator"]
    trains = a.get(
        "training", a.get("train", a.get("use_input_stats", a.get("update", "no_update" not in a["operator"])))
    )
    for name in _CHANNEL_VECTORS:
        tensor = a.get(name)
        if tensor is None or (name.startswith("save_") and not trains and not tensor.numel()):
            continue
        if gathers and name in ("mean", "invstd"):
            _same_shape(tensor, name, (tensor.shape[0] if tensor.dim() else 0, count), "one row for each worker")
        else:
            _vector(tensor, name, count)
        _require(tensor.dtype.is_floating_point, f"{name} is {tensor.dtype}", "floating-point numbers")
    if "grad_out" in a:
        _same_shape(a["grad_out"], "the gradient", x.shape, "the shape of the input")
        _require(x.numel() > 0, f"an input of {list(x.shape)}", "one with elements")
        if trains and "save_mean" in a:
            saved = [a.get(name) for name in ("save_mean", "save_invstd", "save_var")]
            _require(sum(tensor is not None for tensor in saved) == 2, "no saved statistics", "those of forward")
    if not trains and ("running_mean" in a or "training" in a):
        found = [a.get(name) for name in ("running_mean", "running_var")]
        _require(all(one is not None for one in found), "no running statistics", "both of them")
    if gathers and isinstance(a.get("counts"), Tensor):
        _vector(a["counts"], "counts", a["mean"].shape[0])


def _normalized(a: Arguments) -> tuple[int, Sequence[int]]:
    """Check the normalized dimensions of an input; return the count of its rows, and those dimensions."""
    x, shape = a["input"], tuple(a["normalized_shape"])
    _require(
        0 < len(shape) <= x.dim() and tuple(x.shape[x.dim() - len(shape) :]) == shape,
        f"normalized_shape {list(shape)} of an input of {list(x.shape)}",
        "its last sizes",
    )
    return math.prod(x.shape[: x.dim() - len(shape)]), shape


def _layer_norm(a: Arguments) -> None:
    x = a["input"]
    rows, shape = _normalized(a)
    for name in ("weight", "bias"):
        if a.get(name) is not None:
            _same_shape(a[name], name, shape, "normalized_shape")
    if "grad_out" in a:
        _same_shape(a["grad_out"], "the gradient", x.shape, "the shape of the input")
        for name in ("mean", "rstd"):
            _numel(a.get(name), name, rows)
            if name in a:
                _contiguous(a[name], name)


def _group_norm(a: Arguments) -> None:
    x, samples, channels, groups = a["input"], a["N"], a["C"], a["group"]
    _require(
        x.dim() >= 2 and (x.shape[0], x.shape[1]) == (samples, channels) and a["HxW"] == math.prod(x.shape[2:]),
        f"N, C and HxW {samples}, {channels} and {a['HxW']} of an input of {list(x.shape)}",
        "its sizes",
    )
    _require(groups > 0 and channels > 0 and channels % groups == 0, f"{groups} groups", f"a divisor of {channels}")
    _dense(x, "the input")
    for name in ("weight", "bias"):
        _vector(a.get(name), name, channels)
        if a.get(name) is not None:
            _contiguous(a[name], name)
    if "grad_out" in a:
        _same_shape(a["grad_out"], "the gradient", x.shape, "the shape of the input")
        _dense(a["grad_out"], "the gradient")
        for name in ("mean", "rstd"):
            _numel(a[name], name, samples * groups)
            _contiguous(a[name], name)


def _weight_norm(a: Arguments) -> None:
    v, g = (a["saved_v"], a["saved_g"]) if "saved_v" in a else (a["v"], a["g"])
    dim = a["dim"]
    _require(v.numel() > 0 and dim in (0, v.dim() - 1), f"dim is {dim} of {list(v.shape)}", "0 or the last, elements")
    _numel(g, "g", v.shape[dim])
    given = {"v": v, "g": g}
    if "saved_v" in a:
        _same_shape(a["grad_w"], "the gradient", v.shape, "the shape of v")
        _numel(a["saved_norms"], "saved_norms", v.shape[dim])
        given |= {"the gradient": a["grad_w"], "saved_norms": a["saved_norms"]}
    for name, tensor in given.items():
        _contiguous(tensor, name)


# ---- recurrent layers

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent_layers(
    kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *, biases: bool, ways: int, layers: int,
    batch: int | None,
) -> None:  # fmt: skip
    """Check the sizes of the weights and states of recurrent layers.

    Args:
        kind: A key of :data:`_GATES`.
        x: The input, whose last dimension are the features.
        states: Initial states.
        weights: Weights and biases, by layers and directions.
        biases: Whether there are biases.
        ways: Count of directions.
        layers: Count of layers.
        batch: Samples; ``None`` if they are not known.
    """
    _require(kind in _GATES, f"a layer of {kind!r}", ", ".join(_GATES))
    _require(0 < layers <= 1 << 16, f"{layers} layers", "from 1")
    _require(len(states) == (2 if kind == "lstm" else 1), f"{len(states)} states", "those of the layer")
    last = states[-1]
    _require(last.dim() == 3 and last.shape[0] == ways * layers, f"a state of {list(last.shape)}", "one for each layer")
    hidden, put_out = last.shape[2], states[0].shape[-1]
    for state in states:
        _require(
            state.dim() == 3 and state.shape[:2] == last.shape[:2] and state.dtype is x.dtype,
            f"a state of {state.dtype} {list(state.shape)}",
            f"{x.dtype} {list(last.shape[:2])} and features",
        )
    _require(batch is None or last.shape[1] == batch, f"states of {last.shape[1]} samples", str(batch))
    projected = kind == "lstm" and put_out != hidden
    _require(projected or put_out == hidden, f"states of {put_out} and {hidden} features", "the same")
    each = 2 + 2 * biases + projected
    _require(len(weights) == each * ways * layers, f"{len(weights)} weights", str(each * ways * layers))
    rows = _GATES[kind] * hidden
    for number in range(ways * layers):
        features = x.shape[-1] if number < ways else put_out * ways
        expected: list[tuple[int, ...]] = [(rows, features), (rows, put_out)]
        expected += [(rows,), (rows,)] if biases else []
        expected += [(put_out, hidden)] if projected else []
        for weight, shape in zip(weights[number * each : (number + 1) * each], expected, strict=True):
            _require(
                tuple(weight.shape) == shape and weight.dtype is x.dtype,
                f"a weight of {weight.dtype} {list(weight.shape)}",
                f"{x.dtype} {list(shape)}",
            )


def _recurrent(a: Arguments) -> None:
    """Check one layer: ``onebox::recurrent`` and its gradient."""
    x, states = a["input"], a["states"]
    _require(x.dim() == 3, f"an input of {x.dim()} dimensions", "3")
    ways = 2 if a["bidirectional"] else 1
    _recurrent_layers(a["kind"], x, states, a["weights"], biases=a["biases"], ways=ways, layers=1, batch=x.shape[1])
    if "gradients" in a:
        gradients = a["gradients"]
        _require(len(gradients) == 1 + len(states), f"{len(gradients)} gradients", str(1 + len(states)))
        shapes = [(*x.shape[:2], states[0].shape[2] * ways), *(state.shape for state in states)]
        for gradient, shape in zip(gradients, shapes, strict=True):
            if gradient is not None:
                _same_shape(gradient, "a gradient", shape, "the shape of a result")


# ---- attention


def _attention(a: Arguments) -> None:
    query, key, value = a["query"], a["key"], a["value"]
    mask = a.get("attn_mask", a.get("mask", a.get("attn_bias")))
    own = a["operator"] in ("attention", "attention_backward")
    if own and not fits_fused(query, key, value, mask):
        return  # plain operators, which check their arguments
    batch, heads, rows = _heads(a["operator"], query, key, value)
    if not own:
        for name in ("query", "key", "value", "out"):
            if name in a and a[name].numel():
                _require(
                    a[name].stride(-1) == 1 or a[name].shape[-1] == 1,
                    f"{name} has strides {list(a[name].stride())}",
                    "features side by side",
                )
    if mask is not None:
        wanted = (batch, heads, rows, key.shape[2])
        _require(
            mask.dim() <= 4 and all(m in (1, w) for m, w in zip(reversed(mask.shape), reversed(wanted), strict=False)),
            f"a mask of {list(mask.shape)}",
            f"{list(wanted)}, or 1 in place of a size",
        )
    if "logsumexp" not in a:
        return
    gradient = a.get("gradient", a.get("grad_out", a.get("grad_out_")))
    assert gradient is not None
    for name, tensor in (("out", a["out"]), ("the gradient", gradient)):
        _same_shape(tensor, name, (batch, heads, rows, value.shape[3]), "queries by features of values")
        _require(tensor.dtype is query.dtype, f"{name} is {tensor.dtype}", str(query.dtype))
    found = a["logsumexp"]
    padded = "efficient" in a["operator"] and found.dim() == 3 and found.shape[2] >= rows
    _same_shape(found, "logsumexp", (batch, heads, found.shape[2] if padded else rows), "a number for each query")
    for name in ("cum_seq_q", "cum_seq_k"):
        _require(a.get(name) is None or not a[name].numel(), f"{name}, for sequences of several lengths", "None")
    if "philox_seed" in a:
        least = 2 if "flash" in a["operator"] else 1
        _require(a["philox_seed"].numel() >= least or not a["dropout_p"], "a short random state", "that of forward")


@functools.cache
def _groups_heads() -> bool:
    """Return whether the kernel of attention on CPUs, which differs by release, shares keys among heads of queries."""
    query, both = torch.ones(1, 2, 1, 8), torch.arange(16.0).reshape(1, 2, 1, 8)
    one = both[:, :1]  # a kernel that does not share them reads the other, within this memory
    try:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(query, one, one)[0]
    except RuntimeError:
        return False
    return torch.equal(out[0, 1, 0], one[0, 0, 0])


def _heads(operator: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Check the sizes and types of queries, keys and values; return batch, heads and rows."""
    _require(query.dim() == 4, f"query of {query.dim()} dimensions", "4")
    batch, heads, rows, features = query.shape
    grouped = "flash" in operator and ("cpu" not in operator or _groups_heads())
    for name, tensor in (("key", key), ("value", value)):
        fits = tensor.dim() == 4 and tensor.shape[0] == batch and tensor.dtype is query.dtype
        of_heads = fits and (
            tensor.shape[1] == heads or (grouped and tensor.shape[1] > 0 and heads % tensor.shape[1] == 0)
        )
        _require(
            fits and of_heads,
            f"{name} is {tensor.dtype} {list(tensor.shape)}",
            f"4 dimensions, with type, samples and heads of query, {query.dtype} {list(query.shape)}",
        )
    _require(query.device.type != "cpu" or 0 not in query.shape[:3], f"query is {list(query.shape)}", "at least one")
    _require(query.device.type != "cpu" or key.numel() > 0, f"key is {list(key.shape)}", "at least one")
    _require(key.shape[1:3] == value.shape[1:3], f"{list(key.shape)} keys, {list(value.shape)} values", "as many")
    _require(key.shape[3] == features, f"keys of {key.shape[3]} features", str(features))
    if "flash" in operator:
        _require(value.shape[3] == features, f"values of {value.shape[3]} features", str(features))
    return batch, heads, rows


def _softmax_backward(a: Arguments) -> None:
    _same_shape(a["output"], "output", a["grad_output"].shape, "the shape of the gradient")


def _masked_softmax(a: Arguments) -> None:
    x, mask = a.get("self", a.get("grad_output")), a["mask"]
    assert x is not None
    _require(x.numel() > 0, f"an input of {list(x.shape)}", "one with elements")
    if "output" in a:
        _same_shape(a["output"], "output", x.shape, "the shape of the gradient")
    kind = a.get("mask_type")
    if kind == 0:
        _require(x.dim() == 4 and tuple(mask.shape) == tuple(x.shape[2:]), f"a mask of {list(mask.shape)}", "[L, L]")
    elif kind == 1:
        _require(
            x.dim() == 4 and tuple(mask.shape) == (x.shape[0], x.shape[3]), f"a mask of {list(mask.shape)}", "[B, L]"
        )
    else:
        _same_shape(mask, "mask", x.shape, "the shape of the input")


def _attention_layer(a: Arguments) -> None:
    """Check the layers of transformers that PyTorch computes as one operator in evaluation."""
    x, heads, mask = a.get("src", a.get("query")), a.get("num_heads", a.get("num_head")), a["mask"]
    assert x is not None and heads is not None
    _require(
        heads > 0 and a["embed_dim"] > 0 and a["embed_dim"] % heads == 0,
        f"{heads} heads of {a['embed_dim']} features",
        "a divisor of the features",
    )
    _require(x.dim() == 3 and x.shape[2] == a["embed_dim"], f"an input of {list(x.shape)}", "[B, L, features]")
    if mask is not None:
        batch, rows = x.shape[:2]
        allowed = {0: [(rows, rows)], 1: [(batch, rows)]}.get(a["mask_type"], [(batch, heads, rows, rows)])
        _require(tuple(mask.shape) in allowed, f"a mask of {list(mask.shape)}", " or ".join(map(str, allowed)))


# ---- spatial


_FARTHEST = 1 << 24
"""Limit of places that a kernel computes from scales, in floating point, before it bounds them as integers."""


def _upsample(a: Arguments) -> None:
    """Check scales, which say where a kernel reads."""
    sizes = a.get("output_size")
    if sizes is None or "scale_factors" in a:
        return
    source = a["input_size"] if "input_size" in a else a["self"].shape
    names = [name for name in ("scales", "scales_d", "scales_h", "scales_w") if name in a]
    _require(
        len(sizes) == len(names) and len(source) == len(names) + 2,
        f"output_size {list(sizes)} of an input of {list(source)}",
        f"{len(names)} of {len(names) + 2} sizes",
    )
    for name, size, given in zip(names, sizes, source[2:], strict=True):
        farthest = given + 0.5 if "_aa" in a["operator"] else _FARTHEST  # a window behind the input has no elements
        scale = a[name]
        if scale is not None and scale > 0:  # others stand for the quotient of the sizes
            _require(size / scale < farthest, f"{name} is {scale} for {size}", f"from {size / farthest:.2g}")


def _upsample_smooth(a: Arguments) -> None:
    """Check what ``_upsample`` does, and strides of images one pixel wide: for bytes a kernel steps by the last one."""
    _upsample(a)
    image = a.get("self")
    if image is not None and image.dtype == torch.uint8 and image.dim() == 4 and image.shape[3] == 1 < image.shape[2]:
        rows, columns = image.stride()[2:]
        _require(rows == columns, f"a stride of {columns} between columns, {rows} between rows", "the same")


def _grid_sampler(a: Arguments) -> None:
    x, grid = a["input"], a["grid"]
    _choice(a["interpolation_mode"], "interpolation_mode", 3)
    _choice(a["padding_mode"], "padding_mode", 3)
    _require(
        x.dim() in (4, 5) and grid.dim() == x.dim() and grid.shape[0] == x.shape[0] and grid.shape[-1] == x.dim() - 2,
        f"a grid of {list(grid.shape)} for an input of {list(x.shape)}",
        "as many samples, and one coordinate for each dimension",
    )
    if "grad_output" in a:
        shape = (*x.shape[:2], *grid.shape[1:-1])
        _same_shape(a["grad_output"], "the gradient", shape, "the shape of the result")


def _grid_elements(a: Arguments) -> None:
    """Check places between elements: the kernel of CPUs takes no number, or one beyond its type, for an index."""
    grid = a["grid"]
    if grid.device.type == "cpu" and a["interpolation_mode"] == 0 and a["padding_mode"] != 0:
        _holds(grid.abs() <= 1e30, lambda: "an element of grid is no number, or a huge one", "up to 1e+30")


def _convolution_backward(a: Arguments) -> None:
    gradient, x, weight = a["grad_output"], a["input"], a["weight"]
    dimensions = weight.dim() - 2
    _require(
        0 < dimensions <= 3 and x.dim() == gradient.dim() == weight.dim(),
        f"a gradient of {list(gradient.shape)}, an input of {list(x.shape)}, a weight of {list(weight.shape)}",
        "as many dimensions each, 3 to 5",
    )

    def each(name: str, least: int) -> list[int]:
        values = list(a[name])
        values = values * dimensions if len(values) == 1 else values
        _require(
            len(values) == dimensions and min(values) >= least, f"{name} is {list(a[name])}", f"integers from {least}"
        )
        return values

    stride, padding, dilation = each("stride", 1), each("padding", 0), each("dilation", 1)
    more, groups = each("output_padding", 0), a["groups"]
    _require(groups > 0 and weight.shape[0] % groups == 0, f"{groups} groups", f"a divisor of {weight.shape[0]}")
    here, there = (weight.shape[0], weight.shape[1] * groups)
    made, read = (there, here) if a["transposed"] else (here, there)
    sizes = [made]
    for number in range(dimensions):
        reach = dilation[number] * (weight.shape[2 + number] - 1) + 1
        size = x.shape[2 + number]
        if a["transposed"]:
            sizes.append((size - 1) * stride[number] - 2 * padding[number] + reach + more[number])
        else:
            sizes.append((size + 2 * padding[number] - reach) // stride[number] + 1)
    _require(x.shape[1] == read, f"an input of {x.shape[1]} channels", str(read))
    _same_shape(gradient, "the gradient", (x.shape[0], *sizes), "the shape of the result")
    if a["bias_sizes"] is not None and a["output_mask"][2]:
        _require(list(a["bias_sizes"]) == [made], f"a bias of {list(a['bias_sizes'])}", str([made]))


def _unfold_backward(a: Arguments) -> None:
    gradient, sizes, size, step = a["grad_in"], list(a["input_sizes"]), a["size"], a["step"]
    if not sizes:
        _require(gradient.numel() == 1, f"a gradient of {list(gradient.shape)}", "one number")
        return
    _require(-len(sizes) <= a["dim"] < len(sizes), f"dim is {a['dim']}", f"a dimension of {sizes}")
    dim = a["dim"] % len(sizes)
    _require(step > 0 and 0 <= size <= sizes[dim], f"size {size} and step {step}", f"0 to {sizes[dim]}, and from 1")
    expected = [*sizes[:dim], (sizes[dim] - size) // step + 1, *sizes[dim + 1 :], size]
    _same_shape(gradient, "the gradient", expected, "the shape of the windows")


# ---- others


def _strides(a: Arguments) -> None:
    """Check where a tensor lies in its storage: the kernel multiplies by the element's size and ignores the carry."""
    start = a.get("storage_offset")
    start = a["self"].storage_offset() if start is None else start
    width = a["self"].itemsize
    _require(0 <= start < (1 << 62) // width, f"storage_offset is {start}", f"0 to {(1 << 62) // width - 1}")
    reach = start + sum(max(size - 1, 0) * abs(stride) for size, stride in zip(a["size"], a["stride"], strict=False))
    _require(reach < (1 << 62) // width, f"the last element is {reach}", f"up to {(1 << 62) // width - 1}")


def _arange(a: Arguments) -> None:
    for name in ("start", "end", "step"):
        value = a.get(name, 1)
        _require(abs(value) < 1 << 62, f"{name} is {value}", "numbers whose difference is one of 64 bits")
    dtype = a["out"].dtype if "out" in a else a["dtype"]
    if dtype is not None and not dtype.is_floating_point:
        _require(abs(a.get("step", 1)) >= 1, f"step is {a.get('step')}", "an integer, but 0")


def _repetitions(a: Arguments) -> None:
    _within(a["repeats"], "repeats", 0, (1 << 62) // max(1, a["repeats"].numel()))


def _powers(a: Arguments) -> None:
    """Check the type of sums: bfloat16 has no complex counterpart, and the kernel computes sums of nothing."""
    given, dtype = a["self"], a["dtype"]
    for x in [given] if isinstance(given, Tensor) else given:
        _require(dtype is not torch.bfloat16 or not x.dtype.is_complex, f"{dtype} of {x.dtype}", "another type")


def _finite(a: Arguments) -> None:
    x = a["self"]
    if x.device.type == "cpu":
        largest = torch.finfo(x.dtype).max ** 0.5  # products of two are finite
        _holds(x.abs() <= largest, lambda: "an element is no number, or a huge one", f"up to {largest:.1g}")


_HIGHEST_DEGREE = 1 << 12
"""Limit of the degree of orthogonal polynomials, whose kernels compute one degree after the other.

The outermost roots of degree n are about 1/n² from the ends of the interval: beyond this degree float32, with 24 bits,
cannot tell an argument between them from one at the end."""


def _polynomial(a: Arguments) -> None:
    """Check the degree; and the argument, as of no number a kernel returns a variable that it has not set."""
    x, degree = a["x"], a["n"]
    _holds(~torch.as_tensor(x).isnan(), lambda: "an element of x is no number", "numbers")
    if not isinstance(degree, Tensor):
        _require(not degree > _HIGHEST_DEGREE, f"n is {degree}", f"up to {_HIGHEST_DEGREE}")
    elif not degree.dtype.is_complex:  # of these there are no polynomials
        _holds(~(degree.double() > _HIGHEST_DEGREE), lambda: "an element of n is larger", f"up to {_HIGHEST_DEGREE}")


_TRAPS = (torch.int32, torch.int64)
"""Integers of which a processor divides the least by -1 as it does by zero: it ends the process. Smaller ones are
divided as int32."""


def _quotient(a: Arguments) -> None:
    """Check a division of integers, whose largest quotient is no integer of the same type.

    Releases of PyTorch differ in the kernels that handle it: 2.13 does for all but division that truncates.
    """
    x, divisor = a["self"], a["other"]
    if _trapping(x, divisor) and bool((_of_type(divisor, x, divisor) == -1).any()):
        _no_least(x, "self", x, divisor)


def _lcm(a: Arguments) -> None:
    """Check a quotient by a greatest common divisor, which is -1 for some numbers beside the least."""
    x, other = a["self"], a["other"]
    if _trapping(x, other):
        _no_least(x, "self", x, other)
        _no_least(other, "other", x, other)


def _trapping(x: Tensor | float, other: Tensor | float) -> bool:
    tensors = [one for one in (x, other) if isinstance(one, Tensor)]
    return torch.result_type(x, other) in _TRAPS and all(one.device.type == "cpu" for one in tensors)


def _of_type(value: Tensor | float, x: Tensor | float, other: Tensor | float) -> Tensor:
    """Return a value in the type in which a kernel computes with two others."""
    return (value if isinstance(value, Tensor) else torch.tensor(value)).to(torch.result_type(x, other))


def _no_least(value: Tensor | float, name: str, x: Tensor | float, other: Tensor | float) -> None:
    least = torch.iinfo(torch.result_type(x, other)).min
    _holds(_of_type(value, x, other) != least, lambda: f"{name} has an element {least}", f"from {least + 1}")


def _binomial(a: Arguments) -> None:
    for tensor in (a["count"], a["prob"]):
        _holds(~tensor.isnan(), lambda: "an element is no number", "numbers")  # a sample would be drawn for ever


def _gamma(a: Arguments) -> None:
    x = a["x" if "x" in a else "self"]
    for name in ("alpha", "total", "output"):
        if name in a:
            _same_shape(a[name], name, x.shape, "the shape of the input")


def _log_sigmoid_backward(a: Arguments) -> None:
    x, buffer = a["self"], a["buffer"]
    _same_shape(a["grad_output"], "the gradient", x.shape, "the shape of the input")
    computed = a["own"] and tuple(buffer.shape) == (0,)  # a program for GPUs, which have no buffer
    if x.device.type == "cpu" and not computed:
        _same_shape(buffer, "buffer", x.shape, "the shape of the input")


def _prelu(a: Arguments) -> None:
    x, weight = a["self"], a["weight"]
    _require(
        weight.dim() <= x.dim()
        and all(w in (1, s) for w, s in zip(reversed(weight.shape), reversed(x.shape), strict=False)),
        f"a weight of {list(weight.shape)}",
        f"{list(x.shape)}, or 1 in place of a size",
    )
    if "grad_output" in a:
        _same_shape(a["grad_output"], "the gradient", x.shape, "the shape of the input")


def _fft(a: Arguments) -> None:
    x, dims = a["self"], list(a["dim"])
    _require(
        len(set(dims)) == len(dims) and all(0 <= dim < x.dim() for dim in dims),
        f"dimensions {dims} of a tensor of {x.dim()}",
        "different ones of its own",
    )
    _choice(a["normalization"], "normalization", 3)
    _require(x.dtype.is_complex != (a["operator"] == "_fft_r2c"), f"an input of {x.dtype}", "the type of the transform")
    if "last_dim_size" in a:
        size = a["last_dim_size"]
        _require(size > 0 and bool(dims), f"a last dimension of {size}", "from 1")
        _require(
            x.shape[dims[-1]] == size // 2 + 1,
            f"{x.shape[dims[-1]]} elements in the last dimension",
            f"{size // 2 + 1}, for {size}",
        )


def _cdist_backward(a: Arguments) -> None:
    left, right = a["x1"], a["x2"]
    samples: Sequence[int] | None = None
    if min(left.dim(), right.dim()) >= 2:
        with contextlib.suppress(RuntimeError):
            samples = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    given = f"points of {list(left.shape)} and {list(right.shape)}"
    _require(samples is not None, given, "samples that broadcast")
    assert samples is not None
    _require(left.shape[-1] == right.shape[-1], f"points of {left.shape[-1]} and {right.shape[-1]}", "as many features")
    for name in ("grad", "cdist"):
        _same_shape(a[name], name, (*samples, left.shape[-2], right.shape[-2]), "the distances")


def _pdist(a: Arguments) -> None:
    x = a["self"]
    _require(x.dim() == 2, f"points of {x.dim()} dimensions", "2")
    _contiguous(x, "points")
    _require(x.numel() > 0 or "grad" not in a, "no points", "at least one")
    for name in ("grad", "pdist"):
        if name in a:
            _vector(a[name], name, x.shape[0] * (x.shape[0] - 1) // 2)


def _median(a: Arguments) -> None:
    x = a["self"]
    if "dim" in a and x.dim() and x.shape[a["dim"]] > 1:
        _require(x.stride(a["dim"]) > 0, f"strides {list(x.stride())}", "elements of their own along the dimension")


def _channel_shuffle(a: Arguments) -> None:
    x, groups = a["self"], a["groups"]
    _require(
        x.dim() > 2 and groups > 0 and x.shape[1] % groups == 0,
        f"{groups} groups of an input of {list(x.shape)}",
        "a divisor of its channels",
    )


def _noise(a: Arguments) -> None:
    _same_shape(a["noise"], "noise", a["self"].shape, "the shape of the input")
    _dense(a["noise"], "noise")
    if "out" in a:
        _same_shape(a["out"], "out", a["self"].shape, "the shape of the input")


_FUSED_LISTS = (
    "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums",
)  # fmt: skip

_MAY_BE_EMPTY = {"max_exp_avg_sqs": "amsgrad", "momentum_buffer_list": "momentum"}
"""Lists of state that are empty unless an option is set."""


def _fused_optimizer(a: Arguments) -> None:
    parameters = a["self"]
    for name in _FUSED_LISTS:
        if name not in a or (not a[name] and name in _MAY_BE_EMPTY and not a[_MAY_BE_EMPTY[name]]):
            continue
        _require(len(a[name]) == len(parameters), f"{len(a[name])} tensors in {name}", str(len(parameters)))
        for tensor, parameter in zip(a[name], parameters, strict=True):
            _same_shape(tensor, name, parameter.shape, "the shape of its parameter")
            _require(
                tensor.dtype is parameter.dtype and tensor.stride() == parameter.stride(),
                f"{name} of {tensor.dtype} with strides {list(tensor.stride())}",
                f"{parameter.dtype} with strides {list(parameter.stride())}, as its parameter",
            )
    for parameter in parameters:
        _require(
            is_dense(parameter),
            f"a parameter with strides {list(parameter.stride())}",
            "a dense one",
        )
    if "state_steps" in a:
        _require(len(a["state_steps"]) == len(parameters), f"{len(a['state_steps'])} steps", str(len(parameters)))
    numbers = [*a.get("state_steps", ()), a.get("grad_scale"), a.get("found_inf")]
    numbers += [a["lr"]] if isinstance(a["lr"], Tensor) else []
    for number in numbers:
        if number is not None:
            _numel(number, "a number of the optimizer", 1)
            _require(number.dtype in (torch.float32, torch.float64), f"a number of {number.dtype}", "float32")


def _foreach_copy(a: Arguments) -> None:
    _require(len(a["src"]) == len(a["self"]), f"{len(a['src'])} tensors in src", str(len(a["self"])))


def _pivots(a: Arguments) -> None:
    lu, pivots = _factors(a)
    _require(
        lu.dim() >= 2 and pivots.dim() == lu.dim() - 1 and pivots.shape[:-1] == lu.shape[:-2],
        f"pivots of {list(pivots.shape)} for factors of {list(lu.shape)}",
        "one for each row of each matrix",
    )
    _require(pivots.shape[-1] == min(lu.shape[-2:]), f"{pivots.shape[-1]} pivots", str(min(lu.shape[-2:])))
    _integers(pivots, "pivots", torch.int32)


def _pivot_elements(a: Arguments) -> None:
    lu, pivots = _factors(a)
    if a.get("unpack_pivots", True):
        _within(pivots, "pivots", 1, lu.shape[-2] + 1)


def _least_squares(a: Arguments) -> None:
    _require(a["b"].numel() > 0 or not a["self"].numel(), f"b is {list(a['b'].shape)}", "at least one column")


def _gelu_backward(a: Arguments) -> None:
    _same_shape(a["grad_output"], "the gradient", a["self"].shape, "the shape of the input")


def _reduction(a: Arguments) -> None:
    _choice(a["reduction"], "reduction", 3)


def _soft_margin(a: Arguments) -> None:
    _reduction(a)
    _same_shape(a["target"], "target", a["self"].shape, "the shape of the input")


def _smooth_backward(a: Arguments) -> None:
    given = [a[name].dtype for name in ("grad_output", "self", "target")]
    if not any(dtype.is_floating_point for dtype in given):  # then beta is an integer, too, and may be zero
        _require(False, f"grad_output, self and target are {', '.join(map(str, given))}", "floating-point numbers")


def _random_range(a: Arguments) -> None:
    """Check limits: for types of fewer digits a kernel looks for the next number above, and never ends at the last."""
    for name in ("from", "to"):
        value = a[name]
        _require(value is None or abs(value) <= 1 << 62, f"{name} is {value}", f"up to {1 << 62}")


def _factors(a: Arguments) -> tuple[Tensor, Tensor]:
    return (a["LU_data"], a["LU_pivots"]) if "LU_data" in a else (a["LU"], a["pivots"])


def _tangent(a: Arguments) -> None:
    """Check zeros in the layout of a value, with the batches of a tangent."""
    batches, dimensions = a["self_num_batch_dims"], a["self"].dim()
    _require(0 <= batches <= dimensions, f"{batches} batch dimensions of {dimensions}", f"0 to {dimensions}")


def _histogram(a: Arguments) -> None:
    bins, weight = a["bins"], a.get("weight")
    x = a["self"]
    counts = bins if isinstance(bins, list | tuple) else [bins]
    for count in counts:
        if isinstance(count, Tensor):
            _require(
                count.dim() == 1 and count.numel() > 1 and count.dtype is x.dtype,
                f"edges of {count.dtype} {list(count.shape)}",
                f"a row of {x.dtype}, at least two",
            )
        else:
            _require(0 < count < 1 << 31, f"{count} bins", "from 1")
    if weight is not None:
        expected = x.shape if a["operator"] == "histogram" else x.shape[:-1]
        _same_shape(weight, "weight", expected, "one for each sample")


def _histogram_elements(a: Arguments) -> None:
    bins, x = a["bins"], a["self"]
    if x.device.type == "meta" or not x.numel():
        return
    counts = bins if isinstance(bins, list | tuple) else [bins]
    if any(isinstance(count, Tensor) for count in counts):  # an element between the outer edges is always in a bin
        return
    given = list(a["range"] or ()) if "range" in a else [float(a["min"]), float(a["max"])]
    if not given or ("min" in a and given[0] == given[1]):
        lowest, highest = (found.double() for found in torch.aminmax(x))
    else:
        lowest, highest = (torch.tensor(found, dtype=torch.float64) for found in (min(given), max(given)))
    reach = (highest - lowest) * max(counts)
    if x.dtype.is_floating_point:
        _holds(reach.abs() < torch.finfo(x.dtype).max, lambda: "a range whose bins cannot be numbered", "a finite one")


def _unsafe_index(a: Arguments) -> None:
    indices, x = a["indices"], a["self"]
    _require(len(indices) <= x.dim(), f"{len(indices)} indices of {x.dim()} dimensions", "one for each")


def _unsafe_index_elements(a: Arguments) -> None:
    if not a["unsafe"] or a["self"].device.type == "cpu":  # without ``unsafe``, and on CPUs, kernels check them
        return
    dim = 0
    for index in a["indices"]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            if index is not None:
                size = a["self"].shape[dim]
                _within(index, "indices", -size, size)
            dim += 1
        else:
            dim += index.dim()


_POOL_RULES = {
    f"{name}{dimensions}d_{with_indices}backward": _pool_backward(dimensions)
    for dimensions in (2, 3)
    for name, with_indices in (("max_pool", "with_indices_"), ("adaptive_max_pool", ""), ("fractional_max_pool", ""))
}

_BATCH_NORMS = (
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
    "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "batch_norm_backward", "batch_norm_stats",
    "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt", "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
)  # fmt: skip

_UPSAMPLES = tuple(
    f"{name}{suffix}"
    for name in (
        "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "upsample_nearest1d",
        "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
    )
    for suffix in ("", "_backward")
)  # fmt: skip

_QUOTIENTS = (
    "div.Tensor_mode", "div.Scalar_mode", "div.out_mode", "div.Scalar_mode_out", "div_.Tensor_mode",
    "div_.Scalar_mode", "floor_divide", "floor_divide_", "fmod", "fmod_", "remainder", "remainder_",
)  # fmt: skip

_POLYNOMIALS = (
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
)  # fmt: skip

RULES: Mapping[str, Rules] = {
    **_POOL_RULES,
    **{name: Rules(_batch_norm) for name in _BATCH_NORMS},
    **{name: Rules(_upsample if "nearest" in name else _upsample_smooth) for name in _UPSAMPLES},
    **{
        f"{kind}_pad{count}d{suffix}": Rules(_padding)
        for kind in ("reflection", "replication")
        for count in (1, 2, 3)
        for suffix in ("", "_backward")
    },
    **{name: Rules(_fused_optimizer) for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")},
    **{name: Rules(_fft) for name in ("_fft_c2c", "_fft_c2r", "_fft_r2c")},
    **{name: Rules(_ctc, _ctc_elements) for name in ("_ctc_loss", "_ctc_loss_backward")},
    **{name: Rules(_bag, _bag_elements) for name in ("_embedding_bag", "_embedding_bag_forward_only")},
    **{
        name: Rules(_bag_backward, _bag_backward_elements)
        for name in (
            "_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward",
        )
    },
    **{name: Rules(_pivots, _pivot_elements) for name in ("linalg_lu_solve", "lu_unpack")},
    **{
        name: Rules(_histogram, _histogram_elements)
        for name in ("histc", "histogram", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors")
    },
    **{
        name: Rules(_attention)
        for name in (
            "attention", "attention_backward", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
        )
    },
    **{name: Rules(_layer_norm) for name in ("native_layer_norm", "native_layer_norm_backward")},
    "_fused_rms_norm_backward": Rules(_layer_norm),
    **{name: Rules(_group_norm) for name in ("native_group_norm", "native_group_norm_backward")},
    **{name: Rules(_nll_backward, _nll_backward_elements) for name in ("nll_loss_backward", "nll_loss2d_backward")},
    **{
        name: Rules(_margin_backward, _margin_backward_elements)
        for name in ("multi_margin_loss_backward", "multilabel_margin_loss_backward")
    },
    **{name: Rules(_margin) for name in ("multi_margin_loss", "multilabel_margin_loss_forward")},
    **{name: Rules(_weight_norm) for name in ("_weight_norm_interface", "_weight_norm_interface_backward")},
    **{name: Rules(_embedding_backward, _embedding_backward_elements) for name in (
        "embedding_dense_backward",
    )},
    **{name: Rules(_noise) for name in ("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")},
    **{name: Rules(_unsafe_index, _unsafe_index_elements) for name in ("_index_put_impl", "_index_put_impl_")},
    **{name: Rules(_unsafe_index) for name in ("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate")},
    **{name: Rules(_grid_sampler) for name in ("grid_sampler_2d", "grid_sampler_3d", "grid_sampler_3d_backward")},
    "grid_sampler_2d_backward": Rules(_grid_sampler, _grid_elements),
    "_native_multi_head_attention": Rules(_attention_layer),
    "_transformer_encoder_layer_fwd": Rules(_attention_layer),
    "fractional_max_pool2d": _fractional_pool(2),
    "fractional_max_pool3d": _fractional_pool(3),
    "max_unpool2d": _unpool(2),
    "max_unpool3d": _unpool(3),
    **{
        f"{name}{dimensions}d_backward": _average_backward(dimensions)
        for dimensions in (2, 3)
        for name in ("_adaptive_avg_pool", "avg_pool")
    },
    "recurrent": Rules(_recurrent),
    "recurrent_backward": Rules(_recurrent),
    "convolution_backward": Rules(_convolution_backward),
    "unfold_backward": Rules(_unfold_backward),
    "_cdist_backward": Rules(_cdist_backward),
    "_pdist_forward": Rules(_pdist),
    "_pdist_backward": Rules(_pdist),
    "native_channel_shuffle": Rules(_channel_shuffle),
    **{name: Rules(_arange) for name in ("arange", "range")},
    **{name: Rules(None, _finite) for name in ("linalg_eig", "linalg_eigvals", "_linalg_eigvals")},
    **{f"special_{name}": Rules(None, _polynomial, apart=False) for name in _POLYNOMIALS},
    **{name: Rules(None, _quotient, apart=False) for name in _QUOTIENTS},
    **{name: Rules(None, _lcm, apart=False) for name in ("lcm", "lcm_")},
    "binomial": Rules(None, _binomial),
    **{f"avg_pool{dimensions}d": Rules(_average) for dimensions in (2, 3)},
    **{name: Rules(_prelu) for name in ("_prelu_kernel", "_prelu_kernel_backward")},
    **{
        f"{name}{dimensions}d": Rules(_adaptive)
        for dimensions in (2, 3)
        for name in ("adaptive_max_pool", "adaptive_avg_pool", "_adaptive_avg_pool")
    },
    "linalg_lstsq": Rules(_least_squares),
    "gelu_backward": Rules(_gelu_backward),
    "huber_loss": Rules(_reduction),
    "soft_margin_loss": Rules(_soft_margin),
    "smooth_l1_loss_backward": Rules(_smooth_backward),
    **{name: Rules(_random_range) for name in ("random.from", "random.from_out", "random_.from")},
    **{name: Rules(_gamma) for name in ("_dirichlet_grad", "_standard_gamma_grad")},
    "log_sigmoid_backward": Rules(_log_sigmoid_backward),
    **{name: Rules(_powers) for name in ("_foreach_powsum", "linalg__powsum")},
    "as_strided_": Rules(None, _strides),
    **{f"as_strided{suffix}": Rules(_strides) for suffix in ("", "_copy", "_scatter")},
    "_new_zeros_with_same_feature_meta": Rules(_tangent),
    "repeat_interleave": Rules(None, _repetitions),
    "_foreach_copy": Rules(_foreach_copy),
    "median": Rules(_median),
    "nanmedian": Rules(_median),
    "binary_cross_entropy": Rules(_cross_entropy),
    "binary_cross_entropy_backward": Rules(_cross_entropy),
    "_log_softmax_backward_data": Rules(_softmax_backward),
    "_softmax_backward_data": Rules(_softmax_backward),
    "_masked_softmax": Rules(_masked_softmax),
    "_masked_softmax_backward": Rules(_masked_softmax),
}  # fmt: skip
"""Rules by operator, for all of its overloads, or of one overload."""
