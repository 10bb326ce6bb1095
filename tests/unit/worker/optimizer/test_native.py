"""The worker's optimizers: those of torch.optim, to the last bit but for the kernel that is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from onebox.engine.workload.parameter_groups import options_of
from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.wire.protocol.snapshots import StateEntry
from onebox.worker.optimizer.delay_compensation import LAST_UPDATE
from onebox.worker.optimizer.native import ALLOWED, NativeOptimizer

AGREE = 1e-13


def parameters(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(3)]


def pair(kind: str, **options: Any) -> tuple[torch.optim.Optimizer, list[Tensor], NativeOptimizer, list[Tensor]]:
    """Return an optimizer of torch with two groups, and ours made from what can be read of it."""
    ours = parameters()
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in ours]
    groups = [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.03}]
    reference = getattr(torch.optim, kind)(groups, **options)
    members = ((0, 1), (2,))
    spec = OptimizerSpec(kind, tuple(zip(members, options_of(reference), strict=True)), (1, 2, 3))
    return reference, theirs, NativeOptimizer(spec, ours, []), ours


def step_both(reference: torch.optim.Optimizer, theirs: Any, native: NativeOptimizer, seed: int) -> None:
    gradients = parameters(seed)
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    reference.step()
    native.step([gradient.clone() for gradient in gradients], 0.0)


def assert_alike(theirs: Any, ours: list[Tensor]) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a.detach(), rtol=0, atol=AGREE)


@pytest.mark.parametrize("kind", [kind for kind in ALLOWED if hasattr(torch.optim, kind)])
def test_every_allowed_optimizer_with_its_defaults(kind: str) -> None:
    reference, theirs, native, ours = pair(kind)
    for seed in range(1, 4):
        step_both(reference, theirs, native, seed)
    assert_alike(theirs, ours)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "betas": (0.8, 0.99), "amsgrad": True}),
        ("Adam", {"lr": torch.tensor(0.01, dtype=torch.float64)}),
        ("Adam", {"foreach": False}),
        ("AdamW", {"weight_decay": 0.1, "maximize": True}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
        ("Adafactor", {"lr": 0.02}),
    ],
)
def test_options_of_all_kinds(kind: str, options: dict[str, Any]) -> None:
    reference, theirs, native, ours = pair(kind, **options)
    for seed in range(1, 4):
        step_both(reference, theirs, native, seed)
    assert_alike(theirs, ours)


def test_new_options_take_effect_group_by_group() -> None:
    reference, theirs, native, ours = pair("AdamW", lr=0.1)
    for seed, factor in enumerate((1.0, 0.5, 0.1), start=1):
        for group in reference.param_groups:
            group["lr"] *= factor
        native.set_options(options_of(reference))
        step_both(reference, theirs, native, seed)
    assert_alike(theirs, ours)


def test_new_options_never_change_the_kernel() -> None:
    reference, _, native, _ = pair("AdamW")
    chosen = [group["fused"] for group in native.groups]
    native.set_options(options_of(reference))
    assert [group["fused"] for group in native.groups] == chosen


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad", "NAdam", "ASGD", "Rprop"])
def test_state_moves_to_another_worker_bit_for_bit(kind: str) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    reference, theirs, native, ours = pair(kind, **options)
    for seed in (1, 2):
        step_both(reference, theirs, native, seed)
    entries, tensors = native.state()
    assert all(isinstance(entry.value, TensorSpec) for entry in entries)
    copies = [tensor.clone() for tensor in ours]
    spec = OptimizerSpec(
        kind, tuple(zip(((0, 1), (2,)), options_of(reference), strict=True)), (1, 2, 3), tuple(entries)
    )
    other = NativeOptimizer(spec, copies, [tensor.clone() for tensor in tensors])
    for each in (native, other):
        each.step(parameters(9), 0.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, copies, strict=True))
    assert other.charged_bytes == native.charged_bytes


def two_classes(
    options: dict[str, Any],
) -> tuple[list[torch.optim.Optimizer], list[torch.nn.Parameter], OptimizerSpec, list[Tensor]]:
    """Return two optimizers of torch, and one of ours whose groups take turns with their classes."""
    ours = parameters()
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in ours]
    muon = torch.optim.Muon([theirs[1]], lr=0.05)
    adamw = torch.optim.AdamW([{"params": [theirs[2]]}, {"params": [theirs[0]], "lr": 0.03}], **options)
    first, second = options_of(adamw)
    groups = (((2,), first), ((1,), options_of(muon)[0]), ((0,), second))
    return [muon, adamw], theirs, OptimizerSpec(("AdamW", "Muon", "AdamW"), groups, (1, 2, 3)), ours


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "foreach": False}], ids=str)
def test_groups_of_several_classes_step_as_several_optimizers(options: dict[str, Any]) -> None:
    """All at once, some of them, with a norm of all of them; with new options; and with a state that has moved."""
    references, theirs, spec, ours = two_classes(options)
    native = NativeOptimizer(spec, ours, [])
    for seed, max_norm, chosen in ((1, 0.0, (0, 1, 2)), (2, 0.5, (0, 1, 2)), (3, 0.0, (1,)), (4, 0.0, (2, 0))):
        muon, adamw = references
        muon.param_groups[0]["lr"] *= 0.5
        adamw.param_groups[1]["lr"] *= 0.7
        first, second = options_of(adamw)
        native.set_options((first, options_of(muon)[0], second))
        for index, (parameter, gradient) in enumerate(zip(theirs, parameters(seed), strict=True)):
            parameter.grad = gradient if index in chosen else None
        gradients = [theirs[index].grad.clone() for index in chosen]  # type: ignore[union-attr]
        if max_norm:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        for reference in references:
            reference.step()
        native.step(gradients, max_norm, members=chosen if len(chosen) < len(ours) else ())
        if seed == 2:
            entries, tensors = native.state()
            native = NativeOptimizer(
                OptimizerSpec(spec.name, spec.groups, spec.parameters, tuple(entries)),
                ours,
                [t.clone() for t in tensors],
            )
    assert_alike(theirs, ours)
    assert native.charged_bytes == sum(
        value.nbytes for each in references for known in each.state.values() for value in known.values()
    )


def test_each_group_has_a_treatment_of_its_own() -> None:
    _, _, spec, ours = two_classes({})
    native = NativeOptimizer(replace(spec, delay=("feedback", "none", "predict")), ours, [])
    gradients = parameters(1)
    native.step(gradients, 0.0, late=True)
    entries, _ = native.state()
    assert [entry.parameter for entry in entries if entry.key == LAST_UPDATE] == [2], "only feedback remembers"
    found = [torch.zeros_like(tensor) for tensor in ours]
    for index, tensor in enumerate(found):
        native.expect(index, tensor)
    assert [torch.equal(a, b) for a, b in zip(found, ours, strict=True)] == [False, True, True]


def test_numbers_in_the_state_are_kept() -> None:
    ours = parameters()[:1]
    entries = (StateEntry(0, "step", 5.0), StateEntry(0, "done", True), StateEntry(0, "nothing", None))
    native = NativeOptimizer(OptimizerSpec("SGD", (((0,), {"lr": 0.1}),), (1,), entries), ours, [])
    found, tensors = native.state()
    assert {(entry.key, entry.value) for entry in found} == {("step", 5.0), ("done", True), ("nothing", None)}
    assert tensors == []


def test_gradients_are_not_written_to_and_not_kept() -> None:
    _, _, native, ours = pair("SGD", lr=0.1)
    gradients = parameters(3)
    copies = [gradient.clone() for gradient in gradients]
    norm = native.step(gradients, 0.5)
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(copies)))
    assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True))
    assert all(parameter.grad is None for parameter in ours)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_gradients_in_any_layout(layout: str) -> None:
    """Fused kernels read memory as it lies: what a program gives out may lie otherwise than the parameter."""
    dense = torch.randn(4, 3, dtype=torch.float64)
    gradient = {
        "transposed": dense.t().contiguous().t(),
        "expanded": dense[:1].expand(4, 3),
        "sliced": torch.stack([dense, dense], 1)[:, 0],
    }[layout]
    for kind in ("Adam", "SGD", "Adagrad"):
        one, other = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
        for parameter, each in ((one, gradient), (other, gradient.contiguous())):
            NativeOptimizer(OptimizerSpec(kind, (((0,), {"lr": 0.1}),), (1,)), [parameter], []).step([each], 0.0)
        assert torch.equal(one, other)


def test_clipping_is_that_of_torch() -> None:
    reference, theirs, native, ours = pair("SGD", lr=0.1)
    gradients = parameters(5)
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    reference.step()
    assert native.step(gradients, 0.7) == pytest.approx(float(expected), rel=1e-14)
    assert_alike(theirs, ours)


def test_bytes_of_the_state_are_known_after_the_first_step() -> None:
    _, _, native, _ = pair("Adam")
    assert native.charged_bytes == 0
    native.step(parameters(1), 0.0)
    assert native.charged_bytes == 3 * (2 * 4 * 3 * 8 + 4)


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec("LBFGS", (((0,), {"lr": 0.1}),), (1,)),
        OptimizerSpec("SparseAdam", (((0,), {"lr": 0.1}),), (1,)),
        OptimizerSpec("Optimizer", (((0,), {"lr": 0.1}),), (1,)),
        OptimizerSpec("lr_scheduler", (((0,), {"lr": 0.1}),), (1,)),
        OptimizerSpec("__class__", (((0,), {}),), (1,)),
        OptimizerSpec("SGD", (((0,), {"speed": 1.0}),), (1,)),
        OptimizerSpec("SGD", (((0,), {"lr": 0.1}), ((0,), {"lr": 0.1})), (1,)),
        OptimizerSpec("SGD", (), (1,)),
        OptimizerSpec(("SGD", "LBFGS"), (((0,), {"lr": 0.1}), ((), {"lr": 0.1})), (1,)),
        OptimizerSpec(("SGD", "Adam"), (((0,), {"lr": 0.1}),), (1,)),
        OptimizerSpec(("SGD", "Adam"), (((0,), {"lr": 0.1}), ((0,), {"lr": 0.1})), (1,)),
        OptimizerSpec(("SGD", "Adam"), (((0,), {"lr": 0.1}), ((), {"momentum": 0.1})), (1,)),
        OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,), delay=("predict", "none")),
        OptimizerSpec(("Adam", "Adagrad"), (((0,), {"lr": 0.1}), ((), {"lr": 0.1})), (1,), delay=("both", "predict")),
    ],
    ids=lambda spec: f"{spec.name} {spec.groups}",
)
def test_optimizers_that_are_refused(spec: OptimizerSpec) -> None:
    with pytest.raises(WireError):
        NativeOptimizer(spec, parameters()[:1], [])


@pytest.mark.parametrize(
    ("key", "state"),
    [
        ("exp_avg", torch.zeros(1, dtype=torch.float64)),
        ("exp_avg_sq", torch.zeros(4, 2, dtype=torch.float64)),
        ("exp_avg", torch.zeros(4, 3)),
        ("step", torch.zeros(4, 3)),
    ],
)
def test_state_of_a_fused_kernel_matches_its_parameter(key: str, state: Tensor) -> None:
    """Fused kernels take as many elements from each tensor as the parameter has."""
    entry = StateEntry(0, key, spec_of(state))
    spec = OptimizerSpec("Adam", (((0,), {"lr": 0.1, "fused": True}),), (1,), (entry,))
    with pytest.raises(WireError, match=f"state '{key}' of the optimizer is"):
        NativeOptimizer(spec, parameters()[:1], [state])


def test_a_parameter_with_gaps_has_no_fused_kernel() -> None:
    row = torch.zeros(3)
    for parameter, fused in ((row, True), (row.expand(4, 3), None), (torch.zeros(3, 4)[:, :2], None)):
        spec = OptimizerSpec("Adam", (((0,), {"lr": 0.1, "fused": True}),), (1,))
        assert NativeOptimizer(spec, [parameter], []).groups[0]["fused"] is fused


LENGTHS = (101, 3, 64)
"""Vectors of any processor and a rest, a rest alone, vectors alone."""

ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 8, torch.float16: 16}
"""What the plain kernel and ours may be apart, in units of the last place of 1."""


def rounded(numbers: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [number.to(dtype) for number in numbers]


def descents(kind: str, dtype: torch.dtype, *, fused: bool) -> tuple[list[Tensor], ...]:
    """Return where parameters start, and where plain torch, ours and torch in float64 come to in a few steps."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(8, length) for length in LENGTHS] if kind == "Muon" else [(length,) for length in LENGTHS]
    start = rounded([torch.randn(shape, generator=generator) for shape in shapes], dtype)
    plain = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    wide = [torch.nn.Parameter(tensor.double().clone()) for tensor in start]
    ours = [tensor.clone() for tensor in start]
    made = getattr(torch.optim, kind)
    lr = {"Adadelta": 20.0, "Muon": 0.05, "ASGD": 0.05, "SGD": 0.05}.get(kind, 0.02)
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    if "eps" in made(plain).defaults and kind not in ("Adafactor", "Muon"):
        options["eps"] = 1e-3  # that of the default is 0 in float16, and divides by it
    reference, exact = made(plain, lr=lr, **options), made(wide, lr=lr, **options)
    (told,) = options_of(reference)
    told = {**told, "fused": True} if fused else told
    native = NativeOptimizer(OptimizerSpec(kind, (((0, 1, 2), told),), (1, 2, 3)), ours, [])
    signs = [torch.randn(shape, generator=generator).sign() for shape in shapes]
    for _ in range(4):
        gradients = rounded([sign * (0.5 + torch.rand(sign.shape, generator=generator) / 2) for sign in signs], dtype)
        for one, other, gradient in zip(plain, wide, gradients, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.double()
        reference.step()
        exact.step()
        native.step(gradients, 0.0)
    return start, [one.detach() for one in plain], ours, [one.detach() for one in wide]


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kind", [kind for kind in ALLOWED if hasattr(torch.optim, kind)])
def test_every_type_moves_as_in_plain_torch_and_as_far_as_in_float64(kind: str, dtype: torch.dtype) -> None:
    fusing = "fused" in getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    for fused in (False, True)[: 1 + fusing]:
        start, plain, ours, exact = descents(kind, dtype, fused=fused)
        tolerance = ROUNDINGS[dtype] * torch.finfo(dtype).eps
        for before, theirs, mine, right in zip(start, plain, ours, exact, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
            moved, should = mine.double() - before.double(), right - before.double()
            assert float((moved - should).norm() / should.norm()) < 0.4, "as far, and in that direction"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("kind", ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "Rprop", "SGD"])
def test_complex_parameters(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(6, dtype=dtype, generator=generator) for _ in range(3)]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    reference = getattr(torch.optim, kind)(theirs)
    ours = [tensor.clone() for tensor in start]
    native = NativeOptimizer(OptimizerSpec(kind, (((0, 1, 2), options_of(reference)[0]),), (1, 2, 3)), ours, [])
    for _ in range(3):
        gradients = [torch.randn(6, dtype=dtype, generator=generator) for _ in range(3)]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        reference.step()
        assert native.step(gradients, 0.5) == pytest.approx(float(norm))
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one.detach(), other)
    assert not torch.equal(ours[0], start[0])
