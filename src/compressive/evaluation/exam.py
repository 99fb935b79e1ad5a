"""An encoder, a set with labels, and what has been computed of the two so far."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment import MEAN, STD, colors, normalize
from compressive.data.decode import Unreadable
from compressive.data.loaders import Batch, open_loader
from compressive.data.pictures import NoSplit, Pictures, Source, subset
from compressive.data.plan import Portion
from compressive.data.sources import open_source
from compressive.data.splits import stratified
from compressive.display import Display
from compressive.evaluation.features import (
    BATCH,
    Crop,
    Features,
    Loader,
    cached,
    content_of,
    extract,
)
from compressive.evaluation.features import fingerprint as content_of_weights
from compressive.evaluation.results import Results
from compressive.evaluation.subject import Subject
from compressive.learner import precision

_LOOKED_AT = 64  # images whose pixels stand for those of their set
HELD_OUT = " held out"  # ends the name of a set whose training images stand for its test images
HELD = 10_000  # training images on which things are chosen, at ImageNet's size; else a tenth

Classifier = Callable[[Float[Tensor, "batch feat"]], Float[Tensor, "batch classes"]]


class Splits(NamedTuple):
    """A set to judge by."""

    name: str
    train: Source
    test: Source
    notes: tuple[str, ...] = ()
    held_out: bool = False  # test is a part of train, to choose by

    @property
    def classes(self) -> int:
        """How many; 0 where nothing can be learned, as train has no labels."""
        if not _has_labels(self.train):
            return 0
        known = [s.labels for s in (self.train, self.test) if s.labels is not None]
        named = max(len(s.classes or ()) for s in (self.train, self.test))
        return max([named, *(int(labels.max()) + 1 for labels in known)])


def open_splits(place: str, *, seed: int, most: int = 0, held_out: bool = False) -> Splits:
    """Train and test images of a place; without a test split a seeded fifth of it is one.

    Where some images of a split have labels, the others are left out. most: images of each split,
    if there are more, drawn by the seed. held_out: a fifth of train is in the place of test, so
    that settings can be chosen by the results.
    """
    whole, notes = open_source(place, "train"), []
    name = f"{whole.name}{HELD_OUT}" if held_out else whole.name
    test, train = _test_split(place, whole), _labeled(whole, "train", notes)
    if test is None:
        train, test = _without_a_fifth(train, seed)
        notes.append(
            f"no test split in {place}: a fifth of its images, drawn by seed {seed}, which a run "
            "on them has seen, without labels"
        )
    if held_out:
        train, test = _without_a_fifth(train, seed)
        notes.append(f"held out of {place}: a fifth of its training images, drawn by seed {seed}")
    else:
        test = _labeled(test, "test", notes)
    if most:
        train, test = _some(train, most, seed), _some(test, most, seed + 1)
        notes.append(f"at most {most:,} images of a split, drawn by seed {seed}")
    return Splits(name, train, test, tuple(notes), held_out)


def _has_labels(source: Source) -> bool:
    """Whether any of its images has one."""
    return source.labels is not None and bool((source.labels >= 0).any())


def _labeled(source: Source, split: str, notes: list[str]) -> Source:
    """Its images with a label, where any has one: of others no answer is right or wrong."""
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


def _test_split(place: str, train: Source) -> Source | None:
    """The first of the splits to test on that has labels, if train has; others hide theirs."""
    for name in ("test", "val", "validation"):
        try:
            found = open_source(place, name)
        except NoSplit:
            continue
        # One file alone is every split that it is asked for.
        if found.origin(0) == train.origin(0) and len(found) == len(train):
            continue
        if train.labels is None or _has_labels(found):
            return _renumbered(found, train.classes)
    return None


def _renumbered(source: Source, names: tuple[str, ...] | None) -> Source:
    """The same images with the class numbers of train; classes that it lacks come after them."""
    own, labels = source.classes, source.labels
    if own is None or names is None or own == names or labels is None:
        return source
    every = [*names, *(name for name in own if name not in names)]
    number = torch.tensor([every.index(name) for name in own])
    return Pictures(
        name=source.name,
        count=len(source),
        read=source.image,
        place=source.origin,
        labels=torch.where(labels < 0, labels, number[labels.clamp(min=0)]),
        classes=tuple(every),
    )


def _some(source: Source, most: int, seed: int) -> Source:
    if len(source) <= most:
        return source
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))
    return subset(source, order[:most].sort().values)


def named(
    source: Source, places: Iterable[int], labels: Int[Tensor, " count"] | None, pixels: str
) -> str:
    """A short name for images of a source, wherever it lies: by names, labels and some pixels."""
    names = "\n".join(Path(source.origin(i)).name for i in places)
    digest = hashlib.blake2b(f"{names}\n{pixels}".encode(errors="backslashreplace"), digest_size=16)
    digest.update(b"" if labels is None else labels.numpy().tobytes())
    return digest.hexdigest()


def some_pixels(source: Source) -> str:
    """A short name for what some images of a source show.

    Sets with the same names for other pictures are common: one stored as JPEG, and one not.
    """
    digest = hashlib.blake2b(digest_size=16)
    for i in range(0, len(source), -(-len(source) // _LOOKED_AT)):
        try:
            digest.update(source.image(i).contiguous().numpy().tobytes())
        except Unreadable:
            digest.update(b"unreadable")
    return digest.hexdigest()


class Exam:
    """What every task needs: images on the device, features, the parts of train, the record."""

    def __init__(
        self,
        subject: Subject,
        splits: Splits,
        results: Results,
        *,
        device: torch.device,
        seed: int = 0,
        cache: Path | None = None,
        display: Display | None = None,
        share: float | None = None,
        bf16: bool | None = None,
    ) -> None:
        self.subject, self.splits, self.results = subject, splits, results
        self.device, self.seed, self.cache = device, seed, cache
        self.display = display or Display(quiet=True)
        self.dtype = precision("auto" if bf16 is None else "bf16" if bf16 else "float32", device)
        self.crop = subject.crop(share)
        self.classifier: Classifier | None = None  # that of the linear evaluation
        self.head: dict[str, object] = {}  # how it was trained
        self._loaders: dict[str, Loader] = {}
        self._features: dict[str, Features] = {}
        self._pixels: dict[str, str] = {}

    @property
    def classes(self) -> int:
        """How many."""
        return self.splits.classes

    def source(self, split: str) -> Source:
        """Train or test images."""
        return self.splits.train if split == "train" else self.splits.test

    def loader(self, split: str) -> Loader:
        """The images of a split in reach of the device."""
        if split not in self._loaders:
            source, side = self.subject.fitted(self.source(split))
            self._loaders[split] = open_loader(
                source,
                side=side,
                device=self.device,
                progress=lambda done, total: self.tell(f"decoding {split}", done, total),
            )
        return self._loaders[split]

    def features(self, split: str) -> Features:
        """Of the central crops of train or test; kept, as most tasks ask for them."""
        if split not in self._features:
            found = self.features_of(self.source(split), self.loader(split), self.crop, split)
            self._features[split] = found
        return self._features[split]

    def features_of(self, source: Source, loader: Loader, crop: Crop, title: str) -> Features:
        """From the cache if the same were asked for before."""
        key = {
            "weights": content_of_weights(self.subject.network),
            "data": content_of(loader, source.origin, len(source), source.labels),
            "crop": tuple(crop),
            "precision": str(self.dtype),
            "device": self.device.type,
        }

        def make() -> Features:
            return extract(
                self.subject.network,
                loader,
                len(source),
                crop,
                precision=self.dtype,
                progress=lambda done, total: self.tell(f"features of {title}", done, total),
            )

        found = cached(self.cache, key, make, self.device)
        if len(found.feats) < len(source):
            self.skip(f"{len(source) - len(found.feats)} images of {title} that cannot be read")
        return Features(*(part.to(self.device) for part in found))

    def read(self, source: Source, crop: Crop, title: str) -> Features:
        """Features of another set, whose images are let go afterwards."""
        fitted, side = self.subject.fitted(source)
        with open_loader(fitted, side=side, device=self.device) as loader:
            return self.features_of(source, loader, crop, title)

    @cached_property
    def parts(self) -> tuple[Int[Tensor, " fit"], Int[Tensor, " held"]]:
        """Rows of the train features to learn from, and those to choose by: stratified, seeded."""
        labels = self.features("train").labels.cpu()
        kept, held = stratified(labels, min(0.1, HELD / len(labels)), seed=self.seed)
        return kept.to(self.device), held.to(self.device)

    def batches(self, split: str, size: int = BATCH) -> Iterator[Batch]:
        """The images of a split in their order."""
        return self.some(split, torch.arange(len(self.source(split))), size)

    def some(self, split: str, places: Int[Tensor, " some"], size: int = BATCH) -> Iterator[Batch]:
        """These images of a split; what cannot be read is left out, not replaced."""
        parts = places.split(size)
        portions = (Portion(some, torch.zeros_like(some)) for some in parts)
        for wanted, batch in zip(parts, self.loader(split).batches(portions), strict=True):
            if self.loader(split).unreadable:
                there = batch.index == wanted.to(batch.index.device)
                batch = Batch(*(part[there] for part in batch))
            yield batch

    def recolored(self, views: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch 3 h w"]:
        """Views normalized as in pretraining, as the subject wants them."""
        mean, std = self.subject.mean, self.subject.std
        if (mean, std) == (MEAN, STD):
            return views
        return normalize(colors(views), mean=mean, std=std)

    def protocol(self, **more: Any) -> dict[str, Any]:
        """What is recorded with every number of this set."""
        notes = {"notes": list(self.splits.notes)} if self.splits.notes else {}
        dtype = str(self.dtype).removeprefix("torch.")
        seen = {**self.crop.words(), **self.subject.shrinking()}
        return {**seen, "precision": dtype, **notes, **more}

    def images(self, split: str, index: Int[Tensor, " some"] | None = None) -> str:
        """A short name for some images of a split, on whichever machine and device."""
        source = self.source(split)
        places = range(len(source)) if index is None else index.tolist()
        if split not in self._pixels:
            self._pixels[split] = some_pixels(source)
        return named(source, places, source.labels, self._pixels[split])

    @cached_property
    def content(self) -> str:
        """A short name for the set as it was opened, and for what is drawn of it."""
        return f"{self.images('train')} {self.images('test')} {self.seed}"

    def skip(self, text: str) -> None:
        """Leave something out, and say so at the end."""
        self.results.skipped.append(text)

    def tell(self, title: str, done: float, total: float) -> None:
        """Progress."""
        self.display.progress(title, done, total)

    def close(self) -> None:
        """End threads."""
        for loader in self._loaders.values():
            loader.close()
