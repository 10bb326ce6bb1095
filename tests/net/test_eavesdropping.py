"""Somebody on the wire sees nothing of the tensors that workers of two hosts send each other, and finds no listener."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

import onebox
from onebox.pool import Pool, raise_first
from onebox.wire import spec_of, to_frame
from onebox.wire.protocol.instructions import Ask, Receive, Reduce, Send
from onebox.wire.protocol.requests import Put
from onebox.wire.protocol.responses import Digest
from tests.net.fleet import GRACE_S, Fleet
from tests.net.hosts import Host, Network

_EVERY_PROTOCOL = 0x0003  # ETH_P_ALL of linux/if_ether.h
_PATTERN = 1.2345678e-7
_COUNT = 300_000


class Eavesdropper:
    """Whoever reads all that passes a host's network card.

    Args:
        wanted: Bytes that are looked for.
    """

    def __init__(self, wanted: bytes) -> None:
        self.seen_bytes = 0
        self.found = 0
        self._wanted = wanted

    def listen(self, card: socket.socket, ended: threading.Event) -> None:
        """Read until the end."""
        while not ended.is_set():
            if select.select([card], [], [], 0.05)[0]:
                frame = card.recv(1 << 17)
                self.seen_bytes += len(frame)
                self.found += self._wanted in frame


@contextlib.contextmanager
def overheard(host: Host, wanted: bytes) -> Iterator[Eavesdropper]:
    """Listen to a host's network card."""
    with host.inside():
        card = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    card.bind(("eth0", 0))
    card.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    heard, ended = Eavesdropper(wanted), threading.Event()
    thread = threading.Thread(target=heard.listen, args=(card, ended))
    with card:
        thread.start()
        try:
            yield heard
        finally:
            ended.set()
            thread.join()


def exchange(pool: Pool, tensor: torch.Tensor) -> list[bytes]:
    """Let worker 0 send a tensor to worker 1, and both sum it; return hashes of what came."""
    group = pool.form_group((0, 1), "workers")
    spec, frame = spec_of(tensor), bytes(to_frame(tensor))
    asked = Reduce((1,), group), Ask("digest", (1,))
    answers = raise_first(
        [
            pool.post(0, [Put((1,), (spec,)), Send(1, group, 1, 0), *asked], [frame], answer=True),
            pool.post(1, [Receive(1, spec, group, 0, 0), *asked], answer=True),
        ]
    )
    return [result.value for answer in answers for result in answer.results if isinstance(result, Digest)]


@pytest.mark.feature("Security: Encrypt tensors between hosts")
@pytest.mark.parametrize("plain", [False, True], ids=["encrypted", "plain_links"])
def test_tensors_between_hosts_cannot_be_read_on_the_way_unless_asked_for(
    fleet: Fleet, network: Network, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.full((_COUNT,), _PATTERN)
    with fleet.client():
        pool = onebox.open(fleet.spec("red", "green"), threads=1, grace_s=GRACE_S, plain_links=plain)
    with pool, overheard(network["green"], bytes(to_frame(tensor[:4]))) as heard:
        before = network["green"].traffic_bytes()
        one, other = exchange(pool, tensor)
        assert one == other
        assert network["green"].traffic_bytes() - before > tensor.nbytes
        for name, process in zip(("red", "green"), pool.process_ids, strict=True):
            assert network[name].listening(process) == [network[name].address] * 2
    assert heard.seen_bytes > tensor.nbytes
    assert (heard.found > 0) == plain
    assert ("neither encrypted nor authenticated" in caplog.text) == plain
