"""MNIST from a folder of IDX files."""

import gzip

import numpy as np
import pytest

from onebox.errors import DataError
from onebox.feed import load_dataset


@pytest.fixture
def write_part(tmp_path, idx_bytes):
    """Writes the two files of ``train`` or ``t10k``; image i is filled with i, its label is i modulo 10."""

    def write(part, count, *, side=4, labels=None, pack=bytes, suffix=""):
        images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None], (count, side, side))
        labels = np.arange(count) % 10 if labels is None else np.array(labels)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            (tmp_path / f"{part}-{name}-ubyte{suffix}").write_bytes(pack(idx_bytes(values)))
        return f"mnist:{tmp_path}"

    return write


@pytest.mark.feature("Data: Read MNIST and CIFAR-10")
@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz")], ids=["plain", "gzip"])
def test_reads_both_parts(write_part, pack, suffix):
    write_part("train", 12, pack=pack, suffix=suffix)
    data = load_dataset(write_part("t10k", 5, pack=pack, suffix=suffix))

    assert data.name == "mnist"
    assert data.classes == 10
    assert data.train.images.shape == (12, 1, 4, 4)
    assert data.train.images[:, 0, 0, 0].tolist() == list(range(12))
    assert data.train.labels.tolist() == [*range(10), 0, 1]
    assert data.test.labels.tolist() == list(range(5))


def test_test_set_alone_is_cut_in_order(write_part):
    data = load_dataset(write_part("t10k", 10))

    assert data.train.labels.tolist() == list(range(8))
    assert data.test.labels.tolist() == [8, 9]


def test_one_sample_cannot_be_cut(write_part):
    with pytest.raises(DataError, match="too few"):
        load_dataset(write_part("t10k", 1))


@pytest.mark.parametrize(
    "absent",
    [
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ],
)
def test_missing_file_is_named(tmp_path, write_part, absent):
    write_part("train", 3)
    spec = write_part("t10k", 3)
    (tmp_path / absent).unlink()

    with pytest.raises(DataError, match=rf"{absent} is missing, and so is {absent}\.gz") as raised:
        load_dataset(spec)
    assert raised.value.path == tmp_path / absent


def test_counts_have_to_agree(write_part):
    with pytest.raises(DataError, match="4 labels, and t10k-images-idx3-ubyte beside it 5 images"):
        load_dataset(write_part("t10k", 5, labels=range(4)))


def test_label_out_of_range_is_named(write_part):
    with pytest.raises(DataError, match="label 10 at sample 2; allowed are 0 to 9") as raised:
        load_dataset(write_part("t10k", 5, labels=[0, 9, 10, 11, 0]))
    assert raised.value.sample == 2


def test_image_sizes_have_to_agree(write_part):
    write_part("train", 3, side=5)
    with pytest.raises(DataError, match=r"\[5, 5\] and \[4, 4\] pixels"):
        load_dataset(write_part("t10k", 3))


def test_real_images(shared_data):
    data = load_dataset(f"mnist:{shared_data}")

    assert data.train.images.shape == (8000, 1, 28, 28)
    assert data.test.images.shape == (2000, 1, 28, 28)
    assert data.train.labels[:4].tolist() == [7, 2, 1, 0]  # the best known first labels of MNIST's test set
    assert data.mean == pytest.approx([0.13], abs=0.01)
    assert data.std == pytest.approx([0.31], abs=0.01)
