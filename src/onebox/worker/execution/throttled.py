"""The executor of a CPU that works at a fraction of its speed: what it does itself takes proportionally longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from onebox.wire.protocol.eager import EagerWork
from onebox.wire.protocol.instructions import Call, OptimizerStep
from onebox.wire.protocol.requests import Instruction
from onebox.worker.execution.communication import Resolve
from onebox.worker.execution.executor import Executor
from onebox.worker.execution.pending_reply import Outcome
from onebox.worker.system.clock import sleep_until, wake_on_time


class ThrottledExecutor(Executor):
    """An executor that sleeps after what it has computed, for the time that a slower CPU would have taken in addition.

    Waits for other workers take as long as they do. Arguments as for a worker at full speed; made in the thread that
    uses it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        wake_on_time()

    def _slowly(self, instruction: Instruction, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        progress = self.progress
        begin_ns, waited_ns = time.monotonic_ns(), progress.waited_ns
        results = Executor._handlers[type(instruction)](self, instruction, frames, resolve)
        end_ns = time.monotonic_ns()
        others_ns = progress.waited_ns
        busy_ns = end_ns - begin_ns - (others_ns - waited_ns)
        with progress.wait():
            sleep_until(end_ns + int(busy_ns * (1 / self._device.speed - 1)))
        progress.waited_ns = others_ns  # a slower CPU would have worked meanwhile
        return results

    _handlers: dict[type[Any], Callable[..., Sequence[Outcome]]] = {  # noqa: RUF012
        **Executor._handlers,
        **dict.fromkeys((Call, OptimizerStep, *get_args(EagerWork)), _slowly),
    }
