"""Estimated time of a program, from its operations and bytes, without measurements. Pure.

An operator takes as long as its floating-point operations or its bytes take, whichever is longer: the roofline of
Williams et al. 2009 (doi:10.1145/1498765.1498785), plus the cost of an operator's call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from onebox.cost.recurrent import recurrent
from onebox.wire import Operator, Program, TensorSpec, overload, reads, shares_memory, specs_by_slot

_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "linear": 0}
"""Matrix products, with the index of the first factor among their tensors."""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Throughput of a device.

    Args:
        flops: Floating-point operations per second, 2 for each multiply-add, of products and convolutions.
        bandwidth_bps: Bytes per second, read and written, of everything else.
        operator_s: Minimum seconds of each operator.

    Raises:
        ValueError: One is not positive and finite.
    """

    flops: float
    bandwidth_bps: float
    operator_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: a rate is positive and finite")


TYPICAL_RATES = DeviceRates(flops=4e10, bandwidth_bps=8e9, operator_s=5e-6)
"""Of a thread of a processor of 2020; products by AVX2 at 3 GHz reach half of their 96 GFLOP/s. For where nothing is
measured, or only the ratio of times matters."""


def program_s(program: Program, rates: DeviceRates) -> float:
    """Return the estimated seconds of a program.

    Args:
        program: The tape.
        rates: Throughput of the device.
    """
    specs = specs_by_slot(program)
    return math.fsum(operator_s(operator, specs, rates) for operator in program.operators)


def slowest_operator(program: Program, rates: DeviceRates) -> str:
    """Return the name of the operator of a program that is estimated to take longest; empty without operators.

    Args:
        program: The tape.
        rates: Throughput of the device.
    """
    specs = specs_by_slot(program)
    slowest = max(program.operators, key=lambda operator: operator_s(operator, specs, rates), default=None)
    return "" if slowest is None else slowest.name


def flops_of(operator: Operator, specs: Mapping[int, TensorSpec]) -> float:
    """Return the floating-point operations of a product, a convolution, an attention or a recurrent layer.

    They are 0 for other operators.

    Args:
        operator: The operator.
        specs: Specs of the program's slots.
    """
    name = operator.name.split(".")[1]
    shapes = [specs[slot].shape for slot in reads(operator)]
    made = prod(operator.specs[0].shape) if operator.specs and operator.specs[0] is not None else 0
    if name in _PRODUCTS:
        return 2.0 * made * shapes[_PRODUCTS[name]][-1]
    if name == "convolution":
        return _convolution(operator, made, shapes[0], shapes[1], 6)
    if name == "convolution_backward":
        mask = operator.args[10]
        wanted = sum(bool(item) for item in getattr(mask, "items", ())[:2])
        return wanted * _convolution(operator, prod(shapes[0]), shapes[1], shapes[2], 7)
    if "scaled_dot_product" in name or name in ("attention", "attention_backward"):
        query, key, value = shapes[1:4] if "backward" in name else shapes[:3]
        forward = 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return 2.5 * forward if "backward" in name else forward  # five products, two of which forward has, too
    layer = recurrent(operator, specs)
    return layer.flops if layer else 0.0


def _convolution(
    operator: Operator, made: int, input_shape: tuple[int, ...], weight_shape: tuple[int, ...], transposed: int
) -> float:
    """Return the operations of a convolution: a whole filter for each element of its output, or input if transposed."""
    each = prod(weight_shape[1:])
    return 2.0 * each * (prod(input_shape) if operator.args[transposed] is True else made)


def operator_s(operator: Operator, specs: Mapping[int, TensorSpec], rates: DeviceRates) -> float:
    """Return the estimated seconds of an operator; 0 for a view.

    Args:
        operator: The operator.
        specs: Specs of the program's slots.
        rates: Throughput of the device.
    """
    if shares_memory(overload(operator.name)):
        return 0.0
    read = sum(specs[slot].size_bytes for slot in set(reads(operator)))
    written = sum(spec.size_bytes for spec in operator.specs if spec is not None)
    layer = recurrent(operator, specs)
    calls, passing = (layer.kernels, layer.passing_bytes) if layer else (1, 0)
    moved_s = (read + written + passing) / rates.bandwidth_bps
    return max(flops_of(operator, specs) / rates.flops, moved_s) + calls * rates.operator_s
