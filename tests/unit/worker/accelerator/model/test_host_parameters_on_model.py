"""On a modelled accelerator."""

from tests.unit.worker.optimizer.test_host_parameters import *  # noqa: F403
