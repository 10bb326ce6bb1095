"""The suites on modelled accelerators, in a process of their own.

Their tensors are of PyTorch's one private device, which virtual devices are in the processes of other tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit import warm

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", ["short", "long or hypothesis"])
def test_suites_on_modelled_accelerators(tier: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", tier, "tests/modelled"]
    done = warm.run(command, cwd=REPOSITORY, env=warm.single(), text=True, timeout=870)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
