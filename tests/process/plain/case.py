"""Cases: scripts written against PyTorch, what each way to run them is expected to do, and what it did.

A case is one function that takes a :class:`~tests.process.plain.ways.Way` and trains with it::

    @case(trainer=refused("random"))
    def python_random_in_forward(way: Way) -> None:
        way.train(Jittered(), F.cross_entropy, sgd, labelled())

It runs as plain PyTorch on the CPU, and as one of the other ways; all losses and tensors are compared.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from onebox.errors import OneboxError
from tests.kit.pools import Pools
from tests.process.plain.ways import Result, Way, make_way

WAYS = ("trainer", "vgpu")
"""The ways that are compared with plain PyTorch."""

TOLERANCE = 1e-10
"""The most by which float64 results may differ."""

Kind = Literal["equal", "refused", "warned", "silent", "unhelpful"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Outcomes that are right for a case.

    Args:
        kinds: Of which one has to be seen.
        message: Regular expression that a refusal or warning matches, in upper or lower case.
    """

    kinds: tuple[Kind, ...]
    message: str = ""


EQUAL = Expected(kinds=("equal",))


def refused(message: str) -> Expected:
    """Expect one clear error with this in its message."""
    return Expected(kinds=("refused",), message=message)


def warned(message: str) -> Expected:
    """Expect a warning or a line of the log with this in it."""
    return Expected(kinds=("warned",), message=message)


def equal_or_refused(message: str) -> Expected:
    """Expect either of both: what is captured depends on PyTorch's version."""
    return Expected(kinds=("equal", "refused"), message=message)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script and what it is expected to do.

    Args:
        name: Of the function.
        module: That it is in.
        script: The function.
        expected: For each of :data:`WAYS` that it is for.
        tolerance: The most by which results may differ.
        devices: Workers of the pool.
    """

    name: str
    module: str
    script: Callable[[Way], None]
    expected: dict[str, Expected]
    tolerance: float
    devices: int


TORCH_2_11 = torch.__version__ < "2.12"
"""Whether this PyTorch refuses, or does not notice, what later ones do."""

CASES: list[Case] = []
"""All cases of the modules that have been imported."""


def case(
    *,
    trainer: Expected | None = EQUAL,
    vgpu: Expected | None = EQUAL,
    tolerance: float = TOLERANCE,
    devices: int = 2,
) -> Callable[[Callable[[Way], None]], Callable[[Way], None]]:
    """Make a function a case; ``None`` for a way that it is not for."""

    def declare(script: Callable[[Way], None]) -> Callable[[Way], None]:
        given = {"trainer": trainer, "vgpu": vgpu}
        expected = {way: each for way, each in given.items() if each is not None}
        CASES.append(
            Case(
                name=script.__name__,
                module=script.__module__,
                script=script,
                expected=expected,
                tolerance=tolerance,
                devices=devices,
            )
        )
        return script

    return declare


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What running a case did.

    Args:
        kind: Seen from the user: ``silent`` is another result with no word about it.
        said: The error or warning; for a silent difference where it is.
        difference: The largest one from plain PyTorch; 0 where nothing was compared.
    """

    kind: Kind
    said: str = ""
    difference: float = 0.0

    def meets(self, expected: Expected) -> bool:
        """Tell whether this is what was expected."""
        if self.kind not in expected.kinds:
            return False
        return self.kind == "equal" or re.search(expected.message, self.said, re.IGNORECASE | re.DOTALL) is not None


def run_case(case: Case, way: str, pools: Pools) -> Outcome:
    """Run a case as plain PyTorch and one other way, and compare."""
    expected = case.expected[way]
    found, said = _run(case, make_way(way, pools(case.devices)))
    if isinstance(found, Exception) and "equal" not in expected.kinds and way == "trainer":
        return judged(found)
    reference, _ = _run(case, make_way("plain", None))
    if isinstance(found, Exception):
        if isinstance(reference, Exception) and _alike(found, reference):
            return Outcome(kind="refused", said=repr(found))  # PyTorch's own words
        return judged(found)
    if isinstance(reference, Exception):
        return Outcome(kind="silent", said=f"plain PyTorch raises {reference!r}", difference=math.inf)
    difference, where = differs(found, reference)
    heard = [line for line in said if re.search(expected.message, line, re.IGNORECASE)]
    if "warned" in expected.kinds and heard:
        return Outcome(kind="warned", said=heard[0], difference=difference)
    if difference <= case.tolerance:
        return Outcome(kind="equal", difference=difference)
    return Outcome(kind="silent", said=where, difference=difference)


def _alike(found: Exception, reference: Exception) -> bool:
    """Return whether two errors are the same, but for names of types of tensors, which come late."""
    return type(found) is type(reference) and str(found)[:60] == str(reference)[:60]


def _run(case: Case, way: Way) -> tuple[Result | Exception, list[str]]:
    """Return the result or the error, and the lines of the log and warnings meanwhile."""
    with plain_defaults(), heard() as said:
        try:
            case.script(way)
            return way.result, said
        except Exception as error:  # whatever it is: it is judged
            return error, said


@contextlib.contextmanager
def plain_defaults() -> Iterator[None]:
    """Run in float64, with all generators at their beginning."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect warnings and the lines of onebox's log."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear, logger = Ear(), logging.getLogger("onebox")
    logger.addHandler(ear)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield lines
        finally:
            logger.removeHandler(ear)
            lines.extend(str(each.message) for each in caught)


def differs(found: Result, expected: Result) -> tuple[float, str]:
    """Return the largest difference of two results, and where it is."""
    if found.tensors.keys() != expected.tensors.keys() or len(found.losses) != len(expected.losses):
        return math.inf, f"{list(found.tensors)} and {len(found.losses)} losses, not {list(expected.tensors)}"
    pairs = {f"loss {n}": _apart(a, b) for n, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True))}
    for name, tensor in expected.tensors.items():
        pairs[name] = _apart(found.tensors[name], tensor)
    where = max(pairs, key=lambda name: pairs[name], default="")
    return pairs.get(where, 0.0), where


def _apart(left: Tensor | float, right: Tensor | float) -> float:
    """Return the largest difference of two values; infinite where only one is no number, or shapes differ."""
    a, b = (each if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64) for each in (left, right))
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    kind = torch.complex128 if a.is_complex() else torch.float64
    gaps = (a.to(kind) - b.to(kind)).abs()
    gaps = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, gaps).nan_to_num(nan=math.inf)
    return float(gaps.max()) if gaps.numel() else 0.0


INTERNAL = re.compile(
    r"github|file an issue|please report|inside onebox|DynamicOutputShapeException|AttributeError|has no attribute"
    r"|FakeTensor|fake tensor|exported program|tensor subclasses|itensor|gcnArchName|lifted_tensor",
    re.IGNORECASE,
)
"""Words of PyTorch's insides, which tell users nothing."""

REMEDY = re.compile(
    r"virtual device|vgpu|allowed|\b(use|give|pass|call|unwrap|set|remove|keep|check|choose|make|train|write|move|wrap"
    r"|convert|reduce|state|say|name|know|leave|look at)\b|instead|has to|have to|must|needs?\b",
    re.IGNORECASE,
)


def helpful(error: Exception) -> bool:
    """Tell whether an error says something that a user can act on, in words that are not PyTorch's insides."""
    message = str(error)
    if not isinstance(error, OneboxError) or INTERNAL.search(message):
        return False
    return bool(re.search(r"\.py:\d+", message) or REMEDY.search(message))


def judged(error: Exception) -> Outcome:
    """Return what an error counts as."""
    kind: Kind = "refused" if helpful(error) else "unhelpful"
    return Outcome(kind=kind, said=f"{type(error).__name__}: {error}")


def check(case: Case, way: str, pools: Pools) -> None:
    """Require that a case does what is expected of it."""
    outcome = run_case(case, way, pools)
    assert outcome.meets(case.expected[way]), f"{outcome}, not {case.expected[way]}"
