"""Transfer datasets: small copies of the real layouts give the expected splits."""

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from compressive.data.source import Source
from compressive.evaluation.datasets.transfer import DATASETS, Split, open_transfer

# torchvision 0.29 warns at every decoder call; users do not see it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities:DeprecationWarning"
)
SHARED = Path(__file__).parents[4] / "shared" / "data"


def encoded(shade: int = 0, kind: str = "JPEG") -> bytes:
    file = BytesIO()
    Image.new("RGB", (6, 4), (shade, shade, shade)).save(file, kind)
    return file.getvalue()


PLAIN = encoded()


def put(path: Path, body: bytes = PLAIN) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def names(source: Source) -> list[str]:
    return [Path(source.origin(i)).name for i in range(len(source))]


def classes_of(source: Source) -> list[str]:
    assert source.labels is not None
    assert source.classes is not None
    return [source.classes[label] for label in source.labels.tolist()]


def labels_of(source: Source) -> torch.Tensor:
    assert source.labels is not None
    return source.labels


def origins(*sources: Source) -> list[str]:
    return [source.origin(i) for source in sources for i in range(len(source))]


# --- dataset layouts, two or three classes each ------------------------------------------------


def food101(root: Path) -> None:
    base = root / "food-101"
    for split, numbers in {"train": range(20), "test": range(20, 25)}.items():
        lists = {dish: [f"{dish}/{i}" for i in numbers] for dish in ("waffles", "apple_pie")}
        write(base / "meta" / f"{split}.json", [json.dumps(lists)])
        for name in chain.from_iterable(lists.values()):
            put(base / "images" / f"{name}.jpg")


def cifar(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Write CIFAR files and disable the checksums that torchvision verifies."""
    fine = kind == "CIFAR100"
    base = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    lists = {"train_list": ["train"] if fine else ["a", "b"], "test_list": ["test"]}
    key = "fine_labels" if fine else "labels"
    for attribute, files in lists.items():
        monkeypatch.setattr(getattr(datasets, kind), attribute, [[file, None] for file in files])
        for file in files:
            pixels = np.arange(20 * 3072).reshape(20, 3072).astype(np.uint8)
            put(base / file, pickle.dumps({"data": pixels, key: [0, 1] * 10}))
    meta = {"filename": "meta", "key": "names", "md5": None}
    monkeypatch.setattr(getattr(datasets, kind), "meta", meta)
    put(base / "meta", pickle.dumps({"names": ["apple", "bee"]}))


def flowers(root: Path) -> None:
    base = root / "flowers-102"
    ids = {"trnid": [3, 1], "valid": [2, 6], "tstid": [4, 5, 7, 8]}
    put(base / "jpg" / "readme.txt")
    savemat(base / "setid.mat", {key: np.array([value]) for key, value in ids.items()})
    savemat(base / "imagelabels.mat", {"labels": np.array([[1, 2, 2, 1, 1, 1, 2, 2]])})
    for i in range(1, 9):
        put(base / "jpg" / f"image_{i:05}.jpg", encoded(i * 20))


def pet(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    # Ids do not follow the case-sensitive name order of list.txt.
    rows = [f"{name}_{i} {label} 1 1" for name, label in PETS.items() for i in range(10)]
    write(base / "annotations" / "trainval.txt", rows)
    write(base / "annotations" / "test.txt", [f"pug_{i} 2 1 1" for i in range(20, 23)])
    for name in PETS:
        for i in range(25):
            put(base / "images" / f"{name}_{i}.jpg", encoded(90, "PNG" if i % 2 else "GIF"))


PETS = {"Abyssinian": 1, "Great_Pyrenees": 3, "pug": 2}


def annotations(rows: list[tuple[str, int]]) -> dict[str, np.ndarray]:
    kinds = [("bbox_x1", object), ("class", object), ("fname", object)]
    return {"annotations": np.array([(1, label, name) for name, label in rows], dtype=kinds)}


def cars(root: Path, test_in: str = "devkit") -> None:
    base = root / "stanford_cars"
    train = [(f"{i:05}.jpg", 1 + i % 2) for i in range(1, 21)]
    test = [(f"{i:05}.jpg", 2) for i in range(1, 4)]
    for name, rows in {"train": train, "test": test}.items():
        for file, _ in rows:
            put(base / f"cars_{name}" / file, encoded(50 if name == "train" else 150))
    (base / "devkit").mkdir()
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    savemat(base / "devkit" / "cars_train_annos.mat", annotations(train))
    savemat(base / test_in / "cars_test_annos_withlabels.mat", annotations(test))


def caltech101(root: Path) -> None:
    base = root / "caltech101" / "101_ObjectCategories"
    for folder, count in {"accordion": 31, "Faces": 40, "BACKGROUND_Google": 35}.items():
        for i in range(1, count + 1):
            put(base / folder / f"image_{i:04}.jpg")
    put(base / "BACKGROUND_Google" / "tmp")  # as in the real folder
    (root / "caltech101" / "Annotations" / "Faces_2").mkdir(parents=True)


def sun397(root: Path, lists: str = "SUN397/Partitions") -> None:
    classes = ["/a/abbey", "/a/airplane_cabin", "/b/bakery/shop"]
    write(root / lists / "ClassName.txt", classes)
    for split, numbers in {"Training": range(10), "Testing": range(10, 14)}.items():
        lines = [f"{name}/sun_{i:04}.jpg" for name in classes for i in numbers]
        write(root / lists / f"{split}_01.txt", lines)
        write(root / lists / f"{split}_02.txt", lines[::-1][:3])
        for line in lines:
            put(root / "SUN397" / line[1:], encoded(70, "GIF" if "shop" in line else "JPEG"))
    put(root / "SUN397" / "a" / "abbey" / "sun_9999.jpg")  # most images are in no list


def birdsnap(root: Path) -> None:
    base = root / "birdsnap"
    species = [("1", "Acadian Flycatcher"), ("2", "\"Anna's Hummingbird")]
    rows = [f"{i}\t{name}\tLatin name\t{name.replace(' ', '_')}" for i, name in species]
    write(base / "species.txt", ["id\tcommon\tscientific\tdir", *rows])
    paths = [(f"{folder}/{i}.jpg", i % 2 + 1) for folder in ("A_F", "A_H") for i in range(10, 22)]
    lines = [f"http://gone/{path}\t0\t{path}\t{label}\t1\t2\t3\t4" for path, label in paths]
    write(base / "images.txt", ["url\tmd5\tpath\tspecies_id\tbb_x1\tbb_y1\tbb_x2\tbb_y2", *lines])
    write(base / "test_images.txt", ["path", "A_F/13.jpg", "A_H/14.jpg", "A_H/15.jpg"])
    for path, _ in paths:
        if path not in ("A_F/10.jpg", "A_H/15.jpg"):
            put(base / "download" / "images" / path)


def dtd(root: Path) -> None:
    base = root / "dtd" / "dtd"
    for k, split in enumerate(("train", "val", "test")):
        files = [f"{name}/{name}_{k}{i}.jpg" for name in ("banded", "dotted") for i in range(3)]
        write(base / "labels" / f"{split}1.txt", files)
        write(base / "labels" / f"{split}2.txt", files[:1])
        for file in files:
            put(base / "images" / file)


def aircraft(root: Path) -> None:
    base = root / "fgvc-aircraft-2013b" / "data"
    write(base / "variants.txt", ["707-320", "A340-200"])
    write(base / "families.txt", ["Boeing 707"])
    for k, split in enumerate(("train", "val", "test")):
        rows = [f"{k}{i:06} {('707-320', 'A340-200')[i % 2]}" for i in range(4)]
        write(base / f"images_variant_{split}.txt", rows)
        write(base / f"images_family_{split}.txt", [f"{row[:7]} Boeing 707" for row in rows])
        for row in rows:
            put(base / "images" / f"{row[:7]}.jpg")
    write(base / "images_variant_trainval.txt", [])


MAKERS: dict[str, Callable[[Path], None]] = {
    "food101": food101,
    "flowers": flowers,
    "pet": pet,
    "cars": cars,
    "caltech101": caltech101,
    "dtd": dtd,
    "sun397": sun397,
    "aircraft": aircraft,
    "birdsnap": birdsnap,
}
OFFICIAL = {"flowers", "dtd", "aircraft"}


# --- all datasets -----------------------------------------------------------------------------


def test_dataset_table_matches_the_paper() -> None:
    """Classes, metric, train plus val, and test, from evaluation.md, section 3.2."""
    table = {
        "food101": (101, "top-1", 75_750, 25_250),
        "cifar10": (10, "top-1", 50_000, 10_000),
        "cifar100": (100, "top-1", 50_000, 10_000),
        "birdsnap": (500, "top-1", 47_386, 2_443),
        "sun397": (397, "top-1", 19_850, 19_850),
        "cars": (196, "top-1", 8_144, 8_041),
        "aircraft": (100, "mean per class", 6_667, 3_333),
        "dtd": (47, "top-1", 3_760, 1_880),
        "pet": (37, "mean per class", 3_680, 3_669),
        "caltech101": (102, "mean per class", 3_060, 6_084),
        "flowers": (102, "mean per class", 2_040, 6_149),
    }
    found = {k: (d.classes, d.metric, d.train + d.val, d.test) for k, d in DATASETS.items()}
    assert found == table


def assert_valid(split: Split, official: bool) -> None:
    every = origins(split.train, split.val, split.test)
    assert len(set(every)) == len(every), "an image is in two splits"
    assert split.train.classes == split.val.classes == split.test.classes
    assert (split.held is None) == official
    for source in (split.train, split.val, split.test):
        assert source.image(len(source) - 1).shape == (3, 4, 6)


@pytest.mark.parametrize("name", MAKERS)
def test_splits_are_disjoint_and_depend_on_the_seed(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path)
    first, again, other = (open_transfer(name, tmp_path, seed=seed) for seed in (0, 0, 1))
    official = name in OFFICIAL
    assert_valid(first, official)
    assert first.metric == DATASETS[name].metric
    assert origins(*first[:3]) == origins(*again[:3])
    assert (origins(*first[:3]) == origins(*other[:3])) == official
    assert any("in the paper" in note for note in first.notes)
    if not official:
        assert first.held is not None
        fit = sorted(origins(first.train, first.val))
        assert len(first.held) == len(first.val)
        if name != "food101":  # its lists are ordered by dish
            assert [fit[i] for i in first.held.tolist()] == sorted(origins(first.val))


@pytest.mark.parametrize("name", DATASETS)
def test_missing_dataset_names_its_layout_and_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_transfer(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{name} is missing")
    assert str(tmp_path) in message
    assert DATASETS[name].layout in message
    assert DATASETS[name].files in message
    for host in ("http", "www", ".com", ".edu", ".org"):
        assert host not in message


@pytest.mark.parametrize("name", MAKERS)
def test_dataset_without_its_lists_is_missing(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".txt", ".json", ".mat")]
    for path in files:
        path.unlink()
    if not files:
        shutil.rmtree(tmp_path / "caltech101" / "101_ObjectCategories" / "Faces")
        assert "2 classes; in the paper" in open_transfer(name, tmp_path).notes[-1]
        return
    with pytest.raises(FileNotFoundError, match=f"^{name} is missing"):
        open_transfer(name, tmp_path)


def test_list_with_unknown_class_is_refused(tmp_path: Path) -> None:
    sun397(tmp_path)
    lines = tmp_path / "SUN397" / "Partitions" / "Training_01.txt"
    lines.write_text(lines.read_text() + "/c/cafe/sun_0001.jpg\n")
    with pytest.raises(ValueError, match=f"sun397 in {tmp_path} .*'/c/cafe'"):
        open_transfer("sun397", tmp_path)


def test_unknown_dataset_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'pets'.*food101, cifar10"):
        open_transfer("pets", tmp_path)


# --- single datasets --------------------------------------------------------------------------


def test_food101_holds_out_a_tenth(tmp_path: Path) -> None:
    food101(tmp_path)
    split = open_transfer("food101", tmp_path)
    assert [len(source) for source in split[:3]] == [36, 4, 10]
    assert sorted(classes_of(split.val)) == ["apple_pie"] * 2 + ["waffles"] * 2
    assert split.notes[0].startswith("val: 4 of 40 images")
    assert split.notes[0].endswith("seed 0")


@pytest.mark.parametrize("kind", ["CIFAR10", "CIFAR100"])
def test_cifar_is_read_by_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cifar(tmp_path, monkeypatch, kind)
    split = open_transfer(kind.lower(), tmp_path)
    total = 20 if kind == "CIFAR100" else 40
    assert (len(split.train) + len(split.val), len(split.test)) == (total, 20)
    assert len(split.val) == total // 10
    assert split.test.classes == ("apple", "bee")
    expected = np.arange(20 * 3072).astype(np.uint8).reshape(20, 3, 32, 32)[7]
    assert np.array_equal(split.test.image(7).numpy(), expected)


def test_cifar_is_read_from_parquet(tmp_path: Path) -> None:
    for split, count in {"train": 20, "test": 6}.items():
        cells = [{"bytes": encoded(i, "PNG"), "path": None} for i in range(count)]
        table = pa.table({"img": cells, "fine_label": [0, 1] * (count // 2)})
        folder = tmp_path / "cifar100" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    split = open_transfer("cifar100", tmp_path)
    assert [len(source) for source in split[:3]] == [18, 2, 6]
    assert split.test.image(5).max() == 5


@pytest.mark.shared
def test_real_cifar10_matches_the_paper() -> None:
    split = open_transfer("cifar10", SHARED)
    assert [len(source) for source in split[:3]] == [45_000, 5_000, 10_000]
    assert split.val.labels is not None
    assert split.val.labels.bincount().tolist() == [500] * 10
    (note,) = split.notes
    assert note.startswith("val: 5,000 of 50,000 images")
    assert note.endswith("seed 0")


def test_flowers_trains_on_its_small_split(tmp_path: Path) -> None:
    flowers(tmp_path)
    split = open_transfer("flowers", tmp_path)
    found = [names(source) for source in split[:3]]
    assert [[int(name[-5]) for name in part] for part in found] == [[3, 1], [2, 6], [4, 5, 7, 8]]
    assert [classes_of(source) for source in split[:2]] == [["2", "1"], ["2", "1"]]
    assert classes_of(split.test) == ["1", "1", "2", "2"]
    assert int(split.train.image(0).float().mean()) in range(57, 64)  # 60, except for JPEG error


def test_pet_classes_follow_ids_and_images_have_any_format(tmp_path: Path) -> None:
    pet(tmp_path)
    split = open_transfer("pet", tmp_path)
    assert split.test.classes == ("Abyssinian", "pug", "Great Pyrenees")
    assert classes_of(split.test) == ["pug"] * 3
    assert [len(source) for source in split[:3]] == [24, 6, 3]
    reference = datasets.OxfordIIITPet(str(tmp_path), split="trainval")
    assert split.test.classes is not None
    assert [name.title() for name in split.test.classes] == reference.classes
    for place, name in zip(origins(split.train), classes_of(split.train), strict=True):
        assert Path(place).name.rpartition("_")[0] == name.replace(" ", "_")
    assert split.test.image(0).unique().tolist() == [90]


@pytest.mark.parametrize("test_in", ["devkit", "."])
def test_cars_labels_start_at_1(tmp_path: Path, test_in: str) -> None:
    cars(tmp_path, test_in)
    split = open_transfer("cars", tmp_path)
    assert split.test.classes == ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
    assert classes_of(split.test) == ["Acura RL Sedan 2012"] * 3
    assert abs(float(split.test.image(0).float().mean()) - 150) < 3
    assert [len(source) for source in split[:3]] == [16, 4, 3]
    if test_in == ".":  # where torchvision expects it
        reference = datasets.StanfordCars(str(tmp_path), split="train")
        ids = dict(reference._samples)
        assert [ids[path] for path in origins(split.val)] == labels_of(split.val).tolist()


@pytest.mark.parametrize("name", ["cars", "flowers"])
def test_missing_scipy_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    MAKERS[name](tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ValueError, match=r"pip install scipy$"):
        open_transfer(name, tmp_path)


@pytest.mark.parametrize("folder", ["caltech101", "caltech-101"])
def test_caltech101_includes_the_background_class(tmp_path: Path, folder: str) -> None:
    caltech101(tmp_path)
    (tmp_path / "caltech101").rename(tmp_path / folder)
    split = open_transfer("caltech101", tmp_path, seed=3)
    assert split.test.classes == ("BACKGROUND_Google", "Faces", "accordion")
    found = [torch.bincount(labels_of(source)).tolist() for source in split[:3]]
    assert found == [[25] * 3, [5] * 3, [5, 10, 1]]
    assert "30 images of each class" in split.notes[0]
    assert "seed 3" in split.notes[0]
    assert "BACKGROUND_Google" in split.notes[1]
    assert origins(split.test) != origins(open_transfer("caltech101", tmp_path, seed=4).test)


@pytest.mark.parametrize("lists", ["SUN397/Partitions", "SUN397", "Partitions"])
def test_sun397_uses_its_first_split(tmp_path: Path, lists: str) -> None:
    sun397(tmp_path, lists)
    split = open_transfer("sun397", tmp_path)
    assert split.test.classes == ("a/abbey", "a/airplane_cabin", "b/bakery/shop")
    assert [len(source) for source in split[:3]] == [24, 6, 12]
    assert names(split.test)[:4] == [f"sun_{i:04}.jpg" for i in range(10, 14)]
    assert classes_of(split.test)[8:] == ["b/bakery/shop"] * 4
    assert split.test.image(11).unique().tolist() == [70]  # a GIF file named .jpg


def test_birdsnap_reports_missing_images(tmp_path: Path) -> None:
    birdsnap(tmp_path)
    split = open_transfer("birdsnap", tmp_path)
    assert split.notes[0].startswith("2 of 24 images")
    assert names(split.test) == ["13.jpg", "14.jpg"]
    assert classes_of(split.test) == ["\"Anna's Hummingbird", "Acadian Flycatcher"]
    assert len(split.train) + len(split.val) == 20
    shutil.rmtree(tmp_path / "birdsnap" / "download")
    with pytest.raises(FileNotFoundError, match=r"/download/images/A_F/10\.jpg"):
        open_transfer("birdsnap", tmp_path)


def test_dtd_and_aircraft_use_official_validation_splits(tmp_path: Path) -> None:
    dtd(tmp_path)
    aircraft(tmp_path)
    textures, planes = (open_transfer(name, tmp_path) for name in ("dtd", "aircraft"))
    assert [len(source) for source in textures[:3]] == [6, 6, 6]
    assert names(textures.val)[:2] == ["banded_10.jpg", "banded_11.jpg"]
    assert planes.test.classes == ("707-320", "A340-200")
    assert names(planes.val) == [f"1{i:06}.jpg" for i in range(4)]


@pytest.mark.parametrize("name", DATASETS)
def test_error_names_the_missing_file_and_its_origin(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_transfer(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    folder = DATASETS[name].layout.partition("/")[0].strip()
    assert f"no {tmp_path / folder}" in message
    assert DATASETS[name].files in message
    assert any(end in DATASETS[name].files for end in (".tgz", ".tar.gz", ".zip"))
