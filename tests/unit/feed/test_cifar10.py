"""CIFAR-10 from tar archives of JPEG files: read in place, and nothing in them trusted."""

import io
import tarfile

import pytest

from onebox.errors import DataError
from onebox.feed import cifar10, load_dataset

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
    "name",
    [
        "README.txt",
        "cat/1.png",
        "1.jpg",
        "a/b/1.jpg",
        "../1.jpg",
        "cat/../1.jpg",
        "/cat/1.jpg",
        "cat/x.jpg",
        f"{'c' * 65}/1.jpg",
    ],
)
def test_junk_member_is_named(load, jpeg, name):
    with pytest.raises(DataError, match=r"does not belong there; allowed are files named class/number\.jpg") as raised:
        load([("cat/1.jpg", jpeg()), (name, jpeg())])
    assert raised.value.sample == name


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_regular_files(tmp_path, kind):
    member = tarfile.TarInfo("cat/1.jpg")
    member.type, member.linkname = kind, "/etc/hostname"
    with tarfile.open(tmp_path / "cifar10-train.tar", "w") as archive:
        archive.addfile(member)

    with pytest.raises(DataError, match="does not belong there"):
        load_dataset(f"cifar10:{tmp_path}")


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
    with pytest.raises(DataError, match=r"'cat/7\.jpg' is no JPEG that can be decoded") as raised:
        load([("cat/1.jpg", jpeg()), ("cat/7.jpg", damage(jpeg()))])
    assert raised.value.sample == "cat/7.jpg"


@pytest.mark.parametrize("size_bytes", [0, cifar10.MAX_MEMBER_BYTES + 1])
def test_member_size_is_limited(load, size_bytes):
    with pytest.raises(DataError, match=f"has {size_bytes} bytes; allowed are 1 to"):
        load([("cat/1.jpg", bytes(size_bytes))])


def test_pixels_are_limited(load, jpeg):
    with pytest.raises(DataError, match=r"has 257 x 256 pixels; allowed are 65536 in all"):
        load([("cat/1.jpg", jpeg(size=(257, 256)))])


def test_decoded_bytes_are_limited(load, jpeg, monkeypatch):
    monkeypatch.setattr(cifar10, "MAX_TOTAL_BYTES", 2 * 3 * 8 * 8)
    load([("cat/1.jpg", jpeg())] * 2)
    with pytest.raises(DataError, match="decodes to more than the allowed 384 bytes"):
        load([("cat/1.jpg", jpeg())] * 3)


def test_one_size_in_an_archive_and_in_both(load, jpeg):
    with pytest.raises(DataError, match=r"has \[9, 8\] pixels; the first image has \[8, 8\]"):
        load([("cat/1.jpg", jpeg()), ("cat/2.jpg", jpeg(size=(8, 9)))])
    with pytest.raises(DataError, match=r"images of \[8, 8\] pixels; in cifar10-train.tar they have \[9, 8\]"):
        load([("cat/2.jpg", jpeg(size=(8, 9)))])


def test_class_that_only_the_test_archive_has(load, jpeg):
    with pytest.raises(DataError, match=r"has class 'cow'; cifar10-train.tar has only \['cat'\]"):
        load([("cat/1.jpg", jpeg())], [("cow/1.jpg", jpeg())])


def test_empty_archive(load):
    with pytest.raises(DataError, match="has no images"):
        load([])


def test_missing_archive(tmp_path):
    with pytest.raises(DataError, match=r"cifar10-train\.tar is missing") as raised:
        load_dataset(f"cifar10:{tmp_path}")
    assert raised.value.path == tmp_path / "cifar10-train.tar"


def three_members(jpeg):
    """Three members of the same size, and where the header of the last one starts."""
    content = jpeg()
    stride = 512 + -(-len(content) // 512) * 512
    return [(f"cat/{number}.jpg", content) for number in range(3)], 2 * stride


@pytest.mark.parametrize("where", ["in a header", "between members", "in a member"])
def test_archive_that_is_cut_off(tmp_path, write_tar, jpeg, where):
    members, last = three_members(jpeg)
    path = write_tar(tmp_path / "cifar10-train.tar", members)
    keep = {"in a header": last + 100, "between members": last, "in a member": last + 600}[where]
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(DataError, match=r"cifar10-train\.tar is damaged"):
        load_dataset(f"cifar10:{tmp_path}")


def test_damaged_header_does_not_end_the_archive_in_silence(tmp_path, write_tar, jpeg):
    members, last = three_members(jpeg)
    path = write_tar(tmp_path / "cifar10-train.tar", members)
    content = bytearray(path.read_bytes())
    content[last] ^= 1
    path.write_bytes(content)

    with pytest.raises(DataError, match=f"damaged or cut off at byte {last}: no end marker"):
        load_dataset(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("content", [b"", b"no archive" * 100], ids=["empty", "junk"])
def test_file_that_is_no_archive(tmp_path, content):
    (tmp_path / "cifar10-train.tar").write_bytes(content)

    with pytest.raises(DataError, match="damaged or no plain tar archive"):
        load_dataset(f"cifar10:{tmp_path}")


def test_real_images(shared_data):
    data = load_dataset(f"cifar10:{shared_data}")

    assert data.classes == 10
    assert data.train.images.shape == (20_000, 3, 32, 32)
    assert data.train.labels.bincount().tolist() == [2000] * 10
    assert data.test.labels.bincount().tolist() == [400] * 10
    assert data.mean == pytest.approx([0.49, 0.48, 0.45], abs=0.01)
