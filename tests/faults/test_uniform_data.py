"""Copies of one image, and images of one class, are reported and give no misleading results."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import Written, noise, photos, silent, sorted_photos, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import Health
from compressive.train.loop import TrainingFailed, pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

HEALTH = Health()
CHECKED = (
    f"health.min_participation_ratio={HEALTH.min_participation_ratio}",
    f"health.collapse_std={HEALTH.collapse_std}",
)
IDENTICAL = "images are identical: nothing can be learned from copies of one"


def copies(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        noise(24, 24).save(folder / f"{i:03d}.png")
    return folder


def said_in(folder: Path, out: Path, *changes: str) -> list[str]:
    display = Written()
    pretrain(tiny(f"data.source={folder}", *changes), out, display=display)
    return display.said


@pytest.mark.parametrize(("count", "cached"), [(9, "yes"), (40, "no")])
def test_copies_of_one_image_are_reported(count: int, cached: str, tmp_path: Path) -> None:
    folder = copies(tmp_path / "photos", count)
    said = said_in(folder, tmp_path / "a", f"data.cache_on_device={cached}", "train.steps=1")
    expected = "16 of 16 sampled" if count == 40 else "all 9"
    assert f"{expected} {IDENTICAL}" in said


@pytest.mark.slow
def test_different_images_are_not_reported_as_copies(tmp_path: Path) -> None:
    """Images with the same mean color are not copies either."""
    folder = photos(tmp_path / "photos", 8)
    assert not [line for line in said_in(folder, tmp_path / "a") if "identical" in line]
    for i in range(4):
        noise(24, 24).rotate(90 * i).save(tmp_path / f"{i}.png")
    assert not [line for line in said_in(tmp_path, tmp_path / "b") if "identical" in line]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["c-simclr", "byol"])
def test_training_on_copies_collapses_or_ends_with_the_note(method: str, tmp_path: Path) -> None:
    """Augmentations make the copies differ, so that a run may finish."""
    folder, display = copies(tmp_path / "photos", 40), Written()
    changes = (f"method={method}", "train.steps=12", "health.max_restarts=1", *CHECKED)
    try:
        pretrain(tiny(f"data.source={folder}", *changes), tmp_path / "a", display=display)
    except TrainingFailed as error:
        assert "collapse" in str(error)  # noqa: PT017
    assert any(IDENTICAL in line for line in display.said)


def one_class(folder: Path, kind: str) -> Path:
    """Write 12 images with one label, stored as `kind`; return their path."""
    if kind == "folder":
        return photos(folder / "cat", 12).parent
    if kind == "split":
        photos(folder / "train/cat", 12)
        for name in ("cat", "dog"):
            photos(folder / "val" / name, 12)
        return folder
    cells: list[bytes] = []
    for i in range(12):
        file = io.BytesIO()
        noise(24, 24, seed=i).save(file, "PNG")
        cells.append(file.getvalue())
    folder.mkdir()
    path = folder / "x.parquet"
    pq.write_table(pa.table({"image": cells, "label": [3 if kind == "id" else "cat"] * 12}), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    pretrain(tiny("train.steps=1", f"data.source={sorted_photos()}"), out, display=silent())
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "split", "word", "id"])
def test_evaluation_with_one_class_gives_a_one_line_error(
    kind: str, run: Path, tmp_path: Path
) -> None:
    """With the label 3 alone, a top-1 of 100 % was once printed."""
    place, out = one_class(tmp_path / "data", kind), tmp_path / "out"
    words = ["evaluate", str(run), "--data", str(place), "--tasks", "logistic"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--out", str(out)])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    found = "none" if kind == "folder" else "1 to train on"
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line == (
        "error: nothing was measured; skipped: logistic, which needs labels of two classes: "
        f"{place.name} has {found} (--data DATA)"
    )
    assert not (out / "results.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "word"])
def test_training_with_one_class_prints_a_note(kind: str, tmp_path: Path) -> None:
    """A folder with one class folder has no labels."""
    said = said_in(one_class(tmp_path / "data", kind), tmp_path / "a")
    note = "all labels are the same: accuracies during training say nothing"
    assert (note in said) == (kind == "word")
