"""The connections that an agent knows of."""

from __future__ import annotations

from onebox.agent.leases import Client
from onebox.agent.sessions import IDLE_S, LOG_BYTES, SESSIONS, SESSIONS_OF_ONE, Sessions, newest
from onebox.wire.protocol.agents import MESSAGE_BYTES, Done, LogLines, Renewed, encode_agent


def client(key: int, session: int = 0) -> Client:
    return Client(f"{key:040}", str(session).encode(), f"client {key}")


def nobody(client: Client) -> bool:
    return False


def everybody(client: Client) -> bool:
    return True


def test_a_connection_is_found_again() -> None:
    sessions = Sessions()
    found = sessions.find(client(1), 0.0, nobody)
    assert found is not None and sessions.find(client(1), 1.0, nobody) is found is sessions.get(client(1))
    assert sessions.get(client(1, 1)) is None


def test_of_one_key_there_are_not_too_many_and_idle_ones_make_room() -> None:
    sessions = Sessions()
    for number in range(SESSIONS_OF_ONE):
        assert sessions.find(client(1, number), float(number), nobody)
    assert sessions.find(client(1, 999), 100.0, everybody) is None
    assert sessions.find(client(2), 100.0, everybody) is not None
    assert sessions.find(client(1, 999), 100.0, nobody) is not None
    assert sessions.get(client(1, 0)) is None and sessions.get(client(1, 1)) is not None


def test_a_client_that_connects_anew_ten_times_a_second_is_heard_each_time() -> None:
    sessions = Sessions()
    assert all(sessions.find(client(1, number), number / 10, nobody) for number in range(10 * SESSIONS_OF_ONE))


def test_who_gets_no_session_learns_why() -> None:
    sessions = Sessions()
    for number in range(SESSIONS_OF_ONE):
        sessions.find(client(1, number), 0.0, nobody)
    assert sessions.find(client(1, 99), 0.0, everybody) is None
    why = sessions.explain_refusal(client(1, 99))
    assert "64 sessions of this client and 64 in all" in why and "allowed are 64 of a client and 1024 in all" in why


def test_of_all_keys_there_are_not_too_many() -> None:
    sessions = Sessions()
    for number in range(SESSIONS):
        assert sessions.find(client(number), 0.0, nobody)
    assert sessions.find(client(SESSIONS), 1.0, everybody) is None
    assert sessions.find(client(SESSIONS), 1.0, nobody) is not None
    assert len(sessions) == SESSIONS


def test_who_says_nothing_and_has_nothing_is_forgotten() -> None:
    sessions = Sessions()
    sessions.find(client(1), 0.0, nobody)
    sessions.forget(IDLE_S + 1, everybody)
    assert len(sessions) == 1
    sessions.forget(IDLE_S, nobody)
    assert len(sessions) == 1
    sessions.forget(IDLE_S + 1, nobody)
    assert len(sessions) == 0


def test_after_a_cut_a_client_is_told_again_what_it_may_have_missed() -> None:
    session = Sessions().find(client(1), 0.0, nobody)
    assert session is not None
    session.sent(Done(1), 0.1)
    assert session.heard(0.6) == []
    session.sent(Done(2), 1.1)
    assert session.heard(1.2) == []
    assert session.heard(1.7) == []
    session.sent(Done(3), 1.8)
    session.sent(Renewed(4, ()), 1.9)
    session.sent(Done(5), 4.0)
    assert session.heard(6.0) == [Done(2), Done(3), Done(5)]  # the first of them was on its way, perhaps
    assert session.heard(6.8) == []
    assert session.heard(9.0) == []


def test_of_a_long_log_the_newest_lines_fit_a_message() -> None:
    assert newest([]) == () and newest(["a", "b"]) == ("a", "b")
    lines = ["é" * 1000] * 500 + ["last"]
    found = newest(lines)
    assert found == tuple(lines[-len(found) :]) and len(found) == LOG_BYTES // 2008 + 1
    assert newest(["x" * LOG_BYTES, "last"]) == ("last",)
    assert len(encode_agent(LogLines(1, newest([""] * 10**5)))) < MESSAGE_BYTES


def test_over_another_connection_a_client_is_told_again_what_went_over_the_old_one() -> None:
    session = Sessions().find(client(1), 0.0, nobody)
    assert session is not None
    session.heard(0.0, b"old")
    session.introduced = True
    session.sent(Done(1), 0.1)
    assert session.heard(0.2, b"old") == []
    assert session.heard(0.3, b"new") == [Done(1)] and session.route == b"new"
    assert session.heard(0.4, b"new") == []
