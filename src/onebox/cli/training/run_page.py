"""The page of a training run, and the status in its folder, from its beginning to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from onebox.cli.exit_status import FAILED, Exit
from onebox.cli.training.training_loop import TrainingLoop
from onebox.plan import Plan
from onebox.report import RunState, RunStatus

if TYPE_CHECKING:  # nothing of the page is imported unless a run has one
    from onebox.report.page.live_run import LiveRun


@contextlib.contextmanager
def shown_run(loop: TrainingLoop, *, say: Callable[[str], object]) -> Iterator[None]:
    """Keep the status of a run in its folder and, if it has a page, serve that, until the run ends in any way.

    Args:
        loop: The loop, which has not begun.
        say: Prints the address of the page.

    Raises:
        UsageError: The port of the page is taken.
    """
    config, name = loop.config, f"{loop.config.model} on {loop.data.name}"
    total_steps = config.epochs * len(loop.train)
    status = RunStatus.of_this_process(
        name,
        total_steps=total_steps,
        epochs=config.epochs,
        devices=loop.trainer.pool.devices,
    )

    def planned(plan: Plan) -> None:
        nonlocal status
        status = msgspec.structs.replace(status, plan=plan)
        _write(status, loop)

    with contextlib.ExitStack() as stack:
        live: LiveRun | None = None
        if config.page:
            from onebox.report.page import serve_page
            from onebox.report.page.live_run import LiveRun

            live = LiveRun(
                name,
                loop.trainer,
                folder=str(loop.folder.path),
                total_steps=total_steps,
                epochs=config.epochs,
                outer_every=config.outer.every if config.outer is not None else 0,
            )
            loop.listeners.append(live.add)
            page = stack.enter_context(serve_page(live, port=config.page_port))
            say(f"page at {page.url}")
        loop.plan_listeners.append(planned)
        _write(status, loop)
        state: RunState = "ended"
        text = ""
        try:
            yield
            text = f"the run has ended after step {loop.trainer.steps_done}"
        except BaseException as error:
            state = "failed" if not isinstance(error, Exit) or error.status == FAILED else "ended"
            text = str(error).partition("\n")[0] or type(error).__name__
            raise
        finally:
            if live is not None:
                live.finish(state, text)
            _write(msgspec.structs.replace(status, state=state, text=text), loop)


def _write(status: RunStatus, loop: TrainingLoop) -> None:
    """Write the status; a run goes on where its disk is full."""
    try:
        status.write(loop.folder.status)
    except OSError as error:
        loop.progress.note(f"{loop.folder.status} cannot be written: {error.strerror}")
