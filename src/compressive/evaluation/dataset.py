"""Open the train and test images of an evaluation."""

from typing import NamedTuple

import torch

from compressive.config import Data
from compressive.data.location import ImageData
from compressive.data.several import place_of
from compressive.data.source import (
    ImageSource,
    NoSplit,
    Source,
    fetch_ahead,
    subset,
    without_labels,
)
from compressive.data.sources import open_source
from compressive.data.splits import stratified
from compressive.rundir.places import describe_places

STAND_IN = " held out"  # suffix of a data set that is evaluated on training images


class Splits(NamedTuple):
    """Train and test images of an evaluation."""

    name: str
    train: Source
    test: Source
    notes: tuple[str, ...] = ()
    held_out: bool = False  # test is a part of train, for tuning

    @property
    def classes(self) -> int:
        """Number of classes; 0 if train has no labels."""
        if not _has_labels(self.train):
            return 0
        known = [s.labels for s in (self.train, self.test) if s.labels is not None]
        named = max(len(s.classes or ()) for s in (self.train, self.test))
        return max([named, *(int(labels.max()) + 1 for labels in known)])


def open_splits(
    place: ImageData,
    *,
    seed: int,
    most: int = 0,
    held_out: bool = False,
    max_pixels: int = Data().max_pixels,
    labels: bool = True,
) -> Splits:
    """Open train and test; without a test split, hold out a fifth of the images, drawn by the seed.

    Drop unlabeled images if a split is partly labeled. `most` bounds the images of each split,
    drawn by the seed. `held_out` replaces test by a fifth of train, so that settings can be tuned.
    `labels=False` ignores labels.
    """
    whole, notes = open_source(place, "train", max_pixels=max_pixels), []
    where = describe_places(place_of(place))
    name = f"{whole.name}{STAND_IN}" if held_out else whole.name
    test = _test_split(place, whole, max_pixels)
    if not labels:
        whole, test = without_labels(whole), None if test is None else without_labels(test)
    train = _labeled(whole, "train", notes)
    if test is None:
        train, test = _without_a_fifth(train, seed)
        notes.append(
            f"no test split in {where}: a fifth of its images, drawn by seed {seed}, is the test "
            "split; an encoder trained on this data has seen these images, without labels"
        )
    if held_out:
        train, test = _without_a_fifth(train, seed)
        notes.append(f"held out of {where}: a fifth of its training images, drawn by seed {seed}")
    else:
        test = _labeled(test, "test", notes)
    if most:
        train, test = _subsample(train, most, seed), _subsample(test, most, seed + 1)
        notes.append(f"at most {most:,} images per split, drawn by seed {seed}")
    return Splits(name, train, test, tuple(notes), held_out)


def _has_labels(source: Source) -> bool:
    """Return whether any image has a label."""
    return source.labels is not None and bool((source.labels >= 0).any())


def _labeled(source: Source, split: str, notes: list[str]) -> Source:
    """Drop unlabeled images if the source is partly labeled."""
    if source.labels is None or not _has_labels(source):
        return source
    there = (source.labels >= 0).nonzero()[:, 0]
    if len(there) == len(source):
        return source
    notes.append(f"left out of {split}: {len(source) - len(there):,} images without a label")
    return subset(source, there)


def _without_a_fifth(source: Source, seed: int) -> tuple[Source, Source]:
    labels = torch.zeros(len(source)) if source.labels is None else source.labels
    kept, held = stratified(labels.long(), 0.2, seed=seed)
    return subset(source, kept), subset(source, held)


def _test_split(place: ImageData, train: Source, max_pixels: int) -> Source | None:
    """Return the first test split; it must have labels if train has them."""
    for name in ("test", "val", "validation"):
        try:
            found = open_source(place, name, max_pixels=max_pixels)
        except NoSplit:
            continue
        # A single file is returned for every split.
        if found.origin(0) == train.origin(0) and len(found) == len(train):
            continue
        if train.labels is None or _has_labels(found):
            return _renumbered(found, train.classes)
    return None


def _renumbered(source: Source, names: tuple[str, ...] | None) -> Source:
    """Use the class numbers of train; classes that train lacks come after them."""
    own, labels = source.classes, source.labels
    if own is None or names is None or own == names or labels is None:
        return source
    every = [*names, *(name for name in own if name not in names)]
    number = torch.tensor([every.index(name) for name in own])
    return ImageSource(
        name=source.name,
        count=len(source),
        read=source.image,
        place=source.origin,
        ahead=lambda indices: fetch_ahead(source, indices),
        labels=torch.where(labels < 0, labels, number[labels.clamp(min=0)]),
        classes=tuple(every),
    )


def _subsample(source: Source, most: int, seed: int) -> Source:
    if len(source) <= most:
        return source
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))
    return subset(source, order[:most].sort().values)
