"""What is done with modules works on a virtual device as on the CPU."""

from __future__ import annotations

import copy
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.process.vgpu.beside import HERE, Case, beside, fails_beside, fill, listed, normal

WORKING: list[Case] = []
FAILING: list[Case] = []
works, fails = listed(WORKING), listed(FAILING)


pytestmark = pytest.mark.usefixtures("pool")


@works
def loading(device: str) -> Any:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    whole = fill(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).to(device)
    empty = copy.deepcopy(module).to_empty(device=device)
    empty.load_state_dict(whole.state_dict())
    module.load_state_dict(whole.state_dict(), assign=True)
    module(normal(2, 4, device=device)).pow(2).sum().backward()
    return module.state_dict(), module[0].weight.grad, empty.float().state_dict()


@works
def buffers(device: str) -> Any:
    module: Any = nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("passing", torch.zeros(2), persistent=False)
    module.register_buffer("none", None)
    module.leaves = nn.ParameterList([nn.Parameter(torch.ones(1))])
    module.to(device)
    module.kept += 1
    module.passing = module.passing + 3
    shallow, deep = copy.copy(module), copy.deepcopy(module)
    shallow.kept.add_(1)
    deep.kept.zero_()
    return list(module.state_dict()), module.kept, module.passing, shallow.kept is module.kept, deep.kept


@works
def other_types(device: str) -> Any:
    module = fill(nn.Linear(4, 3)).to(device)
    weight = module.weight
    kinds = [getattr(module, kind)().weight.dtype for kind in ("half", "double", "bfloat16", "float")]
    return kinds, module.weight is weight, module.to(torch.float16)(torch.ones(1, 4, device=device).half())


@works
def normalised_and_pruned(device: str) -> Any:
    module, rows = fill(nn.Linear(4, 3)).to(device), normal(2, 4, device=device)
    parametrizations.weight_norm(module)
    module(rows).pow(2).sum().backward()
    grads = [each.grad for each in module.parameters()]
    parametrize.remove_parametrizations(module, "weight")
    prune.l1_unstructured(module, "weight", 0.4)
    prune.ln_structured(module, "weight", 0.3, 2, 0)
    mask = module.weight_mask
    prune.remove(module, "weight")
    square = parametrizations.orthogonal(fill(nn.Linear(4, 4, bias=False)).to(device))
    square(rows).pow(3).sum().backward()
    return grads, mask, module.state_dict(), square.weight, [each.grad for each in square.parameters()]


@works
def gradients_clipped(device: str) -> Any:
    module, made = fill(nn.Linear(4, 3)).to(device), []
    leaves = list(module.parameters())
    for clip in (
        lambda: nn.utils.clip_grad_value_(leaves, 0.5),
        lambda: nn.utils.clip_grad_norm_(leaves, 0.7, norm_type=1.0),
        lambda: nn.utils.clip_grad_norm_(leaves, 0.7, norm_type=float("inf")),
        lambda: nn.utils.clip_grad_norm_(leaves, 0.7, foreach=False),
    ):
        module.zero_grad()
        module(normal(2, 4, device=device)).pow(2).sum().backward()
        made += [clip(), *[each.grad for each in leaves]]
    flat = nn.utils.parameters_to_vector(leaves)
    nn.utils.vector_to_parameters(flat * 2, leaves)
    return made, flat, module.state_dict()


@fails
def modules_without_elements(device: str) -> Any:
    nn.Linear(2, 2, device="meta").to(device)


def tied_weights_take_room_once(device: str) -> Any:
    module: Any = fill(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)))
    module[1].weight = module[0].weight
    file = io.BytesIO()
    torch.save(module.to(device).state_dict(), file)
    size = file.tell()
    with torch.no_grad():
        module[0].weight.mul_(2)
    again = io.BytesIO()
    torch.save(module.state_dict(), again)
    loaded = [torch.load(io.BytesIO(each.getvalue()), weights_only=True) for each in (file, again)]
    return size // 2048, again.tell() // 2048, loaded


def test_tied_weights_take_room_in_a_file_once() -> None:
    beside(tied_weights_take_room_once)


def test_other_processes_get_no_tensors() -> None:
    for what in (torch.ones(2, device=HERE), nn.Linear(2, 2).to(HERE)):
        with pytest.raises(NotImplementedError, match=r"cannot be sent to another process: .* send tensor\.cpu"):
            ForkingPickler.dumps(what)


@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_mistakes_are_told_as_on_the_cpu(case: Case) -> None:
    fails_beside(case)
