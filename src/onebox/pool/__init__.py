"""Where devices come from: this machine's, each owned by a worker process."""

from onebox.pool.failures import raise_first
from onebox.pool.links import Link
from onebox.pool.opening import open_pool
from onebox.pool.pool import DeviceInfo, Pool
from onebox.pool.switchboard import Answer
from onebox.worker import Fault

__all__ = ["Answer", "DeviceInfo", "Fault", "Link", "Pool", "open_pool", "raise_first"]
