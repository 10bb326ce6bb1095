"""What the kernels of PyTorch check, values and overlaps of memory: refused on a virtual device as on the CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.usefixtures("pool")
DEVICES = 1

Case = Callable[[str], Any]
"""From a device to a result."""

NAN, INF = float("nan"), float("inf")


def ones(device: Any, *shape: int) -> Tensor:
    return torch.ones(shape, device=device)


def of(device: str, values: Any) -> Tensor:
    return torch.tensor(values, device=device)


def asserted(device: str, function: Any, *more: Any) -> None:
    function(of(device, 0.0), *more)


VALUES: Mapping[str, Case] = {
    "one_hot of a negative number": lambda d: F.one_hot(of(d, [-1, 2])),
    "one_hot of a negative number, with classes": lambda d: F.one_hot(of(d, [-1, 2]), 3),
    "one_hot of a large number": lambda d: F.one_hot(of(d, [4]), 3),
    "one_hot of no classes": lambda d: F.one_hot(of(d, [4]), 0),
    "one_hot of floats": lambda d: F.one_hot(of(d, [4.0]), 5),
    "one_hot of nothing": lambda d: F.one_hot(of(d, []).long()),
    "assertion": lambda d: asserted(d, torch._assert_async),
    "assertion with words": lambda d: asserted(d, torch._assert_async, "words of the script"),
    "functional assertion": lambda d: torch.ops.aten._functional_assert_async.msg(of(d, 0), "words", ones(d)),
    "assertion of sizes": lambda d: torch.ops.aten._assert_tensor_metadata(ones(d, 3), [2]),
    "embedding": lambda d: F.embedding(of(d, [5]), ones(d, 3, 2)),
    "negative embedding": lambda d: F.embedding(of(d, [-1]), ones(d, 3, 2)),
    "index": lambda d: ones(d, 3)[of(d, [3])],
    "index_put_": lambda d: ones(d, 3).index_put_((of(d, [3]),), of(d, 1.0)),
    "index_select": lambda d: ones(d, 3).index_select(0, of(d, [-1])),
    "index_add_": lambda d: ones(d, 3).index_add_(0, of(d, [3]), ones(d, 1)),
    "index_copy_": lambda d: ones(d, 3).index_copy_(0, of(d, [3]), ones(d, 1)),
    "gather": lambda d: ones(d, 3).gather(0, of(d, [-1])),
    "scatter": lambda d: ones(d, 3).scatter(0, of(d, [3]), 1.0),
    "scatter_reduce": lambda d: ones(d, 3).scatter_reduce(0, of(d, [4]), ones(d, 1), "amax"),
    "take": lambda d: ones(d, 3).take(of(d, [3])),
    "put_": lambda d: ones(d, 3).put_(of(d, [3]), ones(d, 1)),
    "masked_scatter_": lambda d: ones(d, 3).masked_scatter_(of(d, [True, True, False]), ones(d, 1)),
    "target": lambda d: F.cross_entropy(ones(d, 2, 3), of(d, [0, 3])),
    "target with smoothing": lambda d: F.cross_entropy(ones(d, 2, 3), of(d, [0, -1]), label_smoothing=0.1),
    "binary target": lambda d: F.binary_cross_entropy(of(d, [1.5]), of(d, [1.0])),
    "margin": lambda d: F.multi_margin_loss(ones(d, 2, 3), of(d, [0, 3])),
    "multinomial of a negative number": lambda d: torch.multinomial(of(d, [-1.0, 2.0]), 1),
    "multinomial of no number": lambda d: torch.multinomial(of(d, [NAN, 2.0]), 1),
    "multinomial of zeros": lambda d: torch.multinomial(of(d, [0.0, 0.0]), 1),
    "bernoulli": lambda d: torch.bernoulli(of(d, [2.0])),
    "bernoulli_": lambda d: ones(d, 1).bernoulli_(of(d, [2.0])),
    "normal": lambda d: torch.normal(of(d, [0.0]), of(d, [-1.0])),
    "poisson": lambda d: torch.poisson(of(d, [-1.0])),
    "bincount": lambda d: torch.bincount(of(d, [-1])),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)),
    "inverse": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
    "solve": lambda d: torch.linalg.solve(torch.zeros(2, 2, device=d), ones(d, 2, 1)),
    "eigh": lambda d: torch.linalg.eigh(torch.full((2, 2), NAN, device=d)),
    "division of integers": lambda d: of(d, [1]) // of(d, [0]),
    "remainder of integers": lambda d: of(d, [1]) % of(d, [0]),
    "power of integers": lambda d: of(d, [2]) ** -1,
    "quantile": lambda d: torch.quantile(ones(d, 2), 2.0),
    "kthvalue": lambda d: torch.kthvalue(ones(d, 2), 3),
    "order of searchsorted": lambda d: torch.searchsorted(ones(d, 2), ones(d, 1), sorter=of(d, [0, 5])),
    "weights of cov": lambda d: torch.cov(ones(d, 2, 3), fweights=of(d, [-1, 1, 1])),
}

IN_OTHER_WORDS: Mapping[str, Case] = {
    "bag of embeddings": lambda d: F.embedding_bag(of(d, [5]), ones(d, 3, 2), of(d, [0])),
    "offsets of bags": lambda d: F.embedding_bag(of(d, [1, 2]), ones(d, 3, 2), of(d, [1])),
    "lengths of ctc_loss": lambda d: F.ctc_loss(ones(d, 5, 1, 3).log_softmax(2), of(d, [[1, 2]]), (6,), (2,)),
    "histc": lambda d: torch.histc(of(d, [NAN, 1.0])),
    "repeat_interleave": lambda d: ones(d, 2).repeat_interleave(of(d, [1, -1])),
    "eig": lambda d: torch.linalg.eig(torch.full((2, 2), NAN, device=d)),
    "max_unpool2d": lambda d: F.max_unpool2d(ones(d, 1, 1, 1, 1), of(d, [[[[9]]]]), 2),
    "quantiles": lambda d: torch.quantile(ones(d, 2), of(d, [2.0])),
    "arange": lambda d: torch.arange(0, INF, device=d),
}
"""Checks that a worker makes itself, or where another operator fails first."""


def row(device: str) -> Tensor:
    return torch.arange(6.0, device=device)


def wide(device: str) -> Tensor:
    """A tensor whose rows lie at one place."""
    return torch.zeros(1, 3, device=device).expand(2, 3)


def zero(device: Any) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def of_row(function: Callable[[Tensor], Any]) -> Case:
    return lambda device: function(row(device))


def into(function: Any, **options: Any) -> Case:
    """Return a case that writes to a part of the memory that it reads."""

    def case(device: str) -> Tensor:
        x = row(device)
        out: Tensor = function(x[1:], **options, out=x[:-1])
        return out

    return case


def between(function: Any) -> Case:
    """The same with two arguments, of which the second has memory of its own."""

    def case(device: str) -> Tensor:
        x = row(device)
        out: Tensor = function(x[1:], ones(device, 5), out=x[:-1])
        return out

    return case


def two_outs(function: Any, *args: Any) -> Case:
    def case(device: str) -> Any:
        x = row(device).view(2, 3)
        return function(x, *args, out=(x[0], torch.zeros(3, dtype=torch.int64, device=device)))

    return case


OVERLAPS: Mapping[str, Case] = {
    **{f"{f.__name__} into its argument": into(f) for f in (torch.neg, torch.sin, torch.sigmoid, torch.abs)},
    **{f"{f.__name__} along its argument": into(f, dim=0) for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp)},
    **{f"{f.__name__} into one of two": between(f) for f in (torch.add, torch.mul, torch.pow, torch.maximum)},
    "add of a number": of_row(lambda x: torch.add(x[1:], 1, out=x[:-1])),
    "add to itself": of_row(lambda x: torch.add(x, 1, out=x)),
    "add to the same view": of_row(lambda x: torch.add(x[1:], 1, out=x[1:])),
    "add to other strides": of_row(lambda x: torch.add(x[:4].view(2, 2), 1, out=x[:4].view(2, 2).t())),
    "add beside": of_row(lambda x: torch.add(x[:3], 1, out=x[3:])),
    "where": of_row(lambda x: torch.where(x[1:] > 0, x[1:], x[1:], out=x[:-1])),
    "lerp": of_row(lambda x: torch.lerp(x[1:], ones(x.device, 5), 0.5, out=x[:-1])),
    "addcmul": of_row(lambda x: torch.addcmul(ones(x.device, 5), x[1:], x[1:], out=x[:-1])),
    "cat": of_row(lambda x: torch.cat([x[:2], x[1:5]], out=x)),
    "stack": of_row(lambda x: torch.stack([x[:3], x[1:4]], out=x.view(2, 3))),
    "gather": of_row(lambda x: torch.gather(x, 0, zero(x.device).expand(6), out=x.view(6))),
    "index_select": of_row(lambda x: torch.index_select(x, 0, zero(x.device), out=x[:1])),
    "scatter of itself": of_row(lambda x: torch.scatter(ones(x.device, 6), 0, zero(x.device), x, out=x.view(6))),
    "index_add to itself": of_row(lambda x: torch.index_add(x, 0, zero(x.device), ones(x.device, 1), out=x)),
    "take": of_row(lambda x: torch.take(x, zero(x.device), out=x[:1])),
    "masked_select": of_row(lambda x: torch.masked_select(x, x > 3, out=x[:2])),
    "sort": two_outs(torch.max, 0),
    "sum": lambda d: torch.sum(ones(d, 2, 3), 1, keepdim=True, out=torch.zeros(2, 1, device=d).expand(2, 1)),
    "mm": of_row(lambda x: torch.mm(x[:4].view(2, 2), x[:4].view(2, 2), out=x[:4].view(2, 2))),
    "addmm": of_row(lambda x: torch.addmm(x[1:].view(1, 5), x[:1].view(1, 1), x[:5].view(1, 5), out=x[:-1].view(1, 5))),
    "two at one place": lambda d: torch.add(ones(d, 2, 3), 1, out=wide(d)),
    "matrix at one place": lambda d: torch.mm(ones(d, 2, 2), ones(d, 2, 3), out=wide(d)),
    "add_": of_row(lambda x: x[1:].add_(x[:-1])),
    "copy_": of_row(lambda x: x[1:].copy_(x[:-1])),
    "copy_ of itself": of_row(lambda x: x[1:].copy_(x[1:])),
    "copy_ from the host": lambda d: wide(d).copy_(torch.ones(2, 3)),
    "assignment of a slice": of_row(lambda x: x.__setitem__(slice(1, None), x[:-1])),
    "add_ to rows at one place": lambda d: wide(d).add_(1),
    "normal_": lambda d: wide(d).normal_(),
    "scatter_": lambda d: wide(d).scatter_(0, zero(d).expand(1, 3), 1.0),
    "_foreach_add_": lambda d: torch._foreach_add_([ones(d, 2), wide(d)], 1.0),
    "_foreach_copy_": of_row(lambda x: torch._foreach_copy_([x[1:]], [x[:-1]])),
    "fill_": lambda d: wide(d).fill_(1),
    "zero_": lambda d: wide(d).zero_(),
    "masked_fill_": lambda d: wide(d).masked_fill_(wide(d) == 0, 1),
}


def outcome(case: Case, device: str) -> str:
    """Return the values of a case, or its error."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case(device)
            text = str(found.tolist() if isinstance(found, Tensor) else None)
            if device != "cpu":
                torch.accelerator.synchronize(device)
        return text
    except Exception as error:
        with contextlib.suppress(Exception):  # it has been told
            torch.accelerator.synchronize("vgpu:0")
        return f"error: {error}"


def first_words(error: str) -> str:
    return error.removeprefix("error: ").splitlines()[0][:40]


@pytest.mark.parametrize("table", [VALUES, OVERLAPS], ids=["values", "overlaps"])
def test_kernels_check_what_they_check_on_the_cpu(table: Mapping[str, Case]) -> None:
    differ = {}
    for name, case in table.items():
        here, there = outcome(case, "cpu"), outcome(case, "vgpu:0")
        refused = here.startswith("error: ")
        if there.startswith("error: ") != refused or (first_words(here) not in there if refused else here != there):
            differ[name] = (here, there)
    assert not differ


def test_checks_in_other_words_are_no_errors_of_onebox() -> None:
    for name, case in IN_OTHER_WORDS.items():
        assert outcome(case, "cpu").startswith("error: "), name
        there = outcome(case, "vgpu:0")
        assert there.startswith("error: "), name
        assert "inside onebox" not in there, there


def test_an_assertion_that_holds_costs_no_wait() -> None:
    with torch.inference_mode():
        held, there = of("vgpu:0", 1), ones("vgpu:0", 2)
        torch._assert_async(held)
        torch._assert_async(held, "words")
        checked = torch.ops.aten._functional_assert_async.msg(held, "words", there)
        assert checked.add_(1).tolist() == [2.0, 2.0]
        assert there.tolist() == [1.0, 1.0], "it returns a tensor of its own"
