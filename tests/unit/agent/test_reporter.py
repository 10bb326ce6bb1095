"""How many lines somebody else can cause."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from onebox.agent.reporter import CAUSES, REFUSALS, Reporter


def told_by() -> tuple[list[tuple[str, dict[str, Any]]], Reporter]:
    lines: list[tuple[str, dict[str, Any]]] = []
    return lines, Reporter(lambda event, **fields: lines.append((event, fields)))


def test_of_one_cause_a_few_are_told_in_a_minute_and_the_rest_when_it_is_over() -> None:
    lines, report = told_by()
    for number in range(8):
        report.refusal("refused", "x", 1.0, number=number)
    report.refusal("refused", "y", 1.0)
    report.refusal("failed", "x", 1.0)
    report.tick(59.9)
    assert len(lines) == REFUSALS + 2
    report.tick(60.0)
    assert lines[-1] == ("refused", {"number": 7, "times": 3})
    report.refusal("refused", "x", 61.0)
    assert len(lines) == REFUSALS + 4


def test_of_many_causes_not_too_many_are_told_nor_remembered() -> None:
    lines, report = told_by()
    for number in range(5000):
        report.refusal("refused", str(number), 0.0)
    assert len(report) == CAUSES + 1
    assert len(lines) == CAUSES + REFUSALS
    report.tick(60.0)
    assert lines[-1] == ("refused", {"times": 5000 - CAUSES - REFUSALS})
    assert len(report) == 0


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
    assert len(lines) == 60 * (REFUSALS + 1)
    assert sum(line.get("times", 1) for line in lines) == 180_000


def test_the_workers_of_the_largest_lease_are_all_told() -> None:
    lines: list[dict[str, Any]] = []
    report = Reporter(lambda event, **fields: lines.append(fields))
    for process in range(256):
        report.dealing("worker-started", "ana", 1.0, process=process)
    assert [line["process"] for line in lines] == list(range(256))
