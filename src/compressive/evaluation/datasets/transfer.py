"""The eleven transfer data sets of the paper with their splits and metrics."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jaxtyping import Int64
from torch import Tensor

from compressive.data.source import Source, subset
from compressive.data.splits import stratified
from compressive.evaluation.datasets.layouts import whole
from compressive.evaluation.datasets.transfer_files import Found, read_dataset

PaperMetric = Literal["top-1", "mean per class"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Facts about a data set, and its layout on disk.

    Sizes are from the appendix of BYOL; their sums agree with the lists of the data sets.
    """

    classes: int
    metric: PaperMetric
    train: int
    val: int
    test: int
    layout: str  # in the folder of all data sets
    files: str  # where they come from


class Split(NamedTuple):
    """Fit on train, choose on val, refit on both, and read test once."""

    train: Source
    val: Source
    test: Source
    metric: PaperMetric
    notes: tuple[str, ...]  # for the protocol of every record
    held: Int64[Tensor, " val"] | None  # which images of train are val, if we drew it


_FETCH = "its authors' archive, or torchvision's class for it, with download=True"
DATASETS = {
    "food101": Dataset(
        classes=101,
        metric="top-1",
        train=68_175,
        val=7_575,
        test=25_250,
        layout="food-101/ with images/CLASS/*.jpg, meta/train.json, meta/test.json",
        files=_FETCH,
    ),
    "cifar10": Dataset(
        classes=10,
        metric="top-1",
        train=45_000,
        val=5_000,
        test=10_000,
        layout="cifar-10-batches-py/ of its Python version, or cifar10/ with train*.parquet and "
        "test*.parquet",
        files=_FETCH,
    ),
    "cifar100": Dataset(
        classes=100,
        metric="top-1",
        train=44_933,
        val=5_067,
        test=10_000,
        layout="cifar-100-python/ of its Python version, or cifar100/ with train*.parquet and "
        "test*.parquet",
        files=_FETCH,
    ),
    "flowers": Dataset(
        classes=102,
        metric="mean per class",
        train=1_020,
        val=1_020,
        test=6_149,
        layout="flowers-102/ with jpg/image_*.jpg, imagelabels.mat, setid.mat",
        files=_FETCH,
    ),
    "pet": Dataset(
        classes=37,
        metric="mean per class",
        train=2_940,
        val=740,
        test=3_669,
        layout="oxford-iiit-pet/ with images/*.jpg, annotations/trainval.txt, annotations/test.txt",
        files=_FETCH,
    ),
    "cars": Dataset(
        classes=196,
        metric="top-1",
        train=6_494,
        val=1_650,
        test=8_041,
        layout="stanford_cars/ with cars_train/*.jpg, cars_test/*.jpg, devkit/cars_meta.mat, "
        "devkit/cars_train_annos.mat, and cars_test_annos_withlabels.mat there or in devkit/",
        files="a copy of its authors' cars_train.tgz, cars_test.tgz, car_devkit.tgz and the labels "
        "of test; their own page is gone",
    ),
    "caltech101": Dataset(
        classes=102,
        metric="mean per class",
        train=2_550,
        val=510,
        test=6_084,
        layout="caltech101/101_ObjectCategories/CLASS/*.jpg, with BACKGROUND_Google/",
        files=_FETCH,
    ),
    "dtd": Dataset(
        classes=47,
        metric="top-1",
        train=1_880,
        val=1_880,
        test=1_880,
        layout="dtd/dtd/ with images/CLASS/*.jpg, labels/train1.txt, labels/val1.txt, "
        "labels/test1.txt",
        files=_FETCH,
    ),
    "sun397": Dataset(
        classes=397,
        metric="top-1",
        train=15_880,
        val=3_970,
        test=19_850,
        layout="SUN397/ with a/abbey/*.jpg and so on, and Partitions/ with ClassName.txt, "
        "Training_01.txt, Testing_01.txt",
        files="its authors' SUN397.tar.gz and Partitions.zip",
    ),
    "aircraft": Dataset(
        classes=100,
        metric="mean per class",
        train=3_334,
        val=3_333,
        test=3_333,
        layout="fgvc-aircraft-2013b/data/ with images/*.jpg, variants.txt, "
        "images_variant_train.txt, images_variant_val.txt, images_variant_test.txt",
        files=_FETCH,
    ),
    "birdsnap": Dataset(
        classes=500,
        metric="top-1",
        train=42_405,
        val=4_981,
        test=2_443,
        layout="birdsnap/ with images.txt, test_images.txt, species.txt, "
        "download/images/SPECIES/*.jpg",
        files="its authors' birdsnap.tgz, whose get_birdsnap.py fetches the images that are still "
        "online",
    ),
}


def open_transfer(name: str, root: str | Path, *, seed: int = 0) -> Split:
    """Open a data set of the paper from the folder that has all of them.

    If its authors have no validation split, as many images as in BYOL are held out, in proportion
    to the classes. Which ones BYOL used is unpublished.
    """
    if name not in DATASETS:
        raise ValueError(f"no transfer dataset {name!r}; there are {', '.join(DATASETS)}")
    dataset, root = DATASETS[name], Path(root).expanduser()
    found = _found(name, root, seed)
    whole = len(found.train) == dataset.train + dataset.val
    size = dataset.val if whole else dataset.val / (dataset.train + dataset.val)
    split = _with_val(found, size, seed, dataset.metric)
    here = (len(split.train) + len(split.val), len(split.test), len(split.train.classes or ()))
    paper = (dataset.train + dataset.val, dataset.test, dataset.classes)
    if here == paper:
        return split
    words = [
        f"{fit:,} images for training and {test:,} for test, of {classes} classes"
        for fit, test, classes in (here, paper)
    ]
    return split._replace(notes=(*split.notes, f"{words[0]}; in the paper {words[1]}"))


def _with_val(found: Found, size: int | float, seed: int, metric: PaperMetric) -> Split:
    """Return a split with val, drawn from train if there was none."""
    if found.val is not None:
        return Split(found.train, found.val, found.test, metric, found.notes, None)
    assert found.train.labels is not None
    kept, held = stratified(found.train.labels, size, seed=seed)
    note = f"val: {len(held):,} of {len(found.train):,} images, drawn by class with seed {seed}"
    train, val = subset(found.train, kept), subset(found.train, held)
    return Split(train, val, found.test, metric, (*found.notes, note), held)


def _found(name: str, root: Path, seed: int) -> Found:
    dataset = DATASETS[name]
    try:
        with whole(f"{name} in {root}"):
            return read_dataset(name, root, seed)
    except FileNotFoundError as error:
        lost = f"no {error.filename}; " if error.filename else ""
        raise FileNotFoundError(
            f"{name} is missing or incomplete in {root}: {lost}expected {dataset.layout}; "
            f"the files come from {dataset.files}"
        ) from error
