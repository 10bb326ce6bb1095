"""Who gets which devices, and when: events and times in, decisions out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onebox.agent.admission import ClientLimits, Offered, Share, reach
from onebox.agent.leases import (
    DROPPED,
    QUEUE,
    SILENT_S,
    TOLD,
    Client,
    Decision,
    Dequeue,
    End,
    Grant,
    Leases,
    Refuse,
    Wait,
)
from onebox.errors import UsageError
from onebox.wire.protocol.agents import Offer, Want

ANA = Client("a" * 40, b"1", "ana")
ANA_AGAIN = Client("a" * 40, b"2", "ana")
BEN = Client("b" * 40, b"1", "ben")
CLEO = Client("c" * 40, b"1", "cleo")

LACKING = "whole devices (cuda:0)"

CPU = Offered(device="cpu", name="a CPU", memory_bytes=40, threads=4)
GPUS = tuple(Offered(device=f"cuda:{k}", name="a GPU", memory_bytes=8, threads=2) for k in range(2))


def ask(leases: Leases, client: Client, number: int, *wants: Want, now_s: float = 0.0, **more: Any) -> list[Decision]:
    return leases.ask(client, number, wants, **{"grace_s": 3.0, "wait": True, "now_s": now_s, **more})


def stock(leases: Leases) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    return leases.stock(0.0, lambda device: -1.0)


def test_of_two_who_race_for_one_device_the_first_gets_it_and_the_other_next() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    whole = Share(device="cuda:0", threads=2, memory_bytes=8)
    assert ask(leases, ANA, 7, Want("cuda")) == [Grant(ANA, 7, 1, (whole,))]
    assert ask(leases, BEN, 1, Want("cuda:0", 0, 1)) == [
        Wait(BEN, 1, 1, "ana", "memory (0 bytes of 8 bytes free, 1 bytes asked for)")
    ]
    assert stock(leases)[1] == ("ben",)
    assert [end.cause for end in leases.release(ANA, 1) if isinstance(end, End)] == ["released"]
    assert leases.tick(0.1) == []  # its workers have not ended yet
    (grant,) = leases.freed(1, 0.2)
    assert grant == Grant(BEN, 1, 2, (Share(device="cuda:0", threads=2, memory_bytes=1),))


def test_a_small_request_does_not_overtake_a_large_one_that_could_use_the_same() -> None:
    leases = Leases((*GPUS, CPU), ClientLimits())
    ask(leases, ANA, 1, Want("cuda:0"))
    whole = "whole devices (cuda:0, cuda:1)"
    assert ask(leases, BEN, 1, Want("cuda"), Want("cuda")) == [Wait(BEN, 1, 1, "ana", whole)]
    assert ask(leases, CLEO, 1, Want("cuda:1", 0, 1)) == [Wait(CLEO, 1, 2, "ben", "")]
    assert isinstance(ask(leases, CLEO, 2, Want("cpu"))[0], Grant)  # which nobody before it could use
    assert ask(leases, CLEO, 3, Want("cuda"), wait=False) == [
        Refuse(CLEO, 3, "busy", "what is asked for is leased: ana, ben, cleo; wait, or ask for less")
    ]
    leases.release(ANA, 1)
    made = leases.freed(1, 1.0)
    assert isinstance(made[0], Grant) and made[0].client == BEN
    assert made[1:] == [Wait(CLEO, 1, 1, "ben", "memory (0 bytes of 8 bytes free, 1 bytes asked for)")]


def test_who_leaves_the_queue_lets_the_others_move_up() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    for number, client in enumerate((ANA, BEN, CLEO)):
        ask(leases, client, number, Want("cuda"))
    assert leases.leave(BEN, 99, 0.0) is None
    assert leases.leave(BEN, 1, 0.0) == [Wait(CLEO, 2, 1, "ana", LACKING)]
    assert leases.leave(BEN, 1, 0.0) is None


def test_a_silent_client_loses_its_leases_and_its_place() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    ask(leases, ANA, 1, Want("cuda"))
    ask(leases, BEN, 1, Want("cuda"), grace_s=2.0)
    ask(leases, CLEO, 1, Want("cuda"))
    assert leases.heard(ANA, 2.0) == (1,)
    leases.heard(CLEO, 2.0)
    assert leases.tick(2.1) == [Dequeue(BEN, 1, DROPPED), Wait(CLEO, 1, 1, "ana", LACKING)]
    leases.heard(CLEO, 4.0)
    assert leases.tick(5.0) == []
    (end,) = leases.tick(5.1)
    assert end == End(ANA, 1, "silent", "this client was silent for 3.1 s; its grace was 3 s")
    assert leases.heard(ANA, 5.2) == ()
    assert leases.tick(5.3) == []
    assert isinstance(leases.freed(1, 5.4)[0], Grant)


def test_a_connection_does_not_keep_the_leases_of_another_alive() -> None:
    leases = Leases(GPUS, ClientLimits())
    ask(leases, ANA, 1, Want("cuda"))
    ask(leases, ANA_AGAIN, 1, Want("cuda"))
    assert leases.heard(ANA_AGAIN, 3.0) == (2,)
    assert [end.lease for end in leases.tick(3.5) if isinstance(end, End)] == [1]
    assert leases.release(BEN, 2) == []
    assert len(leases.release(ANA, 2)) == 1  # it is the same person


def test_a_dead_session_does_not_hold_up_another_one_of_the_same_client() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    ask(leases, ANA, 1, Want("cuda"), grace_s=30.0)
    ask(leases, BEN, 1, Want("cuda"), grace_s=30.0)
    leases.heard(BEN, SILENT_S + 1)
    assert leases.tick(SILENT_S + 1) == [], "others wait for its grace"
    ask(leases, ANA_AGAIN, 1, Want("cuda"), grace_s=30.0, now_s=SILENT_S + 1)
    (end,) = leases.tick(SILENT_S + 1)
    assert isinstance(end, End) and (end.lease, end.cause) == (1, "silent")
    assert "waits for these devices in another session" in end.why
    (grant, *_) = leases.freed(1, SILENT_S + 2)
    assert isinstance(grant, Grant) and grant.client == BEN, "who came first is first"


def test_a_session_that_is_heard_keeps_its_lease_whoever_waits() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    ask(leases, ANA, 1, Want("cuda"), grace_s=30.0)
    ask(leases, ANA_AGAIN, 1, Want("cuda"), grace_s=30.0)
    leases.heard(ANA, 20.0)
    leases.heard(ANA_AGAIN, 20.0)
    assert leases.tick(20.0 + SILENT_S) == []


def test_who_waits_is_told_what_is_lacking() -> None:
    leases = Leases([CPU], ClientLimits())
    ask(leases, ANA, 1, Want("cpu", 3, 10))
    (cores,) = ask(leases, BEN, 1, Want("cpu", 2, 10))
    assert cores == Wait(BEN, 1, 1, "ana", "cores (1 of 4 free, 2 asked for)")
    (memory,) = ask(leases, CLEO, 1, Want("cpu", 1, 40))
    assert memory == Wait(CLEO, 1, 2, "ana, ben", "memory (30 bytes of 40 bytes free, 40 bytes asked for)")
    (both,) = ask(leases, CLEO, 2, Want("cpu", 4, 40))
    assert isinstance(both, Wait) and "cores (1 of 4 free, 4 asked for) and memory (30" in both.lacking
    (fits,) = ask(leases, CLEO, 3, Want("cpu", 1, 5))
    assert fits == Wait(CLEO, 3, 4, "ana, ben, cleo", ""), "it waits for its turn only"


def test_the_stock_has_cores_and_the_silence_of_holders() -> None:
    leases = Leases([CPU], ClientLimits())
    ask(leases, ANA, 1, Want("cpu", 3, 10))
    leases.heard(ANA, 1.0)
    ((offer,), _) = leases.stock(13.0, lambda device: -1.0)
    (holder,) = offer.holders
    assert (offer.threads, offer.free_threads, holder.threads, holder.silent_s) == (4, 1, 3, 12.0)


def test_time_in_which_the_host_was_held_up_is_nobodys_silence() -> None:
    leases = Leases(GPUS, ClientLimits())
    ask(leases, ANA, 1, Want("cuda"))
    leases.forgive(10.0)
    assert leases.tick(12.9) == []
    assert len(leases.tick(13.1)) == 1


def test_a_lease_ends_when_its_time_is_over() -> None:
    leases = Leases(GPUS, ClientLimits(lease_s=60))
    ask(leases, ANA, 1, Want("cuda"))
    leases.heard(ANA, 60.0)
    assert leases.tick(60.0) == []
    leases.heard(ANA, 61.0)
    assert leases.tick(61.0) == [End(ANA, 1, "time", "its time is over: leases end after 60 s")]


def test_a_worker_that_ended_frees_its_share_and_the_lease_goes_on() -> None:
    leases = Leases(GPUS, ClientLimits())
    ask(leases, ANA, 1, Want("cuda"), Want("cuda"))
    ask(leases, BEN, 1, Want("cuda:1"))
    (grant,) = leases.worker_ended(1, 1, 1.0)
    assert isinstance(grant, Grant) and grant.client == BEN
    assert leases.heard(ANA, 1.0) == (1,)
    assert leases.worker_ended(9, 0, 1.0) == []


def test_a_lease_whose_workers_did_not_start_ends() -> None:
    leases = Leases(GPUS, ClientLimits())
    ask(leases, ANA, 1, Want("cuda"))
    assert leases.failed(1, "no GPU") == [End(ANA, 1, "failed", "no GPU")]
    assert leases.failed(1, "no GPU") == []


def test_a_request_that_comes_twice_is_one() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    assert len(ask(leases, ANA, 1, Want("cuda"))) == 1
    assert ask(leases, ANA, 1, Want("cuda")) == []
    assert ask(leases, BEN, 1, Want("cuda")) == ask(leases, BEN, 1, Want("cuda")) == [Wait(BEN, 1, 1, "ana", LACKING)]
    assert len(stock(leases)[1]) == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ClientLimits(devices=2), "3 devices; allowed are 2 for one client"),
        (ClientLimits(memory_bytes=19), "20 bytes of memory; allowed are 19 bytes for one client"),
        (ClientLimits(threads=5), "6 cores; allowed are 5"),
        (ClientLimits(requests=2), "2 leases and requests; no more"),
    ],
)
def test_the_limits_of_a_client_count_what_it_has_and_waits_for(limits: ClientLimits, reason: str) -> None:
    leases = Leases((*GPUS, CPU), limits)
    ask(leases, BEN, 1, Want("cuda:0"))
    assert isinstance(ask(leases, ANA, 1, Want("cuda:1"))[0], Grant)
    assert isinstance(ask(leases, ANA_AGAIN, 1, Want("cuda:0"))[0], Wait)
    (refused,) = ask(leases, ANA, 2, Want("cpu", 2, 4))
    assert isinstance(refused, Refuse) and refused.kind == "usage" and reason in refused.reason
    assert isinstance(ask(leases, CLEO, 2, Want("cpu", 2, 4))[0], Grant)


def test_memory_that_a_request_leaves_open_is_what_its_client_may_have() -> None:
    leases = Leases((*GPUS, CPU), ClientLimits(memory_bytes=6))
    (first,) = ask(leases, ANA, 1, Want("cpu", 1), Want("cpu", 1, 2))
    assert isinstance(first, Grant) and [share.memory_bytes for share in first.shares] == [4, 2]
    (refused,) = ask(leases, ANA, 2, Want("cpu", 1))
    assert isinstance(refused, Refuse) and "allowed are 6 bytes for one client" in refused.reason
    leases.release(ANA, first.lease)
    leases.freed(first.lease, 0.0)
    (gpu,) = ask(leases, ANA, 3, Want("cuda"))
    assert isinstance(gpu, Grant) and gpu.shares[0].memory_bytes == 6


@pytest.mark.parametrize("grace_s", [1.9, float("nan"), 601.0, -1.0, float("inf")])
def test_a_grace_that_is_too_short_or_too_long_is_refused(grace_s: float) -> None:
    (refused,) = ask(Leases(GPUS, ClientLimits()), ANA, 1, Want("cuda"), grace_s=grace_s)
    assert isinstance(refused, Refuse) and "allowed are 2 to 600 s" in refused.reason


def test_the_queue_is_bounded() -> None:
    leases = Leases(GPUS[:1], ClientLimits())
    for number in range(QUEUE + 1):
        ask(leases, Client(f"{number:040}", b"1", "x"), 1, Want("cuda"))
    (refused,) = ask(leases, ANA, 1, Want("cuda"))
    assert isinstance(refused, Refuse) and "256 requests wait already" in refused.reason


def test_a_device_is_offered_once() -> None:
    with pytest.raises(UsageError, match="offered twice"):
        Leases((CPU, CPU), ClientLimits())


def test_what_is_there_is_seen() -> None:
    leases = Leases((CPU,), ClientLimits())
    ask(leases, ANA, 1, Want("cpu", 1, 10), now_s=1.0)
    ask(leases, BEN, 1, Want("cpu", 4, 10), now_s=2.0)
    (offer,), queue = leases.stock(3.0, lambda device: 0.5)
    assert (offer.free_bytes, offer.load, queue) == (30, 0.5, ("ben",))
    (holder,) = offer.holders
    assert (holder.client, holder.lease, holder.memory_bytes, holder.since_s) == ("ana", 1, 10, 2.0)


# ---- whatever happens

_LIMITS = ClientLimits(devices=4, requests=4, lease_s=50)
_CLIENTS = (ANA, ANA_AGAIN, BEN, CLEO)
_WANTS = st.lists(
    st.builds(
        Want, st.sampled_from(["cuda", "cuda:0", "cuda:1", "cpu"]), st.integers(0, 2), st.sampled_from([0, 1, 5])
    ),
    min_size=1,
    max_size=2,
)


class Anything(RuleBasedStateMachine):
    """A host with two GPUs and a CPU, and clients that do whatever they like; only decisions are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.offers = {offer.device: offer for offer in (*GPUS, CPU)}
        self.leases = Leases((*GPUS, CPU), _LIMITS)
        self.now_s = 0.0
        self.number = 0
        self.waiting: list[tuple[Client, int]] = []
        self.wants: dict[tuple[Client, int], list[Want]] = {}
        self.places: dict[tuple[Client, int], int] = {}
        self.granted: dict[int, tuple[Client, dict[int, Share]]] = {}
        self.ending: set[int] = set()

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Grant():
                    self.grant(decision)
                case Wait():
                    self.places[decision.client, decision.number] = decision.place
                case End():
                    assert decision.lease in self.granted and decision.lease not in self.ending
                    self.ending.add(decision.lease)
                case Dequeue():
                    self.waiting.remove((decision.client, decision.number))
                case Refuse():
                    assert decision.reason
                    self.waiting.remove((decision.client, decision.number))

    def grant(self, grant: Grant) -> None:
        request = grant.client, grant.number
        wants = self.wants[request]
        mine = reach(wants, self.offers)
        for earlier in self.waiting[: self.waiting.index(request)]:
            assert mine.isdisjoint(reach(self.wants[earlier], self.offers)), "it has overtaken another one"
        self.waiting.remove(request)
        assert grant.lease not in self.granted
        for want, share in zip(wants, grant.shares, strict=True):
            assert share.device in reach([want], self.offers)
            offered = self.offers[share.device]
            assert want.threads in (share.threads, 0)
            whole = offered.memory_bytes if want.device != "cpu" else share.memory_bytes
            assert share.memory_bytes == (want.memory_bytes or whole) > 0
        self.granted[grant.lease] = grant.client, dict(enumerate(grant.shares))

    @rule(client=st.sampled_from(_CLIENTS), wants=_WANTS, wait=st.sampled_from([True, True, True, False]))
    def ask(self, client: Client, wants: list[Want], wait: bool) -> None:
        self.number += 1
        self.wants[client, self.number] = wants
        self.waiting.append((client, self.number))
        made = self.leases.ask(client, self.number, wants, grace_s=20.0, wait=wait, now_s=self.now_s)
        assert wait or (client, self.number) not in self.places
        self.take(made)

    @rule(seconds=st.sampled_from([0.5, 2.0, 15.0]), heard=st.sets(st.sampled_from(_CLIENTS)))
    def pass_time(self, seconds: float, heard: set[Client]) -> None:
        self.now_s += seconds
        for client in heard:
            held = [lease for lease, (owner, _) in self.granted.items() if owner == client]
            assert self.leases.heard(client, self.now_s) == tuple(lease for lease in held if lease not in self.ending)
        self.take(self.leases.tick(self.now_s))

    @rule(data=st.data())
    @precondition(lambda self: self.granted)
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.granted)))
        self.take(self.leases.release(data.draw(st.sampled_from(_CLIENTS)), lease))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def leave(self, data: st.DataObject) -> None:
        client, number = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove((client, number))
        made = self.leases.leave(client, number, self.now_s)
        assert made is not None
        self.take(made)

    @rule(data=st.data())
    @precondition(lambda self: set(self.granted) - self.ending)
    def lose_worker(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(set(self.granted) - self.ending)))
        worker = data.draw(st.integers(0, 2))
        self.granted[lease][1].pop(worker, None)
        self.take(self.leases.worker_ended(lease, worker, self.now_s))

    @rule()
    @precondition(lambda self: self.ending)
    def free(self) -> None:
        lease = min(self.ending)
        self.ending.remove(lease)
        del self.granted[lease]
        self.take(self.leases.freed(lease, self.now_s))

    @invariant()
    def no_more_is_leased_than_offered(self) -> None:
        memory, threads = Counter[str](), Counter[str]()
        devices = Counter[str]()
        for lease, (client, shares) in self.granted.items():
            for share in shares.values():
                memory[share.device] += share.memory_bytes
                threads[share.device] += share.threads
                devices[client.key] += lease not in self.ending
        assert all(memory[name] <= offer.memory_bytes for name, offer in self.offers.items())
        assert threads["cpu"] <= CPU.threads
        assert all(count <= _LIMITS.devices for count in devices.values())

    @invariant()
    def what_is_seen_is_what_is(self) -> None:
        offers, queue = stock(self.leases)
        assert queue == tuple(client.name for client, _ in self.waiting)
        for place, request in enumerate(self.waiting, 1):
            assert self.places[request] == place
        for offer in offers:
            held = [s for _, shares in self.granted.values() for s in shares.values() if s.device == offer.device]
            assert offer.free_bytes == offer.memory_bytes - sum(share.memory_bytes for share in held)
            assert len(offer.holders) == len(held)

    def teardown(self) -> None:
        """Everybody who waits gets what it waits for, when those before it give back what they have."""
        for _ in range(len(self.waiting) + len(self.granted) + 1):
            for lease, (client, _) in list(self.granted.items()):
                self.take(self.leases.release(client, lease))
            while self.ending:
                self.free()
        assert not self.waiting and not self.granted


Anything.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
TestAnything = Anything.TestCase


def test_new_places_are_told_a_few_at_a_time_and_who_asks_is_told_at_once() -> None:
    """A long queue of large requests that moves up would hold up the agent for seconds."""
    leases = Leases([CPU], ClientLimits(requests=0))
    ask(leases, ANA, 1, Want("cpu", 4, 1))
    for number in range(1, 41):
        (told,) = ask(leases, BEN, number, Want("cpu", 1, 1))
        assert isinstance(told, Wait) and told.place == number
    made = leases.leave(BEN, 1, 0.0)
    assert made is not None and [wait.place for wait in made if isinstance(wait, Wait)] == list(range(1, TOLD + 1))
    made = ask(leases, CLEO, 1, Want("cpu", 1, 1))
    assert made[0] == Wait(CLEO, 1, 40, "ana, ben", "cores (0 of 4 free, 1 asked for)") and len(made) == TOLD
    made += [wait for _ in range(5) for wait in leases.tick(0.0)]
    assert [wait.place for wait in made[1:] if isinstance(wait, Wait)] == list(range(TOLD + 1, 40))
    assert leases.tick(0.0) == []
