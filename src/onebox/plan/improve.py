"""Search among schedules: which of them is best, and what moving actions on its critical path gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onebox.plan.instance import Instance
from onebox.plan.memory import peak, state_bytes
from onebox.plan.play import Played, play
from onebox.plan.schedule import Action
from onebox.plan.simulate import finish

PLAY_S = 1e-6
"""Nominal seconds that the simulator takes for an action, memory included; measured on a 2-core virtual machine."""

Rows = list[list[Action]]


class Search:
    """The best rows so far, and what is left of the budget.

    Args:
        instance: What they are for.
        budget_s: Nominal seconds that may be spent.
    """

    def __init__(self, instance: Instance, budget_s: float) -> None:
        self.instance = instance
        self.left_s = budget_s
        self.rows: Rows = []
        self.score: tuple[float, float] = (float("inf"), float("inf"))
        self.actions = 3 * sum(len(instance.slots[slot].members) for slot in instance.slot_of)
        self._state = state_bytes(instance)
        self._capacity = [instance.work.capacity_bytes.get(device) for device in instance.devices]
        self._over: list[int] = []
        self._bound_s = lower_bound_s(instance)

    @property
    def perfect(self) -> bool:
        """Whether no schedule can be better."""
        return self.score[0] == 0 and self.score[1] <= self._bound_s * (1 + 1e-9)

    def spend(self, seconds: float) -> None:
        """Take nominal seconds from the budget."""
        self.left_s -= seconds

    def consider(self, rows: Sequence[Sequence[Action]]) -> None:
        """Keep rows if they are better than the best so far: first by the memory that they lack, then by time."""
        self.spend(PLAY_S * self.actions)
        over = [self._lacks(device, row) for device, row in enumerate(rows)]
        score = (sum(over), self._step_s(play(self.instance, rows)))
        if score < self.score:
            self.rows, self.score, self._over = [list(row) for row in rows], score, over

    def _lacks(self, device: int, row: Sequence[Action]) -> int:
        capacity = self._capacity[device]
        return 0 if capacity is None else max(0, peak(self.instance, self._state[device], row).size_bytes - capacity)

    def _step_s(self, played: Played) -> float:
        updates, _ = finish(self.instance, played)
        return max([*played.free, *(update.end_s for update in updates)])

    def improve(self) -> None:
        """Move single actions on the critical path as long as that helps and the budget lasts."""
        better = True
        while better and self.left_s > 0 and not self.perfect:
            better = any(self._try(device, old, new) for device, old, new in self._moves())
        self._join()

    def _try(self, device: int, old: int, new: int) -> bool:
        """Move an action within its row, and keep that if it is better."""
        if self.left_s <= 0:
            return False
        row = self.rows[device]
        changed = row[:old] + row[old + 1 :]
        changed.insert(new, row[old])
        return self._replace(device, changed)

    def _replace(self, device: int, row: list[Action], *, equal: bool = False) -> bool:
        """Take a row instead of the present one if that is better (or, if wanted, as good)."""
        self.spend(PLAY_S * self.actions)
        lacks = self._lacks(device, row)
        over = self.score[0] - self._over[device] + lacks
        if over > self.score[0]:
            return False
        rows = [*self.rows[:device], row, *self.rows[device + 1 :]]
        played = play(self.instance, rows)
        if any(done < len(other) for done, other in zip(played.done, rows, strict=True)):
            return False  # it would wait for ever
        score = (over, self._step_s(played))
        if score < self.score or (equal and score <= self.score):
            self.rows, self.score = rows, score
            self._over[device] = lacks
            return True
        return False

    def _moves(self) -> Iterator[tuple[int, int, int]]:
        """Yield moves (device, from, to) of an action to the front or the end of its critical block.

        Between neighbours within a block of actions that follow one another without a gap on the critical path, an
        exchange gains nothing; only one that changes what is first or last there may (Nowicki and Smutnicki 1996,
        doi:10.1287/mnsc.42.6.797).
        """
        played = play(self.instance, self.rows)
        for device, first, last in critical_blocks(self.instance, self.rows, played):
            row = self.rows[device]
            for place in range(first + 1, last + 1):
                front = place
                while front > first and may_swap(self.instance, row[front - 1], row[place]):
                    front -= 1
                if front < place:
                    yield device, place, front
            for place in range(last - 1, first - 1, -1):
                end = place
                while end < last and may_swap(self.instance, row[place], row[end + 1]):
                    end += 1
                if end > place + (place == first):  # the front's own exchange has been tried from the other side
                    yield device, place, end

    def _join(self) -> None:
        """Join input and weight gradients that follow one another into whole backwards, where that costs nothing.

        A whole one takes less memory, and the device is asked once instead of twice.
        """
        if self.instance.grouped:
            return
        for device in range(len(self.rows)):
            row: list[Action] = []
            for action in self.rows[device]:
                kind, stage, micro_batch = action
                if kind == "W" and row and row[-1] == ("I", stage, micro_batch):
                    row[-1] = Action("B", stage, micro_batch)
                else:
                    row.append(action)
            if len(row) < len(self.rows[device]):
                self._replace(device, row, equal=True)


def may_swap(instance: Instance, early: Action, late: Action) -> bool:
    """Return whether two neighbours of a row may change places, as far as the row alone is concerned."""
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


def critical_blocks(instance: Instance, rows: Rows, played: Played) -> list[tuple[int, int, int]]:
    """Return the blocks of the critical path, last one first: device, first and last place in its row.

    It goes back from the action that ends last. Where an action starts when the one before it on the device ends, that
    is what it waits for; otherwise it is the input that came last.
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


def _last_input(instance: Instance, action: Action, played: Played) -> int | None:
    """Return the node whose message an action waited for."""
    kind, stage, micro_batch = action
    ends = () if kind == "W" else instance.into[stage] if kind == "F" else instance.out[stage]
    side = 0 if kind == "F" else instance.keys
    nodes = [end + micro_batch + side for end, _ in ends]
    return max(nodes, key=lambda node: played.end[node], default=None)


def lower_bound_s(instance: Instance) -> float:
    """Return seconds below which no step can be.

    For each device: until the first value can reach it, then all that it computes, then its optimizer step.
    """
    devices, call_s, smallest = instance.devices, instance.work.call_s, min(instance.scale)
    fastest = [float("inf")] * instance.stages
    busy = [sum(stage.update_s.get(device, 0.0) for stage in instance.work.stages) for device in devices]
    for key, slot in enumerate(instance.slot_of):
        stage, micro_batch = divmod(key, instance.count)
        size = instance.scale[micro_batch]
        fastest[stage] = min(fastest[stage], instance.seconds["F"][slot] * smallest + call_s)
        for member in instance.slots[slot].members:
            busy[member] += (instance.seconds["F"][slot] + instance.seconds["B"][slot]) * size + 2 * call_s
    head = [0.0] * instance.stages
    for stage in range(instance.stages):
        ends = (end // instance.count for end, _ in instance.into[stage])
        head[stage] = max((head[end] + fastest[end] for end in ends), default=0.0)
    return max(
        spent + min(head[slot.stage] for slot in instance.slots if device in slot.members)
        for device, spent in enumerate(busy)
    )
