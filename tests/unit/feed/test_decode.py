"""Pictures from bytes: what comes out, and that whatever is wrong is an error that names the sample."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from onebox.errors import DataError, UsageError
from onebox.feed.decode import FORMATS, ImageDecoder

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)


def encoded(picture, kind="PNG", **settings):
    stream = io.BytesIO()
    picture.save(stream, kind, **settings)
    return stream.getvalue()


def decode(raw, **settings):
    return ImageDecoder(**settings).decode(raw, where="cat.png", path="/x/cat.png", sample=3)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF"])
def test_colours_come_as_they_are(kind):
    decoded = decode(encoded(Image.fromarray(PIXELS[:, :, :3]), kind))
    assert decoded.dtype == torch.uint8
    assert decoded.is_contiguous()
    assert np.array_equal(decoded.permute(1, 2, 0).numpy(), PIXELS[:, :, :3])


@pytest.mark.parametrize("kind", ["JPEG", "GIF"])
def test_other_formats_are_what_pillow_says(kind):
    raw = encoded(Image.fromarray(PIXELS[:, :, :3]), kind)
    expected = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))
    assert np.array_equal(decode(raw).permute(1, 2, 0).numpy(), expected)


def test_modes():
    grey = encoded(Image.fromarray(PIXELS[:, :, 0]))
    assert torch.equal(decode(grey, mode="L")[0], torch.from_numpy(PIXELS[:, :, 0].copy()))
    assert torch.equal(decode(grey), decode(grey, mode="L").expand(3, 5, 7))
    clear = encoded(Image.fromarray(PIXELS))
    assert np.array_equal(decode(clear, mode="RGBA").permute(1, 2, 0).numpy(), PIXELS)
    assert np.array_equal(decode(clear).permute(1, 2, 0).numpy(), PIXELS[:, :, :3])


def test_a_palette_with_transparency():
    picture = Image.fromarray(PIXELS[:, :, :3]).quantize(16)
    raw = encoded(picture, transparency=bytes(range(16)))
    assert np.array_equal(decode(raw).permute(1, 2, 0).numpy(), np.asarray(picture.convert("RGB")))


def test_sixteen_bits_keep_the_upper_eight():
    values = PIXELS[:, :, 0].astype(np.uint16) * 256 + 77
    raw = encoded(Image.fromarray(values))
    assert np.array_equal(decode(raw, mode="L")[0].numpy(), PIXELS[:, :, 0])


def test_numbers_with_a_point_are_refused():
    raw = encoded(Image.fromarray(PIXELS[:, :, 0].astype(np.float32)), "TIFF")
    with pytest.raises(DataError, match=r"cat\.png has pixels of Pillow's mode 'F'; allowed are 8 or 16 bits"):
        decode(raw)


def test_size_covers_and_cuts_the_centre():
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 2:10] = 200
    assert decode(encoded(Image.fromarray(wide)), size=(2, 2)).flatten().unique().tolist() == [200]
    assert decode(encoded(Image.fromarray(wide)), size=(9, 3)).shape == (3, 9, 3)


def test_orientation_is_used_when_asked_for():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    raw = encoded(Image.fromarray(PIXELS[:, :, :3]), "PNG", exif=exif)
    assert decode(raw).shape == (3, 5, 7)
    assert torch.equal(decode(raw, upright=True), decode(raw).permute(0, 2, 1).flip(2))


# ---- what is wrong


def test_what_is_no_picture():
    with pytest.raises(DataError, match=r"cat\.png is no picture; allowed are JPEG, PNG") as raised:
        decode(b"<html>404</html>")
    assert (raised.value.path, raised.value.sample) == ("/x/cat.png", 3)


def test_other_formats_are_not_tried():
    with pytest.raises(DataError, match="is no picture; allowed are PNG"):
        decode(encoded(Image.fromarray(PIXELS[:, :, :3]), "JPEG"), formats=("PNG",))
    with pytest.raises(DataError, match="is no picture"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_picture_that_is_cut_off(kind):
    raw = encoded(Image.fromarray(np.tile(PIXELS[:, :, :3], (20, 20, 1))), kind)
    with pytest.raises(DataError, match=r"cat\.png is a damaged picture"):
        decode(raw[: len(raw) // 2])


def bomb(width, height):
    """A PNG that claims a size, and has no content."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize("size", [(20_000, 20_000), (10_000, 10_000), (9_000, 9_950)])
def test_a_bomb_is_refused_by_its_header(size):
    with pytest.raises(DataError, match=r"too many pixels|allowed are 89478485 in all"):
        decode(bomb(*size))


def test_pixels_can_be_limited():
    raw = encoded(Image.fromarray(PIXELS[:, :, :3]))
    assert decode(raw, max_pixels=35).shape == (3, 5, 7)
    with pytest.raises(DataError, match=r"cat\.png has 7 x 5 pixels; allowed are 34 in all \(max_pixels\)"):
        decode(raw, max_pixels=34)


@pytest.mark.filterwarnings("ignore")  # Pillow's, of what it finds odd
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"]))
def test_damage_is_an_error_or_a_picture(data, kind):
    raw = bytearray(encoded(Image.fromarray(PIXELS[:, :, :3]), kind))
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=8)):
        raw[place] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(raw[: data.draw(st.integers(0, len(raw)))]), max_pixels=100_000)
    except DataError as error:
        assert error.sample == 3
    else:
        assert decoded.dtype == torch.uint8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "P"}, "mode is 'P'; allowed are RGB, L, RGBA"),
        ({"size": (0, 3)}, "size is 0; it has to be an integer of at least 1"),
        ({"size": (3,)}, "it has to be .height, width."),
        ({"formats": ("EPS",)}, f"allowed are {', '.join(FORMATS)}"),
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"library": "cv2"}, "library is 'cv2'"),
    ],
)
def test_settings_that_are_not_allowed(settings, said):
    with pytest.raises(UsageError, match=said):
        ImageDecoder(**settings)


# ---- torchvision


def test_torchvision_where_it_is_not():
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        with pytest.raises(UsageError, match="library is 'torchvision', which cannot be imported"):
            ImageDecoder(library="torchvision")
    else:
        pytest.skip("torchvision is installed")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_torchvision_decodes_the_same(kind, mode):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    raw = encoded(Image.fromarray(np.tile(PIXELS[:, :, :3], (20, 20, 1))), kind)
    ours, theirs = decode(raw, mode=mode), decode(raw, mode=mode, library="torchvision")
    assert theirs.shape == ours.shape
    assert (ours.int() - theirs.int()).abs().max() <= 2
    with pytest.raises(DataError, match="is a damaged picture"):
        decode(raw[: len(raw) // 2], library="torchvision")
