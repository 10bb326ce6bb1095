"""Samples in tar archives: layouts, fields, what is refused, and that many threads read the same."""

import io
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import DataError, UsageError
from onebox.feed.decode import ImageDecoder
from onebox.feed.source import Source
from onebox.feed.sources import Tars
from onebox.feed.sources.formats import files
from onebox.feed.sources.formats.files import expand
from onebox.feed.sources.formats.tar_index import members
from tests.kit.leaks import descriptors


def samples(source):
    return [source.decode(source.read(index), index) for index in range(len(source))]


def npy(array, **settings):
    stream = io.BytesIO()
    np.save(stream, array, **settings)
    return stream.getvalue()


# ---- layouts


@pytest.mark.feature("Data: Read tar archives")
def test_pictures_in_folders_by_class(tmp_path, write_tar, jpeg):
    path = write_tar(tmp_path / "a.tar", [("./dog/1.jpg", jpeg((9, 9, 9))), ("x/cat/2.png.jpg", jpeg((80, 80, 80)))])
    source = Tars(path)

    assert isinstance(source, Source)
    assert source.classes == ("cat", "dog")
    assert [source.name(index) for index in (0, 1)] == ["a.tar: dog/1.jpg", "a.tar: x/cat/2.png.jpg"]


def test_folder_samples_are_pictures_and_labels(tmp_path, write_tar, jpeg):
    path = write_tar(tmp_path / "a.tar", [("dog/1.jpg", jpeg((9, 9, 9))), ("cat/2.JPG", jpeg((80, 80, 80)))])
    (dark, dog), (light, cat) = samples(Tars(path))
    assert (dog.item(), cat.item(), dog.dtype) == (1, 0, torch.int64)
    assert (dark.shape, dark.dtype) == ((3, 8, 8), torch.uint8)
    assert int(dark.float().mean().round()) == 9
    assert int(light.float().mean().round()) == 80


@pytest.mark.feature("Data: Read tar archives")
def test_webdataset_s_layout(tmp_path, write_tar, jpeg):
    members = [("s/1.jpg", jpeg()), ("s/1.cls", b"7\n"), ("__meta", b"-"), ("s/2.cls", b"3"), ("s/2.jpeg", jpeg())]
    source = Tars(write_tar(tmp_path / "a.tar", members))

    assert source.classes is None
    assert [label.item() for _, label in samples(source)] == [7, 3]
    assert source.name(1) == "a.tar: s/2"


def test_fields_are_chosen_and_decoded_by_their_endings(tmp_path, write_tar):
    values = np.arange(6, dtype=">f4").reshape(2, 3)
    members = [("1.json", b'{"x": [1]}'), ("1.txt", "gr\u00fcn".encode()), ("1.seg.npy", b"?"), ("1.bin", b"\0\1")]
    members.append(("1.npy", npy(values)))
    path = write_tar(tmp_path / "a.tar", members)

    (sample,) = samples(Tars(path, fields=("json", "txt", "bin", "a;npy")))
    assert sample[:3] == ({"x": [1]}, "gr\u00fcn", b"\0\1")
    assert torch.equal(sample[3], torch.arange(6.0).reshape(2, 3))
    assert samples(Tars(path, fields=["txt"])) == ["gr\u00fcn"]
    with pytest.raises(DataError, match="has a damaged npy") as raised:
        samples(Tars(write_tar(tmp_path / "b.tar", [("1.npy", b"?")]), fields=["npy"]))
    assert raised.value.sample == 0


def test_several_archives_by_a_pattern(tmp_path, write_tar, jpeg):
    for number in range(9, 12):
        write_tar(tmp_path / f"part-{number:03d}.tar", [(f"c/{number}.jpg", jpeg()), ("d/1.jpg", jpeg())])
    by_number = Tars(f"{tmp_path}/part-{{009..011}}.tar")
    by_star = Tars(tmp_path / "part-*.tar")
    names = [by_number.name(index) for index in range(6)]

    assert names[0] == "part-009.tar: c/9.jpg"
    assert [by_star.name(index) for index in range(6)] == names
    assert by_number.classes == ("c", "d")
    assert len(Tars([tmp_path / "part-009.tar", tmp_path / "part-{010,011}.tar"])) == 6


def test_classes_of_a_training_set(tmp_path, write_tar, jpeg):
    path = write_tar(tmp_path / "a.tar", [("dog/1.jpg", jpeg()), ("emu/1.jpg", jpeg())])
    source = Tars(path, classes=("cat", "dog"))
    assert source.decode(source.read(0), 0)[1] == 1
    with pytest.raises(DataError, match=r"a.tar: emu/1.jpg lies in folder 'emu'; the classes are cat, dog"):
        source.decode(source.read(1), 1)


def test_labels_of_all_samples(tmp_path, write_tar, jpeg):
    members = [("b/1.jpg", jpeg()), ("1.jpg", jpeg()), ("a/1.jpg", b"no picture")]
    source = Tars(write_tar(tmp_path / "a.tar", members))
    assert source.labels.tolist() == [1, -1, 0]
    assert source.labels.dtype == torch.int64
    with pytest.raises(UsageError, match=r"a.tar: samples have no classes; fields has neither cls nor folder"):
        Tars(tmp_path / "a.tar", fields=["jpg"]).labels  # noqa: B018


@pytest.mark.parametrize(
    ("text", "said"), [(b"2", "there are 2 classes"), (b"-1", "whole"), (b"", "whole"), (b"x", "'x'")]
)
def test_a_class_that_is_none(tmp_path, write_tar, jpeg, text, said):
    source = Tars(write_tar(tmp_path / "a.tar", [("1.jpg", jpeg()), ("1.cls", text)]), classes=("a", "b"))
    with pytest.raises(DataError, match="a.tar: 1 has a damaged cls: it says .*" + said):
        samples(source)


def test_it_has_to_be_clear_what_a_sample_is(tmp_path, write_tar, jpeg):
    path = write_tar(tmp_path / "a.tar", [("1.jpg", jpeg()), ("1.txt", b"")])
    with pytest.raises(
        UsageError, match=r"has the fields jpg, txt, .* say fields=\.\.\., such as fields=\('jpg', 'txt'\)"
    ):
        Tars(path)
    with pytest.raises(UsageError, match="fields are 'jpg'; they have to be a sequence"):
        Tars(path, fields="jpg")


def test_a_sample_without_a_field_is_named(tmp_path, write_tar, jpeg):
    source = Tars(write_tar(tmp_path / "a.tar", [("1.jpg", jpeg()), ("1.cls", b"1"), ("2.cls", b"1"), ("LIES", b"")]))
    assert len(source) == 3
    with pytest.raises(DataError, match=r"a.tar: 2.cls has no jpg/jpeg/png/\.\.\., only cls; add it") as raised:
        source.read(1)
    assert raised.value.sample == 1
    with pytest.raises(DataError, match=r"a.tar: LIES has no jpg"):
        source.read(2)


def test_a_field_that_comes_twice(tmp_path, write_tar, jpeg):
    with pytest.raises(DataError, match=r"a.tar: 'c/1.jpg' is there twice"):
        Tars(write_tar(tmp_path / "a.tar", [("c/1.jpg", jpeg()), ("c/1.jpg", jpeg())]))


@pytest.mark.parametrize("deep", [b"{", b"[" * 100_000])
def test_json_that_is_none(tmp_path, write_tar, deep):
    with pytest.raises(DataError, match="has a damaged json"):
        samples(Tars(write_tar(tmp_path / "a.tar", [("1.json", deep)]), fields=["json"]))


def test_pixels_are_the_decoder_s_to_limit(tmp_path, write_tar, jpeg):
    source = Tars(write_tar(tmp_path / "a.tar", [("c/1.jpg", jpeg())]), decoder=ImageDecoder(max_pixels=63))
    with pytest.raises(DataError, match=r"a.tar: c/1.jpg has 8 x 8 pixels") as raised:
        samples(source)
    assert raised.value.path == tmp_path / "a.tar"


# ---- archives


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_files(tmp_path, kind):
    member = tarfile.TarInfo("cat/1.jpg")
    member.type, member.linkname = kind, "/etc/hostname"
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(member)
    with pytest.raises(DataError, match=r"member 'cat/1.jpg' is a link, a device or sparse") as raised:
        Tars(tmp_path / "a.tar")
    assert raised.value.sample == "cat/1.jpg"


@pytest.mark.parametrize(("mode", "tool"), [("w:gz", "gzip -dk"), ("w:bz2", "bzip2 -dk"), ("w:xz", "xz -dk")])
def test_compressed_archives_are_told_how_to_unpack(tmp_path, mode, tool):
    with tarfile.open(tmp_path / "a.tar.z", mode) as archive:
        archive.addfile(tarfile.TarInfo("cat/1.jpg"))
    with pytest.raises(DataError, match=f"is compressed.* unpack it first: {tool} a.tar.z"):
        Tars(tmp_path / "a.tar.z")


@pytest.mark.parametrize("content", [b"", b"no archive" * 100], ids=["empty", "junk"])
def test_a_file_that_is_no_archive(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match="it is no tar archive"):
        Tars(tmp_path / "a.tar")


def test_an_archive_without_files(tmp_path, write_tar):
    with pytest.raises(DataError, match=r"a\.tar: no files are in there"):
        Tars(write_tar(tmp_path / "a.tar", []))


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (1024 + 100, "cut off at byte 1024: there is no end marker"),
        (1024, "cut off at byte 1024: there is no end marker"),
        (512 + 30, "member 'c/1.jpg' has 40 bytes, of which the archive holds 30: it is cut off"),
    ],
)
def test_an_archive_that_is_cut_off(tmp_path, write_tar, keep, said):
    path = write_tar(tmp_path / "a.tar", [("c/1.jpg", bytes(40)), ("c/2.jpg", bytes(40))])
    os.truncate(path, keep)
    with pytest.raises(DataError, match=said) as raised:
        Tars(path)
    assert raised.value.path == path


def test_a_damaged_header_does_not_end_the_archive_in_silence(tmp_path, write_tar):
    path = write_tar(tmp_path / "a.tar", [("c/1.jpg", bytes(40)), ("c/2.jpg", bytes(40))])
    content = bytearray(path.read_bytes())
    content[1024] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="no valid header, and no end marker, at byte 1024"):
        Tars(path)


def test_an_archive_that_becomes_shorter_while_it_is_used(tmp_path, write_tar, jpeg):
    path = write_tar(tmp_path / "a.tar", [("c/1.jpg", jpeg()), ("c/2.jpg", jpeg())])
    source = Tars(path)
    os.truncate(path, 512 + 100)
    with pytest.raises(DataError, match=r"a.tar: c/1.jpg is cut off: the archive has become shorter"):
        source.read(0)


def with_size(path, field):
    """Rewrite the size in the first header of an archive, with the right checksum."""
    content = bytearray(path.read_bytes())
    content[124:136] = field
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (b"\x80" + b"\xff" * 11, "of which the archive holds"),
        (b"\xff" * 12, "in its header: it is damaged"),
        (b"77777777777\0", "of which the archive holds"),
        (b"-0000000001\0", "in its header: it is damaged"),
        (b"0_000000001\0", "in its header: it is damaged"),
    ],
)
def test_absurd_sizes(tmp_path, write_tar, field, said):
    path = write_tar(tmp_path / "a.tar", [("c/1.jpg", bytes(40))])
    with_size(path, field)
    with pytest.raises(DataError, match=said):
        Tars(path)


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=300).map(
    lambda name: name.strip("/") or "x"
)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def packed(path, content, form):
    with tarfile.open(path, "w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for name, value in content:
            member = tarfile.TarInfo(name)
            member.size = len(value)
            try:
                archive.addfile(member, io.BytesIO(value))
            except ValueError:
                assert form == tarfile.USTAR_FORMAT  # too long for it
    return path


@given(content=st.lists(st.tuples(NAMES, st.binary(max_size=1200)), max_size=6), form=FORMATS)
def test_members_are_those_of_tarfile(tmp_path_factory, content, form):
    path = packed(tmp_path_factory.mktemp("any") / "a.tar", content, form)
    with tarfile.open(path, encoding="utf-8") as archive:
        expected = [(member.name, member.offset_data, member.size) for member in archive]
    assert [tuple(member) for member in members(path)] == expected


@given(data=st.data(), form=FORMATS)
def test_damage_is_an_error_and_never_an_endless_loop(tmp_path_factory, data, form):
    path = packed(tmp_path_factory.mktemp("any") / "a.tar", [("c/" + "n" * 120, b"1" * 40), ("d", b"2" * 600)], form)
    content = bytearray(path.read_bytes()[:4096])
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # also behind a checksum that is right
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = list(members(path))
    except DataError as error:
        assert error.path == path
    else:
        assert all(0 <= member.offset <= member.offset + member.size_bytes <= len(content) for member in found)


# ---- patterns


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a-{000..002}.tar", r"a-000\.tar is missing \(one of '.*a-\{000\.\.002\}\.tar'\)"),
        ("a-*.tar", "No file fits"),
        ("a.tar", r"a\.tar is missing; put it there"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, pattern, said):
    with pytest.raises(DataError, match=said):
        Tars(tmp_path / pattern)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("{2..1}", "counts from 2 down to 1"),
        ("{0..999999999}", "more than the 100000"),
        ("{0..999}{0..999}", "more than"),
    ],
)
def test_patterns_that_are_refused(pattern, said):
    with pytest.raises(UsageError, match=said):
        expand(pattern)


def test_no_pattern_at_all():
    with pytest.raises(UsageError, match="No file is named"):
        Tars([])


def test_a_name_that_looks_like_a_pattern_is_taken_as_it_is(tmp_path):
    (tmp_path / "a[1].tar").touch()
    assert expand(tmp_path / "a[1].tar") == [tmp_path / "a[1].tar"]


# ---- many at once


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kept_open", [128, 1])
def test_threads_and_forked_processes_read_the_same(tmp_path, write_tar, monkeypatch, kept_open):
    monkeypatch.setattr(files, "MAX_OPEN", kept_open)
    for part in range(3):
        write_tar(tmp_path / f"{part}.tar", [(f"{n}.txt", f"{part} {n} ".encode() * (1 + n)) for n in range(40)])
    source = Tars(tmp_path / "{0..2}.tar", fields=["txt"])
    expected = samples(source)

    with ThreadPoolExecutor(8) as threads:
        assert all(found == expected for found in threads.map(lambda _: samples(source), range(16)))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if samples(source) == expected else 1
        finally:
            os._exit(status)
    assert samples(source) == expected
    assert os.waitpid(child, 0)[1] == 0


def test_files_are_closed(tmp_path, write_tar):
    path = write_tar(tmp_path / "a.tar", [("1.txt", json.dumps("x").encode())])
    source = Tars(path, fields=["txt"])
    assert str(path) in {what for _, what in descriptors()}
    del source
    assert str(path) not in {what for _, what in descriptors()}


def test_real_images(shared_data):
    source = Tars(shared_data / "cifar10-test.tar")
    assert len(source) == 4000
    assert len(source.classes) == 10
    labels = [source.decode(source.read(index), index)[1].item() for index in range(0, 4000, 16)]
    assert set(labels) == set(range(10))
