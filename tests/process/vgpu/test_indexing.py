"""Indexing and views on a virtual device are what they are on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.process.vgpu.beside import HERE, Case, beside, fails_beside, listed, normal, waits

WORKING: list[Case] = []
FAILING: list[Case] = []
works, fails = listed(WORKING), listed(FAILING)


pytestmark = pytest.mark.usefixtures("pool")


def indices(device: str) -> dict[str, Any]:
    """Return ways to index a tensor of 4 x 3."""

    def there(*values: Any) -> Tensor:
        return torch.tensor(values, device=device)

    return {
        "number": 1,
        "from the end": -1,
        "slice": slice(1, 3),
        "steps": (slice(None, None, 2), slice(1, None)),
        "none": (None, slice(None), None),
        "ellipsis": (..., 0),
        "list": [0, 2],
        "lists": ([0, 2], [1, 1]),
        "mask of a row": there(True, False, True, False),
        "numbers": there(3, 0, -1),
        "numbers of columns": (slice(None), there(0, 1)),
        "numbers of both": (there([0], [1]), there(0, 2)),
        "slice and numbers": (slice(1, None), there(0, 2)),
        "numpy's number": np.int64(1),
        "numpy's numbers": np.array([0, 2]),
        "numpy's mask": np.array([True, False, False, True]),
        "numbers of the host": torch.tensor([0, 1]),
        "mask of the host": torch.tensor([True, False, True, False]),
        "a tensor's number": torch.tensor(2, device=device),
        "range": range(2),
        "true": True,
        "false": False,
        "int32": there(0, 1).int(),
        "nothing": [],
        "an empty slice": slice(2, 1),
    }


@pytest.mark.parametrize("name", list(indices("cpu")))
def test_what_is_read_and_written_by_an_index_is_that_of_the_cpu(name: str) -> None:
    def case(device: str) -> Any:
        index = indices(device)[name]
        x = normal(4, 3, device=device, requires_grad=True)
        made = x[index]
        made.pow(2).sum().backward()
        y, z = x * 1, normal(4, 3, device=device)
        y[index] = 5
        y.pow(2).sum().backward()
        z[index] = normal(*made.shape, device=device)
        z[index] += 1
        z[index] *= torch.tensor(2.0)
        return made, x.grad, y, z

    beside(case)


@works
def masks(device: str) -> Any:
    x = normal(4, 3, device=device)
    made = [x[x > 0], x[x > 0] * 2]
    x[x > 1] = 0
    x[x < 0] = x[x < 0] * 3
    x[(x > 0)[:, 0]] -= 1
    x[x < -1] = torch.tensor(7.0, dtype=torch.float64)
    return x, made, torch.where(x > 0), x.masked_fill(x > 0, torch.tensor(2.0)), x.masked_scatter(x > 0, x)


@works
def scattered(device: str) -> Any:
    x, s = normal(4, 3, device=device), normal(2, 3, device=device)
    i = torch.tensor([[0, 1, 2], [2, 0, 1]], device=device)
    rows, twice = torch.tensor([0, 2], device=device), torch.tensor([0, 0], device=device)
    y = x.index_put((twice, twice), torch.ones((), dtype=torch.float64), accumulate=True)
    x.index_put_((twice,), s, accumulate=True)
    return [
        *(x, y, x.scatter(0, i, s), x.scatter_add(0, i, s), x.gather(0, i), x.index_add(0, rows, s, alpha=2)),
        *(x.index_copy(0, rows, s), x.index_fill(1, rows, 3.0), x.take(rows), x.put(rows, s[0, :2])),
        *(x.scatter_reduce(0, i, s, "amax"), x.select_scatter(s[0], 0, 1)),
        *(torch.take_along_dim(x, x.argsort(0), 0), x.slice_scatter(s, 0, 1, 3), x.index_select(1, rows)),
    ]


@works
def views_written_to(device: str) -> Any:
    x = normal(4, 6, device=device)
    x.view(2, 2, 6)[0, 1] *= 2
    x.t()[0] += 1
    left, right = x.chunk(2, 1)
    left.sub_(1)
    right.copy_(left)
    x.unfold(0, 2, 2)[0].zero_()
    x.narrow(1, 0, 2).fill_(3)
    x.diagonal().add_(5)
    x.unsqueeze(0).squeeze().mul_(2)
    x.flatten()[3] = 8
    x.permute(1, 0)[2] = 1
    x.movedim(0, 1)[1, 1] = 33
    torch.split(x, [1, 3])[1][0] = 77
    x.as_strided((2,), (7,)).mul_(2)
    for number, row in enumerate(x):
        row.add_(number)
    x.unflatten(1, (2, 3))[:, 1] -= 1
    return x, x.real, x.T.contiguous()


@works
def other_looks_of_the_same_tensor(device: str) -> Any:
    x = normal(4, 1, device=device)
    alias = x.detach()
    x.squeeze_()
    x.unsqueeze_(0)
    x.t_()
    x.mul_(2)
    y = normal(2, device=device)
    y.resize_(4)
    y[2:] = 1
    y.resize_(2, 2).add_(1)
    z = torch.empty(0, dtype=torch.float64, device=device)
    z.set_(normal(5, device=device))  # type: ignore[call-overload]
    return x, alias, y, z, y.untyped_storage().nbytes()


@works
def results_in_tensors_of_other_shapes(device: str) -> Any:
    """An operator lays out what it resizes as what it reads."""
    turned = normal(3, 2, device=device).t()
    made: list[Any] = []
    calls: list[tuple[Any, ...]] = [(torch.sin,), (torch.cumsum, 0), (torch.clamp, 0, 1), (torch.add, 1)]
    for compute, *others in calls:
        for out in (normal(0, device=device), normal(3, device=device), normal(9, device=device)):
            with warnings.catch_warnings(action="ignore"):
                compute(turned, *others, out=out)
            made += [out, out[0], out.stride(), out.as_strided((2,), (1,))]
    return made


@works
def complex_views(device: str) -> Any:
    z = torch.view_as_complex(normal(3, 2, device=device))
    z.real.mul_(2)
    z.imag[0] = 5
    w = z.conj()
    w[0].fill_(1 + 1j)
    w.mul_(2j)
    torch.view_as_real(z)[1] += 1
    negative = z.conj().imag
    negative[0] = 3
    return z, w, negative, w.is_conj(), negative.is_neg(), z.tolist(), z[0].item(), z.mH if z.dim() > 1 else 0


@works
def results_given_a_place(device: str) -> Any:
    x, out = normal(3, device=device), torch.empty(3, dtype=torch.float64, device=device)
    values, places = (
        torch.empty(0, dtype=torch.float64, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
    )
    part, low = torch.zeros(6, dtype=torch.float64, device=device), torch.empty(3, device=device)
    torch.add(x, 1, out=out)
    first = out.clone()
    torch.max(normal(2, 3, device=device), 1, out=(values, places))
    torch.sin(x, out=part[1:4])
    torch.add(x, 1, out=low)
    return first, torch.mul(x, x, out=out) is out, out, values, places, part, low


@fails
def truth_of_several(device: str) -> Any:
    return bool(normal(3, device=device))


@fails
def steps_back(device: str) -> Any:
    return normal(3, device=device)[::-1]


@fails
def too_many_indices(device: str) -> Any:
    return normal(3, device=device)[0, 0]


@fails
def a_number_that_is_too_large(device: str) -> Any:
    return normal(3, device=device)[7]


@fails
def a_mask_of_another_shape(device: str) -> Any:
    return normal(3, device=device)[torch.tensor([True, False], device=device)]


@fails
def a_fraction_for_an_index(device: str) -> Any:
    return normal(3, device=device)[torch.ones(2, device=device)]


@fails
def values_that_do_not_fit(device: str) -> Any:
    normal(4, 3, device=device)[0] = normal(4, device=device)


@fails
def views_across_gaps(device: str) -> Any:
    return torch.ones(3, 4, device=device).t().view(12)


@fails
def length_of_a_number(device: str) -> Any:
    return len(torch.tensor(1, device=device))


@fails
def a_place_of_another_type(device: str) -> Any:
    torch.add(normal(3, device=device), 1, out=torch.empty(3, dtype=torch.int64, device=device))


@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_mistakes_are_told_as_on_the_cpu(case: Case) -> None:
    fails_beside(case)


def test_a_number_that_only_the_worker_sees_is_told_when_somebody_looks() -> None:
    def written(device: str) -> Any:
        x = normal(4, device=device)
        x[1:][torch.tensor([9], device=device)] = 0
        return x.sum().item()

    fails_beside(written, late=True)
    fails_beside(lambda device: torch.arange(3, device=device).div_(2).tolist(), late=True)  # in torch 2.13 at once
    fails_beside(lambda device: normal(4, device=device)[torch.tensor([9], device=device)].tolist(), late=True)


def test_indexing_with_numbers_waits_for_nothing() -> None:
    x, places = torch.randn(8, 3, device=HERE), torch.randint(0, 8, (4,), device=HERE)
    before = waits()
    batch = x[places]
    batch[places[:2] % 4] += x[torch.tensor([1, 2])]
    x[places] = batch
    x[x > 0] = 0
    assert waits() == before
    assert x.max().item() <= 0
