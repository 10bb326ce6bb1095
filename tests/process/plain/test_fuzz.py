"""Random small models against plain PyTorch: the same numbers, or an error that helps; see :mod:`.grammar`.

``ONEBOX_FUZZ_MODELS`` says how many, 25 if it is not set, and ``ONEBOX_FUZZ_SEED`` from which seed. For the long run::

    ONEBOX_FUZZ_MODELS=500 pytest tests/process/plain/test_fuzz.py
"""

from __future__ import annotations

import os
import types
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.pools import Pools
from tests.process.plain import fuzzed, grammar
from tests.process.plain.case import TOLERANCE, Outcome, judged, plain_defaults
from tests.process.plain.pending import FUZZ_PENDING

MODELS = int(os.environ.get("ONEBOX_FUZZ_MODELS", "25"))
FIRST = int(os.environ.get("ONEBOX_FUZZ_SEED", "0"))
PARTS = 5

MAIN = """
if __name__ == "__main__":
    import sys

    with onebox.open(f"cpu*{{DEVICES}}", threads=1) as pool:
        difference, where = compare(sys.modules[__name__], pool)
    print(f"the largest difference is {{difference:.1e}}, in {{where}}")
"""


def script_of(text: str) -> types.ModuleType:
    """Return the script of the grammar with a text as a module."""
    script = types.ModuleType("fuzz")
    exec(compile(text, "fuzz.py", "exec"), vars(script))
    return script


def outcome_of(text: str, pools: Pools) -> Outcome:
    """Run a script both ways."""
    script = script_of(text)
    try:
        difference, where = fuzzed.compare(script, pools(script.DEVICES))
    except Exception as error:  # whatever it is: it is judged
        fuzzed.plain(script)  # where that fails, the grammar is wrong
        return judged(error)
    kind = "equal" if difference <= TOLERANCE else "silent"
    return Outcome(kind=kind, said=where, difference=difference)


def reproduction(text: str) -> str:
    """Return a script that stands for itself."""
    loop = Path(fuzzed.__file__).read_text()
    return f"{loop}\n\n{text}\n{MAIN.format()}"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models_compute_what_plain_pytorch_computes(part: int, pools: Pools, tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(FIRST + part, FIRST + MODELS, PARTS):
        with plain_defaults():
            text = grammar.write(seed, without=FUZZ_PENDING)
            outcome = outcome_of(text, pools)
        kinds[outcome.kind] += 1
        if outcome.kind not in ("equal", "refused"):
            found = tmp_path / f"seed_{seed}.py"
            found.write_text(reproduction(text))
            pytest.fail(f"seed {seed}: {outcome}; {found}:\n{reproduction(text)}")
    assert kinds["equal"] >= kinds["refused"], kinds
