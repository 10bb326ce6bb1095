"""Decoding of untrusted pictures to tensors.

Only formats of an allow-list are tried, the size in a header is checked before anything of that size is allocated, and
every error is a DataError that names the sample.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.extras import import_extra
from onebox.feed.checks import require_int

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "GIF", "TIFF")
"""Formats that are tried; decoders of Pillow that start other programs, such as that of EPS, are excluded."""

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".pbm", ".gif", ".tif", ".tiff")
"""File name extensions of these formats, in lower case."""

MODES = ("RGB", "L", "RGBA")
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
MAX_PIXELS = 89_478_485  # Pillow's threshold for warnings of decompression bombs: 256 MiB of RGB
REFUSED = (
    OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError, RuntimeError, struct.error,
    zlib.error,
)  # fmt: skip
"""Exceptions of decoders for damaged files."""


@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """A decoder of pictures.

    Args:
        mode: ``RGB``, ``L`` (grey) or ``RGBA``; pictures of other modes are converted. Transparency is dropped, not
            blended; of 16 bits a channel the upper 8 are kept.
        size: Height and width in pixels that every picture gets: resized (bilinear, with antialiasing) until it
            covers that, and cut at its centre. None leaves pictures as large as they are.
        upright: Rotate pictures by the orientation in EXIF. Off by default, as in most loaders.
        formats: Formats that are tried, by Pillow's names.
        max_pixels: A picture with more is refused before it is decoded.
        library: ``pillow``, or ``torchvision`` (where it is installed) for JPEG and PNG that are not resized. Never
            chosen automatically: two decoders may differ in the last bit, and a run must be the same everywhere.

    Raises:
        UsageError: An invalid setting, or torchvision is not installed.
        MissingExtra: Pillow is not installed.

    Example:
        >>> from PIL import Image
        >>> stream = io.BytesIO()
        >>> Image.new("RGB", (4, 3), (1, 2, 3)).save(stream, "PNG")
        >>> ImageDecoder(mode="RGB").decode(stream.getvalue(), where="red.png").shape
        torch.Size([3, 3, 4])
    """

    mode: Literal["RGB", "L", "RGBA"] = "RGB"
    size: tuple[int, int] | None = None
    upright: bool = False
    formats: Sequence[str] = FORMATS
    max_pixels: int = MAX_PIXELS
    library: Literal["pillow", "torchvision"] = "pillow"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode is {self.mode!r}; allowed are {', '.join(MODES)}.")
        for number in self.size or ():
            require_int("A number in size", number, least=1)
        if self.size is not None and len(self.size) != 2:
            raise UsageError(f"size is {self.size!r}; it has to be (height, width).")
        unknown = sorted(set(self.formats) - set(FORMATS))
        if unknown or not self.formats:
            raise UsageError(f"formats are {list(self.formats)}; allowed are {', '.join(FORMATS)}.")
        require_int("max_pixels", self.max_pixels, least=1)
        if self.library not in ("pillow", "torchvision"):
            raise UsageError(f"library is {self.library!r}; allowed are pillow and torchvision.")
        _pillow("Image")  # before anything is read
        if self.library == "torchvision":
            _torchvision()

    def decode(self, raw: bytes, *, where: str, path: object = None, sample: object = None) -> Tensor:
        """Decode a picture.

        Args:
            raw: The content of the file.
            where: Its name; begins the message of an error.
            path: The file, for the error.
            sample: Number or name of the sample, for the error.

        Returns:
            Tensor: ``uint8 [C, H, W]``, contiguous, C being 3, 1 or 4 by the mode.

        Raises:
            DataError: It is not a picture in an allowed format, is truncated or damaged, or has too many pixels.
        """
        pillow = _pillow("Image")
        try:
            with pillow.open(io.BytesIO(raw), formats=list(self.formats)) as image:
                if image.width * image.height > self.max_pixels:
                    came = f"{where} has {image.width} x {image.height} pixels"
                    raise _bad(f"{came}; allowed are {self.max_pixels} in all (max_pixels)", path, sample)
                if self.library == "torchvision" and not self.size and image.format in ("JPEG", "PNG"):
                    return self._by_torchvision(raw)
                return self._by_pillow(image)
        except UnsupportedMode as error:
            raise _bad(f"{where} {error}", path, sample) from error
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
            raise _bad(f"{where} has too many pixels ({error})", path, sample) from error
        except pillow.UnidentifiedImageError as error:
            raise _bad(f"{where} is no picture; allowed are {', '.join(self.formats)}", path, sample) from error
        except REFUSED as error:
            raise _bad(f"{where} is a damaged picture ({error})", path, sample) from error

    def _by_pillow(self, image: Image.Image) -> Tensor:
        picture: Image.Image = image
        if self.upright:
            picture = _pillow("ImageOps").exif_transpose(picture)
        picture = _in_mode(picture, self.mode)
        if self.size is not None:
            height, width = self.size
            picture = _pillow("ImageOps").fit(picture, (width, height), _pillow("Image").Resampling.BILINEAR)
        pixels = np.array(picture)
        pixels_HWC = pixels if pixels.ndim == 3 else pixels[:, :, None]
        # Rotated by NumPy: PyTorch would use threads, which a forked process must not.
        return torch.from_numpy(np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1)))

    def _by_torchvision(self, raw: bytes) -> Tensor:
        vision = _torchvision()
        modes = {"RGB": "RGB", "L": "GRAY", "RGBA": "RGB_ALPHA"}
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        decoded = vision.decode_image(data, vision.ImageReadMode[modes[self.mode]], self.upright)
        return decoded.contiguous() if decoded.dtype == torch.uint8 else (decoded >> 8).to(torch.uint8)


class UnsupportedMode(Exception):
    """The picture's mode cannot be converted to 8 bits a channel."""


def _in_mode(picture: Image.Image, mode: str) -> Image.Image:
    """Return the picture in a mode of 8 bits a channel."""
    if picture.mode == mode:
        return picture
    if picture.mode.startswith("I;16"):
        picture = _pillow("Image").fromarray((np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8))
    if picture.mode not in EIGHT_BITS:
        raise UnsupportedMode(f"has pixels of Pillow's mode {picture.mode!r}; allowed are 8 or 16 bits a channel")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # Pillow warns of a direct conversion
    return picture.convert(mode)


def _pillow(module: str) -> ModuleType:
    return import_extra(f"PIL.{module}", "Reading pictures")


def _torchvision() -> Any:
    try:
        from torchvision import io as vision
    except (ImportError, RuntimeError, OSError) as error:  # raised by one built for another torch
        todo = "install the version that belongs to your torch, or say library='pillow'"
        raise UsageError(f"library is 'torchvision', which cannot be imported ({error}); {todo}.") from error
    return vision


def _bad(problem: str, path: object, sample: object) -> DataError:
    return DataError(f"{problem}. Replace it, or take it away.", path=path, sample=sample)
