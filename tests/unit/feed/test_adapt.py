"""Whatever data come in is a source or a stream: PyTorch's and torchdata's objects, iterables, and what is refused."""

import itertools
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from onebox.errors import DataError, UsageError
from onebox.feed.adapt import as_source
from onebox.feed.source import Source, Stream


class Counting(torch_data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise ValueError("not this one")
        return torch.tensor(index), index % 2


class Coming(torch_data.IterableDataset):
    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        assert torch_data.get_worker_info() is None
        return iter(range(self.epoch, self.epoch + 3))


def ints(stream, epoch=0, seed=0):
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in stream.begin(epoch, seed)]


# ---- data sets


@pytest.mark.feature("Data: Take data sets and loaders of PyTorch")
def test_a_data_set_is_read_by_number():
    source = as_source(Counting())

    assert isinstance(source, Source)
    assert len(source) == 20
    assert source.decode(source.read(7), 7) == (torch.tensor(7), 1)
    assert source.name(7) == "sample 7 of Counting"


def test_what_a_data_set_raises_names_the_sample():
    with pytest.raises(DataError, match="sample 13 of Counting cannot be read: ValueError: not this one") as raised:
        as_source(Counting()).read(13)
    assert raised.value.sample == 13
    assert isinstance(raised.value.__cause__, ValueError)


class Pictures(torch_data.Dataset):
    """Has what torchvision's data sets have."""

    def __init__(self, *names):
        self.samples = [(f"/data/{name}.jpg", 0) for name in names]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        raise OSError("cut off")


def test_a_file_is_named_where_the_data_set_tells():
    both = torch_data.ConcatDataset([Pictures("a", "b"), torch_data.Subset(Pictures("c", "d", "e"), [2, 0])])
    source = as_source(both)
    assert source.name(2) == "sample 2 of ConcatDataset (/data/e.jpg)"
    with pytest.raises(
        DataError, match=r"sample 1 of ConcatDataset \(/data/b.jpg\) cannot be read: OSError: cut off"
    ) as raised:
        source.read(1)
    assert (raised.value.path, raised.value.sample) == ("/data/b.jpg", 1)


@pytest.mark.parametrize("samples", [3, ["a"], [()], [(1, 2)], {"a": 1}])
def test_lists_that_mean_something_else_are_no_harm(samples):
    dataset = Counting()
    dataset.samples, dataset.cumulative_sizes, dataset.indices = samples, [3], [0]
    assert as_source(dataset).name(7) == "sample 7 of Counting"


def test_an_object_with_length_and_items_is_a_data_set():
    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index * 10

    assert as_source(Rows()).read(1) == 10


def test_a_data_set_without_length_is_refused():
    class Endless(torch_data.Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(UsageError, match=r"Endless does not say how long it is; give it __len__"):
        as_source(Endless())


def test_tensors_are_read_by_whole_batches():
    dataset = torch_data.TensorDataset(torch.arange(5), torch.arange(5) * 2)
    source = as_source(dataset)
    assert source.decode(source.read(3), 3) == dataset[3]
    inputs, targets = source.read_batch([4, 0])
    assert (inputs.tolist(), targets.tolist()) == ([4, 0], [8, 0])
    assert as_source(torch_data.TensorDataset(torch.arange(5))).read(3) == (torch.tensor(3),)


def test_sources_and_streams_are_taken_as_they_are():
    source = as_source(Counting())
    stream = as_source([1])
    assert as_source(source) is source
    assert as_source(stream) is stream


# ---- streams of PyTorch


def test_an_iterable_data_set_is_told_the_epoch_and_read_by_one_reader():
    stream = as_source(Coming())

    assert isinstance(stream, Stream)
    assert not stream.batched
    assert [ints(stream, epoch) for epoch in (0, 5)] == [[0, 1, 2], [5, 6, 7]]


def loader(**settings):
    return torch_data.DataLoader(torch_data.TensorDataset(torch.arange(50)), collate_fn=take, **settings)


def take(samples):
    return torch.stack([value for (value,) in samples])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_shuffling_loader_follows_from_seed_and_epoch(workers):
    first, second = (as_source(loader(batch_size=8, shuffle=True, num_workers=workers)) for _ in range(2))
    torch.manual_seed(1)
    order = ints(first, 3, 7)
    torch.manual_seed(2)

    assert first.batched
    assert sorted(itertools.chain(*order)) == list(range(50))
    assert ints(second, 3, 7) == order
    assert ints(second, 4, 7) != order
    assert ints(second, 3, 8) != order


def test_a_loader_is_as_it_was_afterwards():
    own = torch.Generator().manual_seed(4)
    shuffling = loader(batch_size=8, shuffle=True, generator=own)
    state = own.get_state()
    iterator = as_source(shuffling).begin(0, 0)
    next(iterator)
    iterator.close()

    assert shuffling.generator is own
    assert shuffling.sampler.generator is own
    assert torch.equal(own.get_state(), state)


def test_the_seed_of_a_users_generator_counts():
    one, other = (
        as_source(loader(batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(seed))) for seed in (1, 2)
    )
    assert ints(one) != ints(other)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    ints(as_source(loader(batch_size=8, shuffle=True)))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sampler_is_told_the_epoch():
    sampler = torch_data.distributed.DistributedSampler(range(50), num_replicas=2, rank=0, seed=1)
    stream = as_source(loader(batch_size=5, sampler=sampler))
    assert ints(stream, 0) == ints(stream, 0)
    assert ints(stream, 0) != ints(stream, 1)


def test_samplers_inside_samplers_are_seeded():
    inner = torch_data.WeightedRandomSampler([1.0] * 50, 20)
    stream = as_source(loader(batch_sampler=torch_data.BatchSampler(inner, 5, False)))
    assert ints(stream, 2, 1) == ints(stream, 2, 1)
    assert ints(stream, 2, 1) != ints(stream, 3, 1)


def test_a_loader_that_does_not_batch():
    stream = as_source(torch_data.DataLoader(Counting(), batch_size=None))
    assert not stream.batched


class Failing(torch_data.IterableDataset):
    def __iter__(self):
        yield 0
        yield 1
        raise ValueError("not this one")


def failing():
    return iter(Failing())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (Failing(), "sample 2 of Failing"),
        (torch_data.DataLoader(Counting(), batch_size=5), "batch 2 of DataLoader over Counting"),
        (failing, "batch 2 of failing"),
        (failing(), "batch 2 of Failing.__iter__"),
    ],
)
def test_what_a_stream_raises_names_the_item(what, said):
    iterator = as_source(what).begin(0, 0)
    next(iterator), next(iterator)
    with pytest.raises(DataError, match=f"{said} cannot be read: ValueError: not this one") as raised:
        next(iterator)
    assert raised.value.sample == 2
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_is_closed_early_closes_where_it_comes_from():
    def make():
        try:
            yield from range(3)
        finally:
            closed.append(True)

    closed = []
    iterator = as_source(make).begin(0, 0)
    next(iterator)
    assert not closed
    iterator.close()
    assert closed


# ---- iterables


def test_a_list_of_batches_begins_anew():
    stream = as_source([1, 2, 3])
    assert stream.batched
    assert ints(stream) == ints(stream, 1) == [1, 2, 3]


def test_an_iterable_of_samples():
    assert not as_source([1, 2, 3], batched=False).batched


def test_a_generator_has_one_epoch():
    def make():
        yield from (1, 2)

    stream = as_source(make())
    assert ints(stream) == [1, 2]
    for epoch in (0, 1):
        with pytest.raises(UsageError, match=rf"epoch {epoch} is asked of .*make, which .* only once; .* a callable"):
            stream.begin(epoch, 0)


def test_a_generator_has_no_second_epoch_in_a_resumed_run():
    with pytest.raises(UsageError, match="epoch 1 is asked of list_iterator"):
        as_source(iter([1])).begin(1, 0)


def test_a_callable_makes_each_epoch():
    def make(epoch, *, seed=3):
        order = list(range(5))
        random.Random(seed * 1000 + epoch).shuffle(order)
        return order

    stream = as_source(make)
    assert ints(stream, 1, 2) == make(1, seed=2)
    assert ints(as_source(lambda: (n for n in range(2))), 4) == [0, 1]


def test_a_callable_that_wants_more_is_refused():
    with pytest.raises(UsageError, match=r"make asks for path; .* given epoch and seed at most"):

        def make(path, epoch):
            return [path]

        as_source(make)


def test_a_callable_that_makes_nothing_to_iterate_over():
    def make():
        return 3

    with pytest.raises(UsageError, match="make gave a int; it has to give an iterable"):
        as_source(make).begin(0, 0)


@pytest.mark.parametrize(
    ("what", "came"),
    [
        (3, "a int"),
        (None, "a NoneType"),
        ({"x": 1}, "a dict"),
        (torch.zeros(3), "a Tensor"),
        (np.zeros(3), "a ndarray"),
        (Counting, "the class Counting, not an object of it"),
    ],
)
def test_what_is_no_data_is_refused(what, came):
    with pytest.raises(UsageError, match=f"Data came as {came}; allowed are"):
        as_source(what)


def test_tables_are_refused_as_they_are_iterable_by_columns():
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(
        UsageError, match=r"a pyarrow.lib.Table; give its columns as arrays, onebox.feed.sources.Arrays"
    ):
        as_source(pa.table({"x": [1]}))


@pytest.mark.parametrize("path", ["train.tar", Path("train.tar")])
def test_a_path_is_told_what_reads_files(path):
    with pytest.raises(UsageError, match=r"Data came as 'train.tar'; files are read by onebox.feed.sources, such as"):
        as_source(path)


@pytest.mark.parametrize("arrays", [(torch.zeros(4), torch.zeros(4)), [np.zeros(4), np.zeros(4)]])
def test_a_pair_of_arrays_is_told_what_to_do(arrays):
    with pytest.raises(UsageError, match=r"of 2 arrays is neither samples nor batches; .*Arrays"):
        as_source(arrays)


# ---- torchdata


@pytest.fixture
def nodes():
    return pytest.importorskip("torchdata.nodes")


def graph(nodes, threads=2):
    sampler = torch_data.RandomSampler(range(40))
    mapped = nodes.ParallelMapper(nodes.SamplerWrapper(sampler), lambda n: n * 2, num_workers=threads)
    return nodes.Prefetcher(nodes.Batcher(mapped, 8), prefetch_factor=2)


@pytest.mark.feature("Data: Take data sets of Hugging Face and graphs of torchdata")
def test_a_graph_of_nodes_follows_from_seed_and_epoch(nodes):
    first, second = as_source(graph(nodes)), as_source(nodes.Loader(graph(nodes)))

    order = ints(first, 2, 5)
    assert first.batched
    assert sorted(itertools.chain(*order)) == list(range(0, 80, 2))
    assert ints(second, 2, 5) == order
    assert ints(second, 3, 5) != order
    assert ints(second, 2, 5) == order


def test_no_thread_of_a_graph_is_left(nodes):
    before = set(threading.enumerate())
    iterator = as_source(graph(nodes)).begin(0, 0)
    next(iterator)
    assert set(threading.enumerate()) - before
    iterator.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert not set(threading.enumerate()) - before


def test_a_sampler_in_a_graph_is_told_the_epoch(nodes):
    def make():
        sampler = torch_data.distributed.DistributedSampler(range(40), num_replicas=2, rank=1)
        return as_source(nodes.SamplerWrapper(sampler), batched=False)

    gone_through = make()
    orders = [ints(gone_through, epoch) for epoch in range(3)]
    assert not gone_through.batched
    assert ints(make(), 2) == orders[2]
    assert orders[0] != orders[1] != orders[2]


def test_several_weighted_sources_go_on_where_an_epoch_would_be(nodes):
    def make():
        sources = {name: nodes.IterableWrapper([name * 2] * 30) for name in "ab"}
        return as_source(nodes.MultiNodeWeightedSampler(sources, {"a": 1.0, "b": 2.0}, "FIRST_DATASET_EXHAUSTED"))

    gone_through = make()
    orders = [ints(gone_through, epoch) for epoch in range(3)]
    assert ints(make(), 2) == orders[2]
    assert orders[1] != orders[2]


def test_streams_say_how_long_they_are_where_they_know():
    assert len(as_source([1, 2, 3])) == 3
    assert len(as_source(loader(batch_size=8))) == 7
    for endless in (Coming(), torch_data.DataLoader(Coming())):
        with pytest.raises(TypeError, match="does not say how long it is"):
            len(as_source(endless))
