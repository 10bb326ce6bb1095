"""Sequences of operators that repeat and change give what PyTorch gives without a virtual device, to the last bit.

Programs are made of operators, views and updates in place over four matrices; some parts are left out in some of their
repetitions, so that some batches of calls occur again and others do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import onebox
from onebox.pool import Pool
from onebox.vgpu.runtime import command_queue as stream_module
from onebox.wire.protocol.eager import Replay

SIZE = 4
CALLS = 6
"""Calls of a batch here, so that a program has many."""

Slots = list[Tensor]
Part = tuple[str, int, int, int, float]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[onebox.Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "CALLS", CALLS)
        with onebox.open("cpu*2", threads=1) as opened:
            yield opened


def gradient(x: Tensor, y: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    (torch.tanh(leaf) @ y.detach()).square().mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def upload(x: Tensor, number: float) -> Tensor:
    host = torch.arange(SIZE * SIZE, dtype=x.dtype).reshape(SIZE, SIZE) * number
    made = host.to(x.device, copy=True)
    host.zero_()  # what is on its way must not see this
    return made


def elsewhere_and_back(x: Tensor) -> Tensor:
    return x.to("vgpu:1").to("vgpu:0") if x.device.type == "vgpu" else x.clone()


def at(x: Tensor, row: int) -> Tensor:
    return torch.tensor([row, SIZE - 1 - row]).to(x.device)


KINDS: dict[str, Callable[[Slots, int, int, int, float], Tensor]] = {
    "add": lambda s, i, j, k, f: torch.add(s[i], s[j], alpha=f),
    "scale": lambda s, i, j, k, f: s[i] * f,
    "matmul": lambda s, i, j, k, f: torch.tanh(s[i] @ s[j]),
    "addmm": lambda s, i, j, k, f: torch.tanh(torch.addmm(s[k], s[i], s[j], beta=f)),
    "transpose": lambda s, i, j, k, f: s[i].t(),
    "alias": lambda s, i, j, k, f: s[i].view_as(s[i]) if s[i].is_contiguous() else s[i].detach(),
    "flip": lambda s, i, j, k, f: s[i].flip(0),
    "cat": lambda s, i, j, k, f: torch.cat([s[i][:2], s[j][2:]]),
    "split": lambda s, i, j, k, f: torch.stack(s[i].unbind(1)),
    "sort": lambda s, i, j, k, f: s[i].sort(dim=k % 2).values,
    "norm": lambda s, i, j, k, f: s[i] - s[i].max(dim=1, keepdim=True).values,
    "where": lambda s, i, j, k, f: torch.where(s[i] > f, s[i], s[j]),
    "index": lambda s, i, j, k, f: s[i][[1, 0, 3, 2]],
    "move": lambda s, i, j, k, f: elsewhere_and_back(s[i]),
    "upload": lambda s, i, j, k, f: upload(s[i], f),
    "gradient": lambda s, i, j, k, f: gradient(s[i], s[j]),
}
"""What makes a matrix out of others."""

UPDATES: dict[str, Callable[[Slots, int, int, int, float], object]] = {
    "add in place": lambda s, i, j, k, f: s[k].add_(s[i].clone(), alpha=f),
    "row in place": lambda s, i, j, k, f: s[k][i].mul_(f),
    "column in place": lambda s, i, j, k, f: s[k].select(1, i).add_(f),
    "block in place": lambda s, i, j, k, f: s[k][1:3, 1:3].copy_(s[i][:2, 2:].clone()),
    "zero in place": lambda s, i, j, k, f: s[k].diagonal().zero_(),
    "put": lambda s, i, j, k, f: s[k].index_put_((at(s[k], i),), torch.full((), f, dtype=s[k].dtype)),
    "swap in place": lambda s, i, j, k, f: s[k].t_(),
    "copy from host": lambda s, i, j, k, f: s[k].copy_(torch.full((SIZE, SIZE), f, dtype=s[k].dtype)),
}
"""What changes a matrix, and whatever shares its memory."""

numbers = st.sampled_from([-1.5, -0.5, 0.25, 0.5, 1.0, 2.0])
slots = st.integers(0, SIZE - 1)
parts = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS | UPDATES)), slots, slots, slots, numbers), min_size=1, max_size=16
)


def run(device: str, program: list[Part], left_out: list[int], reads: list[int]) -> list[list[list[float]]]:
    """Run a program several times and return what was read, then all matrices.

    Args:
        device: Where.
        program: Its parts.
        left_out: For each repetition the part that is left out, if there is such.
        reads: Repetitions after which a matrix is read.
    """
    start = torch.linspace(-1, 1, SIZE**3, dtype=torch.float64).reshape(SIZE, SIZE, SIZE)
    values = [each.clone() for each in start.to(device)]
    found = []
    for repetition, out in enumerate(left_out):
        for number, (kind, i, j, k, f) in enumerate(program):
            if number != out:
                if kind in UPDATES:
                    UPDATES[kind](values, i, j, k, f)
                else:
                    values[k] = KINDS[kind](values, i, j, k, f)
        if repetition in reads:
            found.append(values[repetition % SIZE].tolist())
        values = [torch.clamp(each, -4, 4) for each in values]
    return found + [each.tolist() for each in values]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    program=parts,
    left_out=st.lists(st.one_of(st.just(-1), st.integers(0, 15)), min_size=3, max_size=7),
    reads=st.lists(st.integers(0, 6), max_size=3),
)
def test_sequences_that_repeat_and_change(program: list[Part], left_out: list[int], reads: list[int]) -> None:
    expected = run("cpu", program, left_out, reads)
    assert run("vgpu:0", program, left_out, reads) == expected


def test_batches_that_occur_again_are_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, post = Counter[int](), Pool.post

    def noted(pool: Pool, worker: int, instructions: Sequence[Any], *args: Any, **named: Any) -> Any:
        runs.update(each.tape for each in instructions if isinstance(each, Replay))
        return post(pool, worker, instructions, *args, **named)

    monkeypatch.setattr(Pool, "post", noted)
    program: list[Part] = [(kind, 0, 1, 2, 0.5) for kind in KINDS | UPDATES]
    run("vgpu:0", program, [-1] * 4, [])
    assert sum(times > 1 for times in runs.values()) > len(KINDS) // CALLS
