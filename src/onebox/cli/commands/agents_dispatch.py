"""Dispatch of the commands for several machines; each is imported only when it is called."""

from __future__ import annotations

from onebox.cli.options.agents import MachinesConfig, ServeConfig, StatusConfig
from onebox.cli.options.pairing import PairConfig


def run_machines(config: MachinesConfig) -> None:
    """Run one of ``serve``, ``pair``, ``status`` and ``logs``.

    Raises:
        OneboxError: It failed.
    """
    if isinstance(config, ServeConfig):
        from onebox.cli.commands.serve import serve

        serve(config)
    elif isinstance(config, PairConfig):
        from onebox.cli.commands.pair import pair

        pair(config)
    elif isinstance(config, StatusConfig):
        from onebox.cli.commands.status import show_status

        show_status(config)
    else:
        from onebox.cli.commands.logs import show_log

        show_log(config)
