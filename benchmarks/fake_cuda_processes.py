"""Captures checked in processes of their own, which an operator may end, each with a time limit.

A process answers tasks, one after the other. Where it ends, or a capture takes too long, that capture has a name, and
another process goes on with the next one.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fake_devices import Mismatch

START_S = 180.0
"""Time limit of a process until it has imported what it needs and found the first sample."""

_TRIAL, _OUTCOME, _DONE = "== trial ", "== outcome ", "== done"


class Task(NamedTuple):
    """A name of a suite."""

    suite: str
    name: str


@dataclass(kw_only=True)
class Outcome:
    """The check of one capture.

    Args:
        name: Its name.
        programs: Programs that were checked.
        found: What is wrong.
        left_out: Reason that there are none: it cannot be captured, on any device.
        ended: Reason that its process had to end, or ended.
    """

    name: str
    programs: int = 0
    found: list[Mismatch] = field(default_factory=list)
    left_out: str = ""
    ended: str = ""


class TimeUp(Exception):
    """The time for all tasks is up."""


def answer(trials: Callable[[Task], Iterable[tuple[str, Callable[[], Outcome]]]]) -> None:
    """Check the tasks that come by standard input, and print outcomes."""
    for line in sys.stdin:
        suite, name, skip = json.loads(line)
        for number, (what, check) in enumerate(trials(Task(suite, name))):
            if number >= skip:
                print(_TRIAL + what, flush=True)
                print(_OUTCOME + json.dumps(asdict(check())), flush=True)
        print(_DONE, flush=True)


class Checker:
    """A process that checks tasks; another one is made where it has ended.

    Args:
        command: Its command line.
        trial_s: Time limit of a capture.
        ends: The time (of ``time.monotonic``) by which all has ended.
    """

    def __init__(self, command: Sequence[str], trial_s: float, ends: float) -> None:
        self._command, self._trial_s, self._ends = command, trial_s, ends
        self._process: subprocess.Popen[str] | None = None
        self._late = False

    def check(self, task: Task) -> list[Outcome]:
        """Check a task.

        Raises:
            TimeUp: The time is up.
        """
        found: list[Outcome] = []
        begun = 0
        while True:
            what, words, within = f"{task.name}: before a capture", "", False
            for line in self._lines([*task, begun]):
                if line == _DONE:
                    return found
                if line.startswith(_TRIAL):
                    what, within, begun = line.removeprefix(_TRIAL), True, begun + 1
                elif line.startswith(_OUTCOME):
                    found.append(_outcome(json.loads(line.removeprefix(_OUTCOME))))
                    what, within = f"{task.name}: after {found[-1].name}", False
                else:
                    words = line or words
            how = self._end()
            if time.monotonic() >= self._ends:
                raise TimeUp
            found.append(Outcome(name=what, ended=f"{how} {words}".strip()))
            if not within:  # it would end there again
                return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _lines(self, request: list[Any]) -> Iterator[str]:
        """Send a request; return lines until the process ends, which it does where one takes too long."""
        limit_s = self._trial_s if self._process is not None else START_S
        process = self._process = self._process or subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._late = False
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return
        while True:
            timer = threading.Timer(max(0.0, min(limit_s, self._ends - time.monotonic())), self._stop)
            timer.start()
            try:
                line = process.stdout.readline()
            finally:
                timer.cancel()
            if not line:
                return
            limit_s = self._trial_s
            yield line.rstrip("\n")

    def _stop(self) -> None:
        assert self._process is not None
        self._late = True
        self._process.kill()

    def _end(self) -> str:
        """Wait for the process; return how it ended."""
        process, self._process = self._process, None
        assert process is not None
        with process:  # closes its pipes
            code = process.wait()
        if self._late:
            return f"took longer than {self._trial_s:.0f} s"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def run(
    command: Sequence[str], tasks: Sequence[Task], jobs: int, *, trial_s: float, ends: float, keep: Path | None
) -> dict[Task, list[Outcome]]:
    """Check tasks in some processes; return the outcomes of those for which there was time.

    Args:
        command: Command line of a process that calls :func:`answer`.
        tasks: The tasks.
        jobs: Number of processes.
        trial_s: Time limit of a capture.
        ends: The time (of ``time.monotonic``) by which all has ended.
        keep: A file to which the outcomes of each task are added.
    """
    checkers: queue.SimpleQueue[Checker] = queue.SimpleQueue()
    made = [Checker(command, trial_s, ends) for _ in range(jobs)]
    for checker in made:
        checkers.put(checker)

    def check(task: Task) -> tuple[Task, list[Outcome]]:
        if time.monotonic() >= ends:
            raise TimeUp
        checker = checkers.get()
        try:
            return task, checker.check(task)
        finally:
            checkers.put(checker)

    done: dict[Task, list[Outcome]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(check, task) for task in tasks]):
                try:
                    task, outcomes = future.result()
                except TimeUp:
                    continue
                done[task] = outcomes
                if keep is not None:
                    with keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps([*task, [asdict(outcome) for outcome in outcomes]]) + "\n")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for checker in made:
                checker.close()
    return done


def kept(path: Path | None) -> dict[Task, list[Outcome]]:
    """Return the outcomes in a file, none where there is no file."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {Task(suite, name): [_outcome(each) for each in outcomes] for suite, name, outcomes in lines}


def _outcome(given: dict[str, Any]) -> Outcome:
    return Outcome(**(given | {"found": [Mismatch(**bad) for bad in given["found"]]}))
