"""Images that were replaced, removed or added before a resume are reported by name."""

import os
import shutil
import time
import zlib
from pathlib import Path

import pytest
from tiny import Written, noise, photos, silent, tiny, words
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.data.fingerprint import file_states
from compressive.data.source import ImageSource
from compressive.train import images
from compressive.train.images import compare_files, list_files
from compressive.train.loop import pretrain


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 20 images and a run on them, which stores the colors of 16."""
    folder = tmp_path_factory.mktemp("trained")
    photos(folder / "images", 20)
    noise(24, 27).save(folder / "images" / "003.png", format="BMP")  # any pixel bytes are valid
    pretrain(config(folder / "images"), folder / "run", display=silent())
    return folder


def config(place: Path):
    return tiny(f"data.source={place}", "train.steps=1", "method=simclr")


def copied(trained: Path, to: Path) -> tuple[Path, Path]:
    """Copy images with their modification times, and the run."""
    shutil.copytree(trained, to, dirs_exist_ok=True)
    return to / "images", to / "run"


def resume(images: Path, run: Path) -> list[str]:
    display = Written()
    assert pretrain(config(images), run, display=display).step == 1
    return display.said


def replace(path: Path, *, keep_size: bool = False, keep_time: bool = False) -> None:
    """Replace an image file; if `keep_size`, change only one byte."""
    state, content = path.stat(), bytearray(path.read_bytes())
    if keep_size:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        noise(24, 24, seed=77).save(path)
    after = 0 if keep_time else 1_000_000
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + after))


@pytest.mark.parametrize("keep", ["nothing", "size", "time"])
def test_replaced_image_is_reported_on_resume(keep: str, trained: Path, tmp_path: Path) -> None:
    """Number 3 is not among the 16 images whose colors are compared."""
    images, run = copied(trained, tmp_path)
    replace(images / "003.png", keep_size=keep == "size", keep_time=keep == "time")
    with pytest.raises(ValueError, match=r"1 file changed \('003\.png'\); restore") as caught:
        resume(images, run)
    text = str(caught.value)
    assert text.startswith(f"{run} holds a run on 20 other images than those in {images}; ")
    assert "\n" not in text


@pytest.mark.parametrize("change", ["removed", "added", "renamed"])
def test_removed_and_added_images_are_counted_and_named(
    change: str, trained: Path, tmp_path: Path
) -> None:
    images, run = copied(trained, tmp_path)
    if change == "added":
        noise(24, 24).save(images / "new.png")
        expected = r"20 images, but .* has 21; 1 file added \('new\.png'\); restore"
    elif change == "removed":
        (images / "003.png").unlink()
        (images / "007.png").unlink()
        expected = r"20 images, but .* has 18; 2 files removed \('003\.png'\); restore"
    else:
        (images / "003.png").rename(images / "3.png")
        expected = r"20 other images .*; 1 file removed \('003\.png'\), 1 file added \('3\.png'\)"
    with pytest.raises(ValueError, match=expected):
        resume(images, run)


@pytest.mark.slow
def test_removed_images_are_reported_rather_than_derived_settings(
    tmp_path: Path,
) -> None:
    """Without a recipe, some settings are derived from the number of images."""
    images, run = photos(tmp_path / "images", 24), tmp_path / "run"
    small = [w for w in words(tiny("train.steps=1")) if w != "--set"]
    kept = ("views", "network", "train.steps", "train.device", "train.batch", "health", "optim")
    settings = [word for s in small if s.startswith(kept) for word in ("--set", s)]
    arguments = ["pretrain", str(images), "--out", str(run), *settings]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for i in range(4, 16):
        (images / f"{i:03d}.png").unlink()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "24 images, but" in result.output
    assert "12 files removed ('004.png'); restore data.source" in result.output
    assert "probe.neighbors" not in result.output


def test_run_on_images_with_other_times_resumes_with_a_note(trained: Path, tmp_path: Path) -> None:
    images, run = copied(trained, tmp_path)
    for path in images.iterdir():
        os.utime(path)
    said = resume(images, run)
    assert f"{images} has 20 files with other modification times, but equal" in "".join(said)
    assert "modification times" not in "".join(resume(*copied(trained, tmp_path / "same")))


def test_image_that_became_unreadable_or_was_repaired_does_not_stop_a_run(
    trained: Path, tmp_path: Path
) -> None:
    images, run = copied(trained, tmp_path)
    whole = (images / "003.png").read_bytes()
    (images / "003.png").write_bytes(b"broken")
    resume(images, run)
    (run / "unreadable.txt").write_text(f"{images / '003.png'}: broken\n")
    (images / "003.png").write_bytes(whole[:-1] + b"\0\0")
    resume(images, run)


def test_run_resumes_if_all_files_were_renamed(trained: Path, tmp_path: Path) -> None:
    """The number of images and their colors are still compared."""
    images, run = copied(trained, tmp_path)
    for path in list(images.iterdir()):
        path.rename(images / f"image-{path.name}")
    resume(images, run)


def test_file_list_handles_shards_and_sources_without_files(tmp_path: Path) -> None:
    for name in ("a.tar", "b:c.tar", "d.png"):
        (tmp_path / name).write_bytes(name.encode())
    origins = [f"{tmp_path}/a.tar:{i}.jpg" for i in range(3)]
    origins += [f"{tmp_path}/b:c.tar:x:{i}.jpg" for i in range(3)]
    origins += [f"{tmp_path}/d.png", f"{tmp_path}/gone.png", "builtin:train:0", "builtin:train:1"]
    source = ImageSource(
        name="x", count=len(origins), read=lambda i: b"", place=lambda i: origins[i]
    )
    found = {Path(path).name: size for path, (size, _) in file_states(source).items()}
    assert found == {"a.tar": 5, "b:c.tar": 7, "d.png": 5}
    before = list_files(source, str(tmp_path))
    (tmp_path / "a.tar").write_bytes(b"other")
    now, nothing = list_files(source, str(tmp_path)), tmp_path / "unreadable.txt"
    assert compare_files(before, before, nothing, None, 9) == ("", "")
    assert compare_files(before, now, nothing, None, 9)[0] == ""
    assert "a.tar" in compare_files(before, now, nothing, None, 9)[1]


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_parts_do_not_change_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """It is the compressed text of all fields."""
    paths = [tmp_path / f"{i}.png" for i in range(count)]
    for path in paths:
        path.write_bytes(path.name.encode())
    monkeypatch.setattr(images, "_FILES_AT_ONCE", 2)
    source = ImageSource(name="x", count=count, read=lambda i: b"", place=lambda i: str(paths[i]))
    fields = [
        (
            path.name,
            str(len(path.name)),
            str(path.stat().st_mtime_ns),
            f"{zlib.crc32(path.name.encode())}",
        )
        for path in paths
    ]
    text = "\0".join(field for each in fields for field in each)
    listed = list_files(source, str(tmp_path))
    assert zlib.decompress(bytes(listed.tolist())).decode() == text


@pytest.mark.stress
def test_listing_of_many_files_takes_seconds(tmp_path: Path) -> None:
    """100,000 names of 1,000 files; ImageNet has 1.3 million."""
    for i in range(1000):
        (tmp_path / f"n01440764_{i:05d}.JPEG").touch()
    names = [
        f"{tmp_path}/{'./' * (i // 1000)}n01440764_{i % 1000:05d}.JPEG" for i in range(100_000)
    ]
    source = ImageSource(name="x", count=len(names), read=lambda i: b"", place=names.__getitem__)
    begin = time.monotonic()
    listed = list_files(source, str(tmp_path))
    seconds = time.monotonic() - begin
    assert seconds < 10, "ImageNet has 13 times as many"
    assert listed.numel() < 40 * len(names)
