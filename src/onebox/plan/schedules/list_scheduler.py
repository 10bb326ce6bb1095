"""The list scheduler: a free device starts the best of the ready actions that its memory allows. Private to the folder.

Every named schedule is a rule of it, and so are the first drafts of a synthesised one. A stage's forwards on a device
start in the order of their micro-batches, and so do its input gradients and its weight gradients: of each, only the
next one is a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from onebox.plan.model.schedule import Action, Kind
from onebox.plan.simulate.instance import SchedulingInstance
from onebox.plan.simulate.memory import state_bytes

UNLIMITED = 1 << 60
URGENT = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRule:
    """Priorities and limits of the list scheduler.

    Args:
        priority: Of each node (:meth:`SchedulingInstance.node`); the least goes first.
        split: For each slot, whether its backward is split into input and weight gradient.
        in_flight: For each slot, the maximum number of micro-batches between forward and input gradient.
        unfinished: For each slot, the maximum number between forward and weight gradient.
        device_in_flight: For each device, the maximum number between forward and input gradient, over all its slots.
        device_unfinished: The same, between forward and weight gradient.
        forwards_first: Whether a device does all its forwards before its first gradient.
        capacity: Maximum bytes of each device; ``None`` for no limit.
        patience: Part of a weight gradient's time for which a device stays idle for an expected input, rather than
            starting that weight gradient.
    """

    priority: Sequence[float]
    split: Sequence[bool]
    in_flight: Sequence[int]
    unfinished: Sequence[int]
    device_in_flight: Sequence[int]
    device_unfinished: Sequence[int]
    forwards_first: bool = False
    capacity: Sequence[int] | None = None
    patience: float = 0.0


def list_schedule(instance: SchedulingInstance, rule: DispatchRule) -> list[list[Action]]:
    """Return the rows of each device under a rule.

    A limit that would cause a deadlock (limits of devices that share micro-batches irregularly may) is ignored for the
    oldest micro-batch; so every instance has a schedule.

    Args:
        instance: Routes and work.
        rule: Priorities and limits.
    """
    run = _Run(instance, rule)
    run.go()
    return run.rows


class MemoryReserve:
    """Bytes that each device holds, and those reserved for its oldest micro-batch.

    A forward may start only if, afterwards, the device could still take every other forward of its oldest micro-batch
    and its whole backward, so that younger micro-batches never block the oldest one.

    Args:
        instance: Routes and work.
        capacity: Bytes of each device.
        split: For each slot, whether its backward is split.
        held: For each device, its slots.
        mine: For each slot, its micro-batches in order.
        forward: For each slot, how many forwards have been started; updated by the scheduler.
        inputs: The same, of input gradients.
    """

    def __init__(
        self,
        instance: SchedulingInstance,
        capacity: Sequence[int],
        split: Sequence[bool],
        *,
        held: Sequence[Sequence[int]],
        mine: Sequence[Sequence[int]],
        forward: Sequence[int],
        inputs: Sequence[int],
    ) -> None:
        self._slots, self._scale = instance.slots, instance.scale
        self._work = [instance.work.stages[slot.stage] for slot in instance.slots]
        self._level = [float(state) for state in state_bytes(instance)]
        self._capacity, self._split = capacity, split
        self._held, self._mine, self._forward, self._inputs = held, mine, forward, inputs
        largest = max(instance.scale)
        self._back = [
            max(
                self._work[slot].backward_work_bytes + split[slot] * self._work[slot].late_bytes * largest
                for slot in slots
            )
            for slots in held
        ]

    def may_start(self, slot: int, micro_batch: int) -> bool:
        """Return whether the memory allows a forward to start."""
        work = self._work[slot]
        saved = work.saved_bytes * self._scale[micro_batch]
        for member in self._slots[slot].members:
            after = self._level[member] + saved
            if after + work.forward_work_bytes > self._capacity[member]:
                return False
            if after + self._kept(member, slot, micro_batch) + self._back[member] > self._capacity[member]:
                return False
        return True

    def _kept(self, device: int, slot: int, micro_batch: int) -> float:
        """Return the bytes that the forwards of the device's oldest micro-batch still need, beside the given one."""
        mine, forward, inputs = self._mine, self._forward, self._inputs
        held = self._held[device]
        oldest = min(
            (mine[other][inputs[other]] for other in held if inputs[other] < len(mine[other])), default=micro_batch
        )
        return sum(
            self._work[other].saved_bytes * self._scale[oldest]
            for other in held
            if forward[other] < len(mine[other])
            and mine[other][forward[other]] <= oldest
            and not (other == slot and oldest == micro_batch)
        )

    def may_go_back(self, slot: int, micro_batch: int) -> bool:
        """Return whether the memory allows an input gradient (or a whole backward) to start."""
        work = self._work[slot]
        need = float(work.backward_work_bytes)
        if self._split[slot]:
            need += work.late_bytes * self._scale[micro_batch]
        return all(self._level[member] + need <= self._capacity[member] for member in self._slots[slot].members)

    def may_finish(self, slot: int) -> bool:
        """Return whether the memory allows a weight gradient, which needs the work memory of a backward, to start.

        Of those that wait, the one of the input gradient that ran last always fits.
        """
        need = self._work[slot].backward_work_bytes
        return all(self._level[member] + need <= self._capacity[member] for member in self._slots[slot].members)

    def start(self, kind: Kind, slot: int, micro_batch: int) -> None:
        """Record an action; the memory that it frees at its end is available to the device's next action."""
        work, size = self._work[slot], self._scale[micro_batch]
        change = {
            "F": work.saved_bytes,
            "I": work.late_bytes - work.saved_bytes,
            "B": -work.saved_bytes,
            "W": -work.late_bytes,
        }[kind]
        for member in self._slots[slot].members:
            self._level[member] += change * size


class _Run:
    """One run of the list scheduler: the started actions of each slot, missing inputs, and free devices."""

    def __init__(self, instance: SchedulingInstance, rule: DispatchRule) -> None:
        self.instance, self.rule = instance, rule
        size, keys, count = len(instance.devices), instance.keys, instance.count
        self.rows: list[list[Action]] = [[] for _ in range(size)]
        self.idle = [True] * size
        self.mine: list[list[int]] = [[] for _ in instance.slots]
        for key, slot in enumerate(instance.slot_of):
            self.mine[slot].append(key % count)
        self.forward = [0] * len(instance.slots)
        self.inputs = [0] * len(instance.slots)
        self.weight = [0] * len(instance.slots)
        self.needs = [len(ends) for ends in instance.into for _ in range(count)]
        self.needs += [len(ends) for ends in instance.out for _ in range(count)]
        self.held = [
            [number for number, slot in enumerate(instance.slots) if device in slot.members] for device in range(size)
        ]
        self.partners = [
            sorted({other for number in held for other in instance.slots[number].members}) for held in self.held
        ]
        self.left = [sum(len(self.mine[number]) for number in held) for held in self.held]
        self.in_flight, self.unfinished = [0] * size, [0] * size
        self.link_free = [0.0] * (size * size)
        self.events: list[tuple[float, int, int]] = []
        self.memory = None
        if rule.capacity is not None:
            self.memory = MemoryReserve(
                instance,
                rule.capacity,
                rule.split,
                held=self.held,
                mine=self.mine,
                forward=self.forward,
                inputs=self.inputs,
            )
        self.keys = keys
        self.unknown = list(self.needs)
        self.expected = [0.0] * len(self.needs)

    def go(self) -> None:
        """Start all possible actions, wait for the next event, and repeat."""
        events = self.events
        touched = set(range(len(self.rows)))
        now = 0.0
        while True:
            for device in sorted(touched):
                if self.idle[device]:
                    self._dispatch(device, now)
            touched.clear()
            if not events:
                if not self._lift(now):
                    return
                continue
            now = events[0][0]
            together = now + 1e-9 * now  # ends that differ by rounding alone
            while events and events[0][0] <= together:
                when, node, slot = heappop(events)
                now = when
                if slot < 0:
                    self._arrive(node, touched)
                else:
                    self._end(node, slot, when, touched)

    def _arrive(self, node: int, touched: set[int]) -> None:
        self.needs[node] -= 1
        if not self.needs[node]:
            touched.update(self.instance.slots[self.instance.slot_of[node % self.keys]].members)

    def _end(self, node: int, slot: int, now: float, touched: set[int]) -> None:
        """Free the devices of an action that has ended, and send its outputs."""
        instance, keys = self.instance, self.keys
        members = instance.slots[slot].members
        for member in members:
            self.idle[member] = True
            touched.update(self.partners[member])
        side, key = divmod(node, keys)
        if side == 2:
            return
        stage, micro_batch = divmod(key, instance.count)
        device, size = members[0], len(self.rows)
        for end, size_bytes in instance.into[stage] if side else instance.out[stage]:
            other = end + micro_batch
            target = instance.first[other]
            other += side * keys
            if target != device:
                link = device * size + target
                sent = max(self.link_free[link], now)
                sent += size_bytes * instance.scale[micro_batch] * instance.per_byte_s[link]
                self.link_free[link] = sent
                arrival = sent + instance.latency_s[link]
                if arrival > now:
                    heappush(self.events, (arrival, other, -1))
                    continue
            self._arrive(other, touched)

    def _dispatch(self, device: int, now: float) -> None:
        """Start the best of the ready actions of a device, if there is one."""
        rule, count, keys, needs = self.rule, self.instance.count, self.keys, self.needs
        priority, memory = rule.priority, self.memory
        best, choice = float("inf"), -1
        chosen = -1
        for slot in self.held[device]:
            stage, members = self.instance.slots[slot]
            if len(members) > 1 and not all(self.idle[member] for member in members):
                continue
            mine, forward, inputs = self.mine[slot], self.forward[slot], self.inputs[slot]
            first = stage * count
            if inputs < forward:
                node = keys + first + mine[inputs]
                if not needs[node] and priority[node] < best and self._may_go_back(device, slot, node - keys):
                    best, choice, chosen = priority[node], node, slot
            if self.weight[slot] < inputs and (memory is None or memory.may_finish(slot)):
                node = 2 * keys + first + mine[self.weight[slot]]
                urgent = priority[node] if self.unfinished[device] < rule.device_unfinished[device] else URGENT
                if urgent < best:
                    best, choice, chosen = urgent, node, slot
            if forward < len(mine):
                node = first + mine[forward]
                if (
                    not needs[node]
                    and priority[node] < best
                    and forward - inputs < rule.in_flight[slot]
                    and forward - self.weight[slot] < rule.unfinished[slot]
                    and self.in_flight[device] < rule.device_in_flight[device]
                    and self.unfinished[device] < rule.device_unfinished[device]
                    and (memory is None or memory.may_start(slot, mine[forward]))
                ):
                    best, choice, chosen = priority[node], node, slot
        if choice >= 2 * keys and rule.patience and best > URGENT:
            took = self.instance.seconds["W"][chosen] * self.instance.scale[choice % count]
            if self._comes_before(device, now, now + rule.patience * took):
                return
        if choice >= 0:
            self._start(choice, chosen, now)

    def _comes_before(self, device: int, now: float, deadline: float) -> bool:
        """Return whether the last input of a device's next action is on its way and comes soon."""
        for slot in self.held[device]:
            mine, first = self.mine[slot], self.instance.slots[slot].stage * self.instance.count
            forward, inputs = self.forward[slot], self.inputs[slot]
            if inputs < forward:
                node = self.keys + first + mine[inputs]
                if self.needs[node] and not self.unknown[node] and now < self.expected[node] < deadline:
                    return True
            if forward < len(mine) and forward - inputs < self.rule.in_flight[slot]:
                node = first + mine[forward]
                if self.needs[node] and not self.unknown[node] and now < self.expected[node] < deadline:
                    return True
        return False

    def _announce(self, side: int, stage: int, micro_batch: int, end: float) -> None:
        """Record when the outputs of a started action will arrive."""
        instance, size = self.instance, len(self.rows)
        device = instance.first[stage * instance.count + micro_batch]
        for first, size_bytes in instance.into[stage] if side else instance.out[stage]:
            node = first + micro_batch
            arrival, target = end, instance.first[node]
            if target != device:
                link = device * size + target
                arrival = max(self.link_free[link], end) + instance.latency_s[link]
                arrival += size_bytes * instance.scale[micro_batch] * instance.per_byte_s[link]
            node += side * self.keys
            self.unknown[node] -= 1
            self.expected[node] = max(self.expected[node], arrival)

    def _may_go_back(self, device: int, slot: int, key: int) -> bool:
        if self.rule.forwards_first and self.left[device]:
            return False
        return self.memory is None or self.memory.may_go_back(slot, key % self.instance.count)

    def _start(self, node: int, slot: int, now: float) -> None:
        instance = self.instance
        side, key = divmod(node, self.keys)
        stage, micro_batch = divmod(key, instance.count)
        split = self.rule.split[slot]
        kind: Kind = "F" if side == 0 else "W" if side == 2 else "I" if split else "B"
        forward, inputs, weight = side == 0, side == 1, side == 2 or (side == 1 and not split)
        self.forward[slot] += forward
        self.inputs[slot] += inputs
        self.weight[slot] += weight
        action = Action(kind, stage, micro_batch)
        for member in instance.slots[slot].members:
            self.idle[member] = False
            self.rows[member].append(action)
            self.left[member] -= forward
            self.in_flight[member] += forward - inputs
            self.unfinished[member] += forward - weight
        if self.memory is not None:
            self.memory.start(kind, slot, micro_batch)
        took = instance.work.call_s + instance.seconds[kind][slot] * instance.scale[micro_batch]
        heappush(self.events, (now + took, node, slot))
        if self.rule.patience and side < 2:
            self._announce(side, stage, micro_batch, now + took)

    def _lift(self, now: float) -> bool:
        """Start the oldest ready action in spite of the limits, when nothing else runs; return whether there is one."""
        ready = []
        for slot, (stage, _) in enumerate(self.instance.slots):
            mine, first = self.mine[slot], stage * self.instance.count
            for side, done, limit in (
                (2, self.weight[slot], self.inputs[slot]),
                (1, self.inputs[slot], self.forward[slot]),
                (0, self.forward[slot], len(mine)),
            ):
                if done < limit and (side == 2 or not self.needs[side * self.keys + first + mine[done]]):
                    ready.append((mine[done], -side, -stage, side * self.keys + first + mine[done], slot))
        if not ready:
            return False
        *_, node, slot = min(ready)
        self._start(node, slot, now)
        return True
