"""The eleven transfer data sets of the paper with their splits and metrics."""

from pathlib import Path
from typing import Literal, NamedTuple

from jaxtyping import Int64
from torch import Tensor

from compressive.data.source import Source, subset
from compressive.data.splits import stratified
from compressive.evaluation.datasets.layouts import whole
from compressive.evaluation.datasets.transfer_files import Found, read_dataset

PaperMetric = Literal["top-1", "mean per class"]


class Dataset(NamedTuple):
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


_SIZES: dict[str, tuple[int, PaperMetric, int, int, int]] = {
    # classes, metric, images of train, val and test
    "food101": (101, "top-1", 68_175, 7_575, 25_250),
    "cifar10": (10, "top-1", 45_000, 5_000, 10_000),
    "cifar100": (100, "top-1", 44_933, 5_067, 10_000),
    "flowers": (102, "mean per class", 1_020, 1_020, 6_149),
    "pet": (37, "mean per class", 2_940, 740, 3_669),
    "cars": (196, "top-1", 6_494, 1_650, 8_041),
    "caltech101": (102, "mean per class", 2_550, 510, 6_084),
    "dtd": (47, "top-1", 1_880, 1_880, 1_880),
    "sun397": (397, "top-1", 15_880, 3_970, 19_850),
    "aircraft": (100, "mean per class", 3_334, 3_333, 3_333),
    "birdsnap": (500, "top-1", 42_405, 4_981, 2_443),
}
_LAYOUTS = {
    "food101": "food-101/ with images/CLASS/*.jpg, meta/train.json, meta/test.json",
    "cifar10": "cifar-10-batches-py/ of its Python version, or cifar10/ with train*.parquet and "
    "test*.parquet",
    "cifar100": "cifar-100-python/ of its Python version, or cifar100/ with train*.parquet and "
    "test*.parquet",
    "flowers": "flowers-102/ with jpg/image_*.jpg, imagelabels.mat, setid.mat",
    "pet": "oxford-iiit-pet/ with images/*.jpg, annotations/trainval.txt, annotations/test.txt",
    "cars": "stanford_cars/ with cars_train/*.jpg, cars_test/*.jpg, devkit/cars_meta.mat, "
    "devkit/cars_train_annos.mat, and cars_test_annos_withlabels.mat there or in devkit/",
    "caltech101": "caltech101/101_ObjectCategories/CLASS/*.jpg, with BACKGROUND_Google/",
    "dtd": "dtd/dtd/ with images/CLASS/*.jpg, labels/train1.txt, labels/val1.txt, labels/test1.txt",
    "sun397": "SUN397/ with a/abbey/*.jpg and so on, and Partitions/ with ClassName.txt, "
    "Training_01.txt, Testing_01.txt",
    "aircraft": "fgvc-aircraft-2013b/data/ with images/*.jpg, variants.txt, "
    "images_variant_train.txt, images_variant_val.txt, images_variant_test.txt",
    "birdsnap": "birdsnap/ with images.txt, test_images.txt, species.txt, "
    "download/images/SPECIES/*.jpg",
}
_FETCH = "its authors' archive, or torchvision's class for it, with download=True"
_FILES = {
    "cars": "a copy of its authors' cars_train.tgz, cars_test.tgz, car_devkit.tgz and the labels "
    "of test; their own page is gone",
    "sun397": "its authors' SUN397.tar.gz and Partitions.zip",
    "birdsnap": "its authors' birdsnap.tgz, whose get_birdsnap.py fetches the images that are "
    "still online",
}
DATASETS = {
    name: Dataset(*sizes, _LAYOUTS[name], _FILES.get(name, _FETCH))
    for name, sizes in _SIZES.items()
}


def open_transfer(name: str, root: str | Path, *, seed: int = 0) -> Split:
    """Open a data set of the paper from the folder that has all of them.

    If its authors have no validation split, as many images as in BYOL are held out, in proportion
    to the classes. Which ones BYOL used is unpublished.
    """
    if name not in DATASETS:
        raise ValueError(f"no transfer dataset {name!r}; there are {', '.join(DATASETS)}")
    dataset, root = DATASETS[name], Path(root).expanduser()
    try:
        with whole(f"{name} in {root}"):
            found = read_dataset(name, root, seed)
    except FileNotFoundError as error:
        lost = f"no {error.filename}; " if error.filename else ""
        raise FileNotFoundError(
            f"{name} is missing or incomplete in {root}: {lost}expected {dataset.layout}; "
            f"the files come from {dataset.files}"
        ) from error
    total = dataset.train + dataset.val
    size = dataset.val if len(found.train) == total else dataset.val / total
    split = _with_val(found, size, seed, dataset.metric)
    here = (len(split.train) + len(split.val), len(split.test), len(split.train.classes or ()))
    paper = (total, dataset.test, dataset.classes)
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
