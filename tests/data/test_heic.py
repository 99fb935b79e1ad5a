"""HEIC images through the extra `heic`, and one line that names the extra if it is missing."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
import torch
from PIL import Image, ImageOps
from tiny import CHANGES, differences, last, silent

import compressive
from compressive.data import decode as decoding
from compressive.data import unsupported
from compressive.data.decode import Unreadable, decode
from compressive.data.sources import open_source
from compressive.data.unsupported import conversion_hint

SMALL = [each for each in CHANGES if not each.startswith("views.size")]
# Run in another process: which files are images is decided when the package is imported.
HIDDEN = """
import sys
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pillow_heif":
            raise ModuleNotFoundError(name)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pillow_heif" else real(name, *rest)
sys.meta_path.insert(0, Hide)
from compressive.cli.app import app
app(sys.argv[1:])
"""


def heic(seed: int = 0, turn: int = 0) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image, file, exif = Image.fromarray(small).resize((80, 64)), io.BytesIO(), Image.Exif()
    if turn:
        exif[0x0112] = turn
    pillow_heif.from_pillow(image).save(file, quality=90, exif=exif.tobytes())
    return file.getvalue()


@pytest.mark.parametrize("turn", [0, 3, 6])
def test_heic_is_read_as_pillow_heif_reads_it(turn: int) -> None:
    data = heic(turn=turn)
    truth = ImageOps.exif_transpose(pillow_heif.open_heif(data).to_pillow()).convert("RGB")
    found = decode(data)
    assert found.shape == ((3, 80, 64) if turn == 6 else (3, 64, 80))
    assert torch.equal(found, torch.from_numpy(np.array(truth)).permute(2, 0, 1))


def test_damaged_heic_is_unreadable() -> None:
    data = heic()
    for cut in (20, 60, len(data) // 2, len(data) - 30):
        with pytest.raises(Unreadable):
            decode(data[:cut])


def test_pixel_limit_holds_for_heic() -> None:
    with pytest.raises(Unreadable, match=r"5,120 pixels, but data\.max_pixels is 5,000"):
        decode(heic(), 5_000)


def test_skipped_files_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "heic" not in conversion_hint([".mp4"])
    monkeypatch.setattr(unsupported, "FOREIGN", {".heic"})
    assert "compressive[heic]" in conversion_hint([".mp4", ".heic"])


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(Unreadable, match=r"compressive\[heic\]"):
        decode(heic())


@pytest.mark.slow
def test_folder_of_heic_without_the_extra_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for i in range(3):
        (tmp_path / "photos" / f"{i}.HEIC").write_bytes(heic(i))
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, "pretrain", str(tmp_path / "photos")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    note, error = done.stderr.splitlines()
    assert "compressive[heic]" in note
    assert ".heic 3" in note
    assert "no images" in error


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_heic_files_are_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(16):
            data = heic(i + 100 * (label == "b"))
            (tmp_path / "photos" / label / f"{i}.heic").write_bytes(data)
    assert ".heic" in decoding.EXTENSIONS
    assert open_source(tmp_path / "photos").classes == ("a", "b")
    chosen = {"method": "simclr", "image_size": 16, "settings": SMALL, "display": silent()}
    for name in ("one", "two", "two"):
        compressive.pretrain(tmp_path / "photos", tmp_path / name, **chosen)
    assert differences(last(tmp_path / "one"), last(tmp_path / "two")) == []
    results, _ = compressive.evaluate(tmp_path / "one", tasks="knn", device="cpu", display=silent())
    assert results.records
