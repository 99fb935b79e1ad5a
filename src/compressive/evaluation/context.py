"""An encoder, a set with labels, and what has been computed of the two so far."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment.ops import MEAN, STD, colors, normalize
from compressive.data.decode import Unreadable
from compressive.data.loaders import Batch, open_loader
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source
from compressive.data.splits import stratified
from compressive.device import precision
from compressive.evaluation.dataset import Splits
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
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Results
from compressive.progress import Display

_LOOKED_AT = 64  # images whose pixels stand for those of their set
HELD = 10_000  # training images on which things are chosen, at ImageNet's size; else a tenth

Classifier = Callable[[Float[Tensor, "batch feat"]], Float[Tensor, "batch classes"]]


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


class EvalContext:
    """What every task needs: images on the device, features, the parts of train, the record."""

    def __init__(
        self,
        subject: FrozenModel,
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
        self.task = ""  # that is being done
        self._loaders: dict[str, Loader] = {}
        self._features: dict[str, Features] = {}
        self._pixels: dict[str, str] = {}

    @property
    def classes(self) -> int:
        """Number of classes; 0 where nothing can be learned."""
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
            **self.subject.shrinking(),
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
        portions = (BatchIndices(some, torch.zeros_like(some)) for some in parts)
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
        return {**self.seen(), "precision": dtype, **notes, **more}

    def seen(self) -> dict[str, Any]:
        """What the network sees of an image, in words."""
        return {**self.crop.words(), **self.subject.shrinking()}

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

    def skip(self, text: str, place: str = "") -> None:
        """Leave something out, and say so at the end; place: where, if not in the present task."""
        if text not in self.results.skipped:
            self.results.skipped.append(text)
        self.results.skipped_in[text] = place or f"{self.task} on {self.splits.name}"

    def tell(self, title: str, done: float, total: float) -> None:
        """Progress."""
        self.display.progress(title, done, total)

    def close(self) -> None:
        """End threads."""
        for loader in self._loaders.values():
            loader.close()
