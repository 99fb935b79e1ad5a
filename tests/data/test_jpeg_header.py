"""Headers of JPEG files: ordinary files are described, and no file that libjpeg rejects is."""

import io
import random
from typing import Any

import pytest
from image_kinds import encoded, flipped, kinds, picture
from PIL import Image

from compressive.data.decode import Unreadable, decode
from compressive.data.jpeg_header import SUBSAMPLINGS, read_jpeg_header

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
LIMIT = 10**7  # pixels
KINDS = kinds()
# Files that PIL reads and that have an unusual header, so that the CPU decodes them.
LEFT_TO_THE_CPU = {
    "jpeg mode CMYK",
    "jpeg in several scans",
    "jpeg with arithmetic coding",
    "jpeg with 4:1:1 colors",
    "jpeg with broken exif data",
    "jpeg with endless exif data",
    "jpeg without huffman tables",
    "jpeg with a table of zeros",
}


def oriented(turn: int, order: str = "MM") -> bytes:
    exif = Image.Exif()
    exif.endian = "<" if order == "II" else ">"
    exif[0x010E] = "a title"
    exif[0x0112] = turn
    return encoded("JPEG", exif=exif.tobytes())


def is_readable(data: bytes) -> bool:
    try:
        decode(data, LIMIT)
    except Unreadable:
        return False
    return True


def upright_size(data: bytes) -> tuple[int, int] | None:
    """Return the size after rotation as the header states it; None if it is not ordinary."""
    header = read_jpeg_header(data)
    if header is None or header.height * header.width > LIMIT:  # the reader compares the limit
        return None
    if header.orientation < 5:
        return header.height, header.width
    return header.width, header.height


@pytest.mark.parametrize("name", [name for name in KINDS if "jpeg" in name])
def test_every_kind_has_the_size_of_the_decoder_or_is_left_to_the_cpu(name: str) -> None:
    kind = KINDS[name]
    found = upright_size(kind.data)
    if kind.reason is not None or name in LEFT_TO_THE_CPU or "tiff" in name or "2000" in name:
        assert found is None
    else:
        assert found == tuple(decode(kind.data).shape[1:])


@pytest.mark.parametrize("name", [name for name in KINDS if "jpeg" not in name])
def test_other_formats_have_no_header(name: str) -> None:
    assert read_jpeg_header(KINDS[name].data) is None


@pytest.mark.parametrize(
    ("options", "subsampling"),
    [({"subsampling": f"4:{name[1]}:{name[2]}"}, name) for name in SUBSAMPLINGS if name != "gray"],
)
def test_subsampling_is_read(options: dict[str, Any], subsampling: str) -> None:
    header = read_jpeg_header(encoded("JPEG", **options))
    assert header is not None
    assert header.subsampling == subsampling


def test_gray_is_a_subsampling() -> None:
    header = read_jpeg_header(encoded("JPEG", picture(21, 34).convert("L")))
    assert header is not None
    assert (header.subsampling, header.height, header.width) == ("gray", 21, 34)


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("turn", range(10))
def test_orientation_is_that_of_pil(turn: int, order: str) -> None:
    data = oriented(turn, order)
    header = read_jpeg_header(data)
    assert header is not None
    with Image.open(io.BytesIO(data)) as image:
        stored = image.getexif()[0x0112]
    assert header.orientation == (stored if 1 <= stored <= 8 else 1)
    assert data[header.exif : header.exif + 4] == b"Exif"


def with_segment(data: bytes, marker: int, content: bytes, at: int = 2) -> bytes:
    segment = bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2) + content
    return data[:at] + segment + data[at:]


def test_second_app1_segment_before_exif_is_left_to_the_cpu() -> None:
    """Decoders differ in which of the segments they read."""
    data = oriented(6)
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x/>"
    assert read_jpeg_header(with_segment(data, 0xE1, xmp)) is None
    after = with_segment(data, 0xE1, xmp, at=data.index(b"\xff\xdb"))
    header = read_jpeg_header(after)
    assert header is not None
    assert header.orientation == 6
    assert read_jpeg_header(with_segment(encoded("JPEG"), 0xE1, xmp)) is not None
    assert read_jpeg_header(with_segment(encoded("JPEG"), 0xE1, b"Exaf\0\0MM")) is None


def test_rgb_of_adobe_is_left_to_the_cpu() -> None:
    for transform, is_ordinary in ((0, False), (1, True), (2, False)):
        adobe = b"Adobe\0\x64\0\0\0\0" + bytes([transform])
        data = with_segment(encoded("JPEG"), 0xEE, adobe)
        assert (read_jpeg_header(data) is not None) == is_ordinary


def test_image_ends_at_its_first_end() -> None:
    """Files may hold more than one picture, or a tail."""
    whole = encoded("JPEG")
    for tail in (b"", b"tail", whole, b"\xff\xd9"):
        header = read_jpeg_header(whole + tail)
        assert header is not None
        assert header.end == len(whole)


def test_known_end_is_used_and_a_wrong_one_is_not() -> None:
    data = encoded("JPEG")
    found = read_jpeg_header(data)
    assert found is not None
    damaged = data[: found.end - 4] + b"\xff\xd8" + data[found.end - 2 :]  # a marker in the scan
    assert read_jpeg_header(damaged) is None
    assert read_jpeg_header(damaged, found.end) == found  # the scan is not searched again
    for wrong in (1, found.end - 1, found.end + 1, 10**6):
        assert read_jpeg_header(data, wrong) == found
        assert read_jpeg_header(damaged, wrong) is None


@pytest.mark.parametrize(
    "changes",
    [
        {0: 3, 2: 2},  # three words of one bit
        {16: 200},  # a difference of 200 bits
        {0: 255},  # more words than the segment holds
        {-1: 4},  # table 4 of 4
    ],
)
def test_invalid_huffman_table_is_left_to_the_cpu(changes: dict[int, int]) -> None:
    """The first table has 16 numbers of words by length, then 12 symbols."""
    data = bytearray(encoded("JPEG"))
    at = data.index(b"\xff\xc4") + 5
    assert read_jpeg_header(bytes(data)) is not None
    for place, value in changes.items():
        data[at + place] = value
    assert not is_readable(bytes(data))
    assert read_jpeg_header(bytes(data)) is None


def damaged(count: int) -> dict[str, bytes]:
    """Return files with changed, missing or additional bytes, half of them in the header."""
    draw = random.Random(1)
    bases = [
        encoded("JPEG", picture(33, 47)),
        oriented(6),
        encoded("JPEG", picture(16, 20).convert("L"), optimize=True),
        encoded("JPEG", picture(30, 31), subsampling=1, restart_marker_blocks=2),
    ]
    found = {}
    for k in range(count):
        data = bytearray(draw.choice(bases))
        at = draw.randrange(2, min(len(data), 700) if k % 2 else len(data))
        if k % 4 == 0:
            data[at] = draw.randrange(256)
        elif k % 4 == 1:
            data[at] ^= 1 << draw.randrange(8)
        elif k % 4 == 2:
            del data[at : at + draw.randint(1, 20)]
        else:
            data[at:at] = draw.randbytes(draw.randint(1, 4))
        found[f"damaged {k}"] = bytes(data)
    return found


def test_no_file_that_libjpeg_rejects_has_a_header(capfd: pytest.CaptureFixture[str]) -> None:
    """So the report of unreadable files does not depend on the decoder. 18,000 files passed."""
    files = damaged(1500) | {name: kind.data for name, kind in flipped(100).items()}
    headers = {name: upright_size(data) for name, data in files.items()}
    rejected = [name for name, data in files.items() if not is_readable(data)]
    assert len(rejected) > 300
    assert sum(size is not None for size in headers.values()) > 300
    assert not [name for name in rejected if headers[name] is not None]
    capfd.readouterr()  # libjpeg prints warnings


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 10, 25, 200, 400, -3, -1])
def test_every_prefix_is_no_ordinary_file(cut: int) -> None:
    assert read_jpeg_header(encoded("JPEG")[:cut]) is None
