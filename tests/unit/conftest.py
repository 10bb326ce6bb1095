"""Settings of all tests that start no process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tensors are small here, and operators that wake threads are slower and vary in the last bit."""
    import torch  # not when the file is read: the process that deals out the tests reads it, too

    torch.set_num_threads(1)
