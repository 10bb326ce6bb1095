"""Would every program do on a GPU what it states? Answered with fake tensors, which need none.

Models are captured on the CPU for GPUs, as for a pool that has one, and each operator of their programs is run with
fake tensors on ``cuda``: its outputs must be those that the program states. Models are those of the tests, every
operator of PyTorch's own database (forward and backward), and architectures of Hugging Face from small configurations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import finish, show
from coverage_judge import quiet, seed_all
from fake_devices import Mismatch, of_model
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onebox.errors import OneboxError
from onebox.graph.capture.export import capture
from onebox.graph.programs import TracedModel

NOT_CALLED = frozenset({"_batch_norm_with_update"})
"""Operators of the database that no function of PyTorch calls; cuDNN's reserve makes this one's outputs unknowable."""

DTYPES = (torch.float32, torch.bfloat16)
PARTS = 24
"""Number of processes, one after the other, to which a suite is dealt."""


@dataclass(kw_only=True)
class Outcome:
    """The check of one model or operator.

    Args:
        name: Its name.
        programs: Programs that were checked.
        found: What is wrong.
        left_out: Reason that there are none: it cannot be captured, on any device.
    """

    name: str
    programs: int = 0
    found: list[Mismatch] = field(default_factory=list)
    left_out: str = ""


def check(
    name: str, model: nn.Module, loss: Any, example: tuple[Any, Any], *, training: bool = True, precision: Any = "fp32"
) -> Outcome:
    """Capture a model for GPUs and check its programs."""
    made = Outcome(name=name)
    try:
        mode: Any = "train" if training else "evaluate"
        captured = capture(model, loss, example, mode=mode, precision=precision, device_type="cuda")
        programs = TracedModel(captured, backward=training).divide()
    except OneboxError as error:
        made.left_out = str(error).splitlines()[0]
        return made
    made.programs = len(programs.phases)
    made.found = of_model(name, programs)
    return made


# ---- the models of the tests


def case_names() -> list[str]:
    """Return the names of the models of the tests."""
    from tests.models import CASES, FATED

    return sorted({*CASES, *FATED})


def check_case(name: str) -> list[Outcome]:
    """Check a model of the tests: in two element types, with autocast, trained, frozen and evaluated."""
    from tests.models import CASES, FATED

    case = (FATED | CASES)[name]
    made = []
    for dtype, precision in ((torch.float32, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "fp32")):
        example = case.batches([3], dtype)[0]
        for mode in ("trained", "frozen", "evaluated"):
            model = case.model(dtype)
            model.train(mode != "frozen")
            what = f"{name} {str(dtype)[6:]} {precision} {mode}"
            given: Any = {"training": mode != "evaluated", "precision": precision}
            made.append(check(what, model, case.loss, example, **given))
    return made


# ---- operators


def operator_names() -> list[str]:
    """Return the formatted names of the operators of PyTorch's database."""
    from coverage_ops import operator_names as names

    return [name for name in names() if name not in NOT_CALLED]


class _Call(nn.Module):
    """A call of an operator; its tensors are parameters where it has a gradient for them, else buffers."""

    def __init__(self, op: Callable[..., Any], given: Any, learns: bool) -> None:
        super().__init__()
        self._op = (op,)
        leaves, self._nesting = tree_flatten(given)
        self._leaves: list[tuple[str, Any]] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if learns and leaf.requires_grad:
                    self.register_parameter(f"p{number}", nn.Parameter(leaf.detach().clone()))
                    self._leaves.append((f"p{number}", None))
                    continue
                self.register_buffer(f"b{number}", leaf.detach().clone())
                self._leaves.append((f"b{number}", None))
            else:
                self._leaves.append(("", leaf))

    def forward(self, x: Tensor) -> Any:
        """Call the operator."""
        leaves = [getattr(self, name) if name else leaf for name, leaf in self._leaves]
        value, args, kwargs = tree_unflatten(leaves, self._nesting)
        return self._op[0](value, *args, **kwargs)


def _total(outputs: Any, targets: Tensor) -> Tensor:
    """Return one number of all outputs, through which gradients reach each of them."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and not leaf.is_sparse]
    floats = [leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]
    parts = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in floats]
    others = [leaf.to(torch.float32) for leaf in tensors if not (leaf.is_floating_point() or leaf.is_complex())]
    return sum((part.float().sin().sum() for part in (*parts, *others)), targets.sum())


def check_operator(name: str, dtypes: Sequence[torch.dtype] = DTYPES, samples: int = 3) -> list[Outcome]:
    """Check an operator of the database with a few samples of each type, forward and backward."""
    from coverage_ops import _by_name

    made: list[Outcome] = []
    for op in _by_name()[name]:
        for dtype in dtypes:
            if dtype not in op.supported_dtypes("cpu") or dtype not in op.supported_dtypes("cuda"):
                continue
            learns = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            seed_all(1)
            with quiet():
                found = list(op.sample_inputs("cpu", dtype, requires_grad=learns))
            chosen = {0, len(found) // 2, len(found) - 1} if found else set()
            for number in sorted(chosen)[:samples]:
                sample = found[number]
                what = f"{name} {str(dtype)[6:]} {number}"
                made.append(_check_sample(what, op, sample, learns))
    return made


def _check_sample(what: str, op: Any, sample: Any, learns: bool) -> Outcome:
    example = torch.zeros(1), torch.zeros(1)
    for training in (True, False) if learns else (False,):
        try:
            with quiet():
                module = _Call(op, (sample.input, sample.args, sample.kwargs), training)
                made = check(what, module, _total, example, training=training)
        except Exception as error:  # what the tracer itself cannot do
            made = Outcome(name=what, left_out=f"{type(error).__name__}: {error}".splitlines()[0])
        if not made.left_out:
            break
    return made


# ---- Hugging Face


def architecture_names() -> list[str]:
    """Return the names of the architectures."""
    from fake_cuda_architectures import ARCHITECTURES

    return sorted(ARCHITECTURES)


def check_architecture(name: str) -> list[Outcome]:
    """Check an architecture of Hugging Face: in float32, with autocast, and in bfloat16."""
    from fake_cuda_architectures import ARCHITECTURES

    made = []
    for dtype, precision in ((torch.float32, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "fp32")):
        with torch.random.fork_rng(devices=[]):
            model, inputs, loss = ARCHITECTURES[name]()
        model = model.to(dtype)
        for mode in ("trained", "evaluated"):
            cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
            what = f"{name} {str(dtype)[6:]} {precision} {mode}"
            given: Any = {"training": mode == "trained", "precision": precision}
            made.append(check(what, model, loss, (cast, torch.zeros(2)), **given))
    return made


# ---- all of it

SUITES: dict[str, tuple[Callable[[], list[str]], Callable[[str], list[Outcome]]]] = {
    "models": (case_names, check_case),
    "operators": (operator_names, check_operator),
    "architectures": (architecture_names, check_architecture),
}


def _check_part(suite: str, names: Sequence[str]) -> None:
    """Check some names of a suite in this process, and print each outcome as a line of JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        for outcome in SUITES[suite][1](name):
            print(_LINE + json.dumps(asdict(outcome)), flush=True)


def _in_process(suite: str, names: Sequence[str], ends: float) -> list[Outcome]:
    """Check some names in a process of their own, which an operator may end."""
    command = [sys.executable, __file__, "--part", suite, *names]
    timeout = max(ends - time.monotonic(), 1.0)
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout)
    found = [_outcome(json.loads(line.removeprefix(_LINE))) for line in ran.stdout.splitlines() if _LINE in line[:8]]
    if ran.returncode and len(names) > 1:  # to find which of them ended it
        half = len(names) // 2
        return [*_in_process(suite, names[:half], ends), *_in_process(suite, names[half:], ends)]
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        found.append(Outcome(name=f"{suite} {names[0]}", left_out=f"the process ended with {ran.returncode}: {last}"))
    return found


def _outcome(given: dict[str, Any]) -> Outcome:
    return Outcome(**(given | {"found": [Mismatch(**bad) for bad in given["found"]]}))


_LINE = "outcome "


def run(suites: Sequence[str], shard: str = "0/1", jobs: int = 1, ends: float = math.inf) -> Iterator[Outcome]:
    """Check what a shard of the suites holds.

    Args:
        suites: Of :data:`SUITES`.
        shard: ``I/N``: every N-th name of each suite, from the I-th.
        jobs: Processes.
        ends: The time (of ``time.monotonic``) by which all has ended.

    Raises:
        subprocess.TimeoutExpired: The time is up.
    """
    first, step = map(int, shard.split("/"))
    work = []
    for suite in suites:
        names = SUITES[suite][0]()[first::step]
        parts = min(PARTS, len(names))
        work += [(suite, names[part::parts]) for part in range(parts)]
    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(_in_process, *each, ends) for each in work]
        try:
            for future in pending:
                yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def report(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Print what is wrong, and totals; return the figures."""
    kinds = Counter((bad.operator, bad.problem.split(" as output")[0]) for out in outcomes for bad in out.found)
    rows = [[operator, problem[:110], str(count)] for (operator, problem), count in kinds.most_common()]
    show("Operators that differ on a GPU", ("operator", "problem", "times"), rows)
    programs = sum(outcome.programs for outcome in outcomes)
    left_out = sum(bool(outcome.left_out) for outcome in outcomes)
    bad = sum(len(outcome.found) for outcome in outcomes)
    print(f"{programs} programs of {len(outcomes)} captures, {left_out} left out, {bad} mismatches, {seconds:.0f} s")
    return {"programs": programs, "mismatches": bad, "captures": len(outcomes), "left_out": left_out}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SUITES), help="what is checked")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th name of each suite, from the I-th")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="the longest that all of it may take")
    parser.add_argument("--verbose", action="store_true", help="print each mismatch, and what was left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        _check_part(options.part[0], options.part[1:])
        return
    began = time.perf_counter()
    outcomes = []
    for outcome in run(options.suites, options.shard, options.jobs, time.monotonic() + options.limit_s):
        outcomes.append(outcome)
        if options.verbose:
            for bad in outcome.found:
                print(bad)
            if outcome.left_out:
                print(f"{outcome.name}: left out: {outcome.left_out}")
    finish(report(outcomes, time.perf_counter() - began), as_json=options.json)


if __name__ == "__main__":
    main()
