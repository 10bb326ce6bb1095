"""Ranks: the processes of a distributed script, as threads of one client that has all devices.

``torch.distributed`` keeps a process's groups in one object, ``distributed_c10d._world``, which may be replaced. Here
each rank has a world of its own; all other threads share the original one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from onebox.errors import PeerLost, UsageError
from onebox.pool.sharing import parent_address
from onebox.vgpu.distributed import process_group
from onebox.vgpu.distributed.thread_store import ThreadStore
from onebox.vgpu.patches import Patch, Patches
from onebox.vgpu.runtime import context

_GRACE_S = 30.0
"""How long ranks may take to end after another one has failed; after that these daemon threads are left alone."""

_TICK_S = 0.05
"""Interval of checks for failed ranks during a wait for another one."""

_NAMES = (
    "default_pg",
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "group_count",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
    "comms",
)
"""Attributes of a world, in torch 2.11 to 2.13."""


class Rank:
    """State of one rank.

    Args:
        number: Number of the rank.
        keys: Store that all ranks of the job share.
        size: Number of ranks.
    """

    def __init__(self, number: int, keys: ThreadStore, size: int) -> None:
        self.number = number
        self.keys = keys
        self.size = size
        self.jobs = itertools.count()
        """Counter of the default process groups that the rank has made."""
        self.world = SimpleNamespace(
            default_pg=None,
            pg_map={},
            pg_names={},
            pg_group_ranks={},
            pg_backend_config={},
            group_count=0,
            tags_to_pg={},
            pg_to_tag={},
            pg_coalesce_state={},
            comms=[],
        )


_here = threading.local()


def current() -> Rank | None:
    """Return this thread's rank; ``None`` for other threads."""
    return getattr(_here, "rank", None)


def _of_rank(name: str) -> property:
    """Return a property with a value for each rank; other threads use that of the original world."""

    def world(worlds: Any) -> Any:
        rank = current()
        return worlds.outside if rank is None else rank.world

    return property(lambda self: getattr(world(self), name), lambda self, value: setattr(world(self), name, value))


class Worlds(distributed_c10d._World):
    """A world whose state is that of the calling rank.

    Args:
        outside: The world of all other threads.
    """

    def __init__(self, outside: Any) -> None:
        self.outside = outside

    locals().update({name: _of_rank(name) for name in _NAMES})


class Ranks:
    """Running ranks; made by :func:`spawn` with ``join=False``.

    Args:
        function: Called in each thread with the rank's number and ``args``.
        args: Its further arguments.
        size: Number of ranks.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], size: int) -> None:
        self._keys = ThreadStore()
        self._size = size
        self._errors: dict[int, BaseException] = {}
        self._running = size
        self._lock = threading.Lock()
        self._forward = DistributedDataParallel._active_ddp_module
        own_args = [tuple(_own(value) for value in args) for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._run, args=(number, function, own), name=f"rank {number}", daemon=True)
            for number, own in enumerate(own_args)
        ]
        for thread in self._threads:
            thread.start()

    def pids(self) -> list[int]:
        """Return the operating system's ids of the threads."""
        return [thread.native_id or 0 for thread in self._threads]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for the ranks.

        Args:
            timeout: Bound of the wait in seconds; without one, until all have ended or one has failed.
            grace_period: Seconds that the others may take to end when one has failed.

        Returns:
            Whether all have ended.

        Raises:
            ProcessRaisedException: A rank has failed.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        try:
            for thread in self._threads:
                while thread.is_alive() and not self._errors and (end_s is None or time.monotonic() < end_s):
                    thread.join(_TICK_S)
        except KeyboardInterrupt:
            self._keys.give_up("the job was interrupted")
            raise
        if not self._errors:
            return not any(thread.is_alive() for thread in self._threads)
        end_s = time.monotonic() + (_GRACE_S if grace_period is None else grace_period)
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        found = list(self._errors.items())  # a rank that waited in vain for another one is not the cause
        number, error = next((pair for pair in found if not isinstance(pair[1], PeerLost)), found[0])
        told = "".join(traceback.format_exception(error))
        raise ProcessRaisedException(
            f"\n\n-- Process {number} terminated with the following error:\n{told}",
            number,
            self._threads[number].native_id or 0,
        ) from error

    def _run(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        rank = _here.rank = Rank(number, self._keys, self._size)
        try:
            context.keep_to_device(number % max(1, context.device_count()))
            function(number, *args)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._errors[number] = error
                self._keys.give_up(f"rank {number} has failed")
        finally:
            for group in list(rank.world.pg_map):
                if isinstance(group, process_group.VirtualProcessGroup):
                    group.shutdown()
            _here.rank = None
            with self._lock:
                self._running -= 1
                if not self._running:  # each rank has put back what it found, which may have been another rank's
                    DistributedDataParallel._active_ddp_module = self._forward


def _own(value: Any) -> Any:
    """Return a rank's own copy of an argument, as a process has; objects shared among processes stay shared."""
    tensors = list(value.parameters()) if isinstance(value, torch.nn.Module) else [value]
    hosts = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"]
    if any(tensor.is_shared() for tensor in hosts):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, NotImplementedError, RuntimeError):  # it contains queues, locks or the like
        pass
    if isinstance(value, SimpleNamespace | argparse.Namespace):
        return type(value)(**{name: _own(inner) for name, inner in vars(value).items()})
    if type(value) is dict:
        return {name: _own(inner) for name, inner in value.items()}
    return type(value)(map(_own, value)) if type(value) in (list, tuple) else value


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Ranks | None:
    """Run the ranks of a distributed script; ``torch.multiprocessing.spawn`` with threads for processes.

    A script's ranks usually are processes, one for each GPU. Here one client has all devices, and a rank is a thread
    with its own default process group, current device (initially ``vgpu:<rank>``) and copies of the arguments. In it,
    ``torch.distributed.init_process_group`` needs no address, and "nccl" means the collectives of the workers.
    Process-wide state is shared: modules' globals, ``os.environ``, and the random numbers of the host.

    Args:
        fn: Called with the rank's number and ``args``.
        args: Its further arguments.
        nprocs: Number of ranks.
        join: Whether to wait for them.
        daemon: Ignored, for compatibility.
        start_method: Ignored, for compatibility.

    Returns:
        Nothing, or without ``join`` the ranks.

    Raises:
        ProcessRaisedException: A rank has failed; the others get an error.
        UsageError: There are fewer devices than ranks.

    Example:
        >>> import onebox, torch, torch.distributed as dist
        >>> def main(rank, size):
        ...     dist.init_process_group("onebox", rank=rank, world_size=size)
        ...     x = torch.full((2,), rank + 1.0, device=f"vgpu:{rank}")
        ...     dist.all_reduce(x)
        ...     assert x.tolist() == [3.0, 3.0]
        >>> with onebox.open("cpu*2"):
        ...     onebox.vgpu.spawn(main, (2,), nprocs=2)
    """
    if nprocs < 1:
        raise UsageError(f"nprocs={nprocs}: at least one rank is needed")
    WORLDS.apply()
    devices = context.current_context()
    if not devices.pool.attached:
        devices.group()  # formed now, while no rank waits for another one
    ranks = Ranks(fn, args, nprocs)
    if not join:
        return ranks
    ranks.join()
    return None


# ---- registration with torch.distributed


def _isolate(patches: Patches) -> None:
    core: Any = torch._C._distributed_c10d
    patches.on_removal(lambda: core._set_thread_isolation_mode(False))
    core._set_thread_isolation_mode(True)


WORLDS = Patches((Patch(distributed_c10d, "_world", Worlds), _isolate))
"""Give each rank a world of its own; applied when ranks are started."""


def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.distributed.init_process_group``, to support ranks that are threads, and GPU backends for those that
    are processes."""

    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        **rest: Any,
    ) -> None:
        here = current()
        if here is None:
            if parent_address():  # one rank of several processes that share a pool
                backend = _backend(backend)
            original(backend, init_method, timeout, world_size, rank, store, **rest)
            return
        if store is None:
            rank = here.number if rank == -1 else rank
            world_size = here.size if world_size == -1 else world_size
            if not (0 <= rank < world_size == here.size):
                raise UsageError(f"rank {rank} of {world_size}, but {here.size} ranks have been started here")
            store = dist.PrefixStore(f"job {next(here.jobs)}", here.keys)
        hook = sys.excepthook
        try:
            original(_backend(backend), None, timeout, world_size, rank, store, **rest)
        finally:
            sys.excepthook = hook  # PyTorch's hook prints the rank of the process

    return init_process_group


def _backend(name: Any) -> str:
    """Return the backend for a name: GPU backends become that of the workers."""
    return process_group.NAME if name is None or "nccl" in str(name) else name
