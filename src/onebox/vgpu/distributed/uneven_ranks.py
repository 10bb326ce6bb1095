"""Ranks with batches in proportion to their speed, whose gradients count by their samples."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import statistics
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from onebox.errors import UsageError
from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.distributed.batch_division import chunk_sizes
from onebox.vgpu.distributed.uneven_forward import Mark, batch_size, differ
from onebox.vgpu.runtime import context
from onebox.vgpu.runtime.command_queue import CommandQueue

SHARES = "ONEBOX_SHARES"
"""Environment variable with the speed of each rank's device, in order, as in ``1,0.25``."""


def shares_of_ranks() -> tuple[float, ...]:
    """Return the speeds of the ranks' devices, which ``onebox run --uneven`` has measured; none without it.

    Raises:
        UsageError: They are no positive numbers.
    """
    text = os.environ.get(SHARES, "")
    try:
        shares = tuple(map(float, text.split(","))) if text else ()
    except ValueError:
        shares = (0.0,)
    if not all(0 < share < float("inf") for share in shares):
        raise UsageError(f"{SHARES}={text}: allowed are positive numbers, one for each rank, as in 1,0.25")
    return shares


def _for_ranks(shares: tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return shares, one for each rank.

    Raises:
        UsageError: There is not one positive share for each rank.
    """
    if len(shares) != ranks or not all(0 < share < float("inf") for share in shares):
        raise UsageError(f"shares {list(shares)} for {ranks} ranks: a positive number is needed for each")
    return shares


class UnevenSampler(Sampler[list[int]]):
    """Batches of a rank in proportion to the speed of its device.

    All ranks together have the samples in each step that they would have with equal batches, so the mean gradient over
    these samples is the same up to rounding. DistributedDataParallel weights the ranks' gradients equally: use
    :func:`weight_by_samples` with it.

    Args:
        sampler: Sampler that divides the data set equally; its seed, order and epoch remain in use.
        batch_size: Mean number of samples of the ranks' batches, as for a ``DataLoader`` with equal batches.
        shares: The speed of each rank's device, in any unit; when ``None``, what ``onebox run --uneven`` has measured.
        drop_last: Whether to leave out a last batch that is smaller.

    Raises:
        UsageError: There is not one positive share for each rank, or the batch size is not positive.

    Example:
        >>> from torch.utils.data.distributed import DistributedSampler
        >>> from onebox.integrations.torch import UnevenSampler
        >>> equal = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=False)
        >>> list(UnevenSampler(equal, 5, shares=[4.0, 1.0]))
        [[8, 9]]
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        batch_size: int,
        *,
        shares: Sequence[float] | None = None,
        drop_last: bool = False,
    ) -> None:
        self.shares = _for_ranks(shares_of_ranks() if shares is None else tuple(shares), sampler.num_replicas)
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: allowed are numbers from 1 up")
        self.sampler = sampler
        self.drop_last = drop_last
        self._step = batch_size * sampler.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""
        whole = copy.copy(self.sampler)  # the indices of all ranks, in the order in which they take them in turn
        whole.rank, whole.num_replicas, whole.num_samples = 0, 1, self.sampler.total_size
        indices = list(whole)
        for number in range(len(self)):
            together = indices[number * self._step : (number + 1) * self._step]
            yield _own_part(together, self.shares, self.sampler.rank)

    def __len__(self) -> int:
        """Return the number of batches, which all ranks have alike."""
        count, rest = divmod(self.sampler.total_size, self._step)
        return count + bool(rest and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, from which its order follows."""
        self.sampler.set_epoch(epoch)


class _SampleWeight:
    """The weight of a rank's gradients: its samples over the mean of all ranks.

    Args:
        model: The model; what it is called with has one row for each sample.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._device = next(model.parameters()).device
        self._weight: Tensor | None = None
        self._hooked = False

    def before_forward(self, model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the samples of all ranks, on the device."""
        if not (model.training and torch.is_grad_enabled() and model.require_backward_grad_sync):
            return
        if not self._hooked:
            model.register_comm_hook(self, _weighted)
            self._hooked = True
        own = torch.as_tensor(_divisor(inputs, kwargs), device=self._device).to(torch.float64)
        total = own.clone()
        dist.all_reduce(total, group=self._group)
        self._weight = own * dist.get_world_size(self._group) / total

    def apply(self, gradients: Tensor) -> None:
        """Weight gradients in place."""
        if self._weight is not None:
            gradients.mul_(self._weight)

    @property
    def group(self) -> Any:
        """The group of the ranks."""
        return self._group


def _divisor(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | int:
    """Return what the mean loss of a call is divided by: its samples, or what transformers tells its models."""
    told = kwargs.get("num_items_in_batch")
    samples = batch_size((inputs, kwargs), 0) if told is None else told
    if told is None and not samples:
        raise UsageError(
            "the sizes of the model's arguments do not say how many samples they have, so the gradients of uneven "
            "ranks cannot be weighted; call it with tensors that have a row for each sample, or leave out --uneven"
        )
    return samples


def _weighted(state: _SampleWeight, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean of the ranks' gradients, weighted by their samples: a communication hook."""
    state.apply(bucket.buffer())
    return allreduce_hook(state.group, bucket)


_weighted.__annotations__ = get_type_hints(_weighted)  # PyTorch compares them with types


def weight_by_samples(model: DistributedDataParallel) -> None:
    """Weight the gradients of each rank by its samples, so that their mean is that over all samples of a step.

    It takes the place of a communication hook, so a model has no other one. The number of samples is that of the rows
    of the tensors with which the model is called; with accumulated gradients, of the last call.

    Args:
        model: The model, which has not been called.

    Example:
        >>> from onebox.integrations.torch import weight_by_samples
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 2))  # doctest: +SKIP
        >>> weight_by_samples(model)  # doctest: +SKIP
    """
    _by_samples.add(model)
    model.register_forward_pre_hook(_SampleWeight(model).before_forward, with_kwargs=True)


_by_samples: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""The models whose ranks may have unequal batches, whose times say nothing of the ranks' speed."""


class _SlowRank:
    """A search for a rank that holds up the others, in the first steps of a model.

    Args:
        model: The model, on a virtual device.
        queue: The command queue of the device.
    """

    def __init__(self, model: DistributedDataParallel, queue: CommandQueue) -> None:
        self._queue = queue
        self._calls = 0
        self._begin: Mark | None = None
        self._passes: list[tuple[Mark, Mark]] = []
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]

    def _before_forward(self, model: Any, inputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self._calls += 1
        if model in _by_samples or (self._calls in _COMPARED_AT and self._compare(model)):
            for hook in self._hooks:
                hook.remove()
            return
        self._begin = Mark(self._queue)

    def _after_forward(self, model: Any, inputs: Any, outputs: Any) -> None:
        if self._begin is not None:
            self._passes.append((self._begin, Mark(self._queue)))
            self._begin = None

    def _compare(self, model: Any) -> bool:
        """Compare the ranks' times, once all are known or for the last time; return whether that is done."""
        known = [end.time_s - begin.time_s for begin, end in self._passes if begin.time_s and end.time_s]
        seconds = statistics.median(known[_WARM:]) if len(known) > _WARM else 0.0
        own = torch.tensor([seconds], dtype=torch.float64, device=self._queue.device)
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(model.process_group))]
        dist.all_gather(ranks, own, group=model.process_group)
        times = [rank.item() for rank in ranks]
        if all(times) and dist.get_rank(model.process_group) == 0 and (line := slow_rank(times)):
            print(f"onebox: {line}", file=sys.stderr, flush=True)
        return all(times) or self._calls == max(_COMPARED_AT)


_WARM = 2
"""Forward passes that are not counted: the first operators of each kind are new to the devices."""

_COMPARED_AT = (8, 16, 32)
"""Steps at which times are compared; later where a device is so far behind that some are not known."""


def slow_rank(seconds: Sequence[float]) -> str:
    """Return the line about a rank that takes longer than others; empty where all are alike.

    Args:
        seconds: What each rank takes for equal batches.

    Example:
        >>> slow_rank([1.0, 4.0])
        'rank 1 takes 4 times as long as rank 0: --uneven would save 60 % of a step'
    """
    ranks = range(len(seconds))
    slow, fast = max(ranks, key=seconds.__getitem__), min(ranks, key=seconds.__getitem__)
    saved = 1 - len(seconds) / sum(1 / each for each in seconds) / seconds[slow]
    if seconds[slow] < _SLOW * seconds[fast]:
        return ""
    return (
        f"rank {slow} takes {seconds[slow] / seconds[fast]:.2g} times as long as rank {fast}: --uneven would save "
        f"{100 * saved:.0f} % of a step"
    )


_SLOW = 1.3
"""Factor from which on a rank is named; those below are within the noise of a few short passes."""


# ---- scripts under onebox run --uneven


def weighting(original: Callable[..., None]) -> Callable[..., None]:
    """Weight the gradients of models whose ranks have batches by speed; with equal batches, name a slow rank."""

    @functools.wraps(original)
    def call(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        first = next(model.parameters())
        if shares_of_ranks():
            weight_by_samples(model)
        elif is_virtual(first) and differ(context.current_context().queues):
            _SlowRank(model, command_queue_of(first))

    return call


def loading(original: Callable[..., None]) -> Callable[..., None]:
    """Let a loader that shuffles, as in training, with a DistributedSampler or by accelerate make batches by speed."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(loader: Any, *args: Any, **kwargs: Any) -> None:
        options = dict(list(signature.bind(loader, *args, **kwargs).arguments.items())[1:])
        sampler, shares = options.get("sampler"), shares_of_ranks()
        size = options.get("batch_size", 1)
        shard: Any = options.get("batch_sampler")
        if shares and _is_training_shard(shard):
            _for_ranks(shares, shard.num_processes)
            shard.__class__ = _uneven(shard.__class__)  # the object stays: accelerate goes on with it
        if not shares or type(sampler) is not DistributedSampler or not sampler.shuffle or size is None:
            original(loader, *args, **kwargs)
            return
        batches = UnevenSampler(sampler, size, shares=shares, drop_last=options.get("drop_last", False))
        kept = {name: value for name, value in options.items() if name not in _OF_BATCHES}
        original(loader, **kept, batch_sampler=batches)
        vars(loader)["sampler"] = sampler  # scripts set its epoch

    return call


def _is_training_shard(batches: Any) -> bool:
    """Return whether batches are those of one rank by accelerate, shuffled, as training has them."""
    data_loader = sys.modules.get("accelerate.data_loader")
    if data_loader is None or type(batches) is not data_loader.BatchSamplerShard:
        return False
    return isinstance(getattr(batches.batch_sampler, "sampler", None), RandomSampler)


class _Drawn(list[list[int]]):
    """The batches of a sampler, drawn once for all ranks, with the attribute of one that accelerate reads."""

    def __init__(self, batches: Iterable[list[int]], batch_size: int | None) -> None:
        super().__init__(batches)
        self.batch_size = batch_size


@functools.cache
def _uneven(shard: Any) -> Any:
    """Return the class of accelerate's batches of a rank, by the speed of its device."""

    class UnevenShard(shard):  # made here, as accelerate need not be installed
        def __iter__(self) -> Iterator[list[int]]:
            whole, shards = _Drawn(self.batch_sampler, self.batch_size), []
            for rank in range(self.num_processes):
                each = copy.copy(self)
                each.batch_sampler, each.process_index = whole, rank
                shards.append(shard.__iter__(each))
            for batches in itertools.zip_longest(*shards, fillvalue=[]):
                together = [index for batch in batches for index in batch]
                if part := _own_part(together, shares_of_ranks(), self.process_index):
                    yield part

    return UnevenShard


def _own_part(together: list[int], shares: Sequence[float], rank: int) -> list[int]:
    """Return a rank's part of a batch of all ranks."""
    sizes = chunk_sizes(len(together), shares)
    first = sum(sizes[:rank])
    return together[first : first + sizes[rank]]


_OF_BATCHES = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
