"""A disk without any room: what the commands say of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
mount -t tmpfs -o size=64k none "$1" || exit 77
mkdir "$1/keys" && cd "$1"
dd if=/dev/zero of=fill bs=1k 2>/dev/null
export TMPDIR="$1" XDG_CACHE_HOME="$1" ONEBOX_CONFIG="$1/keys"
exec "$2" -m onebox train --pool "cpu*1" --data digits --model mlp --epochs 1
"""


def test_a_full_disk_is_named_with_what_can_be_done(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a disk of a few pages takes root, and unshare of util-linux")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", str(tmp_path), sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.returncode == 1, done.stderr
    assert "the disk is full: " in done.stderr and "Free there is 0 bytes" in done.stderr
    assert "Traceback" not in done.stderr and "Errno" not in done.stderr
    assert {"TMPDIR", "ONEBOX_CONFIG"} <= set(done.stderr.split())
