"""A TCP probe of an agent's address: reports at once that nothing listens, where ZeroMQ would retry in silence."""

from __future__ import annotations

import errno
import socket
import time

from onebox.errors import PoolError
from onebox.pool.backends.agents.agent_socket import resolve

WITHIN_S = 5.0
"""How long a host may take to accept; one that is down, or behind a firewall, never answers."""

_REFUSED_S = 1.0
"""How long a refused connection is tried again: the agent may be starting."""

_PAUSE_S = 0.1


def reach(address: str) -> None:
    """Check that an agent's address accepts TCP connections.

    Args:
        address: ``HOST`` or ``HOST:PORT``.

    Raises:
        UsageError: Its host has no address.
        PoolError: Nothing listens there, or the host does not answer.
    """
    family, *_, where = resolve(address)
    began_s = time.monotonic()
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(WITHIN_S)
            try:
                probe.connect(where)
            except TimeoutError:
                raise PoolError(
                    f"no answer from {address} within {WITHIN_S:.0f} s: the host may be down, or a firewall between; "
                    "'onebox status' shows the agents that can be reached"
                ) from None
            except OSError as error:
                if error.errno != errno.ECONNREFUSED:
                    raise PoolError(f"{address} cannot be reached: {error.strerror or error}") from None
            else:
                return
        if time.monotonic() - began_s > _REFUSED_S:
            raise PoolError(
                f"nobody listens at {address}: run 'onebox serve' on that host, or mend the address ('onebox pair "
                "list' has those of the agents that you know)"
            )
        time.sleep(_PAUSE_S)
