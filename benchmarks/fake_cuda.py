"""Would every program do on a GPU what it states? Answered with fake tensors, which need none.

Models are captured on the CPU for GPUs, as for a pool that has one, and each operator of their programs is run with
fake tensors on ``cuda``: its outputs must be those that the program states. Models are those of the tests, every
operator of PyTorch's own database (forward and backward), and architectures of Hugging Face from small configurations.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import finish, show
from coverage_judge import quiet, seed_all
from fake_cuda_processes import Outcome, Task, answer, kept, run
from fake_devices import of_model
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onebox.errors import OneboxError
from onebox.graph.capture.export import capture
from onebox.graph.programs import TracedModel

NOT_CALLED = frozenset({"_batch_norm_with_update"})
"""Operators of the database that no function of PyTorch calls; cuDNN's reserve makes this one's outputs unknowable."""

DTYPES = (torch.float32, torch.bfloat16)
PRECISIONS = ((torch.float32, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "fp32"))
"""Element type of a model, and the precision in which it is captured."""

Trial = tuple[str, Callable[[], Outcome]]
"""Its name, and the check of one capture."""


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
    from tests.kit.models import CASES, FATED

    return sorted({*CASES, *FATED})


def case_trials(name: str) -> Iterator[Trial]:
    """Check a model of the tests: in two element types, with autocast, trained, frozen and evaluated."""
    from tests.kit.models import CASES, FATED

    case = (FATED | CASES)[name]

    def trial(what: str, dtype: torch.dtype, precision: str, mode: str) -> Outcome:
        model = case.model(dtype)
        model.train(mode != "frozen")
        example = case.batches([3], dtype)[0]
        return check(what, model, case.loss, example, training=mode != "evaluated", precision=precision)

    for dtype, precision in PRECISIONS:
        for mode in ("trained", "frozen", "evaluated"):
            what = f"{name} {str(dtype)[6:]} {precision} {mode}"
            yield what, functools.partial(trial, what, dtype, precision, mode)


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


def operator_trials(name: str, *, quick: bool) -> Iterator[Trial]:
    """Check an operator of the database with a few samples of each type, forward and backward."""
    from coverage_ops import _by_name

    for number, op in enumerate(_by_name()[name]):
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu") or dtype not in op.supported_dtypes("cuda"):
                continue
            learns = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            seed_all(1)
            with quiet():
                found = list(op.sample_inputs("cpu", dtype, requires_grad=learns))
            chosen = dict.fromkeys((len(found) // 2, 0, len(found) - 1)) if found else ()
            for place in list(chosen)[: 1 if quick else None]:
                what = f"{name} {str(dtype)[6:]} {place}" + f" ({number})" * (number > 0)
                yield what, functools.partial(_check_sample, what, op, found[place], learns)


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


def architecture_trials(name: str, *, quick: bool) -> Iterator[Trial]:
    """Check an architecture of Hugging Face: in float32, with autocast, and in bfloat16."""
    from fake_cuda_architectures import ARCHITECTURES

    def trial(what: str, dtype: torch.dtype, precision: str, mode: str) -> Outcome:
        with torch.random.fork_rng(devices=[]):
            model, inputs, loss = ARCHITECTURES[name]()
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        example = cast, torch.zeros(2)
        return check(what, model.to(dtype), loss, example, training=mode == "trained", precision=precision)

    for dtype, precision in PRECISIONS[: 2 if quick else None]:
        for mode in ("trained",) if quick else ("trained", "evaluated"):
            what = f"{name} {str(dtype)[6:]} {precision} {mode}"
            yield what, functools.partial(trial, what, dtype, precision, mode)


# ---- all of it

SUITES: dict[str, Callable[[], list[str]]] = {
    "models": case_names,
    "operators": operator_names,
    "architectures": architecture_names,
}
"""Suites, and the names of what they check."""


def trials(task: Task, *, quick: bool) -> Iterator[Trial]:
    """Return the checks of a task."""
    if task.suite == "operators":
        return operator_trials(task.name, quick=quick)
    return case_trials(task.name) if task.suite == "models" else architecture_trials(task.name, quick=quick)


def report(outcomes: Sequence[Outcome], not_reached: int, seconds: float) -> dict[str, Any]:
    """Print what is wrong, and totals; return the figures."""
    kinds = Counter((bad.operator, bad.problem.split(" as output")[0]) for out in outcomes for bad in out.found)
    rows = [[operator, problem[:110], str(count)] for (operator, problem), count in kinds.most_common()]
    show("Operators that differ on a GPU", ("operator", "problem", "times"), rows)
    ended = [[outcome.name, outcome.ended[:90]] for outcome in outcomes if outcome.ended]
    if ended:
        show("Captures that ended their process", ("what", "how"), ended)
    found = {
        "programs": sum(outcome.programs for outcome in outcomes),
        "mismatches": sum(len(outcome.found) for outcome in outcomes),
        "captures": len(outcomes),
        "left_out": sum(bool(outcome.left_out) for outcome in outcomes),
        "ended": len(ended),
        "not_reached": not_reached,
    }
    print(", ".join(f"{key} {value}" for key, value in found.items()) + f"; {seconds:.0f} s")
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SUITES), help="what is checked")
    parser.add_argument("--only", metavar="WORD", default="", help="only names that contain a word")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="the longest that all of it may take")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one sample of each operator and type, not three; architectures trained in float32 and with autocast only",
    )
    parser.add_argument("--trial-s", type=float, default=120.0, help="the longest that one capture may take")
    parser.add_argument("--keep", type=Path, help="a file of outcomes: what it has is not run again, others are added")
    parser.add_argument("--verbose", action="store_true", help="print each mismatch, and what was left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        answer(lambda task: trials(task, quick=options.quick))
        return
    began = time.monotonic()
    tasks = [Task(suite, name) for suite in options.suites for name in SUITES[suite]() if options.only in name]
    done = {task: outcomes for task, outcomes in kept(options.keep).items() if task in tasks}
    left = [task for task in tasks if task not in done]
    command = [sys.executable, __file__, "--serve", *["--quick"] * options.quick]
    done |= run(command, left, options.jobs, trial_s=options.trial_s, ends=began + options.limit_s, keep=options.keep)
    outcomes = [outcome for task in tasks for outcome in done.get(task, [])]
    for outcome in outcomes if options.verbose else ():
        for bad in outcome.found:
            print(bad)
        if outcome.left_out:
            print(f"{outcome.name}: left out: {outcome.left_out}")
    finish(report(outcomes, len(tasks) - len(done), time.monotonic() - began), as_json=options.json)


if __name__ == "__main__":
    main()
