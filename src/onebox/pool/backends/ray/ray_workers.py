"""The client's handles of workers on a Ray cluster, and the thread that polls their actors."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import msgspec

from onebox.errors import PoolError, WorkerDied
from onebox.pool.backends.ray.actor import BoundPorts, Launched, NodeReport, WorkerExit
from onebox.pool.backends.ray.ray_connection import error_summary, nodes
from onebox.pool.errors import AFTERWARDS, WorkerLocation
from onebox.pool.liveness import Liveness
from onebox.portable import Wakeup
from onebox.wire.clean_text import clean
from onebox.worker import START_S, Ports

_END_S = 5.0
"""How long the end of a worker by its actor is waited for."""

ASK_S = 0.5
"""How long an actor waits for an event of its worker before it answers that there is none."""

_TICK_S = 0.25
_LATE_S = 10.0
"""Allowance beyond the worker's own bound for the answer about its start."""

_answers = msgspec.json.Decoder(BoundPorts | WorkerExit)
_ends = msgspec.json.Decoder(WorkerExit)


class RayWorker:
    """A worker that an actor of a Ray cluster has started; a :class:`~onebox.pool.backends.base.WorkerHandle`.

    Args:
        ray: The package.
        actor: Handle of its actor, which outlives the worker.
        place: Its location.
        node: Its node.
        launched: The actor's report of its start.
    """

    def __init__(self, ray: Any, actor: Any, place: WorkerLocation, node: NodeReport, launched: Launched) -> None:
        self.place = place
        self.node = node
        self.address = node.address
        self.pid = launched.process
        self._wakeup = Wakeup()
        self.descriptor = self._wakeup.descriptor
        self.closed = False
        self._ray = ray
        self._actor = actor
        self._launch = launched.launch
        self._ports = actor.ports.remote(self._launch)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: WorkerDied | None = None

    def ports(self) -> Ports:
        """Wait until the worker has bound its sockets.

        Raises:
            WorkerDied: It, or its node, ended instead.
            PoolError: It took too long.
        """
        try:
            answer = clean(_answers.decode(self._ray.get(self._ports, timeout=START_S + _LATE_S)))
        except self._ray.exceptions.GetTimeoutError:
            raise PoolError(f"{self.place} did not start within {START_S + _LATE_S:.0f} s") from None
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise self._gone(error_summary(error)) from None
        if isinstance(answer, BoundPorts):
            return Ports(answer.commands, answer.heartbeats)
        raise self._as_error(answer)

    def death(self) -> WorkerDied:
        """Return the error that describes the worker's end."""
        return self._error or self._gone("nothing is known of how")

    def close(self, *, grace_s: float) -> None:
        """End the worker: wait a while for it to end by itself, then have its actor kill it. Idempotent."""
        with self._lock:
            if self.closed:
                return
        self._ended.wait(grace_s)
        with self._lock:
            self.closed = True
            self._wakeup.close()
        with contextlib.suppress(Exception):  # of many types; it may be gone, and the cluster, too
            ended = self._actor.end.remote(self._launch)
            self._ray.get(ended, timeout=_END_S)  # so that its process is gone, where its node can be reached

    # ---- called by the monitor

    def ask(self) -> Any:
        """Poll the actor for its worker; return Ray's reference to the answer."""
        return self._actor.watch.remote(self._launch, ASK_S)

    def heard(self, reference: Any) -> bool | None:
        """Process an answer of the actor.

        Returns:
            Whether the worker runs; ``None`` where the actor is out of reach, perhaps for a moment only.
        """
        try:
            answer = self._ray.get(reference, timeout=0)
        except self._ray.exceptions.ActorUnavailableError:
            return None
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            self.lost(None, error_summary(error))
            return False
        if answer:
            self.lost(self._as_error(clean(_ends.decode(answer))))
        return not answer

    def lost(self, error: WorkerDied | None, why: str = "") -> None:
        """Mark the worker as ended."""
        with self._lock:
            if not self._ended.is_set():
                self._error = error or self._gone(why)
                self._ended.set()
            if not self.closed:
                self._wakeup.set()

    def _as_error(self, ended: WorkerExit) -> WorkerDied:
        return WorkerDied(
            ended.message,
            exit_status=ended.exit_status,
            last_words=ended.last_words,
            worker=self.place.worker,
            host=self.place.host,
            device=self.place.device,
        )

    def _gone(self, why: str) -> WorkerDied:
        return WorkerDied(
            f"{self.place}, process {self.pid}, ended with its node or with the actor that watches it there: {why}\n"
            f"  {AFTERWARDS}",
            worker=self.place.worker,
            host=self.place.host,
            device=self.place.device,
        )


class ActorMonitor:
    """The thread that continuously polls the actors for their workers, and notices those that do not answer."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._asked: dict[Any, RayWorker] = {}
        self._new: list[RayWorker] = []
        self._doubtful: set[RayWorker] = set()
        self._watched: dict[int, RayWorker] = {}
        self._liveness = Liveness()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onebox-ray", daemon=True)

    def add(self, handles: list[RayWorker]) -> None:
        """Monitor some more workers; the first call starts the thread."""
        with self._lock:
            self._new += handles
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:  # Ray's connection may end under it, in ways of many types
            for handle in [*self._asked.values(), *self._new]:
                handle.lost(None, f"the connection with the cluster is lost: {error_summary(error)}")

    def _turn(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for handle in new:
            self._ask(handle)
        if not self._asked:
            self._stopping.wait(_TICK_S)
            return
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=_TICK_S)
        for reference in ready:
            handle = self._asked.pop(reference)
            runs = False if handle.closed else handle.heard(reference)
            self._doubtful.discard(handle)
            if runs:
                self._ask(handle)
            elif runs is None:  # no heartbeat
                self._doubtful.add(handle)
                self._asked[handle.ask()] = handle
                self._stopping.wait(_TICK_S)
            elif self._watched[handle.place.worker] is handle:
                self._liveness.forget(handle.place.worker)
        if self._doubtful:
            alive = {node.id for node in nodes(self._ray)}
            for handle in [handle for handle in self._doubtful if handle.node.node not in alive]:
                self._give_up(handle, "Ray says that the node is dead")
        for worker, why in self._liveness.hung(time.monotonic()).items():
            self._give_up(self._watched[worker], f"the actor {why}")

    def _give_up(self, handle: RayWorker, why: str) -> None:
        self._doubtful.discard(handle)
        self._asked = {reference: one for reference, one in self._asked.items() if one is not handle}
        if self._watched[handle.place.worker] is handle:
            self._liveness.forget(handle.place.worker)
        handle.lost(None, why)

    def _ask(self, handle: RayWorker) -> None:
        self._watched[handle.place.worker] = handle
        self._liveness.beat(handle.place.worker, time.monotonic())
        self._asked[handle.ask()] = handle
