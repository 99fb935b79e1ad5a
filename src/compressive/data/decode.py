"""From the bytes of a file to pixels: upright, in RGB, or one line that says why not."""

import io
import re
import struct
import zlib
from contextlib import suppress

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional
from torchvision.io import ImageReadMode, decode_image

from compressive.config import Data

MAX_PIXELS = Data().max_pixels  # also PIL's own limit
_COMMON = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
EXTENSIONS = frozenset(_COMMON | {".ppm", ".pgm", ".pbm", ".pnm", ".avif"})
# PIL's names of formats that are read. Others may start programs: EPS runs Ghostscript.
_FORMATS = ("PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "ICO", "TGA", "JPEG2000")
_PNG = b"\x89PNG\r\n\x1a\n"


class Unreadable(ValueError):
    """An image that cannot be decoded; the message is the reason."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> UInt8[Tensor, "3 h w"]:
    """Decode an image to RGB, upright by its EXIF orientation and without transparency."""
    # Of an animation the first frame; of 16 bits the upper 8. The GIL is free while pixels are
    # decoded. A file without its end is `Unreadable`. Damage further inside is found for sure only
    # in PNG, the one format with checksums.
    if not data:
        raise Unreadable("empty file")
    if Image.MAX_IMAGE_PIXELS and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # PIL warns of more, and rejects twice as many
    try:
        # Of WebP only the simple forms: torchvision knows neither the orientation nor the animation
        # that the extended one, VP8X, may hold.
        if data[:2] == b"\xff\xd8" or data[8:16] in (b"WEBPVP8 ", b"WEBPVP8L"):
            _require_size(_header_pixels(data), max_pixels)
            # torch warns of memory that it may not write to; the copy is 1 % of the decoding.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
        # Not torchvision's decode_png: a damaged PNG ends the process there. In 0.29, 595 of 600
        # with a few bytes changed or with zeros for an end were segmentation faults.
        if data.startswith(_PNG):
            _require_checksums(data)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            _require_size(picture.width * picture.height, max_pixels)
            return rgb(picture)
    except Unreadable:
        raise
    except Image.DecompressionBombError as error:
        _require_size(int(re.findall(r"\d+", str(error))[0]), max_pixels)
        raise Unreadable(first_line(error)) from None
    except struct.error:
        raise Unreadable("truncated") from None
    except UnidentifiedImageError:
        known = "in no known image format, or its header is damaged"
        raise Unreadable(f"{known}; it begins with {data[:8]!r}") from None
    except Exception as error:  # of PIL's plugins each has kinds of its own
        raise Unreadable(first_line(error)) from error


def shrink(
    image: UInt8[Tensor, "3 h w"], side: int, least: int = 0, most: int = 0
) -> UInt8[Tensor, "3 new_h new_w"]:
    """Shrink the longer side to `side`, antialiased bicubic; smaller images stay as they are."""
    # No shorter side goes below `least`: an image too long for that loses both ends, down to `most`
    # pixels; 0: to `side`, or to twice `least` where that is more.
    sides = image.shape[1:]
    if max(sides) <= side:
        return image
    share = max(side / max(sides), least / min(sides))
    if share < 1:
        size = [max(1, round(n * share)) for n in sides]
        image = _resize(image, size)
    for axis in (1, 2):
        if (excess := image.shape[axis] - (most or max(side, 2 * least))) > 0:
            image = image.narrow(axis, excess // 2, image.shape[axis] - excess)
    return image


def _resize(image: UInt8[Tensor, "3 h w"], size: list[int]) -> UInt8[Tensor, "3 new_h new_w"]:
    """Antialiased bicubic; a column of single pixels lies down (torch without AVX repeats one)."""
    height, width = size
    if width == 1 < height:
        return _resize(image.mT, [width, height]).mT
    return functional.interpolate(image[None], size, mode="bicubic", antialias=True)[0]


def rgb(picture: Image.Image) -> UInt8[Tensor, "3 h w"]:
    """What PIL has opened, as `decode` would have it."""
    picture.load()  # first, so that nothing below hides a truncated file
    # Of 16 bits in a PNG or PPM; elsewhere small numbers may be whole colors, not black ones.
    is_open = picture.mode == "I" and picture.format not in ("PNG", "PPM", None)
    with suppress(Exception):  # bad EXIF data is no reason to lose a good picture
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise Unreadable("pixels are floating-point numbers, which have no agreed range")
    if picture.mode.startswith("I"):  # PIL would clip 16 bits at 255
        gray = np.asarray(picture)
        if gray.min() < 0 or gray.max() > 65535 or (is_open and gray.max() < 256):
            raise Unreadable("pixels are 32-bit numbers, which have no agreed range")
        return torch.from_numpy((gray >> 8).astype(np.uint8)).expand(3, -1, -1)
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


def first_line(error: Exception) -> str:
    """What an error says, without the place in torchvision's sources or the lines after."""
    line = str(error).split("\n")[0] or type(error).__name__
    return re.sub(r"^.*\.cpp:\d+, ", "", line)


def _require_size(count: int, most: int) -> None:
    if count > most:
        hint = "raise data.max_pixels or shrink the image"
        raise Unreadable(f"{count:,} pixels, but data.max_pixels is {most:,}; {hint}")


def _header_pixels(data: bytes) -> int:
    """Return width times height of a JPEG or simple WebP, or 0 if its header is damaged."""
    try:
        if data[8:16] == b"WEBPVP8 ":
            width, height = struct.unpack_from("<HH", data, 26)  # 14 bits each
            return (width & 0x3FFF) * (height & 0x3FFF)
        if data[8:16] == b"WEBPVP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
        at = 2
        while (at := data.find(b"\xff", at) + 1) > 0:  # as libjpeg searches for markers
            while (marker := data[at]) == 0xFF:
                at += 1
            at += 1
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of a frame
                height, width = struct.unpack_from(">HH", data, at + 3)
                return height * width
            if marker == 0xDA:
                return 0
            if marker > 1 and not 0xD0 <= marker <= 0xD7:
                at += struct.unpack_from(">H", data, at)[0]
    except (IndexError, struct.error):  # the decoder says what is wrong
        pass
    return 0


def _require_checksums(data: bytes) -> None:
    """Every critical chunk of a PNG whole, up to the last. PIL does not look at those of pixels."""
    view, at, kind = memoryview(data), len(_PNG), b""
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, at)
        (stored,) = struct.unpack_from(">I", data, at + 8 + size)
        if kind[:1].isupper() and zlib.crc32(view[at + 4 : at + 8 + size]) != stored:
            raise Unreadable("damaged: a checksum does not match")
        at += 12 + size
