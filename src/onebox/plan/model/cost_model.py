"""Costs of stages, summed up from their segments. Pure; sums are cached, as planning needs the same ones repeatedly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.plan.model.crowding import crowding, wake_up_delays
from onebox.plan.model.layout import LayoutStage, StageLayout, layout_of, owners
from onebox.plan.model.plan import MicroBatch, Plan
from onebox.plan.model.problem import Problem, RankMessages, SegmentValue
from onebox.plan.model.shares import apportion
from onebox.plan.model.stage import ActivationPolicy
from onebox.plan.model.work import Edge, Links, OffloadedBytes, PlanWork, StageWork
from onebox.plan_names import GradientCodec
from onebox.wire.gradient_codecs import encoded_bytes


class SegmentSeconds(NamedTuple):
    """Times of some segments on one type of device, at speed 1: fixed and per-sample parts, then the update's.

    Args:
        forward: Seconds of forward.
        inputs: Seconds of the gradient of the inputs.
        weights: Seconds of the gradients of the parameters.
        update_s: Seconds of the optimizer step.
    """

    forward: tuple[float, float]
    inputs: tuple[float, float]
    weights: tuple[float, float]
    update_s: float


class SegmentSizes(NamedTuple):
    """Bytes of some segments; all but the first three are for each sample."""

    parameter: int
    state: int
    optimizer: int
    saved: int
    late: int
    forward_work: int
    backward_work: int
    again: int


class SplitMessages(NamedTuple):
    """Collectives of some segments that are split over ranks, for each micro-batch.

    Args:
        messages: Messages that a rank sends one after the other.
        calls: Number of collectives.
        fixed_bytes: Bytes that a rank sends, whatever the number of samples.
        sample_bytes: Those for each sample.
    """

    messages: int
    calls: int
    fixed_bytes: float
    sample_bytes: float


class CrossingBytes(NamedTuple):
    """Bytes of values that cross the ends of a stage, for a micro-batch.

    Args:
        kept: Received from another device, and needed by the stage's backward.
        received: Received from another device.
        given: Given to later stages on the stage's own device.
        lent: Of the given bytes, by the last stage that reads them, those that its backward reads, too.
    """

    kept: int
    received: int
    given: int
    lent: tuple[OffloadedBytes, ...]


_CODING_BPS = 1e9
"""Assumed bytes per second of encoding gradients, without a measurement: about that of a core."""


class CostModel:
    """Costs of a problem's segments.

    Args:
        problem: The planning problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.types = sorted({device.type for device in problem.devices})
        lines = [
            [
                part
                for kind in self.types
                for time in (segment.forward_s[kind], segment.input_s[kind], segment.weight_s[kind])
                for part in (time.fixed_s, time.sample_s)
            ]
            + [segment.update_s.get(kind, 0.0) for kind in self.types]
            for segment in problem.segments
        ]
        self._lines = np.array(lines, dtype=np.float64)
        names = ("parameter", "state", "optimizer", "saved", "late", "forward_work", "backward_work")
        self._sizes = np.array([[getattr(s, f"{name}_bytes") for name in names] for s in problem.segments], np.int64)
        self._ties: list[list[int]] = [[] for _ in problem.segments]
        for number, tie in enumerate(problem.ties):
            for index in set(tie.segments):
                self._ties[index].append(number)
        self._made: list[list[SegmentValue]] = [[] for _ in problem.segments]
        for value in problem.values:
            self._made[value.source].append(value)
        self._sources: list[set[int]] = [set() for _ in problem.segments]
        for value in problem.values:
            for consumer in value.consumers:
                self._sources[consumer].add(value.source)
        self._messages: dict[tuple[tuple[int, ...], int], tuple[SplitMessages, SplitMessages]] = {}
        self._rings: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        ends = [(v.source, consumer, n) for n, v in enumerate(problem.values) for consumer in v.consumers]
        self._ends = np.array(ends, np.int64).reshape(-1, 3).T
        self._seconds: dict[tuple[tuple[int, ...], int], dict[str, SegmentSeconds]] = {}
        self._bytes: dict[tuple[tuple[int, ...], int], SegmentSizes] = {}
        self._split_lines = {ranks: self._lines_over(ranks) for ranks in problem.splits}
        self._split_sizes = {
            ranks: np.array([[getattr(s, f"{name}_bytes") for name in names] for s in split], np.int64)
            for ranks, split in problem.splits.items()
        }
        self._stages: dict[tuple[object, ...], StageWork] = {}
        self._busy_hosts = any(problem.load.values()) or any(problem.preparing.values())
        self._delayed: dict[tuple[tuple[str, float], ...], Links] = {}

    def _lines_over(self, ranks: int) -> NDArray[np.float64]:
        """Return the times of all segments split over ranks: those of the first rank, without its collectives."""
        found = self._lines.copy()
        base = 6 * len(self.types)
        for index, split in enumerate(self.problem.splits[ranks]):
            whole = self.problem.segments[index].parameter_bytes
            for n in range(len(self.types)):
                found[index, 6 * n : 6 * n + 2] *= split.forward_share
                found[index, 6 * n + 2 : 6 * n + 6] *= split.backward_share
            found[index, base:] *= split.parameter_bytes / whole if whole else 1.0
        return found

    def seconds(self, segments: tuple[int, ...], ranks: int = 1) -> dict[str, SegmentSeconds]:
        """Return the times of some segments by type of device.

        Args:
            segments: The segments.
            ranks: Number of devices over which their layers are split; the times are then those of a rank, without its
                collectives.
        """
        key = segments, ranks
        if key not in self._seconds:
            lines = self._lines if ranks == 1 else self._split_lines[ranks]
            total = lines[sorted(segments)].sum(axis=0).tolist()
            base = 6 * len(self.types)
            self._seconds[key] = {
                kind: SegmentSeconds(
                    (total[6 * n], total[6 * n + 1]),
                    (total[6 * n + 2], total[6 * n + 3]),
                    (total[6 * n + 4], total[6 * n + 5]),
                    total[base + n],
                )
                for n, kind in enumerate(self.types)
            }
        return self._seconds[key]

    def lines(self, kind: str) -> NDArray[np.float64]:
        """Return for each segment the fixed and per-sample seconds of forward and backward on a type of device."""
        own = self._lines[:, 6 * self.types.index(kind) : 6 * self.types.index(kind) + 6]
        return np.stack([own[:, ::2].sum(axis=1), own[:, 1::2].sum(axis=1)], axis=1)

    def sizes(self, segments: tuple[int, ...], ranks: int = 1) -> SegmentSizes:
        """Return the bytes of some segments, parameters that they share with others included.

        Args:
            segments: The segments.
            ranks: Number of devices over which their layers are split; the bytes are then those of a rank.
        """
        key = segments, ranks
        if key not in self._bytes:
            rows = (self._sizes if ranks == 1 else self._split_sizes[ranks])[list(segments)]
            parameter, state, optimizer, saved, late = rows[:, :5].sum(axis=0).tolist()
            # While a segment runs, later ones have not allocated anything yet, or have freed it.
            later = saved - np.cumsum(rows[:, 3])
            forward, backward = (max(0, int((rows[:, column] - later).max())) for column in (5, 6))
            held = [self.problem.ties[number] for number in self.ties(segments)]
            parameter += sum(tie.parameter_bytes for tie in held)
            state += sum(tie.state_bytes for tie in held)
            optimizer += sum(tie.optimizer_bytes for tie in held)
            again = int((rows[:, 3] + rows[:, 5]).max())
            self._bytes[key] = SegmentSizes(parameter, state, optimizer, saved, late, forward, backward, again)
        return self._bytes[key]

    def messages(self, segments: tuple[int, ...], ranks: int) -> tuple[SplitMessages, SplitMessages]:
        """Return the collectives of forward and of backward of a stage whose layers are split over ranks.

        Values that ranks hold in shares are gathered where they leave the stage.
        """
        key = segments, ranks
        if key in self._messages:
            return self._messages[key]
        split, own = self.problem.splits[ranks], set(segments)
        leaving = [n for n in segments if any(not own.issuperset(value.consumers) for value in self._made[n])]
        entered = [n for n in segments if not own.issuperset(self._sources[n])]

        def total(parts: Sequence[RankMessages], end_bytes: Sequence[int]) -> SplitMessages:
            ends = [size for size in end_bytes if size]
            sums, gathers = sum(part.sums for part in parts), sum(part.gathers for part in parts) + len(ends)
            return SplitMessages(
                (ranks - 1) * (2 * sums + gathers),
                sums + gathers,
                sum(part.fixed_bytes for part in parts),
                sum(part.sample_bytes for part in parts) + sum(ends) * (ranks - 1) / ranks,
            )

        forward = total([split[n].forward for n in segments], [split[n].forward_end_bytes for n in leaving])
        backward = total([split[n].backward for n in segments], [split[n].backward_end_bytes for n in entered])
        self._messages[key] = forward, backward
        return self._messages[key]

    def collective_s(self, part: LayoutStage, samples: int, late_s: float = 0.0) -> tuple[float, float]:
        """Return the seconds of a stage's collectives among its ranks, in forward and in backward.

        A ring is as quick as its slowest link (see :mod:`onebox.cost.all_reduce`), and each collective is a call.

        Args:
            part: The stage; of several replicas, the slowest counts.
            samples: Samples of a micro-batch.
            late_s: Seconds in which a rank wakes up for a message.
        """
        if part.ranks == 1:
            return 0.0, 0.0
        links, key = self.problem.links, (part.devices, part.ranks)
        if key not in self._rings:
            pairs = [pair for replica in part.replicas for pair in permutations(replica, 2)]
            slowest = max(links.latency_s[a][b] for a, b in pairs), min(links.bandwidth_bps[a][b] for a, b in pairs)
            self._rings[key] = slowest
        latency_s, bps = self._rings[key]
        forward_s, backward_s = (
            found.messages * (latency_s + late_s)
            + (found.fixed_bytes + found.sample_bytes * samples) / bps
            + found.calls * self.problem.call_s
            for found in self.messages(part.segments, part.ranks)
        )
        return forward_s, backward_s

    def may_hold(self, numbers: Collection[int]) -> bool:
        """Return whether some devices together have the memory for the state of all segments and ties, once."""
        problem, caps = self.problem, self.problem.capacity_bytes
        whole = sum(one.state_bytes for one in problem.segments) + sum(tie.state_bytes for tie in problem.ties)
        if "host" in problem.updates:  # which may hold gradients, too
            whole = sum(one.parameter_bytes for one in problem.segments)
            whole += sum(tie.parameter_bytes for tie in problem.ties)
        return any(number not in caps for number in numbers) or sum(caps[number] for number in numbers) >= whole

    def power(self, number: int, samples: int) -> float:
        """Return the throughput of a device in micro-batches of the whole model per second.

        Args:
            number: The device.
            samples: Samples of a micro-batch.
        """
        device = self.problem.device[number]
        whole = self.seconds(tuple(range(len(self.problem.segments))))[device.type]
        return device.speed / max(sum(fixed + each * samples for fixed, each in whole[:3]), 1e-12)

    def shares(self, numbers: Sequence[int], samples: int) -> tuple[float, ...]:
        """Return shares of some devices in proportion to their throughput with micro-batches of some samples."""
        powers = [self.power(number, samples) for number in numbers]
        return tuple(power / sum(powers) for power in powers)

    def ties(self, segments: tuple[int, ...]) -> set[int]:
        """Return the numbers of the ties that include any of some segments."""
        return {number for index in segments for number in self._ties[index]}

    def edges(self, parts: Sequence[LayoutStage], samples: int) -> tuple[tuple[Edge, ...], list[CrossingBytes]]:
        """Return the values between stages, and the crossing bytes of each stage.

        Args:
            parts: The stages. A value that two of them have on the same device is counted once.
            samples: Samples of a micro-batch.
        """
        where = owners(tuple(parts), len(self.problem.segments))
        found: dict[tuple[int, int], list[int]] = {}
        kept, received, given = ([0] * len(parts) for _ in range(3))
        lent: list[dict[int, int]] = [{} for _ in parts]
        for value in self._crossing(where):
            source = where[value.source]
            size, here = value.forward_bytes * samples, False
            for target in sorted({where[consumer] for consumer in value.consumers} - {source}):
                both = found.setdefault((source, target), [0, 0])
                both[0] += size
                both[1] += value.backward_bytes * samples
                if set(parts[target].devices) <= set(parts[source].devices):
                    here = here or value.kept or parts[target].policy == "recompute"
                    last = target
                else:
                    kept[target] += size * value.kept
                    received[target] += size
            given[source] += size * here
            if here:
                lent[source][last] = lent[source].get(last, 0) + size
        edges = (
            Edge(source=a, target=b, forward_bytes=f, backward_bytes=r) for (a, b), (f, r) in sorted(found.items())
        )
        read = (tuple(OffloadedBytes(*pair) for pair in sorted(sizes.items())) for sizes in lent)
        return tuple(edges), [CrossingBytes(*sizes) for sizes in zip(kept, received, given, read, strict=True)]

    def _coded_edges(
        self, parts: Sequence[LayoutStage], edges: tuple[Edge, ...]
    ) -> tuple[tuple[Edge, ...], dict[int, tuple[float, float]]]:
        """Return edges with the bytes that travel in the codecs of their senders, and the seconds of coding.

        For each stage these are seconds of forward and of backward on its slowest device. To encode includes to decode,
        as for gradients, so that a decoding counts as half of one.
        """
        if all(part.sends == "none" for part in parts):
            return edges, {}
        found, seconds = list[Edge](), {stage: [0.0, 0.0] for stage in range(len(parts))}
        for edge in edges:
            source, target = parts[edge.source], parts[edge.target]
            sizes = [edge.forward_bytes, edge.backward_bytes]
            if not set(target.devices) <= set(source.devices):
                ends = ((edge.source, edge.target, source), (edge.target, edge.source, target))
                for way, (sender, receiver, part) in enumerate(ends):
                    if part.sends == "none":
                        continue
                    seconds[sender][way] += sizes[way] / self._slowest_bps(part, part.sends)
                    seconds[receiver][way] += sizes[way] / self._slowest_bps(parts[receiver], part.sends) / 2
                    sizes[way] = min(sizes[way], encoded_bytes(part.sends, sizes[way]))
            found.append(replace(edge, forward_bytes=sizes[0], backward_bytes=sizes[1]))
        return tuple(found), {stage: (forward, backward) for stage, (forward, backward) in seconds.items()}

    def _slowest_bps(self, part: LayoutStage, codec: GradientCodec) -> float:
        """Return the bytes per second that the slowest device of a stage encodes."""
        return min(self.problem.device[number].coding_bps.get(codec, _CODING_BPS) for number in part.devices)

    def _crossing(self, where: Sequence[int]) -> list[SegmentValue]:
        """Return the values that cross between stages, usually few."""
        stage = np.array(where, np.int64)
        crossing = stage[self._ends[0]] != stage[self._ends[1]]
        return [self.problem.values[number] for number in np.unique(self._ends[2][crossing]).tolist()]

    def work(self, layout: StageLayout, parts: Sequence[MicroBatch]) -> tuple[PlanWork, list[float]]:
        """Return the costs of a layout's stages, and the micro-batches' sizes as fractions of the largest.

        Args:
            layout: The stages.
            parts: The micro-batches.
        """
        largest = layout.micro_batch or max(part.size for part in parts)
        exact, crossing = self.edges(layout.parts, largest)
        edges, coding = self._coded_edges(layout.parts, exact)
        crowded = crowding(self.problem, self._busy(layout))
        stages = tuple(
            self._stage(layout, stage, largest, parts, crossing[stage], crowded, coding.get(stage, (0.0, 0.0)))
            for stage in range(len(layout.parts))
        )
        problem = self.problem
        work = PlanWork(
            stages=stages,
            edges=edges,
            links=self._links(layout),
            capacity_bytes=problem.capacity_bytes,
            call_s=problem.call_s,
            host_bps={device.number: device.host_bps for device in problem.devices},
        )
        return work, [part.size / largest for part in parts]

    def _links(self, layout: StageLayout) -> Links:
        """Return the links with the time in which a worker of a busy host wakes up for a message."""
        problem = self.problem
        if not self._busy_hosts:
            return problem.links
        delays_s = self._delays_s(layout)
        key = tuple(sorted(delays_s.items()))
        if key not in self._delayed:
            late_s = {d.number: delays_s.get(d.host, 0.0) for d in problem.devices if d.processor}
            latency_s = {
                source: {target: known_s + late_s.get(target, 0.0) for target, known_s in row.items()}
                for source, row in problem.links.latency_s.items()
            }
            self._delayed[key] = replace(problem.links, latency_s=latency_s)
        return self._delayed[key]

    def _delays_s(self, layout: StageLayout) -> dict[str, float]:
        """Return by host the seconds in which a worker wakes up for a message; nothing where no other program runs."""
        used = {device for part in layout.parts for device in part.devices}
        return wake_up_delays(self.problem, used) if self._busy_hosts else {}

    def _stage(
        self,
        layout: StageLayout,
        stage: int,
        largest: int,
        micro_batches: Sequence[MicroBatch],
        crossing: CrossingBytes,
        crowded: Mapping[int, float],
        coding_s: tuple[float, float],
    ) -> StageWork:
        """Return the costs of a stage, once: neighbouring layouts have most stages in common.

        ``coding_s`` is what its lossy messages take of its devices' time, forward and backward; the collectives of its
        ranks are added to it.
        """
        part, on_host = layout.parts[stage], (layout.update or self.problem.updates[0]) == "host"
        if part.ranks > 1:
            first = self.problem.device[part.devices[0]]  # all ranks are alike
            late_s = self._delays_s(layout).get(first.host, 0.0) if first.processor else 0.0
            exchange_s = self.collective_s(part, largest, late_s)
            coding_s = coding_s[0] + exchange_s[0], coding_s[1] + exchange_s[1]
        tied, again = self._tied_s(layout, stage), self._again(layout, stage)
        one_each = None if layout.micro_batch is not None else tuple(part.size for part in micro_batches)
        key = (
            *(stage, part, layout.micro_batch, layout.update),
            *(largest, one_each, crossing, tuple([crowded[number] for number in part.devices]), tied, again, coding_s),
        )
        if key in self._stages:
            return self._stages[key]
        by_type, sizes = self.seconds(part.segments, part.ranks), self.sizes(part.segments, part.ranks)
        streamed = self.streamed_bytes(part, on_host=on_host)
        sharing = len(part.shares) if self.problem.sharded else 1
        elsewhere = sizes.optimizer - -(-sizes.optimizer // sharing)
        times: list[dict[int, float]] = [{}, {}, {}, {}]
        for turn, number in enumerate(part.devices):
            device = self.problem.device[number]
            speed = device.speed / crowded[number]
            found = by_type[device.type]
            # A replica with one micro-batch of its own size: its fixed costs must not shrink with its size.
            own = largest if layout.micro_batch is not None else _own(part.shares, turn // part.ranks, micro_batches)
            for place, (fixed, each) in enumerate(found[:3]):
                times[place][number] = (fixed + each * own) * (largest / own) / speed + (*coding_s, 0.0)[place]
            times[3][number] = found.update_s / speed / sharing + tied
            if on_host:  # gradients go to the host, parameters come back
                times[3][number] = tied + sizes.parameter * (device.host_update_s + 2 / device.host_bps) / sharing
            if streamed:  # on the host between two backwards
                times[1][number] += 2 * streamed / device.host_bps
            if part.policy == "recompute":  # the whole backward counts as its first half
                fixed, each = self.seconds(again, part.ranks)[device.type][0] if again else (0.0, 0.0)
                times[1][number] += (fixed + each * own) * (largest / own) / speed + times[2][number]
                times[2][number] = 0.0
        held = _held(part.policy, stage, sizes, largest, crossing)
        held["backward_work_bytes"] += 2 * streamed  # this micro-batch's gradients, and the sums that they are added to
        self._stages[key] = StageWork(
            forward_s=times[0],
            input_s=times[1],
            weight_s=times[2],
            update_s=times[3],
            state_bytes=sizes.state
            - (sizes.optimizer if on_host else elsewhere)
            - streamed
            + self._residual_bytes(part),
            gradient_bytes=sizes.parameter,
            travelling_bytes=self._travelling_bytes(part),
            coding_s=self._coding_s(part),
            **held,
        )
        return self._stages[key]

    def _travelling_bytes(self, part: LayoutStage) -> int | None:
        """Return the bytes of a stage's gradients in its codec, of which a ring takes as long; ``None`` without one.

        A member that owns a part of the optimizer's state sends updated parameters, half of the traffic, exactly.
        """
        if part.codec == "none":
            return None
        exact = self.sizes(part.segments, part.ranks).parameter
        encoded = encoded_bytes(part.codec, exact)
        return (exact + encoded) // 2 if self.problem.sharded else encoded

    def _coding_s(self, part: LayoutStage) -> float:
        """Return the seconds in which the slowest device of a stage encodes and decodes its gradients.

        It encodes all, decodes its slices of all devices, encodes their sum, and decodes all sums. To encode includes
        to decode, for the residual, so that a decoding counts as half of one.
        """
        if part.codec == "none":
            return 0.0
        size_bytes, count = self.sizes(part.segments, part.ranks).parameter, len(part.shares)
        return (2 + 1 / count) * size_bytes / self._slowest_bps(part, part.codec)

    def _residual_bytes(self, part: LayoutStage) -> int:
        """Return the bytes that a stage's codec keeps on each device: of all gradients, and of the sums of a slice."""
        exact = self.sizes(part.segments, part.ranks).parameter
        return 0 if part.codec == "none" else exact + -(-exact // len(part.shares))

    def streamed_bytes(self, part: LayoutStage, *, on_host: bool) -> int:
        """Return the bytes of a stage's gradients that the host's optimizer holds, instead of the device."""
        alone = len(part.devices) == 1 and not self.ties(part.segments)
        return self.sizes(part.segments).parameter if part.policy == "swap" and on_host and alone else 0

    def _busy(self, layout: StageLayout) -> dict[int, float]:
        """Return for each device of a layout about the part of a step in which it computes; 1 where cores suffice.

        A device waits while one micro-batch goes through the stages before its first and after its last one and back;
        messages take no time here.
        """
        used = dict.fromkeys((device for part in layout.parts for device in part.devices), 1.0)
        if len(used) == 1 or not self._crowded(used):
            return used
        busy_s, passed_s = dict.fromkeys(used, 0.0), [0.0]
        first, last = dict[int, int](), dict[int, int]()
        for stage, part in enumerate(layout.parts):
            by_type, total, passes = self.seconds(part.segments, part.ranks), sum(part.shares), list[float]()
            shares = [share for share in part.shares for _ in range(part.ranks)]
            for number, share in zip(part.devices, shares, strict=True):
                device = self.problem.device[number]
                forward, inputs, weights, update_s = by_type[device.type]
                first.setdefault(number, stage)
                last[number] = stage + 1
                busy_s[number] += update_s / device.speed
                samples = self.problem.batch * share / total
                if not samples:
                    continue
                size = min(samples, layout.micro_batch or samples)
                parts_s = [(fixed + each * size) / device.speed for fixed, each in (forward, inputs, weights)]
                passes.append(sum(parts_s) + parts_s[0] * (part.policy == "recompute"))
                busy_s[number] += passes[-1] * samples / size
            passed_s.append(passed_s[-1] + (0.0 if layout.late else min(passes)))
        step_s = max(
            spent_s + passed_s[first[number]] + passed_s[-1] - passed_s[last[number]]
            for number, spent_s in busy_s.items()
        )
        return {number: spent_s / step_s if step_s > 0 else 1.0 for number, spent_s in busy_s.items()}

    def _crowded(self, used: Collection[int]) -> bool:
        """Return whether some devices, all running, and other programs want more cores than a host has."""
        problem = self.problem
        wanted: dict[str, float] = {}
        for number in used:
            device = problem.device[number]
            wanted[device.host] = wanted.get(device.host, 0.0) + device.threads
        return any(
            threads + problem.load.get(host, 0.0) + problem.preparing.get(host, 0.0) > problem.cores[host]
            for host, threads in wanted.items()
            if host in problem.cores
        )

    def spared(self, index: int, behind: Collection[int]) -> bool:
        """Return whether every tensor saved for a segment's backward is also saved for the backward of the next stage.

        A recomputed stage that ends with such a segment takes the tensors from there, and does not recompute the
        segment.

        Args:
            index: The segment.
            behind: The segments of the next stage on the same devices.
        """
        read = (value.forward_bytes for value in self._made[index] if value.kept and {*value.consumers} & {*behind})
        return self.problem.segments[index].saved_bytes <= sum(read)

    def _again(self, layout: StageLayout, stage: int) -> tuple[int, ...]:
        """Return the segments that a stage recomputes under ``recompute``."""
        part = layout.parts[stage]
        after = layout.parts[stage + 1] if stage + 1 < len(layout.parts) else None
        if after is None or (after.devices, after.shares, after.ranks) != (part.devices, part.shares, part.ranks):
            return part.segments
        return part.segments[:-1] if self.spared(part.segments[-1], after.segments) else part.segments

    def _tied_s(self, layout: StageLayout, stage: int) -> float:
        """Return the seconds in which a stage sums the gradients of its tied parameters with the other stages."""
        total = 0.0
        for number in self.ties(layout.parts[stage].segments):
            tie = self.problem.ties[number]
            holders = [part.devices[0] for part in layout.parts if not set(tie.segments).isdisjoint(part.segments)]
            places = list(dict.fromkeys(holders))
            total += self.problem.links.ring_seconds([(place,) for place in places], tie.parameter_bytes)
        return total


def _held(
    policy: ActivationPolicy, stage: int, sizes: SegmentSizes, samples: int, crossing: CrossingBytes
) -> dict[str, Any]:
    """Return the memory of a stage for a micro-batch, by the names of :class:`StageWork`."""
    saved, late = sizes.saved * samples, sizes.late * samples
    forward, backward = sizes.forward_work * samples, sizes.backward_work * samples
    offloaded: tuple[OffloadedBytes, ...] = ()
    if policy == "recompute":
        # Only what crosses its end stays. In forward one segment's values are there at a time, in backward all of them.
        made, saved, late = saved, crossing.received + crossing.given, 0
        forward = max(0, sizes.again * samples - crossing.given)
        backward = max(0, made + backward - crossing.given)
    elif policy in ("offload", "swap"):
        own, waited = max(0, saved + crossing.kept - sum(part.size_bytes for part in crossing.lent)), policy == "swap"
        saved, offloaded = (
            0,
            (OffloadedBytes(stage, own, waited), *(part._replace(waited=waited) for part in crossing.lent)),
        )
    else:
        saved += crossing.kept
    return {
        "saved_bytes": saved,
        "offloaded": offloaded,
        "late_bytes": late,
        "forward_work_bytes": forward,
        "backward_work_bytes": backward,
    }


def _own(shares: Sequence[float], turn: int, micro_batches: Sequence[MicroBatch]) -> int:
    """Return the size of a replica's one micro-batch, 0 for a share smaller than a sample."""
    batch = sum(part.size for part in micro_batches)
    return max(1, apportion(batch, shares)[turn])


def stage_work(problem: Problem, plan: Plan) -> PlanWork:
    """Return the costs of a plan's stages.

    Times, bytes and edges are for a micro-batch of the plan's size, or where the plan sets none for the largest share
    of a replica. A parameter that stages share is held by each of them, and each one's update includes the sum of its
    gradients over them.

    Args:
        problem: Segments, values, devices, links.
        plan: The plan.

    Raises:
        UsageError: The plan does not match the problem.
    """
    return CostModel(problem).work(layout_of(problem, plan), plan.micro_batches(problem.batch))[0]
