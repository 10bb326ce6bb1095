"""Treatments of gradients that are one step late: formulas on tensors. Pure.

Notation: ``w(t)`` are the weights after ``t`` updates, and ``u(t)``, which is added to them next, is the update that
the optimizer's own rule computes from the gradient at that time. That gradient is of ``w(t - 1)`` instead of ``w(t)``;
these treatments compensate for the difference:

``predict``
    Forward and backward of a step are computed on ``a(t) = w(t) + v(t)`` instead of on ``w(t)``, where ``v(t)`` is the
        next update as predicted from the optimizer's momentum: an estimate of ``w(t + 1)``, the weights that the
        gradient will be applied to. SpecTrain (arXiv:1809.02839, section 3) for SGD with momentum; XPipe
        (arXiv:1911.04610, section 3) for
    Adam. See :func:`expected_update`.
``lookahead``
    Steps go further along the momentum, as in Nesterov's method, so that the weights themselves are where momentum
    alone would bring them one step later: ``w(t + 1) = w(t) + u(t) + m (u(t) - u(t - 1))`` with the momentum ``m``. For
    SGD with momentum that is Nesterov's rule, for Adam that of NAdam; "Nesterov Method for Asynchronous Pipeline
    Parallel Optimization" (arXiv:2505.01099) shows why such a look-ahead makes up for delay. See :func:`correct`.
``both``
    The first two together: the weights are updated by ``lookahead``, and forward and backward are computed on ``a(t)``.
``extrapolate``
    As ``predict``, plus the change of the predicted update: ``a(t) = w(t) + v(t) + (v(t) - v(t - 1))``. These
    are the first three terms of Newton's backward differences, by which a sequence is continued by a step; ``predict``
    has two. For SGD with momentum, where ``v`` is the last update, they are ``3 w(t) - 3 w(t - 1) + w(t - 2)``; so a
    direction of curvature ``h`` goes by the roots of ``z^2 (z - 1) (z - m) + lr h (3 z^2 - 3 z + 1)``, which for a
    momentum of 0.9 is stable up to ``lr h = 0.49``, where ``predict`` is up to 0.27. Derived here; see
    :func:`extrapolated`.
``feedback``
    An update from a late gradient has an error ``e``; when the correct gradient is available, a step later, the error
        is corrected: ``w(t + 1) = w(t) + u(t) + (u(t) - u(t - 1))``. It is error feedback with
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
"""Key of the update kept in an optimizer's state by a treatment: the last update by the optimizer's own rule, or, for
``extrapolate``, the prediction before the last step."""

PREDICTS = ("Adam", "AdamW", "Muon", "NAdam", "SGD")
"""Optimizers whose next update can be predicted."""

AHEAD = ("predict", "extrapolate", "both")
"""Treatments that compute with predicted weights."""

REMEMBERS = ("extrapolate", "lookahead", "both", "feedback")
"""Treatments that store an update: the prediction, or the last update for correcting the next one."""

_BETAS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")


def momentum_of(name: str, group: Mapping[str, Any]) -> float | None:
    """Return the momentum of an optimizer: the fraction of an update that recurs in the next one.

    Args:
        name: Class in ``torch.optim``.
        group: Options of a parameter group.

    Returns:
        From 0 up to 1; ``None`` for a class without momentum.

    Example:
        >>> momentum_of("AdamW", {"betas": (0.9, 0.999)})
        0.9
    """
    if name in _BETAS:
        return float(group["betas"][0])
    return float(group["momentum"]) if name in ("SGD", "Muon", "RMSprop") else None


def correct(parameter: Tensor, before: Tensor, last: Tensor | None, factor: float) -> Tensor:
    """Add a multiple of the difference between an update and the last one.

    Args:
        parameter: Result of the optimizer's own rule for ``before``; becomes ``before + u + factor (u - last)``.
        before: The parameter before the step.
        last: ``u`` of the previous step; ``None`` in the first one, which is left unchanged. Becomes ``u``.
        factor: The momentum for ``lookahead`` and ``both``, 1 for ``feedback``.

    Returns:
        ``u``, in the memory of ``last`` if given.

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
    """Return a predicted update with its change since the last step added.

    Args:
        update: The present prediction; overwritten with the result.
        last: The prediction before the last step; ``None`` if unknown.

    Example:
        >>> extrapolated(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([5.])
    """
    return update if last is None else update.mul_(2).sub_(last)


def expected_update(name: str, group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the next update of a parameter as predicted from the optimizer's momentum.

    This is the update by the class's own rule for the gradient that its momentum represents, with unchanged momentum:

    ========= ==========================================================================================
    SGD       ``-lr b`` (weight decay is in the momentum ``b`` already)
    Adam(W)   ``-lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)``; AdamW ``- lr wd w`` besides
    NAdam     the same with the weights of ``m`` and of the gradient that its schedule of momentum gives
    Muon      ``-lr s O - lr wd w``, ``O`` the nearest orthogonal matrix to ``b`` as Muon finds it
    ========= ==========================================================================================

    Args:
        name: Class in ``torch.optim``.
        group: Options of the parameter's group.
        state: Optimizer state of the parameter.
        parameter: The parameter, not written to.

    Returns:
        The update; ``None`` without a prediction: before the first step, or without momentum.

    Raises:
        WireError: The class has no momentum to predict from.
    """
    if name not in PREDICTS:
        raise WireError(f"the next update of {name} cannot be expected; allowed: {', '.join(PREDICTS)}")
    if parameter.is_complex():  # optimizers update real and imaginary parts separately
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
    """Return real and imaginary parts side by side; a real tensor unchanged."""
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
    # By the class itself, with weights 0 and momentum 0: its terms differ between versions of torch.
    options = {key: value for key, value in group.items() if key not in ("params", "weight_decay", "momentum")}
    alone = without_compiler("Muon")([update], **options | {"weight_decay": 0.0, "momentum": 0.0})
    update.grad = momentum
    alone.step()
    update.grad = None
    return update
