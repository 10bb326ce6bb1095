"""Splits and data sets check what they are given, digits are what they should be, and names are looked up."""

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from onebox.errors import DataError, UsageError
from onebox.feed import DataSet, Split, load_dataset

ROOT = Path(__file__).parents[4]

DIGITS_SHA256 = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
"""Of what ``sklearn.datasets.load_digits`` 1.9.1 gives, as bytes: rows of 64 levels and the digit."""

SPLITS_SHA256 = "65b0c19063621139d7dc004a7f2037dcfa0af510a25190f3c8f5d6c2198404a7"
"""Of images and labels to train on and to test on, which every published figure on digits rests on."""


def make_split(count: int = 4, *, channels: int = 1, side: int = 2) -> Split:
    images = torch.arange(count * channels * side * side, dtype=torch.uint8).view(count, channels, side, side)
    return Split(images=images, labels=torch.arange(count))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (torch.zeros(2, 1, 2, 2), torch.zeros(2).long(), r"images are float32 \[2, 1, 2, 2\]"),
        (torch.zeros(2, 2, 2).byte(), torch.zeros(2).long(), r"images are uint8 \[2, 2, 2\]"),
        (torch.zeros(0, 1, 2, 2).byte(), torch.zeros(0).long(), r"images are uint8 \[0, 1, 2, 2\]"),
        (torch.zeros(2, 1, 2, 2).byte(), torch.zeros(2), r"labels are float32 \[2\]"),
        (torch.zeros(2, 1, 2, 2).byte(), torch.zeros(3).long(), r"labels are int64 \[3\]"),
    ],
)
def test_split_refuses(images, labels, said):
    with pytest.raises(UsageError, match=said):
        Split(images=images, labels=labels)


def test_a_split_is_a_source_and_gives_batches_as_collating_would():
    split = make_split(5)
    one_by_one = default_collate([split.decode(split.read(index), index) for index in (3, 0, 4)])

    images, labels = split.read_batch((3, 0, 4))

    assert torch.equal(images, one_by_one[0]) and torch.equal(labels, one_by_one[1])
    assert (images.dtype, labels.dtype) == (one_by_one[0].dtype, one_by_one[1].dtype)
    images.fill_(9)
    assert split.images[0].max() < 9  # a copy
    assert split.name(3) == "in memory: 3"


def test_an_example_is_the_first_samples_to_train_on():
    data = DataSet(name="x", classes=4, train=make_split(), test=make_split())
    images, labels = data.example(3)

    assert (data.shape, labels.tolist(), len(images)) == ((1, 2, 2), [0, 1, 2], 3)
    assert len(data.example(99)[1]) == 4


def test_data_set_refuses_labels_and_shapes():
    with pytest.raises(UsageError, match="labels go from 0 to 3; allowed are 0 to 2"):
        DataSet(name="x", classes=3, train=make_split(), test=make_split())
    with pytest.raises(UsageError, match="C, H and W have to agree"):
        DataSet(name="x", classes=4, train=make_split(), test=make_split(side=3))


def test_statistics_are_those_of_the_training_images():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 3, 4, 4), dtype=torch.uint8, generator=generator)
    train = Split(images=images, labels=torch.zeros(50, dtype=torch.int64))
    data = DataSet(name="x", classes=4, train=train, test=make_split(channels=3, side=4))

    scaled = images.double() / 255
    assert data.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), rel=1e-12)
    assert data.std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist(), rel=1e-12)


def test_constant_channel_has_a_std_of_one():
    images = torch.full((2, 1, 2, 2), 51, dtype=torch.uint8)
    split = Split(images=images, labels=torch.zeros(2, dtype=torch.int64))
    data = DataSet(name="x", classes=1, train=split, test=split)

    assert data.mean == pytest.approx((0.2,))
    assert data.std == (1.0,)


def test_data_sets_are_frozen():
    with pytest.raises(AttributeError):
        make_split().images = torch.zeros(1)


def test_digits_are_all_there_once():
    data = load_dataset("digits")
    images = torch.cat([data.train.images, data.test.images])
    labels = torch.cat([data.train.labels, data.test.labels])

    assert data.classes == 10
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 255)
    levels = (images.flatten(1).double() / 15.9375).round().byte()
    table = np.loadtxt(resources.files("onebox.feed") / "data" / "digits.csv.gz", delimiter=",")
    assert sorted(torch.column_stack([levels, labels.byte()]).tolist()) == sorted(table.tolist())


@pytest.mark.parametrize("path", ["src/onebox/feed/data/digits.csv.gz", "examples/digits.csv.gz"])
def test_the_file_of_digits_has_what_scikit_learn_gives(path: str) -> None:
    table = np.loadtxt(ROOT / path, delimiter=",")
    assert table.shape == (1797, 65)
    assert hashlib.sha256(table.astype(np.uint8).tobytes()).hexdigest() == DIGITS_SHA256
    assert (table == table.astype(np.uint8)).all()


def test_the_file_of_digits_has_a_notice_of_its_source_and_licences() -> None:
    notice = (resources.files("onebox.feed") / "data" / "NOTICE").read_text("utf-8")
    for part in ("digits.csv.gz", "https://doi.org/10.24432/C50P49", "CC BY 4.0", "BSD 3-Clause License"):
        assert part in notice


def test_digits_are_split_by_a_fifth_in_each_class():
    data = load_dataset("digits")
    train, test = data.train.labels.bincount(), data.test.labels.bincount()

    assert test.tolist() == ((train + test) // 5).tolist()
    assert data.train.labels[:40].unique().numel() > 5  # mixed, not sorted


def test_digits_are_the_same_each_time():
    first, second = load_dataset("digits"), load_dataset("digits")

    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)
    tensors = (first.train.images, first.train.labels, first.test.images, first.test.labels)
    content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert hashlib.sha256(content).hexdigest() == SPLITS_SHA256


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("imagenet", "'imagenet' is not known; allowed are digits, mnist:FOLDER, cifar10:FOLDER, folder:PATH"),
        ("", "'' is not known"),
        ("Digits", "'Digits' is not known"),
        ("digits:/tmp", "takes no folder"),
        ("mnist", "needs the folder that holds its files: mnist:FOLDER"),
        ("cifar10:", "needs the folder"),
    ],
)
def test_wrong_spec(spec, said):
    with pytest.raises(UsageError, match=said):
        load_dataset(spec)


def test_folder_that_is_none(tmp_path):
    with pytest.raises(DataError, match="absent is not a folder") as raised:
        load_dataset(f"mnist:{tmp_path / 'absent'}")
    assert raised.value.path == tmp_path / "absent"


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path / "absent")):
        load_dataset("mnist:~/absent")
