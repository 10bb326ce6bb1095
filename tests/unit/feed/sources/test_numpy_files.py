"""Arrays in NumPy's files: any types and shapes row by row, and nothing in a header trusted."""

import io
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from onebox.errors import DataError, UsageError
from onebox.feed.source import Source
from onebox.feed.sources import Arrays, NumpyFiles
from onebox.feed.sources import numpy_files as module

DTYPES = [order + code for order in "<>" for code in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")]
ARRAYS = st.sampled_from([*DTYPES, "?", "<c8"]).flatmap(
    lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=1, max_dims=4, max_side=5))
)


def rows(source):
    return [source.decode(source.read(index), index) for index in range(len(source))]


def same(tensor, array):
    return np.array_equal(tensor.numpy(), array, equal_nan=array.dtype.kind in "fc") and (
        tensor.numpy().dtype == array.dtype.newbyteorder("=")
    )


@pytest.mark.feature("Data: Read arrays of NumPy")
@given(array=ARRAYS)
def test_any_array_comes_row_by_row(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("any") / "x.npy"
    np.save(path, array)
    found = rows(NumpyFiles(path))
    assert len(found) == len(array)
    assert all(same(row, expected) for row, expected in zip(found, array, strict=True))


@given(array=ARRAYS, compressed=st.booleans())
def test_any_array_of_an_archive(tmp_path_factory, array, compressed):
    path = tmp_path_factory.mktemp("any") / "data.npz"
    (np.savez_compressed if compressed else np.savez)(path, other=np.zeros(3), x=array)
    found = rows(NumpyFiles(f"{path}:x"))
    assert all(same(row, expected) for row, expected in zip(found, array, strict=True))


@pytest.fixture
def pair(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(24, dtype=np.float32).reshape(6, 2, 2))
    np.save(tmp_path / "y.npy", np.arange(6))
    return tmp_path


def test_inputs_and_targets(pair):
    source = NumpyFiles(pair / "x.npy", pair / "y.npy", classes=("a", "b"))

    assert isinstance(source, Source)
    assert len(source) == 6
    assert source.classes == ("a", "b")
    assert source.name(4) == "x.npy: 4"
    inputs, target = source.decode(source.read(1), 1)
    assert inputs.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert (target.item(), target.dtype) == (1, torch.int64)
    inputs += 1  # it is a copy
    assert source.decode(source.read(1), 1)[0].tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_labels_of_all_rows(pair):
    assert NumpyFiles(pair / "x.npy", pair / "y.npy").labels.tolist() == list(range(6))
    with pytest.raises(UsageError, match=r"y.npy: rows have no classes; targets are no whole numbers"):
        NumpyFiles(pair / "y.npy", pair / "x.npy").labels  # noqa: B018


def test_other_numbers_of_rows(pair):
    np.save(pair / "y.npy", np.arange(5))
    with pytest.raises(DataError, match=r"x\.npy has 6 rows and y\.npy 5; there has to be one target an input"):
        NumpyFiles(pair / "x.npy", pair / "y.npy")


class Trap:
    def __reduce__(self):
        return os._exit, (3,)


def header_of(text):
    """A file with a header that says something, and no values."""
    content = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no array that can be read"),
        (b"PK\3\4 not an array at all", "is no array that can be read"),
        (
            header_of("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}"),
            "8000000000000 bytes of values",
        ),
        (header_of("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 3)}"), r"says shape \(-1, 3\)"),
        (header_of("{'descr': '<f8', 'fortran_order': False, 'shape': ()}"), "cut off"),
        (
            header_of("{'descr': '<f8', 'fortran_order': True, 'shape': (2, 3)}"),
            "Fortran's order; save np.ascontiguous",
        ),
        (header_of("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}"), "values of type object"),
        (header_of("{'descr': '<U3', 'fortran_order': False, 'shape': (2,)}"), "values of type <U3"),
        (header_of("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (2,)}"), "values of type"),
        (header_of("__import__('os')._exit(3)"), "is no array that can be read"),
        (header_of("(" * 100), "is no array that can be read"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "its header has 4294967295 bytes; allowed are 10000"),
        (b"\x93NUMPY\x03\x00" + bytes(200), r"version 3\.0 of the format"),
    ],
)
def test_a_file_that_is_no_array(tmp_path, content, said):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as raised:
        NumpyFiles(path)
    assert raised.value.path == path


def test_objects_are_refused_unread(tmp_path):
    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="values of type object; allowed are numbers"):
        NumpyFiles(tmp_path / "x.npy")


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_an_array_without_rows(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.zeros(shape))
    with pytest.raises(DataError, match="has to have rows, one a sample"):
        NumpyFiles(tmp_path / "x.npy")


def test_a_file_that_is_cut_off(pair):
    os.truncate(pair / "x.npy", 200)
    with pytest.raises(DataError, match=r"x.npy is cut off or damaged: its header says float32 \[6, 2, 2\], 96 bytes"):
        NumpyFiles(pair / "x.npy")


def test_a_file_that_becomes_shorter(pair):
    source = NumpyFiles(pair / "x.npy", pair / "y.npy")
    os.truncate(pair / "x.npy", 128 + 20)
    with pytest.raises(DataError, match="record 1 is cut off, the file has become shorter") as raised:
        source.read(1)
    assert raised.value.sample == 1


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"x.npy cannot be read \(No such file or directory\); put it there"):
        NumpyFiles(tmp_path / "x.npy")


def test_an_archive_needs_a_name(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(DataError, match=r"data.npz needs the name of an array; say data.npz:NAME with one of x, y"):
        NumpyFiles(tmp_path / "data.npz")
    with pytest.raises(DataError, match=r"data.npz:z has no array 'z'; say data.npz:NAME with one of x, y"):
        NumpyFiles(f"{tmp_path}/data.npz:z")


def test_a_zip_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "data.npz", x=np.zeros((1 << 20) // 8 + 1))
    with pytest.raises(DataError, match=r"is compressed, and unpacked it has 1048584 bytes; save it by np.savez"):
        NumpyFiles(f"{tmp_path}/data.npz:x")


def test_a_zip_file_that_lies(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.zeros(1000))
    with zipfile.ZipFile(tmp_path / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", stream.getvalue()[:-8])
    with pytest.raises(DataError, match="8000 bytes of values, and 7992 came"):
        NumpyFiles(f"{tmp_path}/data.npz:x")


@given(data=st.data())
def test_damage_to_an_archive_is_an_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "data.npz"
    (np.savez_compressed if data.draw(st.booleans()) else np.savez)(path, x=np.arange(50))
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        rows(NumpyFiles(f"{path}:x"))
    except DataError as error:
        assert error.path == path


def test_threads_read_the_same(pair):
    source = NumpyFiles(pair / "x.npy", pair / "y.npy")
    expected = list(map(source.read, range(6)))
    with ThreadPoolExecutor(8) as threads:
        assert all(found == expected for found in threads.map(lambda _: [source.read(n) for n in range(6)], range(40)))


# ---- in memory


def test_arrays_in_memory():
    source = Arrays(np.arange(6).reshape(3, 2), torch.tensor([1, 0, 1]), classes=["a", "b"])
    assert isinstance(source, Source)
    assert len(source) == 3
    inputs, target = source.decode(source.read(2), 2)
    assert (inputs.tolist(), target.item()) == ([4, 5], 1)
    assert source.name(2) == "arrays: 2"
    assert Arrays(torch.eye(2)).read(0).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ((torch.zeros(3), torch.zeros(4)), r"inputs are \[3\] and targets \[4\]"),
        ((torch.zeros(()),), "have to have rows"),
        ((torch.zeros(0, 3),), "have to have rows"),
    ],
)
def test_arrays_that_are_not_allowed(arrays, said):
    with pytest.raises(UsageError, match=said):
        Arrays(*arrays)
