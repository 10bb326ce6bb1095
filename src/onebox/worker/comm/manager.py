"""Group manager: the groups that a worker belongs to, and the failures by which it left others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onebox.wire.protocol.groups import EmulatedLink, FormGroup
from onebox.wire.protocol.instructions import Broadcast, Gather, Receive, Reduce, Send
from onebox.wire.protocol.requests import Routine
from onebox.wire.protocol.responses import Joined, Left, WorkerFailure
from onebox.worker.comm.formation import ClientChannel, EmulatedLinks, RankLost, WorkerGroup, form_group
from onebox.worker.comm.shm.group import ShmGroup
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.programs.interpreter import WorkerProgress
from onebox.worker.system.cpu_affinity import threads_on_all_cores
from onebox.worker.system.tcp_connections import GroupSockets

_HOST = torch.device("cpu")


class GroupManager:
    """Groups by number.

    Args:
        channel: The channel to the client.
        device: Device of the tensors.
        progress: Marked during waits.
    """

    def __init__(self, channel: ClientChannel, device: torch.device, progress: WorkerProgress) -> None:
        self._channel = channel
        self._device = device
        self._progress = progress
        self._groups: dict[int, WorkerGroup] = {}
        self._lost: dict[int, WorkerFailure] = {}
        self._wires = EmulatedLinks()
        self._sockets = GroupSockets()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the worker's groups."""
        return tuple(self._groups)

    def form(self, form: FormGroup) -> Joined:
        """Join a group; return the ranks that share memory there.

        Raises:
            PeerLost: The others did not join in time.
        """
        device, progress = (_HOST, WorkerProgress()) if form.aside else (self._device, self._progress)
        with self._sockets.making(form.group), threads_on_all_cores():
            group = form_group(form, self._channel, device, progress, self._wires)
            self._groups[form.group] = group
        return group.joined

    def get(self, number: int) -> WorkerGroup:
        """Return a group.

        Raises:
            Poisoned: This worker has left it because of a failure.
            PeerLost: This worker is not in it.
        """
        if number in self._lost:
            raise Poisoned(self._lost[number])
        group = self._groups.get(number)
        if group is None:
            raise RankLost(f"this worker is not, or no longer, in group {number}")
        return group

    def leave(self, number: int) -> None:
        """Leave a group, and have the client notify the ranks that wait there."""
        self._lost.pop(number, None)
        self._channel.say(Left(number))
        group = self._groups.pop(number, None)
        if group is not None:
            group.close()
        self._sockets.forget(number)

    def interrupt(self, number: int) -> None:
        """End waits for a silent rank of a group; callable from any thread."""
        self._sockets.shut(number)
        group = self._groups.get(number)
        if group is not None:
            group.interrupt()

    def retime(self, links: Sequence[EmulatedLink]) -> None:
        """Change the speeds of this worker's emulated links; see :meth:`EmulatedLinks.retime`.

        Raises:
            WireError: One of them is invalid.
        """
        self._wires.retime(links)
        for group in self._groups.values():
            if isinstance(group, ShmGroup):
                group.retimed()

    def abandon(self, number: int, failure: WorkerFailure) -> None:
        """Leave a group in which this worker cannot do its part, unless it has left before."""
        if number not in self._lost:
            self.leave(number)
            self._lost[number] = failure

    def close(self) -> None:
        """Leave all groups without notification."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def groups_of(routine: Routine) -> tuple[int, ...]:
    """Return the groups that a routine uses."""
    return tuple(
        {step.group for step in routine.steps if isinstance(step, Send | Receive | Reduce | Gather | Broadcast)}
    )
