"""Messages between workers over TCP: between hosts, and where a host's workers share no memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import MembershipStore, RankLost, RowRange
from onebox.worker.comm.carrier import FEW_RANKS, Posted
from onebox.worker.comm.tcp.connection import TcpConnection
from onebox.worker.comm.tcp.link import AT_ONCE_BYTES, PeerLink, TcpReceive
from onebox.worker.comm.tcp.mesh import GroupNetwork, Mesh, RelayTo
from onebox.worker.comm.tcp.messages import MessageHeader
from onebox.worker.comm.tcp.stream import ConnectionWriter
from onebox.worker.progress import WorkerProgress

CLOSE_S = 5.0
"""Longest wait of a leaving worker for its sends to be received, without any byte of them."""

PIECE_BYTES = 4 << 20
"""Most bytes that are copied before they begin to be sent."""

_MOVES_S = 0.002


class TcpCarrier:
    """Carries messages to some ranks of a group over TCP; all ranks of the group make one.

    Args:
        form: The group, with this worker's rank.
        store: Key-value store for the rendezvous.
        accelerator: Device of the tensors.
        progress: Marked during waits.
        address: IP address of this host to listen at.
        encrypted: Whether connections are encrypted.
        advertised: The IP address that leads the others there; ``address`` by default.
        network: Where others find this worker, and the meters of its connections.
        relay: Asks the client to relay to peers that cannot be connected to; ``None`` to do without.
        near: Ranks that are reached otherwise.

    Raises:
        RankLost: A rank did not come, or cannot be reached.
        WireError: What a rank says of itself is not understood.
    """

    shares_sums = True

    def __init__(
        self,
        form: FormGroup,
        store: MembershipStore,
        accelerator: Accelerator,
        progress: WorkerProgress,
        address: str,
        *,
        encrypted: bool,
        advertised: str = "",
        network: GroupNetwork | None = None,
        relay: RelayTo | None = None,
        near: Sequence[int] = (),
    ) -> None:
        self._form = form
        self._accelerator = accelerator
        self._progress = progress
        self._network = network or GroupNetwork()
        self._left = self._given_up = False
        self.peers = tuple(rank for rank in range(form.size) if rank != form.rank and rank not in near)
        self._links = {
            rank: PeerLink(rank, functools.partial(self._connect, rank), form.timeout_s) for rank in self.peers
        }
        self._mesh = Mesh(
            form.rank,
            form.size,
            address,
            store,
            encrypted=encrypted,
            came=self._came,
            advertised=advertised,
            network=self._network,
            relay=relay,
        )
        if form.size > FEW_RANKS:
            return
        try:
            self._connect_all(store)
        except BaseException:
            self._end()
            raise

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Begin to send a tensor to a rank with its present contents: eager operators may overwrite it before it is
        sent.
        """
        dense = self._accelerator.to_host(tensor).contiguous()
        whole, start = spec_of(dense), 0
        if within is not None:
            whole, start = _part(whole, within)
        shared, link = dense.data_ptr() == tensor.data_ptr(), self._links[peer]
        if dense.nbytes <= AT_ONCE_BYTES:
            link.post(MessageHeader(channel, 0, start, dense.nbytes, whole), _bytes_of(dense), dense, changing=shared)
            return time.monotonic_ns()
        for piece in dense.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            own = piece.clone() if shared else piece
            link.post(MessageHeader(channel, 0, start, own.nbytes, whole), _bytes_of(own), own)
            start += own.nbytes
        return time.monotonic_ns()

    def post(
        self,
        tensors: Sequence[Tensor],
        spec: TensorSpec,
        peers: Sequence[int],
        channel: int,
        code: int,
        *,
        kept: bool = False,
    ) -> Posted:
        """Begin to send tensors, concatenated, to some ranks."""
        flat = tensors[0].reshape(-1) if kept else torch.cat([tensor.reshape(-1) for tensor in tensors])
        header, data = MessageHeader(channel, code, 0, flat.nbytes, spec), _bytes_of(flat)
        for peer in peers:
            self._links[peer].post(header, data, flat)
        return Posted(flat, time.monotonic_ns())

    def expect(self, peer: int, channel: int) -> TcpReceive:
        """Ask for the next message of a channel that has not been asked for."""
        return self._links[peer].expect(channel, self._mesh.attend, self._accelerator)

    def attend(self, *, waiting: bool = False) -> bool:
        """Ask the client what connections that are being made need; return whether there are any.

        Raises:
            RankLost: One could not be made; or this rank waits, and the group is dissolved.
        """
        if self._left or self._mesh.ended:
            return False
        for link in self._links.values():
            if link.unreachable:
                raise RankLost(link.unreachable)
        self._mesh.attend(missing=waiting and not all(link.connected[1] for link in self._links.values()))
        return any(link.connecting for link in self._links.values())

    def interrupt(self) -> None:
        """End all waits; callable from any thread."""
        self._given_up = True
        self._mesh.end("the group is given up")
        for rank, link in self._links.items():
            link.shut(f"rank {rank} is waited for no longer: the group is given up")

    def close(self) -> None:
        """Leave the group when what was sent has been received, or nothing moves any more; waiting peers then fail at
        once. Idempotent."""
        if self._left:
            return
        self._left = True
        links = self._links.values()
        for link in links:
            link.leave()
        try:
            with self._progress.wait():
                moved, since_s = -1, time.monotonic()
                while not self._given_up and not all(link.sent for link in links):
                    self._mesh.attend()
                    now = sum(link.moved_bytes for link in links)
                    if now != moved:
                        moved, since_s = now, time.monotonic()
                    elif time.monotonic() > since_s + CLOSE_S:
                        break
                    time.sleep(_MOVES_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._mesh.close()
        for link in self._links.values():
            link.close()

    # ---- connections

    def _came(self, rank: int, connections: tuple[TcpConnection, ...]) -> None:
        link = self._links.get(rank)
        if link is not None:
            link.came(connections)
            return
        for each in connections:  # of one that is reached otherwise
            each.close()

    def _connect(self, rank: int) -> ConnectionWriter:
        connections = self._mesh.connect(rank)
        return ConnectionWriter(connections, self._network.meters.add(connections, self._form.group, rank))

    def _connect_all(self, store: MembershipStore) -> None:
        """Connect to all peers, and wait for all; all ranks of the group learn of the first failure.

        Raises:
            RankLost: A rank cannot connect to another one.
        """
        said = ""
        for link in self._links.values():
            link.begin()
        while not said and not all(link.connected[0] for link in self._links.values()):
            time.sleep(_MOVES_S)
            self._mesh.attend(missing=True)
            said = next((link.unreachable for link in self._links.values() if link.unreachable), "")
        rank, size = self._form.rank, self._form.size
        store.set(f"said/{rank}", said)
        told = [text.decode() for text in store.multi_get([f"said/{each}" for each in range(size) if each != rank])]
        if first := next(filter(None, (said, *told)), ""):
            raise RankLost(first)
        while not all(link.connected[1] for link in self._links.values()):  # their last words are on the way
            time.sleep(_MOVES_S)
            self._mesh.attend(missing=True)
        self._mesh.stop_listening()


def _part(spec: TensorSpec, within: RowRange) -> tuple[TensorSpec, int]:
    """Return the spec of the whole of a part, and the part's first byte there.

    Raises:
        WireError: It is no part of it.
    """
    whole, first = within
    rows = spec.shape[0] if spec.shape else 0
    fits = rows > 0 and spec == TensorSpec(whole.dtype, (rows, *whole.shape[1:]))
    if not fits or not 0 <= first <= whole.shape[0] - rows:
        raise WireError(f"{spec} is sent as the part of {whole} from row {first} on")
    return whole, first * (spec.size_bytes // rows)


def _bytes_of(dense: Tensor) -> memoryview:
    if not dense.nbytes:
        return memoryview(b"")
    return dense.reshape(-1).view(torch.uint8).numpy().data
