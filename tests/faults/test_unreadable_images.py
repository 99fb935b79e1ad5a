"""Images that cannot be read are reported by name and skipped; the others are used."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tiny import Written, photos, tiny
from typer.testing import CliRunner

import compressive
from compressive.cli.app import app
from compressive.data.decode import Unreadable, decode
from compressive.data.sources import open_source
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")


def train(folder: Path, out: Path, *changes: str) -> list[str]:
    """Train one step; return the displayed messages."""
    display = Written()
    settings = f"data.source={folder}", "train.steps=1", "train.batch_size=4", *changes
    pretrain(tiny(*settings), out, display=display)
    return display.said


def test_first_line_does_not_count_unreadable_images(tmp_path: Path) -> None:
    for name in "ab":
        photos(tmp_path / f"photos/{name}", 5)
    (tmp_path / "photos/c").mkdir()
    (tmp_path / "photos/c/x.jpg").write_bytes(b"no image")
    said = train(tmp_path / "photos", tmp_path / "run")
    (line,) = [line for line in said if line.startswith("c-simclr on")]
    assert line.startswith("c-simclr on 10 images in 2 classes (")
    assert "held out), without 1 unreadable ones: test_resnet" in line


def test_fifo_named_jpg_is_skipped(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 4)
    os.mkfifo(folder / "pipe.jpg")
    (folder / "device.jpg").symlink_to("/dev/zero")
    said = train(folder, tmp_path / "run")
    assert any(line.startswith("skipped 2 unreadable images") for line in said)
    lines = (tmp_path / "run/unreadable.txt").read_text().splitlines()
    names = "device.jpg", "pipe.jpg"
    assert lines == [f"{folder / name}: not a regular file" for name in names]


def test_fifo_named_tar_is_not_opened(tmp_path: Path) -> None:
    folder = photos(tmp_path, 2)
    os.mkfifo(folder / "x.tar")
    assert len(open_source(folder)) == 2


@pytest.mark.slow
def test_fifo_given_to_preprocess_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png cannot be read: not a regular file"):
        compressive.load("cifar10-byol-r18").preprocess(str(tmp_path / "x.png"))


def test_self_referencing_link_is_skipped(tmp_path: Path) -> None:
    folder = photos(tmp_path, 2)
    for name in ("loop.jpg", "loop"):
        (folder / name).symlink_to(name)
    source = open_source(folder)
    assert len(source) == 3
    with pytest.raises(Unreadable, match="symbolic links"):
        source.image(2)


def black(kind: str, width: int, height: int, **options: Any) -> bytes:
    """Return the file of a black image; tests change the size in its header."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind, **options)
    return file.getvalue()


def jpeg_bomb() -> bytes:
    content = bytearray(black("JPEG", 16, 16))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">HH", 20_000, 20_000)
    # libjpeg allows fill bytes before a marker, and bytes between two segments.
    return bytes(content[:2]) + b"garbage\xff\xff\xff" + bytes(content[3:])


def webp_bomb(lossless: bool) -> bytes:
    content = bytearray(black("WEBP", 16, 16, lossless=lossless))
    if lossless:
        (bits,) = struct.unpack_from("<I", content, 21)
        struct.pack_into("<I", content, 21, bits & ~(2**28 - 1) | 16382 << 14 | 16382)
    else:
        struct.pack_into("<HH", content, 26, 16383, 16383)
    return bytes(content)


def png_bomb() -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return black("PNG", 16, 16)[:8] + header + black("PNG", 16, 16)[33:]


@pytest.mark.parametrize(
    ("bomb", "pixels"),
    [
        (jpeg_bomb(), "400,000,000"),
        (webp_bomb(True), "268,402,689"),
        (webp_bomb(False), "268,402,689"),
        (png_bomb(), "400,000,000"),
    ],
    ids=["jpeg", "webp-lossless", "webp", "png"],
)
def test_decompression_bomb_is_rejected_by_its_header(bomb: bytes, pixels: str) -> None:
    with pytest.raises(Unreadable) as found:
        decode(bomb)
    assert str(found.value) == (
        f"{pixels} pixels, but data.max_pixels is 178,956,970; raise data.max_pixels or shrink "
        "the image"
    )


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG", "TIFF"])
def test_pixel_limit_is_exact_and_can_be_set(kind: str, tmp_path: Path) -> None:
    content = black(kind, 30, 20)
    assert decode(content, 600).shape == (3, 20, 30)
    with pytest.raises(Unreadable, match=r"600 pixels, but data\.max_pixels is 599"):
        decode(content, 599)
    folder = photos(tmp_path / "photos", 4, side=16)
    (folder / f"x.{kind.lower()}").write_bytes(content)
    said = train(folder, tmp_path / "run", "data.max_pixels=599")
    assert any(line.startswith("skipped 1 unreadable images") for line in said)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
def test_image_of_300_megapixels_is_read_if_allowed() -> None:
    """PIL has a separate limit for PNG."""
    content = black("PNG", 20_000, 15_000, compress_level=1)
    before = Image.MAX_IMAGE_PIXELS
    try:
        with pytest.raises(Unreadable, match="300,000,000 pixels, but data"):
            decode(content)
        assert decode(content, 300_000_000).shape == (3, 15_000, 20_000)
    finally:
        Image.MAX_IMAGE_PIXELS = before


ODD = os.fsdecode(b"caf\xe9")  # Latin-1, which is not valid UTF-8


def test_names_that_are_not_utf8_do_not_stop_training(tmp_path: Path) -> None:
    for name in (ODD, "b"):
        photos(tmp_path / "photos" / name, 4)
    (tmp_path / f"photos/b/{ODD}\x1b[31m\n.jpg").write_bytes(b"no image")
    train(tmp_path / "photos", tmp_path / "run")
    (line,) = (tmp_path / "run/unreadable.txt").read_text().splitlines()
    assert r"photos/b/caf\udce9\x1b[31m\n.jpg: in no known image format" in line


@pytest.mark.slow
def test_embed_writes_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in (ODD, "b"):
        photos(folder / name, 2)
    (folder / f"b/{ODD}.png").write_bytes(b"no image")
    for out in ("x.parquet", "x.npz"):
        words = ["embed", "cifar10-byol-r18", str(folder), "--out", str(tmp_path / out)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert rf"skipped: {folder}/b/caf\udce9.png: in no known" in result.stdout
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["class"].to_pylist() == ["b", "b", r"caf\udce9", r"caf\udce9"]
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays["classes"].tolist() == ["b", r"caf\udce9"]
