"""What bounds a run, and how many workers each stage should have: properties over all that counters can say."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.feed.pipeline.autotune import MOST, bottleneck_line, choose_concurrency
from onebox.feed.pipeline.counters import StageCounters


def stage(name: str, item_s: float, concurrency: int = 1, items: int = 60, cpu: float = 1.0) -> StageCounters:
    """What a stage did, whose work takes that share of a core."""
    return StageCounters(
        name=name,
        by="threads",
        concurrency=concurrency,
        items=items,
        busy_s=item_s * items,
        waiting_s=0.0,
        blocked_s=0.0,
        bytes=0,
        cpu_s=item_s * items * cpu,
    )


def asked(item_s: dict[str, float], workers: dict[str, int], cores: int, **cpu: float) -> dict[str, int]:
    """Choose, where the consumer takes a second for an item."""
    counters = [stage(name, seconds, workers[name], cpu=cpu.get(name, 1.0)) for name, seconds in item_s.items()]
    return choose_concurrency([*counters, stage("compute", 1.0)], 60.0, cores)


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


shares = st.fixed_dictionaries({name: st.sampled_from([1.0, 1.0, 0.5, 0.1, 0.02]) for name in names})


@settings(max_examples=50)
@given(st.data(), times, many, shares)
def test_no_noise_of_20_percent_makes_it_swing(data, item_s, cores, cpu):
    noise = st.floats(0.8, 1.2)
    changes: dict[str, list[int]] = {name: [] for name in names}
    workers = asked(item_s, dict.fromkeys(names, 1), cores, **cpu)
    for _ in range(8):
        counters = [
            stage(name, item_s[name] * data.draw(noise), workers[name], cpu=cpu[name] * data.draw(noise))
            for name in names
        ]
        chosen = choose_concurrency([*counters, stage("compute", data.draw(noise))], 60.0, cores)
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


def test_a_stage_that_waits_needs_no_cores():
    one = {"read": 1, "process": 1}
    assert asked({"read": 8.0, "process": 0.5}, one, 1, read=0.01) == {"read": 8, "process": 1}
    assert asked({"read": 8.0, "process": 0.5}, one, 1, read=0.1) == {"read": 2, "process": 1}
    assert asked({"read": 8.0, "process": 0.5}, one, 1, read=0.5) == one
    assert asked({"read": 800.0, "process": 0.5}, one, 1, read=0.001) == {"read": MOST, "process": 1}
    assert asked({"read": 8.0, "process": 3.0}, one, 4, read=0.01) == {"read": 8, "process": 3}


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_threads_that_wait_for_the_lock_are_none_that_wait(workers):
    """Each computes the less, and takes the longer, the more there are."""
    before = {"read": 1, "process": workers}
    chosen = asked({"read": 0.1, "process": 4.0 * workers}, before, 8, process=1.0 / workers)
    assert chosen == {"read": 1, "process": 7}


def test_nothing_is_changed_before_anything_was_seen():
    counters = [stage("read", 0.0, 3, items=0), stage("compute", 0.0, items=0)]
    assert choose_concurrency(counters, 1.0, 8) == {"read": 3}
    assert bottleneck_line(counters, 1.0) == "bound by nothing: no batch has come yet"


@pytest.mark.parametrize(
    ("item_s", "concurrency", "wall_s", "line"),
    [
        (0.5, 1, 60.0, "the feed keeps up: batches are there in time"),
        (3.5, 1, 214.0, "bound by process (98 % busy): 4 threads would do"),
        (3.5, 2, 240.0, "bound by process (88 % busy): 4 threads would do"),
        (3.0, 3, 62.0, "bound by process (100 % busy): 3 threads keep up, nearly"),
        (1000.0, 1, 60000.0, "bound by process (100 % busy): more threads, or less work for each batch, would help"),
    ],
)
def test_the_line_says_what_bounds_and_what_would_help(item_s, concurrency, wall_s, line):
    assert (
        bottleneck_line([stage("read", 0.1), stage("process", item_s, concurrency), stage("compute", 1.0)], wall_s)
        == line
    )


def test_threads_that_take_turns_are_told_to_be_processes():
    counters = [stage("process", 9.0, 3, cpu=1.0 / 3), stage("compute", 1.0)]
    assert bottleneck_line(counters, 180.0) == (
        "bound by process (100 % busy), its threads take turns: 3 processes would do"
    )
    waits = [stage("read", 9.0, 3, cpu=0.01), stage("compute", 1.0)]
    assert bottleneck_line(waits, 180.0) == "bound by read (100 % busy): 9 threads would do"


def test_processes_are_called_so():
    counters = [dataclasses.replace(stage("process", 2.0), by="processes"), stage("compute", 1.0)]
    assert bottleneck_line(counters, 120.0) == "bound by process (100 % busy): 2 processes would do"


@pytest.mark.parametrize(
    ("computing", "needed"),
    [
        (stage("process", 9.0), 9),
        (stage("process", 41.0, cpu=0.3), 13),  # it waits for cores
        (stage("process", 41.0, concurrency=3, cpu=0.1), 5),
        (stage("process", 9.0, concurrency=3, cpu=0.5), 5),
        (stage("process", 1000.0), 1000),
    ],
)
def test_no_more_is_advised_than_there_are_cores(computing, needed):
    counters = [computing, stage("compute", 1.0)]
    line = bottleneck_line(counters, computing.busy_s, 4)
    assert line.endswith(
        f"it would take {needed} cores, and may use 4; store prepared data, make the transforms lighter, or use a host "
        "with more cores"
    )
    assert bottleneck_line(counters, computing.busy_s, needed).endswith(("would do", "would help"))


def test_waiting_takes_no_cores():
    waits = [stage("process", 41.0, cpu=0.01), stage("compute", 1.0)]
    assert bottleneck_line(waits, 2460.0, 4) == "bound by process (100 % busy): 41 threads would do"


@given(times, counts, st.floats(0.001, 1e4))
def test_there_is_always_one_line(item_s, workers, wall_s):
    counters = [stage(name, item_s[name], workers[name]) for name in names]
    line = bottleneck_line([*counters, stage("compute", 1.0)], wall_s)
    assert line.startswith(("bound by ", "the feed keeps up"))
    assert "\n" not in line
