"""An agent in a process of its own; its keys and that of its client come on standard input, its port as an argument."""

from __future__ import annotations

import signal
import sys

from onebox.agent import Agent, ClientLimits, Offered
from onebox.wire import KeyPair


def main() -> None:
    public, secret, client = (sys.stdin.readline().strip() for _ in range(3))
    agent = Agent(
        keys=KeyPair(public, secret),
        name_of=lambda key: "ana" if key == client else None,
        bind="127.0.0.1",
        port=int(sys.argv[1]) if len(sys.argv) > 1 else 0,
        advertise="127.0.0.1",
        offers=[Offered(device="cpu", name="a CPU", memory_bytes=1 << 30, threads=2)],
        limits=ClientLimits(),
        tell=lambda event, **fields: None,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: agent.stop())
    print(agent.endpoint, flush=True)
    agent.run()


if __name__ == "__main__":
    main()
