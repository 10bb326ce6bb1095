"""Packing: parts of batches travel compressed where that is faster, as measured on the links and on the data."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from onebox.pool import Pool
from onebox.wire import MOST_BYTES, Codec, codecs, pack, unpack

LEAST_BYTES = 4096
"""Frames of fewer bytes go as they are: a message costs more than they do."""

_SAMPLE_BYTES = 1 << 20
_WORTH = 0.9
"""Packing has to take less than this part of the time without it: what is measured varies."""


@dataclass(frozen=True, kw_only=True)
class CodecMeasurement:
    """What a codec makes of some data.

    Args:
        ratio: Packed bytes for each byte.
        pack_bps: Bytes that go in, per second.
        unpack_bps: Bytes that come out, per second.
    """

    ratio: float
    pack_bps: float
    unpack_bps: float


def choose_codec(link_bps: float, measured: Mapping[Codec, CodecMeasurement]) -> Codec | None:
    """Return the codec with which data is where it is needed soonest; ``None`` for none. Pure.

    The next part is packed while one is on its way, so that the slower of the two counts; a worker unpacks before it
    computes with it.

    Args:
        link_bps: Bytes per second that the link takes; infinite for one that costs nothing.
        measured: What the codecs that both sides have make of the data.

    Example:
        >>> lz4 = Measured(ratio=0.5, pack_bps=5e8, unpack_bps=2e9)
        >>> choose(125e6, {"lz4": lz4}), choose(1e9, {"lz4": lz4})
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
    """Pack and unpack some data, and return how that went."""
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
    """Decides for each worker and each tensor of a batch how it travels.

    Args:
        pool: The pool; links to workers that are not of this machine are measured now.
        workers: Of the plan.

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
        """Return how a frame travels, and what then does.

        Args:
            worker: To whom.
            leaf: Which tensor of the batch it is a part of.
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
        """Return the codec for a tensor, measured on the first part of it that came."""
        with self._lock:
            if (worker, leaf) not in self._chosen:
                if leaf not in self._measured:
                    sample = frame[:_SAMPLE_BYTES]
                    self._measured[leaf] = {codec: measure_codec(codec, sample) for codec in codecs()}
                usable = {codec: found for codec, found in self._measured[leaf].items() if codec in self._known[worker]}
                self._chosen[worker, leaf] = choose_codec(self._link_bps[worker], usable)
            return self._chosen[worker, leaf]
