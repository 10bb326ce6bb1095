"""Compression of one device's uploads: when its link is measured, and what is sent meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.errors import PoolError
from onebox.vgpu.runtime.upload_packing import MEASURED_BYTES, UploadPacking
from onebox.wire import TensorSpec

SPEC = TensorSpec("uint8", (1 << 16,))
FRAME = memoryview(bytes(1 << 16))


def packing(measure: Callable[[], float], *, near: bool = False) -> UploadPacking:
    pool: Any = SimpleNamespace(
        near=lambda worker: near,
        devices=[SimpleNamespace(codecs=("lz4", "zstd"))],
        client_bandwidth=SimpleNamespace(bps=lambda workers: dict.fromkeys(workers, measure())),
    )
    return UploadPacking(pool, 0)


def upload(packing: UploadPacking, size_bytes: int) -> list[bool]:
    """Return of which of some uploads the frame was packed."""
    return [packing.packed(SPEC, FRAME)[0] is not None for _ in range(size_bytes // len(FRAME))]


def test_the_link_is_measured_once_there_is_much_to_send() -> None:
    measured: list[float] = []
    known = packing(lambda: measured.append(1e5) or measured[-1])  # type: ignore[func-returns-value]
    assert not any(upload(known, MEASURED_BYTES))
    assert not measured
    assert all(upload(known, MEASURED_BYTES))
    assert len(measured) == 1


def test_a_worker_of_this_machine_is_not_measured() -> None:
    known = packing(lambda: pytest.fail("measured"), near=True)
    assert not any(upload(known, 2 * MEASURED_BYTES))


def test_a_measurement_that_fails_is_made_by_the_next_upload() -> None:
    results = iter([PoolError("worker 0 was lost"), None])

    def measure() -> float:
        if (error := next(results)) is not None:
            raise error
        return 1e5

    known = packing(measure)
    upload(known, MEASURED_BYTES)
    assert upload(known, 3 * len(FRAME)) == [False, True, True]


def test_what_other_threads_upload_during_the_measurement_goes_as_it_is() -> None:
    begun, end = threading.Event(), threading.Event()

    def measure() -> float:
        begun.set()
        assert end.wait(30)
        return 1e5

    known = packing(measure)
    upload(known, MEASURED_BYTES)
    thread = threading.Thread(target=upload, args=(known, len(FRAME)))
    thread.start()
    assert begun.wait(30)
    assert upload(known, 2 * len(FRAME)) == [False, False]
    end.set()
    thread.join()
    assert upload(known, len(FRAME)) == [True]
