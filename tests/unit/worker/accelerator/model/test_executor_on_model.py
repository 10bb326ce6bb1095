"""On a modelled accelerator."""

from tests.unit.worker.execution.test_executor import *  # noqa: F403
