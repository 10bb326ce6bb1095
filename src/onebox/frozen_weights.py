"""Frozen weights of linear layers as integers of 8 or 4 bits, for fine-tuning models that do not fit otherwise."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.errors import UsageError

_AT_ONCE = 1 << 20
"""Elements that are quantised at once, which takes some 16 bytes for each."""

FrozenFormat = Literal["int8", "int4"]

_LEVELS: dict[str, float] = {"int8": -127.0, "int4": -8.0}
"""Code of the element of a group that is farthest from zero, in each format."""

_SCALE = torch.bfloat16
"""The type of scales: 16 bits, with the exponents of float32."""


def frozen_bytes(shape: tuple[int, int], stored: FrozenFormat, group: int = 64) -> int:
    """Return the bytes of a matrix in a format: codes, and a scale of two bytes for each group.

    Args:
        shape: Its rows and columns.
        stored: The format.
        group: Consecutive columns of a row that share a scale.
    """
    elements = shape[0] * shape[1]
    return elements // (1 if stored == "int8" else 2) + 2 * (elements // group)


def quantize_frozen(
    model: nn.Module, stored: FrozenFormat = "int4", *, group: int = 64, skip: Collection[str] = ("lm_head",)
) -> list[str]:
    """Store the frozen weights of a model's linear layers as integers, in place.

    A layer is changed if its weight requires no gradient and no other module has it. Freeze first: PEFT's
    ``get_peft_model`` does. The layers keep their biases and outputs of the same type; gradients pass through them.

    Args:
        model: The model. Its parameters may be on the meta device: the weights are quantised as they are loaded.
        stored: The format: integers of 8 or 4 bits, with a scale for each group.
        group: Consecutive inputs that share a scale.
        skip: Last parts of the names of layers to leave as they are.

    Returns:
        The names of the layers that were changed.

    Raises:
        UsageError: The format is unknown, there is no such layer, or a layer's inputs do not divide into groups;
            nothing has been changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2))
        >>> quantize_frozen(model, "int8")
        ['0']
        >>> model[0]
        QuantizedLinear(in_features=64, out_features=64, bias=True, stored=int8, group=64)
    """
    if stored not in _LEVELS:
        raise UsageError(f"stored={stored!r}: allowed are {' and '.join(map(repr, _LEVELS))}")
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and isinstance(module._parameters.get("weight"), nn.Parameter)  # and not what a reparametrisation computes
        and not module.weight.requires_grad
        and holders[id(module.weight)] == 1
        and name.rpartition(".")[2] not in skip
    }
    if not found:
        raise UsageError(
            "no linear layer has a frozen weight of its own: freeze the model first, by model.requires_grad_(False) or "
            "PEFT's get_peft_model, and leave the layers out of the optimizer"
        )
    for name, module in found.items():
        if group < 2 or group % 2 or module.in_features % group:
            raise UsageError(
                f"group={group}: {name} has {module.in_features} inputs; allowed are even divisors of that: give "
                f"another one, or skip={(name.rpartition('.')[2],)!r}"
            )
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise UsageError(f"{name} has hooks, which its replacement has not: remove them, or leave it out by skip=")
    made = {id(module): QuantizedLinear.of(module, stored, group) for module in found.values()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in made:
            model.set_submodule(name, made[id(module)])
    return list(found)


class QuantizedLinear(nn.Module):
    """A linear layer whose frozen weight is stored as integers, with a scale for each group of inputs of a row.

    The weight is scale x code, computed in the type of the inputs in forward and again in backward, so that no copy of
    it is kept in between. Codes are rounded to the nearest; the element of a group that is farthest from zero has the
    code -127 in ``int8``, and -8 in ``int4``. Of 4-bit codes two are in a byte: those of the first half of a group in
    the low bits. A ``state_dict`` of the layer that this one replaces can be loaded: its weight is quantised.

    Args:
        in_features: Inputs.
        out_features: Outputs.
        stored: The format.
        group: Consecutive inputs that share a scale.
        bias: The bias; ``None`` for none.
        device: The device of codes and scales.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        stored: FrozenFormat,
        group: int,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.stored, self.group = in_features, out_features, stored, group
        columns = in_features if stored == "int8" else in_features // 2
        codes = torch.zeros(out_features, columns, dtype=torch.int8, device=device)
        scales = torch.zeros(out_features, in_features // group, dtype=_SCALE, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, layer: nn.Linear, stored: FrozenFormat, group: int) -> QuantizedLinear:
        """Return the layer that replaces a linear one, and has its bias."""
        weight = layer.weight
        made = cls(layer.in_features, layer.out_features, stored, group, layer.bias, weight.device)
        if not weight.is_meta:
            codes, scales = made.quantized(weight)
            with torch.no_grad():
                made.codes.copy_(codes)
                made.scales.copy_(scales)
        return made.train(layer.training)

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a weight of shape [outputs, inputs]."""
        return quantized(weight, self.stored, self.group)

    @property
    def weight(self) -> Tensor:
        """The weight that the codes stand for, in float32, of shape [outputs, inputs]."""
        return dequantized(self.codes, self.scales, self.stored, torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs of shape [..., inputs] to [..., outputs]."""
        outputs: Tensor = _Product.apply(inputs, self.codes, self.scales, self.stored)
        return outputs if self.bias is None else outputs + self.bias

    def extra_repr(self) -> str:
        """Return the layer's sizes and format."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, stored={self.stored}, group={self.group}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.shape == (self.out_features, self.in_features):
            codes, scales = self.quantized(weight)
            state_dict = {name: value for name, value in state_dict.items() if name != f"{prefix}weight"}
            state_dict |= {f"{prefix}codes": codes, f"{prefix}scales": scales}
        super()._load_from_state_dict(state_dict, prefix, *others)


def quantized(weight: Tensor, stored: FrozenFormat, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a weight.

    Args:
        weight: Of shape [outputs, inputs].
        stored: The format.
        group: Consecutive inputs that share a scale.

    Returns:
        The codes, int8 of shape [outputs, inputs], or half as many columns with 4 bits; and the scales, of shape
        [outputs, groups].
    """
    parts = [_quantized(part, stored, group) for part in weight.detach().split(max(1, _AT_ONCE // weight.shape[1]))]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantized(weight: Tensor, stored: FrozenFormat, group: int) -> tuple[Tensor, Tensor]:
    rows = weight.reshape(weight.shape[0], -1, group).float()
    farthest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))
    level = _LEVELS[stored]
    scales = (farthest / level).to(_SCALE)
    divisors = torch.where(scales == 0, 1.0, scales.float())
    highest = 127 if stored == "int8" else 7
    codes = (rows / divisors).round().clamp(level, highest).to(torch.int8)
    if stored == "int4":
        first, second = codes.chunk(2, -1)
        codes = torch.bitwise_or(torch.bitwise_and(first, 15), torch.bitwise_left_shift(second, 4))
    return codes.reshape(weight.shape[0], -1), scales.squeeze(-1)


def dequantized(codes: Tensor, scales: Tensor, stored: FrozenFormat, dtype: torch.dtype) -> Tensor:
    """Return the weight, of shape [outputs, inputs], that codes and scales stand for."""
    outputs, groups = scales.shape
    rows = codes.view(outputs, groups, -1)
    if stored == "int4":
        low = torch.bitwise_right_shift(torch.bitwise_left_shift(rows, 4), 4)  # with the sign of its highest bit
        rows = torch.cat([low, torch.bitwise_right_shift(rows, 4)], -1)
    return (rows.to(dtype) * scales.to(dtype).unsqueeze(-1)).view(outputs, -1)


class _Product(torch.autograd.Function):
    """Inputs times the transposed weight."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, codes: Tensor, scales: Tensor, stored: FrozenFormat) -> Tensor:
        context.save_for_backward(codes, scales)
        context.stored = stored
        return functional.linear(inputs, dequantized(codes, scales, stored, inputs.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        codes, scales = context.saved_tensors
        return gradient @ dequantized(codes, scales, context.stored, gradient.dtype), None, None, None
