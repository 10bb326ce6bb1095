"""Functions of argument rules: what the rows of :mod:`.argument_rules` cannot say well.

A row names one as ``@function``. Each has the arguments of a call by name, and raises
:class:`onebox.errors.WireError`, with what came and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onebox.wire.tensors import is_dense
from onebox.worker.sandbox.rule_language import (
    Arguments,
    Clause,
    Rule,
    require,
    require_all,
    require_numbers,
    require_shape,
    require_within,
)

FUNCTIONS: dict[str, Clause] = {}
"""The functions by name."""


def _rule(*, elements: bool = False, apart: bool = True) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a function; the arguments are those of :class:`.rule_language.Clause`."""

    def add(rule: Rule) -> Rule:
        FUNCTIONS[rule.__name__] = Clause(rule, elements, apart)
        return rule

    return add


# ---- embeddings


@_rule(elements=True)
def offsets(a: Arguments) -> None:
    """Check that offsets begin with 0, never fall, end within the indices, and fill no more bags than there are."""
    offsets, indices = a["offsets"], a["indices"]
    if not offsets.numel() or offsets.device.type == "meta":
        return
    require_within(offsets, "offsets", 0, indices.numel() + 1)
    require_all(offsets[:1] == 0, lambda: f"the first offset is {int(offsets[0])}", "0")
    require_all(offsets[1:] >= offsets[:-1], lambda: "an offset is less than the one before", "offsets that never fall")
    if "grad" in a and indices.numel() and not a["offset2bag"].numel():
        count, filled = a["grad"].shape[0], (offsets < indices.numel()).sum()
        require_all(filled <= count, lambda: f"{int(filled)} bags", f"{count}, the rows of the gradient")


# ---- losses


def _ctc_lengths(a: Arguments, inputs: Sequence[int], wanted: Sequence[int]) -> None:
    x, targets = a["log_probs"], a["targets"]
    require(0 <= min(inputs) <= max(inputs) <= x.shape[0], f"input_lengths are {list(inputs)}", f"0 to {x.shape[0]}")
    require(min(wanted) >= 0, f"target_lengths are {list(wanted)}", "0 or more")
    if targets.dim() == 2:
        require(max(wanted) <= targets.shape[1], f"target_lengths are {list(wanted)}", f"up to {targets.shape[1]}")
    else:
        require(sum(wanted) <= targets.shape[0], f"{sum(wanted)} targets in all", str(targets.shape[0]))
    if "log_alpha" in a:
        states = a["log_alpha"].shape[2]
        require(2 * max(wanted) + 1 <= states, f"{states} states in log_alpha", f"from {2 * max(wanted) + 1}")


@_rule()
def ctc(a: Arguments) -> None:
    """Check the lengths of a loss between sequences and targets: [T, N, C], and [N, S] or one after the other."""
    batch = a["log_probs"].shape[1]
    for name in ("input_lengths", "target_lengths"):
        lengths = a[name]
        count = lengths.numel() if isinstance(lengths, Tensor) else len(lengths)
        require(count == batch, f"{count} {name}", str(batch))
        if isinstance(lengths, Tensor):
            require(not lengths.dtype.is_floating_point and lengths.dim() <= 1, f"{name} {lengths.dtype}", "integers")
    if not isinstance(a["input_lengths"], Tensor):
        _ctc_lengths(a, a["input_lengths"], a["target_lengths"])


@_rule(elements=True)
def ctc_elements(a: Arguments) -> None:
    """Check the targets that are read, and lengths that are tensors."""
    x, targets, wanted = a["log_probs"], a["targets"], a["target_lengths"]
    if x.device.type == "meta":
        return
    if isinstance(wanted, Tensor):  # the operator itself brings them to the host
        wanted = wanted.reshape(-1).tolist()
        _ctc_lengths(a, a["input_lengths"].reshape(-1).tolist(), wanted)
    if targets.dim() == 1:
        targets = targets[: sum(wanted)]
    elif min(wanted) < targets.shape[1]:
        lengths = torch.tensor(wanted, device=targets.device)
        read = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
        targets = torch.where(read, targets, torch.zeros_like(targets))
    require_within(targets, "targets", 0, x.shape[-1])


# ---- recurrent layers

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@_rule()
def recurrent(a: Arguments) -> None:
    """Check the sizes of the weights and states of a recurrent layer, and of the gradients of its results."""
    x, states, weights, kind, biases = a["input"], a["states"], a["weights"], a["kind"], a["biases"]
    require(x.dim() == 3, f"an input of {x.dim()} dimensions", "3")
    require(kind in _GATES, f"a layer of {kind!r}", ", ".join(_GATES))
    require(len(states) == (2 if kind == "lstm" else 1), f"{len(states)} states", "those of the layer")
    ways, batch, last = 2 if a["bidirectional"] else 1, x.shape[1], states[-1]
    for state in states:
        require(
            state.dim() == 3 and tuple(state.shape[:2]) == (ways, batch) and state.dtype is x.dtype,
            f"a state of {state.dtype} {list(state.shape)}",
            f"{x.dtype} [{ways}, {batch}, ...], one for each direction and sample",
        )
    hidden, put_out = last.shape[2], states[0].shape[2]
    projected = kind == "lstm" and put_out != hidden
    expected: list[tuple[int, ...]] = [(_GATES[kind] * hidden, x.shape[2]), (_GATES[kind] * hidden, put_out)]
    expected += [(_GATES[kind] * hidden,)] * 2 if biases else []
    expected += [(put_out, hidden)] if projected else []
    require(len(weights) == len(expected) * ways, f"{len(weights)} weights", str(len(expected) * ways))
    for weight, shape in zip(weights, expected * ways, strict=True):
        require(
            tuple(weight.shape) == shape and weight.dtype is x.dtype,
            f"a weight of {weight.dtype} {list(weight.shape)}",
            f"{x.dtype} {list(shape)}",
        )
    if "gradients" in a:
        gradients = a["gradients"]
        shapes = [(*x.shape[:2], put_out * ways), *(state.shape for state in states)]
        require(len(gradients) == len(shapes), f"{len(gradients)} gradients", str(len(shapes)))
        for gradient, shape in zip(gradients, shapes, strict=True):
            if gradient is not None:
                require_shape(gradient, "a gradient", shape)


# ---- windows and places

_FARTHEST = 1 << 24
"""Limit of places that a kernel computes from scales, in floating point, before it bounds them as integers."""


@_rule()
def scales(a: Arguments) -> None:
    """Check scales, which say where a kernel reads."""
    sizes = a.get("output_size")
    if sizes is None or "scale_factors" in a:
        return
    source = a["input_size"] if "input_size" in a else a["self"].shape
    names = [name for name in ("scales", "scales_d", "scales_h", "scales_w") if name in a]
    require(
        len(sizes) == len(names) and len(source) == len(names) + 2,
        f"output_size {list(sizes)} of an input of {list(source)}",
        f"{len(names)} of {len(names) + 2} sizes",
    )
    for name, size, given in zip(names, sizes, source[2:], strict=True):
        farthest = given + 0.5 if "_aa" in a["operator"] else _FARTHEST  # a window behind the input has no elements
        scale = a[name]
        if scale is not None and scale > 0:  # others stand for the quotient of the sizes
            require(size / scale < farthest, f"{name} is {scale} for {size}", f"from {size / farthest:.2g}")


@_rule()
def convolution_backward(a: Arguments) -> None:
    """Check that a gradient has the shape of the result of a convolution."""
    gradient, x, weight = a["grad_output"], a["input"], a["weight"]
    dimensions = weight.dim() - 2
    require(
        0 < dimensions <= 3 and x.dim() == gradient.dim() == weight.dim(),
        f"a gradient of {list(gradient.shape)}, an input of {list(x.shape)}, a weight of {list(weight.shape)}",
        "as many dimensions each, 3 to 5",
    )

    def each(name: str, least: int) -> list[int]:
        values = list(a[name])
        values = values * dimensions if len(values) == 1 else values
        fits = len(values) == dimensions and min(values) >= least
        require(fits, f"{name} is {list(a[name])}", f"integers from {least}")
        return values

    windows = zip(
        x.shape[2:], weight.shape[2:], each("stride", 1), each("padding", 0), each("dilation", 1),
        each("output_padding", 0), strict=True,
    )  # fmt: skip
    groups = a["groups"]
    require(groups > 0 and weight.shape[0] % groups == 0, f"{groups} groups", f"a divisor of {weight.shape[0]}")
    here, there = (weight.shape[0], weight.shape[1] * groups)
    made, read = (there, here) if a["transposed"] else (here, there)
    sizes = [made]
    for size, kernel, stride, padding, dilation, more in windows:
        reach = dilation * (kernel - 1) + 1
        if a["transposed"]:
            sizes.append((size - 1) * stride - 2 * padding + reach + more)
        else:
            sizes.append((size + 2 * padding - reach) // stride + 1)
    require(x.shape[1] == read, f"an input of {x.shape[1]} channels", str(read))
    require_shape(gradient, "the gradient", (x.shape[0], *sizes))
    if a["bias_sizes"] is not None and a["output_mask"][2]:
        require(list(a["bias_sizes"]) == [made], f"a bias of {list(a['bias_sizes'])}", str([made]))


def _strides(a: Arguments) -> None:
    start = a.get("storage_offset")
    start = a["self"].storage_offset() if start is None else start
    most = (1 << 62) // a["self"].itemsize
    require(0 <= start < most, f"storage_offset is {start}", f"0 to {most - 1}")
    reach = start + sum(max(size - 1, 0) * abs(stride) for size, stride in zip(a["size"], a["stride"], strict=False))
    require(reach < most, f"the last element is {reach}", f"up to {most - 1}")


@_rule()
def strides(a: Arguments) -> None:
    """Check where a tensor lies in its storage: the kernel multiplies by the element's size and ignores the carry."""
    _strides(a)


@_rule(elements=True)
def strides_again(a: Arguments) -> None:
    """Check the same in every call, of an operator that changes where its argument lies."""
    _strides(a)


@_rule(elements=True)
def unsafe_indices(a: Arguments) -> None:
    """Check indices that the kernel is told not to check; without ``unsafe``, and on CPUs, it does."""
    if not a["unsafe"] or a["self"].device.type == "cpu":
        return
    dim = 0
    for index in a["indices"]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            if index is not None:
                size = a["self"].shape[dim]
                require_within(index, "indices", -size, size)
            dim += 1
        else:
            dim += index.dim()


# ---- histograms


@_rule(elements=True)
def bins_of_range(a: Arguments) -> None:
    """Check that the bins of a range can be numbered."""
    x = a["self"]
    if x.device.type == "meta" or not x.numel():
        return
    given = list(a["range"] or ()) if "range" in a else [float(a["min"]), float(a["max"])]
    if not given or ("min" in a and given[0] == given[1]):
        lowest, highest = (found.double() for found in torch.aminmax(x))
    else:
        lowest, highest = (torch.tensor(found, dtype=torch.float64) for found in (min(given), max(given)))
    most = max(a["bins"]) if isinstance(a["bins"], list | tuple) else a["bins"]
    if x.dtype.is_floating_point:
        fits = ((highest - lowest) * most).abs() < torch.finfo(x.dtype).max
        require_all(fits, lambda: "a range whose bins cannot be numbered", "a finite one")


# ---- numbers that end a kernel, or that it never ends with


@_rule(elements=True)
def finite(a: Arguments) -> None:
    """Check that products of two elements are finite."""
    x = a["self"]
    if x.device.type == "cpu":
        largest = torch.finfo(x.dtype).max ** 0.5
        require_all(x.abs() <= largest, lambda: "an element is no number, or a huge one", f"up to {largest:.1g}")


_HIGHEST_DEGREE = 1 << 12
"""Limit of the degree of orthogonal polynomials, whose kernels compute one degree after the other.

The outermost roots of degree n are about 1/n² from the ends of the interval: beyond this degree float32, with 24 bits,
cannot tell an argument between them from one at the end."""


@_rule(elements=True, apart=False)
def polynomial(a: Arguments) -> None:
    """Check the degree; and the argument, as of no number a kernel returns a variable that it has not set."""
    degree = a["n"]
    require_numbers(a["x"], "x")
    if not isinstance(degree, Tensor):
        require(not degree > _HIGHEST_DEGREE, f"n is {degree}", f"up to {_HIGHEST_DEGREE}")
    elif not degree.dtype.is_complex:  # of these there are no polynomials
        highest = f"up to {_HIGHEST_DEGREE}"
        require_all(~(degree.double() > _HIGHEST_DEGREE), lambda: "an element of n is larger", highest)


_TRAPS = (torch.int32, torch.int64)
"""Integers of which a processor divides the least by -1 as it does by zero: it ends the process. Smaller ones are
divided as int32."""


@_rule(elements=True, apart=False)
def quotient(a: Arguments) -> None:
    """Check a division of integers, whose largest quotient is no integer of the same type.

    Releases of PyTorch differ in the kernels that handle it: 2.13 does for all but division that truncates.
    """
    x, divisor = a["self"], a["other"]
    if _trapping(x, divisor) and bool((_of_type(divisor, x, divisor) == -1).any()):
        _no_least(x, "self", x, divisor)


@_rule(elements=True, apart=False)
def multiple(a: Arguments) -> None:
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
    require_all(_of_type(value, x, other) != least, lambda: f"{name} has an element {least}", f"from {least + 1}")


# ---- optimizers

_STATES = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")

_MAY_BE_EMPTY = {"max_exp_avg_sqs": "amsgrad", "momentum_buffer_list": "momentum"}
"""Lists of state that are empty unless an option is set."""


@_rule()
def fused_optimizer(a: Arguments) -> None:
    """Check that gradients and states are as their parameters are, and that steps and scales are single numbers."""
    parameters = a["self"]
    for name in _STATES:
        if name not in a or (not a[name] and name in _MAY_BE_EMPTY and not a[_MAY_BE_EMPTY[name]]):
            continue
        require(len(a[name]) == len(parameters), f"{len(a[name])} tensors in {name}", str(len(parameters)))
        for tensor, parameter in zip(a[name], parameters, strict=True):
            require_shape(tensor, name, parameter.shape)
            require(
                tensor.dtype is parameter.dtype and tensor.stride() == parameter.stride(),
                f"{name} of {tensor.dtype} with strides {list(tensor.stride())}",
                f"{parameter.dtype} with strides {list(parameter.stride())}, as its parameter",
            )
    for parameter in parameters:
        require(is_dense(parameter), f"a parameter with strides {list(parameter.stride())}", "a dense one")
    steps = a.get("state_steps")
    require(steps is None or len(steps) == len(parameters), f"{len(steps or ())} steps", str(len(parameters)))
    numbers = [*(steps or ()), a.get("grad_scale"), a.get("found_inf"), a["lr"]]
    for number in numbers:
        if isinstance(number, Tensor):
            require(number.numel() == 1, f"a number of the optimizer has {number.numel()} elements", "1")
            require(number.dtype in (torch.float32, torch.float64), f"a number of {number.dtype}", "float32")
