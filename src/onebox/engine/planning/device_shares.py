"""Each device's share of the batch: given, equal, or by measured speed."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.config import numeric_instructions
from onebox.engine.data.batch_transfer import put_leaves
from onebox.engine.install.program_cache import ConstantTensors
from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import UsageError
from onebox.graph import ModelPrograms
from onebox.plan import apportion, shares_from_speeds
from onebox.plan.model.shares import ALIKE
from onebox.pool import Pool, raise_first
from onebox.wire.protocol.instructions import Call, Free
from onebox.wire.protocol.requests import Define, Routine, Run, StoredProgram

_ROUNDS = 6
"""Timed forward runs; the first is a warm-up."""

_UNITS = 100
"""Parts into which a batch is divided by measured shares: percentages are easily given again."""

_LOG = logging.getLogger("onebox")


def resolve_device_shares(
    shares: Any,
    pool: Pool,
    captures: Captures,
    batch: Batch,
    remote: RemoteState,
    among: Sequence[int] | None = None,
) -> tuple[float, ...]:
    """Return each device's share of the batch; the shares add up to 1.

    Args:
        shares: ``auto``, ``equal``, ``measured``, or weights.
        pool: The pool.
        captures: The model to measure with.
        batch: The batch to measure with.
        remote: Parameters and buffers.
        among: The devices; all of the pool if not given.

    Raises:
        UsageError: The shares have another form, or their number differs from the number of devices.
    """
    workers = tuple(range(len(pool)) if among is None else among)
    devices, count = [pool.devices[worker] for worker in workers], len(workers)
    if isinstance(shares, str):
        if shares not in ("auto", "equal", "measured"):
            raise UsageError(f"shares={shares!r}: allowed are 'auto', 'equal', 'measured', or one weight a device")
        kinds = {(device.host, device.name, device.kind, device.threads, device.speed) for device in devices}
        if count == 1 or shares == "equal" or (shares == "auto" and len(kinds) == 1):
            return (1 / count,) * count
        if all(device.kind == "sim" for device in devices):  # nothing to measure: their speeds are given
            return tuple(shares_from_speeds([device.speed for device in devices]))
        whole = shares_from_times(measure_times(pool, captures, batch, remote, workers))
        if len(set(whole)) > 1:
            _LOG.warning("shares of the batch as measured; for the same numbers again: shares=%s", list(whole))
        return tuple(float(weight) / sum(whole) for weight in whole)
    weights = [float(share) for share in shares]
    if len(weights) != count:
        raise UsageError(f"shares={weights}: {len(weights)} weights for {count} devices; one for each is needed")
    apportion(1, weights)
    return tuple(weight / sum(weights) for weight in weights)


def shares_from_times(times: Sequence[Sequence[float]]) -> list[int]:
    """Convert times of the same work, measured repeatedly on each device, to whole shares.

    Devices are alike within noise if their ranges overlap, the slowest time of each apart, and get equal shares. Others
    get shares by their fastest times, which the rest of the load on a host disturbs least.

    Example:
        >>> shares_from_times([[1.0, 1.4, 9.0], [1.3, 1.5, 1.5]]), shares_from_times([[3.0, 3.1, 3.2], [1.0, 1.1, 1.2]])
        ([1, 1], [25, 75])
    """
    fastest = [min(each) for each in times]
    slowest = [sorted(each)[-2:][0] for each in times]
    if max(fastest) < ALIKE * min(slowest):
        return [1] * len(times)
    return [max(1, each) for each in apportion(_UNITS * math.ceil(len(times) / 10), [1 / each for each in fastest])]


def measure_times(
    pool: Pool, captures: Captures, batch: Batch, remote: RemoteState, workers: Sequence[int]
) -> list[list[int]]:
    """Return the nanoseconds that each device takes for the model's forward, with all devices busy at once.

    The batch is divided evenly for the measurement; the results are discarded.
    """
    size, numerics = max(1, batch.size // len(workers)), captures.recipe.numerics
    model = captures.traced(batch, size, train=False).divide()
    everybody = tuple(workers)
    names = remote.named.numbers
    groups = dict.fromkeys(names, (everybody,))
    holders = dict.fromkeys(names, everybody)
    remote.upload(ShardingSpec(devices=everybody, holders=holders, replica_groups=groups, stages=()))
    numbers = DefinitionNumbers(remote.new_number)
    numbers_of = numbers.constants("", model.constants)
    ConstantTensors(pool, numbers).upload("", model.constants, everybody)
    routine, programs = _measuring_routine(model, numbers_of, pool, remote.named.numbers, len(batch.leaves))
    times: dict[int, list[int]] = {worker: [] for worker in workers}
    for worker in workers:
        pool.post(worker, programs)
    for _ in range(_ROUNDS):
        futures = []
        for worker in workers:
            put, frames = put_leaves(pool, batch.slice(0, size))
            run = Run(routine, put.buffers, trace=True)
            futures.append(pool.post(worker, [put, *numeric_instructions(numerics), run], frames, answer=True))
        for worker, answer in zip(workers, raise_first(futures), strict=True):
            times[worker].append(answer.times_ns[1] - answer.times_ns[0])
    for worker in workers:
        pool.post(worker, [Free((), tuple(define.number for define in programs))])
    return [times[worker][1:] for worker in workers]


def _measuring_routine(
    model: ModelPrograms, constants: Mapping[str, int], pool: Pool, state: Mapping[str, int], leaves: int
) -> tuple[int, Sequence[Define]]:
    program, routine = pool.new_number(), pool.new_number()
    outputs = tuple(pool.new_number() for _ in model.forward.outputs)
    numbers = {"leaf": lambda name: -1 - int(name), "constant": constants.__getitem__}
    inputs = tuple(numbers.get(port.kind, state.__getitem__)(port.name) for port in model.forward.inputs)
    steps = (
        Call(program, inputs, outputs),
        Free((*outputs, *(-1 - leaf for leaf in range(leaves)))),
    )
    return routine, [
        Define(program, StoredProgram(model.forward.program)),
        Define(routine, Routine(steps, leaves)),
    ]
