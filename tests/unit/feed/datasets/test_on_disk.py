"""Data sets whose pictures stay in their files: what is trained and tested on, sizes, statistics, broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onebox.errors import DataError, UsageError
from onebox.feed import Feed, open_dataset


@pytest.fixture
def folder(tmp_path, jpeg) -> Path:
    """Two classes of ten pictures each, of different sizes; one is broken."""
    for number in range(20):
        name = "cats" if number < 10 else "dogs"
        path = tmp_path / "pictures" / name / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg((10 * number, 0, 200), (8 + number % 3, 8)))
    (tmp_path / "pictures" / "cats" / "02.jpg").write_bytes(b"no picture")
    return tmp_path / "pictures"


def test_every_fifth_is_to_test_on(folder):
    data = open_dataset(f"folder:{folder}")

    assert (data.name, data.classes, data.shape) == ("folder", 2, (3, 8, 8))
    assert (len(data.train), len(data.test)) == (16, 4)
    assert [Path(data.test.name(index)).name for index in range(4)] == ["04.jpg", "09.jpg", "14.jpg", "19.jpg"]
    labels = [data.test.decode(data.test.read(index), index)[1] for index in range(4)]
    assert [int(label) for label in labels] == [0, 0, 1, 1]


def test_pictures_get_one_size_and_a_broken_one_is_no_example(folder):
    data = open_dataset(f"folder:{folder}", size=6)
    images, labels = data.example(16)

    assert (images.shape, images.dtype) == ((15, 3, 6, 6), torch.uint8)
    assert labels.tolist() == [0] * 7 + [1] * 8
    blue = images[:, 2].double() / 255
    assert (data.mean[2], data.std[2]) == pytest.approx((blue.mean().item(), blue.std(correction=0).item()))


def test_a_feed_leaves_the_broken_one_out(folder):
    data = open_dataset(f"folder:{folder}")
    feed = Feed(data.train, batch_size=4, on_error="skip", process=2)

    assert sum(len(targets) for _, targets in feed.epoch(0)) == 15
    assert [Path(one.name).name for one in feed.skipped.first] == ["02.jpg"]


def test_parts_of_a_folder(tmp_path, jpeg):
    for part, count in (("train", 3), ("val", 2)):
        for number in range(count):
            path = tmp_path / part / "ones" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg())
    data = open_dataset(f"folder:{tmp_path}")

    assert (len(data.train), len(data.test), data.classes) == (3, 2, 1)


def test_too_few_to_part(tmp_path, jpeg):
    (tmp_path / "ones").mkdir()
    for number in range(4):
        (tmp_path / "ones" / f"{number}.jpg").write_bytes(jpeg())

    with pytest.raises(DataError, match="4 samples are too few to train and to test on; 5 are needed"):
        open_dataset(f"folder:{tmp_path}")


def test_nothing_but_broken_ones(tmp_path):
    (tmp_path / "ones").mkdir()
    (tmp_path / "ones" / "a.jpg").write_bytes(b"no picture")

    with pytest.raises(DataError, match="none of 1 samples can be read"):
        open_dataset(f"folder:{tmp_path}")


def test_images_in_memory_keep_their_size():
    with pytest.raises(UsageError, match="an image size of 9 is for folder, tar, parquet; digits has images"):
        open_dataset("digits", size=9)
