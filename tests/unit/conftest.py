"""Settings of all tests that start no process."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # tensors are small here, and operators that wake threads are slower and vary in the last bit
