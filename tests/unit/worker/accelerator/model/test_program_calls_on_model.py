"""On a modelled accelerator."""

from tests.unit.worker.execution.test_program_calls import *  # noqa: F403
