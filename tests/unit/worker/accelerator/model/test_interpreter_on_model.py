"""On a modelled accelerator."""

from tests.unit.worker.programs.test_interpreter import *  # noqa: F403
