"""Archives: the same images as in the unpacked folder, and one line for hostile ones."""

import gzip
import io
import random
import shutil
import struct
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from input_formats import add_to_tar
from tiny import noise

from compressive.data import archives, member_limits
from compressive.data.decode import Unreadable
from compressive.data.source import Source
from compressive.data.sources import open_source

# Names as people pack them: with and without a top folder, splits, classes, and things to ignore.
LAYOUTS: dict[str, list[str]] = {
    "flat": ["b.png", "a.png", "C.PNG"],
    "flat in a folder": ["photos/b.png", "photos/a.png"],
    "classes": ["dog/2.png", "cat/1.png", "cat/0.png"],
    "classes in two folders": ["x/y/dog/2.png", "x/y/cat/1.png"],
    "deep classes": ["cat/old/1.png", "cat/2.png", "dog/new/a.png", "dog/b.png"],
    "images next to folders": ["cat/1.png", "dog/2.png", "3.png"],
    "splits": ["train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png"],
    "flat splits": ["train/1.png", "train/2.png", "test/3.png"],
    "splits in a folder": ["p/train/cat/1.png", "p/train/dog/2.png", "p/test/cat/3.png"],
    "class missing in a split": ["train/a/1.png", "train/b/2.png", "val/b/3.png", "val/c/4.png"],
    "class called train": ["train/1.png", "bus/2.png"],
    "ignored files": ["cat/1.png", "dog/2.png", ".x/3.png", "cat/.4.png", "a.txt", "dog/b.csv"],
    "sorted as text": [f"{i}/{k}.png" for i in (10, 9, 1) for k in (10, 9, 1)],
}


DATA_FILTER = {"filter": "data"}  # of tarfile; newer versions of Python have it as the default
UNPACK: dict[str, dict[str, Any]] = {
    ".zip": {"format": "zip"},
    ".tar": {"format": "tar", **DATA_FILTER},
    ".tar.gz": {"format": "gztar", **DATA_FILTER},
    ".tgz": {"format": "gztar", **DATA_FILTER},
    ".tar.xz": {"format": "xztar", **DATA_FILTER},
}


def png(seed: int) -> bytes:
    file = io.BytesIO()
    noise(8, 8, seed=seed).save(file, "PNG")
    return file.getvalue()


def packed(path: Path, members: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return path
    mode = {".tar": "w", ".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}[path.suffix]
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            add_to_tar(tar, name, data)
    return path


def contents(source: Source) -> list[torch.Tensor]:
    return [source.image(i) for i in range(len(source))]


def root_of(folder: Path) -> Path:
    """Return the folder below folders that hold nothing else."""
    while len(inner := [*folder.iterdir()]) == 1 and inner[0].is_dir():
        folder = inner[0]
    return folder


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_archive_is_read_as_its_unpacked_folder(layout: str, ending: str, tmp_path: Path) -> None:
    """Images, order, splits, labels and classes are those of the folder that unpacking gives."""
    names = LAYOUTS[layout]
    path = packed(tmp_path / f"x{ending}", {name: png(i) for i, name in enumerate(names)})
    shutil.unpack_archive(path, tmp_path / "out", **UNPACK[ending])
    folder = root_of(tmp_path / "out")
    for split in ("train", "test", "val"):
        found: list[Source | str] = []
        for place in (folder, path):
            try:
                found.append(open_source(place, split))
            except ValueError as error:
                found.append(str(error).replace(str(place), "PLACE"))
        a, b = found
        if isinstance(a, str) or isinstance(b, str):
            assert a == b
            continue
        assert all(map(torch.equal, contents(a), contents(b)))
        assert len(a) == len(b)
        assert a.classes == b.classes
        assert (a.labels is None) == (b.labels is None)
        assert a.labels is None or b.labels is None or torch.equal(a.labels, b.labels)
        inner = [b.origin(i).removeprefix(f"{path}:") for i in range(len(b))]
        files = [str(Path(a.origin(i)).relative_to(tmp_path / "out")) for i in range(len(a))]
        assert inner == files


def test_metadata_of_macos_and_links_are_ignored(tmp_path: Path) -> None:
    members = {"a/1.png": png(1), "b/2.png": png(2), "__MACOSX/a/._1.png": b"x"}
    path = packed(tmp_path / "x.zip", members)
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("b/link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    source = open_source(path)
    assert [source.origin(i) for i in range(len(source))] == [f"{path}:a/1.png", f"{path}:b/2.png"]
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        add_to_tar(tar, "a/1.png", png(1))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            about = tarfile.TarInfo(f"a/{kind.decode()}.png")
            about.type, about.linkname = kind, "/etc/passwd"
            tar.addfile(about)
    assert len(open_source(tmp_path / "x.tar.gz")) == 1


def test_images_outside_of_split_folders_are_counted(tmp_path: Path) -> None:
    names = ["train/a/1.png", "test/a/2.png", "3.png", "more/4.png"]
    path = packed(tmp_path / "x.zip", {name: png(0) for name in names})
    with pytest.warns(UserWarning, match=r"test, train.*2 images"):
        assert len(open_source(path)) == 1


def test_labels_in_a_compressed_webdataset_are_read(tmp_path: Path) -> None:
    members = {"0.png": png(0), "0.cls": b"bee", "1.png": png(1), "1.cls": b"ant"}
    source = open_source(packed(tmp_path / "train-0.tar.gz", members))
    assert source.classes == ("ant", "bee")
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0]


def test_archive_has_the_split_in_its_name(tmp_path: Path) -> None:
    for ending in (".tar", ".zip", ".tar.gz"):
        path = packed(tmp_path / f"photos-val{ending}", {"a.png": png(0)})
        assert len(open_source(path, "val")) == len(open_source(path)) == 1


def test_threads_read_a_zip_at_once(tmp_path: Path) -> None:
    members = {f"{i:03d}.png": png(i) for i in range(100)}
    source = open_source(packed(tmp_path / "x.zip", members))
    order = random.Random(0).sample(range(100), 100)
    with ThreadPoolExecutor(16) as pool:
        found = dict(zip(order, pool.map(source.image, order), strict=True))
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        (tmp_path / "out").mkdir()
        archive.extractall(tmp_path / "out")
    plain = open_source(tmp_path / "out")
    assert all(torch.equal(found[i], plain.image(i)) for i in order)


def test_compressed_tar_is_unpacked_once_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(archives.tempfile, "tempdir", str(tmp_path / "tmp"))
    calls = []
    copy = archives._copy_unpacked

    def counted(*args: Any) -> None:
        calls.append(args)
        copy(*args)

    monkeypatch.setattr(archives, "_copy_unpacked", counted)
    path = packed(tmp_path / "x.tgz", {"train/a.png": png(0), "test/b.png": png(1)})
    sources = [open_source(path, split) for split in ("train", "test", "train")]
    assert len(calls) == 1
    assert not [*(tmp_path / "tmp").iterdir()]
    assert all(len(contents(source)) == 1 for source in sources)
    packed(path, {"train/a.png": png(2), "train/c.png": png(1), "test/b.png": png(1)})
    assert len(open_source(path)) == 2
    assert len(calls) == 2


# --- hostile and damaged archives -----------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers check the message
        open_source(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


OUTSIDE = ["../x.png", "/etc/x.png", "a/../../x.png", "..", "a/..", "C:/x.png"]


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_of_the_archive_are_refused(name: str, ending: str, tmp_path: Path) -> None:
    path = packed(tmp_path / f"x{ending}", {"a.png": png(0), name: png(1)})
    message = refused(path)
    assert name in message
    assert "outside" in message


def test_backslashes_are_separators_in_a_zip(tmp_path: Path) -> None:
    source = open_source(packed(tmp_path / "x.zip", {"a\\1.png": png(0), "b\\2.png": png(1)}))
    assert source.classes == ("a", "b")
    assert "outside" in refused(packed(tmp_path / "y.zip", {"..\\1.png": png(0)}))


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_names_that_occur_twice_are_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.png", png(0))
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr("a.png", png(1))
    else:
        with tarfile.open(path, "w:gz") as tar:
            for seed in (0, 1):
                add_to_tar(tar, "a.png", png(seed))
    assert "2 files of the same name, a.png" in refused(path)


def central(path: Path, offset: int, form: str, value: int, number: int = 0) -> None:
    """Change a field in an entry of the central directory of a zip."""
    data, at = bytearray(path.read_bytes()), -1
    for _ in range(number + 1):
        at = data.index(b"PK\1\2", at + 1)
    struct.pack_into(form, data, at + offset, value)
    path.write_bytes(data)


def test_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.zip", {"a.png": png(0), "b.png": png(1)})
    central(path, 8, "<H", 1, number=1)
    message = refused(path)
    assert "1 encrypted file, such as b.png" in message


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as archive:
        archive.writestr("a.png", png(0))
    assert f"compression {method}" in refused(tmp_path / "x.zip")


def test_bombs_are_refused_and_plain_images_of_one_color_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    black = io.BytesIO()
    noise(8, 8).resize((500, 500)).point(lambda _: 0).save(black, "BMP")
    monkeypatch.setattr(member_limits, "RATIO_FROM", 2**20)
    assert len(open_source(packed(tmp_path / "a.zip", {"a.bmp": black.getvalue()}))) == 1
    zeros = bytes(2 * member_limits.RATIO_FROM)
    for ending in (".zip", ".tar.gz", ".tar.xz"):
        assert "200 times" in refused(packed(tmp_path / f"x{ending}", {"a.png": zeros}))


def test_declared_sizes_are_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "x.zip", {"a.png": bytes(10**6) + png(0), "b.png": png(1)})
    central(path, 24, "<I", 1000)  # unpacks to more than it declares
    source = open_source(path)
    with pytest.raises(Unreadable, match=r"declares 1,000 bytes and has 1,001 or more"):
        source.image(0)
    assert source.image(1).shape == (3, 8, 8)
    central(path, 24, "<I", 2**31)
    assert "2.0 GiB unpacked, allowed is 1 GiB" in refused(path)
    monkeypatch.setattr(member_limits, "LARGEST_MEMBER", 50)
    for ending in (".tar", ".tar.gz"):
        assert "a.png" in refused(packed(tmp_path / f"x{ending}", {"a.png": png(0)}))


def test_files_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.zip", {"a.png": png(0), "b.png": png(1)})
    central(path, 42, "<I", 0, number=1)  # both entries point at the first file
    message = refused(path)
    assert "shares bytes" in message or "verlap" in message


def test_compressed_tar_above_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "_MOST_UNPACKED", 10**4)
    path = packed(tmp_path / "x.tar.gz", {f"{i}.png": png(i) for i in range(100)})
    message = refused(path)
    assert "TMPDIR" in message


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz", ".tar.xz"])
def test_damaged_archives_are_refused(ending: str, tmp_path: Path) -> None:
    path = packed(tmp_path / f"x{ending}", {f"{i}.png": png(i) for i in range(9)})
    whole = path.read_bytes()
    half = len(whole) // 2 + (600 if ending == ".tar" else 0)  # inside of an image
    for data in (whole[:half], b"nonsense" * 200, b"PK\3\4" + bytes(100)):
        path.write_bytes(data)
        refused(path)
    path.write_bytes(gzip.compress(b"no tar" * 1000) if ending == ".tar.gz" else b"")
    refused(path)


def test_damaged_image_in_a_zip_leaves_others_readable(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.zip", {"a.png": png(0), "b.png": png(1)})
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("b.png").header_offset
    data = bytearray(path.read_bytes())
    data[at + 60] ^= 255
    path.write_bytes(data)
    source = open_source(path)
    assert source.image(0).shape == (3, 8, 8)
    with pytest.raises(Unreadable, match="damaged in the zip"):
        source.image(1)
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(Unreadable, match="no file at this place"):
        open_source(path).image(1)


def test_archive_without_images_says_so(tmp_path: Path) -> None:
    assert "no images" in refused(packed(tmp_path / "x.zip", {"a.txt": b"x"}))
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "x.zip", tmp_path / "folder" / "x.zip")
    with pytest.raises(ValueError, match=r"x\.zip is an archive; give .*x\.zip itself"):
        open_source(tmp_path / "folder")
