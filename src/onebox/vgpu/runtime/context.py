"""The device context: a pool whose devices are ``vgpu:0 … vgpu:N-1``, with a command queue for each."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from onebox.errors import OneboxError, PoolError, UsageError
from onebox.pool import Pool, open_pool
from onebox.pool.sharing import AttachedPool, parent_address
from onebox.pool.streams.stream_recovery import recovery_budget
from onebox.portable import after_fork_in_child
from onebox.vgpu import native
from onebox.vgpu.runtime.command_queue import CommandQueue, IdleFlusher
from onebox.vgpu.runtime.request_channel import ScriptErrors
from onebox.vgpu.runtime.script_events import ScriptEvents
from onebox.vgpu.runtime.script_time import DeviceBusy, ScriptFigures, ScriptTime
from onebox.vgpu.runtime.script_verdict import LEAST_S, VERBOSE, ProgressLines, last_line, say

Device = torch.device | str | int | None
"""A device in any form that PyTorch accepts."""

MEMORY_POLICY = "ONEBOX_MEMORY_POLICY"
"""Environment variable that says what happens where a device has no room for a buffer: ``keep`` or ``offload``."""

_POLICIES = ("keep", "offload")

_LOG = logging.getLogger("onebox")
_TRAINER = "onebox.engine.trainer"

SETTLE_S = 60.0
"""Bound of the wait for all workers after one has missed a tensor of another."""


class DeviceContext:
    """The virtual devices of one pool.

    Args:
        pool: The pool; the caller closes it.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.owner = os.getpid()
        self.transfers = threading.RLock()
        self.errors = ScriptErrors(lambda: called, self._send, self._tidy)
        self.script_time = ScriptTime()
        self.queues = tuple(
            CommandQueue(pool, each, idle.ring, self.errors, self.begin, self.script_time) for each in range(len(pool))
        )
        for queue in self.queues:
            queue.channel.others = [each.channel for each in self.queues]
            queue.synchronous = isinstance(pool, AttachedPool) and pool.synchronous
        self.begun = False
        """Whether the devices are in use."""
        self._group = 0
        self._seen_failures = self._failures()

    def set_synchronous(self, on: bool) -> None:
        """Set whether every operator is waited for."""
        for queue in self.queues:
            queue.synchronous = on

    def begin(self) -> None:
        """Make the devices those of PyTorch, at their first use.

        A process that only trains by a :class:`onebox.Trainer` thus needs neither the object in C++ nor a compiler.

        Raises:
            PoolError: There is no such object, and none can be built.
        """
        with _beginning[0]:
            if not self.begun:
                begin_device()
                for queue in self.queues:
                    queue.begin()
                self.pool.closing += [queue.native.close for queue in self.queues]
                self.begun = True
                self.script_time.begin(time.monotonic_ns())
                self.take_over()
                idle.start(open_queues)

    def record_events(self) -> ScriptEvents:
        """Note from now on what the script and its devices do, for a timeline."""
        events = ScriptEvents()
        for queue in self.queues:
            queue.channel.events = events
        return events

    def figures(self) -> ScriptFigures:
        """Return where the time of the script has gone until now."""
        devices = [
            DeviceBusy(
                f"{called}:{queue.worker}",
                self.pool.busy_ns(queue.worker) / 1e9,
                self.pool.waited_ns(queue.worker) / 1e9,
            )
            for queue in self.queues
            if queue.used
        ]
        return self.script_time.figures(time.monotonic_ns(), devices)

    def take_over(self) -> None:
        """Make the devices those of PyTorch, which may have had another pool's in use."""
        for queue in self.queues:
            queue.native.open()
        native.load().set_device_count(len(self.queues))

    def group(self) -> int:
        """Return the group of all devices, in which tensors go from worker to worker; formed on first use.

        A worker that cannot send a tensor, because an operator has failed, leaves the group, so that no other waits for
        it. The group is then formed anew, once the transfers among the others have ended.

        The caller holds :attr:`transfers` until it has recorded its transfers: another thread may form the group anew.

        Raises:
            OneboxError: It could not be formed.
        """
        everybody = range(len(self.pool))
        with self.transfers:
            if self._group and (self._failures() != self._seen_failures or not self.pool.is_whole(self._group)):
                # A failure may be known before the notice of the worker that has left for it, and a worker that skips
                # what precedes the script's knowledge of it may leave later. When all have executed everything, it is
                # known.
                self._settle()
                self._seen_failures = self._failures()
                if not self.pool.is_whole(self._group):
                    self.pool.leave_group(self._group, everybody)
                    self._group = 0
            if not self._group:
                self._group = self.pool.form_group(everybody, "workers")
                for queue in self.queues:
                    queue.channel.waits += 1
            return self._group

    def _send(self, worker: int) -> None:
        """Send what was recorded on a rank's device, or on all devices of the script."""
        own = self.queues[worker]
        for queue in [own] if own.has_rank else self.queues:
            with contextlib.suppress(OneboxError):
                queue.flush(pace=False)

    def _tidy(self, workers: set[int]) -> None:
        """Call :data:`after_failures` with the queues of the devices that a failure has stopped.

        A rank's device is its own matter: others could wait there for what this thread does next.
        """
        alone = any(self.queues[worker].has_rank for worker in workers)
        queues = [queue for queue in self.queues if queue.worker in workers or not (alone or queue.has_rank)]
        for call in after_failures:
            call(queues)

    def _failures(self) -> list[int]:
        """Return numbers that change with each failure of which the script is told, or for which a peer was lost."""
        channels = [queue.channel for queue in self.queues]
        return [number for channel in channels for number in (channel.told, channel.lost_peer())]

    def _settle(self) -> None:
        """Wait until all workers have executed everything, at most :data:`SETTLE_S`.

        Tensors that were received are read: a worker receives in the background, until it leaves the group.
        """
        for queue in self.queues:
            queue.read_on_worker(queue.native.take_watched())
            queue.flush(pace=False)
        end_s = time.monotonic() + SETTLE_S
        probes = [queue.channel.probe() for queue in self.queues]
        for queue, probe in zip(self.queues, probes, strict=True):
            queue.channel.settle(probe, end_s)


def _after_fork() -> None:
    """Replace the locks and threads of a forked process; another thread of its parent may have held them."""
    _attaching[0], _beginning[0] = threading.RLock(), threading.RLock()
    if (device := native.loaded()) is not None:
        device.after_fork()
    idle.after_fork()
    for each in _open_contexts.values():
        each.transfers = threading.RLock()
        for queue in each.queues:
            queue.after_fork()


after_fork_in_child(_after_fork)

after_failures: list[Callable[[Sequence[CommandQueue]], object]] = []
"""Called before a failure of an operator is raised, with the queues of the devices that may have stopped."""

after_attach: list[Callable[[DeviceContext], object]] = []
"""Called with the devices of a parent process when this one begins to use them."""

begin_device: Callable[[], object] = native.load
"""Makes PyTorch know the device, at the first use of a pool's; set by the module of registration. Idempotent."""

idle = IdleFlusher()
atexit.register(idle.end)
_contexts: list[weakref.ref[DeviceContext]] = []
_open_contexts: dict[int, DeviceContext] = {}
_local = threading.local()
_attaching = [threading.RLock()]
_beginning = [threading.RLock()]
_on_demand: list[bool] = []


def attach(pool: Pool) -> DeviceContext:
    """Make the devices of a pool ``vgpu:0 …`` from now on, until it is closed or another one is attached.

    Tensors of a pool that was attached before stay valid.
    """
    made = _open_contexts.get(id(pool))
    if made is None:
        made = _open_contexts[id(pool)] = DeviceContext(pool)
        pool.closing.append(lambda: _forget(pool))
    _contexts[:] = [each for each in _contexts if each() is not made]
    _contexts.append(weakref.ref(made))
    if native.loaded() is not None:  # PyTorch says no more when it first uses a device
        made.take_over()
    return made


def _forget(pool: Pool) -> None:
    """Leave the names of a pool's devices to those of another one that is open."""
    _open_contexts.pop(id(pool), None)
    left = _newest()
    if left is not None and left.begun and left.owner == os.getpid():
        left.take_over()


def _newest() -> DeviceContext | None:
    """Return the context of the pool that was opened last and is still open, perhaps by a process before a fork."""
    while _contexts:
        found = _contexts[-1]()
        if found is not None and id(found.pool) in _open_contexts:
            return found
        _contexts.pop()
    return None


def current_context() -> DeviceContext:
    """Return the context of the pool that was opened last and is still open; in a child of a process that shares its
    pool, that of this pool, which is attached on first use.

    Raises:
        PoolError: There is none, or this is a forked process.
    """
    found = _newest()
    if found is not None and found.owner == os.getpid():
        return found
    if parent_address():
        return _attach_to_parent()
    if found is None and _on_demand:
        return _open_own()
    if found is not None:
        raise PoolError("a forked process cannot use the virtual devices of its parent")
    raise PoolError("there are no virtual devices; open a pool first: onebox.open()")


def open_on_demand() -> None:
    """Open the pool that the environment names, when devices are first used and there is no other one."""
    _on_demand.append(True)


def _open_own() -> DeviceContext:
    with _attaching[0]:
        found = _newest()
        if found is not None:
            return found
        recovery_budget(None, None, remote=False)
        memory_policy()
        made = attach(open_pool())
        recover_scripts(made.pool)
        apply_memory_policy(made.pool)
        return made


def recover_scripts(pool: Pool, recover: bool | None = None, memory: int | str | None = None) -> None:
    """Let scripts on a pool survive the loss of workers, if they are to; see :func:`onebox.open`."""
    remote = not all(map(pool.near, range(len(pool))))
    if budget_bytes := recovery_budget(recover, memory, remote=remote):
        pool.recover_scripts(budget_bytes)


def memory_policy(policy: str | None = None) -> str:
    """Return what happens where a device has no room for a buffer; see :func:`onebox.open`.

    Raises:
        UsageError: It is something else than ``keep`` and ``offload``.
    """
    said = os.environ.get(MEMORY_POLICY, "") or "keep"
    for name, value in (("memory_policy", policy), (MEMORY_POLICY, said)):
        if value not in (None, *_POLICIES):
            raise UsageError(f"{name}={value!r}: allowed are {' and '.join(map(repr, _POLICIES))}")
    return policy or said


def apply_memory_policy(pool: Pool, policy: str | None = None) -> None:
    """Let buffers of scripts on a pool go to the host's memory, if that is the policy."""
    if memory_policy(policy) != "offload":
        return
    for queue in _open_contexts[id(pool)].queues:
        queue.bound_memory(offload=True)
    unlimited = [each for each in pool.devices if each.device == "cpu" and each.memory_bytes >= each.host_bytes > 0]
    if unlimited and not pool.attached:
        _LOG.warning(
            "the memory of %s on %s is its host's, so that nothing goes anywhere with the memory policy 'offload'; "
            "memory='2GiB' (--memory) gives it its own",
            unlimited[0].device,
            unlimited[0].host,
        )


def _attach_to_parent() -> DeviceContext:
    with _attaching[0]:
        found = _newest()
        if found is not None and found.owner == os.getpid():  # another thread was faster
            return found
        pool = AttachedPool(parent_address())
        made = attach(pool)
        apply_memory_policy(pool)
        pool.closing[:0] = [lambda: _send_recorded(made), tell_last(made)]
        for call in after_attach:
            call(made)
        return made


def tell_last(devices: DeviceContext) -> Callable[[], None]:
    """Say what a script is bound by while it runs, if it is to; return what says so at its end.

    Of several processes that use the devices of their parent the one with the first device tells: the lines of the
    others are the same. Nothing is said of a script that has a trainer, which has an account of its own.
    """
    rank = os.environ.get("RANK", "")
    who = f"rank {rank}: " if devices.pool.attached and rank else ""
    verbose = bool(os.environ.get(VERBOSE))
    imported = _TRAINER in sys.modules

    def figures() -> ScriptFigures:
        trains = _TRAINER in sys.modules and not imported
        by_another = devices.pool.attached and not devices.queues[0].used
        return ScriptFigures() if trains or by_another else devices.figures()

    def tell() -> None:
        if text := last_line(figures(), 0.0 if verbose else LEAST_S):
            say(who + text)

    if verbose:
        devices.pool.closing.insert(0, ProgressLines(figures, who).close)
    return tell


def _send_recorded(devices: DeviceContext) -> None:
    """Send what was recorded and not sent, before a process ends whose parent's devices go on."""
    for queue in devices.queues:
        with contextlib.suppress(OneboxError):
            queue.flush(pace=False)


def is_forked() -> bool:
    """Return whether this is a forked process whose parent has virtual devices, and has not used any itself."""
    found = _newest()
    return found is not None and found.owner != os.getpid()


def device_count() -> int:
    """Return the number of virtual devices."""
    try:
        return len(current_context().pool)
    except PoolError:
        return 0


def current_device() -> int:
    """Return the number of this thread's current device."""
    device = native.loaded()
    return 0 if device is None else int(device.current_device())


def set_current_device(number: int) -> None:
    """Set this thread's current device.

    Raises:
        UsageError: There is no such device.
    """
    devices = context_of(queue_of(torch.device("vgpu", number)))
    if number != current_device():  # not the first one, which a thread chooses that pins memory, also for a Trainer
        devices.begin()
        native.load().set_current_device(number)
    _local.device = number


def has_chosen_device() -> bool:
    """Return whether this thread has chosen its current device."""
    return hasattr(_local, "device")


def device_of_rank(rank: int) -> int:
    """Return the device of a rank: this thread's current one if it was chosen, else by the number of the rank on its
    host, as NCCL guesses it."""
    if has_chosen_device():
        return current_device()
    local = os.environ.get("LOCAL_RANK", "")
    return (int(local) if local.isdecimal() else rank) % max(1, device_count())


def keep_to_device(number: int) -> None:
    """Restrict this thread to one device, like a process that has only one: it is the current one, and the only one
    seeded."""
    set_current_device(number)
    _local.alone = True


def seeded_queues() -> tuple[CommandQueue, ...]:
    """Return the command queues of the devices that this thread seeds when it seeds all."""
    if getattr(_local, "alone", False):
        return (queue_of(torch.device("vgpu")),)
    return current_context().queues


def open_queues() -> list[CommandQueue]:
    """Return the command queues of all pools that are open."""
    return [queue for each in list(_open_contexts.values()) for queue in each.queues if each.owner == os.getpid()]


called = "vgpu"
"""The device type in scripts: ``cuda`` while that name is an alias."""


def displayed(device: torch.device) -> torch.device:
    """Return what scripts call a virtual device."""
    return torch.device(called) if device.index is None else torch.device(called, device.index)


def queue_of(device: torch.device) -> CommandQueue:
    """Return the command queue of a device; of the current one where it has no number.

    Raises:
        UsageError: There is no such device.
        PoolError: No pool is open.
    """
    queues = current_context().queues
    number = current_device() if device.index is None else device.index
    if not 0 <= number < len(queues):
        there = f"{called}:0 to {called}:{len(queues) - 1}"
        raise UsageError(f"there is no device {called}:{number}; the pool has {there}")
    return queues[number]


def place(device: Device) -> CommandQueue:
    """Return the command queue of a device, given in any form that PyTorch accepts."""
    if device is None:
        return queue_of(torch.device("vgpu"))
    if isinstance(device, int):
        return queue_of(torch.device("vgpu", device if device >= 0 else current_device()))
    place = torch.device(device)
    if place.type != "vgpu":
        raise ValueError(f"Expected a vgpu device, but got: {device}")
    return queue_of(place)


def context_of(queue: CommandQueue) -> DeviceContext:
    """Return the context of a command queue.

    Raises:
        PoolError: Its pool is closed.
    """
    found = _open_contexts.get(id(queue.pool))
    if found is None:
        raise PoolError("the pool is closed; open another with onebox.open()")
    return found
