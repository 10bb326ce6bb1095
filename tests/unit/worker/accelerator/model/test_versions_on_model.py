"""On a modelled accelerator."""

from tests.unit.worker.optimizer.test_versions import *  # noqa: F403
