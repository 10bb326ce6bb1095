"""Compression of batches where it is faster, as measured on the links and on the data."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from onebox.pool import Pool
from onebox.wire import MOST_BYTES, Codec, codecs, pack, unpack

LEAST_BYTES = 4096
"""Smaller frames are not compressed: a message costs more than their transfer."""

_SAMPLE_BYTES = 1 << 20
_WORTH = 0.9
"""Compression must take less than this fraction of the time without it: measurements vary."""


@dataclass(frozen=True, kw_only=True)
class CodecMeasurement:
    """Measured performance of a codec on some data.

    Args:
        ratio: Compressed bytes per byte.
        pack_bps: Input bytes per second of compression.
        unpack_bps: Output bytes per second of decompression.
    """

    ratio: float
    pack_bps: float
    unpack_bps: float


def choose_codec(link_bps: float, measured: Mapping[Codec, CodecMeasurement]) -> Codec | None:
    """Return the codec with which data arrives soonest; ``None`` for none. Pure.

    Compression of the next part overlaps with the transfer of the current one, so that the slower of the two counts; a
    worker decompresses before it computes.

    Args:
        link_bps: Bytes per second of the link; infinite if it is free.
        measured: Measurements of the codecs that both sides support.

    Example:
        >>> lz4 = CodecMeasurement(ratio=0.5, pack_bps=5e8, unpack_bps=2e9)
        >>> choose_codec(125e6, {"lz4": lz4}), choose_codec(1e9, {"lz4": lz4})
        ('lz4', None)
    """

    def seconds_a_byte(codec: Codec) -> float:
        found = measured[codec]
        return max(1 / found.pack_bps, found.ratio / link_bps) + 1 / found.unpack_bps

    if link_bps == math.inf or not measured:
        return None
    best = min(measured, key=seconds_a_byte)
    return best if seconds_a_byte(best) < _WORTH / link_bps else None


def measure_codec(codec: Codec, sample: memoryview) -> CodecMeasurement:
    """Measure a codec on some data."""
    begin_s = time.perf_counter()
    packed = pack(codec, sample)
    middle_s = time.perf_counter()
    unpack(codec, packed, len(sample))
    end_s = time.perf_counter()
    return CodecMeasurement(
        ratio=len(packed) / len(sample),
        pack_bps=len(sample) / max(middle_s - begin_s, 1e-9),
        unpack_bps=len(sample) / max(end_s - middle_s, 1e-9),
    )


class BatchCompression:
    """Choice of compression for each worker and each tensor of a batch.

    Args:
        pool: The pool; links to workers on other machines are measured now.
        workers: Workers of the plan.

    Raises:
        OneboxError: A worker failed or ended.
    """

    def __init__(self, pool: Pool, workers: tuple[int, ...]) -> None:
        self._link_bps = pool.client_bandwidth.bps(workers)
        self._known = {worker: set(pool.devices[worker].codecs) & set(codecs()) for worker in workers}
        self._measured: dict[int, dict[Codec, CodecMeasurement]] = {}
        self._chosen: dict[tuple[int, int], Codec | None] = {}
        self._lock = threading.Lock()

    def packed(self, worker: int, leaf: int, frame: memoryview) -> tuple[Codec | None, memoryview | bytes]:
        """Return the codec of a frame and the bytes to send.

        Args:
            worker: The receiver.
            leaf: Index of its tensor in the batch.
            frame: Its elements.
        """
        if self._link_bps[worker] == math.inf or not LEAST_BYTES <= len(frame) <= MOST_BYTES:
            return None, frame
        codec = self._codec(worker, leaf, frame)
        if codec is None:
            return None, frame
        made = pack(codec, frame)
        return (codec, made) if len(made) < len(frame) else (None, frame)

    def _codec(self, worker: int, leaf: int, frame: memoryview) -> Codec | None:
        """Return the codec for a tensor, measured on its first part."""
        with self._lock:
            if (worker, leaf) not in self._chosen:
                if leaf not in self._measured:
                    sample = frame[:_SAMPLE_BYTES]
                    self._measured[leaf] = {codec: measure_codec(codec, sample) for codec in codecs()}
                usable = {codec: found for codec, found in self._measured[leaf].items() if codec in self._known[worker]}
                self._chosen[worker, leaf] = choose_codec(self._link_bps[worker], usable)
            return self._chosen[worker, leaf]
