"""Numbers whose values arrive later: they behave like ``float``, and every use of the value waits for it."""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onebox.errors import UsageError


def _forward(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def applied(self: LateNumber, other: Any) -> Any:
        return operation(self.item(), other.item() if isinstance(other, LateNumber) else other)

    return applied


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def applied(self: LateNumber, other: Any) -> Any:
        return operation(other, self.item())

    return applied


class LateNumber(Real):
    """A real number whose value arrives later.

    Comparison, arithmetic, ``round``, ``math``, ``statistics``, numpy and functions of PyTorch treat it as the
    ``float`` that it represents, and return plain numbers, arrays and tensors. Equality and hash are the value's. In a
    function of PyTorch it is a ``float64`` tensor without dimensions, so ``torch.stack(losses)`` is the tensor of
    several. A copy is the number itself; pickled, it is a ``float``.

    Not possible, since Python and PyTorch require the exact type ``float`` there: ``json.dumps`` without
    ``default=float``, and ``torch.tensor([loss])`` without a ``dtype``.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        if len(arguments) == 1 and isinstance(arguments[0], Real) and not named:
            # statistics.mean and similar functions convert their result to the type of the numbers, as type(x)(mean).
            return float(arguments[0])  # type: ignore[return-value]
        return super().__new__(cls)

    @abstractmethod
    def item(self) -> float:
        """Wait for the value and return it."""

    def detach(self) -> Self:
        """Return itself: it is not part of a graph."""
        return self

    def cpu(self) -> Self:
        """Return itself: it is not on a device."""
        return self

    def backward(self, *arguments: Any, **named: Any) -> None:
        """Refuse: it has no graph.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "backward() of a loss that trainer.step() returned: the step has computed the gradients and updated the "
            "parameters already; leave out backward(), optimizer.step() and optimizer.zero_grad()"
        )

    def as_integer_ratio(self) -> tuple[int, int]:
        """Return two integers whose quotient is the value, as :meth:`float.as_integer_ratio`; waits."""
        return self.item().as_integer_ratio()

    def is_integer(self) -> bool:
        """Return whether the value is a whole number; waits."""
        return self.item().is_integer()

    def __float__(self) -> float:
        return self.item()

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __str__(self) -> str:
        return str(self.item())

    def __trunc__(self) -> int:
        return math.trunc(self.item())

    def __floor__(self) -> int:
        return math.floor(self.item())

    def __ceil__(self) -> int:
        return math.ceil(self.item())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.item(), ndigits)

    @property
    def imag(self) -> float:  # type: ignore[override]
        """Zero, as for every real number."""
        return 0.0

    def __neg__(self) -> float:
        return -self.item()

    def __pos__(self) -> float:
        return self.item()

    def __abs__(self) -> float:
        return abs(self.item())

    __eq__ = _forward(operator.eq)
    __ne__ = _forward(operator.ne)
    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __add__, __radd__ = _forward(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _forward(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _reflected(operator.mod)
    __divmod__ = _forward(divmod)
    __rdivmod__ = _reflected(divmod)  # type: ignore[assignment]
    __pow__, __rpow__ = _forward(operator.pow), _reflected(operator.pow)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (self.item(),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a loss that arrives later has no array of its own: numpy has to make one (copy=None)")
        return np.asarray(self.item(), dtype=dtype)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        # A float instead of a float64 array: its sum with a float32 stays float32.
        numbers = (one.item() if isinstance(one, LateNumber) else one for one in inputs)
        return getattr(function, method)(*numbers, **named)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map_only(LateNumber, _as_tensor, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)


def _as_tensor(number: LateNumber) -> torch.Tensor:
    return torch.tensor(number.item(), dtype=torch.float64, device="cpu")
