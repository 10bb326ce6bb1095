"""Hosts that do not reach each other are named before a library waits for them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from onebox.worker.comm import reachability
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.reachability import require_reachable
from tests.unit.ranks import Keys, in_threads


def checked(addresses: list[str], store: Keys) -> list[str]:
    """Return what each rank says, rank by rank; nothing where it has found no fault."""

    def run(rank: int) -> str:
        try:
            require_reachable(rank, range(len(addresses)), addresses[rank], store, "t")
        except RankLost as error:
            return str(error)
        return ""

    return in_threads(len(addresses), run)


def test_hosts_that_reach_each_other() -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.3", ""]
    assert checked(addresses, Keys()) == [""] * 5
    assert checked(["127.0.0.1"], Keys()) == [""]


def test_the_pair_that_does_not_is_named_by_all_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "REACH_S", 0.5)
    with socket.socket() as closed:
        closed.bind(("127.0.0.9", 0))  # nobody listens there
        port = closed.getsockname()[1]
        store = Keys({"t/at/2": f"127.0.0.9 {port}", "t/said/2": ""})

        def run(rank: int) -> str:
            with pytest.raises(RankLost) as raised:
                require_reachable(rank, range(3), f"127.0.0.{rank + 1}", store, "t")
            return str(raised.value)

        said = in_threads(2, run)
    for rank, words in enumerate(said):
        assert f"rank {rank} of the group, at 127.0.0.{rank + 1}, cannot connect to rank 2, at 127.0.0.9" in words
        assert "Connection refused" in words and "--advertise" in words and "by way of the client" in words


def test_a_rank_that_reaches_all_learns_of_the_others_failure() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.9", 0))
        listener.listen()
        store = Keys(
            {"t/at/1": f"127.0.0.9 {listener.getsockname()[1]}", "t/said/1": "rank 1 cannot connect to rank 0"}
        )
        with pytest.raises(RankLost, match="rank 1 cannot connect to rank 0"):
            require_reachable(0, range(2), "127.0.0.1", store, "t")


def test_the_end_of_the_group_ends_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves it must not wait for them: those with NCCL have a few seconds to give up."""
    monkeypatch.setattr(reachability, "REACH_S", 3600.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.9", 0))
        store = Keys({"t/at/1": f"127.0.0.9 {closed.getsockname()[1]}"})
        store.dissolved = True
        with pytest.raises(RankLost, match="has left the group"):
            require_reachable(0, range(2), "127.0.0.1", store, "t")


@pytest.mark.parametrize("address", ["fe80::7%lo", "192.0.2.7", "nowhere.invalid"])
def test_an_address_that_cannot_be_listened_at_is_named_by_all(address: str) -> None:
    said = checked([address, "127.0.0.1"], Keys())
    assert said[0] == said[1] and said[0].startswith(f"rank 0 of the group cannot listen at {address}: ")


@pytest.mark.parametrize("told", ["", "127.0.0.9", "127.0.0.9 port", "127.0.0.9 65536", "127.0.0.9 -1"])
def test_a_rank_that_tells_no_address_is_named(told: str) -> None:
    store = Keys({"t/at/1": told, "t/said/1": ""})
    with pytest.raises(RankLost, match=r"cannot connect to rank 1.*that is no address and port"):
        require_reachable(0, range(2), "127.0.0.1", store, "t")


def test_hosts_that_do_not_answer_delay_no_other() -> None:
    """However many: all are tried at the same time, so that the bound of one is that of all."""
    silent = range(1, 41)
    with socket.socket() as closed, socket.socket() as listener:
        closed.bind(("127.0.0.9", 0))  # nobody listens there
        listener.bind(("127.0.0.10", 0))
        listener.listen()
        listener.settimeout(reachability.REACH_S / 2)
        store = Keys()
        for rank in silent:
            store.set(f"t/at/{rank}", f"127.0.0.9 {closed.getsockname()[1]}")
        store.set("t/at/41", f"127.0.0.10 {listener.getsockname()[1]}")
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(require_reachable, 0, range(42), "127.0.0.1", store, "t")
            try:
                listener.accept()[0].close()
            finally:
                store.dissolved = True
            with pytest.raises(RankLost, match="has left the group"):
                asked.result(60)
