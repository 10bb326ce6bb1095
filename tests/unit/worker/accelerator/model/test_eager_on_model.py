"""On a modelled accelerator."""

from tests.unit.worker.execution.test_eager import *  # noqa: F403
