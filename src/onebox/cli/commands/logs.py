"""``onebox logs HOST``: the newest lines of an agent's log."""

from __future__ import annotations

from onebox.cli.options.agents import LogsConfig
from onebox.pool.backends.agents.agent_source import connect_agent
from onebox.wire.clean_text import clean_text


def show_log(config: LogsConfig) -> None:
    """Print the newest lines of an agent's log.

    Raises:
        UsageError: This client was not paired with it.
        PoolError: It cannot be reached, or rejects this client.
    """
    line = connect_agent(config.host)
    try:
        found = line.read_log(config.lines)
    finally:
        line.close()
    for each in found[-config.lines :]:
        print(clean_text(each))
