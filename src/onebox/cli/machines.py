"""Which command of those for several machines is meant; each is imported only when it is called."""

from __future__ import annotations

from onebox.cli.machines_config import MachinesConfig, PairConfig, ServeConfig, StatusConfig


def run_machines(config: MachinesConfig) -> None:
    """Run one of ``serve``, ``pair``, ``status`` and ``logs``.

    Raises:
        OneboxError: It failed.
    """
    if isinstance(config, ServeConfig):
        from onebox.cli.serve import serve

        serve(config)
    elif isinstance(config, PairConfig):
        from onebox.cli.pair import pair

        pair(config)
    elif isinstance(config, StatusConfig):
        from onebox.cli.status import show_status

        show_status(config)
    else:
        from onebox.cli.logs import show_log

        show_log(config)
