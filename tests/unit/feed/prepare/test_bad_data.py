"""Bad data: a feed stops and names it, or leaves it out and says so; the same by threads and by processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import DataError, UsageError
from onebox.feed import Feed
from onebox.feed.adapt import as_source
from onebox.feed.prepare.stream_reader import StreamReader
from onebox.feed.source import Stream
from tests.unit.feed.random_data import Counting, Numbers, refuses

PLACES = {"read": "read: OSError", "decode": "decode: file-5.jpg is cut off", "shape": "collate: it is"}


def labels(feed: Feed, epoch: int = 0) -> list[list[int]]:
    """The samples of each batch."""
    with feed.epoch(epoch) as batches:
        return [targets.tolist() for _, targets in batches]


@pytest.mark.parametrize("by", ["threads", "processes"])
@pytest.mark.parametrize(("place", "said"), PLACES.items())
def test_it_stops_at_the_first_and_names_it(place, said, by):
    feed = Feed(Numbers(9, {5: place}), batch_size=3, shuffle=False, process_by=by)
    batches = feed.epoch(0)
    next(batches)

    with pytest.raises(DataError, match=rf"sample 5 \(file-5.jpg\) failed in {said}.*on_error='skip'") as caught:
        next(batches)

    assert (caught.value.path, caught.value.sample) == ("file-5.jpg", 5)
    assert (feed.position.index, feed.position.samples) == (1, 3)  # the batch before it is the last that was had
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("onebox-feed")]


@pytest.mark.feature("Feed: Name or skip broken samples")
@pytest.mark.parametrize("by", ["threads", "processes"])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_left_out_and_counted(place, by):
    feed = Feed(Numbers(9, {5: place, 7: place}), batch_size=3, shuffle=False, on_error="skip", process_by=by)

    assert labels(feed) == [[0, 1, 2], [3, 4], [6, 8]]
    assert [(one.index, one.name, one.stage) for one in feed.skipped.first] == [
        (5, "file-5.jpg", "collate" if place == "shape" else place),
        (7, "file-7.jpg", "collate" if place == "shape" else place),
    ]
    assert "2 left out: sample 5 (file-5.jpg) failed in" in feed.report()
    assert labels(feed, 1) == [[0, 1, 2], [3, 4], [6, 8]]
    assert (feed.skipped.count, len(feed.skipped.first)) == (4, 2)


@settings(max_examples=40)
@given(
    count=st.integers(1, 20),
    size=st.integers(1, 6),
    workers=st.integers(1, 3),
    broken=st.dictionaries(st.integers(0, 19), st.sampled_from(["read", "decode", "shape"]), max_size=8),
)
def test_what_is_left_is_the_same_whatever_the_concurrency(count, size, workers, broken):
    broken = {index: place for index, place in broken.items() if index < count}

    def run(workers: int) -> Any:
        feed = Feed(Numbers(count, broken), batch_size=size, on_error="skip", read=workers, process=workers)
        try:
            return labels(feed), feed.skipped.first, feed.position
        except DataError as error:
            return str(error)

    one = run(1)

    assert run(workers) == one
    if not isinstance(one, str):
        had = {label for batch in one[0] for label in batch}
        assert had.isdisjoint(index for index, place in broken.items() if place != "shape")
        if "shape" not in broken.values():  # of two samples that differ either may be the odd one
            assert had | set(broken) == set(range(count))


def test_a_batch_of_which_nothing_is_left_is_left_out():
    feed = Feed(Numbers(6, {2: "read", 3: "decode"}), batch_size=2, shuffle=False, on_error="skip")
    positions = []
    with feed.epoch(0) as batches:
        seen = [(targets.tolist(), positions.append(feed.position.index)) for _, targets in batches]

    assert [batch for batch, _ in seen] == [[0, 1], [4, 5]]
    assert positions == [1, 3]


def test_where_nothing_is_left_at_all_it_stops():
    with pytest.raises(DataError, match=r"all 3 samples were left out; the first: sample . "):
        labels(Feed(Numbers(3, dict.fromkeys(range(3), "read")), batch_size=2, on_error="skip"))


def test_more_than_the_limit_stops():
    feed = Feed(
        Numbers(9, dict.fromkeys(range(4), "read")), batch_size=1, on_error="skip", max_skipped=3, shuffle=False
    )

    with pytest.raises(
        DataError, match=r"4 samples of an epoch were left out, and max_skipped allows 3; the last: .*3"
    ):
        labels(feed)


def test_many_are_counted_and_few_are_named():
    feed = Feed(Numbers(60, dict.fromkeys(range(40), "read")), batch_size=8, on_error="skip")
    labels(feed)

    assert (feed.skipped.count, len(feed.skipped.first)) == (40, 10)
    assert str(feed.skipped).endswith("; and 37 more")


def test_a_shape_that_differs_is_told_with_that_of_the_others():
    feed = Feed(Numbers(4, {0: "shape"}), batch_size=4, shuffle=False)

    with pytest.raises(DataError) as caught:
        labels(feed)

    shapes = r"it is (float64 [3], int); sample 1 (file-1.jpg) of its batch is (float64 [2], int)"
    assert f"sample 0 (file-0.jpg) failed in collate: {shapes}" in str(caught.value)


def test_samples_that_collate_refuses_though_they_are_alike():
    def refuse(samples: list[Any]) -> Any:
        raise KeyError("no way")

    with pytest.raises(
        DataError, match=r"a batch of 2 samples, 0 to 1, each \(float64 \[2\], int\), failed in collate"
    ):
        labels(Feed(Numbers(4), batch_size=2, shuffle=False, collate=refuse, on_error="skip"))


@pytest.mark.parametrize("by", ["threads", "processes"])
def test_a_transform_that_raises(by):
    def make(on_error: Any) -> Feed:
        return Feed(
            Numbers(10), batch_size=4, shuffle=False, transform=refuses, on_error=on_error, process_by=by, process=2
        )

    assert labels(make("skip")) == [[0, 1, 2, 3], [5, 6, 7], [8]]
    with pytest.raises(DataError, match=r"sample 4 \(file-4.jpg\) failed in transform: ValueError: this one is odd"):
        labels(make("stop"))


def test_the_error_of_a_transform_is_the_cause():
    with pytest.raises(DataError) as caught:
        labels(Feed(Numbers(10), batch_size=4, shuffle=False, transform=refuses))

    assert isinstance(caught.value.__cause__, ValueError)


def test_items_of_a_stream_are_left_out_likewise():
    feed = Feed(Counting(7), batch_size=3, transform=refuses, on_error="skip")

    assert labels(feed) == [[0, 1, 2], [3, 5], [6]]
    assert [str(one) for one in feed.skipped.first] == [
        "sample 4 (item 4) failed in transform: ValueError: this one is odd"
    ]


def test_a_stream_that_fails_stops_in_any_case():
    def broken() -> Any:
        yield torch.zeros(2), torch.zeros(2)
        raise OSError(5, "Input/output error")

    batches = Feed(broken, on_error="skip").epoch(0)
    next(batches)

    with pytest.raises(DataError, match=r"batch 1 of .*broken cannot be read: OSError: .*Input/output error"):
        next(batches)


def test_a_stream_that_fails_at_once_does_so_in_each_epoch_also_where_a_transform_is_tried_first():
    def broken() -> Any:
        raise OSError(5, "Input/output error")
        yield

    feed = Feed(broken, on_error="skip", transform=lambda item: item)
    for _ in range(2):
        with pytest.raises(DataError, match=r"batch 0 of .*broken cannot be read: OSError: .*Input/output error"):
            next(feed.epoch(0))
    assert (feed.position.epoch, feed.position.index) == (0, 0)


def test_a_transform_that_writes_to_the_items_of_a_stream_does_so_once():
    def pairs() -> Any:
        for number in range(3):
            yield torch.full((2,), float(number)), torch.tensor([number, number])

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x.add_(10)

    assert [x.tolist() for x, _ in Feed(pairs, transform=shifted).epoch(0)] == [[10.0] * 2, [11.0] * 2, [12.0] * 2]


def test_a_stream_is_left_while_its_reader_hangs():
    begun, released = threading.Event(), threading.Event()

    def slow() -> Any:
        yield 0
        begun.set()
        released.wait(30)
        yield 1

    stream = as_source(slow)
    assert isinstance(stream, Stream)
    reader = StreamReader(stream, 0, 0, size=1, number=0, first=0, drop_last=False)
    cuts = reader.tasks()
    assert reader.read(next(cuts)) is not None
    thread = threading.Thread(target=reader.read, args=(next(cuts),))
    thread.start()
    assert begun.wait(30)
    reader.close()
    released.set()
    thread.join(30)
    assert not thread.is_alive()


def test_wrong_use_is_no_bad_data():
    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise UsageError("say it otherwise")

    with pytest.raises(UsageError, match="say it otherwise"):
        labels(Feed(Numbers(4), batch_size=2, transform=wrong, on_error="skip"))


@pytest.mark.parametrize("start", [0, 2])
def test_a_reader_that_hangs_is_named(start):
    released = threading.Event()

    class Hanging(Numbers):
        def read(self, index: int) -> bytes:
            if index == 7:
                released.wait(30)
            return super().read(index)

    feed = Feed(Hanging(10), batch_size=2, shuffle=False, timeout_s=0.3, on_error="skip")
    timer = threading.Timer(0.6, released.set)  # so that the thread can end
    batches = feed.epoch(0, start=start)
    assert [next(batches)[1][0].item() for _ in range(3 - start)] == [2 * number for number in range(start, 3)]
    timer.start()

    with pytest.raises(DataError, match=r"read has been inside sample 7 \(file-7.jpg\) for 0\.3 s"):
        next(batches)

    timer.join()


@pytest.mark.parametrize("start", [0, 1])
def test_a_stream_that_hangs_is_named(start):
    released = threading.Event()

    class Hanging(Counting):
        def begin(self, epoch: int, seed: int) -> Any:
            for item in super().begin(epoch, seed):
                if item[1] == 4:
                    released.wait(30)
                yield item

    feed = Feed(Hanging(10), batch_size=2, timeout_s=0.3)
    timer = threading.Timer(0.6, released.set)
    batches = feed.epoch(0, start=start)
    assert len([next(batches) for _ in range(2 - start)]) == 2 - start
    timer.start()

    with pytest.raises(DataError, match=r"read has been inside the batch of sample 4 \(item 4\) and 1 more for 0\.3 s"):
        next(batches)

    timer.join()


def test_a_reader_that_hangs_at_once_is_named():
    released = threading.Event()

    class Hanging(Numbers):
        def read(self, index: int) -> bytes:
            released.wait(30)
            return super().read(index)

    with pytest.raises(DataError, match=r"read has been inside the first samples \(file-0.jpg, \.\.\.\) for 0.2 s"):
        next(Feed(Hanging(6), batch_size=2, shuffle=False, timeout_s=0.2).epoch(0))
    released.set()
