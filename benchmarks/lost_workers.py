"""Scripts whose workers are killed or stopped at random moments: do they end with the same bits, and how soon?"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPT = Path(__file__).with_name("lost_workers_script.py")
NAMES = ("two_stages", "data_parallel", "ranks", "gan", "gpt", "lora")
WITHIN_S = 240.0

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
"""What a worker gets: mostly its end; one that is stopped is noticed by its silence, after some seconds."""

_STEP = re.compile(r"STEP (\d+)")
_TAKEN = re.compile(r"has taken its place after ([\d.]+) s")


@dataclass(frozen=True)
class Loss:
    """A loss.

    Args:
        step: The step of the first rank in which it happens.
        delay_s: Seconds after the beginning of that step.
        worker: Which of the workers.
        signal: What it gets.
    """

    step: int
    delay_s: float
    worker: int
    signal: signal.Signals


@dataclass(frozen=True)
class Outcome:
    """The end of a script.

    Args:
        bits: Digests of its weights, one for each rank.
        status: Its exit status.
        said: Its standard error.
        sent: Number of workers that have got their signal.
    """

    bits: tuple[str, ...]
    status: int
    said: str
    sent: int

    @property
    def recovered_s(self) -> list[float]:
        """Seconds of each recovery, until the log was sent again."""
        return [float(found) for found in _TAKEN.findall(self.said)]


def random_losses(seed: int, steps: int) -> list[Loss]:
    """Return one to three losses at random moments."""
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(2, steps), rng.randint(1, 3)))
    return [Loss(step, rng.uniform(0, 0.05), rng.randrange(2), rng.choice(SIGNALS)) for step in moments]


def run(name: str, losses: list[Loss]) -> Outcome:
    """Run a script on two workers.

    Args:
        name: One of :data:`NAMES`.
        losses: In the order of their steps.
    """
    command = [str(Path(sys.executable).parent / "onebox"), "run", "--recover", "--pool", "cpu*2", "--threads", "1"]
    command += ["torchrun", "--standalone", "--nproc-per-node", "2"] if name == "ranks" else []
    left, bits, sent = list(losses), [], 0
    with subprocess.Popen(
        [*command, str(SCRIPT), name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: said.append(process.stderr.read()))  # type: ignore[union-attr]
        reader.start()
        timer = threading.Timer(WITHIN_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("BITS"):
                    bits.append(line.strip())
                elif left and (step := _STEP.fullmatch(line.strip())) and int(step[1]) >= left[0].step:
                    loss = left.pop(0)
                    time.sleep(loss.delay_s)
                    sent += _signal(process.pid, loss)
        finally:
            timer.cancel()
            status = process.wait()
            reader.join()
    return Outcome(tuple(sorted(bits)), status, "".join(said), sent)


def _signal(root: int, loss: Loss) -> bool:
    """Send a worker its signal; return whether there was one."""
    workers = sorted((each for each in psutil.Process(root).children(recursive=True) if _is_worker(each)), key=_age)
    if len(workers) <= loss.worker:  # it is being replaced
        return False
    try:
        workers[loss.worker].send_signal(loss.signal)
    except psutil.NoSuchProcess:
        return False
    return True


def _age(process: psutil.Process) -> int:
    return int(process.pid)


def _is_worker(process: psutil.Process) -> bool:
    try:
        stopped = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
        return process.name().startswith("onebox-worker") and not stopped
    except psutil.NoSuchProcess:
        return False
