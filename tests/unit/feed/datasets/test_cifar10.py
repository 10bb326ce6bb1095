"""CIFAR-10 from tar archives of JPEG files: read in place, and nothing in them trusted."""

import io
import os
import tarfile

import numpy as np
import pytest

from onebox.errors import DataError, UsageError
from onebox.feed import load_dataset
from onebox.feed.datasets import in_memory
from onebox.feed.sources import Cifar10

RED, GREEN, BLUE = (254, 0, 0), (0, 255, 1), (0, 0, 254)
JPEG_TOLERANCE = 4


@pytest.fixture
def load(tmp_path, write_tar, jpeg):
    """Loads a data set from the members of its training archive; its test archive is one good cat."""

    def run(train, test=None):
        write_tar(tmp_path / "cifar10-train.tar", train)
        write_tar(tmp_path / "cifar10-test.tar", test or [("cat/1.jpg", jpeg())])
        return load_dataset(f"cifar10:{tmp_path}")

    return run


def test_classes_are_sorted_and_order_is_kept(load, jpeg):
    data = load([("dog/2.jpg", jpeg(RED)), ("./cat/1.jpg", jpeg(GREEN)), ("dog/1.jpeg", jpeg(BLUE))])

    assert data.classes == 2
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.test.labels.tolist() == [0]
    assert data.train.images.shape == (3, 3, 8, 8)
    for image, colour in zip(data.train.images, (RED, GREEN, BLUE), strict=True):
        assert image[:, 4, 4].tolist() == pytest.approx(colour, abs=JPEG_TOLERANCE)


def test_grey_pictures_become_rgb(load, jpeg):
    data = load([("cat/1.jpg", jpeg((90, 90, 90), mode="L"))])

    assert data.train.images[0, :, 0, 0].tolist() == pytest.approx([90, 90, 90], abs=JPEG_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("README.txt", "README.txt has no jpg/jpeg, only txt"),
        ("cat/1.png", "cat/1.png has no jpg/jpeg, only png"),
        ("1.jpg", "1.jpg lies in no folder; the classes are cat"),
        ("../1.jpg", r"\.\./1.jpg lies in no folder"),
        ("cat/../1.jpg", r"cat/\.\./1.jpg lies in no folder"),
    ],
)
def test_junk_member_is_named(load, jpeg, name, said):
    with pytest.raises(DataError, match=f"cifar10-train.tar: {said}") as raised:
        load([("cat/2.jpg", jpeg()), (name, jpeg())])
    assert raised.value.sample == 1


def test_folders_are_passed_over(tmp_path, write_tar, jpeg):
    folder = tarfile.TarInfo("cat")
    folder.type = tarfile.DIRTYPE
    content = jpeg()
    member = tarfile.TarInfo("cat/1.jpg")
    member.size = len(content)
    for part in ("train", "test"):
        with tarfile.open(tmp_path / f"cifar10-{part}.tar", "w") as archive:
            archive.addfile(folder)
            archive.addfile(member, io.BytesIO(content))
            archive.addfile(folder)

    assert len(load_dataset(f"cifar10:{tmp_path}").train) == 1


@pytest.mark.parametrize("damage", [lambda jpeg: b"GIF89a" + jpeg, lambda jpeg: jpeg[:-200]], ids=["junk", "cut"])
def test_broken_jpeg_is_named(load, jpeg, damage):
    with pytest.raises(DataError, match=r"cat/7\.jpg is (a damaged|no) picture") as raised:
        load([("cat/1.jpg", jpeg()), ("cat/7.jpg", damage(jpeg()))])
    assert raised.value.sample == 1


def test_pixels_are_limited(load, jpeg):
    with pytest.raises(DataError, match=r"has 257 x 256 pixels; allowed are 65536 in all"):
        load([("cat/1.jpg", jpeg(size=(257, 256)))])


def test_decoded_bytes_are_limited(load, jpeg, monkeypatch):
    monkeypatch.setattr(in_memory, "MAX_TOTAL_BYTES", 2 * 3 * 8 * 8)
    load([(f"cat/{n}.jpg", jpeg()) for n in range(2)])
    with pytest.raises(DataError, match="more than the allowed 384 bytes in memory"):
        load([(f"cat/{n}.jpg", jpeg()) for n in range(3)])


def test_one_size_in_an_archive_and_in_both(load, jpeg):
    with pytest.raises(DataError, match=r"has \[9, 8\] pixels; the first image has \[8, 8\]"):
        load([("cat/1.jpg", jpeg()), ("cat/2.jpg", jpeg(size=(8, 9)))])
    with pytest.raises(DataError, match=r"training images have \[9, 8\] pixels, test images \[8, 8\]"):
        load([("cat/2.jpg", jpeg(size=(8, 9)))])


def test_class_that_only_the_test_archive_has(load, jpeg):
    with pytest.raises(DataError, match=r"cifar10-test.tar: cow/1.jpg lies in folder 'cow'; the classes are cat"):
        load([("cat/1.jpg", jpeg())], [("cow/1.jpg", jpeg())])


def test_empty_archive(load):
    with pytest.raises(DataError, match="no files are in there"):
        load([])


def test_missing_archive(tmp_path):
    with pytest.raises(DataError, match=r"cifar10-train\.tar is missing") as raised:
        load_dataset(f"cifar10:{tmp_path}")
    assert raised.value.path == tmp_path / "cifar10-train.tar"


def test_real_images(shared_data):
    data = load_dataset(f"cifar10:{shared_data}")

    assert data.classes == 10
    assert data.train.images.shape == (20_000, 3, 32, 32)
    assert data.train.labels.bincount().tolist() == [2000] * 10
    assert data.test.labels.bincount().tolist() == [400] * 10
    assert data.mean == pytest.approx([0.49, 0.48, 0.45], abs=0.01)


# ---- the binary version


@pytest.fixture
def binary(tmp_path):
    """The binary version with few samples, and its records, of the training batches and of the test batch."""
    random = np.random.default_rng(0)
    records = {}
    for part, names in (("train", [f"data_batch_{n}.bin" for n in range(1, 6)]), ("test", ["test_batch.bin"])):
        made = random.integers(0, 256, (len(names), 3, 3073), dtype=np.uint8)
        made[:, :, 0] %= 10
        for name, content in zip(names, made, strict=True):
            (tmp_path / name).write_bytes(content.tobytes())
        records[part] = made.reshape(-1, 3073)
    return tmp_path, records


@pytest.mark.feature("Data: Read MNIST and CIFAR-10")
def test_the_binary_version(binary):
    folder, records = binary
    data = load_dataset(f"cifar10:{folder}")

    assert data.classes == 10
    assert data.train.images.shape == (15, 3, 32, 32)
    assert data.train.labels.tolist() == records["train"][:, 0].tolist()
    assert np.array_equal(data.test.images.numpy(), records["test"][:, 1:].reshape(-1, 3, 32, 32))
    source = Cifar10(folder)
    assert source.name(4) == "data_batch_2.bin: 1"
    assert source.classes[3] == "cat"
    assert source.labels.tolist() == records["train"][:, 0].tolist()


def test_the_folder_of_the_binary_version(binary, tmp_path):
    folder, _ = binary
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "cifar-10-batches-bin").symlink_to(folder)
    assert len(Cifar10(tmp_path / "above", "test")) == 3


def test_a_binary_file_that_is_cut_off(binary):
    folder, _ = binary
    os.truncate(folder / "data_batch_4.bin", 3073 + 5)
    with pytest.raises(DataError, match=r"data_batch_4.bin has 3078 bytes, and has to have a multiple of 3073"):
        Cifar10(folder)


def test_a_binary_file_that_becomes_shorter(binary):
    folder, _ = binary
    source = Cifar10(folder)
    os.truncate(folder / "data_batch_1.bin", 3073 + 5)
    with pytest.raises(DataError, match=r"data_batch_1.bin: record 1 is cut off, the file has become shorter"):
        source.read(1)


def test_a_missing_batch(binary):
    folder, _ = binary
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_2.bin cannot be read .*; put it there"):
        Cifar10(folder)


def test_a_label_that_is_none(binary):
    folder, records = binary
    records["test"][1, 0] = 10
    (folder / "test_batch.bin").write_bytes(records["test"].tobytes())
    source = Cifar10(folder, "test")
    with pytest.raises(DataError, match=r"test_batch.bin: 1 has label 10; allowed are 0 to 9") as raised:
        source.decode(source.read(1), 1)
    assert raised.value.sample == 1


@pytest.mark.parametrize("name", ["data_batch_1", "cifar-10-python.tar.gz"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"Python version, whose pickles can run any code .* fetch the binary version"):
        load_dataset(f"cifar10:{tmp_path}")


def test_another_part(tmp_path):
    with pytest.raises(UsageError, match="part is 'val'; allowed are train and test"):
        Cifar10(tmp_path, "val")
