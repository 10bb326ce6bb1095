"""``onebox train``: from options to a trained model and the folder of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from onebox.cli.commands.devices import print_devices
from onebox.cli.console import OutputConsole
from onebox.cli.exit_status import FAILED, Exit, Interrupted, interruption
from onebox.cli.options.jobs import DATA_PARALLEL, TrainConfig
from onebox.cli.options.run_config import to_stored
from onebox.cli.planning import plan_of_run, write_plan
from onebox.cli.training.run_page import shown_run
from onebox.cli.training.run_setup import StartedRun, load_data, run_folder, start_run
from onebox.cli.training.run_summary import print_outcome, write_outcome
from onebox.cli.training.training_loop import TrainingLoop
from onebox.cli.user_code import import_functions
from onebox.engine.workload.delay_compensation import choose_delays
from onebox.errors import OneboxError, UsageError
from onebox.feed import Data, Feed
from onebox.plan import Simulation
from onebox.pool import Pool, open_pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.pool.spec import POOL_VARIABLE
from onebox.report import MetricsLog, Progress, RunFolder, rewind_metrics, summary_line
from onebox.stop_signals import StopSignals, exit_status

_TEST_BATCH = 500
"""Divides the test sets of MNIST and CIFAR-10, so that one shape is captured."""


def train(config: TrainConfig) -> None:
    """Train according to the options, or continue an earlier run.

    Raises:
        UsageError: The options do not fit the data or the devices.
        DataError: The data cannot be read.
        CheckpointError: The checkpoint of the resumed run is damaged or foreign.
        Exit: The training failed or was interrupted.
    """
    console = OutputConsole()
    config = config.resolved()
    import_functions(config)
    data = load_data(config)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(run_folder(config, data.name))
        plan, forecast = plan_of_run(config, folder, data, say=lambda text: console.print(text, highlight=False))
        if config.staleness and config.plan == "auto" and plan is not None and not plan.late:
            console.print("being late gains nothing here: the plan is exact, and so are the steps", highlight=False)
            config = dataclasses.replace(config, staleness=0, correction="auto", warm_up=None)
        pool = stack.enter_context(
            open_pool(config.pool, threads=config.threads, memory=config.memory, plain_links=config.plain_links)
        )
        _check_shares(config, pool)
        print_devices(pool, console)
        if plan is not None and plan.predicted is not None:
            console.write_line(f"predicted: {summary_line(plan)}")
        begun = start_run(config, folder, data, pool, plan if forecast is None else forecast.made)
        stack.enter_context(begun.trainer)
        folder.write_config(to_stored(_as_opened(config, pool)))
        if plan is not None:
            write_plan(folder.plan, plan, "--plan")
        rewind_metrics(folder.metrics, step=begun.trainer.steps_done, epochs=begun.standing.position.epoch)
        with MetricsLog(folder.metrics) as log:
            loop = _loop(config, folder, data, begun, log, console)
            with shown_run(loop, say=console.write_line):
                _run(loop, pool, console, None if forecast is None else forecast.simulation)


def _check_shares(config: TrainConfig, pool: Pool) -> None:
    weights = config.data_parallel.shares
    if config.islands is None and not isinstance(weights, str) and len(weights) != len(pool):
        raise UsageError(f"--shares {config.shares}: {len(weights)} weights for {len(pool)} devices; give one for each")


def _as_opened(config: TrainConfig, pool: Pool) -> TrainConfig:
    """Return the options with the devices that ``auto`` stood for, so that a resumed run requests the same."""
    if any(device.host != LOCAL_HOST for device in pool.devices):
        spec = os.environ.get(POOL_VARIABLE, "") if config.pool == "auto" else config.pool
        devices = str(Path(spec).expanduser().absolute()) if spec.endswith(".toml") else spec
        return dataclasses.replace(config, pool=devices)
    devices = ",".join(device.device for device in pool.devices)
    return dataclasses.replace(config, pool=devices, threads=pool.devices[0].threads)


def _loop(
    config: TrainConfig, folder: RunFolder, data: Data, begun: StartedRun, log: MetricsLog, console: OutputConsole
) -> TrainingLoop:
    cores = max(1, begun.trainer.pool.cores[0].free)
    batches = Feed(
        data.train,
        batch_size=config.batch,
        seed=config.seed,
        read=config.readers,
        process=config.processors,
        on_error=config.on_error,
        upload=begun.trainer.upload,
        cores=cores,
    )
    batches.resume(begun.standing.position)
    test = Feed(
        data.test,
        batch_size=_TEST_BATCH,
        shuffle=False,
        read=config.readers,
        process=config.processors,
        on_error=config.on_error,
        cores=cores,
    )
    progress = Progress(
        total_steps=config.epochs * len(batches),
        epochs=config.epochs,
        every=config.every,
        console=console,
        start_step=begun.trainer.steps_done,
    )
    return TrainingLoop(
        config=config,
        trainer=begun.trainer,
        data=data,
        train=batches,
        test=test,
        folder=folder,
        log=log,
        progress=progress,
        standing=begun.standing,
        stop=StopSignals(config.stop_within),
        saved=begun.saved,
        planned=config.plan not in (None, DATA_PARALLEL),
    )


def _run(loop: TrainingLoop, pool: Pool, console: OutputConsole, expected: Simulation | None) -> None:
    with _failures(loop):
        with loop.progress, loop.stop:
            _note_start(loop)
            loop.run()
        _end_if_stopped(loop)
        found = write_outcome(loop, pool, expected=expected)
    print_outcome(loop, console, found)
    if loop.unsaved is not None:
        raise Exit(FAILED, f"the run has ended, but its end is not saved: {loop.unsaved}\n  {_whereabouts(loop)}")


def _note_start(loop: TrainingLoop) -> None:
    numbers = sum(parameter.numel() for parameter in loop.trainer.model.parameters())
    sizes = f"{len(loop.data.train):,} samples to train on, {len(loop.data.test):,} to test on"
    loop.progress.note(f"{loop.config.model} of {numbers:,} parameters, {sizes}")
    stale = loop.trainer.stale
    if stale is not None:
        for choice, _ in choose_delays(loop.trainer.optimizer, stale.correction):
            first = f"the first {stale.warm_up} steps are exact"
            loop.progress.note(f"late gradients: correction {choice.delay!r}, {choice.why}; {first}")
            if choice.warning is not None:
                loop.progress.note(f"  {choice.warning}")
    if loop.config.resume is None:
        return
    if loop.saved is None:
        loop.progress.note(f"{loop.folder.path} has no checkpoint yet: starting from the beginning")
    elif loop.standing.position.epoch >= loop.config.epochs:
        loop.progress.note(f"the run has had all its {loop.config.epochs} epochs; --epochs gives it more")
    else:
        loop.progress.note(f"going on from {loop.saved}")


@contextlib.contextmanager
def _failures(loop: TrainingLoop) -> Iterator[None]:
    """Add the run's progress and the way to continue to errors that end the training."""
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except (OneboxError, OSError) as error:
        raise Exit(FAILED, f"{error}\n  {_whereabouts(loop)}") from error
    except (KeyboardInterrupt, SystemExit) as error:
        number = error.number if isinstance(error, Interrupted) else loop.stop.signal
        if number is None and isinstance(error, SystemExit):
            raise
        what = interruption(number or signal.SIGINT)
        what += f", and nothing could be saved within {loop.stop.within_s:g} s" if loop.stop.expired else ""
        raise Exit(exit_status(number or signal.SIGINT), f"{what}; {_whereabouts(loop)}") from None


def _end_if_stopped(loop: TrainingLoop) -> None:
    """End the command if a signal has ended the training loop between two steps.

    Raises:
        Exit: It has.
    """
    if not loop.stopped:
        return
    assert loop.stop.signal is not None
    what = f"{interruption(loop.stop.signal)} after step {loop.trainer.steps_done}"
    if loop.unsaved is not None:
        what += f", which is not saved: {loop.unsaved}"
    raise Exit(loop.stop.status, f"{what}; {_whereabouts(loop)}")


def _whereabouts(loop: TrainingLoop) -> str:
    if loop.saved is None:
        return f"no checkpoint had been written in {loop.folder.path}"
    return f"the last checkpoint is {loop.saved}; go on with: onebox train --resume {loop.folder.path}"
