"""The table of seeded faults fits the code: each can be put back, and names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.seeded_faults.mutants import mutants_of, sample
from tests.seeded_faults.table import SeededFault, seeded_faults

ROOT = Path(__file__).parents[2]
FAULTS = seeded_faults()
WAITS = seeded_faults("waits.toml")


def test_there_are_thirty_and_more() -> None:
    assert len(FAULTS) >= 30
    assert len({(fault.file, fault.old) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", [*FAULTS, *WAITS], ids=lambda fault: fault.name)
def test_a_fault_can_be_put_back_and_its_tests_are_there(fault: SeededFault) -> None:
    assert fault in WAITS or re.fullmatch(r"[0-9a-f]{7} \S.*", fault.origin)
    before = (ROOT / fault.file).read_text(encoding="utf-8")
    seeded = fault.seeded(before)
    assert seeded != before
    compile(seeded, fault.file, "exec")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0].rpartition('::')[2]}(" in text, f"{file} has no {name}"


CODE = '''
LIMIT = 3


def f(a: int, b: str = "x") -> int:
    """Return 1 < 2."""
    if a < LIMIT and not b:
        raise ValueError(f"{a + 1}")
    print(a + 2)
    return a * LIMIT if b == "é" else "x" + b
'''


def test_random_changes_are_of_what_functions_do() -> None:
    found = mutants_of("f.py", CODE)
    changed = {each.seeded(CODE).splitlines()[each.line - 1].strip() for each in found}
    assert changed == {
        "if (a < LIMIT or not b):",
        "if (a <= LIMIT) and not b:",
        "if a < LIMIT and (b):",
        "pass",
        "print((a - 2))",
        "print(a + (3))",
        "return None",
        "return ('x' + b if b == 'é' else a * LIMIT)",
        'return (a / LIMIT) if b == "é" else "x" + b',
        "return a * LIMIT if (b != 'é') else \"x\" + b",
    }
    for each in found:
        compile(each.seeded(CODE), each.file, "exec")


def test_random_changes_are_the_same_for_a_seed() -> None:
    first = sample(ROOT, 5, 1)
    assert first == sample(ROOT, 5, 1) != sample(ROOT, 5, 2)
    for each in first:
        compile(each.seeded((ROOT / each.file).read_text(encoding="utf-8")), each.file, "exec")
