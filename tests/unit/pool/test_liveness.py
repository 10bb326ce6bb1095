"""Who is alive: signs of life and times in, verdicts out."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from onebox.pool.liveness import SILENCE_S, STALL_S, Liveness
from onebox.worker.process.heartbeat import IDLE_HEARTBEAT_S
from onebox.worker.system.process_watch import DISK_WAIT_S


def test_a_worker_that_is_silent_for_too_long_is_hung() -> None:
    liveness = Liveness()
    liveness.beat(0, 10.0)
    liveness.beat(1, 10.0)
    now_s = 10.0
    while now_s < 10.0 + SILENCE_S:
        assert liveness.hung(now_s) == {}
        now_s += 0.25
        liveness.beat(1, now_s)
    verdicts = liveness.hung(now_s + 0.25)
    assert verdicts.keys() == {0}
    assert "no sign of life" in verdicts[0]


def test_a_worker_that_may_be_cut_off_for_longer_is_waited_for() -> None:
    liveness = Liveness({1: 20.0})
    liveness.beat(0, 0.0)
    liveness.beat(1, 0.0)
    hung_s: dict[int, float] = {}
    for tick in range(1, 60):
        for worker in liveness.hung(0.5 * tick):
            hung_s.setdefault(worker, 0.5 * tick)
    assert hung_s == {0: SILENCE_S + 0.5, 1: 20.5}


def test_the_silence_of_a_worker_is_that_since_its_last_heartbeat() -> None:
    liveness = Liveness()
    liveness.beat(0, 1.0)
    liveness.beat(0, 10.0)
    assert (liveness.silence_s(0, 12.5), liveness.silence_s(1, 12.5)) == (2.5, 0.0)
    liveness.forget(0)
    assert liveness.silence_s(0, 13.0) == 0.0


def silent_for(liveness: Liveness, seconds: float, *, reads: Callable[[float], tuple[int, bool]]) -> float | None:
    """Let a worker be silent, and look what its process does; return when it counts as hung."""
    liveness.beat(0, 0.0)
    for tick in range(1, int(4 * seconds)):
        now_s = tick / 4
        for worker in liveness.silent(now_s):
            found, waits = reads(now_s)
            liveness.look(worker, now_s, disk_reads=found, waits=waits)
        if liveness.hung(now_s):
            return now_s
    return None


def test_a_silent_worker_that_reads_its_pages_from_a_disk_is_slow_but_not_without_end() -> None:
    hung_s = silent_for(Liveness(), 100, reads=lambda _: (7, False))
    assert hung_s is not None and hung_s <= SILENCE_S + 0.5
    for reads in (lambda now_s: (int(now_s), False), lambda _: (7, True)):
        hung_s = silent_for(Liveness(), 100, reads=reads)
        assert hung_s is not None and DISK_WAIT_S <= hung_s <= DISK_WAIT_S + 0.5
    hung_s = silent_for(Liveness(), 100, reads=lambda now_s: (int(min(now_s, 20.0)), False))
    assert hung_s is not None and 20 < hung_s < 24, "it reads no more"


def test_a_worker_that_reads_and_is_heard_again_is_watched_as_before() -> None:
    liveness = Liveness()
    assert silent_for(liveness, 20, reads=lambda now_s: (int(now_s), False)) is None
    liveness.beat(0, 20.0)
    hung_s = silent_for(liveness, 30, reads=lambda _: (20, False))
    assert hung_s is not None and hung_s <= SILENCE_S + 0.5


def cut_off(liveness: Liveness, worker: int, from_s: float, to_s: float, until_s: float, **more: float) -> float | None:
    """Let a host be cut off for a while, and its worker hang in the end; return when that is noticed."""
    for tick in range(int(4 * until_s)):
        now_s = tick / 4
        reachable = not from_s <= now_s < to_s
        if reachable and now_s < more.get("hangs_s", until_s):
            liveness.beat(worker, now_s)
        if reachable and tick % 2:
            liveness.overhear(worker, now_s)
        if worker in liveness.hung(now_s):
            return now_s
    return None


def test_a_worker_that_is_silent_while_its_host_is_heard_is_hung_whatever_a_cut_may_last() -> None:
    noticed_s = cut_off(Liveness({1: 30.0}), 1, 99, 99, 60, hangs_s=10.0)
    assert noticed_s is not None and SILENCE_S <= noticed_s - 10.0 < 5.0


@given(length_s=st.floats(0.0, 10.0), begin_s=st.floats(1.0, 3.0), agent=st.booleans())
def test_a_cut_is_ridden_out_to_the_end_of_the_grace(length_s: float, begin_s: float, agent: bool) -> None:
    liveness = Liveness({1: 10.5})
    if not agent:
        liveness.overhear = lambda *_: None  # type: ignore[method-assign]
    assert cut_off(liveness, 1, begin_s, begin_s + length_s, 20) is None


def test_a_cut_that_lasts_is_noticed_at_the_end_of_the_grace_and_a_hang_after_one_in_time() -> None:
    noticed_s = cut_off(Liveness({1: 10.5}), 1, 2.0, 99, 60)
    assert noticed_s is not None and 10.5 < noticed_s - 2.0 + 0.25 < 11.5
    noticed_s = cut_off(Liveness({1: 30.0}), 1, 2.0, 8.0, 60, hangs_s=9.0)
    assert noticed_s is not None and noticed_s - 9.0 < 5.0


def test_a_worker_whose_agent_comes_back_before_it_is_given_time() -> None:
    liveness = Liveness({1: 20.0})
    liveness.beat(1, 0.0)
    liveness.overhear(1, 0.0)
    for tick in range(1, 13):
        liveness.overhear(1, 8.0 + 0.25 * tick)
        assert liveness.hung(8.0 + 0.25 * tick) == {}


def test_a_worker_that_stands_still_is_hung_though_it_beats() -> None:
    liveness = Liveness()
    liveness.beat(0, 1.0, stalled_s=STALL_S, doing="call")
    assert liveness.hung(1.0) == {}
    liveness.beat(0, 1.5, stalled_s=STALL_S + 0.5, doing="call")
    assert liveness.hung(1.5)[0] == "has made no progress with its call instruction for 3.5 s"
    liveness.beat(0, 2.0, stalled_s=0.0)
    assert liveness.hung(2.0) == {}


def test_a_worker_that_is_forgotten_is_not_watched() -> None:
    liveness = Liveness()
    liveness.beat(0, 0.0)
    liveness.forget(0)
    liveness.forget(0)
    assert liveness.hung(100.0) == {}


def test_a_client_that_slept_does_not_blame_its_workers() -> None:
    """Ctrl-Z, a laptop's lid, or a long capture: nobody could be heard meanwhile."""
    liveness = Liveness()
    for worker in range(3):
        liveness.beat(worker, 0.0)
    assert liveness.hung(0.25) == {}
    assert liveness.hung(100.0) == {}
    for tick in range(1, 100):
        now_s = 100.0 + 0.25 * tick
        liveness.beat(0, now_s)
        if liveness.hung(now_s):
            break
    assert now_s - 100.0 > SILENCE_S
    assert liveness.hung(now_s).keys() == {1, 2}, "who is silent afterwards is hung all the same"


def test_several_beats_may_be_lost() -> None:
    assert SILENCE_S / IDLE_HEARTBEAT_S > 4


class Ticking(RuleBasedStateMachine):
    """The client looks every quarter of a second; a verdict is right, and comes in time."""

    @initialize()
    def open(self) -> None:
        self.liveness = Liveness()
        self.now_s = 0.0
        self.last_s: dict[int, float] = {}
        self.hung: dict[int, str] = {}

    @rule(worker=st.integers(0, 2))
    def beat(self, worker: int) -> None:
        self.liveness.beat(worker, self.now_s)
        self.last_s[worker] = self.now_s

    @rule(worker=st.integers(0, 2))
    def forget(self, worker: int) -> None:
        self.liveness.forget(worker)
        self.last_s.pop(worker, None)

    @rule(ticks=st.integers(1, 20))
    def pass_time(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += 0.25
            expected = {worker for worker, last_s in self.last_s.items() if self.now_s - last_s > SILENCE_S}
            assert self.liveness.hung(self.now_s).keys() == expected


TestTicking = Ticking.TestCase


@given(st.lists(st.floats(0.01, 100), max_size=20))
def test_a_worker_that_always_beats_is_never_hung(pauses: list[float]) -> None:
    liveness = Liveness()
    now_s = 0.0
    liveness.beat(0, now_s)
    for pause in pauses:
        now_s += pause
        liveness.beat(0, now_s)
        assert liveness.hung(now_s) == {}
