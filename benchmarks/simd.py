"""What do vector instructions make of training on a CPU worker, and what do memory format and precision add?

The models whose segments a hybrid plan computes beside a GPU (VGG-16 and ResNet-50 at half width on 64 x 64 pixels, and
a transformer like GPT-2), each on one CPU worker, whose libraries are held to an instruction set: ATen by
``ATEN_CPU_CAPABILITY``, oneDNN by ``ONEDNN_MAX_CPU_ISA``. MKL has a limit for Intel's processors only, and chooses for
itself on others: the transformer's products of matrices are its part of the baseline. The workers take turns.

Beside autocast (``bf16``) stands what a trainer takes that is asked for the fastest (``auto``): memory format and
precision as it has measured them. The speedups are geometric means over the models of one side's time over another's.
There are fewer rounds where four minutes are over; ``--long`` has all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import hybrid_models
import pipeline_models
import torch
from common import Budget, finish, show, spread
from torch import Tensor, nn

import onebox
from onebox.graph import Precision
from onebox.plan import Plan, Stage
from onebox.worker.system.instruction_sets import VARIABLES, used_instruction_sets

ROUNDS = 7
VISIT_S = 0.4
"""How long a worker trains at a time, at least one step."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to compute.

    Args:
        aten: What ATen is held to.
        onednn: What oneDNN is held to.
        needs: What the processor must have.
        channels_last: Whether convolutions have channels last.
        precision: Of the run: ``bf16`` for autocast, ``auto`` for the fastest by measurement, of memory formats, too.
    """

    aten: str
    onednn: str
    needs: tuple[str, ...] = ()
    channels_last: bool = False
    precision: Precision = "fp32"


_AVX512 = Side(aten="avx512", onednn="AVX512_CORE_BF16", needs=("AVX-512",))
SIDES = {
    "baseline": Side(aten="default", onednn="SSE41"),
    "AVX2": Side(aten="avx2", onednn="AVX2", needs=("AVX2",)),
    "AVX-512": _AVX512,
    "channels last": replace(_AVX512, channels_last=True),
    "bf16": replace(_AVX512, channels_last=True, precision="bf16", needs=("AVX-512", "bf16")),
    "auto": replace(_AVX512, precision="auto"),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    Args:
        model: The model.
        loss: Its loss.
        inputs: A batch, one micro-batch.
        targets: Its targets.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor


def task(name: str) -> Task:
    """Return a model with a batch, the same every time."""
    torch.manual_seed(0)
    if name == "transformer":
        case = pipeline_models.CASES["transformer"]
        inputs = case.inputs(16)
        targets = torch.randint(0, case.classes, (16, case.positions))
        return Task(model=case.model(), loss=case.loss, inputs=inputs, targets=targets)
    build = {"vgg16": hybrid_models.vgg16, "resnet50": hybrid_models.resnet50}[name]
    inputs, targets = torch.randn(8, 3, hybrid_models.EDGE, hybrid_models.EDGE), torch.randint(0, 10, (8,))
    return Task(model=build(32), loss=nn.functional.cross_entropy, inputs=inputs, targets=targets)


TASKS = {"vgg16": 0.33, "resnet50": 0.67, "transformer": 1.0}
"""The models, with the part of the time after which no further round begins."""


class Worker:
    """A worker that trains a model in one way.

    Args:
        what: The model.
        side: The way.
        threads: Threads of the worker.
        stack: Ends it.
    """

    def __init__(self, what: Task, side: Side, threads: int, stack: contextlib.ExitStack) -> None:
        with mock.patch.dict(os.environ, {"ATEN_CPU_CAPABILITY": side.aten, "ONEDNN_MAX_CPU_ISA": side.onednn}):
            pool = stack.enter_context(onebox.open("cpu", threads=threads))
        self.used = pool.devices[0].instructions
        stage = Stage(replicas=((0,),), shares=(1.0,), channels_last=side.channels_last)
        plan = Plan(stages=(stage,), micro_batch=len(what.inputs)) if side.precision != "auto" else None
        self._what = what
        self._trainer = stack.enter_context(
            onebox.Trainer(
                what.model,
                what.loss,
                pipeline_models.sgd(what.model.parameters()),
                pool=pool,
                plan=plan,
                precision=side.precision,
            )
        )
        self.train(2)
        assert self._trainer.plan is not None
        self.formats = ", ".join(self._trainer.plan.stages[0].formats)

    def train(self, steps: int) -> float:
        """Return the seconds of a step, as a mean over some."""
        begin_s = time.perf_counter()
        for _ in range(steps):
            self._trainer.step(self._what.inputs, self._what.targets)
        self._trainer.wait()
        return (time.perf_counter() - begin_s) / steps


def measure(name: str, sides: Mapping[str, Side], threads: int, rounds: Iterable[int]) -> dict[str, list[float]]:
    """Return the seconds of a step of a model, by side, one figure a round."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    with contextlib.ExitStack() as stack:
        what = task(name)
        workers = {side: Worker(what, how, threads, stack) for side, how in sides.items()}
        if name == next(iter(TASKS)):
            for side, worker in workers.items():
                print(f"{side}: ATen uses {worker.used.aten}, oneDNN {worker.used.onednn}")
        if "auto" in workers:
            print(f"{name}: auto is {workers['auto'].formats or 'as captured'}")
        steps = {side: max(1, round(VISIT_S / worker.train(1))) for side, worker in workers.items()}
        for _ in rounds:
            for side, worker in workers.items():
                found[side].append(worker.train(steps[side]))
    return found


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Return how many times as fast one side was in each round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def compared(sides: Mapping[str, Side]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each speedup, and the two sides that it compares."""
    for name, slow, fast in (
        ("avx2_speedup", "baseline", "AVX2"),
        ("avx512_speedup", "baseline", "AVX-512"),
        ("channels_last_speedup", "AVX-512", "channels last"),
        ("bf16_speedup", "channels last", "bf16"),
        ("auto_speedup", "AVX-512", "auto"),
    ):
        if fast in sides:
            yield name, slow, fast


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="visits to each worker")
    parser.add_argument("--long", action="store_true", help="all rounds, however long they take")
    options = parser.parse_args()
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    hardware = set(used_instruction_sets().hardware)
    sides = {name: side for name, side in SIDES.items() if hardware.issuperset(side.needs)}
    budget = Budget(long=options.long)
    times = {
        name: measure(name, sides, options.threads, budget.rounds(options.rounds, share))
        for name, share in TASKS.items()
    }
    show(
        f"A training step on a CPU worker, ms, {options.threads} thread(s): median (least to most)",
        ["model", *sides],
        [[name, *(spread([s * 1e3 for s in found[side]], 1) for side in sides)] for name, found in times.items()],
    )
    gains = {
        name: {model: ratios(found[slow], found[fast]) for model, found in times.items()}
        for name, slow, fast in compared(sides)
    }
    titles = [f"{slow} / {fast}" for _, slow, fast in compared(sides)]
    show(
        "Times as fast: median (least to most)",
        ["model", *titles],
        [[model, *(spread(found[model], 2) for found in gains.values())] for model in TASKS],
    )
    result: dict[str, object] = {
        name: round(math.exp(statistics.fmean(math.log(statistics.median(each)) for each in found.values())), 3)
        for name, found in gains.items()
    }
    result["step_ms"] = {
        name: {side: round(statistics.median(each) * 1e3, 2) for side, each in found.items()}
        for name, found in times.items()
    }
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
