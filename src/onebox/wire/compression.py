"""Packed frames: compressed elements, for links slower than the compressor.

The instruction of a frame declares its codec and tensor, so the result is bounded before decompression: a frame with
another size is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

from onebox.errors import MissingExtra, WireError
from onebox.extras import import_extra

Codec = Literal["lz4", "zstd"]

_MODULES: dict[Codec, str] = {"lz4": "lz4.block", "zstd": "zstandard"}

MOST_BYTES = 1 << 30
"""Most bytes of an unpacked frame; LZ4 takes less than twice as many in a block."""

_LZ4_RATIO = 255
"""Largest ratio of LZ4 (its block format: a length grows by 255 with each byte)."""

_ZSTD_LEVEL = 1
"""The fastest level that compresses repetitions in images and text; level 3 takes twice as long and saves a few per
cent."""

_WINDOW_BYTES = 8 << 20
"""Window limit of the zstd decoder; level 1 uses half a MiB."""


def _installed() -> dict[Codec, ModuleType]:
    """Import the codecs that are installed; one that is not is not used, as both sides say what they have."""
    found: dict[Codec, ModuleType] = {}
    for codec, module in _MODULES.items():
        with contextlib.suppress(MissingExtra):
            found[codec] = import_extra(module, f"A frame packed by {codec}")
    return found


_LIBRARIES = _installed()
"""They are light, and a worker could not import them later: it gives up files before it knows what comes."""


def codecs() -> tuple[Codec, ...]:
    """Return those that this process has."""
    return tuple(_LIBRARIES)


def pack(codec: Codec, frame: memoryview | bytes) -> bytes:
    """Return a frame compressed, or slightly enlarged if nothing in it repeats.

    Args:
        codec: One of :func:`codecs`.
        frame: 1 to :data:`MOST_BYTES` bytes.

    Raises:
        WireError: It is empty or too large.
    """
    _require(codec, len(frame))
    if codec == "lz4":
        return bytes(_LIBRARIES["lz4"].compress(frame, store_size=False))
    return bytes(_LIBRARIES["zstd"].ZstdCompressor(level=_ZSTD_LEVEL).compress(frame))


def unpack(codec: str, frame: memoryview | bytes, size_bytes: int) -> bytes:
    """Return the original bytes of a packed frame.

    Args:
        codec: Its codec.
        frame: The packed frame.
        size_bytes: Its declared original size.

    Raises:
        WireError: The size differs, it is damaged, or this process lacks the codec.
    """
    _require(codec, size_bytes)
    steps: dict[str, Callable[[Any, int], bytes]] = {"lz4": _from_lz4, "zstd": _from_zstd}
    try:
        made = steps[codec](frame, size_bytes)
    except WireError:
        raise
    except Exception as error:  # each codec has its own exceptions
        raise WireError(f"a frame of {len(frame)} bytes that {codec} cannot unpack: {error}") from None
    if len(made) != size_bytes:
        raise WireError(f"a frame that {codec} unpacks to {len(made)} bytes; its tensor has {size_bytes}")
    return made


def _require(codec: str, size_bytes: int) -> None:
    if codec not in codecs():
        there = ", ".join(codecs()) or "no codec (pip install 'onebox[compression]')"
        raise WireError(f"frames packed by {codec!r} cannot be read here; this process has {there}")
    if not 0 < size_bytes <= MOST_BYTES:
        raise WireError(f"a frame of {size_bytes} bytes is not to be packed; allowed are 1 to {MOST_BYTES}")


def _from_lz4(frame: Any, size_bytes: int) -> bytes:
    if size_bytes > _LZ4_RATIO * len(frame):
        raise WireError(f"{len(frame)} bytes of lz4 cannot become {size_bytes}")
    return bytes(_LIBRARIES["lz4"].decompress(frame, uncompressed_size=size_bytes))


def _from_zstd(frame: Any, size_bytes: int) -> bytes:
    says = _LIBRARIES["zstd"].get_frame_parameters(frame)
    if says.content_size != size_bytes or says.dict_id:  # the decoder would allocate what the frame says
        raise WireError(f"a frame of zstd that says it has {says.content_size} bytes; its tensor has {size_bytes}")
    reader = _LIBRARIES["zstd"].ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    return bytes(reader.decompress(frame, max_output_size=size_bytes, allow_extra_data=False))
