"""Image files for tests: unusual ones that can be read, and damaged ones that cannot."""

import base64
import gzip
import io
import random
import struct
import zipfile
import zlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageOps

HEIGHT, WIDTH = 20, 28
# Written with libjpeg's `arith_code`, which PIL does not offer.
_ARITHMETIC = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwc"
    "KDcpLDAxNDQ0Hyc5PTgyPC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIy"
    "MjIyMjIyMjIyMjIyMjIyMjIyMjL/yQARCAAUABwDASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwDSL7jm"
    "ajGr7ogbqyHNnHQ8YVA3wF/v0keXLPf+5jyO/un1B5pBSHM5jQaTyueRHsu02uREAkWqlqhJ1RTMEUIne1CYyj54qqcH"
    "uk9rY+SqxiHCSZ27sdAZ1O+Yr4J7RKOjsMVyNJEEStTJ07GbxER+YFJW4OYkLTP79FNTCHC1qMJDRPtwm9rgD/bC5h+S"
    "E5Gbtq4AXfPSq8dndRW16OhywXIfqcQC/9k="
)


class Kind(NamedTuple):
    """The content of a file, and the expected result of reading it."""

    suffix: str
    data: bytes
    reason: str | None = None  # part of the error message; None for a readable file
    pixels: np.ndarray | None = None  # for a readable file whose colors PIL clips


def picture(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    """Return an image without symmetry, smooth enough to survive JPEG."""
    small = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, body: bytes, check: int | None = None) -> bytes:
    crc = zlib.crc32(kind + body) if check is None else check
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)


def png(*parts: bytes, size: tuple[int, int] = (WIDTH, HEIGHT), depth: int = 8, color: int = 2,
        interlace: int = 0) -> bytes:  # fmt: skip
    head = struct.pack(">IIBBBBB", *size, depth, color, 0, 0, interlace)
    whole = (chunk(b"IHDR", head), *parts, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def png_rows(pixels: np.ndarray) -> bytes:
    """Return the IDAT chunk of rows of bytes without a filter."""
    return chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels)))


def interlaced(pixels: np.ndarray) -> bytes:
    """Return a PNG in the seven passes of Adam7, which PIL does not write."""
    passes = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4))
    passes += ((2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1))
    parts = [pixels[y::dy, x::dx] for y, dy, x, dx in passes]
    rows = b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)
    return png(chunk(b"IDAT", zlib.compress(rows)), interlace=1)


def with_chunk(extra: bytes) -> bytes:
    """Return a PNG with an additional chunk after the first."""
    whole = encoded("PNG")
    return whole[:33] + extra + whole[33:]


def bmp(bits: int, body: bytes, compression: int = 0, palette: bytes = b"") -> bytes:
    """Return a BMP of 8 x 4 pixels."""
    head = struct.pack("<IiiHHIIiiII", 40, 8, 4, 1, bits, compression, len(body), 0, 0,
                       len(palette) // 4, 0)  # fmt: skip
    start = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + palette + body


def jpeg_with(at: bytes, offset: int, new: bytes, **options: Any) -> bytes:
    """Return a JPEG with some bytes of a marker replaced."""
    data = bytearray(encoded("JPEG", **options))
    start = data.index(at) + offset
    data[start : start + len(new)] = new
    return bytes(data)


def without_huffman_tables() -> bytes:
    """Return a JPEG without its tables, as the frames of a motion JPEG are."""
    data = encoded("JPEG")
    while (at := data.find(b"\xff\xc4")) >= 0:
        data = data[:at] + data[at + 2 + struct.unpack_from(">H", data, at + 2)[0] :]
    return data


def corrupted_scan() -> bytes:
    """Return a JPEG with overwritten bytes in the middle of its pixel data."""
    data = bytearray(encoded("JPEG", picture(64, 64), quality=95))
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    data[middle : middle + 40] = bytes(range(1, 41))
    return bytes(data)


def random_after(magic: bytes, suffix: str) -> Kind:
    return Kind(suffix, magic + random.Random(0).randbytes(2000), reason="")


def turned(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


def tiff_with(tag: int, kind: int, count: int, value: int) -> bytes:
    """Return a TIFF with a changed value in an entry of its directory."""
    data = bytearray(encoded("TIFF"))
    (at,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, at)
    for i in range(at + 2, at + 2 + 12 * entries, 12):
        if struct.unpack_from("<H", data, i)[0] == tag:
            struct.pack_into("<HHII", data, i, tag, kind, count, value)
    return bytes(data)


def zip_of_zeros() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.png", bytes(5_000_000))
    return file.getvalue()


def _modes() -> dict[str, Kind]:
    """Return images of every mode that PIL writes."""
    image, deep = picture(), np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 100
    alpha = Image.fromarray((deep // 220).astype(np.uint8))
    upper = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, axis=2)
    gray = Image.fromarray(deep.astype(np.uint16))
    rgba, la = image.copy(), image.convert("LA")
    rgba.putalpha(alpha)
    la.putalpha(alpha)
    found = {
        f"png mode {mode}": Kind(".png", encoded("PNG", image.convert(mode)))
        for mode in ("1", "L", "P")
    }
    found |= {
        f"tiff mode {mode}": Kind(".tif", encoded("TIFF", image.convert(mode)))
        for mode in ("1", "L", "P", "CMYK", "RGBX", "LAB")
    }
    no_range = "no agreed range"
    tall, color = deep.astype(np.int32) * 10**6 // 100, np.stack([deep] * 3, axis=2)
    return found | {
        "png mode LA": Kind(".png", encoded("PNG", la)),
        "png mode RGBA": Kind(".png", encoded("PNG", rgba)),
        "png with a transparent palette entry": Kind(
            ".png", encoded("PNG", image.convert("P"), transparency=3)
        ),
        "png with a transparent color": Kind(".png", with_chunk(chunk(b"tRNS", bytes(6)))),
        "png with gamma": Kind(".png", with_chunk(chunk(b"gAMA", struct.pack(">I", 100_000)))),
        "png of 16-bit gray": Kind(".png", encoded("PNG", gray), pixels=upper),
        "png of 16-bit color": Kind(
            ".png", png(png_rows(color.astype(">u2")), depth=16), pixels=upper
        ),
        "png in seven passes": Kind(".png", interlaced(np.asarray(image))),
        "tiff of 16 bits": Kind(".tif", encoded("TIFF", gray), pixels=upper),
        "pgm of 16 bits": Kind(".pgm", encoded("PPM", gray), pixels=upper),
        "tiff of floats": Kind(
            ".tif", encoded("TIFF", Image.fromarray(deep.astype(np.float32))), no_range
        ),
        "tiff of large 32-bit numbers": Kind(
            ".tif", encoded("TIFF", Image.fromarray(tall)), no_range
        ),
        "tiff of small 32-bit numbers": Kind(
            ".tif", encoded("TIFF", Image.fromarray((deep // 250).astype(np.int32))), no_range
        ),
    }


def _jpegs() -> dict[str, Kind]:
    image, whole = picture(), encoded("JPEG")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    found = {
        f"jpeg with orientation {turn}": Kind(".jpg", encoded("JPEG", exif=turned(turn)))
        for turn in (*range(10), 65535)
    }
    found |= {
        f"jpeg of {width} x {height}": Kind(".jpg", encoded("JPEG", picture(height, width)))
        for width, height in ((1, 1), (1, 40), (40, 1), (65500, 1), (1, 65500))
    }
    found |= {
        f"jpeg with {name} colors": Kind(".jpg", encoded("JPEG", subsampling=name))
        for name in ("4:4:4", "4:2:2", "4:2:0")
    }
    return found | {
        "jpeg mode L": Kind(".jpg", encoded("JPEG", image.convert("L"))),
        "jpeg mode CMYK": Kind(".jpg", encoded("JPEG", image.convert("CMYK"))),
        "jpeg in several scans": Kind(".jpg", encoded("JPEG", progressive=True)),
        "jpeg in several scans, cut": Kind(
            ".jpg", encoded("JPEG", progressive=True)[:-150], "truncated"
        ),
        "jpeg with restart markers": Kind(
            ".jpg", encoded("JPEG", picture(64, 64), restart_marker_blocks=1)
        ),
        "jpeg with arithmetic coding": Kind(".jpg", base64.b64decode(_ARITHMETIC)),
        "jpeg with 4:1:1 colors": Kind(".jpg", jpeg_4_1_1()),
        "jpeg with broken exif data": Kind(".jpg", encoded("JPEG", exif=b"Exif\0\0nonsense")),
        "jpeg with endless exif data": Kind(
            ".jpg", encoded("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(40))
        ),
        "jpeg with a color profile": Kind(".jpg", encoded("JPEG", icc_profile=profile)),
        "jpeg with a broken color profile": Kind(".jpg", encoded("JPEG", icc_profile=b"nonsense")),
        "jpeg with a color profile of 2 MB": Kind(
            ".jpg", encoded("JPEG", icc_profile=bytes(2_000_000))
        ),
        "jpeg with a long comment": Kind(".jpg", encoded("JPEG", comment=b"x" * 60_000)),
        "jpeg without huffman tables": Kind(".jpg", without_huffman_tables()),
        "jpeg with a corrupted scan": Kind(".jpg", corrupted_scan()),
        "jpeg of several pictures (mpo)": Kind(
            ".jpg", encoded("MPO", save_all=True, append_images=[ImageOps.invert(image)])
        ),
        "jpeg of 12 bits": Kind(".jpg", jpeg_with(b"\xff\xc0", 4, b"\x0c"), "precision"),
        "jpeg of lossless coding": Kind(".jpg", jpeg_with(b"\xff\xc0", 1, b"\xc3"), ""),
        "jpeg-ls": Kind(".jpg", jpeg_with(b"\xff\xc0", 1, b"\xf7"), ""),
        "jpeg with 0 lines": Kind(".jpg", jpeg_with(b"\xff\xc0", 5, b"\0\0"), ""),
        "jpeg with 0 columns": Kind(".jpg", jpeg_with(b"\xff\xc0", 7, b"\0\0"), ""),
        "jpeg with 9 channels": Kind(".jpg", jpeg_with(b"\xff\xc0", 9, b"\x09"), ""),
        "jpeg with a table of zeros": Kind(".jpg", jpeg_with(b"\xff\xdb", 5, bytes(64))),
        "jpeg with too long a segment": Kind(".jpg", jpeg_with(b"\xff\xdb", 2, b"\xff\xff"), ""),
        "jpeg of 400 million pixels": Kind(
            ".jpg", jpeg_with(b"\xff\xc0", 5, struct.pack(">HH", 20_000, 20_000)), "max_pixels"
        ),
        "jpeg with more lines than it holds": Kind(
            ".jpg", jpeg_with(b"\xff\xc0", 5, struct.pack(">H", 200))
        ),
        "jpeg header alone": Kind(".jpg", whole[: whole.index(b"\xff\xda")], "truncated"),
        "jpeg start alone": Kind(".jpg", b"\xff\xd8", ""),
        "jpeg start and end": Kind(".jpg", b"\xff\xd8\xff\xd9", ""),
    }


def jpeg_4_1_1() -> bytes:
    """Return a JPEG whose luma has four columns for one of chroma; PIL does not write it."""
    # Gray of 32 x 8: four blocks of luma, then one of each chroma. The code of a block without any
    # change, 00 1010, comes from the standard's tables.
    data = encoded("JPEG", Image.new("RGB", (32, 8), (128, 128, 128)), subsampling="4:2:2")
    at = data.index(b"\xff\xc0")
    data = data[: at + 11] + b"\x41" + data[at + 12 :]
    scan = data.index(b"\xff\xda") + 14
    bits = "001010" * 4 + "0000" * 2
    bits += "1" * (-len(bits) % 8)
    return data[:scan] + int(bits, 2).to_bytes(len(bits) // 8) + b"\xff\xd9"


def _others() -> dict[str, Kind]:
    """Return files of formats other than JPEG, and PNG with odd headers."""
    image, second = picture(), ImageOps.invert(picture())
    first = image.quantize(16).convert("RGB")
    frames: dict[str, Any] = {"save_all": True, "append_images": [second]}
    colors = bytes(range(64))
    rle8 = b"\x08\x01\x00\x00" * 4 + b"\x00\x01"
    rows = np.asarray(image)
    found = {
        f"{kind.lower()} with orientation 6": Kind(
            f".{kind.lower()}", encoded(kind, exif=turned(6))
        )
        for kind in ("PNG", "WEBP", "TIFF", "AVIF")
    }
    found |= {
        f"tiff with {name}": Kind(".tiff", encoded("TIFF", compression=name))
        for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "tiff_deflate")
    }
    found |= {
        f"bmp of {bits} bits": Kind(".bmp", bmp(bits, bytes(range(4 * row)), palette=palette))
        for bits, row, palette in ((1, 4, colors[:8]), (4, 4, colors), (8, 8, colors * 16))
    }
    found |= {
        f"bmp of {bits} bits": Kind(".bmp", bmp(bits, bytes(range(4 * bits))))
        for bits in (16, 24, 32)
    }
    return found | {
        "bmp of 8 bits in runs": Kind(".bmp", bmp(8, rle8, 1, colors * 4)),
        "bmp of 7 bits": Kind(".bmp", bmp(7, bytes(64)), ""),
        "bmp with too short a body": Kind(".bmp", bmp(24, bytes(8)), "truncated"),
        "gif": Kind(".gif", encoded("GIF", first)),
        "gif of two frames": Kind(".gif", encoded("GIF", first, **frames)),
        "png of two frames": Kind(".png", encoded("PNG", **frames)),
        "webp of two frames": Kind(".webp", encoded("WEBP", lossless=True, **frames)),
        "webp": Kind(".webp", encoded("WEBP")),
        "webp without loss": Kind(".webp", encoded("WEBP", lossless=True)),
        "webp with transparency": Kind(
            ".webp", encoded("WEBP", image.convert("RGBA"), lossless=True)
        ),
        "tiff of two pages": Kind(".tiff", encoded("TIFF", **frames)),
        "tiff in tiles": Kind(
            ".tiff", encoded("TIFF", picture(64, 64), tile=(16, 16), compression="tiff_lzw")
        ),
        "tiff of fax": Kind(".tiff", encoded("TIFF", image.convert("1"), compression="group4")),
        "tiff of 2 billion columns": Kind(".tiff", tiff_with(256, 4, 1, 2**31 - 1), "max_pixels"),
        "tiff of 0 columns": Kind(".tiff", tiff_with(256, 4, 1, 0), ""),
        "tiff of unknown compression": Kind(".tiff", tiff_with(259, 3, 1, 31000), ""),
        "tiff with a strip outside of it": Kind(".tiff", tiff_with(273, 4, 1, 2**31 - 9), ""),
        "avif": Kind(".avif", encoded("AVIF")),
        "avif, cut": Kind(".avif", encoded("AVIF")[:-40], ""),
        "ppm": Kind(".ppm", encoded("PPM")),
        "pgm": Kind(".pgm", encoded("PPM", image.convert("L"))),
        "pbm": Kind(".pbm", encoded("PPM", image.convert("1"))),
        "ppm of text": Kind(".ppm", b"P3 2 1 255 255 0 0 0 0 255\n"),
        "ppm of a thousand-digit size": Kind(".ppm", b"P6 " + b"9" * 1000 + b" 1 255 abc", ""),
        "png of 0 columns": Kind(".png", png(png_rows(rows), size=(0, HEIGHT)), ""),
        "png of 0 lines": Kind(".png", png(png_rows(rows), size=(WIDTH, 0)), ""),
        "png of 65535 columns": Kind(".png", encoded("PNG", picture(1, 65535))),
        "png of 65535 lines": Kind(".png", encoded("PNG", picture(65535, 1))),
        "png of 4 billion columns": Kind(
            ".png", png(png_rows(rows), size=(2**31 - 1, 2**31 - 1)), "max_pixels"
        ),
        "png of 7 bits": Kind(".png", png(png_rows(rows), depth=7), ""),
        "png without pixels": Kind(".png", png(), ""),
        "png of fewer lines than stated": Kind(".png", png(png_rows(rows[:9]))),
        "png with a wrong checksum of text": Kind(
            ".png", with_chunk(chunk(b"tEXt", b"a\0b", check=7)), "damaged"
        ),
        "png with a wrong checksum of pixels": Kind(
            ".png", png(chunk(b"IDAT", zlib.compress(bytes(9)), check=7)), "checksum"
        ),
        "png with an unknown critical chunk": Kind(".png", with_chunk(chunk(b"ABCD", b"x"))),
        "png with a text of 5 MB": Kind(
            ".png", with_chunk(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(5_000_000)))), ""
        ),
        "png with a broken color profile": Kind(".png", with_chunk(chunk(b"iCCP", b"x\0\0abc"))),
        "png with a color profile of 5 MB": Kind(
            ".png",
            with_chunk(chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(5_000_000)))),
            "too large",
        ),
        "ico named png": Kind(".png", encoded("ICO", picture(16, 16))),
        "tga named png": Kind(".png", encoded("TGA")),
        "jpeg 2000 named jpg": Kind(".jpg", encoded("JPEG2000")),
    }


def _no_images() -> dict[str, Kind]:
    """Return damaged files, and files that are not images."""
    found: dict[str, Kind] = {}
    for kind, suffix in (("JPEG", ".jpg"), ("PNG", ".png"), ("WEBP", ".webp"), ("GIF", ".gif")):
        whole = encoded(kind, picture(64, 64))
        for part in (1, 10, 50, 90, 99):
            cut = whole[: len(whole) * part // 100]
            found[f"{kind.lower()} cut at {part} %"] = Kind(suffix, cut, "")
        if kind != "GIF":
            found[f"{kind.lower()} without its last byte"] = Kind(suffix, whole[:-1], "")
        found[f"{kind.lower()} with a tail"] = Kind(suffix, whole + b"tail" * 9)
        found[f"{kind.lower()} twice"] = Kind(suffix, whole + whole)
        zeros = whole[: len(whole) // 2] + bytes(len(whole) // 2)
        reason = None if kind == "WEBP" else ""  # WebP has no checksums
        found[f"{kind.lower()} that ends in zeros"] = Kind(suffix, zeros, reason)
    page = b"<!DOCTYPE html><html><h1>404 Not Found</h1></html>"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    unknown = "in no known image format"
    jpeg, zipped = encoded("JPEG"), zip_of_zeros()
    texts = {
        "html page": page,
        "git lfs pointer": pointer,
        "gzip of a png": gzip.compress(encoded("PNG")),
        "zip bomb": zipped,
        "gzip bomb": gzip.compress(bytes(5_000_000)),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "pdf": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
        "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n",
        "zeros": bytes(1000),
        "one byte": b"x",
        "spaces": b" " * 1000,
        "elf program": b"\x7fELF" + bytes(100),
        "numpy array": b"\x93NUMPY\x01\0v\0" + b"{'descr': '<f4', 'shape': (3,)}".ljust(118),
        "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    }
    found |= {f"{name} named jpg": Kind(".jpg", data, unknown) for name, data in texts.items()}
    magic = {
        "jpg": b"\xff\xd8\xff\xe0",
        "png": b"\x89PNG\r\n\x1a\n",
        "gif": b"GIF89a",
        "bmp": b"BM",
    }
    magic |= {
        "webp": b"RIFF\xd0\x07\0\0WEBPVP8 ",
        "tif": b"II*\0\x08\0\0\0",
        "ppm": b"P6 20 20 255 ",
    }
    found |= {
        f"random bytes as {n}": random_after(m, f".{n}") for n, m in magic.items() if n != "ppm"
    }
    return found | {
        "random bytes as ppm": Kind(".ppm", magic["ppm"] + random.Random(0).randbytes(2000)),
        "empty file": Kind(".jpg", b"", "empty file"),
        "png named jpg": Kind(".jpg", encoded("PNG")),
        "jpeg named png": Kind(".png", jpeg),
        "webp named gif": Kind(".gif", encoded("WEBP")),
        "jpeg that is a zip too": Kind(".jpg", jpeg + zipped),
        "png that is a html page too": Kind(".png", with_chunk(chunk(b"tEXt", b"a\0" + page))),
        "webp of 268 million pixels": Kind(
            ".webp", encoded("WEBP")[:26] + struct.pack("<HH", 16383, 16383), "max_pixels"
        ),
    }


@cache
def kinds() -> dict[str, Kind]:
    """Return all kinds of files by name."""
    return _modes() | _jpegs() | _others() | _no_images()


def flipped(count: int) -> dict[str, Kind]:
    """Return files of three formats with one flipped bit each, at `count` positions."""
    found: dict[str, Kind] = {}
    for kind in ("JPEG", "PNG", "WEBP"):
        whole, draw = encoded(kind, picture(64, 64)), random.Random(0)
        for i in range(count):
            data, bit = bytearray(whole), draw.randrange(8 * len(whole))
            data[bit // 8] ^= 1 << bit % 8
            suffix = {"JPEG": ".jpg"}.get(kind, f".{kind.lower()}")
            found[f"{kind.lower()} with flipped bit {i}"] = Kind(suffix, bytes(data))
    return found
