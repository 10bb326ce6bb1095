"""Pools of devices: those of this machine, of agents on other hosts or of a Ray cluster, each owned by a worker
process."""

from onebox.pool.client.connection import WorkerReply
from onebox.pool.devices import DeviceInfo
from onebox.pool.errors import raise_first
from onebox.pool.network.emulated import Link
from onebox.pool.open import open_pool
from onebox.pool.pool import Pool
from onebox.worker import Fault

__all__ = ["DeviceInfo", "Fault", "Link", "Pool", "WorkerReply", "open_pool", "raise_first"]
