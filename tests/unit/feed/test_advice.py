"""What bounds a run, and how many workers each stage should have: properties over all that counters can say."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.feed.advice import MOST, bound_line, choose
from onebox.feed.counters import StageCounters


def stage(name: str, item_s: float, concurrency: int = 1, items: int = 60) -> StageCounters:
    return StageCounters(
        name=name,
        by="threads",
        concurrency=concurrency,
        items=items,
        busy_s=item_s * items,
        waiting_s=0.0,
        blocked_s=0.0,
        bytes=0,
    )


def asked(item_s: dict[str, float], workers: dict[str, int], cores: int) -> dict[str, int]:
    """Choose, where the consumer takes a second for an item."""
    counters = [stage(name, seconds, workers[name]) for name, seconds in item_s.items()]
    return choose([*counters, stage("compute", 1.0)], 60.0, cores)


names = ("read", "process", "upload")
times = st.fixed_dictionaries({name: st.floats(0.001, 30.0) for name in names})
counts = st.fixed_dictionaries({name: st.integers(1, 12) for name in names})
many = st.integers(1, 24)


@given(times, counts, many)
def test_never_above_the_cores_and_never_below_one(item_s, workers, cores):
    chosen = asked(item_s, workers, cores)
    assert sum(chosen.values()) <= max(cores, len(chosen))
    assert min(chosen.values()) >= 1


@given(times, many)
def test_more_cores_never_mean_fewer_workers(item_s, cores):
    one = dict.fromkeys(names, 1)
    fewer, more = asked(item_s, one, cores), asked(item_s, one, cores + 1)
    assert all(fewer[name] <= more[name] for name in names)


@given(times, st.sampled_from(names), st.floats(1.0, 4.0), many)
def test_more_work_never_means_fewer_workers(item_s, name, factor, cores):
    one = dict.fromkeys(names, 1)
    slower = item_s | {name: item_s[name] * factor}
    assert asked(item_s, one, cores)[name] <= asked(slower, one, cores)[name]


@given(times)
def test_with_cores_enough_every_stage_keeps_up(item_s):
    chosen = asked(item_s, dict.fromkeys(names, 1), 1000)
    assert chosen == {name: max(1, math.ceil(seconds)) for name, seconds in item_s.items()}


@given(times, many)
def test_what_is_chosen_is_chosen_again(item_s, cores):
    chosen = asked(item_s, dict.fromkeys(names, 1), cores)
    assert asked(item_s, chosen, cores) == chosen


@given(st.data(), times, counts, many)
def test_no_noise_of_20_percent_makes_it_swing(data, item_s, workers, cores):
    noise = st.floats(0.8, 1.2)
    changes: dict[str, list[int]] = {name: [] for name in names}
    workers = asked(item_s, workers, cores)  # from wherever it was to where it belongs
    for _ in range(12):
        counters = [stage(name, item_s[name] * data.draw(noise), workers[name]) for name in names]
        chosen = choose([*counters, stage("compute", data.draw(noise))], 60.0, cores)
        for name in names:
            if chosen[name] != workers[name]:
                changes[name].append(chosen[name] - workers[name])
        workers = chosen
    for changed in changes.values():
        turns = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(changed))
        assert turns == 0, changed


def test_what_is_idle_gives_up_its_workers():
    assert asked({"read": 0.1, "process": 3.0}, {"read": 6, "process": 1}, 6) == {"read": 1, "process": 3}


def test_where_cores_are_short_the_slowest_comes_first():
    assert asked({"read": 2.0, "process": 8.0}, {"read": 1, "process": 1}, 5) == {"read": 1, "process": 4}


def test_a_stage_that_hardly_works_takes_nothing_from_one_that_does():
    assert asked({"read": 0.9, "process": 2.5}, {"read": 2, "process": 2}, 4)["process"] == 2


def test_nothing_is_changed_before_anything_was_seen():
    counters = [stage("read", 0.0, 3, items=0), stage("compute", 0.0, items=0)]
    assert choose(counters, 1.0, 8) == {"read": 3}
    assert bound_line(counters, 1.0) == "bound by nothing: no batch has come yet"


@pytest.mark.parametrize(
    ("item_s", "concurrency", "wall_s", "line"),
    [
        (0.5, 1, 60.0, "bound by compute (100 % busy): batches are there in time"),
        (3.5, 1, 214.0, "bound by process (98 % busy): 4 threads would do"),
        (3.5, 2, 110.0, "bound by process (95 % busy): 4 threads would do"),
        (3.0, 3, 60.0, "bound by process (100 % busy): 3 threads keep up, nearly"),
        (1000.0, 1, 60000.0, "bound by process (100 % busy): more threads, or less work for each batch, would help"),
    ],
)
def test_the_line_says_what_bounds_and_what_would_help(item_s, concurrency, wall_s, line):
    assert (
        bound_line([stage("read", 0.1), stage("process", item_s, concurrency), stage("compute", 1.0)], wall_s) == line
    )


def test_processes_are_called_so():
    counters = [dataclasses.replace(stage("process", 2.0), by="processes"), stage("compute", 1.0)]
    assert bound_line(counters, 120.0) == "bound by process (100 % busy): 2 processes would do"


@given(times, counts, st.floats(0.001, 1e4))
def test_there_is_always_one_line(item_s, workers, wall_s):
    counters = [stage(name, item_s[name], workers[name]) for name in names]
    line = bound_line([*counters, stage("compute", 1.0)], wall_s)
    assert line.startswith("bound by ")
    assert "\n" not in line
    assert MOST >= 1
