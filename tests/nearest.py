"""The tests that are nearest to what has changed, as many as take about a minute: ``make check``.

A test file is as near to a module as the fewest imports that lead from one to the other; a name that a package's
``__init__`` hands on leads to the module that has it. Files are taken in the order of their distance, and of their
recorded seconds, until the time is used up; test files that have changed themselves come first, whatever they take.

    python -m tests.nearest              since the last commit
    python -m tests.nearest main         since the commit at which this branch left another one
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.tiers import CASE_S, LONG, recorded

ROOT = Path(__file__).parents[1]
BUDGET_S = 75.0
"""Seconds of all chosen tests together; several processes share them."""

FILE_S, TEST_S = 2.0, 0.05
"""Seconds for what a file imports and sets up, and for a test that is too quick to be recorded."""

ELSEWHERE = ("tests/gpu/", "tests/modelled/")
"""Folders that need what few machines have, or a process of their own."""


@functools.cache
def module_of(file: str) -> str:
    """Return the name of the module of a file, relative to the repository."""
    parts = Path(file).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, out of some modules.

    Args:
        sources: Text of each module.
    """
    names: dict[str, dict[str, str]] = {}  # of a module: name -> where it is from
    whole: dict[str, set[str]] = {}
    for module, text in sources.items():
        own, found = names.setdefault(module, {}), whole.setdefault(module, set())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if full in sources:
                        found.add(full)
                    elif node.module in sources:
                        own[alias.asname or alias.name] = f"{node.module}:{alias.name}"
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name in sources}

    def origin(place: str, left: int = 9) -> str:
        module, _, name = place.partition(":")
        handed_on = names[module].get(name)
        return origin(handed_on, left - 1) if handed_on and left else module

    return {module: whole[module] | {origin(place) for place in own.values()} for module, own in names.items()}


def distances(edges: Mapping[str, Iterable[str]], changed: Iterable[str]) -> dict[str, int]:
    """Return the fewest imports from each module to one that has changed; unreached ones are absent."""
    importers: dict[str, set[str]] = {}
    for module, found in edges.items():
        for each in found:
            importers.setdefault(each, set()).add(module)
    far = dict.fromkeys(changed, 0)
    line = list(far)
    for module in line:  # grows
        for each in importers.get(module, ()):
            if each not in far:
                far[each] = far[module] + 1
                line.append(each)
    return far


def chosen(far: Mapping[str, int], seconds: Mapping[str, float], budget_s: float) -> list[str]:
    """Return the test files to run, the nearest first.

    Args:
        far: Distance of each reached test file; 0 is one that has changed.
        seconds: Seconds that each takes.
        budget_s: Seconds for those that have not changed.
    """
    found, left_s = [], budget_s
    for file in sorted(far, key=lambda file: (far[file], seconds[file], file)):
        if far[file] and seconds[file] > left_s:
            continue
        left_s -= seconds[file] if far[file] else 0.0
        found.append(file)
    return found


def changed_files(since: str) -> list[str]:
    """Return the files that differ from the commit at which this branch and another one parted.

    Raises:
        ValueError: There is no such branch or commit.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
        if done.returncode:
            reason = next(iter(done.stderr.splitlines()), f"git ended with {done.returncode}")
            raise ValueError(f"{since!r} is no commit or branch that this one is compared with: {reason}")
        return done.stdout.split("\n")

    base = git("merge-base", since, "HEAD")[0]
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")} - {""})


class Nearest:
    """The test files that are near to a file, and the seconds that each takes."""

    def __init__(self) -> None:
        files = [path for place in ("src/onebox", "tests") for path in (ROOT / place).rglob("*.py")]
        self._texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
        self._edges = imports({module_of(file): text for file, text in self._texts.items()})
        durations, self._seconds = recorded(), dict[str, float]()
        for file, text in self._texts.items():
            if Path(file).name.startswith("test_") and not file.startswith((*LONG, *ELSEWHERE)):
                own = (time_s for name, time_s in durations.items() if name.startswith(f"{file}::"))
                quick = TEST_S * text.count("\ndef test_")
                self._seconds[file] = FILE_S + quick + sum(each for each in own if each <= CASE_S)

    def files(self, changed: Iterable[str], budget_s: float = BUDGET_S) -> list[str]:
        """Return the test files to run for files that have changed."""
        far = distances(self._edges, {module_of(file) for file in changed if file in self._texts})
        reached = {file: far[module_of(file)] for file in self._seconds if module_of(file) in far}
        return chosen(reached, self._seconds, budget_s)


def main(arguments: Sequence[str]) -> int:
    """Print the test files, one on a line; return the exit status."""
    if len(arguments) > 1:
        print(f"{len(arguments)} arguments came; allowed is one branch or commit, or none", file=sys.stderr)
        return 2
    try:
        changed = changed_files(*arguments or ["HEAD"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(Nearest().files(changed)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
