"""Put each fault of the table back in a copy of the tree, and require that its tests fail.

Run it by ``python -m tests.seeded_faults``.

The user's tree is only read. The tests have passed in the copy before; with the fault one of them has to fail. A fault
whose tests do not run does not count as caught. The exit status is 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests import nearest
from tests.seeded_faults.mutants import Mutant, sample
from tests.seeded_faults.table import SeededFault, Tier, seeded_faults

ROOT = Path(__file__).parents[2]

TEST_S = 120
"""Time limit of a test, after which it has failed."""

RUN_S = 900
"""Time limit of the tests of a fault."""

_UNRELATED = re.compile(r" - (?:\w+\.)*(?:ImportError|ModuleNotFoundError|SyntaxError|NameError)\b")
"""Failures that show broken code rather than the fault."""

Outcome = Literal["caught", "not caught", "does not apply"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of the tests of a fault."""

    fault: SeededFault | Mutant
    outcome: Outcome
    seconds: float
    words: str


class Copy:
    """A copy of the tree in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "dist", "shared"))
        for name in (".pre-commit-config.yaml", ".gitignore", ".ci"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.root / name)
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, self.root / name)

    @contextmanager
    def seeded(self, fault: SeededFault | Mutant) -> Iterator[None]:
        """Put a fault into the copy.

        Raises:
            ValueError: Its text is not there.
        """
        path = self.root / fault.file
        if not path.is_file():
            raise ValueError(f"{fault.name}: there is no {fault.file}")
        before = path.read_text(encoding="utf-8")
        _write(path, fault.seeded(before))
        try:
            yield
        finally:
            _write(path, before)

    def run(self, tests: Sequence[str], tier: Tier, *, first: bool) -> tuple[int, str]:
        """Run tests, and return pytest's exit status and output.

        Args:
            tests: Arguments of pytest.
            tier: Whether only tests of the short tier are run.
            first: Whether to stop at the first failure.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
        command += ["-m", "short"] * (tier == "short") + ["-x"] * first + list(dict.fromkeys(tests))
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src")}  # before an installed onebox
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=RUN_S)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return -1, f"the tests did not end within {RUN_S} s"
                raise
        return process.returncode, output


def _write(path: Path, text: str) -> None:
    """Write a source file; its bytecode goes, as that is recognised by size and whole seconds."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def check(copy: Copy, fault: SeededFault | Mutant, tier: Tier, *, sound: bool) -> Result:
    """Return whether the tests of a fault catch it.

    Args:
        copy: The copy of the tree.
        fault: The fault.
        tier: The tier of the tests.
        sound: Whether its tests are known to pass without it.
    """
    begin_s = time.monotonic()
    used = tier if fault.tier == "short" else "long"

    def result(outcome: Outcome, words: str) -> Result:
        return Result(fault=fault, outcome=outcome, seconds=time.monotonic() - begin_s, words=words)

    if not sound:
        status, output = copy.run(fault.tests, used, first=True)
        if status:
            return result("does not apply", f"without the fault: {_words(output)}")
    try:
        with copy.seeded(fault):
            status, output = copy.run(fault.tests, used, first=True)
    except ValueError as error:
        return result("does not apply", str(error))
    failures = [line for line in output.splitlines() if line.startswith("FAILED ")]
    if status == 0:
        return result("not caught", _words(output))
    if status != 1 or not failures or all(map(_UNRELATED.search, failures)):
        return result("does not apply", _words(output))
    return result("caught", failures[0].removeprefix("FAILED "))


def _words(output: str) -> str:
    """Return the last line of pytest's output, or its first error."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR", "FAILED", "E  "))]
    return " ".join((errors or lines or ["no output"])[0 if errors else -1].split())


def mutants(count: int, seed: int) -> list[Mutant]:
    """Return random changes of the code, each with the tests that are nearest to it."""
    near = nearest.Nearest()
    return [dataclasses.replace(each, tests=tuple(near.files([each.file]))) for each in sample(ROOT, count, seed)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the faults, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="only faults whose name has this")
    parser.add_argument(
        "--tier", choices=("short", "long"), default="long", help="short: the short tier alone has to catch them"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults that are checked at a time")
    parser.add_argument("--random", type=int, metavar="COUNT", help="random changes of the code, and the nearest tests")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes")
    given = parser.parse_args(arguments)
    if given.random is not None and given.random < 1:
        parser.error(f"--random {given.random}: allowed are 1 and more")
    faults: list[SeededFault | Mutant] = []
    faults += seeded_faults() if given.random is None else mutants(given.random, given.seed)
    faults = [each for each in faults if not given.only or any(name in each.name for name in given.only)]
    faults = [each for each in faults if given.tier == "long" or each.tier == "short"]
    if not faults:
        parser.error("no fault has such a name")
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(max(1, given.jobs)):
            (own := Path(folder, str(number))).mkdir()
            copies.put(Copy(own))
        copy, status = copies.get(), 0
        if given.random is None:
            status, output = copy.run([test for fault in faults for test in fault.tests], given.tier, first=False)
            print(f"without a fault: {_words(output)}", flush=True)
        copies.put(copy)

        def checked(fault: SeededFault | Mutant) -> Result:
            copy = copies.get()
            try:
                return check(copy, fault, given.tier, sound=status == 0)
            finally:
                copies.put(copy)

        results = []
        with ThreadPoolExecutor(max(1, given.jobs)) as pool:
            for result in pool.map(checked, faults):
                results.append(result)
                width = max(len(fault.name) for fault in faults)
                words = f"{result.outcome:14}  {result.seconds:4.0f} s  {result.words}"
                print(f"{result.fault.name:{width}}  {words}"[:200], flush=True)
    caught = sum(result.outcome == "caught" for result in results)
    print(f"{caught} of {len(faults)} faults caught")
    return 0 if caught == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
