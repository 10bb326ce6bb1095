"""Sources by a short text, as on the command line."""

import numpy as np
import pytest

from onebox.errors import DataError, UsageError
from onebox.feed.decode import ImageDecoder
from onebox.feed.sources import open_source


def labels(source):
    return [source.decode(source.read(index), index)[1].item() for index in range(len(source))]


def picture(folder, jpeg, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg())


@pytest.mark.parametrize("part", ["val", "test", "validation"])
def test_folders_of_parts(tmp_path, jpeg, part):
    picture(tmp_path, jpeg, "train/cat/1.jpg", "train/dog/1.jpg", f"{part}/dog/1.jpg")
    train, test = open_source(f"folder:{tmp_path}", decoder=ImageDecoder(size=(2, 3)))
    assert (labels(train), labels(test)) == ([0, 1], [1])
    assert test.decode(test.read(0), 0)[0].shape == (3, 2, 3)


def test_parts_with_labels_come_first(tmp_path, jpeg):
    picture(tmp_path, jpeg, "train/cat/1.jpg", "train/dog/1.jpg", "val/dog/1.jpg", "test/unknown/1.jpg")
    assert labels(open_source(f"folder:{tmp_path}")[1]) == [1]


def test_a_folder_of_classes(tmp_path, jpeg):
    picture(tmp_path, jpeg, "cat/1.jpg", "dog/1.jpg")
    train, test = open_source(f"folder:{tmp_path}")
    assert (labels(train), test) == ([0, 1], None)


def test_archives(tmp_path, write_tar, jpeg):
    write_tar(tmp_path / "train-0.tar", [("cat/1.jpg", jpeg())])
    write_tar(tmp_path / "train-1.tar", [("dog/1.jpg", jpeg())])
    write_tar(tmp_path / "a-test.tar", [("dog/1.jpg", jpeg())])
    for place in (f"{tmp_path}/train-{{0,1}}.tar,{tmp_path}/a-test.tar", tmp_path):
        train, test = open_source(f"tar:{place}")
        assert (labels(train), labels(test)) == ([0, 1], [1])
    assert open_source(f"tar:{tmp_path}/train-*.tar")[1] is None


def test_classes_that_are_only_numbers(tmp_path, write_tar, jpeg):
    members = [("1.jpg", jpeg()), ("1.cls", b"2"), ("2.jpg", jpeg()), ("2.cls", b"?"), ("3.jpg", jpeg())]
    train, _ = open_source(f"tar:{write_tar(tmp_path / 'a.tar', members)}")
    assert train.classes == ("0", "1", "2")
    assert train.labels.tolist() == [2, -1, -1]  # what is broken is so when it is read, too


def test_tables(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    for name, values in (("train-00000-of-00002", [0, 1]), ("train-00001-of-00002", [2]), ("test-00000-of-00001", [7])):
        parquet.write_table(pa.table({"x": values, "label": values}), tmp_path / "data" / f"{name}.parquet")
    train, test = open_source(f"parquet:{tmp_path}")
    assert (labels(train), labels(test)) == ([0, 1, 2], [7])
    assert (train.classes, train.labels.tolist()) == (("0", "1", "2"), [0, 1, 2])
    train, test = open_source(f"parquet:{tmp_path}/data/train-00001-of-00002.parquet")
    assert (labels(train), test) == ([2], None)


@pytest.mark.parametrize("ending", (".arrow", ".feather", ".ipc"))
def test_a_folder_of_arrow_files(tmp_path, ending):
    pa = pytest.importorskip("pyarrow")
    for name, value in (("train", 3), ("test", 7)):
        table = pa.table({"x": [value], "label": [value]})
        with pa.OSFile(str(tmp_path / f"{name}{ending}"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    train, test = open_source(f"parquet:{tmp_path}")
    assert (labels(train), labels(test)) == ([3], [7])


def test_arrays(tmp_path):
    arrays = {"x_train": np.zeros(3), "y_train": np.arange(3), "x_test": np.zeros(2), "y_test": np.arange(2)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "all.npz", **arrays)
    every = ",".join(f"{tmp_path}/{name}.npy" for name in arrays)
    for place in (tmp_path, tmp_path / "all.npz", every):
        train, test = open_source(f"npy:{place}")
        assert (labels(train), labels(test)) == ([0, 1, 2], [0, 1])
        assert (train.classes, test.classes) == (("0", "1", "2"),) * 2
    (tmp_path / "x_test.npy").unlink()
    (tmp_path / "y_test.npy").unlink()
    assert open_source(f"npy:{tmp_path}")[1] is None


def test_real_images(shared_data):
    train, test = open_source(f"mnist:{shared_data}")
    assert (len(train), len(test)) == (8000, 2000)
    assert test.name(0) == "t10k-images-idx3-ubyte: 8000"
    train, test = open_source(f"cifar10:{shared_data}")
    assert (len(train), len(test), train.classes) == (20_000, 4000, test.classes)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("imagenet", r"Data 'imagenet' are not known; allowed are folder:\.\.\., tar:"),
        ("folder", "need the place of their files: folder:PATH"),
        ("npy:a.npy", r"names 1 files; allowed are npy:X,Y or"),
        ("tar:a,b,c", r"names 3 patterns; allowed are tar:TRAIN or tar:TRAIN,TEST"),
        ("tar:a,", "names 2 patterns"),
    ],
)
def test_what_is_not_understood(spec, said):
    with pytest.raises(UsageError, match=said):
        open_source(spec)


def test_what_is_not_there(tmp_path, write_tar, jpeg):
    for kind in ("folder", "mnist", "cifar10"):
        with pytest.raises(DataError, match=f"none is not a folder; {kind}:PATH names"):
            open_source(f"{kind}:{tmp_path}/none")
    with pytest.raises(DataError, match=r"has no files that end in \.tar"):
        open_source(f"tar:{tmp_path}")
    write_tar(tmp_path / "test.tar", [("dog/1.jpg", jpeg())])
    with pytest.raises(DataError, match=r"has test\.tar, and no train\*\.tar to train on"):
        open_source(f"tar:{tmp_path}")
