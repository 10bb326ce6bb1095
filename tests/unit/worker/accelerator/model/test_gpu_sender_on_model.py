"""On a modelled accelerator."""

from tests.unit.worker.comm.shm.test_gpu_sender import *  # noqa: F403
