"""The simulator's loop: rows of actions are executed until all are done or none can go on. Private to the folder."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from onebox.plan.simulate.instance import UPDATE, GradientSums, SchedulingInstance, Turn
from onebox.plan.simulate.offload_schedule import channels


@dataclass(slots=True)
class ExecutedRows:
    """The executed rows.

    Args:
        done: Number of actions that each device has done.
        free: The time at which each device became free.
        busy: Busy seconds of each device.
        last: The time of the last gradient of each slot.
        start: The start of each node, by :meth:`SchedulingInstance.node`.
        end: Its end.
        queued: The start of each message that shares an uplink, by the node of its action, and by its edge as in
            :attr:`SchedulingInstance.out` and :attr:`SchedulingInstance.into`.
    """

    done: list[int]
    free: list[float]
    busy: list[float]
    last: list[float]
    start: list[float]
    end: list[float]
    queued: dict[tuple[int, int], float]


class UplinkQueue:
    """Messages on uplinks that several links share.

    Devices are simulated one after the other, not in the order of time: so a message takes the first gap between the
    others' that is long enough, instead of a place behind them all.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[str, bool], list[tuple[float, float]]] = {}

    def add(self, crossed: tuple[str, str], ready_s: float, seconds: float) -> float:
        """Return the start of a message.

        Args:
            crossed: The uplinks that it leaves and enters.
            ready_s: The time from which it can start.
            seconds: The time for which it occupies both.
        """
        leaves, enters = crossed
        ways = [self._taken.setdefault((leaves, True), []), self._taken.setdefault((enters, False), [])]
        start = ready_s
        while (later := max(_gap(taken, start, seconds) for taken in ways)) > start:
            start = later
        if seconds > 0:
            for taken in ways:
                insort(taken, (start, start + seconds))
        return start


def _gap(taken: Sequence[tuple[float, float]], ready_s: float, seconds: float) -> float:
    """Return the start of the first gap of some seconds between ordered intervals that do not overlap."""
    start = ready_s
    for begin, end in taken[max(0, bisect_right(taken, (ready_s, inf)) - 1) :]:
        if begin >= start + seconds:
            break
        start = max(start, end)
    return start


def execute_rows(  # noqa: PLR0912, PLR0915 (see below)
    instance: SchedulingInstance, rows: Sequence[Sequence[Turn]], sums: GradientSums | None = None
) -> ExecutedRows:
    """Execute rows until all are done or none can go on.

    A device is simulated along its row until an input is missing, and continued when that has arrived. No event queue
    is needed, since a link's messages all come from one device, in the order of its row; those of shared uplinks are in
    an :class:`UplinkQueue`. This is one long function, on plain lists, because planning simulates thousands of
    schedules: about 1 µs an action.

    Args:
        instance: The scheduling problem.
        rows: The actions of each device, in the order of the instance's devices; with ``sums`` also updates.
        sums: Gradients of steps that follow one another.
    """
    size, count, keys = len(instance.devices), instance.count, instance.keys
    slot_of, first, scale, call_s = instance.slot_of, instance.first, instance.scale, instance.work.call_s
    seconds, out, into, slots = instance.seconds, instance.out, instance.into, instance.slots
    latency_s, per_byte_s, grouped = instance.latency_s, instance.per_byte_s, instance.grouped
    base = {"F": 0, "I": keys, "B": keys, "W": 2 * keys}
    needs = inputs_needed(instance)
    ready = [0.0] * (3 * keys)  # the time of the last input, and later the start of the node
    ended = [0.0] * (3 * keys)
    link_free = [0.0] * (size * size)
    last = [0.0] * len(slots)
    done, free, busy, waits, announced = [0] * size, [0.0] * size, [0.0] * size, [-1] * size, [-1] * size
    stack = list(range(size - 1, -1, -1))
    crossed, uplinks, queued = instance.crossed, UplinkQueue(), dict[tuple[int, int], float]()
    host, moved = channels(instance, rows), [-1] * size
    while stack:
        device = stack.pop()
        row, place, now, spent = rows[device], done[device], free[device], busy[device]
        total = len(row)
        while place < total:
            kind, stage, micro_batch = row[place]
            if host is not None and moved[device] != place:
                moved[device] = place
                now = host[device].before(place, now, ready)
            if sums is not None and kind == UPDATE:
                node = sums.index(stage, micro_batch)
                if sums.missing[node]:
                    waits[device] = 3 * keys + node
                    break
                begin = max(now, sums.ready[node])
                now = begin + sums.update_s[stage][device]
                sums.updates.append((device, stage, micro_batch, begin, now))
                spent += now - begin
                place += 1
                continue
            key = stage * count + micro_batch
            node = base[kind] + key
            slot = slot_of[key]
            if grouped and announced[device] != place and len(slots[slot].members) > 1:
                announced[device] = place
                needs[node] -= 1
                ready[node] = max(ready[node], now)
                if not needs[node]:
                    _wake(slots[slot].members, node, waits, stack)
            if needs[node]:
                waits[device] = node
                break
            if ready[node] > now:
                now = ready[node]
            else:
                ready[node] = now
            sized = scale[micro_batch]
            took = call_s + seconds[kind][slot] * sized
            ended[node] = now = now + took
            spent += took
            place += 1
            if kind == "F":
                ends, side = out[stage], 0
            else:
                last[slot] = now
                if sums is not None and kind != "I":
                    summed = sums.gradient(stage, micro_batch, now)
                    if summed is not None:
                        _wake(summed[1], 3 * keys + summed[0], waits, stack)
                if kind == "W":
                    continue
                ends, side = into[stage], keys
            if not ends or first[key] != device:
                continue
            for end, size_bytes in ends:
                node = end + micro_batch
                target = first[node]
                if target == device:
                    arrival = now
                else:
                    link = device * size + target
                    sent = link_free[link]
                    sent = sent if sent > now else now
                    if link in crossed:
                        sent = uplinks.add(crossed[link], sent, size_bytes * sized * per_byte_s[link])
                        queued[base[kind] + key, end] = sent
                    sent += size_bytes * sized * per_byte_s[link]
                    link_free[link] = sent
                    arrival = sent + latency_s[link]
                members = slots[slot_of[node]].members if grouped else ()
                node += side
                ready[node] = arrival if arrival > ready[node] else ready[node]
                needs[node] -= 1
                if not needs[node]:
                    if members:
                        _wake(members, node, waits, stack)
                    elif waits[target] == node:
                        waits[target] = -1
                        stack.append(target)
        done[device], free[device], busy[device] = place, now, spent
    return ExecutedRows(done, free, busy, last, ready, ended, queued)


def inputs_needed(instance: SchedulingInstance) -> list[int]:
    """Return the number of inputs of each node: forward, then input gradient, then weight gradient of every key.

    Inputs are the messages along edges, also within a device, and, for a replica of several devices, each of them.
    """
    count = instance.count
    forward = [len(ends) for ends in instance.into for _ in range(count)]
    backward = [len(ends) for ends in instance.out for _ in range(count)]
    if not instance.grouped:
        return forward + backward + [0] * instance.keys
    wide = [len(instance.slots[slot].members) for slot in instance.slot_of]
    wide = [width if width > 1 else 0 for width in wide]
    return [inputs + width for inputs, width in zip(forward + backward + [0] * instance.keys, wide * 3, strict=True)]


def _wake(members: Sequence[int], node: int, waits: list[int], stack: list[int]) -> None:
    for member in members:
        if waits[member] == node:
            waits[member] = -1
            stack.append(member)
