"""Devices of a Ray cluster: Ray allocates them and starts their agents; instructions and tensors bypass it.

Each device has an actor in one placement group, which runs an agent for it. From there on all is as with the agents of
other hosts: leases, workers, their ends, and the encrypted channels to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from onebox.cluster import connection
from onebox.cluster.actor import AgentActor, NodeReport, ServeRequest, Serving
from onebox.cluster.connection import error_summary
from onebox.cluster.spec import (
    Bundle,
    bundles,
    describe_bundles,
    describe_free,
    describe_nodes,
    host_names,
    parse_ray,
    selectors,
)
from onebox.errors import PoolError
from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.pool.backends.agents.agent_source import AgentSource, acquire_all, client_name
from onebox.pool.backends.base import WorkerHandle
from onebox.pool.backends.compatibility import agree, describe, own_versions
from onebox.pool.spec import AgentPart
from onebox.sizes import Budgets
from onebox.wire import new_keys
from onebox.wire.clean_text import clean
from onebox.worker import SHARING_KEY_BYTES, START_S

RESTARTS = -1
"""Ray restarts a failed actor without limit, on another node where its own is gone. A restarted actor has no agent: it
waits, with its share of the placement group, to be asked for one."""

ROOM_S = 30.0
"""How long the cluster may take to find room on another node for the actor of a node that it knows to be dead."""

_AGAIN_S = 0.25

_LOOK_S = 5.0
"""Interval of the checks whether an actor that does not answer has been scheduled at all."""


class RaySource:
    """Workers on a Ray cluster; a :class:`~onebox.pool.backends.base.WorkerSource`.

    Args:
        spec: Everything from ``ray`` on, such as ``ray://head:10001/cuda*4/spread``; see :func:`parse_ray`.
        threads: Threads of each worker, where the specification says nothing.
        memory_bytes: The most bytes that each worker's buffers may take, likewise.

    Raises:
        UsageError: The specification is not understood.
    """

    def __init__(self, spec: str, *, threads: int | None = None, memory_bytes: int | None = None) -> None:
        self._request = parse_ray(spec, threads=threads, memory_bytes=memory_bytes)
        self._ray: Any = None
        self._group: Any = None
        self._keys = new_keys()
        self._actors: list[Any] = []
        self._agents: list[AgentSource] = []
        self._sharing_key = secrets.token_hex(SHARING_KEY_BYTES)
        self._bundles: list[Bundle] = []
        self._nodes: dict[int, NodeReport] = {}
        self._small: dict[str, int] = {}
        self._first = 0

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Start the workers; see :class:`~onebox.pool.backends.base.WorkerSource`.

        Raises:
            PoolError: The cluster cannot be reached, has no room in time, lacks onebox or runs another version of it.
            UsageError: Ray is not installed here, or the cluster has no such devices.
        """
        self._first = first
        try:
            self._ray = connection.connect(self._request.address)
            self._settle()
            self._agents = self._serve(range(len(self._bundles)))
            acquire_all(self._agents, client_key, wait=False)
            return [one for number, agent in enumerate(self._agents, first) for one in agent.start(number, client_key)]
        except BaseException:
            self.close()
            raise

    def replace(self, number: int, client_key: str) -> tuple[WorkerHandle, str] | None:
        """Start a worker in the place of one that has ended: by its agent or, where that is gone, by the one that its
        actor runs on the node to which Ray has moved it.

        Raises:
            PoolError: There is no room for its actor within ``ROOM_S``, or the actor is not restarted in time because
                its node is out of reach.
        """
        index = number - self._first
        if self._ray is None or not 0 <= index < len(self._agents):
            return None
        replaced = self._agents[index].replace(number, client_key)
        if replaced is not None:
            return replaced
        self._agents[index].close()  # it is gone, and its actor perhaps on another node
        [self._agents[index]] = self._serve([index])
        acquire_all(self._agents[index : index + 1], client_key, wait=False)
        [one] = self._agents[index].start(number, client_key)
        return one

    def connected(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the actors, free the reservation and disconnect from the cluster. Idempotent."""
        for agent in self._agents:
            agent.close()
        ray, self._ray = self._ray, None
        if ray is None:
            return
        self._give_back(ray)
        connection.disconnect()

    # ---- placement

    def _settle(self) -> None:
        """Reserve room, with an actor for each worker; GPUs that turn out to be too small are exchanged for others."""
        while True:
            self._reserve()
            self._actors = [self._new_actor(number) for number in range(len(self._bundles))]
            if not self._request.memory_bytes or all(bundle.kind == "cpu" for bundle in self._bundles):
                return
            self._find(range(len(self._bundles)), time.monotonic() + START_S)
            small = {node.node: node.gpu_bytes for number, node in self._nodes.items() if self._too_small(number)}
            if not small:
                return
            self._small |= small  # at least one node more each time, so that this ends
            self._give_back(self._ray)

    def _too_small(self, number: int) -> bool:
        gpu = self._bundles[number].kind == "cuda"
        return gpu and 0 < self._nodes[number].gpu_bytes < self._request.memory_bytes

    def _give_back(self, ray: Any) -> None:
        """End the actors, and free the reservation."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(actor, no_restart=True)
        self._actors, self._nodes = [], {}
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
            self._group = None

    def _reserve(self) -> None:
        """Create the placement group, and wait until the cluster has room for it."""
        found = [
            dataclasses.replace(node, gpu_bytes=self._small.get(node.id, node.gpu_bytes))
            for node in connection.nodes(self._ray)
        ]
        self._bundles = bundles(self._request, found)
        where = selectors(self._bundles, self._request, found)
        self._group = self._ray.util.placement_group(
            [dict(bundle.resources) for bundle in self._bundles],
            strategy=self._request.strategy,
            **({} if where is None else {"bundle_label_selector": where}),
        )
        if not self._group.wait(self._request.wait_s):
            free = describe_free(self._ray.available_resources())
            raise PoolError(
                f"the Ray cluster had no room for pool {self._request.spec!r} within {self._request.wait_s:g} s\n"
                f"  asked for: {describe_bundles(self._bundles)}, by {self._request.strategy}\n"
                f"  it has: {describe_nodes(found)}\n  nobody has taken: {free}\n"
                "  ask for less, wait longer (wait=SECONDS), or look with 'ray status' who has it"
            )

    def _new_actor(self, number: int) -> Any:
        bundle = self._bundles[number]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number
        )
        kind = self._ray.remote(AgentActor)
        memory = bundle.resources.get("memory", 0)
        return kind.options(
            num_cpus=bundle.resources["CPU"],
            num_gpus=bundle.resources.get("GPU", 0),
            memory=memory or None,
            scheduling_strategy=strategy,
            max_restarts=RESTARTS,
        ).remote()

    # ---- agents

    def _serve(self, which: Sequence[int]) -> list[AgentSource]:
        """Start the agents of some actors, which have no connection yet."""
        end_s = time.monotonic() + START_S
        self._find(which, end_s)
        names = host_names([(node.host, node.address) for node in self._nodes.values()])
        hosts = dict(zip(self._nodes, names, strict=True))
        orders = {number: self._order(number) for number in which}
        said = self._gather(which, lambda number: self._actors[number].serve.remote(orders[number]), end_s)
        return [
            self._source(number, hosts[number], clean(msgspec.json.decode(said[number], type=Serving)))
            for number in which
        ]

    def _source(self, number: int, host: str, serving: Serving) -> AgentSource:
        address, bundle = self._nodes[number].address, self._bundles[number]
        address = f"[{address}]" if ":" in address else address
        part = AgentPart(
            address=f"{address}:{serving.port}",
            devices=(_device(bundle),),
            threads=bundle.threads,
            memory=Budgets(every=self._request.memory_bytes),
        )
        connect = partial(AgentConnection, key=serving.key, mine=self._keys, client=client_name(), host=host)
        return AgentSource(part, connect=connect)

    def _order(self, number: int) -> str:
        bundle = self._bundles[number]
        order = ServeRequest(self._keys.public, _device(bundle), bundle.threads, self._sharing_key)
        return msgspec.json.encode(order).decode()

    def _find(self, which: Sequence[int], end_s: float) -> None:
        """Query the actors' nodes."""
        for number, text in self._gather(which, lambda number: self._actors[number].find.remote(), end_s).items():
            self._nodes[number] = clean(msgspec.json.decode(text, type=NodeReport))
            self._check(number)

    def _gather(self, which: Sequence[int], ask: Callable[[int], Any], end_s: float) -> dict[int, str]:
        """Call all actors at once, and return their answers."""
        asked = {number: ask(number) for number in which}
        return {number: self._answer(number, asked[number], ask, end_s) for number in which}

    def _answer(self, number: int, asked: Any, ask: Callable[[int], Any], end_s: float) -> str:
        """Return an actor's answer; call again while Ray restarts it.

        Raises:
            PoolError: It did not, or could not, answer in time.
        """
        named = f"the actor of worker {self._first + number}"
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            try:
                answer: str = self._ray.get(asked, timeout=min(left_s, _LOOK_S))
                return answer
            except (self._ray.exceptions.ActorUnavailableError, self._ray.exceptions.GetTimeoutError) as error:
                lost = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            except (self._ray.exceptions.RayError, ConnectionError) as error:
                raise PoolError(
                    f"{named} did not start: {error_summary(error)}\n"
                    f"  every node needs onebox {own_versions().onebox} in the "
                    "Python that Ray runs there: pip install 'onebox[cluster]'"
                ) from None
            if not left_s:
                raise PoolError(
                    f"{named} did not answer in time: 'ray status' says whether the cluster has room for it, "
                    "'ray logs' what its node is busy with"
                )
            self._require_room(named, min(left_s, ROOM_S))
            if lost:
                time.sleep(_AGAIN_S)
                asked = ask(number)

    def _require_room(self, named: str, limit_s: float) -> None:
        """Wait until the cluster has room for each actor; no wait while none of their nodes is known to be dead.

        Raises:
            PoolError: There is no room in time, or the cluster is out of reach.
        """
        try:
            if self._group.wait(limit_s):
                return
            has = describe_nodes(connection.nodes(self._ray))
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise PoolError(
                f"the Ray cluster does not say whether it has room for {named}: {error_summary(error)}"
            ) from None
        raise PoolError(f"the Ray cluster found no room for {named} within {limit_s:.0f} s; it has: {has}")

    def _check(self, number: int) -> None:
        """Reject a node with other versions, or one whose PyTorch cannot use the GPU that Ray assigned."""
        node = self._nodes[number]
        if self._bundles[number].kind == "cuda" and node.versions.torch.endswith("+cpu"):
            raise PoolError(
                f"worker {self._first + number} would have a GPU of {node.host} ({node.address}), where Ray runs a "
                f"PyTorch without CUDA, {node.versions.torch}: install one with it there"
            )
        if not agree(node.versions, own_versions()):
            raise PoolError(
                f"worker {self._first + number} would run on {node.host} ({node.address}), which has "
                f"{describe(node.versions)}; this client has {describe(own_versions())}: install the same on both sides"
            )


def _device(bundle: Bundle) -> str:
    """Return the name of a bundle's device for the actor's process, to which Ray shows one GPU."""
    return "cuda:0" if bundle.kind == "cuda" else "cpu"
