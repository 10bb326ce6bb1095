"""A pool shared with child processes: the parent's server, the children's pool, and the messages between them.

The devices stay the parent's: it alone has sockets to workers, and forwards what its children send. Each process has
numbers of its own for buffers and definitions, so that several can use one worker.
"""

from onebox.pool.sharing.attached_pool import ADDRESS, UNSHARED, AttachedPool, parent_address
from onebox.pool.sharing.pool_server import PoolServer

__all__ = ["ADDRESS", "UNSHARED", "AttachedPool", "PoolServer", "parent_address"]
