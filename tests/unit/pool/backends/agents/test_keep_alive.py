"""Signs of life between a client and an agent, with made-up clocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import PoolError
from onebox.pool.backends.agents.keep_alive import BACK_S, CUT_S, KeepAlive
from onebox.wire.protocol.agents import RENEW_S


def test_signs_of_life_at_regular_times() -> None:
    contact = KeepAlive(10.0)
    assert not contact.renew(10.0 + RENEW_S / 2)
    assert contact.patience_s(10.0 + RENEW_S / 2) == RENEW_S / 2
    assert contact.renew(10.0 + RENEW_S)
    assert not contact.renew(10.0 + RENEW_S)
    assert contact.patience_s(10.0 + 2 * RENEW_S) == 0.0


def test_the_heartbeats_to_all_agents_are_due_at_once() -> None:
    assert KeepAlive(10.2).patience_s(10.5) == KeepAlive(10.4).patience_s(10.5)


SILENT_S = CUT_S + BACK_S


def awake(contact: KeepAlive, begin_s: float, end_s: float) -> float | None:
    """Let time pass without a word; return for how long the agent was silent when it was first taken for gone."""
    now_s = begin_s
    while now_s <= end_s:
        contact.wake(now_s)
        if (silent_s := contact.lost(now_s)) is not None:
            contact.lose(PoolError(f"silent for {silent_s} s"))
            return silent_s
        now_s += 0.1
    return None


def test_an_agent_that_is_silent_is_gone_once() -> None:
    contact = KeepAlive(0.0)
    assert awake(contact, 0.0, SILENT_S - 0.15) is None
    assert not contact.gone
    silent_s = awake(contact, SILENT_S, SILENT_S + 1)
    assert silent_s is not None and SILENT_S <= silent_s < SILENT_S + 0.2
    assert contact.gone
    assert awake(contact, SILENT_S + 0.2, 60.0) is None, "it is said once"
    contact.heard(60.0)
    assert not contact.gone
    assert awake(contact, 60.0, 70.0) is not None, "until it has been heard again"


def test_the_loss_of_an_agent_is_a_state_with_its_first_error() -> None:
    contact, first = KeepAlive(0.0), PoolError("you are not let in")
    assert contact.error is None
    contact.lose(first)
    contact.lose(PoolError("it has been silent"))
    assert contact.gone and contact.error is first
    assert contact.lost(99.0) is None
    contact.heard(100.0)
    assert not contact.gone and contact.error is None


def test_the_thread_wakes_when_the_agent_begins_to_count_as_lost() -> None:
    contact = KeepAlive(0.0)
    assert contact.renew(SILENT_S - 0.1)
    assert abs(contact.patience_s(SILENT_S - 0.1) - 0.1) < 1e-9
    contact.lose(PoolError("it has been silent"))
    assert 0.1 < contact.patience_s(SILENT_S - 0.1) <= RENEW_S


def test_the_bound_is_the_shortest_grace_but_no_less_than_the_usual_one() -> None:
    contact = KeepAlive(0.0)
    contact.hold(1, 60.0)
    contact.hold(2, 20.0)
    assert contact.bound_s == 20.0 + BACK_S
    contact.let_go(2)
    assert contact.bound_s == 60.0 + BACK_S
    contact.hold(3, 1.0)
    assert contact.bound_s == SILENT_S < 4.5
    assert contact.leases == (1, 3)


def test_while_this_side_is_stopped_nobody_is_silent() -> None:
    contact = KeepAlive(0.0)
    contact.wake(0.5)
    contact.wake(30.0)
    assert contact.lost(30.0) is None
    assert awake(contact, 30.0, 30.0 + SILENT_S) is not None


def test_a_lease_that_the_agent_does_not_know() -> None:
    contact = KeepAlive(0.0)
    contact.hold(1, CUT_S)
    contact.hold(2, CUT_S)
    assert contact.unknown((2, 5)) == [1]
    contact.let_go(1)
    contact.let_go(1)
    assert contact.unknown((2, 5)) == []


@given(st.lists(st.tuples(st.floats(0.01, 8.0), st.booleans()), max_size=40))
def test_nobody_is_taken_for_gone_that_was_heard_lately(steps: list[tuple[float, bool]]) -> None:
    contact, now_s, heard_s = KeepAlive(0.0), 0.0, 0.0
    for pause_s, heard in steps:
        now_s += pause_s
        contact.wake(now_s)
        if heard:
            contact.heard(now_s)
            heard_s = now_s
        if contact.lost(now_s) is not None:
            contact.lose(PoolError("it has been silent"))
            assert now_s - heard_s >= SILENT_S
