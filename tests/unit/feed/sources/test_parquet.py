"""Tables in files of Parquet and Arrow: columns, types, row groups that are kept, and what is wrong."""

import contextlib
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import DataError, UsageError
from onebox.feed.source import Source
from onebox.feed.sources import Parquet
from onebox.feed.sources.formats.parquet_pages import column_bounds
from onebox.feed.sources.formats.row_groups import RowGroupCache, RowGroups

pa = pytest.importorskip("pyarrow")
feather, parquet = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow.parquet")


def rows(source):
    return [source.decode(source.read(index), index) for index in range(len(source))]


def write(path, table, kind="parquet", rows_of_group=3):
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=rows_of_group)
    elif kind == "feather":
        feather.write_feather(table, path, chunksize=rows_of_group)
    else:
        with (pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_of_group)
    return path


KINDS = {"parquet": "x.parquet", "feather": "x.feather", "arrow": "x.arrow", "stream": "y.arrow"}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.feature("Data: Read tables of Parquet and Arrow")
def test_pictures_and_labels(tmp_path, jpeg, kind):
    table = pa.table({"image": [jpeg((n, n, n)) for n in (10, 60, 90, 120)], "label": [3, 1, 2, 0]})
    source = Parquet(write(tmp_path / KINDS[kind], table, kind))

    assert isinstance(source, Source)
    assert source.name(3) == f"{KINDS[kind]}: row 3"
    images, labels = zip(*rows(source), strict=True)
    assert [label.item() for label in labels] == [3, 1, 2, 0]
    assert (images[0].shape, images[0].dtype, labels[0].dtype) == ((3, 8, 8), torch.uint8, torch.int64)
    assert [int(image.float().mean().round()) for image in images] == [10, 60, 90, 120]


def test_several_files_are_one_table(tmp_path, kind):
    for number in range(3):
        table = pa.table({"x": np.arange(5) + 5 * number, "label": [number] * 5})
        write(tmp_path / f"{number}-{KINDS[kind]}", table, kind)
    source = Parquet(tmp_path / f"*-{KINDS[kind]}")
    assert [(x.item(), y.item()) for x, y in rows(source)] == [(n, n // 5) for n in range(15)]
    assert source.name(8) == f"1-{KINDS[kind]}: row 3"


def test_lists_are_tensors_of_their_type(tmp_path, kind):
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 6)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.int16).reshape(2, 2, 3))
    nested = pa.array([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], pa.list_(pa.list_(pa.float64())))
    table = pa.table(
        {"fixed": fixed, "tensor": tensors, "any": [[1, 2, 3], [4]], "nested": nested, "on": [True, False]}
    )
    inputs = ("fixed", "tensor", "any", "nested", "on")
    (fixed, tensor, any_, nested, on), second = rows(Parquet(write(tmp_path / KINDS[kind], table, kind), inputs=inputs))

    assert (fixed.tolist(), fixed.dtype) == (list(range(6)), torch.float32)
    assert (tensor.tolist(), tensor.dtype) == ([[0, 1, 2], [3, 4, 5]], torch.int16)
    assert (any_.tolist(), any_.dtype) == ([1, 2, 3], torch.int64)
    assert (nested.tolist(), nested.dtype) == ([[1.0, 2.0]], torch.float64)
    assert (on.item(), on.dtype) == (True, torch.bool)
    assert second[0].tolist() == list(range(6, 12))
    assert second[2].tolist() == [4]
    assert second[3].shape == (2, 2)
    fixed.add_(1)  # a copy, though the file may be mapped


@given(
    values=st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False)), min_size=1),
    group=st.integers(1, 7),
    kind=st.sampled_from(sorted(KINDS)),
    cache_bytes=st.sampled_from([0, 100, 1 << 20]),
    data=st.data(),
)
def test_any_rows_in_any_order(tmp_path_factory, values, group, kind, cache_bytes, data):
    whole, real = zip(*values, strict=True)
    table = pa.table({"a": pa.array(whole, pa.int32()), "b": pa.array(real, pa.float32())})
    path = write(tmp_path_factory.mktemp("any") / KINDS[kind], table, kind, group)
    source = Parquet(path, inputs="a", targets="b", cache_bytes=cache_bytes)

    assert len(source) == len(values)
    for index in data.draw(st.permutations(range(len(values)))):
        a, b = source.decode(source.read(index), index)
        assert (a.item(), b.item(), a.dtype, b.dtype) == (*values[index], torch.int32, torch.float32)


# ---- columns


def test_a_table_of_more_columns_gives_dicts(tmp_path):
    table = pa.table({"text": ["a", "b"], "x": [1.5, 2.5], "label": [0, 1]})
    path = write(tmp_path / "x.parquet", table)
    assert rows(Parquet(path))[1] == {"text": "b", "x": torch.tensor(2.5), "label": torch.tensor(1)}
    assert [x.item() for x in rows(Parquet(path, inputs="x"))] == [1.5, 2.5]


def test_bytes_that_are_no_pictures(tmp_path):
    table = pa.table({"raw": [b"\0\1"], "label": [0]})
    assert rows(Parquet(write(tmp_path / "x.parquet", table), images=()))[0][0] == b"\0\1"


def test_pictures_as_hugging_face_stores_them(tmp_path, jpeg):
    (tmp_path / "beside.jpg").write_bytes(jpeg())
    pictures = [{"bytes": jpeg((9, 9, 9)), "path": "1.jpg"}, {"bytes": None, "path": str(tmp_path / "beside.jpg")}]
    noted = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = pa.table({"image": pictures, "label": [0, 1]}).replace_schema_metadata({"huggingface": json.dumps(noted)})
    source = Parquet(write(tmp_path / "x.parquet", table))

    assert source.classes == ("cat", "dog")
    image, label = source.decode(source.read(0), 0)
    assert (int(image.float().mean().round()), label.item()) == (9, 0)
    with pytest.raises(DataError, match="row 1, column 'image' is empty"):  # no path out of a file is followed
        source.decode(source.read(1), 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inputs": "z"}, r"x.parquet has no column 'z'; there are x, label, t"),
        ({"inputs": "x", "targets": "z"}, "no column 'z'"),
        ({"targets": "label"}, "targets is 'label', and inputs is missing"),
        ({"inputs": "x", "images": ["z"]}, "no column 'z'"),
        ({"cache_bytes": -1}, "cache_bytes is -1"),
    ],
)
def test_settings_that_are_not_allowed(tmp_path, settings, said):
    path = write(tmp_path / "x.parquet", pa.table({"x": [1], "label": [1], "t": ["x"]}))
    with pytest.raises(UsageError, match=said):
        Parquet(path, **settings)


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", pa.table({"x": [1]}))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"needs pyarrow, which .*: pip install 'onebox\[data\]'"):
        Parquet(path)


def test_labels_of_all_rows(tmp_path, kind):
    table = pa.table({"x": [1.5] * 5, "label": pa.array([3, 1, None, 2, 0], pa.uint8())})
    path = write(tmp_path / KINDS[kind], table, kind)
    assert Parquet(path, inputs="x", targets="label").labels.tolist() == [3, 1, -1, 2, 0]
    with pytest.raises(UsageError, match="rows have no classes; targets is no column of whole numbers"):
        Parquet(path, inputs="label", targets="x").labels  # noqa: B018


# ---- bad data


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1, None]), "column 'x' is empty; fill it"),
        (pa.array([[1], [2, None]]), "1 of its numbers are empty"),
        (pa.array([[[1]], [[2], [3, 4]]]), r"its lists have the lengths \[1, 2\], and one shape is needed"),
        (pa.array([[[1]], [None]]), "a list in it is empty"),
        (pa.array([b"", b"no picture"]), "column 'x' is no picture"),
        (pa.array([0, 1], pa.timestamp("s")), "has a datetime that is no tensor"),
    ],
)
def test_a_bad_value_names_file_row_and_column(tmp_path, column, said):
    source = Parquet(write(tmp_path / "x.parquet", pa.table({"x": column})), inputs="x")
    with pytest.raises(DataError, match=said) as raised:
        source.decode(source.read(1), 1)
    assert "x.parquet: row 1" in str(raised.value)
    assert (raised.value.path, raised.value.sample) == (tmp_path / "x.parquet", 1)


@pytest.mark.parametrize("keep", [0, 4, 0.5])
def test_a_file_that_is_cut_off(tmp_path, kind, keep):
    path = write(tmp_path / KINDS[kind], pa.table({"x": np.arange(1000)}), kind, 100)
    os.truncate(path, keep if keep >= 1 else int(path.stat().st_size * keep))
    with pytest.raises(DataError, match=r"that can be read|has no rows") as raised:
        Parquet(path)
    assert raised.value.path == path


def test_a_row_group_that_is_damaged(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"x": np.arange(1000)}), path, row_group_size=500, compression="zstd")
    content = bytearray(path.read_bytes())
    content[300:700] = bytes(400)
    path.write_bytes(content)
    source = Parquet(path)
    with pytest.raises(DataError, match=r"x.parquet: row group 0 is damaged or cannot be read"):
        source.read(0)
    assert source.decode(source.read(999), 999)["x"] == 999


@settings(derandomize=True)  # a fault of Arrow's own, met by chance, would end all tests
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
def test_damage_is_an_error_or_other_values(tmp_path_factory, data, kind):
    columns = {"s": ["a", "bb", "", "c"], "l": [[1, 2]] * 4, "f": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2))}
    path = write(tmp_path_factory.mktemp("any") / KINDS[kind], pa.table(columns), kind, 2)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.sampled_from([0, 1, 127, 255]))
    path.write_bytes(content)
    try:
        rows(Parquet(path))
    except DataError as error:
        assert error.path == path


def test_lengths_in_a_file_are_not_believed(tmp_path):
    path = write(tmp_path / "x.arrow", pa.table({"x": ["abc", "def"]}), "arrow")
    content = path.read_bytes()
    ends = np.array([0, 3, 6], dtype=np.int32).tobytes()
    assert content.count(ends) == 1
    path.write_bytes(content.replace(ends, np.array([0, 3, 1 << 30], dtype=np.int32).tobytes()))
    with pytest.raises(DataError, match=r"x.arrow: row group 0 is damaged or cannot be read"):
        Parquet(path).read(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_metadata_that_contradict_themselves_end_another_process(tmp_path):
    table = pa.table({"a": ["x", "yy", None] * 20, "b": [[1, 2], None, [3]] * 20})
    whole = write(tmp_path / "x.parquet", table).read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    schema = whole.index(b"list", start)
    bad = tmp_path / "bad.parquet"
    ended = []
    for place in range(start, schema + 60):
        for value in {0, 1, 2} - {whole[place]}:
            bad.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                groups = RowGroups([tmp_path / "x.parquet", bad], max_bytes=1 << 20)
            except DataError as error:
                if "ended by" in str(error):
                    assert error.path == bad
                    ended.append(place)
                continue
            for group in groups:
                with contextlib.suppress(DataError):
                    groups.load(group)
        if ended:
            break
    assert ended, "this pyarrow survives all of them"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_compression_that_there_is_not_ends_another_process(tmp_path):
    path, bad = tmp_path / "x.parquet", tmp_path / "bad.parquet"
    parquet.write_table(pa.table({"x": ["a", "bb"] * 30}), path, compression="snappy")
    whole = path.read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    errors = []
    for place in (place for place in range(start, len(whole) - 8) if whole[place - 1 : place + 1] == b"\x15\x02"):
        bad.write_bytes(whole[:place] + b"\x20" + whole[place + 1 :])  # of the numbers that are 1, one is Snappy's
        try:
            groups = RowGroups([bad], max_bytes=1 << 20)
            for group in groups:
                groups.load(group)
        except DataError as error:
            errors.append(str(error))
    assert any("ended by SIGABRT" in error for error in errors), "this pyarrow survives it"


def test_columns_of_one_name(tmp_path):
    table = pa.table([[1], [2]], names=["x", "x"])
    with pytest.raises(DataError, match="it has several columns called 'x'"):
        Parquet(write(tmp_path / "x.arrow", table, "arrow"))


def test_files_of_different_columns(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write(tmp_path / "b.parquet", pa.table({"x": [1.5]}))
    with pytest.raises(DataError, match=r"b.parquet has the columns x \(double\); a.parquet has x \(int64\)"):
        Parquet(tmp_path / "*.parquet")


def test_a_table_without_rows(tmp_path, kind):
    table = pa.table({"x": pa.array([], pa.int64())})
    with pytest.raises(DataError, match="has no rows"):
        Parquet(write(tmp_path / KINDS[kind], table, kind))


def test_a_row_group_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("onebox.feed.sources.parquet.MAX_GROUP_BYTES", 1000)
    with pytest.raises(
        DataError, match=r"row group 0 has \d+ bytes or more, unpacked; allowed are 1000\. Write it with smaller"
    ):
        Parquet(write(tmp_path / "x.parquet", pa.table({"x": np.arange(1000)}), rows_of_group=1000))


# ---- many at once


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_threads_and_forked_processes_read_the_same(tmp_path, kind):
    source = Parquet(write(tmp_path / KINDS[kind], pa.table({"x": np.arange(60)}), kind, 7), cache_bytes=100)
    expected = [{"x": n} for n in range(60)]
    assert rows(source) == expected
    with ThreadPoolExecutor(8) as threads:
        assert all(found == expected for found in threads.map(lambda _: rows(source), range(16)))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if rows(source) == expected else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


class Loaded:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def test_groups_that_are_kept_are_bounded():
    loads = []

    def load(group):
        loads.append(group)
        return Loaded(10)

    cache = RowGroupCache(load, 25)
    for group in (0, 1, 0, 2, 0, 1):  # 1 has to go for 2
        cache.get(group)
    assert loads == [0, 1, 2, 1]


def test_a_group_larger_than_the_cache_is_kept_alone():
    loads = []
    cache = RowGroupCache(lambda group: loads.append(group) or Loaded(99), 25)
    for group in (0, 0, 1, 1):
        cache.get(group)
    assert loads == [0, 1]


def test_a_group_is_loaded_by_one_thread():
    loads, begun = [], threading.Event()

    def load(group):
        loads.append(group)
        begun.wait(30)
        return Loaded(1)

    cache = RowGroupCache(load, 100)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(cache.get, 0) for _ in range(4)]
        begun.set()
        assert len({id(each.result(30)) for each in waiting}) == 1
    assert loads == [0]


def test_a_group_that_failed_is_tried_again():
    results = [OSError("once"), Loaded(1)]

    def load(group):
        result = results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    cache = RowGroupCache(load, 100)
    with pytest.raises(OSError, match="once"):
        cache.get(0)
    assert cache.get(0).nbytes == 1


# ---- files that become far larger than they are


def bomb(path, value, count, **options):
    """Write a value that each of many rows names."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value])).cast(pa.binary())
    schema = pa.schema([("x", pa.binary())])
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 23, "store_schema": False, **options}
    with parquet.ParquetWriter(path, schema, **options) as writer:
        writer.write_table(pa.table({"x": column}), row_group_size=count)
    return path


def test_a_value_that_many_rows_name_is_counted_for_each(tmp_path):
    path = bomb(tmp_path / "x.parquet", b"x" * (1 << 20), 120)
    assert path.stat().st_size < 400
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(DataError, match=r"row group 0 has \d+ bytes or more, unpacked; allowed are 4194304"):
        RowGroups([path], max_bytes=4 << 20).load(0)
    assert pa.default_memory_pool().max_memory() <= max(peak, before + (32 << 20))
    table = RowGroups([path], max_bytes=256 << 20).load(0)
    assert table.num_rows == 120 and table.nbytes > 120 << 20


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("encoding", [None, "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_what_is_read_in_parts_is_what_is_read_at_once(tmp_path, compression, encoding):
    texts = [f"{'long ' * 50 if n == 700 else 'text'} {n % 50}" for n in range(2000)]
    table = pa.table(
        {
            "s": texts,
            "n": range(2000),
            "l": [[n] * (n % 4) for n in range(2000)],
            "b": [n % 3 == 0 for n in range(2000)],
        }
    )
    coding = {"column_encoding": {"s": encoding}} if encoding else {}
    path = tmp_path / "x.parquet"
    for version in ("1.0", "2.0"):
        parquet.write_table(
            table, path, compression=compression, use_dictionary=encoding is None, data_page_version=version,
            row_group_size=1500, data_page_size=2048, **coding,
        )  # fmt: skip
        metadata = parquet.read_metadata(path)
        whole, limit = RowGroups([path], max_bytes=1 << 30), 0
        for group in whole:
            bounds = column_bounds(path, metadata, group, None)
            decoded, lists = (
                sum(each.decoded_bytes for each in bounds if each.repeated or not only) for only in (0, 1)
            )
            enough = max(whole.load(group).nbytes, lists, metadata.row_group(group).total_byte_size)
            assert whole.load(group).nbytes <= decoded
            assert encoding in (None, "DELTA_BYTE_ARRAY") or decoded <= 1.5 * enough, "then the bound is near"
            limit = max(limit, enough + enough // 10 + 4096)
        parts = RowGroups([path], max_bytes=limit)
        for group in whole:
            assert parts.load(group).equals(whole.load(group))


def test_a_page_that_is_larger_than_the_metadata_say_is_found_before_it_is_unpacked(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"x": [b"y" * 100_000]}), path, compression="zstd", use_dictionary=False)
    content = path.read_bytes()
    size = parquet.read_metadata(path).row_group(0).column(0).data_page_offset + 3

    def zigzag(number):
        packed = bytearray()
        number *= 2
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        return bytes([*packed, number])

    more = zigzag(1_000_000)
    assert content[size - 1] == 0x15 and len(more) == len(zigzag(100_000)), "the page's size, unpacked"
    path.write_bytes(content[:size] + more + content[size + len(more) :])
    with pytest.raises(DataError, match="row group 0 has 1000000 bytes or more"):
        RowGroups([path], max_bytes=900_000).load(0)


def test_a_list_that_many_rows_repeat_is_counted(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"x": [["z" * 10_000] * 100] * 10, "y": range(10)})
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match="or more, unpacked"):
        RowGroups([path], max_bytes=1 << 20).load(0)
    chosen = RowGroups([path], max_bytes=1 << 20)
    chosen.choose(["y"])
    assert chosen.load(0).column("y").to_pylist() == list(range(10)), "only what is read counts"
    assert RowGroups([path], max_bytes=1 << 24).load(0).equals(table)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", ["feather", "arrow", "stream", "dictionary"])
def test_compressed_batches_of_arrow_are_bounded(tmp_path, kind, compression):
    zeros = pa.table({"x": np.zeros(1 << 22, np.int8)})
    if kind == "dictionary":
        zeros = pa.table({"x": pa.array(["q" * (1 << 22)]).dictionary_encode()})
    path = tmp_path / "x.arrow"
    if kind == "feather":
        feather.write_feather(zeros, path, compression=compression, chunksize=1 << 23)
    else:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(
            path, zeros.schema, options=options
        ) as writer:
            writer.write_table(zeros)
    assert path.stat().st_size < 20_000
    before = max(pa.default_memory_pool().max_memory(), pa.total_allocated_bytes() + (2 << 20))
    with pytest.raises(DataError, match="bytes or more, unpacked"):
        RowGroups([path], max_bytes=1 << 20)
    assert pa.default_memory_pool().max_memory() <= before, "found before anything is unpacked"
    assert len(RowGroups([path], max_bytes=8 << 20)) == zeros.num_rows


def test_an_uncompressed_batch_of_arrow_stays_in_its_file_and_is_not_bounded(tmp_path):
    path = write(tmp_path / "x.arrow", pa.table({"x": np.zeros(1 << 16, np.int8)}), "arrow", 1 << 16)
    assert len(RowGroups([path], max_bytes=1)) == 1 << 16


@given(st.binary(max_size=60), st.integers(0, 400))
@settings(max_examples=60)
def test_damaged_headers_of_pages_and_batches_are_errors(tmp_path_factory, damage, place):
    folder = tmp_path_factory.mktemp("damage")
    table = pa.table({"s": ["a", "b"] * 50, "n": range(100)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    parquet.write_table(table, folder / "x.parquet")
    with pa.ipc.new_file(folder / "x.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[:place] + damage + content[place + len(damage) :])
        try:
            groups = RowGroups([path], max_bytes=1 << 20)
            for group in groups:
                groups.load(group)
        except DataError:
            pass
