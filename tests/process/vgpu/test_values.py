"""Types, conversions and copies on a virtual device are what they are on the CPU."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.process.vgpu.beside import Case, beside, listed, normal

WORKING: list[Case] = []
works = listed(WORKING)


pytestmark = pytest.mark.usefixtures("pool")


@works
def types(device: str) -> Any:
    i = torch.arange(3, device=device)
    f = torch.ones(3, device=device)
    h, b = f.half(), i > 1
    return [
        *(i + 1.5, i / 2, i // 2, i % 2, i**2, 2**i, 2 / (i + 1), i * True, 7 // (i + 1), 7 % (i + 1), 1 << i),
        *(f + torch.tensor(1, dtype=torch.float64), f * np.float64(2), i + torch.tensor(2.5), (1 + 2j) * f, h + f),
        *(b + 1, b + b, ~b, i & 1, i | 4, i ^ 3, i >> 1, i + h, i.float().div(2, rounding_mode="floor"), -i),
        *(torch.result_type(i, 1.5), torch.clamp(i, max=1.5), torch.float_power(i, 2), f.view(torch.int32)),
        *(torch.where(b, 1.0, 0.0), torch.where(b, f, 0.0), torch.where(b, 1, f), torch.where(b, f, torch.tensor(2.0))),
    ]


@works
def what_python_asks(device: str) -> Any:
    x = normal(3, device=device)
    first, *others = x
    index = torch.tensor(1, device=device)
    return [
        *(float(x[0]), int(x[1]), bool(x[2] > 0), len(x), [float(each) for each in x], x[0] in x, f"{x[0]:.3f}"),
        *(x.tolist(), sum(x), max(x), x.element_size(), x.nbytes, x.itemsize, [1, 2, 3][index], range(3)[index]),
        *(len({x, first, x}), weakref.ref(x)() is x, any(each is x for each in [first, x]), others),
        *(
            x.to(device) is x,
            x.double() is x,
            x.contiguous() is x,
            torch.as_tensor(x) is x,
            x.to(device, copy=True) is x,
        ),
        *(torch.equal(x, x), torch.allclose(x, x + 1e-9), bool(torch.empty(0, device=device).any())),
    ]


@works
def tensors_of_tensors(device: str) -> Any:
    one, other = torch.tensor(1.0, device=device), torch.tensor(2.5, device=device)
    return [
        *(torch.tensor([one, other]), torch.tensor([[one, 3.0], [other, 1]], device=device), torch.stack([one, other])),
        *(torch.as_tensor([1, 2], device=device), torch.tensor(np.arange(3), device=device), one.new_tensor([1, 2])),
        *(torch.as_tensor(np.ones(2), device=device), torch.asarray([1.0], device=device), one.new_full((2,), 3)),
    ]


@works
def copies(device: str) -> Any:
    x = normal(3, device=device, requires_grad=True)
    twin, both = copy.copy(x), copy.deepcopy({"a": x, "b": x})
    twin.data.add_(1)
    leaf = nn.Parameter(normal(2, device=device))
    again = pickle.loads(pickle.dumps({"a": x, "b": [x, leaf]}))
    whole = copy.copy(leaf)
    return [
        *(x, twin, twin.requires_grad, both["a"] is both["b"], again["a"] is again["b"][0], again["a"].requires_grad),
        *(
            isinstance(again["b"][1], nn.Parameter),
            isinstance(whole, nn.Parameter),
            whole.data_ptr() == leaf.data_ptr(),
        ),
    ]


@works
def other_types_and_places(device: str) -> Any:
    whole, half = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(2, 3, device=device)
    whole.copy_(torch.tensor([1.7, 2.2, -1.5]))
    half.copy_(torch.arange(3))
    host = torch.zeros(3, 3)
    host[1] = normal(3, device=device)
    return whole, half, host


@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_are_those_of_the_cpu(case: Case) -> None:
    beside(case)
