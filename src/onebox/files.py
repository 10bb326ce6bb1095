"""Files that are put in place whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def put_file(path: Path, content: bytes) -> None:
    """Put a file in place whole or not at all, readable for this user alone; other writers of it do not disturb.

    Args:
        path: Where, in a folder that is there.
        content: What it holds.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
