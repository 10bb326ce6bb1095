"""The optimizer of an emulated device: its state takes the real number of bytes, and its steps take a modelled time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onebox.emulator.clock import DeviceClock
from onebox.errors import WireError
from onebox.wire.protocol.instructions import Options
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import KERNEL_OPTIONS, NativeOptimizer

_META = torch.device("meta")


def _methods(names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name) for name in names.split())


_IN_PLACE = _methods("add_ addcdiv_ addcmul_ clamp_ copy_ div_ lerp_ mul_ neg_ rsqrt_ sqrt_ square_ sub_ zero_")
"""Functions of optimizers that write to a tensor, element by element."""

_ELEMENTWISE = _methods("abs add addcmul clamp div lerp mul neg sign sqrt sub") | {
    torch.full_like,
    torch.maximum,
    torch.zeros_like,
}
"""Functions of optimizers whose result is of the shape and type of the first tensor."""

_COMPARISONS = _methods("eq gt lt")

_REDUCTIONS = _methods("mean norm") | {torch.norm}


class EmulatedOptimizer(NativeOptimizer):
    """An optimizer whose state takes the real number of bytes, and whose steps do nothing but take time.

    The state is created by the real class and its first step, over tensors without elements.

    Args:
        spec: The optimizer and its cost.
        parameters: As for a real one.
        state: Likewise.
        host: Likewise.
        clock: The clock of the device.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: list[Tensor],
        state: list[Tensor],
        host: HostMemory | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        super().__init__(spec, parameters, state, host)
        self._cost_s, self._clock = spec.cost_s, clock or DeviceClock()
        self._parameter_bytes = max(1, sum(parameter.nbytes for parameter in self.parameters))

    def step(
        self,
        gradients: Sequence[Tensor],
        max_norm: float,
        norm: Tensor | None = None,
        *,
        members: Sequence[int] = (),
        late: bool = False,
    ) -> Tensor | None:
        """Create the state in the first step; return a tensor if a norm is requested."""
        chosen = self.chosen(members)
        late = late and self.remembers(chosen)
        if not {(index, late) for index in chosen} <= self._counted:
            with _AnyValue():
                super().step(gradients, 0.0, members=members, late=late)
        elif len(gradients) != len(chosen):
            raise WireError(f"{len(gradients)} gradients for {len(chosen)} parameters")
        updated_bytes = sum(self.parameters[index].nbytes for index in chosen)
        share = 1.0 if len(chosen) == len(self.parameters) else updated_bytes / self._parameter_bytes
        self._clock.work(self._cost_s * share)
        return None if max_norm <= 0 and norm is None else torch.empty((), device=_META)

    def expect(self, index: int, into: Tensor) -> None:
        """Do nothing: there are no values."""

    def _expected(self, index: int) -> Tensor | None:
        """Return a tensor with the bytes of an update."""
        return self.parameters[index].clone()

    def _made(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """Create the classes, of which some create their state at once."""
        with _AnyValue():
            return super()._made(spec)

    def _options(self, options: Options) -> dict[str, Any]:
        """Return options without the selection of a kernel: there is none for tensors without elements."""
        return {key: value for key, value in super()._options(options).items() if key not in KERNEL_OPTIONS}

    def _choose_kernel(self, name: str, group: dict[str, Any]) -> None:
        group.update({key: False for key in ("fused", "foreach") if key in group})


class _AnyValue(TorchFunctionMode):
    """Lets optimizers read numbers from tensors without elements, each of which is 1, and answers what they compute.

    PyTorch itself imports sympy to find shapes, which takes a worker a second of processor. It is asked where operands
    do not fit, for its error, and for all else.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].device == _META:
            if func is Tensor.item:
                return 1.0
            answer = _shaped(func, args[0], args[1:], kwargs) if args[0].is_floating_point() else None
            if answer is not None:
                return answer
            if func is Tensor.__setitem__ and _fits(args[0], args[1:]):
                return None
        return func(*args, **kwargs)


def _shaped(func: Any, first: Tensor, others: Sequence[Any], options: dict[str, Any]) -> Tensor | None:
    """Return a result without elements, if the function is known and its operands fit."""
    shape, dtype = first.shape, first.dtype
    if func in _REDUCTIONS:
        dim, keep = options.get("dim"), options.get("keepdim")
        if len(others) > (func is not Tensor.mean) or not isinstance(dim, int | None):
            return None
        gone = range(len(shape)) if dim is None else (range(len(shape))[dim],)
        sizes = [1 if place in gone else size for place, size in enumerate(shape) if keep or place not in gone]
        return torch.empty(sizes, dtype=dtype, device=_META)
    if func is Tensor.matmul or func is torch.addmm:
        left, right = (first, *others)[-2:]
        if not left.dim() == right.dim() == 2 or left.shape[1] != right.shape[0] or left.dtype != right.dtype:
            return None
        made = torch.empty((left.shape[0], right.shape[1]), dtype=dtype, device=_META)
        return made if func is Tensor.matmul or _fits(made, [first]) else None
    if not _fits(first, [*others, *options.values()], converts=func in _IN_PLACE and func is not Tensor.lerp_):
        return None
    if func in _IN_PLACE:
        return first
    if func in _COMPARISONS:
        return torch.empty(shape, dtype=torch.bool, device=_META)
    if func in _ELEMENTWISE and options.get("dtype") is options.get("device") is None:
        out: Tensor | None = options.get("out")
        return torch.empty(shape, dtype=dtype, device=_META) if out is None else out if out.shape == shape else None
    return None


def _fits(into: Tensor, operands: Sequence[Any], *, converts: bool = False) -> bool:
    """Return whether operands extend to the shape of a tensor, and have its type, or one that is converted to it."""
    return all(
        (operand.dtype in (into.dtype, torch.bool) or (converts and operand.is_floating_point()))
        and operand.dim() <= into.dim()
        and all(size in (1, whole) for size, whole in zip(operand.shape[::-1], into.shape[::-1], strict=False))
        for operand in operands
        if isinstance(operand, Tensor)
    )
