"""Layouts whose stages have their layers split over groups of alike devices of one host. Pure.

A rank sends a few messages for each layer and micro-batch, so that groups within a host are tried only, whose links are
the quickest (Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from math import comb

from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.layout import LayoutStage, StageLayout

_ALL = 2500
"""Number of cuts and assignments up to which all are enumerated."""

_GROUPS = 12
"""Number of devices up to which all groups are."""


def split_over(evaluator: Evaluator, part: LayoutStage, ranks: int) -> LayoutStage | None:
    """Return a stage whose devices split its layers in groups of alike devices of a host.

    Args:
        evaluator: Knows the devices.
        part: The stage.
        ranks: Devices of each group; 1 for whole layers.

    Returns:
        The stage; ``None`` where not all of its devices are in such groups.
    """
    if ranks == 1:
        devices = part.devices
    else:
        alike = _alike(evaluator, part.devices)
        if any(len(own) % ranks for own in alike):
            return None
        devices = tuple(number for own in alike for number in own)
    shares = evaluator.costs.shares(devices[::ranks], max(evaluator.problem.micro_batches))
    return part._replace(devices=devices, shares=shares, ranks=ranks)


def _alike(evaluator: Evaluator, devices: Iterable[int]) -> list[list[int]]:
    """Return the sets of devices that may split layers together: alike ones of a host."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number in devices:
        found.setdefault((evaluator.kinds[number], evaluator.problem.device[number].host), []).append(number)
    return list(found.values())


def split_models(evaluator: Evaluator) -> Iterator[tuple[str, list[StageLayout]]]:
    """Yield the names of plans of one stage whose layers are split, each with its variants: one for each micro-batch.

    For each number of ranks there is one on the quickest group of devices and one on as many groups as there are, which
    are replicas then.
    """
    problem = evaluator.problem
    every = tuple(range(len(problem.segments)))
    alike = _alike(evaluator, sorted(problem.device))
    alike.sort(key=lambda own: -evaluator.costs.power(own[0], max(problem.micro_batches)))
    for ranks in sorted(problem.splits):
        usable = [number for own in alike for number in own[: len(own) - len(own) % ranks]]
        for groups in dict.fromkeys((1, len(usable) // ranks)) if usable else ():
            part = split_over(evaluator, LayoutStage(every, tuple(usable[: groups * ranks]), ()), ranks)
            assert part is not None
            layouts = [StageLayout((part,), size, "1f1b") for size in problem.micro_batches]
            name = f"layers split over {ranks} devices" + (f", {groups} replicas" if groups > 1 else "")
            if allowed := [layout for layout in layouts if evaluator.allows(layout)]:
                yield name, allowed


def split_variants(evaluator: Evaluator, layouts: Iterable[StageLayout]) -> Iterator[StageLayout]:
    """Yield layouts in which every stage on several alike devices of a host splits its layers over them.

    Args:
        evaluator: Knows the devices.
        layouts: Layouts whose stages have several replicas.
    """
    for layout in layouts:
        for ranks in sorted(evaluator.problem.splits):
            parts = tuple(split_over(evaluator, part, ranks) or part for part in layout.parts)
            if parts != layout.parts:
                yield layout._replace(parts=parts)


def every_split_layout(evaluator: Evaluator, order: tuple[int, ...], schedules: Iterable[str]) -> Iterator[StageLayout]:
    """Yield all layouts of single devices and groups, one of them at least, for small problems; none for larger ones.

    Args:
        evaluator: Knows the problem.
        order: The segments, in an order in which values go from earlier to later ones.
        schedules: The schedules, of one stage a device.
    """
    problem, names = evaluator.problem, list(schedules)
    if len(problem.devices) > _GROUPS:
        return
    numbers = sorted(problem.device)
    groups = [
        group for ranks in sorted(problem.splits) for own in _alike(evaluator, numbers)
        for group in combinations(own, ranks)
    ]  # fmt: skip
    most = min(len(order), problem.max_stages or len(order))
    chosen, total = list[tuple[tuple[int, ...], ...]](), 0
    for units in _sequences([*((number,) for number in numbers), *groups], most):
        if any(len(unit) > 1 for unit in units):
            chosen.append(units)
            total += comb(len(order) - 1, len(units) - 1)
            if total > _ALL:
                return
    for units in chosen:
        for cuts in combinations(range(1, len(order)), len(units) - 1):
            parts = tuple(
                LayoutStage(order[a:b], unit, (1.0,), ranks=len(unit))
                for a, b, unit in zip((0, *cuts), (*cuts, len(order)), units, strict=True)
            )
            for size in problem.micro_batches:
                for name in names if len(units) > 1 else ["1f1b"]:
                    yield StageLayout(parts, size, name)


def _sequences(units: list[tuple[int, ...]], most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the sequences of up to so many units that have no device in common."""
    for unit in units:
        yield (unit,)
        if most > 1:
            rest = [other for other in units if not set(other) & set(unit)]
            yield from ((unit, *others) for others in _sequences(rest, most - 1))
