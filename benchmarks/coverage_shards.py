"""Cases handed to processes of their own, so that one that dies or hangs is noticed and takes nothing else with it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

DTYPES = ("float32", "float64", "int64", "bool")
KINDS = ("opinfo", "moduleinfo", "optimizerinfo", "noncontiguous", "inplace", "out")
TRIAL_S = 60.0
"""The longest that a trial may take; they take milliseconds."""

DEATHS = 10
"""How often a process may die of one case before the rest of it is left."""

START_S = 120.0
"""The longest that a process may take to import PyTorch's databases and to open its pool."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All trials of one operator, module or optimizer with one element type.

    Args:
        kind: One of :data:`KINDS`.
        name: The operator's, module's or optimizer's.
        dtype: One of :data:`DTYPES`.
        seed: Of the samples.
        limit: The most trials; more are a random choice.
        repeat: How often each runs on the device: what repeats is a stored block there.
    """

    kind: str
    name: str
    dtype: str
    seed: int = 0
    limit: int | None = None
    repeat: int = 1


@dataclass(kw_only=True)
class Tally:
    """What became of the trials of a case.

    Args:
        case: The case.
        outcomes: Name of each trial that has ended, its outcome and its message, in order.
        seconds: Time that they took.
    """

    case: Case
    outcomes: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        """Return how many trials ended so."""
        return sum(found == outcome for _, found, _ in self.outcomes)

    def message(self) -> str:
        """Return the message of the first trial that neither passed nor was skipped."""
        bad = (message for _, outcome, message in self.outcomes if outcome not in ("passed", "skipped"))
        return next(bad, "")


def names_of(kind: str) -> list[str]:
    """Return the names of all operators, modules or optimizers, each one once."""
    from coverage_modules import module_names, optimizer_names
    from coverage_ops import operator_names

    return {"moduleinfo": module_names, "optimizerinfo": optimizer_names}.get(kind, operator_names)()


# ---- the side that runs trials


def trials_of(case: Case) -> Iterator[Any]:
    """Return the trials of a case, or a random choice of so many."""
    import torch
    from coverage_modules import module_trials, optimizer_trials
    from coverage_ops import trials

    dtype = getattr(torch, case.dtype)
    if case.kind == "moduleinfo":
        found = list(module_trials(case.name, dtype, case.seed))
    elif case.kind == "optimizerinfo":
        found = list(optimizer_trials(case.name, dtype, case.seed))
    else:
        found = list(trials(case.kind, case.name, dtype, case.seed))
    if case.limit is not None and len(found) > case.limit:
        chosen = random.Random(case.seed).sample(range(len(found)), case.limit)
        found = [found[number] for number in sorted(chosen)]
    return iter(found)


def serve(spec: str) -> None:
    """Run the cases that come as lines, and answer each trial with a line, until there are no more.

    Args:
        spec: Devices of the pool; ``none`` tries the CPU against itself.
    """
    from coverage_judge import judge

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what operators print is not an answer
    device, reopen = _opened(spec)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        skip = asked.pop("skip")
        began = time.perf_counter()
        for number, trial in enumerate(trials_of(Case(**asked))):
            if number < skip:
                continue
            verdict = judge(trial, device, asked["repeat"])
            if verdict.outcome == "crashed":
                reopen()
            print(json.dumps([trial.name, verdict.outcome, verdict.message]), file=answers)
        print(json.dumps({"seconds": time.perf_counter() - began}), file=answers)


def _opened(spec: str) -> tuple[Any, Callable[[], None]]:
    """Return the device to try, and how to get a new worker behind it."""
    import torch

    torch.set_num_threads(1)
    if spec == "none":
        return torch.device("cpu"), lambda: None
    import onebox

    pools = [onebox.open(spec, threads=1)]

    def reopen() -> None:
        pools.pop().close()
        pools.append(onebox.open(spec, threads=1))

    return torch.device("vgpu", 0), reopen


# ---- the side that hands them out


class Runner:
    """A process that runs cases; one that dies or hangs is replaced.

    Args:
        spec: Devices of the pool, for :func:`serve`.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._log: IO[str] | None = None

    def run(self, case: Case) -> Tally:
        """Run a case to its end, whatever happens to the process; one that it dies of again and again ends early."""
        tally = Tally(case=case)
        while tally.count("crashed") < DEATHS and not self._attempt(case, tally):
            self.close()
        return tally

    def _attempt(self, case: Case, tally: Tally) -> bool:
        """Run the trials that are left; return whether the case has ended."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # there will be no answer
            print(json.dumps({**asdict(case), "skip": len(tally.outcomes)}), file=self._process.stdin, flush=True)
        while True:
            answer = self._answer(TRIAL_S)
            if isinstance(answer, dict):
                tally.seconds += answer["seconds"]
                return True
            if isinstance(answer, str):
                tally.outcomes.append(("?", "crashed", answer))
                return False
            tally.outcomes.append((answer[0], answer[1], answer[2]))

    def _start(self) -> None:
        here = Path(__file__)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._lines = queue.Queue()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() ends it)
        self._process = subprocess.Popen(
            [sys.executable, str(here), self._spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        answer = self._answer(START_S)
        if not isinstance(answer, dict):
            self.close()
            raise RuntimeError(f"a process for trials did not start: {answer}")

    def _answer(self, timeout_s: float) -> Any:
        """Return the next answer, or in words what the process died of."""
        assert self._process is not None and self._log is not None
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return f"no answer for {timeout_s:.0f} s"
        if line:
            return json.loads(line)
        status = self._process.wait(timeout=10)
        self._log.seek(0)
        said = self._log.read().strip().splitlines()
        return f"the client ended with status {status}: {said[-1] if said else 'no word'}"[:300]

    def close(self) -> None:
        """End the process and what it has started."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None and self._log is not None
        self._log.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Put the lines of a process into a queue, and an empty one at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    process.stdout.close()
    lines.put("")


def run_cases(
    cases: Sequence[Case], spec: str, jobs: int, told: Callable[[Tally], None] = lambda tally: None
) -> list[Tally]:
    """Run cases in so many processes, and return what became of them, in order.

    Args:
        cases: What to run.
        spec: Devices of each process's pool, or ``none`` to try the CPU against itself.
        jobs: Processes.
        told: Called with each tally as it is complete.
    """
    waiting = iter(list(enumerate(cases)))
    tallies: dict[int, Tally] = {}
    errors: list[Exception] = []
    lock = threading.Lock()

    def work() -> None:
        runner = Runner(spec)
        try:
            while not errors:
                with lock:
                    number, case = next(waiting, (-1, None))
                if case is None:
                    return
                tally = runner.run(case)
                with lock:
                    tallies[number] = tally
                    told(tally)
        except Exception as error:
            errors.append(error)
        finally:
            runner.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [tallies[number] for number in sorted(tallies)]


if __name__ == "__main__" and len(sys.argv) == 2:
    serve(sys.argv[1])
