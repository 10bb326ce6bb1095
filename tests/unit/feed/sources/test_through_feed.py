"""Sources at work in a feed: the same batches by threads and processes, resumed anywhere, and broken data left out."""

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from onebox.errors import DataError
from onebox.feed import Feed
from onebox.feed.sources import Arrays, ImageFolder, NumpyFiles, Parquet, Tars, Tokens

pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
nodes, datasets = pytest.importorskip("torchdata.nodes"), pytest.importorskip("datasets")


def write_everything(folder, write_tar, jpeg):
    """Twenty samples of each kind."""
    pictures = [jpeg((n * 10, n * 10, n * 10)) for n in range(20)]
    for number, picture in enumerate(pictures):
        path = folder / "pictures" / f"class{number % 2}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
    write_tar(folder / "a.tar", [(f"class{n % 2}/{n}.jpg", picture) for n, picture in enumerate(pictures)])
    table = pa.table({"image": pictures, "label": np.arange(20)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=3)
    np.save(folder / "x.npy", np.arange(20.0))
    np.save(folder / "y.npy", np.arange(20))
    np.arange(101, dtype=np.uint16).tofile(folder / "a.bin")


SOURCES = {
    "folder": lambda folder: ImageFolder(folder / "pictures"),
    "tar": lambda folder: Tars(folder / "a.tar"),
    "parquet": lambda folder: Parquet(folder / "a.parquet", cache_bytes=1000),
    "npy": lambda folder: NumpyFiles(folder / "x.npy", folder / "y.npy"),
    "tokens": lambda folder: Tokens(folder / "a.bin", length=5),
    "arrays": lambda folder: Arrays(torch.arange(20.0), torch.arange(20)),
    "datasets": lambda folder: datasets.Dataset.from_dict({"x": list(range(20)), "label": [0, 1] * 10}),
}


@pytest.fixture
def folder(tmp_path, write_tar, jpeg):
    write_everything(tmp_path, write_tar, jpeg)
    return tmp_path


def gone_through(feed, epoch=1, start=None):
    with feed.epoch(epoch, start=start) as batches:
        return [(inputs.tolist(), targets.tolist()) for inputs, targets in batches]


@pytest.mark.feature("Feed: Prepare by threads or processes with repeatable transforms")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_batches_are_the_same_whoever_makes_them(folder, kind):
    def feed(**settings):
        return Feed(SOURCES[kind](folder), batch_size=3, seed=5, **settings)

    expected = gone_through(feed(read=1, process=1, process_by="threads"))
    assert sum(len(targets) for _, targets in expected) == 20
    assert gone_through(feed(read=4, process=3, process_by="threads")) == expected
    assert gone_through(feed(read=2, process=2, process_by="processes")) == expected
    assert gone_through(feed(read=2, process=1), start=4) == expected[4:]


def samples(numbers):
    return torch_data.TensorDataset(torch.tensor(numbers), torch.tensor(numbers) * 2)


STREAMS = {
    "loader": lambda: torch_data.DataLoader(samples(range(20)), batch_size=3, shuffle=True),
    "nodes": lambda: nodes.ParallelMapper(
        nodes.Batcher(nodes.SamplerWrapper(torch_data.RandomSampler(range(20))), 3, drop_last=False),
        lambda batch: (torch.tensor(batch), torch.tensor(batch) * 2),
        num_workers=2,
    ),
    "callable": lambda: lambda epoch, seed: ((torch.tensor([n + epoch]), torch.tensor([seed])) for n in range(7)),
    "list": lambda: [(torch.tensor([n]), torch.tensor([n])) for n in range(7)],
}


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_where_they_were(kind):
    expected = gone_through(Feed(STREAMS[kind](), seed=5))
    assert len(expected) == 7
    assert gone_through(Feed(STREAMS[kind](), seed=5), start=4) == expected[4:]


@pytest.mark.feature("Feed: Name or skip broken samples")
def test_a_broken_picture_is_named_or_left_out(folder):
    broken = folder / "pictures" / "class0" / "04.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    (folder / "pictures" / "class1" / "05.jpg").unlink()
    (folder / "pictures" / "class1" / "05.jpg").symlink_to("/nowhere")
    source = ImageFolder(folder / "pictures")

    with pytest.raises(DataError, match=r"class0/04\.jpg is a damaged picture|05\.jpg cannot be read"):
        gone_through(Feed(source, batch_size=3))
    feed = Feed(source, batch_size=3, on_error="skip")
    assert sum(len(targets) for _, targets in gone_through(feed)) == 18
    assert {(one.name, one.stage) for one in feed.skipped.first} == {
        ("pictures/class0/04.jpg", "decode"),
        ("pictures/class1/05.jpg", "read"),
    }
