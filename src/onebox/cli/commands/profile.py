"""``onebox profile``: speed of a pool's devices and links, and of a model on them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from onebox.cli.commands.devices import print_devices
from onebox.cli.console import UNLIMITED, OutputConsole
from onebox.cli.options.jobs import JobConfig
from onebox.cli.options.pools import ProfileConfig
from onebox.cli.output_files import check_figure, check_target, give_json
from onebox.cli.planning import job_of
from onebox.cli.training.run_setup import load_data
from onebox.cli.user_code import import_functions
from onebox.cost import PoolProfile, link_age_line
from onebox.cost.model_profile import ModelProfile
from onebox.engine.planning.profile import profile_model
from onebox.pool import Pool, open_pool
from onebox.report import profile_tables, segment_tables


def show_profile(config: ProfileConfig) -> None:
    """Open a pool, measure it or read the cached profile, and show it.

    Raises:
        UsageError: The pool has not enough memory, or the file cannot be written.
        OneboxError: The pool cannot be opened, or a worker failed.
    """
    check_target("--report", config.report)
    check_figure(config.figure)
    import_functions(config)
    with open_pool(config.pool, threads=config.threads, memory=config.memory, plain_links=config.plain_links) as pool:
        profile = pool.profile(fresh=config.fresh, cache=not config.no_cache)
        model = _measure(config, config.model, pool) if config.model is not None else None
        console = OutputConsole(highlight=False, quiet=config.json)
        _print_tables(pool, profile, console)
        for table in segment_tables(model) if model is not None else ():
            console.print(table)
        if config.figure is not None:
            pool.figure(config.figure)
            console.write_line(f"figure {config.figure}")
    if config.json or config.report is not None:
        give_json(_as_data(profile, model), printed=config.json, path=config.report)


def _measure(config: ProfileConfig, name: str, pool: Pool) -> ModelProfile:
    """Measure a model's segments on a pool."""
    job = JobConfig(model=name, loss=config.loss, data=config.data, batch=max(config.sizes)).resolved()
    made = job_of(job, load_data(job))
    batch = len(made[-1])
    profile, _ = profile_model(
        *made,
        pool=pool,
        sizes=[size for size in config.sizes if size <= batch] or [batch],
        precision=config.precision,
        fresh=config.fresh,
        cache=not config.no_cache,
    )
    return profile


def _as_data(profile: PoolProfile, model: ModelProfile | None) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(profile, str_keys=True)
    return data if model is None else {**data, "model": msgspec.to_builtins(model, str_keys=True)}


def _print_tables(pool: Pool, profile: PoolProfile, console: OutputConsole) -> None:
    tables = profile_tables(profile)
    console.widen(tables, UNLIMITED)  # a matrix that is wider than the terminal exceeds its edge rather than be cut
    print_devices(pool, console)
    for table in tables:
        console.print(table)
    if line := link_age_line(profile, time.time()):
        console.write_line(line)
    console.write_line(f"measured {profile.measured_at} with torch {profile.torch}; --fresh measures anew")
