"""Pictures in folders by class: what is found, in what order, and everything that may be wrong with folders."""

import os

import pytest
import torch

from onebox.errors import DataError, UsageError
from onebox.feed.decode import ImageDecoder
from onebox.feed.source import Source
from onebox.feed.sources import ImageFolder


@pytest.fixture
def folder(tmp_path, jpeg):
    """Two classes, one of them with pictures in folders of its own."""
    for name, colour in (("dog/2.jpg", 20), ("dog/10.JPEG", 30), ("cat/b/1.jpg", 40), ("cat/a.jpg", 50)):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg((colour, colour, colour)))
    return tmp_path / "data"


def samples(source):
    return [source.decode(source.read(index), index) for index in range(len(source))]


@pytest.mark.feature("Data: Read pictures in folders")
def test_classes_and_names_are_sorted(folder):
    (folder / "readme.txt").write_text("not a class")
    (folder / "cat" / "notes.txt").write_text("no picture")
    (folder / "cat" / "._a.jpg").write_text("what a Mac leaves")
    (folder / ".git").mkdir()
    source = ImageFolder(folder)

    assert isinstance(source, Source)
    assert source.classes == ("cat", "dog")
    names = ["data/cat/a.jpg", "data/cat/b/1.jpg", "data/dog/10.JPEG", "data/dog/2.jpg"]
    assert [source.name(index) for index in range(4)] == names
    assert source.labels.tolist() == [0, 0, 1, 1]
    images, labels = zip(*samples(source), strict=True)
    assert [int(image.float().mean().round()) for image in images] == [50, 40, 30, 20]
    assert torch.stack(labels).dtype == torch.int64
    assert torch.stack(labels).tolist() == [0, 0, 1, 1]
    assert images[0].shape == (3, 8, 8)


def test_classes_of_a_training_set(folder):
    source = ImageFolder(folder, classes=("bird", "dog", "cat"))
    assert source.labels.tolist() == [2, 2, 1, 1]


def test_the_decoder_is_the_callers(folder):
    source = ImageFolder(folder, decoder=ImageDecoder(mode="L", size=(4, 6)))
    assert samples(source)[0][0].shape == (1, 4, 6)


def test_a_class_that_is_not_among_those_given(folder):
    with pytest.raises(DataError, match="has class 'cat', which is not among those given: dog, emu") as raised:
        ImageFolder(folder, classes=("dog", "emu"))
    assert raised.value.path == folder / "cat"


@pytest.mark.parametrize(("classes", "said"), [("cat", "sequence of names"), ([], "one at least"), (["a", "a"], "'a'")])
def test_class_names_that_are_not_allowed(folder, classes, said):
    with pytest.raises(UsageError, match=said):
        ImageFolder(folder, classes=classes)


def test_a_class_without_pictures(folder):
    (folder / "emu").mkdir()
    (folder / "emu" / "emu.txt").write_text("")
    with pytest.raises(DataError, match=r"emu has no pictures, and 1 other files; put its pictures there \(\.jpg"):
        ImageFolder(folder)


def test_a_folder_without_classes(tmp_path, jpeg):
    (tmp_path / "1.jpg").write_bytes(jpeg())
    with pytest.raises(DataError, match="has no folders in it; allowed is folder/class/picture"):
        ImageFolder(tmp_path)


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"none cannot be read .*; put it there, or correct the name"):
        ImageFolder(tmp_path / "none")


def test_a_file_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be read \(Not a directory\)"):
        ImageFolder(tmp_path / "file")


def test_folders_that_are_linked_in_a_circle(folder):
    (folder / "cat" / "up").symlink_to(folder / "cat", target_is_directory=True)
    (folder / "emu").symlink_to(folder / "dog", target_is_directory=True)
    source = ImageFolder(folder)
    assert source.labels.tolist() == [0, 0, 1, 1, 2, 2]


def broken_sample(folder, damage):
    """The index of `cat/a.jpg` after it was damaged, and the error of reading and decoding it."""
    path = folder / "cat" / "a.jpg"
    damage(path)
    source = ImageFolder(folder)
    with pytest.raises(DataError) as raised:
        source.decode(source.read(0), 0)
    assert raised.value.sample == 0
    assert str(path) in str(raised.value)
    assert str(raised.value.path) == str(path)
    source.decode(source.read(1), 1)  # the others are none the worse
    return str(raised.value)


def link_to_nowhere(path):
    path.unlink()
    path.symlink_to("/nowhere/a.jpg")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (link_to_nowhere, "it is a link to /nowhere/a.jpg, which is not there"),
        (pipe, "is no regular file"),
        (huge, f"has {1 << 40} bytes; allowed are 1 to {1 << 28}"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: path.write_bytes(b"not found"), "is no picture"),
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "is a damaged picture"),
    ],
)
def test_a_broken_file_is_named(folder, damage, said):
    assert said in broken_sample(folder, damage)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder):
    assert "see that it exists and that you may read it" in broken_sample(folder, lambda path: path.chmod(0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_what_nobody_may_read(folder):
    source = ImageFolder(folder)
    folder.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(
            DataError, match=r"a\.jpg cannot be read \(Permission denied\); see that .* you may read it"
        ):
            source.read(0)
        with pytest.raises(DataError, match=r"data cannot be read \(Permission denied\)"):
            ImageFolder(folder)
    finally:
        os.seteuid(0)


def test_a_file_that_has_gone(folder):
    source = ImageFolder(folder)
    (folder / "cat" / "a.jpg").unlink()
    with pytest.raises(DataError, match=r"a\.jpg cannot be read .*; put it there, or correct the name"):
        source.read(0)
