"""What remote.py measures of a worker's checks: what those of arguments, and of zeroed memory, cost a step, in programs
and in operators that come one by one.

Neither can be switched off in onebox. Here this file is run in place of the worker, and has each operator that is
checked twice: with and without. A byte of memory that it shares with the client says which of them is called; so both
sides are one process, with the same programs and the same memory.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from channels import Source
from common import BATCH, Budget, show, spread
from eager_script import one
from remote_channel import STEPS, steps_in_turn, train_in_turn
from torch import nn
from torch._ops import OpOverload

import onebox
import onebox.vgpu
from onebox.pool.open import connect_pool
from onebox.worker.process import main as serve
from onebox.worker.programs import graphs, interpreter, kernels
from onebox.worker.sandbox import argument_checks

SIDES = {"as it is": True, "as it is, again": True, "not checked": False}
"""Whether operators are checked; the second tells how far equals are apart by chance."""

ENCODER = "small encoder"
"""A model whose operators compute next to nothing, and most of which have rules: what checks cost at most."""

EAGER_STEPS = {**STEPS, ENCODER: 10}

SHARES, EAGER_SHARES = {"cnn": 0.7, "mlp": 0.76}, {"cnn": 0.88, "mlp": 0.94, ENCODER: 1.0}
"""Parts of the time after which no further round begins."""

_CHECKED, _OPERATORS = 0, 1
_LENGTH = 2


def measure_checks(rounds: int, budget: Budget) -> dict[str, float]:
    """Measure, print tables, and return what belongs into the JSON object."""
    result: dict[str, float] = {}
    programs, eager = (
        {name: functools.partial(run, name, budget.rounds(rounds, share)) for name, share in shares.items()}
        for run, shares in ((train_in_turn, SHARES), (_script_in_turn, EAGER_SHARES))
    )
    for kind, what, ways in (("checks", "Training", programs), ("eager_checks", "A script", eager)):
        rows: list[list[str]] = []
        for name, measured in ways.items():
            key = f"small_{kind}" if name == ENCODER else kind
            with open_sides() as sides:
                wall, processor = measured(sides, list(SIDES))
                operators = sides.operators
            if not operators:
                raise RuntimeError(f"no operator of {name} is checked: both sides are the same")
            for side, checked in SIDES.items():
                over, more = (
                    [ours / theirs - 1 for ours, theirs in zip(times["as it is"], times[side], strict=True)]
                    for times in (wall, processor)
                )
                last = [spread([100 * share for share in shares], 2) for shares in (over, more)]
                median = f"{statistics.median(processor[side]):.2f}"
                named = f"{name}, {side}" if checked else f"{name}, {side} ({operators} operators)"
                rows.append([named, spread(wall[side], 2), median, *(last if side != "as it is" else ["", ""])])
                if not checked:
                    for full, found in ((f"{key}_overhead", over), (f"{key}_cpu_overhead", more)):
                        result[full] = max(result.get(full, -1.0), round(statistics.median(found), 4))
        show(
            f"{what} on one worker with checked arguments and without, batch {BATCH}, one thread: "
            "median (least to most)",
            ["worker", "ms/step", "CPU ms/step", "as it is / this - 1, %", "likewise of the CPU, %"],
            rows,
        )
    return result


def _script_in_turn(
    name: str, rounds: Iterable[int], sides: CheckedPool, names: list[str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return times of steps of a script, whose operators come one by one."""
    onebox.vgpu.install()
    onebox.vgpu.attach(sides.pool)
    run = _encoder("vgpu:0") if name == ENCODER else one(name, "vgpu:0")
    return steps_in_turn(functools.partial(run, every=0), EAGER_STEPS[name], rounds, sides, names)


def _encoder(device: str) -> Callable[..., object]:
    """Return what runs steps of :data:`ENCODER`, eight sequences of four tokens."""
    torch.manual_seed(0)
    embedding, layer, head = nn.Embedding(64, 32), nn.TransformerEncoderLayer(32, 4, 64), nn.Linear(32, 64)
    model = nn.Sequential(embedding, layer, head).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens, labels = torch.randint(64, (8, 4)).to(device), torch.randint(64, (32,)).to(device)

    def run(steps: int, every: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels)
            loss.backward()
            optimizer.step()
        loss.item()

    return run


# ---- at the client


class CheckedPool:
    """A pool of one worker whose checks can be switched off; made by :func:`open_sides`.

    Args:
        pool: The pool.
        memory: What it shares with the worker.
    """

    def __init__(self, pool: onebox.Pool, memory: mmap.mmap) -> None:
        self.pool = pool
        self._memory = memory

    def use(self, name: str) -> None:
        """Check from now on, or not; nothing may be under way."""
        self._memory[_CHECKED] = SIDES[name]

    @property
    def operators(self) -> int:
        """The number of operators of the worker's programs that are checked, or have memory zeroed; 255 at most."""
        return self._memory[_OPERATORS]


@contextlib.contextmanager
def open_sides() -> Iterator[CheckedPool]:
    """Open a pool."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(_LENGTH)
        with mmap.mmap(file.fileno(), _LENGTH) as memory, connect_pool([Source(__file__, file.name)]) as pool:
            memory[_CHECKED] = True
            yield CheckedPool(pool, memory)


# ---- at the worker


class _Twice:
    """An operator with and without checks.

    Args:
        memory: What the worker shares with the client.
        checked: The operator with checks.
        plain: The operator without.
    """

    def __init__(self, memory: mmap.mmap, checked: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._memory = memory
        self._checked = checked
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._checked if self._memory[_CHECKED] else self._plain)(*args, **kwargs)


def main() -> None:
    """Be a worker: ``remote_checks.py FILE``, which is shared with the client."""
    with open(sys.argv[1], "r+b") as file:
        memory = mmap.mmap(file.fileno(), _LENGTH)

    def guarded(operator: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
        checked = argument_checks.guarded(operator, run)
        if checked is run:
            return run
        memory[_OPERATORS] = min(memory[_OPERATORS] + 1, 255)
        return _Twice(memory, checked, run)

    def unwritten(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    zeros: Any = _Twice(memory, argument_checks.zeros_strided, unwritten)
    interpreter.guarded = kernels.guarded = guarded
    kernels.zeros_strided = graphs.zeros_strided = zeros
    serve.main()


if __name__ == "__main__":
    main()
