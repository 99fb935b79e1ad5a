"""Decode encoded images to upright RGB pixels, or raise `Unreadable` with a one-line reason."""

import functools
import io
import math
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from compressive.config import Data
from compressive.platforms.compiler_import import compiler_deferred

with compiler_deferred():
    from torchvision.io import ImageReadMode, decode_image

MAX_PIXELS = Data().max_pixels  # also PIL's own limit
_COMMON = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
HEIC_EXTENSIONS = frozenset({".heic", ".heif"})  # images only if the extra `heic` is installed
_HEIC_FILES = HEIC_EXTENSIONS if find_spec("pillow_heif") else frozenset()
EXTENSIONS = frozenset(_COMMON | {".ppm", ".pgm", ".pbm", ".pnm", ".avif"} | _HEIC_FILES)
# Formats read by PIL. Others may start programs: EPS runs Ghostscript.
_FORMATS = ("PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "ICO", "TGA", "JPEG2000")
# Chunks of a PNG that need no judgment. PIL limits the size of texts and color profiles.
_PLAIN = frozenset(
    (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"pHYs")
)
_PLAIN |= {b"bKGD", b"tIME", b"sBIT", b"hIST", b"tEXt"}
_PNG = b"\x89PNG\r\n\x1a\n"
_HEIC_BRANDS = re.compile(b"hei[cxms]|hev[cxms]|mif1|msf1")


class Unreadable(ValueError):
    """Raised if an image cannot be decoded; the message is the reason."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> UInt8[Tensor, "3 h w"]:
    """Decode an image to RGB; apply the EXIF orientation and drop transparency."""
    # Of an animation use the first frame, of 16 bits the upper 8. The GIL is released while pixels
    # are decoded. A truncated file is `Unreadable`. Other damage is reliably detected only in PNG,
    # the one format with checksums.
    if not data:
        raise Unreadable("empty file")
    if Image.MAX_IMAGE_PIXELS and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # PIL warns of more, and rejects twice as many
    try:
        if (found := _decoded_fast(data, max_pixels)) is not None:
            return found
        formats = (*_FORMATS, *_heic_format(data))
        with Image.open(io.BytesIO(data), formats=formats) as picture:
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
    except Exception as error:  # each of PIL's plugins raises its own types
        raise Unreadable(first_line(error)) from error


def _decoded_fast(data: bytes, max_pixels: int) -> Tensor | None:
    """Decode JPEG, simple WebP and plain PNG without PIL; return None for other files."""
    # Of WebP only the simple formats: torchvision supports neither the orientation nor the
    # animation that the extended format, VP8X, may hold.
    codec = torchcodec_decoder()
    if data[:2] == b"\xff\xd8" or data[8:16] in (b"WEBPVP8 ", b"WEBPVP8L"):
        _require_size(_header_pixels(data), max_pixels)
        # torch warns about read-only memory; the copy takes 1 % of the decoding time.
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if codec is not None:
            return codec(encoded)
        return decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    # Do not use torchvision's decode_png: a damaged PNG crashes it. In 0.29, 595 of 600 files
    # with a few changed bytes or an end of zeros caused a segmentation fault.
    if data.startswith(_PNG):
        is_plain = _require_checksums(data)
        _require_size(math.prod(struct.unpack_from(">II", data, 16)), max_pixels)
        if codec is not None and is_plain:
            with suppress(RuntimeError):  # PIL reads some damaged files, and says what is wrong
                return codec(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return None


@functools.cache
def torchcodec_decoder() -> Callable[[Tensor], Tensor] | None:
    """Return torchcodec's decoder to RGB, or None if it is not installed or does not load."""
    try:
        from torchcodec.decoders import decode_image as decode_with_torchcodec
    except (ImportError, OSError, RuntimeError):  # also if it was built for another torch
        return None
    return functools.partial(decode_with_torchcodec, mode="RGB")


def shrink(
    image: UInt8[Tensor, "3 h w"],
    side: int,
    least: int = 0,
    most: int = 0,
    resize: Callable[[Tensor, list[int]], Tensor] | None = None,
) -> UInt8[Tensor, "3 new_h new_w"]:
    """Shrink the longer side to `side`, antialiased bicubic; return smaller images unchanged."""
    # The shorter side is at least `least`. If the image is then too long, both ends are cropped, to
    # `most` pixels; 0 means the larger of `side` and twice `least`.
    resize, sides = resize or resize_image, image.shape[1:]
    if max(sides) <= side:
        return image
    share = max(side / max(sides), least / min(sides))
    if share < 1:
        size = [max(1, round(n * share)) for n in sides]
        image = resize(image, size)
    for axis in (1, 2):
        if (excess := image.shape[axis] - (most or max(side, 2 * least))) > 0:
            image = image.narrow(axis, excess // 2, image.shape[axis] - excess)
    return image


def resize_image(image: UInt8[Tensor, "3 h w"], size: list[int]) -> UInt8[Tensor, "3 new_h new_w"]:
    """Resize, antialiased bicubic; transpose if one pixel wide (wrong in torch without AVX)."""
    height, width = size
    if width == 1 < height:
        return resize_image(image.mT, [width, height]).mT
    return functional.interpolate(image[None], size, mode="bicubic", antialias=True)[0]


def rgb(picture: Image.Image) -> UInt8[Tensor, "3 h w"]:
    """Convert an image opened by PIL to the result of `decode`."""
    picture.load()  # first, so that nothing below hides a truncated file
    # In PNG and PPM mode I has 16 bits; in other formats small values need not mean dark pixels.
    is_open = picture.mode == "I" and picture.format not in ("PNG", "PPM", None)
    with suppress(Exception):  # invalid EXIF data does not make an image unreadable
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
    """Return the first line of an error message, without the location in torchvision's sources."""
    line = str(error).split("\n")[0] or type(error).__name__
    return re.sub(r"^.*\.cpp:\d+, ", "", line)


def _require_size(count: int, most: int) -> None:
    if count > most:
        hint = "raise data.max_pixels or shrink the image"
        raise Unreadable(f"{count:,} pixels, but data.max_pixels is {most:,}; {hint}")


def _heic_format(data: bytes) -> tuple[str, ...]:
    """Return PIL's name of the format of a HEIC image, registered, or () for other images."""
    if data[4:8] != b"ftyp":
        return ()
    brands = data[8 : int.from_bytes(data[:4])]
    if b"avif" in brands or not _HEIC_BRANDS.match(brands):
        return ()
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        hint = "HEIC, which needs the extra heic: pip install 'compressive[heic]'"
        raise Unreadable(hint) from None
    register_heif_opener()
    return ("HEIF",)


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
    except (IndexError, struct.error):  # the decoder reports what is wrong
        pass
    return 0


def _require_checksums(data: bytes) -> bool:
    """Raise `Unreadable` if a critical chunk of a PNG is damaged; PIL does not check pixel data.

    Return whether the file is plain, so that torchcodec and PIL return the same.
    """
    # torchcodec rounds 16 bits; we and PIL keep the upper 8.
    view, at, kind, is_plain = memoryview(data), len(_PNG), b"", data[24:25] <= b"\x08"
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, at)
        (stored,) = struct.unpack_from(">I", data, at + 8 + size)
        if zlib.crc32(view[at + 4 : at + 8 + size]) != stored:
            if kind[:1].isupper():
                raise Unreadable("damaged: a checksum does not match")
            is_plain = False
        is_plain &= kind in _PLAIN and (kind == b"IDAT" or size < 2**16)
        at += 12 + size
    return is_plain
