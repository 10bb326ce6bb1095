"""Costs of a plan's stages: the input of scheduling and simulation. Pure data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.cost import AllReduceAlgorithm, all_reduce_algorithms, choose_all_reduce


class OffloadedBytes(NamedTuple):
    """Activations of a stage that are in the host's memory until a backward reads them.

    They are copied out during the action after the last forward that reads them, and back during the action before the
    first backward that reads them; or the device waits for both copies.

    Args:
        reader: The stage whose forward reads them last, and whose backward first; often the stage itself.
        size_bytes: Their bytes.
        waited: Whether the device waits.
    """

    reader: int
    size_bytes: int
    waited: bool = False


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Costs of a stage, for one micro-batch of the plan's size.

    Args:
        forward_s: Seconds of forward on each device that may hold the stage.
        input_s: Seconds of the gradient of its inputs.
        weight_s: Seconds of the gradients of its parameters; a whole backward takes both.
        update_s: Seconds of its optimizer step, once a step.
        state_bytes: Parameters, buffers, optimizer state and gradients, held always.
        gradient_bytes: Gradients that its replicas sum, once a step.
        travelling_bytes: Bytes that travel in place of these in a lossy codec; ``None`` without one.
        coding_s: Seconds in which its slowest replica encodes and decodes them.
        saved_bytes: Held from the start of forward to the end of the input gradient (or of the whole backward).
        offloaded: Held likewise, but in the host's memory in between.
        late_bytes: Held from the start of the input gradient to the end of the weight gradient.
        forward_work_bytes: Needed beyond those while forward runs.
        backward_work_bytes: Needed beyond those while a gradient runs.
    """

    forward_s: Mapping[int, float]
    input_s: Mapping[int, float]
    weight_s: Mapping[int, float]
    update_s: Mapping[int, float]
    state_bytes: int = 0
    gradient_bytes: int = 0
    travelling_bytes: int | None = None
    coding_s: float = 0.0
    saved_bytes: int = 0
    offloaded: tuple[OffloadedBytes, ...] = ()
    late_bytes: int = 0
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0

    @property
    def offloaded_bytes(self) -> int:
        """Total offloaded bytes."""
        return sum(part.size_bytes for part in self.offloaded)


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Values that go from one stage to another, for one micro-batch.

    Args:
        source: The stage whose forward makes them.
        target: The stage whose forward (or only backward) uses them; later than ``source``.
        forward_bytes: Bytes from source to target.
        backward_bytes: Bytes of gradients from target to source.
    """

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links between devices.

    Args:
        latency_s: ``latency_s[source][target]``, seconds of an empty message.
        bandwidth_bps: ``bandwidth_bps[source][target]``, bytes per second of a message that has the link to itself.
        uplinks: By device, the uplink that it shares with other devices, such as that of its host. A message between
            two uplinks occupies the one's way out and the other's way in, which carry one message at a time: several
            flows share them. A pair of devices, one of which has no uplink here, has a link of its own.
    """

    latency_s: Mapping[int, Mapping[int, float]]
    bandwidth_bps: Mapping[int, Mapping[int, float]]
    uplinks: Mapping[int, str] = field(default_factory=dict)
    _ways: dict[tuple[int, ...], tuple[AllReduceAlgorithm, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seconds(self, source: int, target: int, size_bytes: int) -> float:
        """Return the seconds of a message; 0 within a device."""
        if source == target:
            return 0.0
        return self.latency_s[source][target] + size_bytes / self.bandwidth_bps[source][target]

    def among(self, devices: Collection[int]) -> Links:
        """Return the links between some of the devices."""

        def entries(table: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
            return {a: {b: value for b, value in table[a].items() if b in devices} for a in devices}

        return Links(latency_s=entries(self.latency_s), bandwidth_bps=entries(self.bandwidth_bps), uplinks=self.uplinks)

    def crossed(self, source: int, target: int) -> tuple[str, str] | None:
        """Return the uplinks that a message leaves and enters; ``None`` if it shares its link with no other pair."""
        leaves, enters = self.uplinks.get(source), self.uplinks.get(target)
        return None if leaves is None or enters is None or leaves == enters else (leaves, enters)

    def shared_by(self, devices: Collection[int]) -> frozenset[str]:
        """Return the uplinks that an exchange among some devices occupies."""
        found = {self.uplinks[device] for device in devices if device in self.uplinks}
        return frozenset(found) if len(found) > 1 else frozenset()

    def all_reduce_algorithm(self, devices: Sequence[int], size_bytes: int) -> AllReduceAlgorithm:
        """Return the best way for some devices to sum their values: in one ring, or in each host first.

        Args:
            devices: The devices.
            size_bytes: Bytes that each holds.
        """
        key = tuple(devices)
        if key not in self._ways:
            self._ways[key] = all_reduce_algorithms(self.latency_s, self.bandwidth_bps, key)
        return choose_all_reduce(self._ways[key], size_bytes)

    def sum_seconds(self, replicas: Sequence[Sequence[int]], stage: StageWork) -> float:
        """Return the seconds in which replicas of a stage sum their gradients, in a lossy codec if it has one.

        Where hosts sum first, gradients are encoded between hosts only.

        Args:
            replicas: The devices of each replica.
            stage: The stage.
        """
        exact_s = self.ring_seconds(replicas, stage.gradient_bytes)
        if stage.travelling_bytes is None or len(replicas) < 2:
            return exact_s
        across = replicas
        if all(len(replica) == 1 for replica in replicas):
            parts = self.all_reduce_algorithm([device for (device,) in replicas], stage.gradient_bytes).parts
            across = [(part[0],) for part in parts] if len(parts) > 1 else replicas
        within_s = exact_s - self.ring_seconds(across, stage.gradient_bytes) if across is not replicas else 0.0
        return max(within_s, 0.0) + stage.coding_s + self.ring_seconds(across, stage.travelling_bytes)

    def sum_traffic(
        self, devices: Sequence[int], size_bytes: int, travelling_bytes: int | None = None
    ) -> dict[tuple[int, int], float]:
        """Return the bytes from device to device in which some devices sum their values.

        Args:
            devices: The devices.
            size_bytes: Bytes that each holds.
            travelling_bytes: Bytes that travel in place of these in a lossy codec; where hosts sum first, only between
                hosts.
        """
        if len(devices) < 2:
            return {}
        parts = self.all_reduce_algorithm(devices, size_bytes).parts
        ring = [part[0] for part in parts] if len(parts) > 1 else list(parts[0])
        size = size_bytes if travelling_bytes is None else travelling_bytes
        each = 2 * (len(ring) - 1) / len(ring) * size
        found = dict.fromkeys(zip(ring, [*ring[1:], ring[0]], strict=True), each)
        for part in parts if len(parts) > 1 else ():
            for a, b in itertools.pairwise(part):
                found |= {(a, b): float(size_bytes), (b, a): float(size_bytes)}
        return found

    def ring_seconds(self, replicas: Sequence[Sequence[int]], size_bytes: int) -> float:
        """Return the seconds in which replicas sum their gradients: in one ring, or in each host first.

        Where replicas are several devices each, that is a ring of which the slowest link between two replicas sets the
        pace (see :mod:`onebox.cost.all_reduce`).

        Args:
            replicas: The devices of each replica.
            size_bytes: Bytes that each holds.
        """
        if all(len(replica) == 1 for replica in replicas):
            return self.all_reduce_algorithm([device for (device,) in replicas], size_bytes).time.at(size_bytes)
        count = len(replicas)
        pairs = [(a, b) for one in replicas for other in replicas if one is not other for a in one for b in other]
        if not pairs:
            return 0.0
        latency_s = max(self.latency_s[a][b] for a, b in pairs)
        slowest_bps = min(self.bandwidth_bps[a][b] for a, b in pairs)
        return 2 * (count - 1) * (size_bytes / count / slowest_bps + latency_s)


@dataclass(frozen=True, kw_only=True)
class PlanWork:
    """Costs of a plan's stages and links.

    Args:
        stages: Each stage, in an order in which forward edges ascend.
        edges: Values between them.
        links: Links between the devices.
        capacity_bytes: Memory of each device that has a limit.
        call_s: Seconds that each action costs a device beside its work.
        host_bps: Bytes per second from a device to its host's memory, and back; copies of missing devices take no time.
    """

    stages: tuple[StageWork, ...]
    edges: tuple[Edge, ...]
    links: Links
    capacity_bytes: Mapping[int, int]
    call_s: float = 0.0
    host_bps: Mapping[int, float] = field(default_factory=dict)
