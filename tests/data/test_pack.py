"""Shards that `pack` writes hold the images, labels and splits of the source."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny import noise, silent
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.data.pack import Packed, pack_images
from compressive.data.source import Source
from compressive.data.sources import open_source

KINDS = ["tar", "parquet"]
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF"}


def folder_of_classes(root: Path, count: int = 12) -> Path:
    """Write train and val images in class folders, in several formats."""
    kinds = list(FORMATS)
    for split, first in {"train": 0, "val": 1000}.items():
        for i in range(count if split == "train" else 5):
            place = root / split / f"class {i % 3}"
            place.mkdir(parents=True, exist_ok=True)
            kind = kinds[i % len(kinds)]
            noise(20 + i, 30, seed=first + i).save(place / f"{i:02d} é.{kind}", FORMATS[kind])
    return root


def packed(data: object, out: Path, **options: object) -> Packed:
    return pack_images(str(data), out, display=silent(), **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".tar", ".parquet")}


def assert_same_source(one: Source, other: Source) -> None:
    assert len(one) == len(other)
    assert one.classes == other.classes
    assert (one.labels is None) == (other.labels is None)
    if one.labels is not None and other.labels is not None:
        assert one.labels.tolist() == other.labels.tolist()
    for i in range(len(one)):
        assert torch.equal(one.image(i), other.image(i)), i


@pytest.mark.parametrize("kind", KINDS)
def test_shards_equal_the_source_in_pixels_order_labels_and_splits(
    tmp_path: Path, kind: str
) -> None:
    data = folder_of_classes(tmp_path / "data")
    found = packed(data, tmp_path / "out", kind=kind, images_per_shard=5)
    assert found.splits["train"] == (12, 0, 0, 3)
    assert found.splits["val"] == (5, 0, 0, 1)
    for split in ("train", "val"):
        assert_same_source(open_source(tmp_path / "out", split), open_source(data, split))
    names = sorted(contents(tmp_path / "out"))
    assert names == [
        *(f"train-{k:05d}-of-00003.{kind}" for k in range(3)),
        f"val-00000-of-00001.{kind}",
    ]


def test_files_that_are_not_resized_keep_their_bytes(tmp_path: Path) -> None:
    data = folder_of_classes(tmp_path / "data")
    packed(data, tmp_path / "out", size=40)
    originals = {path.read_bytes() for path in (data / "train").rglob("*.*")}
    with tarfile.open(tmp_path / "out/train-00000-of-00001.tar") as tar:
        members = tar.getmembers()
        images = {
            file.read()
            for member in members
            if not member.name.endswith(".cls") and (file := tar.extractfile(member))
        }
    assert images == originals
    # WebDataset groups files by the name up to the first dot.
    keys = [member.name.partition(".")[0] for member in members]
    assert all(one == other for one, other in zip(keys[::2], keys[1::2], strict=True))
    assert len(set(keys)) == 12
    assert {(m.mtime, m.uid, m.mode) for m in members} == {(0, 0, 0o644)}


def test_parquet_shards_have_the_schema_of_hugging_face(tmp_path: Path) -> None:
    packed(folder_of_classes(tmp_path / "data"), tmp_path / "out", kind="parquet")
    table = pq.read_table(tmp_path / "out/train-00000-of-00001.parquet")
    assert str(table.schema.field("image").type) == "struct<bytes: binary, path: string>"
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    names = ["class 0", "class 1", "class 2"]
    assert features["label"] == {"names": names, "_type": "ClassLabel"}
    row = table.slice(1, 1).to_pylist()[0]
    assert row["image"]["path"].startswith("03")
    assert Image.open(io.BytesIO(row["image"]["bytes"])).size == (30, 23)


@pytest.mark.parametrize(("quality", "kind"), [(92, "JPEG"), (0, "PNG")])
def test_larger_images_get_the_shorter_side(tmp_path: Path, quality: int, kind: str) -> None:
    (tmp_path / "data").mkdir()
    smooth = Image.fromarray(np.tile(np.arange(120, dtype=np.uint8), (60, 1))).convert("RGB")
    smooth.save(tmp_path / "data/a.png")
    smooth.resize((20, 90)).save(tmp_path / "data/b.png")
    packed(tmp_path / "data", tmp_path / "out", size=30, quality=quality)
    source = open_source(tmp_path / "out")
    assert [tuple(source.image(i).shape) for i in range(2)] == [(3, 30, 60), (3, 90, 20)]
    reference = np.asarray(smooth.resize((60, 30), Image.Resampling.BICUBIC)).astype(int)
    found = source.image(0).permute(1, 2, 0).numpy().astype(int)
    assert abs(found - reference).max() <= (1 if quality == 0 else 6)
    with tarfile.open(tmp_path / "out/train-00000-of-00001.tar") as tar:
        first = tar.extractfile(tar.getmembers()[0])
        assert first is not None
        assert Image.open(first).format == kind


def test_exif_orientation_is_applied_when_resized(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(40, 80).save(tmp_path / "data/a.jpg", exif=exif)
    packed(tmp_path / "data", tmp_path / "out", size=20)
    assert open_source(tmp_path / "out").image(0).shape == (3, 40, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_deterministic(tmp_path: Path, kind: str) -> None:
    data = folder_of_classes(tmp_path / "data")
    for name, workers in {"a": 1, "b": 4}.items():
        packed(data, tmp_path / name, kind=kind, size=22, images_per_shard=4, workers=workers)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_unreadable_images_are_left_out_and_listed(tmp_path: Path) -> None:
    data = folder_of_classes(tmp_path / "data")
    (data / "train/class 0/00b.png").write_bytes(b"no image")
    found = packed(data, tmp_path / "out")
    assert found.splits["train"] == (12, 1, 0, 1)
    (line,) = (tmp_path / "out/unreadable.txt").read_text().splitlines()
    assert line.startswith(f"{data}/train/class 0/00b.png: ")
    assert len(open_source(tmp_path / "out")) == 12


def test_exact_duplicates_are_dropped_and_leaks_are_counted(tmp_path: Path) -> None:
    data = folder_of_classes(tmp_path / "data")
    same = Image.open(data / "train/class 0/00 é.jpg").convert("RGB")
    same.save(data / "train/class 2/zz.png")  # equal pixels, other bytes
    same.save(data / "val/class 0/leak.bmp")
    assert packed(data, tmp_path / "all").splits["train"] == (13, 0, 0, 1)
    # The copies are in different shards.
    found = packed(data, tmp_path / "out", drop_duplicates=True, images_per_shard=4)
    assert found.splits["train"] == (12, 0, 1, 4)
    assert found.splits["val"].images == 6
    assert found.shared == 1
    kept = open_source(tmp_path / "out")
    assert not any("zz" in kept.origin(i) for i in range(len(kept)))


def test_unlabeled_and_partly_labeled_sources(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    noise(9, 9).save(tmp_path / "flat/a.png")
    for kind in KINDS:
        packed(tmp_path / "flat", tmp_path / kind, kind=kind)
        assert open_source(tmp_path / kind).labels is None


def test_class_numbers_agree_if_splits_have_other_classes(tmp_path: Path) -> None:
    for split, names in {"train": "bc", "val": "abc"}.items():
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for i, name in enumerate(names):
                file = io.BytesIO()
                noise(8, 8, seed=i).save(file, "PNG")
                for kind, content in {"png": file.getvalue(), "cls": name.encode()}.items():
                    member = tarfile.TarInfo(f"{split}{i}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    packed(tmp_path, tmp_path / "out")
    for split, expected in {"train": "bc", "val": "abc"}.items():
        source = open_source(tmp_path / "out", split)
        assert source.labels is not None
        assert source.classes is not None
        assert "".join(source.classes[i] for i in source.labels.tolist()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_command_resumes_and_leaves_nothing_half_written(
    tmp_path: Path, kind: str
) -> None:
    data = folder_of_classes(tmp_path / "data", count=60)
    options = ["--size", "22", "--images-per-shard", "5", "--format", kind, "--workers", "1"]
    code = (
        "import sys, time; from compressive.data import repack; inner = repack.prepare_image\n"
        "def slowly(*given): time.sleep(0.02); return inner(*given)\n"
        "repack.prepare_image = slowly; from compressive.cli.app import app; app(sys.argv[1:])\n"
    )
    words = [sys.executable, "-c", code, "pack", str(data), "--out", str(tmp_path / "out")]
    with subprocess.Popen([*words, *options], stdout=subprocess.DEVNULL) as process:
        while len(contents(tmp_path / "out") if (tmp_path / "out").exists() else {}) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = contents(tmp_path / "out")
    assert 3 <= len(before) < 13
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob(f"*.{kind}")}
    found = packed(data, tmp_path / "out", size=22, images_per_shard=5, kind=kind, workers=1)
    packed(data, tmp_path / "whole", size=22, images_per_shard=5, kind=kind)
    assert found.splits["train"].images == 60
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sum(p.stat().st_mtime_ns == time for p, time in times.items()) >= 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        p.name for p in (tmp_path / "whole").iterdir()
    }


def run_command(*words: object) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["pack", *map(str, words)])
    return done.exit_code, done.output.strip().splitlines()


def test_the_same_command_again_changes_nothing(tmp_path: Path) -> None:
    data = folder_of_classes(tmp_path / "data")
    code, first = run_command(data, "--out", tmp_path / "out")
    assert code == 0
    assert "train: 12 images in 1 shard" in first
    code, again = run_command(data, "--out", tmp_path / "out")
    assert code == 0
    assert any("already packed" in line for line in again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_one_line_and_the_command_resumes(tmp_path: Path, kind: str) -> None:
    data = folder_of_classes(tmp_path / "data")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        code, lines = run_command(data, "--out", tmp_path / "out", "--format", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2
    assert "could not write" in lines[-1]
    assert "run the same command to resume" in lines[-1]
    assert [name for name in os.listdir(tmp_path / "out") if name != ".pack"] == []
    assert run_command(data, "--out", tmp_path / "out", "--format", kind)[0] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--size", "-1"], "--size"),
        (["--quality", "101"], "--quality"),
        (["--format", "zip"], "zip"),
        (["--images-per-shard", "0"], "--images-per-shard"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, words: list[str], expected: str) -> None:
    data = folder_of_classes(tmp_path / "data", count=2)
    code, lines = run_command(data, "--out", tmp_path / "out", *words)
    assert code == 2
    assert len(lines) == 1
    assert expected in lines[0]


def test_wrong_places_are_one_line(tmp_path: Path) -> None:
    data = folder_of_classes(tmp_path / "data", count=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    for words in ([tmp_path / "none", "--out", tmp_path / "x"], [data, "--out", tmp_path / "full"]):
        code, lines = run_command(*words)
        assert code == 2
        assert len(lines) == 1
    run_command(data, "--out", tmp_path / "out")
    code, lines = run_command(data, "--out", tmp_path / "out", "--size", "8")
    assert code == 2
    assert "other images or settings" in lines[0]


def test_nothing_readable_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(b"x")
    code, lines = run_command(tmp_path / "data", "--out", tmp_path / "out")
    assert code == 2
    assert "none of the 1 images can be read" in lines[-1]
