"""On a modelled accelerator."""

from tests.unit.worker.snapshots.test_snapshots import *  # noqa: F403
