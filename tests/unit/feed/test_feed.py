"""A feed gives the same samples, to the bit, whoever prepares them and wherever a run stops and goes on."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset, default_collate

from onebox.errors import UsageError
from onebox.feed import Feed, Position
from onebox.feed.order import epoch_order
from onebox.feed.sample_ids import SAMPLE_BITS, namespace
from tests.unit.feed.random_data import Counting, Numbers, all_globals, own_generator, plain

WORKERS = st.sampled_from([1, 2, 3])


def told(batches: Iterable[Any]) -> list[Any]:
    """Batches as plain numbers, exact to the bit."""
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in batches]


def told_order(count: int, size: int) -> list[list[int]]:
    """The samples of each batch of the first epoch."""
    return [batch.tolist() for batch in epoch_order(count, seed=0, epoch=0).split(size)]


def epochs(feed: Feed, first: int, last: int) -> list[Any]:
    """All batches of some epochs."""
    return [batch for epoch in range(first, last) for batch in told(feed.epoch(epoch))]


def stopped_and_resumed(make: Any, stop: int, *, last: int) -> list[Any]:
    """Batches of a run that stops after some and goes on by another feed, from what a checkpoint would hold."""
    first, seen = make(), []
    for epoch in range(last):
        with first.epoch(epoch) as batches:
            for batch in batches:
                seen += told([batch])
                if len(seen) == stop:
                    break
        if len(seen) == stop:
            break
    kept = first.position.to_dict()
    second = make()
    second.resume(Position.from_dict(kept))
    return seen + epochs(second, second.position.epoch, last)


@pytest.mark.feature("Feed: Train from a feed, and resume at the next sample")
@settings(max_examples=60)
@given(
    count=st.integers(1, 23),
    size=st.integers(1, 8),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    transform=st.sampled_from([None, plain, own_generator]),
    ahead=WORKERS,
    read=WORKERS,
    process=WORKERS,
    skip=st.booleans(),
    data=st.data(),
)
def test_any_stop_and_any_concurrency_give_the_same_samples(
    count, size, drop_last, shuffle, transform, ahead, read, process, skip, data
):
    size = min(size, count)
    where = st.sampled_from(["read", "decode", "shape"])
    broken = data.draw(st.dictionaries(st.integers(0, count - 1), where, max_size=2)) if skip else {}
    broken = broken if len(broken) < count else {}

    def make(**others: Any) -> Feed:
        fixed = {"batch_size": size, "seed": 7, "drop_last": drop_last, "shuffle": shuffle, "transform": transform}
        return Feed(Numbers(count, broken), **fixed, on_error="skip" if skip else "stop", **others)

    whole = epochs(make(read=1, process=1, ahead=1), 0, 2)
    stop = data.draw(st.integers(1, max(1, len(whole))))

    assert stopped_and_resumed(lambda: make(read=read, process=process, ahead=ahead), stop, last=2) == whole


@pytest.mark.feature("Data: Write a source of one's own")
@settings(max_examples=6)
@given(stop=st.integers(1, 9), process=WORKERS, transform=st.sampled_from([own_generator, all_globals]))
def test_processes_give_what_threads_give(stop, process, transform):
    def make(by: Any, process: int = 1) -> Feed:
        return Feed(Numbers(9), batch_size=2, seed=3, transform=transform, process=process, process_by=by)

    whole = epochs(make("threads"), 0, 2)

    assert stopped_and_resumed(lambda: make("processes", process), stop, last=2) == whole
    assert stopped_and_resumed(lambda: make("threads", process), stop, last=2) == whole
    assert epochs(make("auto", process), 0, 2) == whole


@settings(max_examples=30)
@given(count=st.integers(0, 12), size=st.integers(1, 5), drop_last=st.booleans(), stop=st.integers(1, 9), skip=WORKERS)
def test_streams_go_on_where_they_stopped(count, size, drop_last, stop, skip):
    def make() -> Feed:
        return Feed(Counting(count), batch_size=size, drop_last=drop_last, transform=own_generator, process=skip)

    whole = epochs(make(), 0, 2)

    assert [len(targets) for _, targets in whole].count(size) >= len(whole) - (0 if drop_last else 2)
    if whole:
        assert stopped_and_resumed(make, min(stop, len(whole)), last=2) == whole


@given(size=st.integers(1, 7), other=st.integers(1, 7), stop=st.integers(1, 3))
@settings(max_examples=25)
def test_a_run_may_go_on_with_another_batch_size(size, other, stop):
    feed = Feed(Numbers(17), batch_size=size, transform=own_generator)
    whole = [value for inputs, _ in epochs(feed, 0, 1) for value in inputs]

    seen = []
    with feed.epoch(0) as batches:
        for _, (inputs, _) in zip(range(stop), batches, strict=False):
            seen += inputs.tolist()
    following = Feed(Numbers(17), batch_size=other, transform=own_generator)
    following.resume(feed.position)
    seen += [value for inputs, _ in epochs(following, 0, 1) for value in inputs]

    assert seen == whole


@pytest.mark.feature("Data: Take data sets and loaders of PyTorch")
def test_a_loader_is_taken_as_it_is_and_resumes_in_its_own_order():
    samples = TensorDataset(torch.arange(11.0), torch.arange(11))

    def make() -> Feed:
        return Feed(DataLoader(samples, batch_size=4, shuffle=True), seed=1)

    whole = epochs(make(), 0, 2)

    assert sorted(value for inputs, _ in whole[:3] for value in inputs) == list(range(11))
    assert whole[:3] != whole[3:]
    assert stopped_and_resumed(make, 4, last=2) == whole
    assert len(make()) == 3


def test_a_data_set_that_draws_while_it_is_read_is_repeatable():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.rand(2), index

    def make(**options: Any) -> Feed:
        return Feed(Noisy(), batch_size=3, seed=5, **options)

    whole = epochs(make(process_by="threads", read=2), 0, 2)

    assert epochs(make(), 0, 2) == whole  # auto: by processes, which read for themselves
    assert epochs(make(process_by="processes", process=2), 0, 2) == whole
    assert stopped_and_resumed(make, 4, last=2) == whole
    assert len({tuple(value) for inputs, _ in whole for value in inputs}) == 14


@pytest.mark.feature("Feed: Prepare by threads or processes with repeatable transforms")
def test_decoding_that_draws_is_seen():
    noisy = Numbers(5, noisy=True)
    whole = epochs(Feed(noisy, batch_size=2, process_by="threads", process=2), 0, 1)

    assert epochs(Feed(noisy, batch_size=2), 0, 1) == whole
    assert all(value[0] % 1 for inputs, _ in whole for value in inputs)


@pytest.mark.parametrize("by", ["threads", "processes"])
def test_the_generators_of_the_process_are_put_back(by):
    before, pythons = torch.get_rng_state(), random.getstate()

    epochs(Feed(Numbers(6), batch_size=2, transform=all_globals, process_by=by), 0, 1)

    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == pythons


def test_processes_seed_every_sample_of_a_transform_and_nothing_where_there_is_none():
    def seed_of(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(torch.initial_seed() % 1_000_003)

    class Seeds(Numbers):
        def decode(self, raw: bytes, index: int) -> tuple[torch.Tensor, int]:
            return torch.tensor(torch.initial_seed() % 1_000_003), index

    def made(source: Numbers, **options: Any) -> list[int]:
        ((seeds, _),) = epochs(Feed(source, batch_size=3, process_by="processes", **options), 0, 1)
        return seeds

    assert len(set(made(Numbers(3), transform=seed_of))) == 3  # it may draw for samples that were not looked at
    assert made(Seeds(3)) == [torch.initial_seed() % 1_000_003] * 3


def test_the_position_counts_what_was_handed_out():
    feed = Feed(Numbers(5), batch_size=2, seed=9)
    assert feed.position == Position(epoch=0, index=0, seed=9, samples=0)
    seen = []
    with feed.epoch(0) as batches:
        for _ in batches:
            seen.append(feed.position.to_dict())
    assert seen == [{"epoch": 0, "index": n, "seed": 9, "samples": s} for n, s in ((1, 2), (2, 4), (3, 5))]
    assert feed.position == Position(epoch=1, index=0, seed=9, samples=0)


def test_positions_of_checkpoints_without_samples_count_batches():
    feed = Feed(Numbers(10), batch_size=3, seed=0)
    whole = epochs(feed, 0, 1)

    feed.resume(Position(epoch=0, index=2, seed=0))

    assert epochs(feed, 0, 1) == whole[2:]
    assert epochs(feed, 0, 1) == whole  # once
    assert told(feed.epoch(0, start=3)) == whole[3:]
    assert told(feed.epoch(0, start=4)) == []


def test_the_order_is_the_one_that_checkpoints_rest_on():
    labels = [label for _, targets in epochs(Feed(Numbers(10), batch_size=3, seed=0), 0, 1) for label in targets]

    assert labels == [4, 9, 2, 1, 6, 5, 7, 3, 8, 0]


def test_upload_is_given_pairs_and_its_results_come():
    given: list[Any] = []

    def upload(inputs: torch.Tensor, targets: torch.Tensor) -> int:
        given.append((inputs.tolist(), targets.tolist()))
        return len(given)

    feed = Feed(Numbers(7), batch_size=3, upload=upload)

    assert list(feed.epoch(0)) == [1, 2, 3]
    assert given == epochs(Feed(Numbers(7), batch_size=3), 0, 1)


def test_upload_is_told_of_samples_that_are_the_same_in_every_epoch():
    def told_of(**options: Any) -> list[Any]:
        told: list[Any] = []

        def upload(inputs: torch.Tensor, targets: torch.Tensor, samples: Any = None) -> None:
            told.append(samples)

        list(
            Feed(Numbers(5, {2: "read"}), batch_size=3, shuffle=False, upload=upload, on_error="skip", **options).epoch(
                0
            )
        )
        return [None if names is None else own(names) for names in told]

    def own(names: tuple[int, ...]) -> tuple[int, ...]:
        assert len({name >> SAMPLE_BITS for name in names}) == 1
        return tuple(name % (1 << SAMPLE_BITS) for name in names)

    assert told_of() == told_of(transform=plain) == [(0, 1), (3, 4)]
    assert told_of(collate=default_collate) == [None, None], "which may mix them"
    assert told_of(transform=own_generator) == told_of(transform=all_globals) == [None, None]
    whole = Feed(TensorDataset(torch.arange(4), torch.arange(4)), batch_size=3, upload=lambda x, y, samples: samples)
    assert list(map(own, whole.epoch(0))) == [tuple(cut) for cut in told_order(4, 3)]


def test_samples_of_one_source_are_told_from_those_of_another():
    def told_of(source: Any, transform: Any = None) -> list[Any]:
        feed = Feed(source, batch_size=2, shuffle=False, transform=transform, upload=lambda x, y, samples=None: samples)
        return list(feed.epoch(0))

    one, other = Numbers(4), Numbers(4)
    assert told_of(one) == told_of(one), "another feed of the same source"
    assert told_of(one, plain) == told_of(one, plain)
    ways = [told_of(one), told_of(other), told_of(one, plain), told_of(TensorDataset(torch.ones(4, 1), torch.ones(4)))]
    names = [name for told in ways for batch in told for name in batch]
    assert len(set(names)) == len(names) == 16
    assert all(0 <= name < 1 << 63 for name in names)
    several: list[Any] = [0]
    assert namespace(several) != namespace(several), "nobody would notice its end"


def test_what_is_no_pair_is_not_uploaded():
    feed = Feed(Numbers(7), batch_size=3, collate=lambda samples: {"x": samples[0][0]}, upload=lambda x, y: x)

    with pytest.raises(UsageError, match=r"a pair \(inputs, targets\), and a batch is a dict"):
        next(feed.epoch(0))


def test_a_transform_of_whole_samples_where_they_are_no_pairs():
    class Texts(Numbers):
        def decode(self, raw: bytes, index: int) -> Any:
            return {"tokens": torch.tensor([index, index + 1])}

    feed = Feed(
        Texts(4), batch_size=4, shuffle=False, transform=lambda sample: (sample["tokens"][:1], sample["tokens"][1:])
    )

    assert epochs(feed, 0, 1) == [([[0], [1], [2], [3]], [[1], [2], [3], [4]])]


def test_an_epoch_ends_however_it_is_left():
    feed = Feed(Numbers(50), batch_size=1, read=2, process=2)
    before = set(threading.enumerate())

    for _ in feed.epoch(0):
        break  # forgotten
    gc.collect()
    assert set(threading.enumerate()) == before

    kept = feed.epoch(0)
    next(kept)
    assert set(threading.enumerate()) > before
    feed.epoch(1)  # the one that is under way ends
    assert set(threading.enumerate()) == before

    with pytest.raises(ZeroDivisionError), feed.epoch(2) as batches:
        for _ in batches:
            raise ZeroDivisionError
    assert set(threading.enumerate()) == before

    with feed:
        next(feed.epoch(3))
    assert set(threading.enumerate()) == before
    assert [len(told(feed.epoch(4))), set(threading.enumerate())] == [50, before]


def test_a_batch_belongs_to_whoever_got_it():
    feed = Feed(Numbers(20), batch_size=1, ahead=1)
    with feed.epoch(0) as batches:
        gone = weakref.ref(next(batches)[0])
        gc.collect()
        assert gone() is None


def test_little_is_read_while_the_consumer_stalls():
    numbers = Numbers(500)
    read: list[int] = []
    stalled = threading.Event()

    def note(index: int) -> bytes:
        read.append(index)
        if len(read) == 12:
            stalled.set()
        return Numbers.read(numbers, index)

    numbers.read = note  # type: ignore[method-assign]
    feed = Feed(numbers, batch_size=1, read=2, process=2, ahead=2)
    with feed.epoch(0) as batches:
        next(batches)
        stalled.wait(0.3)
        # handed out, ready, and for each stage one more than its workers; three were looked at before
        assert len(read) <= 3 + 1 + 2 + 3 + 3


@pytest.mark.feature("Feed: Find the bottleneck, and adjust to it")
def test_the_report_names_the_stage_that_bounds():
    feed = Feed(Numbers(8), batch_size=2)
    assert feed.report() == "no batch has been asked for yet"
    told(feed.epoch(0))
    assert feed.report().startswith(("bound by ", "the feed keeps up"))
    assert [each.name for each in feed.counters] == ["read", "process", "compute"]
    assert [each.items for each in feed.counters][:2] == [4, 4]


def test_auto_begins_with_what_it_has_found():
    class Slow(Numbers):
        def decode(self, raw: bytes, index: int) -> Any:
            threading.Event().wait(0.02)
            return super().decode(raw, index)

    feed = Feed(Slow(150), batch_size=2, cores=4)
    told(feed.epoch(0))
    reached = feed.counters[1].concurrency
    assert reached > 1  # the loop does nothing, so that processing bounds it

    with feed.epoch(1) as batches:
        next(batches)
    assert feed.counters[1].concurrency == reached


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "batch_size is needed"),
        ({"batch_size": 0}, "batch_size is 0; it has to be an integer of at least 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch: allowed are at most 10"),
        ({"batch_size": 2, "seed": "x"}, "seed is 'x'"),
        ({"batch_size": 2, "read": 0}, "read is 0"),
        ({"batch_size": 2, "process": "many"}, "process is 'many'"),
        ({"batch_size": 2, "process_by": "fibres"}, "process_by is 'fibres'; allowed are threads, processes, auto"),
        ({"batch_size": 2, "on_error": "ignore"}, "on_error is 'ignore'; allowed are stop, skip"),
        ({"batch_size": 2, "max_skipped": -1}, "max_skipped is -1"),
        ({"batch_size": 2, "ahead": 0}, "ahead is 0"),
        ({"batch_size": 2, "transform": 3}, "transform is a int; it has to be callable"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(UsageError, match=said):
        Feed(Numbers(10), **options)


def test_batches_are_not_batched_again():
    with pytest.raises(UsageError, match="the items of the source are batches"):
        Feed([(torch.zeros(2), torch.zeros(2))], batch_size=2)
    with pytest.raises(UsageError, match="collate is for samples"):
        Feed([(torch.zeros(2), torch.zeros(2))], collate=list)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (lambda feed: feed.epoch(-1), "epoch is -1"),
        (lambda feed: feed.epoch(0, start=-1), "start is -1"),
        (lambda feed: feed.epoch(0, start=5), "start is 5; the epoch has 4 batches"),
        (
            lambda feed: feed.resume(Position(epoch=0, index=0, seed=1)),
            "of a run with seed 1, and this feed has seed 0",
        ),
        (lambda feed: feed.resume(Position(epoch=0, index=1, seed=0, samples=11)), "after 11 samples .* has 10"),
    ],
)
def test_where_no_epoch_can_begin(begin, said):
    with pytest.raises(UsageError, match=said):
        begin(Feed(Numbers(10), batch_size=3))
