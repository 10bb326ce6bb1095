"""Operators of PyTorch's database with tensors in every order of memory: as programs they compute what they compute
plainly, and their results lie as the trace says where the lowering relies on it."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from onebox.errors import OneboxError
from onebox.graph import Port
from onebox.graph.lower.layouts import FIXED, UNTRACED
from onebox.wire import overload
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from onebox.worker.sandbox.allow_list import pinned_names
from onebox.worker.sandbox.argument_checks import guarded
from tests.unit.graph.staged import trace

_PROFILE = settings.get_current_profile_name()
from torch.testing._internal import common_methods_invocations  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

settings.load_profile(_PROFILE)  # PyTorch's import loads one of its own, for all tests of this process

OPERATORS = {
    f"{one.name}{'.' * bool(one.variant_test_name)}{one.variant_test_name}": one
    for one in op_db
    if torch.float64 in one.dtypes and one.supports_autograd and not one.name.startswith("sparse.")
}

WRONG = {("median", "expanded"), ("nanmedian", "expanded"), ("native_group_norm", "expanded")}
"""Operators and layouts for which PyTorch itself reads memory outside of its tensors."""

LARGEST = 2000
"""Most elements of a tensor."""


def permuted(x: Tensor, *order: int) -> Tensor:
    """Return a copy whose dimensions lie in a given order, outermost first."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "transposed": lambda x: permuted(x, *reversed(range(x.dim()))),
    "channels last": lambda x: permuted(x, 0, *range(2, x.dim()), 1) if x.dim() > 2 else x,
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and len(x) else x,
}


@pytest.fixture(autouse=True)
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let random operators of the database draw other numbers with another seed, by which they are told."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))


def tier(place: int) -> list[Any]:
    """Return the mark of an operator: a hundredth is of the short tier, a 25th of that or the long one."""
    return [pytest.mark.soak] if place % 25 else [pytest.mark.long] if place % 100 else []


SOME = [pytest.param(name, marks=tier(place)) for place, name in enumerate(OPERATORS)]


def samples(name: str) -> list[Any]:
    """Return the sample of an operator that has most dimensions, if there is one."""
    operator = OPERATORS[name]
    torch.manual_seed(0)
    made = itertools.islice(operator.sample_inputs("cpu", torch.float64, requires_grad=True), 12)
    fitting = [one for one in made if all(t.numel() <= LARGEST for t in tensors_of(one))]
    return sorted(fitting, key=lambda one: -max((t.dim() for t in tensors_of(one)), default=0))[:1]


def tensors_of(sample: Any) -> list[Tensor]:
    return [one for one in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(one, Tensor)]


class Applied(nn.Module):
    """An operator of parameters in some layouts, and views of its results.

    Args:
        operator: The operator.
        sample: Its arguments.
        layouts: Names of layouts.
    """

    def __init__(self, operator: Any, sample: Any, layouts: list[str]) -> None:
        super().__init__()
        self.operator, self.layouts = operator, layouts
        self.arguments = sample.input, tuple(sample.args), dict(sample.kwargs)
        trained = [one for one in tensors_of(sample) if one.is_floating_point() or one.is_complex()]
        self.tensors = nn.ParameterList([nn.Parameter(one.detach().clone()) for one in trained])

    def forward(self, _: Tensor) -> Tensor:
        """Return a sum of all results, each element of which counts differently."""
        total = torch.zeros((), dtype=torch.float64)
        for layout in self.layouts:
            left = iter(self.tensors)

            def given(one: Tensor, left: Iterator[Tensor] = left, layout: str = layout) -> Tensor:
                return LAYOUTS[layout](next(left) if one.is_floating_point() or one.is_complex() else one)

            first, others, named = tree_map_only(Tensor, given, self.arguments)
            for made in tree_leaves(self.operator(first, *others, **named)):
                if isinstance(made, Tensor) and (made.is_floating_point() or made.is_complex()):
                    total = total + weighed(made)
        return total


def weighed(made: Tensor) -> Tensor:
    """Return a sum of the elements of a tensor with different weights, read through views."""
    made = torch.view_as_real(made) if made.is_complex() else made
    turned = made.transpose(0, -1) if made.dim() else made
    rows = torch.stack([made.flatten(), turned.reshape(-1), made.reshape(-1, 1).flatten()]).double()
    return (rows * torch.arange(1.0, rows.numel() + 1, dtype=torch.float64).cos().view(rows.shape)).sum()


def plainly(model: nn.Module, seed: int = 0) -> list[Tensor | None] | None:
    """Return the value and gradients of a model; ``None`` where PyTorch refuses it."""
    torch.manual_seed(seed)
    try:
        value = model(torch.zeros(1))
        return [value.detach(), *torch.autograd.grad(value, list(model.parameters()), allow_unused=True)]
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError):
        return None


def by_programs(model: nn.Module) -> list[Tensor | None]:
    """Return the value and gradients of a model by its programs, as a worker runs them."""
    traced = trace(model, lambda outputs, _: outputs, (torch.zeros(1), torch.zeros(1)), halves=False)
    made = traced.model.divide()
    given = {**traced.given, Port("weight", 0): torch.ones((), dtype=torch.float64)}
    for part in (made.forward, made.backward):
        assert part is not None
        with torch.inference_mode():
            tape = CompiledProgram(part.program, torch.device("cpu"))
            values = tape.run([given[port] for port in part.inputs], lambda _: None, WorkerProgress())
        given |= dict(zip(part.outputs, values, strict=True))
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    return [given[Port("result", 0)], *(given.get(Port("gradient", name)) for name in names)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOME)
def test_programs_compute_what_pytorch_computes_whatever_the_layout(name: str) -> None:
    compared = 0
    for sample in samples(name):
        layouts = [how for how in LAYOUTS if (name, how) not in WRONG]
        alone = {how: plainly(Applied(OPERATORS[name].op, sample, [how])) for how in layouts}
        model = Applied(OPERATORS[name].op, sample, [how for how, made in alone.items() if made is not None])
        expected, again = plainly(model), plainly(model, seed=1)
        if expected is None or again is None or not all(map(alike, expected, again)):
            continue  # refused, or random
        try:
            found = by_programs(model)
        except OneboxError:  # no program can have it
            continue
        assert all(map(alike, found, expected)), f"{found} instead of {expected}"
        compared += 1
    if not compared:
        pytest.skip("nothing to compare")


def alike(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        one = right if left is None else left
        return one is None or not one.any()
    return torch.allclose(left, right, rtol=1e-6, atol=1e-8, equal_nan=True)


# ---- strides


class Recorder(TorchDispatchMode):
    """Collects a few calls of each operator that programs may have."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []
        self._count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if name in pinned_names() and self._count[name] < 3 and given:
            self._count[name] += 1
            args_, kwargs_ = tree_map_only(Tensor, lambda one: one.detach().clone(), (args, kwargs))
            self.calls += [(name, args_, kwargs_), *wider(name, args_, kwargs_)]
        return func(*args, **kwargs)


def wider(name: str, args: Any, kwargs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a call of a pointwise operator with tensors of three dimensions."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.dim()]
    if not given or len({one.shape for one in given}) > 1 or given[0].dim() > 2 or not given[0].numel():
        return
    args, kwargs = tree_map_only(
        Tensor, lambda one: one.flatten().repeat(60)[:60].view(3, 4, 5) if one.dim() else one, (args, kwargs)
    )
    try:
        made = tree_leaves(overload(name)(*args, **kwargs))
    except (RuntimeError, IndexError, ValueError):
        return
    if all(isinstance(one, Tensor) and one.shape == (3, 4, 5) for one in made):
        yield name, args, kwargs


def variants(args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield arguments with all tensors, the first one, or all others in each layout."""
    for how, which in itertools.product(LAYOUTS.values(), ("all", "first", "others")):
        places = itertools.count()

        def given(one: Tensor, how: Any = how, which: str = which, places: Iterator[int] = places) -> Tensor:
            first = next(places) == 0
            return how(one) if which == "all" or (which == "first") == first else LAYOUTS["contiguous"](one)

        yield tree_map_only(Tensor, given, (args, kwargs))


def strides(made: Any) -> list[tuple[int, ...]]:
    """Return the strides of results, 0 where they do not matter."""
    return [
        tuple(step if size != 1 and one.numel() else 0 for size, step in zip(one.shape, one.stride(), strict=True))
        for one in tree_leaves(made)
        if isinstance(one, Tensor)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOME)
def test_results_lie_as_in_the_trace_where_the_lowering_relies_on_it(name: str) -> None:
    recorder = Recorder()
    for sample in samples(name):
        with recorder:
            plainly(Applied(OPERATORS[name].op, sample, ["contiguous"]))
    for called, *arguments in recorder.calls:
        operator = overload(called)
        run, fixed = guarded(operator, operator), set()
        for args, kwargs in variants(*arguments):
            try:
                real = strides(run(*args, **kwargs))
                with FakeTensorMode() as mode:
                    fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
                    traced = strides(operator(*fake_args, **fake_kwargs))
            except (RuntimeError, OneboxError, NotImplementedError):  # refused in this layout
                continue
            plain = all(one.is_contiguous() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
            elsewhere = not plain or operator is torch.ops.aten.max_unpool2d.default  # with dimensions of one element
            assert real == traced or (operator in UNTRACED and elsewhere), f"{called} of {arguments}"
            fixed.add(str(real))
        assert len(fixed) <= 1 or operator not in FIXED, called


def test_the_database_covers_what_programs_may_name() -> None:
    """The names above are not empty because PyTorch has changed them."""
    assert len(OPERATORS) > 400
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert samples("nn.functional.mse_loss")
