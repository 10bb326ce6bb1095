"""A script that torchrun starts on two ranks, alone or under ``onebox run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def launched(words: list[str], script: str, folder: Path, **environment: str) -> list[Any]:
    """Run a script with two ranks and return what each has written as JSON to the path that it got, and its rank."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    line = [sys.executable, "-m", *words, "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*line, str(folder / "train.py"), str(folder / "rank")],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]
