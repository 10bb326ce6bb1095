"""Slowdown of processors that share their host's cores, from the part of a step in which each of them computes. Pure.

A processor that computes alone is not slowed down by others of its host that wait for it: in a pipeline they wait for
messages and for the slowest stage. So the time of each device counts the others by the part of a step for which they
are busy while it computes itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import floor

from onebox.plan.model.problem import Problem

TURN_S = 1e-3
"""Mean seconds until a worker that wakes up gets a core while others use all of them: Linux 6 lets a program compute
for 1 to 4 ms before the next one has its turn. In 48 recorded runs of pipelines on two busy cores workers began 1.1 ms
after their message had arrived (the median of the runs), in the quietest 0.5 ms."""


def crowding(problem: Problem, busy: Mapping[int, float]) -> dict[int, float]:
    """Return the slowdown of each device in a plan, relative to the measurement of its times.

    At a moment at which `u` threads of a host's devices run beside other programs, each of them gets
    `min(1, cores / (u + preparing + load))` of a core; see :class:`~onebox.plan.Problem`.

    Args:
        problem: The planning problem.
        busy: The devices of the plan, each with the part of a step in which it computes, from 0 to 1.

    Returns:
        A factor of times for each of these devices; 1 for those of accelerators.
    """
    by_host: dict[str, list[int]] = {}
    for number in busy:
        by_host.setdefault(problem.device[number].host, []).append(number)
    together = problem.together if len(by_host) > 1 else {}
    found = dict.fromkeys(busy, 1.0)
    for host, used in by_host.items():
        factor, cores = together.get(host, 1.0), problem.cores.get(host)
        if cores is None:
            found |= dict.fromkeys(used, factor)
            continue
        factor /= profiled_crowding(problem, host)
        extra = problem.load.get(host, 0.0) + problem.preparing.get(host, 0.0)
        most = sum(problem.device[number].threads for number in used) + extra
        if most <= cores:
            found |= dict.fromkeys(used, factor)
            continue
        running = sum(busy[number] for number in used)
        for number in used:
            threads = problem.device[number].threads
            beside = _beside(busy[number], running - busy[number])
            each = (most - extra - threads) / max(1, len(used) - 1)
            found[number] = factor * _slowdown(threads + extra, each, beside, cores)
    return {number: slowdown if problem.device[number].processor else 1.0 for number, slowdown in found.items()}


def profiled_crowding(problem: Problem, host: str, load: float | None = None) -> float:
    """Return the slowdown of a host's processors while their times were measured, all of them at work.

    Args:
        problem: The planning problem.
        host: A host whose cores are known.
        load: Cores that other programs wanted meanwhile; those of the problem without it.
    """
    every = sum(device.threads for device in problem.devices if device.host == host)
    return max(1.0, (every + (problem.load.get(host, 0.0) if load is None else load)) / problem.cores[host])


def wake_up_delays(problem: Problem, used: Collection[int]) -> dict[str, float]:
    """Return by host the mean seconds for which a worker that a message wakes up waits for a core.

    It waits if the other workers of the plan and other programs use all cores, until one of them has had its turn.
    Workers alone are not counted: they wait for one another in any case.

    Args:
        problem: The planning problem.
        used: The devices of the plan.
    """
    by_host: dict[str, list[float]] = {}
    for number in used:
        device = problem.device[number]
        if device.processor and device.host in problem.cores:
            by_host.setdefault(device.host, []).append(device.threads)
    found = {}
    for host, threads in by_host.items():
        extra = problem.load.get(host, 0.0) + problem.preparing.get(host, 0.0)
        short = sum(threads) - max(threads) + extra - (problem.cores[host] - 1)
        if (part := min(1.0, extra, short)) > 0:
            found[host] = TURN_S * part
    return found


def _beside(busy: float, others: float) -> float:
    """Return how many other devices run while one does, on average.

    Some device runs at any moment of a step: those that wait do so for one that computes.

    Args:
        busy: The part of a step for which the device runs.
        others: The sum of these parts over the others.
    """
    if others >= 1 or busy <= 0:
        return others
    return max(0.0, busy + others - 1) / busy


def _slowdown(own: float, each: float, beside: float, cores: float) -> float:
    """Return the mean slowdown beside so many devices; where that is no whole number, the next ones take turns."""
    fewer = floor(beside)
    low, high = (max(1.0, (own + each * count) / cores) for count in (fewer, fewer + 1))
    return low + (beside - fewer) * (high - low)
