"""On a modelled accelerator."""

from tests.unit.worker.memory.test_offload_order import *  # noqa: F403
