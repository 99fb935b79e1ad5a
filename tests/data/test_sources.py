"""Every kind of source returns the stored pixels, and damaged files are reported."""

import errno
import io
import json
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from compressive.data import source as source_module
from compressive.data import torchvision_sets
from compressive.data.decode import Unreadable, decode
from compressive.data.source import ImageSource, Source, labeled, subset
from compressive.data.sources import open_source
from compressive.data.synthetic import CLASSES, pictures

# torchvision 0.29 emits this warning at every call of its decoders; users do not see it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities:DeprecationWarning"
)

SHARED = Path(__file__).parents[3] / "shared" / "data"
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {}, "PPM": {}}


def picture(seed: int = 0, height: int = 20, width: int = 28) -> Image.Image:
    """Return an image without symmetry, smooth enough for JPEG to change it little."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def hwc(image: Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def assert_same(image: Tensor, expected: Image.Image | np.ndarray, tolerance: int = 0) -> None:
    found, wanted = hwc(image).astype(int), np.asarray(expected).astype(int)
    assert found.shape == wanted.shape
    assert abs(found - wanted).max() <= tolerance


def put(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".jpg": "JPEG", ".jpeg": "JPEG"}.get(path.suffix.lower(), path.suffix[1:].upper())
    path.write_bytes(encoded(picture(seed), kind))
    return path


def names(source: Source) -> list[str]:
    return [Path(source.origin(i)).name for i in range(len(source))]


def ids(source: Source) -> list[int]:
    assert source.labels is not None
    assert source.labels.dtype == torch.int64
    return source.labels.tolist()


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_match_pil(kind: str) -> None:
    image = picture()
    found = decode(encoded(image, kind, **LOSSLESS[kind]))
    assert found.dtype == torch.uint8
    assert_same(found, image)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1"])
def test_gray_alpha_and_palette_convert_to_rgb_as_in_pil(mode: str) -> None:
    image = picture().convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(np.arange(20 * 28, dtype=np.uint8).reshape(20, 28)))
    for kind in ("PNG", "TIFF"):
        assert_same(decode(encoded(image, kind)), image.convert("RGB"))


def test_palette_with_transparency_keeps_its_colors() -> None:
    image = picture().convert("P")
    assert_same(decode(encoded(image, "PNG", transparency=3)), image.convert("RGB"))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 20}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_matches_pil(mode: str, options: dict[str, Any]) -> None:
    """Two builds of libjpeg may round the inverse DCT differently, by up to 2 of 255."""
    data = encoded(picture().convert(mode), "JPEG", **options)
    with Image.open(io.BytesIO(data)) as image:
        assert_same(decode(data), image.convert("RGB"), tolerance=2)


def test_cmyk_tiff_matches_pil() -> None:
    image = picture().convert("CMYK")
    assert_same(decode(encoded(image, "TIFF")), image.convert("RGB"))


def png_16_bit(pixels: np.ndarray) -> bytes:
    """Write the PNG by hand: PIL cannot write 16-bit color."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_images_keep_the_upper_8_bits(channels: int) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (6, 9, channels))
    expected = np.broadcast_to(deep >> 8, (6, 9, 3))
    assert_same(decode(png_16_bit(deep)), expected)
    if channels == 1:
        gray = Image.fromarray(deep[:, :, 0].astype(np.uint16))
        assert_same(decode(encoded(gray, "TIFF")), expected)
        assert_same(decode(encoded(gray, "PPM")), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_float_and_large_int32_pixels_are_unreadable(dtype: type) -> None:
    image = Image.fromarray((np.arange(12).reshape(3, 4) * 10_000_000).astype(dtype))
    with pytest.raises(Unreadable, match="range"):
        decode(encoded(image, "TIFF"))


# How to rotate a stored image upright, from the EXIF standard's table of first row and column.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("turn", UPRIGHT)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(kind: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    options = LOSSLESS.get(kind, {})
    stored = hwc(decode(encoded(picture(), kind, **options)))
    found = decode(encoded(picture(), kind, exif=exif, **options))
    assert_same(found, UPRIGHT[turn](stored))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_invalid_exif_data_is_ignored(kind: str) -> None:
    data = encoded(picture(), kind, exif=b"Exif\0\0nonsense", **LOSSLESS.get(kind, {}))
    assert decode(data).shape == (3, 20, 28)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation_is_read(kind: str) -> None:
    first, second = picture(0).quantize(16).convert("RGB"), ImageOps.invert(picture(0))
    options = {"save_all": True, "append_images": [second], **LOSSLESS.get(kind, {})}
    assert_same(decode(encoded(first, kind, **options)), first)


def reason_of(data: bytes) -> str:
    with pytest.raises(Unreadable) as caught:
        decode(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"progressive": True, "lossless": True}])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM"])
def test_truncated_file_is_unreadable(kind: str, options: dict[str, Any]) -> None:
    data = encoded(picture(), kind, **options)
    assert decode(data).shape == (3, 20, 28)
    for end in (*range(0, len(data), 7), len(data) - 3, len(data) - 2, len(data) - 1):
        assert reason_of(data[:end])


def test_jpeg_truncated_in_its_scan_is_reported() -> None:
    data = encoded(picture(height=64, width=64), "JPEG")
    assert "truncated" in reason_of(data[: len(data) // 2])
    # An aborted download with preallocated space ends in zeros.
    assert reason_of(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def test_corrupted_png_bytes_are_detected() -> None:
    """In torchvision's decoder, most of these abort the process."""
    data = encoded(picture(), "PNG")
    for at in range(0, len(data), 3):
        assert reason_of(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
    for at in range(8, len(data), 11):
        assert reason_of(data[:at] + bytes(len(data) - at))


def test_trailing_bytes_are_ignored() -> None:
    for kind in ("JPEG", "PNG"):
        data = encoded(picture(), kind)
        assert torch.equal(decode(data + b"trailing"), decode(data))


def test_non_image_data_is_unreadable_with_a_reason() -> None:
    assert reason_of(b"") == "empty file"
    assert "<html>" in reason_of(b"<html>404</html>")
    assert "format" in reason_of(bytes(100))


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "failures", "asked"),
    [
        (errno.EIO, 2, 3),
        (errno.EMFILE, 1, 2),
        (errno.ESTALE, 3, 3),  # the third failure is final
        (errno.ENOENT, 1, 1),  # a missing file is not retried
    ],
)
def test_transient_read_errors_are_retried(
    monkeypatch: pytest.MonkeyPatch, number: int, failures: int, asked: int
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(source_module.time, "sleep", waited.append)
    whole, calls = torch.full((3, 2, 2), 7, dtype=torch.uint8), []

    def read(i: int) -> Tensor:
        calls.append(i)
        if len(calls) <= failures:
            raise OSError(number, os.strerror(number))
        return whole

    source = ImageSource(name="disk", count=1, read=read, place=str)
    if failures < asked:
        assert torch.equal(source.image(0), whole)
    else:
        with pytest.raises(Unreadable, match=os.strerror(number)):
            source.image(0)
    assert len(calls) == asked
    assert waited == [0.1, 1.0][: asked - 1]


def test_pickled_dataset_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"torchvision:LSUN@here.*pickle"):
        open_source("torchvision:LSUN@here")


def test_flat_folder_is_sorted_and_unlabeled(tmp_path: Path) -> None:
    for seed, name in enumerate(["b.png", "a.PNG", "c.JpG", "d.webp"]):
        put(tmp_path / name, seed)
    for name in [".hidden.png", "._a.png", ".DS_Store", "Thumbs.db", "notes.txt", "x.npy", "jpg"]:
        (tmp_path / name).write_bytes(b"no image")
    put(tmp_path / ".cache" / "thumb.png")
    (tmp_path / "empty").mkdir()

    source = open_source(tmp_path)

    assert isinstance(source, Source)
    assert names(source) == ["a.PNG", "b.png", "c.JpG", "d.webp"]
    assert source.origin(1) == str(tmp_path / "b.png")
    assert source.labels is None
    assert source.classes is None
    assert source.name == tmp_path.name
    assert_same(source.image(0), picture(1))
    assert_same(source.image(1), picture(0))


@pytest.mark.parametrize(
    ("link", "to"),
    [("cat/up", ".."), ("here", "."), ("dog/far", "../.."), ("cat/root", "/")],
)
def test_symlink_loops_are_skipped(tmp_path: Path, link: str, to: str) -> None:
    """A link to a parent would recurse forever; a link to another folder is followed."""
    root = tmp_path / "photos"
    for name in ("cat", "dog"):
        for i in range(2):
            put(root / name / f"{i}.png")
    (root / link).symlink_to(to)
    (root / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    put(tmp_path / "elsewhere" / "9.png")
    source = open_source(root)
    origins = [Path(source.origin(i)).relative_to(root).as_posix() for i in range(len(source))]
    assert origins == ["cat/0.png", "cat/1.png", "cat/more/9.png", "dog/0.png", "dog/1.png"]
    assert source.classes == ("cat", "dog")


def test_class_folders_are_labels(tmp_path: Path) -> None:
    for seed, name in enumerate(["dog/1.png", "cat/2.png", "cat/1.png", "dog/more/0.png"]):
        put(tmp_path / name, seed)
    (tmp_path / "empty").mkdir()
    (tmp_path / "readme.txt").write_text("images")

    source = open_source(str(tmp_path))

    assert source.classes == ("cat", "dog")
    places = [os.path.relpath(source.origin(i), tmp_path) for i in range(4)]
    assert places == ["cat/1.png", "cat/2.png", "dog/1.png", "dog/more/0.png"]
    assert ids(source) == [0, 0, 1, 1]
    for i, seed in enumerate([2, 1, 0, 3]):
        assert_same(source.image(i), picture(seed))


def test_images_next_to_image_folders_are_unlabeled(tmp_path: Path) -> None:
    for name in ("z.png", "cat/1.png", "dog/2.png"):
        put(tmp_path / name)
    source = open_source(tmp_path)
    assert names(source) == ["z.png", "1.png", "2.png"]
    assert source.labels is None


def test_single_class_folder_gives_no_labels(tmp_path: Path) -> None:
    put(tmp_path / "all" / "1.png")
    assert open_source(tmp_path).labels is None


def imagenet(root: Path) -> Path:
    for seed, name in enumerate(["n01/a.JPEG", "n02/b.JPEG", "n03/c.JPEG"]):
        put(root / "train" / name, seed)
    put(root / "val" / "n01" / "x.JPEG", 7)
    put(root / "val" / "n03" / "y.JPEG", 8)  # no n02
    return root


def test_imagenet_splits_share_their_classes(tmp_path: Path) -> None:
    root = imagenet(tmp_path)
    with tarfile.open(root / "ILSVRC2012_img_train.tar", "w"):
        pass  # the archive that the folders were extracted from
    (root / "ILSVRC2012_devkit_t12").mkdir()

    train, val = open_source(root), open_source(root, "val")

    assert train.classes == val.classes == ("n01", "n02", "n03")
    assert (ids(train), names(train)) == ([0, 1, 2], ["a.JPEG", "b.JPEG", "c.JPEG"])
    assert (ids(val), names(val)) == ([0, 2], ["x.JPEG", "y.JPEG"])
    assert names(open_source(root, "test")) == names(open_source(root, "validation")) == names(val)
    assert names(open_source(root / "val")) == names(val)


def test_test_split_is_not_used_as_validation(tmp_path: Path) -> None:
    put(tmp_path / "train" / "a.png")
    put(tmp_path / "test" / "b.png")
    assert names(open_source(tmp_path, "test")) == ["b.png"]
    with pytest.raises(ValueError, match=r"'val'.* test, train$"):
        open_source(tmp_path, "val")


def test_class_may_be_named_train(tmp_path: Path) -> None:
    for name in ("bus", "car", "train"):
        put(tmp_path / name / "1.png")
    assert open_source(tmp_path).classes == ("bus", "car", "train")


def test_listing_opens_no_image(tmp_path: Path) -> None:
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    put(tmp_path / "here.png")
    source = open_source(tmp_path)
    assert len(source) == 2
    with pytest.raises(Unreadable, match="No such file"):
        source.image(0)
    assert_same(source.image(1), picture())


# --- parquet --------------------------------------------------------------------------------------


def write_parquet(
    path: Path, cells: list[Any], labels: list[Any] | None = None, **options: Any
) -> None:
    column, label = options.pop("column", "image"), options.pop("label", "label")
    columns: dict[str, Any] = {"id": list(range(len(cells))), column: cells}
    if labels is not None:
        columns[label] = labels
    table = pa.table(columns)
    if classes := options.pop("classes", None):
        features = {label: {"_type": "ClassLabel", "names": classes}}
        about = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": about})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{"row_group_size": 3, **options})


def structs(seeds: range) -> list[dict[str, Any]]:
    return [{"bytes": encoded(picture(seed)), "path": f"{seed}.png"} for seed in seeds]


@pytest.mark.parametrize("folder", [".", "data"])
def test_hugging_face_parquet_is_read(tmp_path: Path, folder: str) -> None:
    classes = ["plane", "car", "bird"]
    first = tmp_path / folder / "train-00000-of-00002.parquet"
    write_parquet(first, structs(range(7)), [0, 1, 2, 0, 1, 2, 0], classes=classes)
    second = tmp_path / folder / "train-00001-of-00002.parquet"
    write_parquet(second, structs(range(7, 9)), [2, 2], classes=classes, compression="zstd")
    write_parquet(tmp_path / folder / "test-00000-of-00001.parquet", structs(range(20, 22)), [1, 0])
    write_parquet(tmp_path / folder / "more-00000-of-00001.parquet", structs(range(1)))
    put(tmp_path / "banner.png")

    source = open_source(tmp_path)

    assert source.classes == ("plane", "car", "bird")
    assert ids(source) == [0, 1, 2, 0, 1, 2, 0, 2, 2]
    for i in (8, 0, 6, 3, 7, 5):
        assert_same(source.image(i), picture(i))
    assert [source.origin(i) for i in (0, 6, 7)] == [f"{first}:0", f"{first}:6", f"{second}:0"]
    table = pq.read_table(second)
    with Image.open(io.BytesIO(table["image"][1]["bytes"].as_py())) as image:
        assert_same(source.image(8), image)

    test = open_source(tmp_path, "test")
    assert (ids(test), test.classes) == ([1, 0], ("0", "1"))
    assert_same(test.image(1), picture(21))
    assert len(open_source(tmp_path, "more")) == 1
    with pytest.raises(ValueError, match=r"'extra'.* more, test, train$"):
        open_source(tmp_path, "extra")


@pytest.mark.parametrize("shard", ["backup.tar", "features.parquet", "data/more.parquet"])
def test_stray_shard_among_images_is_rejected(tmp_path: Path, shard: str) -> None:
    for i in range(10):
        put(tmp_path / "ab"[i % 2] / f"{i}.png")
    assert len(open_source(tmp_path)) == 10
    (tmp_path / shard).parent.mkdir(exist_ok=True)
    (tmp_path / shard).write_bytes(b"anything")
    with pytest.raises(ValueError, match=rf"a/0\.png.* {shard}"):
        open_source(tmp_path)


def test_files_outside_the_split_folders_are_reported(tmp_path: Path) -> None:
    for name in ("train/a/1", "train/b/2", "val/a/3", "more/4", "empty/x/5"):
        put(tmp_path / f"{name}.png")
    (tmp_path / "empty/x/5.png").unlink()
    with pytest.warns(UserWarning, match=r"train, val.*: more/$"):
        assert len(open_source(tmp_path)) == 2
    for name in ("1", "2"):
        put(tmp_path / f"{name}.png")
    with pytest.warns(UserWarning, match=r": more/, 2 images$"):
        assert len(open_source(tmp_path, "val")) == 1
    (tmp_path / "train").rename(tmp_path / "c")
    with pytest.raises(ValueError, match=r"'train'.* val; .*c/, more/, 2 .*/train$"):
        open_source(tmp_path)


def test_unsupported_image_formats_are_counted(tmp_path: Path) -> None:
    for i in range(3):
        put(tmp_path / "a" / f"{i}.png")
        (tmp_path / "a" / f"{i}.JXL").write_bytes(b"a browser's")
    (tmp_path / "one.dng").write_bytes(b"a camera's")
    (tmp_path / "notes.txt").write_text("no picture")
    with pytest.warns(UserWarning, match=r"\.jxl 3, \.dng 1"):
        assert len(open_source(tmp_path)) == 3


def test_single_parquet_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "test-00000-of-00001.parquet"
    write_parquet(file, structs(range(3)))
    assert len(open_source(file)) == len(open_source(file, "test")) == 3
    with pytest.raises(ValueError, match="'val'"):
        open_source(file, "val")


def test_parquet_with_plain_bytes_and_text_labels(tmp_path: Path) -> None:
    cells = [encoded(picture(seed)) for seed in range(4)]
    options = {"column": "jpg", "label": "fine_label"}
    write_parquet(tmp_path / "a.parquet", cells, ["dog", "cat", None, "dog"], **options)
    source = open_source(tmp_path)
    assert (ids(source), source.classes) == ([1, 0, -1, 1], ("cat", "dog"))
    assert_same(source.image(3), picture(3))


def test_parquet_without_single_labels_is_unlabeled(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", structs(range(2)))
    write_parquet(tmp_path / "b" / "b.parquet", structs(range(2)), [[0, 1], [1]])  # multi-label
    assert open_source(tmp_path).labels is None
    assert open_source(tmp_path / "b").labels is None


def test_parquet_row_without_bytes_is_unreadable(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [*structs(range(1)), {"bytes": None, "path": "b.png"}])
    source = open_source(tmp_path)
    assert_same(source.image(0), picture(0))
    with pytest.raises(Unreadable, match="bytes"):
        source.image(1)


def test_parquet_larger_than_memory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet", structs(range(9)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2**60))  # leaves no memory per process
    with pytest.warns(UserWarning, match=" 0 GiB"):
        source = open_source(tmp_path)
    for i in (0, 8, 1, 4, 0):
        assert_same(source.image(i), picture(i))


def test_damaged_row_group_leaves_others_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    options = {"use_dictionary": False, "compression": "zstd"}
    write_parquet(path, [encoded(picture(seed)) for seed in range(6)], **options)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    start = chunk.data_page_offset + chunk.total_compressed_size // 3
    data = bytearray(path.read_bytes())
    data[start : start + chunk.total_compressed_size // 2] = bytes(chunk.total_compressed_size // 2)
    path.write_bytes(data)
    source = open_source(path)
    with pytest.raises(Unreadable):
        source.image(1)
    assert_same(source.image(4), picture(4))


def test_invalid_parquet_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("version https://git-lfs.github.com/spec/v1\n" * 9)
    with pytest.raises(ValueError, match=r"a\.parquet"):
        open_source(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="text, label"):
        open_source(tmp_path / "b.parquet")


# --- tar ------------------------------------------------------------------------------------------


def write_tar(path: Path, files: dict[str, bytes], kind: int, **attributes: Any) -> None:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            for key, value in attributes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(body))


KINDS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.mark.parametrize("folder", ["", "./", "some/folder/", "deep/" * 30 + "folder/", "ü/"])
@pytest.mark.parametrize("mtime", [0, 1e9 + 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_webdataset_tar_is_read(tmp_path: Path, kind: str, mtime: float, folder: str) -> None:
    """A fractional mtime makes pax write an extra header per file, as webdataset does."""
    files = {}
    for seed in range(4):
        files[f"{folder}{seed:06}.png"] = encoded(picture(seed))
        files[f"{folder}{seed:06}.cls"] = str(3 - seed).encode()
    files[f"{folder}readme.txt"] = b"not an image"
    files[f"{folder}._000000.png"] = b"what a Mac leaves"
    path = tmp_path / "train-000000.tar"
    write_tar(path, files, KINDS[kind], mtime=mtime if kind == "pax" else int(mtime))

    source = open_source(path)

    assert ids(source) == [3, 2, 1, 0]
    assert source.classes == ("0", "1", "2", "3")
    assert source.origin(2) == f"{path}:{folder}000002.png"
    for i in (3, 0, 2, 1):
        assert_same(source.image(i), picture(i))


def test_tar_shards_are_assigned_to_the_split_in_their_name(tmp_path: Path) -> None:
    shards = ["set-train-000001", "set-train-000000", "set-val-000000"]
    for seed, name in enumerate(shards):
        write_tar(tmp_path / f"{name}.tar", {"a.jpg": encoded(picture(seed), "JPEG")}, KINDS["pax"])
    train, test = open_source(tmp_path), open_source(tmp_path, "test")
    expected = [f"{tmp_path}/set-train-00000{i}.tar:a.jpg" for i in range(2)]
    assert [train.origin(i) for i in range(2)] == expected
    assert test.origin(0) == f"{tmp_path / 'set-val-000000.tar'}:a.jpg"
    assert train.labels is None
    with pytest.raises(ValueError, match=r"'unlabeled'.* train, val$"):
        open_source(tmp_path, "unlabeled")


def test_tar_shards_in_split_folders_are_read(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        write_tar(tmp_path / split / "0.tar", {f"{split}.png": encoded(picture())}, KINDS["gnu"])
    assert open_source(tmp_path, "val").origin(0).endswith(":val.png")
    assert open_source(tmp_path, "train").origin(0).endswith(":train.png")


def test_tar_labels_may_be_text_or_json(tmp_path: Path) -> None:
    image = encoded(picture())
    words = {"a.png": image, "a.cls": b"dog\n", "b.png": image, "b.cls": b"cat", "c.png": image}
    write_tar(tmp_path / "words.tar", words, KINDS["pax"])
    entries = {"a.seg.png": image, "a.json": b'{"label": 4, "width": 3}', "b.json": b'{"label": 1}'}
    write_tar(tmp_path / "json.tar", entries | {"b.PNG": image}, KINDS["pax"])
    source = open_source(tmp_path / "words.tar")
    assert (ids(source), source.classes) == ([1, 0, -1], ("cat", "dog"))
    assert ids(open_source(tmp_path / "json.tar")) == [4, 1]


def test_damaged_tar_is_rejected_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, {f"{i}.png": encoded(picture(i)) for i in range(3)}, KINDS["ustar"])
    whole = path.read_bytes()
    path.write_bytes(whole[:1500])
    with pytest.raises(ValueError, match=r"a\.tar .*: .*truncated"):
        open_source(path)
    path.write_bytes(zlib.compress(whole))
    with pytest.raises(ValueError, match=r"a\.tar .*tar: "):
        open_source(tmp_path)
    write_tar(path, {"train.tar": b"a tar of tars"}, KINDS["ustar"])
    with pytest.raises(ValueError, match=r"no images .*a\.tar"):
        open_source(path)


def test_damaged_image_in_a_shard_leaves_others_readable(tmp_path: Path) -> None:
    good = encoded(picture(), "JPEG")
    files = {"a.jpg": good, "b.jpg": good[: len(good) // 2], "c.jpg": b"", "d.jpg": good}
    write_tar(tmp_path / "a.tar", files, KINDS["pax"])
    source = open_source(tmp_path)
    for i in (1, 2):
        with pytest.raises(Unreadable):
            source.image(i)
    assert torch.equal(source.image(0), source.image(3))


# --- torchvision and the built-in images ----------------------------------------------------------


def dtd(root: Path) -> Path:
    base = root / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for split, files in {"train": ["dots/1", "grid/2"], "val": ["grid/3"], "test": []}.items():
        text = "".join(f"{file}.jpg\n" for file in files)
        (base / "labels" / f"{split}1.txt").write_text(text)
        for file in files:
            put(base / "images" / f"{file}.jpg", int(file[-1]))
    return root


@pytest.mark.parametrize("has_loader", [True, False])
def test_torchvision_dataset_of_files_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_loader: bool
) -> None:
    if not has_loader:  # as in older versions of torchvision
        monkeypatch.setattr(
            torchvision_sets, "_parameters", lambda _: {"root", "split", "download"}
        )
    place = f"torchvision:DTD@{dtd(tmp_path)}"
    source, val = open_source(place), open_source(place, "val")
    assert source.name == "torchvision:DTD"
    assert (ids(source), source.classes) == ([0, 1], ("dots", "grid"))
    assert source.origin(1) == str(tmp_path / "dtd" / "dtd" / "images" / "grid" / "2.jpg")
    assert torch.equal(source.image(1), decode(encoded(picture(2), "JPEG")))
    assert torch.equal(val.image(0), decode(encoded(picture(3), "JPEG")))
    with pytest.raises(ValueError, match=r"torchvision:DTD@.* 'extra'.*train"):
        open_source(place, "extra")


def test_torchvision_dataset_that_opens_its_own_images_is_read(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    put(base / "images" / "Great_Pyrenees_1.png", 1).rename(
        base / "images" / "Great_Pyrenees_1.jpg"
    )
    put(base / "images" / "Pug_2.png", 2).rename(base / "images" / "Pug_2.jpg")
    (base / "annotations" / "trainval.txt").write_text("Great_Pyrenees_1 1 2 1\nPug_2 2 2 1\n")
    source = open_source(f"torchvision:OxfordIIITPet@{tmp_path}")  # train is called trainval
    assert (ids(source), source.classes) == ([0, 1], ("Great Pyrenees", "Pug"))
    assert_same(source.image(1), picture(2))
    (base / "images" / "Pug_2.jpg").write_bytes(b"")
    with pytest.raises(Unreadable):
        source.image(1)


def test_torchvision_dataset_in_memory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    digits = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
    labels = np.array([5, 0, 4, 1, 9, 2, 1], dtype=np.uint8)
    for part, keep in {"train": slice(0, 4), "t10k": slice(4, 7)}.items():
        images, some = digits[keep], labels[keep]
        head = struct.pack(">IIII", 2051, len(images), 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">II", 2049, len(some))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + some.tobytes())
    monkeypatch.setenv("COMPRESSIVE_DATA", str(tmp_path))
    train, test = open_source("torchvision:MNIST"), open_source("torchvision:MNIST", "test")
    assert (ids(train), ids(test)) == ([5, 0, 4, 1], [9, 2, 1])
    assert train.classes is not None
    assert train.classes[9] == "9 - nine"
    assert_same(test.image(2), np.repeat(digits[6][:, :, None], 3, axis=2))
    assert test.origin(2) == "torchvision:MNIST:2"
    with pytest.raises(ValueError, match=r"'val'.* test, train$"):
        open_source("torchvision:MNIST", "val")


def test_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(FileNotFoundError) as caught:
        open_source(f"torchvision:CIFAR10@{tmp_path / 'new'}")
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "new") in message
    assert not (tmp_path / "new").exists()
    assert "torchvision:CIFAR10@FOLDER" in message


def test_unknown_or_classless_torchvision_dataset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'CIFAR'.*CIFAR10"):
        open_source("torchvision:CIFAR")
    with pytest.raises(ValueError, match=r"CocoDetection.*class"):
        open_source(f"torchvision:CocoDetection@{tmp_path}")


@pytest.mark.slow
def test_builtin_images_are_a_source() -> None:
    source, test = open_source("builtin"), open_source("builtin", "test")
    images, labels = pictures(len(source), split="train")
    assert len(source) >= 4096
    assert source.classes == CLASSES
    assert ids(source) == labels.tolist()
    for i in (0, 1, len(source) - 1):
        assert np.array_equal(source.image(i).numpy(), images[i])
    assert np.array_equal(test.image(5).numpy(), pictures(6, split="test")[0][5])
    assert not torch.equal(source.image(0), test.image(0))
    assert source.origin(3) == "builtin:train:3"
    with pytest.raises(ValueError, match=r"builtin .*'val'.* test, train$"):
        open_source("builtin", "val")


# --- all sources ----------------------------------------------------------------------------------


def every_kind(root: Path, count: int) -> dict[str, Source]:
    for seed in range(count):
        put(root / "folder" / str(seed % 3) / f"{seed:03}.jpg", seed)
    (root / "tar").mkdir()
    members = {f"{seed:03}.webp": encoded(picture(seed), "WEBP") for seed in range(count)}
    write_tar(root / "tar" / "a.tar", members, KINDS["pax"])
    write_parquet(root / "parquet" / "a.parquet", structs(range(count)))
    base = root / "eurosat" / "2750"
    for seed in range(count):
        put(base / str(seed % 3) / f"{seed}.png", seed)
    sources = {kind: open_source(root / kind) for kind in ("folder", "tar", "parquet")}
    return sources | {"torchvision": open_source(f"torchvision:EuroSAT@{root}")}


def test_sources_are_thread_safe(tmp_path: Path) -> None:
    count = 30
    alone, shared = (every_kind(tmp_path / part, count) for part in ("a", "b"))
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(count), 8)).tolist()
    for kind in alone:
        expected = [alone[kind].image(i) for i in range(count)]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(shared[kind].image, order))
        for i, image in zip(order, found, strict=True):
            assert torch.equal(image, expected[i]), kind


def test_subset_keeps_images_labels_and_classes(tmp_path: Path) -> None:
    for name in ("ant/0", "bee/1", "bee/2", "cow/3"):
        put(tmp_path / f"{name}.png", int(name[-1]))
    source = open_source(tmp_path)
    some = subset(source, torch.tensor([3, 1]))
    assert (len(some), some.name) == (2, source.name)
    assert (ids(some), some.classes) == ([2, 1], ("ant", "bee", "cow"))
    assert names(some) == ["3.png", "1.png"]
    assert_same(some.image(0), picture(3))
    assert_same(subset(some, torch.tensor([1])).image(0), picture(1))
    assert len(subset(source, torch.tensor([], dtype=torch.int64))) == 0
    for index in ([4], [0, -1]):
        with pytest.raises(ValueError, match=r"index.* 0 to 3"):
            subset(source, torch.tensor(index))


def test_out_of_range_index_raises(tmp_path: Path) -> None:
    put(tmp_path / "1.png")
    source = open_source(tmp_path)
    for i in (1, -1):
        with pytest.raises(IndexError, match="0 to 0"):
            source.image(i)


def test_custom_source_reads_with_a_function() -> None:
    image = torch.zeros(3, 4, 5, dtype=torch.uint8)
    source = ImageSource(name="mine", count=2, read=lambda i: image + i, place=str)
    assert isinstance(source, Source)
    assert source.image(1).max() == 1
    assert source.origin(1) == "1"


def test_folder_without_images_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValueError, match="no images") as caught:
        open_source(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(tmp_path), ".jpg", "*.parquet", "*.tar", "torchvision:NAME", "builtin"):
        assert word in message
    with pytest.raises(ValueError, match=r"notes\.json.*folder"):
        open_source((tmp_path / "notes.txt").rename(tmp_path / "notes.json"))
    with pytest.raises(ValueError, match="empty"):
        open_source("")


def test_missing_path_error_suggests_similar_names(tmp_path: Path) -> None:
    for name in ("cifar10", "photos"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'cifar'}.*cifar10;"):
        open_source(tmp_path / "cifar")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} .*photos;") as caught:
        open_source(tmp_path / "fotos" / "train")
    assert "\n" not in str(caught.value)


def test_source_without_splits_is_the_train_split(tmp_path: Path) -> None:
    put(tmp_path / "1.png")
    with pytest.raises(ValueError, match=r"'test'.* train$"):
        open_source(tmp_path, "test")


# --- real datasets --------------------------------------------------------------------------------


def shared(name: str) -> Path:
    path = SHARED / name
    assert path.is_dir(), f"{path} is missing: these tests read the real images of ../shared/data"
    return path


@pytest.mark.shared
def test_cifar10_is_read_completely() -> None:
    root = shared("cifar10")
    train, test = open_source(root), open_source(root, "test")
    assert (len(train), len(test)) == (50_000, 10_000)
    assert train.classes == test.classes
    assert train.classes is not None
    assert len(train.classes) == 10
    assert train.classes[3] == "cat"
    assert torch.bincount(torch.tensor(ids(train))).tolist() == [5000] * 10
    assert torch.bincount(torch.tensor(ids(test))).tolist() == [1000] * 10
    table = pq.read_table(root / "train-00001-of-00002.parquet")
    for row in (0, 999, 1000, 24_999):
        with Image.open(io.BytesIO(table["image"][row]["bytes"].as_py())) as image:
            assert_same(train.image(25_000 + row), image.convert("RGB"))
        assert ids(train)[25_000 + row] == table["label"][row].as_py()


@pytest.mark.shared
def test_photos_are_class_folders() -> None:
    root = shared("photos")
    source = open_source(root)
    folders = sorted(path.name for path in root.iterdir() if path.is_dir())
    files = sorted(root.rglob("*.jpg"))
    assert source.classes == tuple(folders)
    assert [source.origin(i) for i in range(len(source))] == [str(file) for file in files]
    assert [folders[i] for i in ids(source)] == [file.parent.name for file in files]
    for i in range(0, len(source), 97):
        with Image.open(files[i]) as image:
            assert_same(source.image(i), image.convert("RGB"), tolerance=2)


def test_folder_without_images_is_no_class_in_a_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for kind in ("cats", "dogs") if split == "train" else ("cats",):
            (tmp_path / split / kind).mkdir(parents=True)
            picture().save(tmp_path / split / kind / "a.png")
        (tmp_path / split / "meta").mkdir()
        (tmp_path / split / "meta" / "readme.txt").write_text("no picture")
    for split in ("train", "test"):
        assert open_source(tmp_path, split).classes == ("cats", "dogs")


def test_labels_may_be_integers_or_text() -> None:
    assert labeled([3.0, math.nan, None, 0.0, -2])["labels"].tolist() == [3, -1, -1, 0, -1]
    assert labeled([True, False])["labels"].tolist() == [1, 0]
    found = labeled([20240101, 7, None, 20240101])
    assert found["labels"].tolist() == [1, 0, -1, 1]
    assert found["classes"] == ("7", "20240101")
    assert labeled([2**60, 2**60 + 1])["labels"].tolist() == [0, 1]  # floats would be equal
    assert labeled([1, "1", "a"])["labels"].tolist() == [0, 0, 1]
    for value in (1.7, [1], math.inf, {"a": 1}):
        with pytest.warns(UserWarning, match="labels are left out"):
            assert labeled([0, value]) == {}


def test_huge_id_among_named_classes_is_a_name() -> None:
    """A damaged id of 10^9 would otherwise get 10^9 class names."""
    found = labeled([0, 1, 10**9], ["a", "b"])
    assert (found["labels"].tolist(), found["classes"]) == ([0, 1, 2], ("0", "1", "1000000000"))


def test_parquet_files_with_different_columns_are_rejected(tmp_path: Path) -> None:
    for name, column in (("a", "image"), ("b", "img")):
        cells = [{"bytes": encoded(picture()), "path": None}]
        pq.write_table(pa.table({column: cells}), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet .*'image'.*a\.parquet"):
        open_source(tmp_path)


def test_32_bit_image_of_small_values_is_unreadable() -> None:
    gray = Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8), "I")
    with pytest.raises(Unreadable, match="32-bit"):
        decode(encoded(gray, "TIFF"))
