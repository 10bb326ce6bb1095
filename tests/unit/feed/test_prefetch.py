"""Reading ahead keeps order, bounds and errors, and leaves no thread behind. Nothing here is timed."""

import itertools
import threading
import traceback

import pytest

from onebox.errors import UsageError
from onebox.feed import Prefetch, prefetch

PATIENCE_S = 30


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not feed_threads()


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "onebox-feed"]


class Counted:
    """0, 1, 2 …; counts what was taken, and says when ``target`` items were."""

    def __init__(self, target: int) -> None:
        self.taken = 0
        self._target = target
        self.reached = threading.Event()

    def __iter__(self):
        return self

    def __next__(self) -> int:
        self.taken += 1
        if self.taken == self._target:
            self.reached.set()
        return self.taken - 1


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_keeps_the_order(depth):
    with Prefetch(range(500), depth=depth) as ready:
        assert list(ready) == list(range(500))
        assert list(ready) == []


def test_reads_ahead_no_further_than_depth():
    source = Counted(target=3)
    with Prefetch(source, depth=3) as ready:
        assert source.reached.wait(PATIENCE_S)
        for number, item in enumerate(itertools.islice(ready, 50)):
            assert item == number
            assert source.taken <= number + 1 + 3


def test_reads_in_a_daemon_thread_of_its_name():
    def who():
        yield threading.current_thread()

    with Prefetch(who()) as ready:
        (thread,) = ready
    assert thread is not threading.current_thread()
    assert thread.name == "onebox-feed"
    assert thread.daemon


def test_an_error_comes_after_the_items_before_it_with_its_traceback():
    def failing_source():
        yield 1
        yield 2
        raise KeyError("third")

    with Prefetch(failing_source(), depth=5) as ready:
        assert next(ready) == 1
        assert next(ready) == 2
        with pytest.raises(KeyError, match="third") as raised:
            next(ready)
        assert "failing_source" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert list(ready) == []


def test_an_error_before_the_first_item():
    class Broken:
        def __iter__(self):
            raise OSError("no such folder")

    with Prefetch(Broken()) as ready, pytest.raises(OSError, match="no such folder"):
        next(ready)


@pytest.mark.parametrize("leave", [RuntimeError, KeyboardInterrupt])
def test_leaving_early_stops_a_producer_that_is_blocked(leave):
    source = Counted(target=2)
    with pytest.raises(leave), Prefetch(source, depth=2) as ready:
        assert next(ready) == 0
        assert source.reached.wait(PATIENCE_S)
        raise leave
    taken = source.taken

    assert not feed_threads()
    assert source.taken == taken <= 3


def test_a_generator_is_closed_in_its_thread():
    closed_in = []

    def source():
        try:
            yield from itertools.count()
        finally:
            closed_in.append(threading.current_thread().name)

    with Prefetch(source(), depth=1) as ready:
        next(ready)
    assert closed_in == ["onebox-feed"]


def test_close_may_be_called_again_and_ends_the_iteration():
    with Prefetch(itertools.count(), depth=2) as ready:
        next(ready)
        ready.close()
        ready.close()
        assert not feed_threads()
        with pytest.raises(UsageError, match="closed before its end"):
            next(ready)
    ready.close()


def test_items_that_close_dropped_are_not_passed_over_in_silence():
    with Prefetch(range(2), depth=5) as ready:
        for thread in feed_threads():
            thread.join(PATIENCE_S)  # then the whole source is ready
        ready.close()
        with pytest.raises(UsageError, match="closed before its end"):
            next(ready)


def test_a_consumer_that_waits_is_woken_by_close():
    release = threading.Event()
    errors = []

    def stuck():
        release.wait(PATIENCE_S)
        yield 1

    def consume(ready):
        try:
            next(ready)
        except UsageError as error:
            errors.append(error)

    with Prefetch(stuck()) as ready:
        consumer = threading.Thread(target=consume, args=[ready])
        consumer.start()
        closer = threading.Thread(target=ready.close)
        closer.start()
        consumer.join(PATIENCE_S)
        release.set()
        closer.join(PATIENCE_S)
    assert len(errors) == 1


def test_a_source_that_hangs_is_told_of(monkeypatch):
    monkeypatch.setattr(prefetch, "STOP_TIMEOUT_S", 0.05)
    release = threading.Event()

    def stuck():
        release.wait(PATIENCE_S)
        yield 1

    ready = Prefetch(stuck())
    with pytest.warns(RuntimeWarning, match=r"inside one item for 0\.05 s"), ready:
        pass
    release.set()
    monkeypatch.undo()
    ready.close()


def test_stages_nest():
    with (
        Prefetch(range(20), depth=2) as read,
        Prefetch((number * 2 for number in read), depth=2) as processed,
        Prefetch((number + 1 for number in processed), depth=2) as uploaded,
    ):
        assert len(feed_threads()) <= 3
        assert list(uploaded) == [number * 2 + 1 for number in range(20)]


def test_leaving_nested_stages_early_stops_all():
    with (
        Prefetch(itertools.count(), depth=2) as read,
        Prefetch((number * 2 for number in read), depth=2) as processed,
    ):
        assert next(processed) == 0


def test_use_outside_of_the_block():
    ready = Prefetch([1])
    with pytest.raises(UsageError, match="inside of its with block"):
        next(ready)
    ready.close()
    with pytest.raises(UsageError, match="entered once"), ready:
        pass
    with Prefetch([1]) as ready, pytest.raises(UsageError, match="entered once"), ready:
        pass


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_wrong_depth(depth):
    with pytest.raises(UsageError, match="depth is"):
        Prefetch([], depth=depth)
