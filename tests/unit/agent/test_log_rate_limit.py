"""How many lines somebody else can cause."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from onebox.agent.log_rate_limit import CAUSES, LogRateLimiter, Reporter, TokenBucket


@given(st.lists(st.floats(0, 3, allow_nan=False), max_size=40))
def test_a_rate_holds_over_any_time(pauses: list[float]) -> None:
    rate, now_s, allowed = TokenBucket(3, 2.0, 0.0), 0.0, []
    for pause in pauses:
        now_s += pause
        if rate.allows(now_s):
            allowed.append(now_s)
    for start in range(len(allowed)):
        for end in range(start, len(allowed)):
            assert end - start + 1 <= 3 + (allowed[end] - allowed[start]) / 2.0 + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    rate = TokenBucket(1, 1.0, 10.0)
    assert rate.allows(10.0) and not rate.allows(5.0) and not rate.allows(5.9) and rate.allows(6.1)
    assert not rate.full(6.2) and rate.full(7.2)


def test_of_one_cause_a_few_are_told_and_the_rest_later() -> None:
    quiet = LogRateLimiter()
    assert [quiet.happened("refused", "x", 0.0) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert quiet.happened("refused", "y", 0.0) == 1
    assert quiet.happened("failed", "x", 0.0) == 1
    assert quiet.happened("refused", "x", 11.0) == 4


def test_of_many_causes_not_too_many_are_told_nor_remembered() -> None:
    quiet = LogRateLimiter()
    assert sum(bool(quiet.happened("refused", str(number), 0.0)) for number in range(5000)) == 50
    assert len(quiet) == CAUSES


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 9, allow_nan=False)), max_size=80))
def test_what_is_passed_over_is_told_by_number_in_the_end(happenings: list[tuple[str, float]]) -> None:
    told: dict[str, int] = dict.fromkeys("abc", 0)

    def tell(event: str, **fields: Any) -> None:
        told[fields["client"]] += fields.get("times", 1)

    report, now_s = Reporter(tell), 0.0
    for client, pause in happenings:
        now_s += pause
        report.refusal("refused", client, now_s, client=client)
        report.tick(now_s)
    report.tick(now_s, last=True)
    assert told == {client: sum(who == client for who, _ in happenings) for client in "abc"}


def test_a_client_that_says_nonsense_for_an_hour_fills_no_disk() -> None:
    lines: list[dict[str, Any]] = []
    report = Reporter(lambda event, **fields: lines.append(fields))
    for tenth in range(36_000):
        for _ in range(5):
            report.refusal("refused", "ana", tenth / 10, client="ana", reason="nonsense")
        report.tick(tenth / 10)
    report.tick(3600.0, last=True)
    assert len(lines) < 5 + 3600 / 10 + 2
    assert sum(line.get("times", 1) for line in lines) == 180_000


def test_the_workers_of_the_largest_lease_are_all_told() -> None:
    lines: list[dict[str, Any]] = []
    report = Reporter(lambda event, **fields: lines.append(fields))
    for process in range(256):
        report.dealing("worker-started", "ana", 1.0, process=process)
    assert [line["process"] for line in lines] == list(range(256))
