"""Data sets of Hugging Face's library, with the real one: columns, pictures, formats, streams."""

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from onebox.errors import DataError, UsageError
from onebox.feed.adapt import as_source
from onebox.feed.source import Source, Stream
from onebox.feed.sources import HuggingFace, HuggingFaceStream

datasets = pytest.importorskip("datasets")

tqdm = pytest.importorskip("tqdm")

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)


@pytest.fixture(autouse=True, scope="module")
def no_monitor():
    """Let no thread stay behind that looks after progress bars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm.tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module")
def pictures():
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "emu"])}
    rows = {"image": [Image.fromarray(pixels) for pixels in PIXELS], "label": [n % 3 for n in range(9)]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def samples(source):
    return [source.decode(source.read(index), index) for index in range(len(source))]


def is_right(found):
    return all(
        np.array_equal(image.permute(1, 2, 0).numpy(), pixels) and image.dtype == torch.uint8 and label.item() == n % 3
        for n, ((image, label), pixels) in enumerate(zip(found, PIXELS, strict=True))
    )


@pytest.mark.feature("Data: Take data sets of Hugging Face and graphs of torchdata")
def test_pictures_and_labels(pictures):
    source = as_source(pictures)

    assert isinstance(source, HuggingFace)
    assert isinstance(source, Source)
    assert source.classes == ("cat", "dog", "emu")
    assert source.labels.tolist() == [0, 1, 2] * 3
    assert source.name(4) == "datasets.Dataset: row 4"
    assert isinstance(source.read(0)["image"]["bytes"], bytes)  # decoding is another stage's
    assert is_right(samples(source))


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_formats_of_tensors_and_arrays(pictures, form):
    found = samples(as_source(pictures.with_format(form)))
    if form == "numpy":
        found = [(image.permute(2, 0, 1), label) for image, label in found]
    assert is_right(found)


def test_a_transform_of_the_users(pictures):
    def half(rows):
        return {"pixels": [np.asarray(image)[::2] for image in rows["image"]], "label": rows["label"]}

    image, label = samples(as_source(pictures.with_transform(half)))[5]
    assert torch.equal(image, torch.from_numpy(PIXELS[5][::2]))
    assert label.item() == 2


def test_chosen_columns():
    table = datasets.Dataset.from_dict({"a": [[1.5, 2.0], [3.0, 4.0]], "b": ["x", "y"], "c": [1, 2]})
    assert samples(as_source(table))[1]["b"] == "y"
    inputs, target = samples(HuggingFace(table, inputs="a", targets="c"))[1]
    assert (inputs.tolist(), target.item()) == ([3.0, 4.0], 2)
    (first, text) = samples(HuggingFace(table, inputs=("a", "b")))[0]
    assert (first.tolist(), text) == ([1.5, 2.0], "x")
    with pytest.raises(UsageError, match="rows have no classes"):
        HuggingFace(table, inputs="c", targets="b").labels  # noqa: B018
    with pytest.raises(UsageError, match=r"datasets.Dataset has no column 'z'; there are a, b, c"):
        HuggingFace(table, inputs="z")


def test_a_format_that_is_not_understood(pictures):
    with pytest.raises(UsageError, match=r"has the format 'pandas'; say with_format\('torch'\)"):
        as_source(pictures.with_format("pandas"))


def test_several_splits_are_too_many(pictures):
    with pytest.raises(UsageError, match="Data came as a DatasetDict; take one of its splits: train, test"):
        as_source(datasets.DatasetDict(train=pictures, test=pictures))


def test_an_empty_data_set():
    with pytest.raises(DataError, match="has no rows"):
        as_source(datasets.Dataset.from_dict({"a": []}))


def test_a_damaged_picture_is_named(pictures):
    stream = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(stream, "JPEG")
    rows = {"image": [{"bytes": stream.getvalue()[:-100], "path": None}], "label": [0]}
    source = as_source(datasets.Dataset.from_dict(rows, features=pictures.features))
    with pytest.raises(DataError, match=r"datasets.Dataset: row 0, column 'image' is a damaged picture") as raised:
        samples(source)
    assert raised.value.sample == 0


def test_pictures_beside_the_table(tmp_path, pictures):
    Image.fromarray(PIXELS[0]).save(tmp_path / "0.png")
    paths = {"image": [str(tmp_path / "0.png"), str(tmp_path / "1.png")], "label": [0, 1]}
    source = as_source(datasets.Dataset.from_dict(paths, features=pictures.features))
    assert torch.equal(source.decode(source.read(0), 0)[0], torch.from_numpy(PIXELS[0]).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"1.png cannot be read .* put it there"):
        source.decode(source.read(1), 1)


def test_what_a_transform_raises_names_the_row(pictures):
    def refuse(rows):
        if len(calls) == 1:
            raise KeyError("no")
        calls.append(1)
        return rows

    calls = []
    source = as_source(pictures.with_transform(refuse))
    with pytest.raises(DataError, match=r"datasets.Dataset: row 2 cannot be read: KeyError: 'no'"):
        source.read(2)


def test_threads_read_the_same(pictures):
    source = as_source(pictures)
    with ThreadPoolExecutor(8) as threads:
        assert all(is_right(found) for found in threads.map(lambda _: samples(source), range(16)))


# ---- streams


@pytest.mark.feature("Data: Take data sets of Hugging Face and graphs of torchdata")
def test_a_stream_of_rows(pictures):
    stream = as_source(pictures.to_iterable_dataset())

    assert isinstance(stream, HuggingFaceStream)
    assert isinstance(stream, Stream)
    assert not stream.batched
    assert is_right(list(stream.begin(0, 0)))
    assert is_right(list(stream.begin(1, 0)))


def test_a_stream_that_shuffles_follows_from_its_seed_and_the_epoch(pictures):
    def make():
        return as_source(pictures.to_iterable_dataset().shuffle(seed=3, buffer_size=9))

    def order(stream, epoch):
        return [int(image.sum()) for image, _ in stream.begin(epoch, 0)]

    gone_through = make()
    orders = [order(gone_through, epoch) for epoch in range(3)]
    assert orders[1] != orders[2]
    assert order(make(), 2) == orders[2]


def test_a_stream_whose_columns_are_not_known():
    def make():
        yield {"x": 1.0, "label": 3}

    stream = as_source(datasets.IterableDataset.from_generator(make))
    ((x, label),) = stream.begin(0, 0)
    assert (x.item(), label.item()) == (1.0, 3)


# ---- who does not use it


def test_nothing_of_it_is_imported_by_ours():
    names = ["datasets", "torchdata", "pyarrow", "torchvision"]
    code = f"import sys, onebox.feed.adapt, onebox.feed.sources; print([m for m in {names} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.strip() == "[]"
