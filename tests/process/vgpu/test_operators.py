"""Operators that need more than to be handed on: what they share, what the worker chooses, what is told only once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

from onebox.vgpu.dispatch.registry import specials
from onebox.vgpu.runtime.context import current_context

DEVICES = 2
pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_is_that_of_the_worker_bit_for_bit(dtype: torch.dtype, masked: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 6, 8, dtype=dtype) for _ in range(3)]
    mask = torch.rand(6, 6) > 0.3 if masked else None
    found = []
    for device in ("cpu", "vgpu:0"):
        there = [tensor.clone().to(device).requires_grad_() for tensor in inputs]
        out = nn.functional.scaled_dot_product_attention(*there, attn_mask=None if mask is None else mask.to(device))
        assert device == "cpu" or "Flash" in type(out.grad_fn).__name__
        out.square().sum().backward()
        found.append([out.detach().cpu(), *(tensor.grad.cpu() for tensor in there if tensor.grad is not None)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_lazy_conjugates_are_views() -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    there = plain.to("vgpu:0")
    turned = there.conj()
    assert turned.is_conj()
    assert turned.imag.is_neg()
    assert turned.imag.tolist() == [-2.0, 4.0]
    turned.add_(1j)
    assert there.tolist() == [1 + 1j, 3 - 5j]
    assert turned.cpu().tolist() == [1 - 1j, 3 + 5j]
    assert (turned @ there).item() == torch.tensor([1 - 1j, 3 + 5j]).dot(torch.tensor([1 + 1j, 3 - 5j])).item()


def test_views_share_memory_as_far_as_pytorch_asks() -> None:
    there = torch.zeros(2, 3, device="vgpu:0")
    assert torch._C._is_alias_of(there, there.t())
    assert not torch._C._is_alias_of(there, there.clone())
    left, right = torch.randn(5, 4, 3), torch.randn(3, 2)
    out = torch.zeros(5, 4, 2, device="vgpu:0")
    torch.matmul(left.to("vgpu:0"), right.to("vgpu:0"), out=out)
    torch.testing.assert_close(out.cpu(), left @ right)


def test_the_rank_of_a_matrix_is_written_to_out() -> None:
    out = torch.zeros((), dtype=torch.int64, device="vgpu:0")
    assert torch.linalg.matrix_rank(torch.eye(5, device="vgpu:0"), out=out) is out
    assert out.item() == 5
    with torch.inference_mode():
        torch.linalg.matrix_rank(torch.eye(4, device="vgpu:0"), out=out)
    assert out.item() == 4


def test_what_an_output_lacks_it_gets_in_its_memory() -> None:
    source = torch.ones(300, device="vgpu:0")
    for _ in range(2):
        out, whole = torch.empty(0, device="vgpu:0"), torch.zeros(4, 4, device="vgpu:0")
        torch.cat([source, source], out=out)
        assert out.shape == (600,) and out.sum().item() == 600
        torch.add(torch.ones(4, 2, device="vgpu:0"), 1, out=whole[1])
        assert whole.tolist() == [[0] * 4, [2] * 4, [2] * 4, [0] * 4]


def test_an_output_that_shares_memory_is_refused_as_on_the_cpu() -> None:
    x = torch.ones(3, 3, device="vgpu:0")
    for inputs in ([x, x], [x, torch.ones(1, 3, device="vgpu:0")]):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            torch.cat(inputs, out=x).tolist()
    y = torch.ones(2, 3, device="vgpu:0")
    assert torch.maximum(y[0], y + 1, out=y[0]).tolist() == [[2, 2, 2], [2, 2, 2]]
    row = y[0]
    with pytest.raises(RuntimeError, match=r"output with shape \[3\] doesn't match the broadcast shape \[2, 3\]"):
        torch.maximum(row, y + 1, out=row).tolist()


def test_what_only_the_worker_knows_is_asked_once() -> None:
    module, image = nn.BatchNorm2d(7).eval().to("vgpu:0"), torch.randn(2, 7, 5, 5, device="vgpu:0")
    stream = current_context().queues[0]
    waits = []
    with torch.no_grad():
        for _ in range(3):
            before = stream.channel.waits
            module(image)
            waits.append(stream.channel.waits - before)
    assert waits == [1, 0, 0]


def test_random_states_are_kept_where_classes_of_tensors_are_passed_by() -> None:
    module = torch.get_device_module("vgpu")
    with no_dispatch():
        state = module.get_rng_state()
    first = torch.randn(5, device="vgpu:0")
    with no_dispatch():
        module.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.randn(5, device="vgpu:0").cpu())


def test_a_custom_operator_may_be_defined_again_and_takes_tensors_of_other_devices() -> None:
    there, here, other = torch.ones(3, device="vgpu:0"), torch.arange(3.0), torch.arange(3.0, device="vgpu:1")
    for factor in (2.0, 3.0):
        library = torch.library.Library("onebox_tests", "FRAGMENT")
        try:
            library.define("scaled(Tensor x, Tensor y) -> Tensor")
            kernel = lambda x, y, by=factor: x * by + y.to(x.device)  # noqa: E731
            library.impl("scaled", kernel, "CompositeExplicitAutograd")
            for y in (here, other, there):
                assert torch.equal(torch.ops.onebox_tests.scaled(there, y).cpu(), factor + y.cpu())
            assert "onebox_tests::scaled" not in specials, "a call of an operator that is gone may end the process"
        finally:
            library._destroy()
