"""A pool shared with child processes: the parent's server, the children's pool, and the messages between them.

The devices stay the parent's: it alone has sockets to workers, and passes on what its children send to them and they
reply, which are the workers' own messages. Each process has numbers of its own for buffers, definitions and groups, so
that several can use one worker.
"""

from onebox.pool.sharing.attached_pool import ADDRESS, UNSHARED, AttachedPool, parent_address
from onebox.pool.sharing.pool_server import PoolServer

__all__ = ["ADDRESS", "UNSHARED", "AttachedPool", "PoolServer", "parent_address"]
