"""Settings of all tests that start no process."""

from __future__ import annotations

import torch
from hypothesis import settings

# The same examples each time: what a change breaks is the change's, and no test depends on how busy the machine is.
settings.register_profile("onebox", deadline=None, derandomize=True)
settings.load_profile("onebox")

torch.set_num_threads(1)  # tensors are small here, and operators that wake threads are slower and vary in the last bit
