"""Worker processes on this machine: started with their keys on standard input, ended by their launcher."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

import msgspec

from onebox.errors import PoolError, WorkerDied
from onebox.pool.errors import AFTERWARDS, WorkerLocation, how_it_ended
from onebox.pool.launch.stderr_tail import StderrTail
from onebox.pool.launch.worker_user import WorkerUser
from onebox.pool.launch.zygotes import ForkedWorker, WorkerSpawner, worker_environment
from onebox.reaping import KILLED_S, end_process
from onebox.worker import START_S, Ports, WorkerConfig
from onebox.worker.system.process_watch import disk_reads

_UNKNOWN = "ended after its zygote, the process onebox-zygote, which would have said how"

LAST_WORDS = 4000
"""Most bytes of standard error that are reported with the end of a worker."""

_REPORT_BYTES = 4096


class WorkerProcess:
    """A worker process of this machine.

    Args:
        place: Location of the worker, for messages.
        config: Its configuration; the keys go through a pipe and appear in no command line, file or environment.
        account: User that it runs as; this process's own user where ``None``.
        spawner: What forks it; without it the worker is started from scratch.
    """

    address = "127.0.0.1"
    """The address of this host that its peers connect to."""

    command = (sys.executable, "-P", "-m", "onebox.worker")
    """Command line; with -P nothing is imported from the current folder."""

    def __init__(
        self,
        place: WorkerLocation,
        config: WorkerConfig,
        account: WorkerUser | None = None,
        spawner: WorkerSpawner | None = None,
    ) -> None:
        self.place = place
        environment = worker_environment(config.threads, account)
        self._stderr = StderrTail()
        try:
            forked = None if spawner is None else spawner.spawn_worker(environment, self._stderr.inlet, account)
            self._process: subprocess.Popen[bytes] | ForkedWorker = forked or self._start(environment, account)
        except BaseException:
            self._stderr.close()
            raise
        self._stderr.inlet.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self.descriptor = forked.descriptor if forked else os.pidfd_open(self._process.pid)
        except BaseException:  # such as OSError: this process has as many descriptors as it may
            self._process.stdin.close()
            self._process.stdout.close()
            end_process(self._process, str(place), grace_s=0.0)
            self._stderr.close()
            raise
        self._output = b""
        try:
            self.limit()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(config) + b"\n")
                self._process.stdin.flush()
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _start(self, environment: dict[str, str], account: WorkerUser | None) -> subprocess.Popen[bytes]:
        """Start the process from scratch."""
        return subprocess.Popen(
            list(self.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr.inlet,
            env=environment,
            **({} if account is None else account.options()),
            start_new_session=True,  # Ctrl-C is for the client, which then ends its workers
        )

    def limit(self) -> None:
        """Limit the process, which reads its configuration afterwards; of this class it limits itself alone.

        Raises:
            OSError: The system refuses.
        """

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def forked(self) -> bool:
        """True where a zygote has forked it."""
        return isinstance(self._process, ForkedWorker)

    def ports(self) -> Ports:
        """Wait until the worker has bound its sockets.

        Raises:
            WorkerDied: It ended during its start.
            PoolError: It took too long, or it sent something else.
        """
        end_s = time.monotonic() + START_S
        poll = select.poll()  # unlike select, without a limit on descriptor numbers
        poll.register(self.outlet, select.POLLIN)
        while poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            try:
                found = self.read_ports()
            except EOFError:
                raise self.death() from None
            if found is not None:
                return found
        raise PoolError(f"{self.place} did not start within {START_S:.0f} s: {self.last_words()}")

    @property
    def outlet(self) -> int:
        """A file descriptor that is readable when the worker has reported its ports."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read_ports(self) -> Ports | None:
        """Read the worker's report of its ports; does not block where :attr:`outlet` is readable.

        Returns:
            The endpoints that it has bound; ``None`` while the report is incomplete.

        Raises:
            EOFError: Its output is closed: it is about to end.
            PoolError: It sent something else.
        """
        part = os.read(self.outlet, _REPORT_BYTES)
        if not part:
            raise EOFError(f"{self.place} ends")
        self._output += part
        if not self._output.endswith(b"\n") and len(self._output) < _REPORT_BYTES:
            return None
        try:
            return msgspec.json.decode(self._output, type=Ports)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise PoolError(f"{self.place} said {self._output[:200]!r} where its ports were expected") from None

    def death(self) -> WorkerDied:
        """Return the error that describes the end of the process."""
        try:
            status: int | None = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            status = None
        words = self.last_words()
        said = f"; its last words:\n{words}" if words else "; it said nothing"
        how = _UNKNOWN if status is None and self.forked else how_it_ended(status)
        return WorkerDied(
            f"{self.place}, process {self.pid}, {how}{said}\n  {AFTERWARDS}",
            exit_status=status,
            last_words=words,
            worker=self.place.worker,
            host=self.place.host,
            device=self.place.device,
        )

    def disk_reads(self) -> tuple[int, bool]:
        """Return the number of pages that it has read from disks, and whether it waits for a disk now."""
        return disk_reads(self.pid)

    def last_words(self) -> str:
        """Return the end of the worker's standard error."""
        return self._stderr.text(LAST_WORDS)

    def close(self, *, grace_s: float, killed_s: float = KILLED_S) -> None:
        """End the process: wait a while for it to end by itself, then kill it; see :func:`end_process`. Idempotent."""
        if self._stderr.closed:
            return
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        end_process(self._process, str(self.place), grace_s=grace_s, killed_s=killed_s, descriptor=self.descriptor)
        if isinstance(self._process, ForkedWorker):
            self._process.close()
        else:
            os.close(self.descriptor)
        self._stderr.close()
