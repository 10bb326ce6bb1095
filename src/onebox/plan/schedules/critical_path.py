"""Search among schedules: the best of several, improved by moving actions on its critical path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from onebox.plan.hill_climbing import climb
from onebox.plan.model.schedule import Action
from onebox.plan.simulate.event_loop import ExecutedRows, execute_rows
from onebox.plan.simulate.instance import SchedulingInstance
from onebox.plan.simulate.memory import peak, state_bytes
from onebox.plan.simulate.step import finish

PLAY_S = 1e-6
"""Nominal seconds per action in the simulator, memory included; measured on a 2-core virtual machine."""

KEPT = 3
"""Number of best drafts whose critical paths are improved."""

Rows = list[list[Action]]


class ScheduleCandidate(NamedTuple):
    """Rows and their score; less is better.

    Args:
        score: Missing bytes, and seconds of the step.
        rows: The rows.
        over: Missing bytes of each device.
    """

    score: tuple[float, float]
    rows: Rows
    over: list[int]


class ScheduleSearch:
    """The best rows so far, and the remaining budget.

    Args:
        instance: The scheduling problem.
        budget_s: Nominal seconds that may be spent.
        expired: Returns whether the time limit has passed, regardless of the budget.
    """

    def __init__(
        self, instance: SchedulingInstance, budget_s: float, expired: Callable[[], bool] = lambda: False
    ) -> None:
        self.instance = instance
        self.left_s, self._expired = budget_s, expired
        self.actions = 3 * sum(len(instance.slots[slot].members) for slot in instance.slot_of)
        self._kept: list[ScheduleCandidate] = []
        self._state = state_bytes(instance)
        self._capacity = [instance.work.capacity_bytes.get(device) for device in instance.devices]
        self._bound_s = lower_bound_s(instance)

    @property
    def rows(self) -> Rows:
        """The best rows."""
        return self._kept[0].rows

    @property
    def perfect(self) -> bool:
        """Return whether the best rows are optimal."""
        return bool(self._kept) and self._kept[0].score <= (0.0, self._bound_s * (1 + 1e-9))

    @property
    def spent(self) -> bool:
        """Return whether the budget or time is used up."""
        return self.left_s <= 0 or self._expired()

    def spend(self, seconds: float) -> None:
        """Subtract nominal seconds from the budget."""
        self.left_s -= seconds

    def consider(self, rows: Sequence[Sequence[Action]]) -> None:
        """Keep rows if they are among the best so far: first by missing memory, then by time.

        Args:
            rows: The actions of each device, free of deadlocks.
        """
        self.spend(PLAY_S * self.actions)
        over = [self._lacks(device, row) for device, row in enumerate(rows)]
        score = (sum(over), self._step_s(execute_rows(self.instance, rows)))
        self._keep(ScheduleCandidate(score, [list(row) for row in rows], over))

    def _keep(self, candidate: ScheduleCandidate) -> None:
        if all(candidate.score != other.score for other in self._kept):
            self._kept = sorted([*self._kept, candidate], key=lambda kept: kept.score)[:KEPT]

    def _lacks(self, device: int, row: Sequence[Action]) -> int:
        capacity = self._capacity[device]
        return 0 if capacity is None else max(0, peak(self.instance, self._state[device], row).size_bytes - capacity)

    def _step_s(self, played: ExecutedRows) -> float:
        updates, _ = finish(self.instance, played)
        return max([*played.free, *(update.end_s for update in updates)])

    def improve(self) -> None:
        """Improve the critical paths of the best candidates, then of perturbed copies of the best one."""
        for candidate in tuple(self._kept):
            self._keep(self._climb(candidate))
        random = Random(0)  # equal inputs give equal schedules
        while not self.spent and not self.perfect and any(len(row) > 1 for row in self.rows):
            self._keep(self._climb(self._shake(self._kept[0], random)))
        self._kept = [self._join(self._kept[0])]

    def _climb(self, candidate: ScheduleCandidate) -> ScheduleCandidate:
        """Move single actions on the critical path as long as that helps."""

        def improved(at: ScheduleCandidate) -> ScheduleCandidate | None:
            return next((found for found in self._neighbours(at) if found.score < at.score), None)

        return climb(candidate, improved, lambda: self.spent or self.perfect)

    def _neighbours(self, candidate: ScheduleCandidate) -> Iterator[ScheduleCandidate]:
        self.spend(PLAY_S * self.actions)
        played = execute_rows(self.instance, candidate.rows)
        for device, old, new in moves(self.instance, candidate.rows, played):
            if self.spent:
                return
            row = list(candidate.rows[device])
            row.insert(new, row.pop(old))
            found = self._replace(candidate, device, row)
            if found is not None:
                yield found

    def _shake(self, candidate: ScheduleCandidate, random: Random) -> ScheduleCandidate:
        """Exchange a few random neighbours."""
        for _ in range(4):
            device = random.choice([number for number, row in enumerate(candidate.rows) if len(row) > 1])
            row = list(candidate.rows[device])
            place = random.randrange(len(row) - 1)
            if may_swap(self.instance, row[place], row[place + 1]):
                row[place], row[place + 1] = row[place + 1], row[place]
                candidate = self._replace(candidate, device, row) or candidate
        return candidate

    def _replace(self, candidate: ScheduleCandidate, device: int, row: list[Action]) -> ScheduleCandidate | None:
        """Return a candidate with another row; ``None`` if it would deadlock or miss more memory."""
        self.spend(PLAY_S * self.actions)
        over = list(candidate.over)
        over[device] = self._lacks(device, row)
        if sum(over) > candidate.score[0]:
            return None
        rows = [*candidate.rows[:device], row, *candidate.rows[device + 1 :]]
        played = execute_rows(self.instance, rows)
        if any(done < len(other) for done, other in zip(played.done, rows, strict=True)):
            return None
        return ScheduleCandidate((sum(over), self._step_s(played)), rows, over)

    def _join(self, candidate: ScheduleCandidate) -> ScheduleCandidate:
        """Join input and weight gradients that follow one another into whole backwards, where that costs nothing.

        A whole backward takes less memory, and one call instead of two.
        """
        if self.instance.grouped:
            return candidate
        for device, old in enumerate(candidate.rows):
            row: list[Action] = []
            for action in old:
                if action.kind == "W" and row and row[-1] == ("I", action.stage, action.micro_batch):
                    row[-1] = Action("B", action.stage, action.micro_batch)
                else:
                    row.append(action)
            found = self._replace(candidate, device, row) if len(row) < len(old) else None
            if found is not None and found.score <= candidate.score:
                candidate = found
        return candidate


def moves(instance: SchedulingInstance, rows: Rows, played: ExecutedRows) -> Iterator[tuple[int, int, int]]:
    """Yield moves (device, from, to) of an action to the front or the end of its block on the critical path.

    A block is a run of actions without a gap on one device. Exchanging neighbours inside it gains nothing; only a
    change of its first or last action may (Nowicki and Smutnicki 1996, doi:10.1287/mnsc.42.6.797).
    """
    for device, first, last in critical_blocks(instance, rows, played):
        row = rows[device]
        for place in range(first + 1, last + 1):
            front = place
            while front > first and may_swap(instance, row[front - 1], row[place]):
                front -= 1
            if front < place:
                yield device, place, front
        for place in range(last - 1, first - 1, -1):
            end = place
            while end < last and may_swap(instance, row[place], row[end + 1]):
                end += 1
            if end > place + (place == first):  # the exchange at the front has been tried from the other side
                yield device, place, end


def may_swap(instance: SchedulingInstance, early: Action, late: Action) -> bool:
    """Return whether two neighbours of a row may be exchanged, as far as the row alone is concerned."""
    if early.stage != late.stage:
        wide = instance.grouped and any(
            len(instance.slots[instance.slot_of[action.stage * instance.count + action.micro_batch]].members) > 1
            for action in (early, late)
        )
        return not wide
    if instance.grouped or early.micro_batch == late.micro_batch:
        return False
    sides = ["F" if action.kind == "F" else "W" if action.kind == "W" else "I" for action in (early, late)]
    return sides[0] != sides[1]


def critical_blocks(instance: SchedulingInstance, rows: Rows, played: ExecutedRows) -> list[tuple[int, int, int]]:
    """Return the blocks of the critical path, last one first: device, first and last place in its row.

    The path is followed backward from the action that ends last. Where an action starts when the one before it on the
    device ends, it depends on that one; otherwise on its latest input.
    """
    place = {}
    for device, row in enumerate(rows):
        for turn, action in enumerate(row):
            place[instance.node(action)] = (device, turn)
    device = max(range(len(rows)), key=lambda number: played.free[number])
    turn = len(rows[device]) - 1
    blocks = []
    while turn >= 0:
        last = turn
        node = instance.node(rows[device][turn])
        while turn > 0:
            before = instance.node(rows[device][turn - 1])
            if played.end[before] < played.start[node] * (1 - 1e-9):
                break
            turn, node = turn - 1, before
        if last > turn:
            blocks.append((device, turn, last))
        source = _last_input(instance, rows[device][turn], played)
        if source is None:
            break
        device, turn = place[source]
    return blocks


def _last_input(instance: SchedulingInstance, action: Action, played: ExecutedRows) -> int | None:
    """Return the node of the latest message that an action depended on."""
    kind, stage, micro_batch = action
    ends = () if kind == "W" else instance.into[stage] if kind == "F" else instance.out[stage]
    side = 0 if kind == "F" else instance.keys
    nodes = [end + micro_batch + side for end, _ in ends]
    return max(nodes, key=lambda node: played.end[node], default=None)


def lower_bound_s(instance: SchedulingInstance) -> float:
    """Return a lower bound of the seconds of a step.

    It is the maximum over devices of the earliest arrival of a value, plus all computation of the device, plus its
    optimizer step.
    """
    devices, call_s, smallest = instance.devices, instance.work.call_s, min(instance.scale)
    fastest = [float("inf")] * instance.stages
    busy = [0.0] * len(devices)
    for slot in instance.slots:
        for member in slot.members:
            busy[member] += instance.work.stages[slot.stage].update_s.get(devices[member], 0.0)
    for key, number in enumerate(instance.slot_of):
        stage, micro_batch = divmod(key, instance.count)
        size = instance.scale[micro_batch]
        fastest[stage] = min(fastest[stage], instance.seconds["F"][number] * smallest + call_s)
        for member in instance.slots[number].members:
            busy[member] += (instance.seconds["F"][number] + instance.seconds["B"][number]) * size + 2 * call_s
    head = [0.0] * instance.stages
    for stage in range(instance.stages):
        ends = (end // instance.count for end, _ in instance.into[stage])
        head[stage] = max((head[end] + fastest[end] for end in ends), default=0.0)
    return max(
        spent + min(head[slot.stage] for slot in instance.slots if device in slot.members)
        for device, spent in enumerate(busy)
    )
