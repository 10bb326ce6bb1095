"""Version counters of tensors, by which autograd notices that a saved value was overwritten: those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

pytestmark = pytest.mark.usefixtures("pool")
DEVICES = 1

LENGTHS = {"split_sizes": [1, 1], "split_size": 1, "dim": 0}
NUMBERS: dict[str, Any] = {"number": 0.5, "float": 0.5, "bool": False, "int": 1, "List[number]": [0.5, 0.5]}


def list_writers() -> Iterator[OpOverload]:
    """Yield each operator of ATen that writes to a list of tensors."""
    for schema in torch._C._jit_get_all_schemas():
        written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        if schema.name.startswith("aten::") and any(str(one.type) == "List[Tensor]" for one in written):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            found = getattr(packet, schema.overload_name or "default", None)
            if found is not None:
                yield found


def arguments(function: OpOverload, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of an operator that writes to a list."""
    positional, named = [], {}
    for argument in function._schema.arguments:
        kind, name = str(argument.type), argument.name
        if kind == "List[Tensor]":
            shape: tuple[int, ...] = (2,) if "unbind" in function.name() else (1, 2) if name == "out" else (2, 2)
            shape = () if name == "state_steps" else shape
            count = 0 if name == "max_exp_avg_sqs" else 2  # one that is given has to be of use
            value: Any = [torch.ones(shape, device=device) for _ in range(count)]
        elif kind == "Tensor":
            shape = (2,) if name == "scalars" else (2, 2) if name == "self" else ()
            value = torch.ones(shape, device=device)
        elif argument.has_default_value() or kind.startswith("Optional"):
            continue
        else:
            value = LENGTHS.get(name, NUMBERS.get(kind))
        if argument.kwarg_only:
            named[name] = value
        else:
            positional.append(value)
    return positional, named


def versions(function: OpOverload, device: str) -> list[int] | type[Exception]:
    """Return the versions of all tensors among an operator's arguments after a call, or the class of its error."""
    args, kwargs = arguments(function, device)
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error)
    given = [value if isinstance(value, list) else [value] for value in (*args, *kwargs.values())]
    return [one._version for values in given for one in values if isinstance(one, Tensor)]


def test_operators_on_lists_raise_versions_as_on_the_cpu() -> None:
    compared = 0
    for function in list_writers():
        there = versions(function, "vgpu:0")
        if there is NotImplementedError:  # no worker has it
            continue
        here = versions(function, "cpu")
        assert there == here, function
        compared += isinstance(here, list)
    assert compared > 80


@pytest.mark.parametrize("inference", [False, True])
def test_a_view_in_a_list_has_the_version_of_its_base(inference: bool) -> None:
    found = []
    for device in ("cpu", "vgpu:0"):
        base = torch.zeros(2, 3, device=device)
        row, alias, apart = base[0], base.detach(), base.clone()
        with torch.inference_mode(inference):
            torch._foreach_add_([row, base.t(), apart], 1.0)
            torch.unbind_copy(base, out=[apart[0], apart[1]])
        found.append([one._version for one in (base, row, alias, apart)])
    assert found[0] == found[1] == [2, 2, 2, 3]


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.Rprop,
]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_backward_through_weights_that_a_step_overwrote_is_an_error(foreach: bool | None) -> None:
    for optimizer in OPTIMIZERS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).to("vgpu:0")
        made = optimizer(model.parameters(), lr=0.1, foreach=foreach)
        x = torch.ones(2, 3, device="vgpu:0")
        first, second = model(x).sum(), model(x * 2).sum()
        first.backward()
        made.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


def test_a_tensor_that_gets_other_memory_or_another_shape_leaves_its_aliases_alone() -> None:
    found = []
    for device in ("cpu", "vgpu:0"):
        base, other = torch.arange(3.0, device=device), torch.ones(3, device=device)
        alias = base.detach()
        torch.cat([other, other], out=base.resize_(0))
        second = other.detach()
        other.set_(torch.zeros(3, device=device))  # type: ignore[call-overload]
        found.append([one.tolist() for one in (base, alias, other, second)])
    assert found[0] == found[1]
