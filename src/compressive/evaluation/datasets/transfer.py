"""The eleven transfer data sets of the paper with their splits and metrics."""

from pathlib import Path
from typing import Literal, NamedTuple

from jaxtyping import Int64
from torch import Tensor

from compressive.data.decode import first_line
from compressive.data.source import Source, subset
from compressive.data.splits import stratified
from compressive.evaluation.datasets.layouts import PUBLISHED, whole
from compressive.evaluation.datasets.transfer_files import read_dataset

PaperMetric = Literal["top-1", "mean per class"]


class Dataset(NamedTuple):
    """Sizes, metric and disk layout of a data set, from published.toml."""

    classes: int
    metric: PaperMetric
    train: int
    val: int
    test: int
    layout: str  # in the folder of all data sets
    files: str  # where they come from


class Split(NamedTuple):
    """Splits of a data set: fit on train, choose on val, refit on both, and read test once."""

    train: Source
    val: Source
    test: Source
    metric: PaperMetric
    notes: tuple[str, ...]  # for the protocol of every record
    held: Int64[Tensor, " val"] | None  # indices of val in train, if val was drawn here


DATASETS: dict[str, Dataset] = {
    name: Dataset(**facts) for name, facts in PUBLISHED["transfer"].items()
}


def _lost(error: FileNotFoundError, dataset: Dataset, root: Path) -> str:
    """Name the missing file; torchvision's errors name none if the whole set is missing."""
    folder = root / dataset.layout.partition("/")[0].strip()
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    name = error.filename or getattr(cause, "filename", None) or ("" if folder.exists() else folder)
    return f"no {name}" if name else first_line(cause)


def open_transfer(name: str, root: str | Path, *, seed: int = 0) -> Split:
    """Open a data set of the paper from the folder of all data sets.

    If its authors publish no validation split, hold out as many images as BYOL, stratified by
    class. BYOL's choice of images is unpublished.
    """
    if name not in DATASETS:
        raise ValueError(f"no transfer dataset {name!r}; there are {', '.join(DATASETS)}")
    dataset, root = DATASETS[name], Path(root).expanduser()
    try:
        with whole(f"{name} in {root}"):
            found = read_dataset(name, root, seed)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name} is missing or incomplete in {root}: {_lost(error, dataset, root)}; expected "
            f"{dataset.layout}; the files come from {dataset.files}"
        ) from error
    total = dataset.train + dataset.val
    size = dataset.val if len(found.train) == total else dataset.val / total
    if found.val is not None:
        split = Split(found.train, found.val, found.test, dataset.metric, found.notes, None)
    else:
        assert found.train.labels is not None
        kept, held = stratified(found.train.labels, size, seed=seed)
        note = f"val: {len(held):,} of {len(found.train):,} images, drawn by class with seed {seed}"
        train, val = subset(found.train, kept), subset(found.train, held)
        split = Split(train, val, found.test, dataset.metric, (*found.notes, note), held)
    here = (len(split.train) + len(split.val), len(split.test), len(split.train.classes or ()))
    paper = (total, dataset.test, dataset.classes)
    if here == paper:
        return split
    words = [
        f"{fit:,} images for training and {test:,} for test, of {classes} classes"
        for fit, test, classes in (here, paper)
    ]
    return split._replace(notes=(*split.notes, f"{words[0]}; in the paper {words[1]}"))
