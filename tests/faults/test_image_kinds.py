"""Every kind of image is read as PIL reads it or reported with a reason; none stops a run."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from image_kinds import Kind, encoded, flipped, kinds
from PIL import Image, ImageOps
from tiny import Written, silent, sorted_photos, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.data.decode import Unreadable, decode
from compressive.data.sources import open_source
from compressive.train.loop import pretrain

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),  # warnings about damaged headers
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]

KINDS, FLIPPED = kinds(), flipped(20)
UNREAD = {name for name, kind in KINDS.items() if kind.reason is not None}
TOLERANCE = 2  # of 255: two builds of libjpeg may round differently


def expected(kind: Kind) -> np.ndarray:
    if kind.pixels is not None:
        return kind.pixels
    with Image.open(io.BytesIO(kind.data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("name", sorted(KINDS.keys() - UNREAD))
def test_unusual_image_is_read_as_pil_reads_it(name: str) -> None:
    found, wanted = decode(KINDS[name].data), expected(KINDS[name])
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (3, *wanted.shape[:2]))
    difference = found.permute(1, 2, 0).numpy().astype(int) - wanted.astype(int)
    assert abs(difference).max() <= TOLERANCE


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_damaged_image_is_unreadable_with_a_reason(name: str) -> None:
    with pytest.raises(Unreadable, match=r"^[^\n]+$") as caught:
        decode(KINDS[name].data)
    assert (KINDS[name].reason or "") in str(caught.value)


def readable(kind: Kind) -> bool:
    """Return whether a file with a flipped bit can be read."""
    try:
        image = decode(kind.data)
    except Unreadable:
        return False
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3
    return True


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_flipped_bits_do_not_crash_the_process(kind: str) -> None:
    """Every flipped bit is detected only in PNG, which has checksums."""
    outcomes = [readable(file) for name, file in FLIPPED.items() if name.startswith(kind)]
    assert len(outcomes) == 20
    assert any(outcomes) == (kind != "png")


def test_postscript_does_not_start_ghostscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIL renders PostScript with Ghostscript, which would run the program in the file."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho 10 >> {tmp_path}/started\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # else: what was found earlier
    with pytest.raises(Unreadable):
        decode(encoded("EPS"))
    assert not (tmp_path / "started").exists()


def write_all(folder: Path) -> tuple[set[str], set[str]]:
    """Write every kind in two classes; return the files that can be read, and the others."""
    both: tuple[set[str], set[str]] = set(), set()
    for i, (name, kind) in enumerate((KINDS | FLIPPED).items()):
        path = folder / "ab"[i % 2] / f"{name.replace(':', '-')}{kind.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kind.data)
        is_read = readable(kind) if name in FLIPPED else name not in UNREAD
        both[not is_read].add(str(path))
    return both


def listed(path: Path) -> set[str]:
    return {line.partition(": ")[0] for line in path.read_text().splitlines()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], set[str]]:
    place = tmp_path_factory.mktemp("kinds") / "images"
    return place, *write_all(place)


def test_files_without_an_image_extension_are_counted_or_ignored(tmp_path: Path) -> None:
    """Images in an unsupported format are counted; other files are ignored."""
    names = "a.png", "b.tga", "c.ico", "d.pdf", "e.JXL", "f.jp2", "g.svg", "h.txt", "png", "i"
    for name in names:
        (tmp_path / name).write_bytes(encoded("PNG"))
    with pytest.warns(UserWarning, match=r"\.jp2 1, \.jxl 1, \.svg 1"):
        source = open_source(tmp_path)
    assert [source.origin(i) for i in range(len(source))] == [str(tmp_path / "a.png")]


@pytest.mark.slow
def test_training_on_every_kind_uses_and_names_them(
    folder: tuple[Path, set[str], set[str]], tmp_path: Path
) -> None:
    place, good, bad = folder
    assert min(len(good), len(bad)) >= 50
    display = Written()
    outcome = pretrain(tiny(f"data.source={place}"), tmp_path, display=display)
    assert outcome.step == 2
    assert listed(tmp_path / "unreadable.txt") == bad
    (headline,) = [line for line in display.said if line.startswith("c-simclr on")]
    assert headline.startswith(f"c-simclr on {len(good)} images in 2 classes (")
    assert f", without {len(bad)} unreadable ones" in headline


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    pretrain(tiny("train.steps=1", f"data.source={sorted_photos()}"), out, display=silent())
    return out


@pytest.mark.slow
def test_embedding_of_every_kind_uses_and_names_them(
    folder: tuple[Path, set[str], set[str]], run: Path, tmp_path: Path
) -> None:
    place, good, bad = folder
    words = ["embed", str(run), str(place), "--out", str(tmp_path / "x.npz"), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    with np.load(tmp_path / "x.npz") as arrays:
        assert set(arrays["image"].tolist()) == good
        assert np.isfinite(arrays["features"]).all()
    lines = [line for line in result.stdout.splitlines() if line.startswith("skipped: ")]
    assert {line.removeprefix("skipped: ").partition(": ")[0] for line in lines} == bad


@pytest.mark.slow
def test_evaluation_on_every_kind_uses_and_names_them(
    folder: tuple[Path, set[str], set[str]], run: Path, tmp_path: Path
) -> None:
    """Also check features from a cache, which does not store reasons."""
    place, good, bad = folder
    words = ["evaluate", str(run), "--data", str(place), "--tasks", "knn", "--device", "cpu"]
    for _ in range(2):
        result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert listed(tmp_path / "unreadable.txt") == bad
        assert result.stdout.count("that cannot be read, listed in unreadable.txt") == 2
        (tmp_path / "unreadable.txt").unlink()
    assert len(good) + len(bad) == len(KINDS) + len(FLIPPED)
