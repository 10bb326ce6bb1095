"""Stages of threads: order, bounds, errors and ends, and no thread left behind. Nothing here is timed."""

from __future__ import annotations

import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.errors import DataError, PlanError, UsageError
from onebox.feed.pipeline import runner as pipeline_module
from onebox.feed.pipeline.runner import Pipeline, StageSpec

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not feed_threads()


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("onebox-feed")]


def same(item: Any) -> Any:
    return item


def stages(*concurrencies: int, work: Callable[[Any], Any] = same, **options: Any) -> list[StageSpec]:
    return [StageSpec(f"stage {number}", work, count, **options) for number, count in enumerate(concurrencies)]


class Counted:
    """0, 1, 2 …; counts what was taken, and says when ``target`` items were."""

    def __init__(self, target: int) -> None:
        self.taken = 0
        self._target = target
        self.reached = threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.taken += 1
        if self.taken == self._target:
            self.reached.set()
        return self.taken - 1


@pytest.mark.parametrize("concurrencies", [(1,), (1, 1, 1), (4,), (2, 5, 3)])
def test_results_come_in_the_order_of_the_items(concurrencies):
    turn = itertools.count()

    def work(item):
        if next(turn) % 3 == 0:
            threading.Event().wait(0.001)  # so that others overtake it
        return item + 1

    with Pipeline(range(200), stages(*concurrencies, work=work)) as ready:
        assert list(ready) == [number + len(concurrencies) for number in range(200)]
        assert list(ready) == []


def test_one_that_is_never_entered_starts_nothing():
    source = Counted(target=1)
    ready = Pipeline(source, stages(1, 1))
    assert not feed_threads()
    assert source.taken == 0
    ready.close()
    with pytest.raises(UsageError, match="entered once"), ready:
        pass


def test_as_many_are_at_work_at_once_as_the_concurrency_says():
    together = threading.Barrier(3)

    def work(item):
        together.wait(PATIENCE_S)  # nobody leaves before the third has come
        return item

    with Pipeline(range(6), stages(3, work=work)) as ready:
        assert list(ready) == list(range(6))


def test_stages_work_at_the_same_time():
    met = threading.Barrier(2)

    def meeting(when):
        def work(item):
            if item == when:
                met.wait(PATIENCE_S)
            return item

        return work

    with Pipeline(range(2), [StageSpec("read", meeting(1)), StageSpec("process", meeting(0))]) as ready:
        assert list(ready) == [0, 1]


@pytest.mark.parametrize(("concurrencies", "ahead"), [((1,), 1), ((1, 1), 2), ((2, 3, 1), 4)])
def test_a_consumer_that_stalls_stops_the_reading(concurrencies, ahead):
    most = sum(count + 1 for count in concurrencies) + ahead
    source = Counted(target=most)
    with Pipeline(source, stages(*concurrencies), ahead=ahead) as ready:
        assert source.reached.wait(PATIENCE_S)
        for number, item in enumerate(itertools.islice(ready, 50)):
            assert item == number
            assert source.taken <= number + 1 + most


def test_memory_is_bounded_when_the_consumer_stalls():
    source = Counted(target=6)
    with Pipeline(source, stages(1, work=lambda item: bytes(100)), ahead=50, limit_bytes=650) as ready:
        next(ready)
        assert source.reached.wait(PATIENCE_S)
        while ready.counters()[0].blocked_s == 0.0 or ready.counters()[0].items < 7:
            threading.Event().wait(0.001)
        assert source.taken == 7  # that which was taken, and six of 100 bytes
        assert [len(next(ready)) for _ in range(20)] == [100] * 20


def test_a_batch_that_is_larger_than_the_limit_goes_through():
    with Pipeline(range(10), stages(1, 2, work=lambda item: bytes(1000)), limit_bytes=1) as ready:
        assert len(list(ready)) == 10


def test_a_batch_is_gone_when_the_consumer_drops_it():
    class Batch:
        pass

    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def make(item):
        batch = Batch()
        alive.add(batch)
        return batch

    with Pipeline(range(3), [StageSpec("read", make), StageSpec("process", same)]) as ready:
        for batch in ready:
            del batch
        assert len(alive) == 0


# ---- errors


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_error_comes_in_its_place_and_names_the_stage(concurrency):
    def broken(item):
        if item == 5:
            raise KeyError("label")
        return item

    with Pipeline(range(10), [StageSpec("read", same), StageSpec("process", broken, concurrency)]) as ready:
        assert [next(ready) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match=r"^process failed at item 5: KeyError: 'label'$") as raised:
            next(ready)
        assert raised.value.sample == 5
        assert isinstance(raised.value.__cause__, KeyError)
        assert "broken" in [frame.name for frame in traceback.extract_tb(raised.value.__cause__.__traceback__)]
        assert list(ready) == []
        assert not feed_threads()


def test_an_item_is_called_what_it_calls_itself():
    items = [SimpleNamespace(number=number) for number in range(40, 50)]

    def broken(item):
        if item.number == 42:
            raise ValueError("no")
        return item

    with Pipeline(items, [StageSpec("read", same), StageSpec("process", broken)]) as ready:
        assert [next(ready).number, next(ready).number] == [40, 41]
        with pytest.raises(DataError, match="process failed at item 42: ValueError: no"):
            next(ready)


def test_a_result_that_cannot_say_its_size_is_an_error():
    class Odd:
        @property
        def nbytes(self):
            raise ValueError("who knows")

    with Pipeline([1], [StageSpec("read", lambda item: Odd())]) as ready, pytest.raises(DataError, match="who knows"):
        next(ready)


def test_an_error_that_says_all_is_kept():
    original = PlanError("as it is", stage=3)

    def broken(item):
        raise original

    with Pipeline([7], [StageSpec("upload", broken)]) as ready:
        with pytest.raises(PlanError, match="as it is") as raised:
            next(ready)
        assert str(raised.value) == "as it is"
        assert raised.value is original
        assert raised.value.__notes__ == ["upload failed at item 0"]


def test_an_error_of_the_items_comes_after_those_before_it():
    def items():
        yield 1
        raise OSError("no such folder")

    with Pipeline(items(), stages(2, 1)) as ready:
        assert next(ready) == 1
        with pytest.raises(DataError, match="stage 0 failed at item 1: OSError: no such folder"):
            next(ready)


def test_items_that_cannot_be_iterated_over():
    class Broken:
        def __iter__(self):
            raise OSError("no such folder")

    with Pipeline(Broken(), stages(2)) as ready, pytest.raises(DataError, match="no such folder"):
        next(ready)


def test_stop_iteration_in_work_is_an_error_and_no_end():
    def broken(item):
        raise StopIteration

    with Pipeline([1], [StageSpec("read", broken)]) as ready, pytest.raises(DataError, match="read failed at item 0"):
        next(ready)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_error_is_passed_on_as_it_is(error):
    def leave(item):
        raise error

    with Pipeline([1], [StageSpec("read", leave)]) as ready, pytest.raises(error):
        next(ready)


def test_work_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(pipeline_module, "STOP_S", 0.05)
    release = threading.Event()

    def read(item):
        if item == 3:
            release.wait(PATIENCE_S)
        return item

    specs = [StageSpec("read", read, 2, timeout_s=0.2), StageSpec("process", same)]
    stuck = pytest.warns(RuntimeWarning, match=r"onebox-feed-read has been inside one item for 0\.05 s")
    with stuck, Pipeline(range(10), specs) as ready:
        assert [next(ready) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(DataError, match=r"^read has been inside item 3 for 0\.2 s: ") as raised:
            next(ready)
        assert raised.value.sample == 3
        assert list(ready) == []
        release.set()
        for thread in feed_threads():
            thread.join(PATIENCE_S)


def test_items_that_do_not_come_are_named():
    release = threading.Event()

    def items():
        yield 0
        release.wait(PATIENCE_S)

    with Pipeline(items(), [StageSpec("read", same, timeout_s=0.2), StageSpec("process", same)]) as ready:
        assert next(ready) == 0
        threading.Timer(1.0, release.set).start()  # so that the thread is there no longer than that
        with pytest.raises(DataError, match=r"read has been inside item 1 for 0\.2 s"):
            next(ready)


# ---- ends


@pytest.mark.parametrize("leave", [RuntimeError, KeyboardInterrupt])
def test_leaving_early_ends_stages_that_are_blocked(leave):
    source = Counted(target=4)
    with pytest.raises(leave), Pipeline(source, stages(2, 2)) as ready:
        assert next(ready) == 0
        assert source.reached.wait(PATIENCE_S)
        raise leave
    assert not feed_threads()


def test_a_generator_is_closed_by_its_thread():
    seen: list[threading.Thread] = []

    def items():
        try:
            for number in itertools.count():
                seen.append(threading.current_thread())
                yield number
        finally:
            seen.append(threading.current_thread())

    with Pipeline(items(), stages(1, 3)) as ready:
        next(ready)
    assert set(seen) == {seen[0]}
    assert seen[0].name == "onebox-feed-stage 0"
    assert seen[0].daemon


def test_a_generator_that_several_threads_advance_is_closed_once_all_have_left():
    closed: list[int] = []

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.append(1)

    with Pipeline(items(), stages(4)) as ready:
        assert [next(ready) for _ in range(50)] == list(range(50))
    assert closed == [1]


def test_closing_ends_the_iteration_and_may_be_repeated():
    with Pipeline(itertools.count(), stages(1)) as ready:
        next(ready)
        ready.close()
        ready.close()
        assert not feed_threads()
        with pytest.raises(UsageError, match="closed before its end"):
            next(ready)


def test_a_consumer_that_waits_is_woken_by_close():
    release, begun = threading.Event(), threading.Event()
    errors: list[UsageError] = []

    def stuck(item):
        begun.set()
        release.wait(PATIENCE_S)

    def consume(ready):
        try:
            next(ready)
        except UsageError as error:
            errors.append(error)

    with Pipeline([1], [StageSpec("read", stuck)]) as ready:
        consumer = threading.Thread(target=consume, args=[ready])
        consumer.start()
        assert begun.wait(PATIENCE_S)
        closer = threading.Thread(target=ready.close)
        closer.start()
        consumer.join(PATIENCE_S)
        release.set()
        closer.join(PATIENCE_S)
    assert len(errors) == 1


def test_use_outside_of_the_block():
    ready = Pipeline([1], stages(1))
    with pytest.raises(UsageError, match="inside of its with block"):
        next(ready)
    with ready, pytest.raises(UsageError, match="entered once"), ready:
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pipeline([], []), "one at least"),
        (lambda: Pipeline([], [*stages(1), *stages(1)]), "a name of its own"),
        (lambda: Pipeline([], stages(1), ahead=0), "ahead is 0"),
        (lambda: Pipeline([], stages(1), limit_bytes=0), "limit_bytes is 0"),
        (lambda: Pipeline([], stages(1), cores=0), "cores is 0"),
        (lambda: StageSpec("read", same, 0), "concurrency of read is 0"),
        (lambda: StageSpec("compute", same), "'compute'"),
        (lambda: StageSpec("read", same, by="magic"), "'magic'"),  # type: ignore[arg-type]
        (lambda: StageSpec("read", same, timeout_s=0.0), "above 0"),
    ],
)
def test_what_is_not_allowed(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# ---- counters


def test_counters_say_who_worked_and_who_waited():
    with Pipeline(range(20), [StageSpec("read", lambda item: bytes(10)), StageSpec("process", len)]) as ready:
        assert [each.items for each in ready.counters()][2] == 0
        assert list(ready) == [10] * 20
        read, process, compute = ready.counters()
    assert [each.name for each in (read, process, compute)] == ["read", "process", "compute"]
    assert [each.items for each in (read, process, compute)] == [20, 20, 20]
    assert (read.bytes, process.bytes) == (200, 0)
    assert (read.concurrency, process.concurrency) == (1, 1)
    for each in (read, process, compute):
        assert each.busy_s > 0.0
        assert each.busy_s + each.waiting_s + each.blocked_s > 0.0


def test_auto_gives_a_slow_stage_more_workers(monkeypatch):
    monkeypatch.setattr(pipeline_module, "WINDOW_S", 0.0)

    def slow(item):
        threading.Event().wait(0.004)
        return item

    specs = [StageSpec("read", same, "auto"), StageSpec("process", slow, "auto")]
    with Pipeline(range(60), specs, cores=4) as ready:
        assert [each.concurrency for each in ready.counters()] == [1, 1, 1]
        seen = [(item, ready.counters()[1].concurrency) for item in ready]
    assert [item for item, _ in seen] == list(range(60))
    assert seen[0][1] == 1
    assert max(count for _, count in seen) > 1


def test_workers_come_and_go_and_one_is_always_left(monkeypatch):
    monkeypatch.setattr(pipeline_module, "WINDOW_S", 0.0)
    monkeypatch.setattr(pipeline_module, "WINDOW_ITEMS", 2)
    counts = itertools.chain([8, 1, 8, 1, 8], itertools.repeat(1))
    monkeypatch.setattr(
        pipeline_module, "choose_concurrency", lambda *_: dict.fromkeys(["read", "process"], next(counts))
    )
    with Pipeline(range(300), [StageSpec("read", same, "auto"), StageSpec("process", same, "auto")]) as ready:
        assert list(ready) == list(range(300))
        for thread in feed_threads():
            thread.join(PATIENCE_S)
        assert ready.counters()[0].items == 300


def test_a_worker_may_close_the_pipeline_that_it_works_for():
    ready = Pipeline(itertools.count(), [StageSpec("read", lambda item: ready.close())])
    with ready:
        for thread in feed_threads():
            thread.join(PATIENCE_S)
        with pytest.raises(UsageError, match="closed before its end"):
            list(ready)
