"""A data set's fingerprint ignores its path and detects changed images."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tiny import noise, photos

from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.source import ImageSource
from compressive.data.sources import open_source
from compressive.rundir.fingerprint import file_fingerprint, weights_fingerprint


def fingerprint(folder: Path, *, samples: int = 64) -> DatasetFingerprint:
    return DatasetFingerprint(open_source(str(folder)), samples=samples)


def test_copied_folder_has_the_same_fingerprint(tmp_path: Path) -> None:
    here = photos(tmp_path / "here", 5)
    there = shutil.copytree(here, tmp_path / "there")
    assert fingerprint(here).of() == fingerprint(there).of()
    assert fingerprint(here).of([0, 2]) == fingerprint(there).of([0, 2]) != fingerprint(here).of()
    assert fingerprint(here).with_file_times() != fingerprint(there).with_file_times()


@pytest.mark.parametrize("change", ["name", "pixels", "unreadable", "count"])
def test_changed_images_change_the_fingerprint(tmp_path: Path, change: str) -> None:
    folder = photos(tmp_path, 5)
    before, file = fingerprint(folder).of(), folder / "003.png"
    if change == "name":
        file.rename(folder / "003b.png")
    elif change == "pixels":
        noise(24, 27, seed=99).save(file)
    elif change == "unreadable":
        file.write_bytes(b"no image")
    else:
        file.unlink()
    assert fingerprint(folder).of() != before


@pytest.mark.parametrize(
    "more", [(), ("c/.",), ("a/b/", "c/.", ".", "", "/", "a//"), ("x/..", "\n/\n")]
)
def test_names_are_those_of_pathlib(more: tuple[str, ...]) -> None:
    """Existing fingerprints stay valid: they were made with `Path(path).name`."""
    paths = ["a/b.png", "b.png", "/data/x/shard-0.tar:12.jpg", "c/d\\e.png", "./f", *more]
    source = ImageSource(
        name="a",
        count=len(paths),
        read=lambda i: torch.zeros(3, 4, 4, dtype=torch.uint8),
        place=lambda i: paths[i],
    )
    pixels = hashlib.blake2b(bytes(48) * len(paths), digest_size=16).digest()
    names = "\n".join(Path(path).name for path in paths).encode()
    assert (
        DatasetFingerprint(source).of()
        == hashlib.blake2b(pixels + names, digest_size=16).hexdigest()
    )


def test_labels_change_the_fingerprint() -> None:
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)

    def labeled(*labels: int) -> str:
        source = ImageSource(
            name="a",
            count=2,
            read=lambda i: image,
            place=lambda i: f"a:{i}",
            labels=torch.tensor(labels),
            classes=("a", "b"),
        )
        return DatasetFingerprint(source).of()

    assert labeled(0, 1) == labeled(0, 1) != labeled(1, 0)


@pytest.mark.parametrize("change", ["time", "size"])
def test_file_times_detect_changes_outside_the_sample(tmp_path: Path, change: str) -> None:
    folder = photos(tmp_path, 5)
    before, file = fingerprint(folder, samples=1), folder / "003.png"
    plain, strict = before.of(), before.with_file_times()
    state = file.stat()
    if change == "size":
        noise(50, 50, seed=99).save(file)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    else:
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))
    after = fingerprint(folder, samples=1)
    assert after.of() == plain
    assert after.with_file_times() != strict


def test_file_fingerprint_depends_on_weights_not_precision(tmp_path: Path) -> None:
    weights = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, np.int64)}
    expected = weights_fingerprint(weights.items())
    save_file(weights, tmp_path / "a.safetensors")
    assert file_fingerprint(tmp_path / "a.safetensors") == expected
    save_file({**weights, "b": weights["b"].astype(np.float16)}, tmp_path / "b.safetensors")
    assert file_fingerprint(tmp_path / "b.safetensors") == expected
    for name, value in (("b", weights["b"] + 1), ("b", weights["b"].T), ("c", weights["a"])):
        assert weights_fingerprint({**weights, name: value}.items()) != expected


def test_any_changed_image_without_a_file_changes_the_strict_fingerprint() -> None:
    """A cache of features must not be used for a Python data set with other images."""

    def strict(last: int) -> str:
        values = [0] * 99 + [last]
        source = ImageSource(
            name="a",
            count=100,
            read=lambda i: torch.full((3, 4, 4), values[i], dtype=torch.uint8),
            place=lambda i: f"a:{i}",
        )
        return DatasetFingerprint(source).with_file_times()

    assert strict(1) == strict(1) != strict(2)


@pytest.mark.parametrize("places", [None, range(5, 20_004, 2)])
def test_fingerprint_of_many_images_equals_a_hash_of_all_names_at_once(
    places: range | None,
) -> None:
    """Names are hashed in parts. Folders, trailing slashes and surrogates are in the names."""
    count = 20_005
    kinds = ("a/b{0}/c{0}\udcff.png", "shard.tar:{0}", "x{0}/", "y{0}/.", "z/{0}/..")
    names = [kinds[i % 5].format(i) for i in range(count)]
    image, labels = torch.full((3, 4, 4), 7, dtype=torch.uint8), torch.arange(count) % 3
    source = ImageSource(
        name="a",
        count=count,
        read=lambda i: image,
        place=names.__getitem__,
        labels=labels,
        classes=("a", "b", "c"),
    )
    found = DatasetFingerprint(source, samples=1)
    chosen = list(range(count) if places is None else places)
    expected = hashlib.blake2b(
        hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest(), digest_size=16
    )
    text = "\n".join(Path(names[i]).name for i in chosen)
    expected.update(text.encode(errors="backslashreplace"))
    expected.update(labels[chosen].numpy().tobytes())
    assert found.of(places) == expected.hexdigest()
