"""Compression of uploads where it is faster, as measured on the links and on the data."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from onebox.pool.devices import DeviceInfo
from onebox.wire import MOST_BYTES, Codec, codecs, pack, unpack

LEAST_BYTES = 4096
"""Smaller frames are not compressed: a message costs more than their transfer."""

MEASURED_EVERY = 16
"""Frames for which a measurement counts: data of one kind may come to compress otherwise."""

_MOST_KINDS = 1 << 10
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


class UploadCompression:
    """Choice of compression for each worker and each kind of data.

    Args:
        devices: The devices of the pool.
        link_bps: Bytes per second from this process to the workers; infinite where a link costs nothing.
    """

    def __init__(self, devices: Sequence[DeviceInfo], link_bps: Mapping[int, float]) -> None:
        self._link_bps = link_bps
        self._known = {worker: set(devices[worker].codecs) & set(codecs()) for worker in link_bps}
        self._measured: dict[Hashable, tuple[int, dict[Codec, CodecMeasurement]]] = {}
        self._lock = threading.Lock()

    def packed(self, worker: int, kind: Hashable, frame: memoryview) -> tuple[Codec | None, memoryview | bytes]:
        """Return the codec of a frame and the bytes to send.

        Args:
            worker: The receiver.
            kind: What frames are expected to compress alike.
            frame: Its elements.
        """
        if self._link_bps[worker] == math.inf or not LEAST_BYTES <= len(frame) <= MOST_BYTES:
            return None, frame
        codec = self._codec(worker, kind, frame)
        if codec is None:
            return None, frame
        made = pack(codec, frame)
        return (codec, made) if len(made) < len(frame) else (None, frame)

    def _codec(self, worker: int, kind: Hashable, frame: memoryview) -> Codec | None:
        """Return the codec for a frame, measured on the first part of this one or of one before it."""
        with self._lock:
            left, measured = self._measured.pop(kind, (0, {}))
            if not left:
                left = MEASURED_EVERY * len(self._link_bps)
                measured = {codec: measure_codec(codec, frame[:_SAMPLE_BYTES]) for codec in codecs()}
            while len(self._measured) >= _MOST_KINDS:
                del self._measured[next(iter(self._measured))]
            self._measured[kind] = left - 1, measured
        usable = {codec: found for codec, found in measured.items() if codec in self._known[worker]}
        return choose_codec(self._link_bps[worker], usable)
