"""On a modelled accelerator."""

from tests.unit.worker.optimizer.test_native import *  # noqa: F403
