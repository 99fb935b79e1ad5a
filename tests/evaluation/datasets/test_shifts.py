"""Robustness datasets in their published layouts: each image gets exactly its ImageNet ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laid_out import WNIDS, answers, put, put_objectnet
from PIL import Image
from torchvision.datasets import ImageFolder

from compressive.corruptions.parameters import EXTRAS, NAMES
from compressive.evaluation.datasets.layouts import SHIFTS
from compressive.evaluation.datasets.shifts import CELLS, corruptions_at, open_cell, open_shift

# --- class folders --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r"])
@pytest.mark.parametrize("inside", [False, True])
def test_imagenet_a_and_r_labels_are_wnid_ranks(tmp_path: Path, name: str, inside: bool) -> None:
    """ImageFolder labels the same images 0 and 1."""
    for rank in (999, 3):
        put(tmp_path / name / WNIDS[rank] / "0.1_x.jpg")
    (tmp_path / name / "README.txt").touch()
    shift = open_shift(name, tmp_path / name if inside else tmp_path, WNIDS)
    assert answers(shift) == {f"{WNIDS[3]}/0.1_x.jpg": {3}, f"{WNIDS[999]}/0.1_x.jpg": {999}}
    assert ImageFolder(str(tmp_path / name)).targets == [0, 1]
    assert shift.answers.allowed is not None
    assert shift.answers.allowed.tolist() == [3, 999]
    assert (shift.answers.classes, shift.crop) == (1000, "resize")
    assert "2 images on disk" in shift.notes[-1]
    assert shift.source.image(0).shape == (3, 8, 8)


def test_wnids_must_be_complete_and_sorted(tmp_path: Path) -> None:
    put(tmp_path / "imagenet-a" / WNIDS[3] / "x.jpg")
    with pytest.raises(ValueError, match=r"needs the wnids .* imagenet_wnids"):
        open_shift("imagenet-a", tmp_path)
    with pytest.raises(ValueError, match=r"1000.*got 999"):
        open_shift("imagenet-a", tmp_path, WNIDS[1:])
    with pytest.raises(ValueError, match="1000, sorted"):
        open_shift("imagenet-a", tmp_path, WNIDS[::-1])
    put(tmp_path / "imagenet-a" / "n99999999" / "x.jpg")
    with pytest.raises(ValueError, match=r"n99999999.*1000 classes"):
        open_shift("imagenet-a", tmp_path, WNIDS)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("imagenet-v2", "imagenetv2-matched-frequency-format-val"),
        ("imagenet-v2", "imagenetv2-matched-frequency"),
        ("imagenet-v2", "ImageNetV2-matched-frequency"),
        ("imagenet-v2-threshold0.7", "imagenetv2-threshold0.7-format-val"),
        ("imagenet-v2-top-images", "imagenetv2-top-images"),
    ],
)
def test_imagenet_v2_labels_are_folder_numbers(tmp_path: Path, name: str, folder: str) -> None:
    """Names sort as 0, 1, 10, 100, 11, ..., 2, so ranks would be wrong from the third folder on."""
    numbers = [0, 1, 2, 10, 11, 100, 999]
    for number in numbers:
        put(tmp_path / folder / str(number) / "a.jpeg")
    shift = open_shift(name, tmp_path)
    assert answers(shift) == {f"{n}/a.jpeg": {n} for n in numbers}
    assert shift.answers.right[:, 0].tolist() == [0, 1, 10, 100, 11, 2, 999]
    assert shift.answers.allowed is None


def test_similar_datasets_are_not_confused(tmp_path: Path) -> None:
    put(tmp_path / "imagenet-r" / WNIDS[3] / "x.jpg")
    put(tmp_path / "imagenetv2-top-images" / "0" / "x.jpeg")
    put(tmp_path / "Tiny-ImageNet-C" / "fog" / "1" / WNIDS[3] / "x.JPEG")
    with pytest.raises(FileNotFoundError, match="no imagenet-a in"):
        open_shift("imagenet-a", tmp_path / "imagenet-r", WNIDS)
    with pytest.raises(FileNotFoundError, match="no imagenet-v2 in"):
        open_shift("imagenet-v2", tmp_path / "imagenetv2-top-images")
    with pytest.raises(FileNotFoundError, match="no imagenet-c in"):
        open_cell("imagenet-c", tmp_path, "fog", 1, WNIDS)


@pytest.mark.parametrize("name", SHIFTS)
def test_missing_dataset_names_its_layout_and_origin(tmp_path: Path, name: str) -> None:
    more = ("fog", 1, WNIDS) if name in CELLS else (WNIDS,)
    opener: Any = open_cell if name in CELLS else open_shift
    with pytest.raises(FileNotFoundError) as error:
        opener(name, tmp_path / "nowhere", *more)
    text = str(error.value)
    assert SHIFTS[name].layout in text
    assert SHIFTS[name].origin in text
    assert "\n" not in text
    assert "://" not in text


def test_unknown_or_mismatched_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'imagenet-b'.*imagenet-a"):
        open_shift("imagenet-b", tmp_path)
    with pytest.raises(ValueError, match=r"'imagenet-c'.*open_cell"):
        open_shift("imagenet-c", tmp_path)
    with pytest.raises(ValueError, match=r"'imagenet-a'.*corruptions"):
        open_cell("imagenet-a", tmp_path, "fog", 1)


# --- ObjectNet ------------------------------------------------------------------------------------


def test_objectnet_keeps_imagenet_classes_and_crops_the_border(tmp_path: Path) -> None:
    root = tmp_path / "objectnet-1.0"
    expected = put_objectnet(root)
    for folder in ("folder_0", "folder_112", "folder_200"):  # the last class is not in ImageNet
        framed = Image.new("RGB", (12, 9), (255, 0, 0))
        framed.paste((0, 255, 0), (2, 2, 10, 7))
        (root / "images" / folder).mkdir(parents=True)
        framed.save(root / "images" / folder / "0a1b.png")
    shift = open_shift("objectnet", tmp_path)
    kept = ("folder_0", "folder_112")
    assert answers(shift) == {f"{folder}/0a1b.png": expected[folder] for folder in kept}
    assert shift.answers.allowed is not None
    assert len(shift.answers.allowed) == 125
    inner = torch.tensor([0, 255, 0], dtype=torch.uint8)[:, None, None].expand(3, 5, 8)
    assert torch.equal(shift.source.image(0), inner)


def test_objectnet_without_imagenet_classes_is_refused(tmp_path: Path) -> None:
    put_objectnet(tmp_path)
    put(tmp_path / "images" / "folder_200" / "x.png")
    with pytest.raises(FileNotFoundError, match="no images of objectnet"):
        open_shift("objectnet", tmp_path)


# --- corruptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"), [("imagenet-c", "ImageNet-C"), ("tiny-imagenet-c", "Tiny-ImageNet-C")]
)
@pytest.mark.parametrize("archive", ["", "weather"])
def test_imagenet_c_labels_are_wnid_ranks(
    tmp_path: Path, name: str, folder: str, archive: str
) -> None:
    base = tmp_path / folder / archive
    for severity in (1, 4):
        for rank in (2, 7):
            put(base / "fog" / str(severity) / WNIDS[rank] / "v.JPEG", (severity, 0, 0), size=224)
    put(base / "spatter" / "1" / WNIDS[2] / "v.JPEG")
    shift = open_cell(name, tmp_path, "fog", 4, WNIDS[:10])
    assert answers(shift) == {f"{WNIDS[2]}/v.JPEG": {2}, f"{WNIDS[7]}/v.JPEG": {7}}
    assert (shift.crop, shift.answers.classes) == ("center", 10)
    assert shift.notes[0] == "fog 4"
    assert shift.notes[1].startswith("published files")
    assert "/fog/4/" in shift.source.origin(0)
    assert corruptions_at(name, tmp_path) == ("fog", "spatter")
    with pytest.raises(FileNotFoundError, match="no frost of"):
        open_cell(name, tmp_path, "frost", 4, WNIDS)
    with pytest.raises(FileNotFoundError, match="no folders with images"):
        open_cell(name, tmp_path, "fog", 2, WNIDS)
    with pytest.raises(ValueError, match=r"severity .*got 0"):
        open_cell(name, tmp_path, "fog", 0, WNIDS)
    with pytest.raises(ValueError, match=r"corruption .*'rain'"):
        open_cell(name, tmp_path, "rain", 1, WNIDS)
    with pytest.raises(ValueError, match="needs the wnids"):
        open_cell(name, tmp_path, "fog", 1)


@pytest.mark.parametrize(("name", "classes"), [("cifar10-c", 10), ("cifar100-c", 100)])
def test_cifar_c_severities_are_consecutive_rows(tmp_path: Path, name: str, classes: int) -> None:
    """Severity s has rows n(s - 1) to ns of the files; here n = 6 instead of 10,000."""
    root = tmp_path / f"CIFAR-{classes}-C"
    root.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(np.random.default_rng(1).integers(0, classes, 6, dtype=np.uint8), 5)
    np.save(root / "frost.npy", pixels)
    np.save(root / "labels.npy", labels)
    for severity in range(1, 6):
        shift = open_cell(name, tmp_path, "frost", severity)
        rows = range(6 * (severity - 1), 6 * severity)
        assert shift.answers.right[:, 0].tolist() == [int(labels[row]) for row in rows]
        for i, row in enumerate(rows):
            assert np.array_equal(shift.source.image(i).permute(1, 2, 0).numpy(), pixels[row])
        assert shift.source.origin(2).endswith(f"frost.npy:{rows[2]}")
        assert (shift.answers.classes, shift.crop) == (classes, "center")
    assert corruptions_at(name, root) == ("frost",)
    np.save(root / "labels.npy", labels + np.uint8(classes))
    with pytest.raises(ValueError, match=f"below {classes}"):
        open_cell(name, tmp_path, "frost", 1)
    np.save(root / "labels.npy", labels[:6])
    with pytest.raises(ValueError, match=r"got uint8 \(30, 32, 32, 3\) and \(6,\)"):
        open_cell(name, tmp_path, "frost", 1)


def test_there_are_15_corruptions_and_4_extras() -> None:
    assert (len(set(NAMES)), len(set(EXTRAS)), len({*NAMES, *EXTRAS})) == (15, 4, 19)


@pytest.mark.parametrize(
    ("name", "there", "missing"),
    [
        ("objectnet", "mappings/x", "mappings/folder_to_objectnet_label.json"),
        ("imagenet-vid-robust", "metadata/pmsets.json", "metadata/labels.json"),
        ("cifar10-c", "fog.npy", "labels.npy"),
    ],
)
def test_error_of_an_incomplete_set_names_the_file_and_its_origin(
    name: str, there: str, missing: str, tmp_path: Path
) -> None:
    path = tmp_path / SHIFTS[name].folders[-1] / there
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    if name == "cifar10-c":
        np.save(path, np.zeros((5, 32, 32, 3), dtype=np.uint8))
        (path.parent / "labels.npy").symlink_to(path.parent / "nothing")
    arguments = (name, tmp_path, "fog", 1) if name in CELLS else (name, tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        (open_cell if name in CELLS else open_shift)(*arguments)  # pyright: ignore
    message = str(caught.value)
    assert missing in message
    assert SHIFTS[name].origin in message
