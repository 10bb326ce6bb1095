"""Compression of what a script uploads to one device, where its worker is far."""

from __future__ import annotations

import threading

from onebox.errors import OneboxError
from onebox.pool import Pool
from onebox.pool.network.upload_compression import UploadCompression
from onebox.vgpu.signals import shielded
from onebox.wire import Codec, TensorSpec, codecs

MEASURED_BYTES = 1 << 20
"""Bytes of uploads after which the link is measured, which takes some round trips: fewer are not worth that."""


class UploadPacking:
    """Compression of the uploads to one device.

    Args:
        pool: The pool.
        worker: The number of the device in it.
    """

    def __init__(self, pool: Pool, worker: int) -> None:
        self._pool = pool
        self._worker = worker
        self._plain = pool.near(worker) or not set(pool.devices[worker].codecs) & set(codecs())
        self._size_bytes = 0
        self._compression: UploadCompression | None = None
        self._lock = threading.Lock()

    def packed(self, spec: TensorSpec, frame: memoryview) -> tuple[Codec | None, memoryview | bytes]:
        """Return the codec of a frame and the bytes to send; the first ones go as they are.

        No lock may be held: the link is measured once the worker has executed what was sent.

        Args:
            spec: Its tensor.
            frame: Its elements.
        """
        if self._plain:
            return None, frame
        self._size_bytes += len(frame)
        if self._compression is None and self._size_bytes > MEASURED_BYTES:
            self._measure()
        if self._compression is None:
            return None, frame
        return self._compression.packed(self._worker, (spec.dtype, spec.shape[1:]), frame)

    @shielded
    def _measure(self) -> None:
        """Measure the link, unless another thread does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            link_bps = self._pool.client_bandwidth.bps([self._worker])
            self._compression = UploadCompression(self._pool.devices, link_bps)
        except OneboxError:  # the next use of the device raises it, or its worker is replaced
            pass
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        """Leave a forked process without any: it cannot use the pool."""
        self._plain = True
