"""Offloading, on a modelled accelerator."""

from tests.unit.worker.memory.test_offload import *  # noqa: F403
