"""Every command that reads images takes several sources and prints a table of their counts.

tracking/test_tracked_commands.py tests this for `sweep`, test_several.py for the others.
"""

import csv
from pathlib import Path

import numpy as np
import pytest
from exportable import encoder_file
from input_formats import several
from PIL import Image
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.data.pack import pack_images
from compressive.data.source import ImageSource
from compressive.data.sources import open_source
from compressive.inspection.run import inspect

ENCODER = "cifar10-byol-r18"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    several(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str) -> str:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    return done.output


def totals(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines() if line.split()[:1] == ["all"]]


def test_inspect_reads_all_sources(folder: Path) -> None:
    said = run("inspect folder more.zip --encoder none --table t.csv")
    assert totals(said)[0] == ["all", "40", "40", "4"]
    with (folder / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["format"] == "PNG", row  # also of images that cannot be read
        assert int(row["bytes"]) > 0
    assert {"more.zip" in row["image"] for row in rows} == {True, False}
    assert "folder and more.zip" in (folder / "inspect.html").read_text()
    assert inspect(["folder", "more.zip"], encoder="none", table="u.csv").images == len(rows)
    assert (folder / "u.csv").read_bytes() == (folder / "t.csv").read_bytes()


def test_pack_keeps_the_files_of_all_sources(folder: Path) -> None:
    image = next((folder / "folder/train").rglob("*.png"))
    Image.open(image).save(image.with_suffix(".jpg"))  # would differ if it were encoded again
    said = run("pack folder more.zip --out shards --format parquet")
    assert totals(said)[0] == ["all", "41", "41", "4"]
    both = [open_source(place) for place in ("folder", "more.zip")]
    files = [
        part.stored(i) for part in both if isinstance(part, ImageSource) for i in range(len(part))
    ]
    packed = open_source(folder / "shards")
    assert isinstance(packed, ImageSource)
    kept = [packed.stored(i) for i in range(len(packed))]
    assert all(content in files for content in kept)
    assert image.with_suffix(".jpg").read_bytes() in kept
    assert packed.labels is not None
    assert packed.classes is not None
    assert len(packed.labels.unique()) == 3
    lines = (folder / "shards/unreadable.txt").read_text().splitlines()
    assert lines
    assert all("dog" in line for line in lines)
    assert pack_images(["folder", "more.zip"], folder / "again").splits["train"].images == len(kept)


@pytest.mark.slow
def test_embed_and_neighbors_read_all_sources(folder: Path) -> None:
    said = run(f"embed {ENCODER} folder more.zip --out a.npz")
    assert totals(said) == [["all", "40", "40", "4"]]
    assert f"compressive evaluate {ENCODER} --data folder --data more.zip" in said
    names = np.load(folder / "a.npz")["image"].tolist()
    assert {"more.zip" in name for name in names} == {True, False}
    image = next(name for name in names if "more.zip" not in name)
    said = run(f"neighbors {ENCODER} {image} --in folder --in more.zip --count 3")
    assert totals(said)[0] == ["all", "40", "40", "4"]
    assert "1.000" in said


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_finetune_and_predict_read_all_sources(folder: Path) -> None:
    encoder = encoder_file(folder / "encoder", size=32)
    said = run(
        f"finetune {encoder} folder more.zip --out tuned --epochs 1 --lr 0.01 --batch-size 8 "
        "--device cpu"
    )
    assert totals(said)
    assert "more.zip" in (folder / "tuned/config.json").read_text()
    said = run("predict tuned folder more.zip --out p.csv --device cpu")
    assert totals(said) == [["all", "40", "40", "4"]]
    assert "more.zip" in (folder / "p.csv").read_text()


@pytest.mark.parametrize(
    "words", ["inspect {}", f"embed {ENCODER} {{}}", "pack {} --out s", "sweep {} --seeds 0,1"]
)
def test_a_source_that_is_given_twice_is_one_line(folder: Path, words: str) -> None:
    done = CliRunner().invoke(app, words.format("folder folder").split())
    assert done.exit_code == 2, done.output
    assert "given twice" in done.output
    assert len(done.output.strip().splitlines()) == 1
