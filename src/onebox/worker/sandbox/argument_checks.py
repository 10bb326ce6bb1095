"""Argument checks: limits of operators whose kernels would read or write outside of their tensors' memory."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from onebox.errors import WireError


def check_arguments(operator: OpOverload, args: Any, kwargs: Any) -> None:
    """Require that an operator's kernel stays within the memory of its arguments.

    Raises:
        WireError: It might not.
    """
