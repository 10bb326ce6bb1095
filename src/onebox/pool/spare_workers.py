"""Spare workers: those in the place of lost ones whose own devices have none any more."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from onebox.errors import OneboxError, UsageError
from onebox.pool.backends.agents.agent_socket import address_towards
from onebox.pool.backends.agents.agent_source import AgentSource
from onebox.pool.backends.base import LOOPBACK, SpareRequest, SpareSource, WorkerHandle, WorkerSource
from onebox.pool.devices import DeviceInfo
from onebox.portable import require_linux

_LOG = logging.getLogger("onebox")


class SpareWorkers:
    """Starts workers for lost ones elsewhere: on other hosts of the pool, else on this machine.

    Args:
        sources: The pool's sources; one of workers of this machine is appended when it is needed.
    """

    def __init__(self, sources: list[WorkerSource]) -> None:
        self._sources = sources
        self.sources: dict[int, WorkerSource] = {}
        """The sources of the workers that were started elsewhere, by number."""

    def start(self, device: DeviceInfo, used_bytes: int, client_key: str) -> tuple[WorkerHandle, str] | None:
        """Start a worker for a device in another place, of the same kind rather than on a CPU; ``None`` where none has
        room, which is logged.

        Args:
            device: The device of the lost one.
            used_bytes: Bytes that its buffers have taken.
            client_key: The public CURVE key that the worker accepts.
        """
        reasons: list[str] = []
        for kind in dict.fromkeys((device.kind, "cpu")) if device.kind != "sim" else ():
            request = SpareRequest(
                number=device.number,
                kind=kind,
                threads=device.threads,
                memory_bytes=device.memory_bytes,
                used_bytes=used_bytes,
            )
            for source in self._candidates(reasons):
                try:
                    made = source.spare(request, client_key)
                except OneboxError as error:
                    reasons.append(_first_line(error))
                    continue
                self.sources[device.number] = source
                return made
        why = "; ".join(dict.fromkeys(reasons)) or "there is no other host"
        _LOG.warning("device %d (%s on %s) finds no other place: %s", device.number, device.device, device.host, why)
        return None

    def _candidates(self, reasons: list[str]) -> Iterator[SpareSource]:
        """Iterate over the sources to ask: agents, then this machine, whose absence is added to the reasons."""
        yield from (source for source in self._sources if isinstance(source, AgentSource))
        try:
            yield self._local()
        except UsageError as error:
            reasons.append(_first_line(error))

    def _local(self) -> SpareSource:
        """Return the source of workers of this machine.

        Raises:
            UsageError: It cannot run workers.
        """
        require_linux("workers run", "another host of the pool with room for one more would do")
        from onebox.pool.backends.local import LocalSource  # Linux alone has what it starts workers with

        found = next((source for source in self._sources if isinstance(source, LocalSource)), None)
        if found is None:
            agents = [source.address for source in self._sources if isinstance(source, AgentSource)]
            if not agents:
                raise UsageError("the pool has no agents")
            try:
                address = address_towards(agents)
            except UsageError:  # this machine is cut off from them all
                address = LOOPBACK
            found = LocalSource((), address=address)
            self._sources.append(found)
        return found


def _first_line(error: OneboxError) -> str:
    return str(error).partition("\n")[0]
