"""What is done about gradients that are a step late: formulas, on tensors. Pure.

Notation: ``w(t)`` are the weights after ``t`` updates, and ``u(t)``, which is added to them next, is what the
optimizer's own rule makes of the gradient that it gets then. That gradient is of ``w(t - 1)`` instead of ``w(t)``;
these treatments bring the two together:

``predict``
    Forward and backward of a step are computed on ``a(t) = w(t) + v(t)`` instead of on ``w(t)``, where ``v(t)`` is the
    update that the optimizer's momentum expects next: a guess at ``w(t + 1)``, the weights that the gradient will be
    applied to. SpecTrain (arXiv:1809.02839, section 3) for SGD with momentum; XPipe (arXiv:1911.04610, section 3) for
    Adam. See :func:`expected_update`.
``lookahead``
    Steps go further along the momentum, as in Nesterov's method, so that the weights themselves are where momentum
    alone would bring them one step later: ``w(t + 1) = w(t) + u(t) + m (u(t) - u(t - 1))`` with the momentum ``m``. For
    SGD with momentum that is Nesterov's rule, for Adam that of NAdam; "Nesterov Method for Asynchronous Pipeline
    Parallel Optimization" (arXiv:2505.01099) shows why such a look-ahead makes up for delay. See :func:`correct`.
``both``
    The first two together: the weights go as ``lookahead`` says, and forward and backward are computed on ``a(t)``.
``extrapolate``
    As ``predict``, with the change of the expected update besides: ``a(t) = w(t) + v(t) + (v(t) - v(t - 1))``. These
    are the first three terms of Newton's backward differences, by which a sequence is continued by a step; ``predict``
    has two. For SGD with momentum, where ``v`` is the last update, they are ``3 w(t) - 3 w(t - 1) + w(t - 2)``; so a
    direction of curvature ``h`` goes by the roots of ``z^2 (z - 1) (z - m) + lr h (3 z^2 - 3 z + 1)``, which for a
    momentum of 0.9 is stable up to ``lr h = 0.49``, where ``predict`` is up to 0.27. Derived here; see
    :func:`extrapolated`.
``feedback``
    An update made of a late gradient is off by ``e``; when the gradient that it should have been made of is there, a
    step later, the difference is made good: ``w(t + 1) = w(t) + u(t) + (u(t) - u(t - 1))``. It is error feedback with
    the delay in the place of a compressor, as arXiv:2606.30634 uses it with any optimizer; derived here from that idea,
    so that its coefficients may be others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.worker.optimizer.optimizer_patch import without_compiler

LAST_UPDATE = "late_update"
"""Key of what a treatment remembers among an optimizer's state: the last update by the optimizer's own rule, or, for
``extrapolate``, the one that was expected before the last step."""

PREDICTS = ("Adam", "AdamW", "Muon", "NAdam", "SGD")
"""Optimizers whose next update can be expected."""

AHEAD = ("predict", "extrapolate", "both")
"""Treatments that compute on weights that are ahead."""

REMEMBERS = ("extrapolate", "lookahead", "both", "feedback")
"""Treatments that remember an update: what was expected, or, to correct the next one, what was done."""

_BETAS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")


def momentum_of(name: str, group: Mapping[str, Any]) -> float | None:
    """Return the momentum of an optimizer: how much of an update comes again with the next one.

    Args:
        name: Class in ``torch.optim``.
        group: Options of a parameter group.

    Returns:
        From 0 up to 1; ``None`` where the class has no momentum.

    Example:
        >>> momentum_of("AdamW", {"betas": (0.9, 0.999)})
        0.9
    """
    if name in _BETAS:
        return float(group["betas"][0])
    return float(group["momentum"]) if name in ("SGD", "Muon", "RMSprop") else None


def correct(parameter: Tensor, before: Tensor, last: Tensor | None, factor: float) -> Tensor:
    """Add to an update the part in which it differs from the last one.

    Args:
        parameter: What the optimizer's own rule has made of ``before``; becomes ``before + u + factor (u - last)``.
        before: What the parameter was.
        last: ``u`` of the step before; ``None`` in the first one, which is left as it is. Becomes ``u``.
        factor: The momentum for ``lookahead`` and ``both``, 1 for ``feedback``.

    Returns:
        ``u``, which is ``last`` where there is one.

    Example:
        >>> w, last = torch.tensor([3.0]), torch.tensor([1.0])
        >>> correct(w, torch.tensor([1.0]), last, 0.5), w
        (tensor([2.]), tensor([3.5000]))
    """
    update = parameter - before
    if last is None:
        return update
    parameter.add_(update - last, alpha=factor)
    return last.copy_(update)


def extrapolated(update: Tensor, last: Tensor | None) -> Tensor:
    """Return an expected update with its change since the last step added.

    Args:
        update: What is expected now; becomes what is returned.
        last: What was expected before the last step; ``None`` for a change that is not known.

    Example:
        >>> extrapolated(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([5.])
    """
    return update if last is None else update.mul_(2).sub_(last)


def expected_update(name: str, group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the update of a parameter that the optimizer's momentum expects next.

    That is what the class's own rule would do with the gradient that its momentum stands for, the momentum staying as
    it is:

    ========= ==========================================================================================
    SGD       ``-lr b`` (weight decay is in the momentum ``b`` already)
    Adam(W)   ``-lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)``; AdamW ``- lr wd w`` besides
    NAdam     the same with the weights of ``m`` and of the gradient that its schedule of momentum gives
    Muon      ``-lr s O - lr wd w``, ``O`` the nearest orthogonal matrix to ``b`` as Muon finds it
    ========= ==========================================================================================

    Args:
        name: Class in ``torch.optim``.
        group: Options of the parameter's group.
        state: What the optimizer remembers of the parameter.
        parameter: The parameter, not written to.

    Returns:
        The update; ``None`` where nothing is expected: before the first step, or without momentum.

    Raises:
        WireError: The class has no momentum that would say.
    """
    if name not in PREDICTS:
        raise WireError(f"the next update of {name} cannot be expected; allowed: {', '.join(PREDICTS)}")
    if parameter.is_complex():  # optimizers step real and imaginary parts as numbers of their own
        parts = {key: _parts(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        expected = expected_update(name, group, parts, _parts(parameter))
        return None if expected is None else torch.view_as_complex(expected)
    rule = {"SGD": _sgd, "Muon": _muon, "NAdam": _nadam}.get(name, _adam)
    update = rule(group, state, parameter)
    if update is None:
        return None
    decoupled = name in ("AdamW", "Muon") or group.get("decoupled_weight_decay", False)
    if decoupled and group["weight_decay"]:
        update.sub_(parameter, alpha=float(group["lr"]) * float(group["weight_decay"]))
    return update


def _parts(tensor: Tensor) -> Tensor:
    """Return real and imaginary parts side by side; a tensor of real numbers as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sgd(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    momentum = state.get("momentum_buffer")
    return None if momentum is None else momentum * -float(group["lr"])


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    if "exp_avg" not in state:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state["step"])
    second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(float(group["eps"]))
    return torch.div(state["exp_avg"], scale).mul_(-float(group["lr"]) / (1 - beta1**step))


def _nadam(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    if "exp_avg" not in state:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step, decay = float(state["step"]), float(group["momentum_decay"])
    mu, mu_next = (beta1 * (1.0 - 0.5 * 0.96 ** (later * decay)) for later in (step + 1, step + 2))
    product = float(state["mu_product"]) * mu
    scale = state["exp_avg_sq"].div(1 - beta2**step).sqrt_().add_(float(group["eps"]))
    weight = (1 - mu) / (1 - product) / (1 - beta1**step) + mu_next / (1 - product * mu_next)
    return torch.div(state["exp_avg"], scale).mul_(-float(group["lr"]) * weight)


def _muon(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    momentum = state.get("momentum_buffer")
    if momentum is None:
        return None
    update = torch.zeros_like(parameter)
    # By the class itself, of weights 0 with momentum 0: what it is made of differs from version to version of torch.
    options = {key: value for key, value in group.items() if key not in ("params", "weight_decay", "momentum")}
    alone = without_compiler("Muon")([update], **options | {"weight_decay": 0.0, "momentum": 0.0})
    update.grad = momentum
    alone.step()
    update.grad = None
    return update
