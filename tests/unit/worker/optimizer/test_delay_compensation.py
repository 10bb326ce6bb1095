"""Treatments of late gradients: closed forms by hand, and problems where they come nearer to the synchronous run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.engine.workload.parameter_groups import options_of
from onebox.errors import WireError
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker.optimizer.delay_compensation import (
    AHEAD,
    LAST_UPDATE,
    PREDICTS,
    correct,
    expected_update,
    extrapolated,
    momentum_of,
)
from onebox.worker.optimizer.native import NativeOptimizer


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stepped(kind: str, steps: int, **options: Any) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """Return an optimizer of torch that has stepped one matrix by random gradients."""
    parameter = torch.nn.Parameter(drawn(0, 3, 2))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)([parameter], **options)
    for step in range(1, steps + 1):
        parameter.grad = drawn(step, 3, 2)
        optimizer.step()
    return optimizer, parameter


def expected_of(kind: str, optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    return expected_update(kind, optimizer.param_groups[0], optimizer.state[parameter], parameter.detach())


# ---- what is expected


def test_sgd_goes_on_by_its_momentum() -> None:
    """SpecTrain: lr times the smoothed gradient."""
    optimizer, parameter = stepped("SGD", 3, lr=0.1, momentum=0.9)
    smoothed = (drawn(1, 3, 2) * 0.9 + drawn(2, 3, 2)) * 0.9 + drawn(3, 3, 2)
    torch.testing.assert_close(expected_of("SGD", optimizer, parameter), -0.1 * smoothed, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("kind", "decay"), [("Adam", 0.0), ("AdamW", 0.25)])
@pytest.mark.parametrize("fused", [False, True])
def test_adam_goes_on_by_its_momentum(kind: str, decay: float, fused: bool) -> None:
    """XPipe: lr times the first moment over the root of the second, both without bias."""
    options = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": decay, "fused": fused}
    optimizer, parameter = stepped(kind, 2, **options)
    g1, g2 = drawn(1, 3, 2), drawn(2, 3, 2)
    first = (0.2 * 0.8 * g1 + 0.2 * g2) / (1 - 0.8**2)
    second = (0.01 * 0.99 * g1**2 + 0.01 * g2**2) / (1 - 0.99**2)
    by_hand = -0.1 * first / (second.sqrt() + 1e-3) - 0.1 * decay * parameter.detach()
    torch.testing.assert_close(expected_of(kind, optimizer, parameter), by_hand, rtol=0, atol=1e-13)


def test_adam_with_the_largest_second_moment() -> None:
    optimizer, parameter = stepped("Adam", 3, lr=0.1, amsgrad=True)
    state = optimizer.state[parameter]
    scale = state["max_exp_avg_sq"].sqrt() / math.sqrt(1 - 0.999**3) + 1e-8
    by_hand = -0.1 * state["exp_avg"] / (1 - 0.9**3) / scale
    torch.testing.assert_close(expected_of("Adam", optimizer, parameter), by_hand, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        ("Adam", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "maximize": True}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.5}),
        ("NAdam", {"lr": 0.01}),
        ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.5}),
        ("Muon", {"lr": 0.01, "weight_decay": 0.5}),
        ("Muon", {"lr": 0.01, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ],
)
def test_where_gradients_stay_the_same_the_expectation_comes_true(kind: str, options: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(drawn(0, 3, 2))
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    for _ in range(400):  # until the moments are what the gradient says
        parameter.grad = drawn(1, 3, 2)
        optimizer.step()
    expected = expected_of(kind, optimizer, parameter)
    before = parameter.detach().clone()
    parameter.grad = drawn(1, 3, 2)
    optimizer.step()
    # Muon computes in bfloat16
    torch.testing.assert_close(expected, parameter.detach() - before, rtol=1e-2 if kind == "Muon" else 1e-5, atol=1e-9)


def test_a_shape_that_muon_scales_up() -> None:
    parameter = torch.nn.Parameter(drawn(0, 8, 2))
    optimizer = torch.optim.Muon([parameter], lr=0.5, weight_decay=0.0)
    parameter.grad = drawn(1, 8, 2)
    optimizer.step()
    expected = expected_of("Muon", optimizer, parameter)
    assert expected is not None
    scale = torch.linalg.svdvals(expected / (0.5 * 2.0))  # lr, and the root of 8 / 2
    assert bool(((scale > 0.3) & (scale < 1.7)).all()), "as near to an orthogonal matrix as Muon goes"


@pytest.mark.parametrize("kind", PREDICTS)
def test_nothing_is_expected_before_the_first_step(kind: str) -> None:
    optimizer, parameter = stepped(kind, 0, lr=0.1)
    assert expected_of(kind, optimizer, parameter) is None


def test_nothing_is_expected_without_momentum() -> None:
    optimizer, parameter = stepped("SGD", 3, lr=0.1)
    assert expected_of("SGD", optimizer, parameter) is None


def test_who_has_no_momentum_is_refused() -> None:
    with pytest.raises(WireError, match="Adagrad"):
        expected_update("Adagrad", {}, {}, drawn(0, 2, 2))


def test_state_and_parameter_stay_as_they_are() -> None:
    for kind in PREDICTS:
        optimizer, parameter = stepped(kind, 3, lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
        state = {k: v.clone() for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}
        before = parameter.detach().clone()
        expected_of(kind, optimizer, parameter)
        assert torch.equal(parameter, before)
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())


# ---- corrections


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1), st.integers(0, 2**16))
def test_a_correction_adds_the_difference_of_updates(factor: float, seed: int) -> None:
    before, update, last = (drawn(seed + place, 2, 3) for place in range(3))
    parameter, remembered = before + update, last.clone()
    found = correct(parameter, before, remembered, factor)
    torch.testing.assert_close(parameter, before + update + factor * (update - last), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, update, rtol=0, atol=1e-12)
    assert found is remembered


def test_the_first_update_has_none_to_compare_with() -> None:
    before, parameter = drawn(0, 2, 2), drawn(1, 2, 2)
    was = parameter.clone()
    assert torch.equal(correct(parameter, before, None, 1.0), was - before)
    assert torch.equal(parameter, was)


def late_run(kind: str, delay: Any, gradients: Sequence[Tensor], **options: Any) -> tuple[Tensor, NativeOptimizer]:
    """Return the weights after steps by given gradients, all treated as late."""
    weight = drawn(0, 3, 2)
    spec = OptimizerSpec(kind, (((0,), options),), (1,), delay=delay)
    native = NativeOptimizer(spec, [weight], [])
    for gradient in gradients:
        native.step([gradient], 0.0, late=True)
    return weight, native


def expected_by(native: NativeOptimizer, weight: Tensor) -> Tensor:
    into = torch.empty_like(weight)
    native.expect(0, into)
    return into


def test_looking_ahead_with_sgd_is_nesterovs_rule() -> None:
    """With given gradients: w + u + m (u - u before) makes torch's nesterov=True of nesterov=False."""
    gradients = [drawn(seed, 3, 2) for seed in range(1, 7)]
    found, _ = late_run("SGD", "lookahead", gradients, lr=0.1, momentum=0.8)
    reference = torch.nn.Parameter(drawn(0, 3, 2))
    optimizer = torch.optim.SGD([reference], lr=0.1, momentum=0.8, nesterov=True)
    for gradient in gradients:
        reference.grad = gradient
        optimizer.step()
    # the first step of Nesterov's rule looks ahead, too, where a correction has nothing to compare with
    ahead = -0.1 * 0.8 * gradients[0]
    torch.testing.assert_close(found + ahead, reference.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"), [("SGD", {"lr": 0.1}), ("AdamW", {"lr": 0.1}), ("Adagrad", {"lr": 0.1}), ("Muon", {"lr": 0.1})]
)
def test_feedback_is_the_sum_of_updates_and_the_last_one_but_the_first(kind: str, options: dict[str, Any]) -> None:
    """All that is fed back adds up: it telescopes to the difference of the last update and the first."""
    gradients = [drawn(seed, 3, 2) for seed in range(1, 6)]
    options = {**options, "weight_decay": 0.0}
    found, native = late_run(kind, "feedback", gradients, **options)
    plain = torch.nn.Parameter(drawn(0, 3, 2))
    optimizer = getattr(torch.optim, kind)([plain], **options)
    values = [plain.detach().clone()]
    for gradient in gradients:
        plain.grad = gradient
        optimizer.step()
        values.append(plain.detach().clone())
    first, last = values[1] - values[0], values[-1] - values[-2]
    torch.testing.assert_close(found, values[-1] + last - first, rtol=0, atol=1e-12)
    entries, tensors = native.state()
    remembered = dict(zip([e.key for e in entries if not isinstance(e.value, int | float)], tensors, strict=True))
    torch.testing.assert_close(remembered[LAST_UPDATE], last, rtol=0, atol=1e-12)


def test_an_expected_update_changes_as_it_did() -> None:
    update, last = drawn(1, 2, 3), drawn(2, 2, 3)
    torch.testing.assert_close(extrapolated(update.clone(), last), update + (update - last), rtol=0, atol=1e-14)
    assert torch.equal(extrapolated(update.clone(), None), update)


def test_an_extrapolation_continues_a_parabola() -> None:
    """By SGD, which goes on by its last update: 3 w(t) - 3 w(t - 1) + w(t - 2), in every step from the first one on
    that knows so many; asking twice changes nothing."""
    weight = drawn(0, 3, 2)
    native = NativeOptimizer(
        OptimizerSpec("SGD", (((0,), {"lr": 0.1, "momentum": 0.9}),), (1,), delay="extrapolate"), [weight], []
    )
    path = [weight.clone()]
    for step in range(1, 7):
        native.step([drawn(step, 3, 2)], 0.0, late=True)
        path.append(weight.clone())
        into = torch.empty_like(weight)
        for _ in range(2):
            native.expect(0, into)
            twice, once, before = path[-1], path[-2], path[-3] if step > 1 else 2 * path[-2] - path[-1]
            torch.testing.assert_close(into, 3 * twice - 3 * once + before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delay", ["feedback", "lookahead", "extrapolate"])
def test_what_is_remembered_moves_with_the_state(delay: Any) -> None:
    gradients = [drawn(seed, 3, 2) for seed in range(1, 7)]
    options = options_of(torch.optim.AdamW([torch.nn.Parameter(drawn(0, 3, 2))], lr=0.1))[0]
    whole, all_of_it = late_run("AdamW", delay, gradients, **options)
    half, native = late_run("AdamW", delay, gradients[:3], **options)
    entries, tensors = native.state()
    spec = OptimizerSpec("AdamW", (((0,), options),), (1,), tuple(entries), delay=delay)
    other = NativeOptimizer(spec, [half], [tensor.clone() for tensor in tensors])
    for gradient in gradients[3:]:
        other.step([gradient], 0.0, late=True)
    assert torch.equal(half, whole)
    assert torch.equal(expected_by(other, half), expected_by(all_of_it, whole))


@pytest.mark.parametrize(
    ("kind", "group", "momentum"),
    [
        ("SGD", {"momentum": 0.5}, 0.5),
        ("Muon", {"momentum": 0.95}, 0.95),
        ("NAdam", {"betas": (0.8, 0.9)}, 0.8),
        ("Adagrad", {}, None),
    ],
)
def test_momentum(kind: str, group: dict[str, Any], momentum: float | None) -> None:
    assert momentum_of(kind, group) == momentum


# ---- problems with a known answer

CURVATURES = torch.tensor([[0.02, 0.3], [1.0, 2.0]], dtype=torch.float64)
"""Of a quadratic whose least value is at 0: some directions are steep, others flat."""


def descend(kind: str, delay: Any, steps: int, **options: Any) -> list[Tensor]:
    """Return the weights of each step; ``sync`` is the run whose gradients are not late."""
    weight = torch.ones(2, 2, dtype=torch.float64)
    spec = OptimizerSpec(kind, (((0,), options),), (1,), delay="none" if delay == "sync" else delay)
    native = NativeOptimizer(spec, [weight], [])
    read, ahead, path = weight.clone(), weight.clone(), []
    for _ in range(steps):
        was = weight.clone()
        native.step([CURVATURES * read], 0.0, late=delay != "sync")
        if delay == "sync":
            read = weight.clone()
        elif delay in AHEAD:
            read = ahead.clone()
            native.expect(0, ahead)
        else:
            read = was
        path.append(weight.clone())
    return path


@pytest.mark.parametrize("delay", ["predict", "extrapolate", "lookahead", "both", "feedback"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.02, "momentum": 0.9}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.0}),
    ],
)
def test_a_treated_run_is_nearer_to_the_synchronous_one(kind: str, options: dict[str, Any], delay: Any) -> None:
    paths = {each: descend(kind, each, 100, **options) for each in ("sync", "none", delay)}

    def off(each: str) -> float:
        return float(sum((a - b).square().sum() for a, b in zip(paths[each], paths["sync"], strict=True)))

    assert off(delay) < 0.6 * off("none")


@pytest.mark.parametrize(("delay", "stable"), [("sync", True), ("none", False), ("predict", True), ("feedback", True)])
def test_how_large_a_rate_may_be(delay: str, stable: bool) -> None:
    """Heavy ball with momentum m on a quadratic of curvature h: synchronous steps stay stable for lr h < 2 (1 + m),
    late ones for lr h < 1 - m, predicted ones for (lr h)^2 + (1 - m) lr h < 1 - m: here for 3.8, 0.1 and 0.27."""
    path = descend("SGD", delay, 400, lr=0.2 / 2.0, momentum=0.9)
    assert (float(path[-1][1, 1].abs()) < 1e-3) is stable


@pytest.mark.parametrize(
    ("delay", "lr_h", "stable"),
    [("predict", 0.25, True), ("predict", 0.3, False), ("extrapolate", 0.47, True), ("extrapolate", 0.52, False)],
)
def test_a_prediction_has_a_bound_of_its_own(delay: str, lr_h: float, stable: bool) -> None:
    path = descend("SGD", delay, 1200, lr=lr_h / 2.0, momentum=0.9)
    assert (float(path[-1][1, 1].abs()) < 1e-3) is stable


def response(delay: Any, lr_h: float) -> float:
    """Return the sum of squares of the weights that gradients are computed on, after noise of 1 in one gradient: what
    noise in every gradient makes their variance."""
    weight = torch.zeros(1, 1, dtype=torch.float64)
    spec = OptimizerSpec(
        "SGD", (((0,), {"lr": lr_h, "momentum": 0.9}),), (1,), delay="none" if delay == "sync" else delay
    )
    native = NativeOptimizer(spec, [weight], [])
    read, ahead, total = weight.clone(), weight.clone(), 0.0
    for step in range(400):
        total += float(read.square())
        was = weight.clone()
        native.step([read + float(step == 3)], 0.0, late=delay != "sync")
        if delay in AHEAD:
            read = ahead.clone()
            native.expect(0, ahead)
        else:
            read = weight.clone() if delay == "sync" else was
    return total


@pytest.mark.parametrize(("delay", "times"), [("predict", 3.06), ("both", 1.90), ("extrapolate", 1.05)])
def test_how_noise_grows(delay: str, times: float) -> None:
    """Beside exact steps, at lr h = 0.2 and a momentum of 0.9; untreated gradients diverge there."""
    assert response(delay, 0.2) / response("sync", 0.2) == pytest.approx(times, abs=0.01)
